r"""Matrix Stein moments and their weighted sum (lambda-PSD, arXiv 2606.26621).

With elementwise powers :math:`x^{\circ k}` of a draw and its score :math:`s`, the matrices

.. math::

    M_0 = \overline{s}, \qquad
    M_k = \overline{s\,(x^{\circ k})^\top} + k\,\mathrm{diag}(\overline{x^{\circ(k-1)}})

of means over some of the draws are zero in expectation under the target. Scaled to a joint
Frobenius norm of one, they are directions in which the other draws are tested, by

.. math::

    g_0(x) = s\cdot M_0, \qquad
    g_k(x) = s^\top M_k\, x^{\circ k} + k\,\mathrm{diag}(M_k)\cdot x^{\circ(k-1)}

and :math:`u = \lambda\cdot g`, whose mean is zero under the target whatever M and lambda are. There
are :math:`r` numbers per draw for order :math:`r` where the polynomials have of the order of
:math:`d^r`, at the price of :math:`d^2` products: this is for many coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ppl_ext.diagnostics.batches import feature_series
from ppl_ext.diagnostics.draws import ScoredDraws
from ppl_ext.diagnostics.features import FloatArray
from ppl_ext.diagnostics.moments import Standardization, finite_chunks


@dataclass(frozen=True)
class MatrixMoments:
    """The functions g_0, ..., g_{r-1} and u.

    Attributes
    ----------
    vector
        M_0, shape (d,).
    matrices
        M_1, ..., M_{r-1}, shape (r - 1, d, d).
    weights
        lambda, shape (r,).
    """

    vector: FloatArray
    matrices: FloatArray
    weights: FloatArray

    def __len__(self) -> int:
        return len(self.weights) + 1

    def __call__(self, x: FloatArray, score: FloatArray) -> FloatArray:
        """Return g and u, shape (r + 1, n), at arrays of shape (d, n)."""
        g = np.empty((len(self), x.shape[1]))
        g[0] = self.vector @ score
        power = np.ones_like(x)
        for k, matrix in enumerate(self.matrices, start=1):
            lower, power = power, power * x
            g[k] = np.einsum("jn,jn->n", matrix.T @ score, power) + k * matrix.diagonal() @ lower
        g[-1] = self.weights @ g[:-1]
        return g

    def labels(self, coordinate_labels: object) -> list[str]:
        """Return a name for each function; the coordinates have none of their own."""
        return [*(f"moment of degree {k + 1}" for k in range(len(self.weights))), "weighted sum"]


def matrix_moments(scored: ScoredDraws, transform: Standardization, order: int) -> MatrixMoments:
    """Return the moments of some draws, with lambda = (1, ..., 1)."""
    d = scored.dimension
    vector, matrices = np.zeros(d), np.zeros((order - 1, d, d))
    for x, s, w in finite_chunks(scored, 2 * d):
        y, score = transform(x, s)
        weight = np.ones(len(x)) if w is None else w[:, 0]
        weighted = score * weight
        vector += weighted.sum(axis=1)
        power = np.ones_like(y)
        for k, matrix in enumerate(matrices, start=1):
            lower, power = power, power * y
            matrix += weighted @ power.T
            np.einsum("jj->j", matrix)[:] += k * lower @ weight
    norm = np.sqrt(np.square(vector).sum() + np.square(matrices).sum())
    return MatrixMoments(vector / norm, matrices / norm, np.ones(order))


def with_fitted_weights(
    moments: MatrixMoments, scored: ScoredDraws, transform: Standardization
) -> MatrixMoments:
    """Return the moments with the lambda that maximises mean(u)^2 / var(u) over some draws."""
    series = feature_series(scored, transform, moments)
    g = series.pieces.reshape(-1, len(moments))[:, :-1]
    covariance = np.atleast_2d(np.cov(g.T))
    weights = np.linalg.lstsq(covariance, series.mean[:-1], rcond=1e-10)[0]
    return replace(moments, weights=weights / np.linalg.norm(weights))
