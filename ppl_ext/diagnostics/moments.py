"""Standardisation of draws, and sums of Stein features over runs of consecutive draws.

All sums are accumulated in float64 on the host, chunk by chunk: no array of draws by features
ever exists beyond one chunk. Draws are standardised before a polynomial is taken of them, so that
an offset that is large beside the spread (1e4, say, in float32) does not cancel digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from ppl_ext.diagnostics.draws import ScoredDraws
from ppl_ext.diagnostics.features import FloatArray
from ppl_ext.errors import TooFewDrawsError

Standardize = Literal["diag", "full"] | None

_CHUNK_BYTES = 2**19


def _chunks(scored: ScoredDraws, columns: int) -> Iterator[slice]:
    """Yield slices of the draws of all chains in a row, `columns` float64 numbers a draw."""
    n = scored.finite.size
    rows = int(np.clip(_CHUNK_BYTES // (8 * columns), 256, 2**14))
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
        centred = np.ascontiguousarray((x.astype(np.float64) - self.mean).T)
        s = np.ascontiguousarray(score.astype(np.float64).T)
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
        centred = x.astype(np.float64) - mean
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
        Shape (features,): sum of the squares of features times weights over all finite draws.
    """

    sums: FloatArray
    squares: FloatArray


def feature_sums(
    scored: ScoredDraws,
    transform: Standardization,
    features: Features,
    starts: npt.NDArray[np.intp],
) -> FeatureSums:
    """Sum the features over segments of the draws of all chains in a row.

    `starts` are the indices, ascending from 0, at which a segment begins. A draw that is not
    finite counts as zero, the mean of every feature under the target.
    """
    d = scored.dimension
    x, s = scored.draws.reshape(-1, d), scored.scores.reshape(-1, d)
    finite = scored.finite.reshape(-1)
    weights = None if scored.weights is None else scored.weights.reshape(-1)
    sums = np.zeros((len(starts), len(features)))
    squares = np.zeros(len(features))
    for rows in _chunks(scored, len(features)):
        keep = finite[rows]
        if keep.all():
            values = features(*transform(x[rows], s[rows]))
        else:
            values = np.zeros((len(features), len(keep)))
            values[:, keep] = features(*transform(x[rows][keep], s[rows][keep]))
        if weights is not None:
            values *= weights[rows]
        first = int(np.searchsorted(starts, rows.start, side="right")) - 1
        last = int(np.searchsorted(starts, rows.stop, side="left"))
        local = np.maximum(starts[first:last] - rows.start, 0)
        sums[first:last] += np.add.reduceat(values, local, axis=1).T
        squares += np.einsum("jn,jn->j", values, values)
    return FeatureSums(sums, squares)
