"""Standardisation of draws, and sums of Stein features over runs of consecutive draws.

All sums are accumulated in float64 on the host, chunk by chunk: no array of draws by features
ever exists beyond one chunk. Draws are standardised before a polynomial is taken of them, so that
an offset that is large beside the spread (1e4, say, in float32) does not cancel digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import scipy.linalg

from ppl_ext.diagnostics.draws import ScoredDraws
from ppl_ext.diagnostics.features import FloatArray, SteinBasis
from ppl_ext.errors import TooFewDrawsError

Standardize = Literal["diag", "full"] | None

_CHUNK_BYTES = 4 * 2**20


def _chunks(scored: ScoredDraws, columns: int) -> Iterator[slice]:
    """Yield slices of the draws of all chains in a row, `columns` float64 numbers a draw."""
    n = scored.finite.size
    rows = int(np.clip(_CHUNK_BYTES // (8 * columns), 256, 2**14))
    for start in range(0, n, rows):
        yield slice(start, min(start + rows, n))


@dataclass(frozen=True)
class Standardization:
    """The affine map y = L^{-1} (x - m), under which scores become L^T s.

    Attributes
    ----------
    mean
        m, shape (d,).
    scale
        L: shape (d,) if it is diagonal, else (d, d), lower triangular.
    """

    mean: FloatArray
    scale: FloatArray

    def __call__(
        self, x: npt.NDArray[np.floating], score: npt.NDArray[np.floating]
    ) -> tuple[FloatArray, FloatArray]:
        """Return draws and scores of shape (n, d) in the new coordinates, shape (d, n)."""
        centred = np.ascontiguousarray((x.astype(np.float64) - self.mean).T)
        s = np.ascontiguousarray(score.astype(np.float64).T)
        if self.scale.ndim == 1:
            return centred / self.scale[:, None], s * self.scale[:, None]
        return scipy.linalg.solve_triangular(self.scale, centred, lower=True), self.scale.T @ s


def standardization(scored: ScoredDraws, kind: Standardize) -> Standardization:
    """Return the map to zero mean and unit variance, from the moments of all chains together.

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
        return Standardization(np.zeros(d), np.ones(d))
    x, finite = scored.draws.reshape(-1, d), scored.finite.reshape(-1)
    mean: FloatArray = np.zeros(d)
    for rows in _chunks(scored, d):
        mean += x[rows][finite[rows]].sum(axis=0, dtype=np.float64)
    mean /= scored.n_draws
    second: FloatArray = np.zeros((d, d) if kind == "full" else d)
    for rows in _chunks(scored, d):
        centred = x[rows][finite[rows]].astype(np.float64) - mean
        second += centred.T @ centred if kind == "full" else np.square(centred).sum(axis=0)
    second /= scored.n_draws

    variance = second.diagonal() if kind == "full" else second
    # A sum of equal numbers may miss n times the number by rounding.
    constant = np.flatnonzero(variance <= (1e-14 * np.abs(mean)) ** 2)
    if constant.size:
        raise TooFewDrawsError(
            f"the draws of {scored.labels[constant[0]]!r} are all the same, so that there is no "
            "scale to standardise it by: the chains did not move, or there is a single draw"
        )
    if kind == "diag":
        return Standardization(mean, np.sqrt(second))
    try:
        factor = np.linalg.cholesky(second).astype(np.float64)
    except np.linalg.LinAlgError:
        factor = np.zeros_like(second)
    # A squared diagonal entry is the variance of a coordinate given those before it.
    if np.any(factor.diagonal() ** 2 <= 1e-12 * variance):
        raise TooFewDrawsError(
            f'standardize="full" needs the covariance of {d} coordinates, which is singular for '
            f'these {scored.n_draws} draws: take more draws, or standardize="diag"'
        )
    return Standardization(mean, factor)


@dataclass(frozen=True)
class FeatureSums:
    """Sums of Stein features over segments of consecutive draws.

    Attributes
    ----------
    sums
        Shape (segments, features): sum over the finite draws of each segment.
    squares
        Shape (features,): sum of the squared features over all finite draws.
    """

    sums: FloatArray
    squares: FloatArray


def feature_sums(
    scored: ScoredDraws,
    transform: Standardization,
    basis: SteinBasis,
    starts: npt.NDArray[np.intp],
) -> FeatureSums:
    """Sum the features over segments of the draws of all chains in a row.

    `starts` are the indices, ascending from 0, at which a segment begins. A draw that is not
    finite counts as zero, the mean of every feature under the target.
    """
    d = scored.dimension
    x, s = scored.draws.reshape(-1, d), scored.scores.reshape(-1, d)
    finite = scored.finite.reshape(-1)
    sums = np.zeros((len(starts), len(basis)))
    squares = np.zeros(len(basis))
    for rows in _chunks(scored, len(basis)):
        keep = finite[rows]
        if keep.all():
            features = basis(*transform(x[rows], s[rows]))
        else:
            features = np.zeros((len(basis), len(keep)))
            features[:, keep] = basis(*transform(x[rows][keep], s[rows][keep]))
        first = int(np.searchsorted(starts, rows.start, side="right")) - 1
        last = int(np.searchsorted(starts, rows.stop, side="left"))
        local = np.maximum(starts[first:last] - rows.start, 0)
        sums[first:last] += np.add.reduceat(features, local, axis=1).T
        squares += np.einsum("jn,jn->j", features, features)
    return FeatureSums(sums, squares)
