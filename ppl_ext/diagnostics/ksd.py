"""The kernel Stein discrepancy, quadratic in the number of draws: a yardstick for `psd`."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ppl_ext._arviz import FilterVars
from ppl_ext.diagnostics.draws import UNCONSTRAINED, ScoredDraws, read
from ppl_ext.diagnostics.features import FloatArray
from ppl_ext.diagnostics.moments import Standardization, Standardize, standardization


def ksd(
    data: Any,
    score: Any = None,
    *,
    sample_dims: str | Sequence[str] | None = None,
    group: str = UNCONSTRAINED,
    var_names: str | Sequence[str] | None = None,
    filter_vars: FilterVars = None,
    coords: Mapping[Hashable, Any] | None = None,
    standardize: Standardize = "diag",
    joint: bool = False,
    per_chain: bool = False,
    unbiased: bool = False,
    block: int = 256,
    weights: Any = None,
    chain_axis: int | None = 0,
    draw_axis: int = 1,
) -> Any:
    r"""Kernel Stein discrepancy (KSD) of draws from their target, for each scalar.

    With the inverse multiquadric kernel :math:`k(x, y) = (1 + |x - y|^2)^{-1/2}`, whose
    discrepancy vanishes only if the draws come from the target (Gorham and Mackey, Measuring
    sample quality with kernels, 2017, theorem 8), it is the square root of the mean over all pairs
    of draws of

    .. math::

        k_p(x, y) = s(x)\cdot s(y)\,k + s(x)\cdot\nabla_y k + s(y)\cdot\nabla_x k
                    + \nabla_x\cdot\nabla_y k.

    Time is quadratic in the number of draws; memory is that of one block of pairs.

    Parameters
    ----------
    data, score, sample_dims, group, var_names, filter_vars, coords, weights, chain_axis, draw_axis
        As for `psd`.
    standardize
        As for `psd`: the kernel has length scale one in standardised units.
    joint
        Return one value with a kernel of all coordinates instead of one per scalar, with a kernel
        of that coordinate alone.
    per_chain
        Keep the chains apart instead of pooling them.
    unbiased
        Return the U-statistic of the square instead, from pairs of different draws. It can be
        negative.
    block
        Number of draws on each side of a block of pairs.

    Returns
    -------
    As for `psd`; under the name ``ksd`` if `joint`.

    Raises
    ------
    MissingScoresError, TooFewDrawsError, ValueError
        As for `psd`; ValueError if `block` is not positive.

    Warns
    -----
    UserWarning
        If draws that are not finite were left out, or scalars whose scores are all zero.

    Examples
    --------
    Draws of a standard normal whose scale is 10 % too large, the second coordinate only:

    >>> import numpy as np
    >>> from ppl_ext.diagnostics import ksd
    >>> x = np.random.default_rng(1).normal(size=(4, 250, 2)) * [1.0, 1.1]
    >>> ksd(x, -x).round(2)
    array([0.05, 0.1 ])
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    scored, restore = read(
        data,
        score,
        sample_dims=sample_dims,
        group=group,
        var_names=var_names,
        filter_vars=filter_vars,
        coords=coords,
        chain_axis=chain_axis,
        draw_axis=draw_axis,
        weights=weights,
    )
    for notice in scored.exclusion_notices():
        warnings.warn(f"ksd: {notice}", stacklevel=2)
    transform = standardization(scored, standardize)
    parts = list(scored.chains()) if per_chain else [scored]
    values = np.array([_discrepancies(part, transform, joint, unbiased, block) for part in parts])
    if not per_chain:
        values = values[0]
    if not joint:
        return restore(scored.to_dataset(values))
    return restore(scored.joint_dataset("ksd", values[..., 0]))


def _discrepancies(
    scored: ScoredDraws, transform: Standardization, joint: bool, unbiased: bool, block: int
) -> FloatArray:
    """Return the joint discrepancy, shape (1,), or that of each coordinate, shape (d,)."""
    finite = scored.finite
    x, s = transform(scored.draws[finite], scored.scores[finite])
    w = np.ones(x.shape[1]) if scored.weights is None else scored.weights[finite]
    coordinates = [slice(None)] if joint else [slice(j, j + 1) for j in range(len(x))]
    found = np.empty(len(coordinates))
    with np.errstate(invalid="ignore", divide="ignore"):  # a chain may have no finite draw
        for i, at in enumerate(coordinates):
            total, diagonal = _sums_over_pairs(x[at].T, s[at].T, w, block)
            if unbiased:
                found[i] = (total - diagonal) / (w.sum() ** 2 - np.square(w).sum())
            else:
                found[i] = np.sqrt(total) / w.sum()
    return found


def _sums_over_pairs(
    x: FloatArray, s: FloatArray, w: FloatArray, block: int
) -> tuple[float, float]:
    """Return the weighted sums of k_p over all pairs, and over those of a draw with itself."""
    n, d = x.shape
    square, inner = np.einsum("nj,nj->n", x, x), np.einsum("nj,nj->n", s, x)
    # At x = y the kernel is 1, its gradients vanish and the last term is d.
    diagonal = float(np.square(w) @ (np.einsum("nj,nj->n", s, s) + d))
    total = 0.0
    for i in range(0, n, block):
        a = slice(i, i + block)
        for j in range(0, i + 1, block):
            b = slice(j, j + block)
            distance = np.maximum(
                square[a, None] + square[b] - 2 * (x[a] @ x[b].T), 0.0
            )  # |x - y|^2
            # (s(x) - s(y)) . (x - y)
            difference = inner[a, None] + inner[b] - s[a] @ x[b].T - x[a] @ s[b].T
            # With q = 1 / (1 + |x - y|^2) and k = q^{1/2}: grad_x k = -k q (x - y) = -grad_y k.
            q = 1 / (1 + distance)
            k_p = np.sqrt(q) * (s[a] @ s[b].T + q * (difference + d - 3 * q * distance))
            total += (1.0 if i == j else 2.0) * float(w[a] @ k_p @ w[b])
    return total, diagonal
