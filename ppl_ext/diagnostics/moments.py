"""Standardisation of draws, and sums of Stein features over runs of consecutive draws.

All sums are accumulated in float64 on the host, chunk by chunk: no array of draws by features
ever exists beyond one chunk, which a GPU evaluates if JAX has one. Draws are standardised before a
polynomial is taken of them, so that an offset that is large beside the spread (1e4, say, in
float32) does not cancel digits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ppl_ext.diagnostics.draws import ScoredDraws
from ppl_ext.diagnostics.features import FloatArray, SteinBasis
from ppl_ext.errors import TooFewDrawsError

Standardize = Literal["diag", "full"] | None

_CHUNK_BYTES = 2**20
"""Features of a chunk on the host: they fit into a core's cache."""

_DEVICE_BYTES = 2**27
"""Features of a chunk on a device."""

_DEVICE_NUMBERS = 2**24
"""Fewest features times draws for which a device is used."""


def _chunks(scored: ScoredDraws, columns: int, size: int = _CHUNK_BYTES) -> Iterator[slice]:
    """Yield slices of the draws of all chains in a row, `columns` float64 numbers a draw."""
    n = scored.finite.size
    rows = max(256, min(size // (8 * columns), size // 32))
    for start in range(0, n, rows):
        yield slice(start, min(start + rows, n))


@dataclass(frozen=True)
class Standardization:
    """The affine map y = A^{-1} (x - m), under which scores become A^T s.

    Attributes
    ----------
    mean
        m, shape (d,).
    scale, inverse
        A and its inverse: shape (d,) if they are diagonal, else (d, d).
    """

    mean: FloatArray
    scale: FloatArray
    inverse: FloatArray

    def __call__(
        self, x: npt.NDArray[np.floating], score: npt.NDArray[np.floating]
    ) -> tuple[FloatArray, FloatArray]:
        """Return draws and scores of shape (n, d) in the new coordinates, shape (d, n)."""
        centred = np.ascontiguousarray((x.astype(np.float64, copy=False) - self.mean).T)
        s = np.ascontiguousarray(score.T, dtype=np.float64)
        if self.scale.ndim == 1:
            return centred * self.inverse[:, None], s * self.scale[:, None]
        return self.inverse @ centred, self.scale.T @ s


def finite_chunks(
    scored: ScoredDraws, columns: int
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any], FloatArray | None]]:
    """Yield the finite draws and scores, shape (n, d), and their weights, shape (n, 1), in chunks.

    `columns` is how many float64 numbers per draw the caller makes of them.
    """
    d = scored.dimension
    x, s = scored.draws.reshape(-1, d), scored.scores.reshape(-1, d)
    finite = scored.finite.reshape(-1)
    weights = None if scored.weights is None else scored.weights.reshape(-1, 1)
    for rows in _chunks(scored, columns):
        w = None if weights is None else weights[rows]
        keep = finite[rows]
        if keep.all():
            yield x[rows], s[rows], w
        else:
            yield x[rows][keep], s[rows][keep], None if w is None else w[keep]


def standardization(scored: ScoredDraws, kind: Standardize) -> Standardization:
    r"""Return the map to zero mean and unit variance, from the moments of all chains together.

    ``"full"`` takes the symmetric square root of the correlation matrix P, with the standard
    deviations V^{1/2}: :math:`A = V^{1/2} P^{1/2}` (ZCA-cor of Kessy, Lewin and Strimmer, The
    American Statistician 72, 2018). Of all whitening maps it is the one under which every
    coordinate stays as close as possible to what it was, and it does not depend on their order.

    Raises
    ------
    ValueError
        If `kind` is unknown.
    TooFewDrawsError
        If a coordinate is constant, or if the covariance matrix that ``"full"`` needs is singular.
    """
    if kind not in (None, *get_args(get_args(Standardize)[0])):
        raise ValueError(f'standardize must be "diag", "full" or None, got {kind!r}')
    d = scored.dimension
    if kind is None:
        return Standardization(np.zeros(d), np.ones(d), np.ones(d))
    mean: FloatArray = np.zeros(d)
    for x, _, w in finite_chunks(scored, d):
        mean += (x if w is None else w * x).sum(axis=0, dtype=np.float64)
    mean /= scored.total_weight
    second: FloatArray = np.zeros((d, d) if kind == "full" else d)
    for x, _, w in finite_chunks(scored, d):
        centred = x.astype(np.float64, copy=False) - mean
        times_weight = centred if w is None else w * centred
        if kind == "full":
            second += times_weight.T @ centred
        else:
            second += np.einsum("nj,nj->j", times_weight, centred)
    second /= scored.total_weight

    variance = second.diagonal() if kind == "full" else second
    # A sum of equal numbers may miss n times the number by rounding.
    constant = np.flatnonzero(variance <= (1e-14 * np.abs(mean)) ** 2)
    if constant.size:
        raise TooFewDrawsError(
            f"the draws of {scored.labels[constant[0]]!r} are all the same, so that there is no "
            "scale to standardise it by: the chains did not move, or there is a single draw"
        )
    sd = np.sqrt(variance)
    if kind == "diag":
        return Standardization(mean, sd, 1 / sd)
    eigenvalues, vectors = np.linalg.eigh(second / np.outer(sd, sd))
    if eigenvalues[0] <= 1e-12 * d:
        raise TooFewDrawsError(
            f'standardize="full" needs the covariance of {d} coordinates, which is singular for '
            f'these {scored.n_draws} draws: take more draws, or standardize="diag"'
        )
    root = (vectors * np.sqrt(eigenvalues)) @ vectors.T
    inverse_root = (vectors / np.sqrt(eigenvalues)) @ vectors.T
    return Standardization(mean, sd[:, None] * root, inverse_root / sd)


class Features(Protocol):
    """J functions of standardised draws and scores."""

    def __len__(self) -> int: ...

    def __call__(self, x: FloatArray, score: FloatArray) -> FloatArray:
        """Return their values, shape (J, n), at arrays of shape (d, n)."""


@dataclass(frozen=True)
class FeatureSums:
    """Sums of features over segments of consecutive draws.

    Attributes
    ----------
    sums
        Shape (segments, features): weighted sum over the finite draws of each segment.
    squares
        Shape (features,): sum of the squares of features times weights over all finite draws;
        zero if they were not asked for.
    """

    sums: FloatArray
    squares: FloatArray


def feature_sums(
    scored: ScoredDraws,
    transform: Standardization,
    features: Features,
    starts: npt.NDArray[np.intp],
    with_squares: bool = True,
) -> FeatureSums:
    """Sum the features over segments of the draws of all chains in a row.

    `starts` are the indices, ascending from 0, at which a segment begins. A draw that is not
    finite counts as zero, the mean of every feature under the target.

    Where JAX's default device is no CPU, the polynomials of many draws are evaluated there, in
    the precision of ``jax_enable_x64``: draws are standardised before, and the sums over each
    chunk are added up after, in float64 on the host.
    """
    d = scored.dimension
    x, s = scored.draws.reshape(-1, d), scored.scores.reshape(-1, d)
    finite = scored.finite.reshape(-1)
    weights = None if scored.weights is None else scored.weights.reshape(-1)
    sums = np.zeros((len(starts), len(features)))
    squares = np.zeros(len(features))
    chunk_sums: Callable[..., tuple[FloatArray, FloatArray | float]] = _host_sums
    size = _CHUNK_BYTES
    if isinstance(features, SteinBasis) and _worth_a_device(finite.size * len(features)):
        chunk_sums, size = _device_sums, _DEVICE_BYTES
    for rows in _chunks(scored, len(features), size):
        first = int(np.searchsorted(starts, rows.start, side="right")) - 1
        last = int(np.searchsorted(starts, rows.stop, side="left"))
        local = np.maximum(starts[first:last] - rows.start, 0)
        keep = finite[rows]
        w: npt.NDArray[Any] | None = None if weights is None else weights[rows]
        if keep.all():
            y, score = transform(x[rows], s[rows])
        else:
            y, score = np.zeros((2, d, len(keep)))
            y[:, keep], score[:, keep] = transform(x[rows][keep], s[rows][keep])
            w = keep if w is None else w
        of_segments, of_squares = chunk_sums(features, y, score, w, local, with_squares)
        sums[first:last] += of_segments
        squares += of_squares
    return FeatureSums(sums, squares)


def _host_sums(
    features: Features,
    x: FloatArray,
    score: FloatArray,
    weights: npt.NDArray[Any] | None,
    starts: npt.NDArray[np.intp],
    with_squares: bool,
) -> tuple[FloatArray, FloatArray | float]:
    """Return the sums of one chunk over its segments, and those of the squares."""
    values = features(x, score)
    if weights is not None:
        values *= weights
    if len(starts) == 1:
        sums = values.sum(axis=1)[None]
    else:
        sums = np.add.reduceat(values, starts, axis=1).T
    return sums, np.einsum("jn,jn->j", values, values) if with_squares else 0.0


def _worth_a_device(numbers: int) -> bool:
    """Return whether so many features times draws repay the compilation for a device."""
    return numbers >= _DEVICE_NUMBERS and jax.default_backend() != "cpu"


def _device_sums(
    features: SteinBasis,
    x: FloatArray,
    score: FloatArray,
    weights: npt.NDArray[Any] | None,
    starts: npt.NDArray[np.intp],
    with_squares: bool,
) -> tuple[FloatArray, FloatArray | float]:
    """Return what `_host_sums` does, by JAX, and the squares in any case."""
    n = x.shape[1]
    # Shapes that are powers of two are compiled once; what fills them up has no weight.
    rows, segments = (1 << int(length - 1).bit_length() for length in (n, len(starts)))
    w = np.zeros(rows)
    w[:n] = 1.0 if weights is None else weights
    segment = np.zeros(rows, dtype=np.int32)
    segment[starts[1:]] = 1
    x, score = (np.pad(of, ((0, 0), (0, rows - n))) for of in (x, score))
    sums, squares = _sums_by_segment(features, segments, x, score, w, segment.cumsum())
    return np.asarray(sums, np.float64)[: len(starts)], np.asarray(squares, np.float64)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums_by_segment(
    features: SteinBasis,
    n_segments: int,
    x: jax.Array,
    score: jax.Array,
    weights: jax.Array,
    segment: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    values = features.traced(x, score) * weights
    sums = jax.ops.segment_sum(values.T, segment, n_segments, indices_are_sorted=True)
    return sums, jnp.sum(values**2, axis=1)
