r"""Stein features: functions whose expectation under the target is zero.

The second-order Langevin Stein operator of a density :math:`p` with score
:math:`s = \nabla\log p` maps a function :math:`g` to

.. math:: (\mathcal{A} g)(x) = \Delta g(x) + \nabla g(x)\cdot s(x),

and :math:`E_p[\mathcal{A} g] = 0` when :math:`p\,\nabla g` vanishes at infinity (Srinivasan,
Sutton, Drovandi and South, arXiv 2412.05135). Here :math:`g` runs over the products
:math:`P_a(x) = \prod_j P_{a_j}(x_j)` of total degree :math:`1 \le |a| \le r`, so that with
:math:`D_k(x, s) = P_k''(x) + s P_k'(x)`

.. math::

    \mathcal{A} P_a(x) = \sum_{j \in a} D_{a_j}(x_j, s_j) \prod_{k \in a, k \ne j} P_{a_k}(x_k).

``basis="monomial"`` takes :math:`P_k(x) = x^k`, the paper's choice. ``basis="hermite"`` takes
the orthonormal :math:`P_k = He_k/\sqrt{k!}` and divides each feature by its degree: under a
standard normal target :math:`\mathcal{A} He_a = -|a| He_a`, so the features then have unit
covariance, where those of monomials of degree :math:`k` have variances that grow like
:math:`k^2 k!`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Basis = Literal["hermite", "monomial"]


class Pattern(NamedTuple):
    """The multi-indices that share one sequence of non-zero degrees.

    Attributes
    ----------
    degrees
        Degree of each factor, in the order of the coordinates; m of them.
    coordinates
        Shape (features, m): the coordinates of each feature's factors, ascending.
    """

    degrees: tuple[int, ...]
    coordinates: npt.NDArray[np.intp]


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every sequence of `parts` positive integers that sums to `total`."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(end - start for start, end in itertools.pairwise(ends))


@functools.lru_cache(maxsize=32)
def _patterns(dimension: int, order: int, interactions: bool) -> tuple[Pattern, ...]:
    found = []
    for degree in range(1, order + 1):
        for parts in range(1, (min(degree, dimension) if interactions else 1) + 1):
            factors = list(itertools.combinations(range(dimension), parts))
            coordinates = np.array(factors, dtype=np.intp).reshape(-1, parts)
            coordinates.flags.writeable = False
            found += [Pattern(degrees, coordinates) for degrees in _compositions(degree, parts)]
    return tuple(found)


def n_features(dimension: int, order: int, interactions: bool) -> int:
    """Return how many features a basis has: C(d + r, d) - 1 with interactions, else d r.

    >>> n_features(10, 2, interactions=True), n_features(10, 2, interactions=False)
    (65, 20)
    """
    return math.comb(dimension + order, order) - 1 if interactions else dimension * order


@dataclass(frozen=True)
class SteinBasis:
    """The polynomials of d variables up to a total degree, under the Stein operator.

    Parameters
    ----------
    dimension
        Number of coordinates, d.
    order
        Highest total degree, r.
    interactions
        Whether to take the products of several coordinates too.
    family
        ``"hermite"`` or ``"monomial"``: see the module's text.

    Raises
    ------
    ValueError
        If `order` is no positive integer or `family` is unknown.

    Examples
    --------
    The six products of degree 1 and 2 in two variables have five features at a point:

    >>> import numpy as np
    >>> basis = SteinBasis(2, order=2, interactions=True, family="monomial")
    >>> basis.labels(["x", "y"])
    ['x', 'y', 'x^2', 'y^2', 'x*y']
    >>> point = np.array([[2.0], [3.0]])
    >>> basis(point, -point)[:, 0]
    array([ -2.,  -3.,  -6., -16., -12.])
    """

    dimension: int
    order: int
    interactions: bool
    family: Basis = "hermite"

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or not isinstance(self.order, int) or self.order < 1:
            raise ValueError(f"order must be a positive integer, got {self.order!r}")
        if self.family not in get_args(Basis):
            raise ValueError(f"basis must be one of {get_args(Basis)}, got {self.family!r}")

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The multi-indices of all features, each once."""
        return _patterns(self.dimension, self.order, self.interactions)

    def __len__(self) -> int:
        return n_features(self.dimension, self.order, self.interactions)

    def __call__(self, x: FloatArray, score: FloatArray) -> FloatArray:
        """Return the features, shape (len(self), n), of points `x` and scores of shape (d, n)."""
        values, images = self._tables(x, score)
        d, n = x.shape
        features = np.empty((len(self), n))
        products: dict[tuple[int, ...], FloatArray] = {}  # of the P alone
        blocks: dict[tuple[int, ...], FloatArray] = {}
        stop = 0
        for degrees, coordinates in self.patterns:
            start, stop = stop, stop + len(coordinates)
            block = blocks[degrees] = features[start:stop]
            (k, *others), total = degrees, sum(degrees)
            if not others:
                products[degrees] = values[k]
                np.multiply(images[k], 1 / total if self.family == "hermite" else 1, out=block)
                continue
            # Coordinates ascend, so that those with first coordinate j continue with the last
            # features of the pattern without j, and A(P Q) = A(P) Q + P A(Q) for P of x_j alone.
            rest = tuple(others)
            value_scale, image_scale = 1.0, 1.0
            if self.family == "hermite":
                value_scale, image_scale = (total - k) / total, 1 / total
            product = np.empty_like(block) if total < self.order else None
            row = 0
            for j in range(d - len(rest)):
                size = math.comb(d - 1 - j, len(rest))
                at, row = slice(row, row + size), row + size
                np.multiply(image_scale * images[k][j], products[rest][-size:], out=block[at])
                block[at] += (value_scale * values[k][j]) * blocks[rest][-size:]
                if product is not None:
                    np.multiply(values[k][j], products[rest][-size:], out=product[at])
            if product is not None:
                products[degrees] = product
        return features

    def traced(self, x: jax.Array, score: jax.Array) -> jax.Array:
        """Return what a call does, inside a program that JAX compiles.

        It gathers the factors of all features of a pattern at once, which XLA fuses into the
        products; the loops of a call would be unrolled into thousands of operations.
        """
        values, images = self._tables(x, score)
        blocks = []
        for degrees, coordinates in self.patterns:
            block = jnp.zeros((len(coordinates), x.shape[1]), x.dtype)
            for i in range(len(degrees)):
                term = images[degrees[i]][coordinates[:, i]]
                for j, degree in enumerate(degrees):
                    if j != i:
                        term = term * values[degree][coordinates[:, j]]
                block += term
            blocks.append(block / sum(degrees) if self.family == "hermite" else block)
        return jnp.concatenate(blocks)

    def _tables(self, x: Any, score: Any) -> tuple[list[Any], list[Any]]:
        """Return P_k(x) and P_k''(x) + score P_k'(x) for k = 0, ..., order."""
        values, images = [1.0 + 0.0 * x, x], [0.0 * x, score]
        if self.family == "monomial":
            for k in range(2, self.order + 1):
                images.append(k * ((k - 1) * values[k - 2] + values[k - 1] * score))
                values.append(values[k - 1] * x)
        else:
            # With h_k = He_k / sqrt(k!): sqrt(k) h_k = x h_{k-1} - sqrt(k-1) h_{k-2},
            # h_k' = sqrt(k) h_{k-1} and h_k'' = sqrt(k (k-1)) h_{k-2}.
            for k in range(2, self.order + 1):
                a, b = math.sqrt(k), math.sqrt(k - 1)
                images.append(a * (b * values[k - 2] + values[k - 1] * score))
                values.append((x * values[k - 1] - b * values[k - 2]) / a)
        return values, images

    def coordinate_sums(self, feature_values: FloatArray) -> FloatArray:
        """Return, for each coordinate, the sum over the features in which it takes part.

        `feature_values` has shape (..., len(self)); the result has shape (..., dimension).
        """
        sums = np.zeros((self.dimension, *feature_values.shape[:-1]))
        by_feature = np.moveaxis(feature_values, -1, 0)
        stop = 0
        for _, coordinates in self.patterns:
            start, stop = stop, stop + len(coordinates)
            for column in coordinates.T:
                np.add.at(sums, column, by_feature[start:stop])
        return np.moveaxis(sums, 0, -1)

    def labels(self, coordinate_labels: Sequence[str]) -> list[str]:
        """Return a name such as ``mu^2*theta[Choate]`` for each feature."""
        return [
            "*".join(
                coordinate_labels[j] if degree == 1 else f"{coordinate_labels[j]}^{degree}"
                for j, degree in zip(row, degrees, strict=True)
            )
            for degrees, coordinates in self.patterns
            for row in coordinates
        ]
