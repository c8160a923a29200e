"""The polynomial Stein discrepancy of draws from a density with a known score."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ppl_ext._arviz import FilterVars
from ppl_ext.diagnostics.draws import UNCONSTRAINED, read
from ppl_ext.diagnostics.features import Basis, SteinBasis
from ppl_ext.diagnostics.moments import Standardize, feature_sums, standardization
from ppl_ext.diagnostics.svi import order_for


def psd(
    data: Any,
    score: Any = None,
    *,
    sample_dims: str | Sequence[str] | None = None,
    group: str = UNCONSTRAINED,
    var_names: str | Sequence[str] | None = None,
    filter_vars: FilterVars = None,
    coords: Mapping[Hashable, Any] | None = None,
    order: int | None = None,
    basis: Basis = "hermite",
    standardize: Standardize = "diag",
    interactions: bool = False,
    joint: bool = False,
    per_chain: bool = False,
    unbiased: bool = False,
    weights: Any = None,
    chain_axis: int | None = 0,
    draw_axis: int = 1,
) -> Any:
    r"""Polynomial Stein discrepancy (PSD) of draws from their target, for each scalar.

    The discrepancy is the Euclidean norm of the means of Stein features: polynomials under an
    operator built from the score, whose expectations vanish when the draws come from the target
    (arXiv 2412.05135, equation 9). It measures bias, which neither R-hat nor the effective sample
    size can see; it is blind to mixing (chains that all stay in one of two far modes pass), so
    read it beside those two. The time is linear in the number of draws.

    Parameters
    ----------
    data
        Unconstrained draws: an array (chain, draw, ...), DataArray, Dataset, or an InferenceData
        (ArviZ 0.2x) or DataTree (ArviZ 1.x) with the groups `group` and ``f"{group}_score"``.
    score
        Gradient of the log density of the unconstrained coordinates at the draws, with the log
        Jacobian of the constraining transformation in that density; in the form of `data`. With a
        container: a Dataset that replaces the score group. Or that log density itself, a function
        of one draw in JAX or in torch that returns a single number: it is given the draw as an
        array if `data` is an array or DataArray, else as a dict of its variables. (In JAX the
        gradients have the precision of ``jax_enable_x64``; torch goes draw by draw.)
    sample_dims
        Dimensions of chains and draws, or of draws alone. Default: ArviZ's.
    group
        Group of the unconstrained draws in a container.
    var_names, filter_vars, coords
        Selection of variables and coordinates, as in ``arviz.ess``.
    order
        Highest degree r of the polynomials: by default 2, or 3 for the draws of `from_svi`.
    basis
        ``"hermite"``: orthonormal Hermite polynomials, each feature divided by its degree.
        ``"monomial"``: the paper's.
    standardize
        ``"diag"``: every coordinate to mean 0 and standard deviation 1. ``"full"``: whitened, by
        the symmetric square root of the correlation matrix; the value of a coordinate is then
        that of the whitened coordinate closest to it. None: as they are; the value then depends
        on units and on offsets. The moments are always those of all chains.
    interactions
        Whether the products of several coordinates count. If so, the value of a coordinate is
        over all features in which it takes part; without them, over its own powers alone, and a
        wrong correlation cannot be seen. There are C(d + r, d) - 1 features with interactions.
    joint
        Return one value over the features of all selected variables instead of one per scalar.
    per_chain
        Keep the chains apart instead of pooling them.
    unbiased
        Return the U-statistic of the squared discrepancy (equation 10) instead: for independent
        draws its expectation is the square of the discrepancy of their distribution, and it can
        be negative.
    weights
        Importance weights of the draws, up to a factor: an array (chain, draw), or (draw,) where
        there are no chains, or a DataArray with the sample dimensions. Means are then weighted.
    chain_axis, draw_axis
        Axes of a plain array; `chain_axis` may be None.

    Returns
    -------
    The type that ``arviz.ess`` of the installed ArviZ returns for `data`, without the sample
    dimensions (with the chain dimension if `per_chain`); under the name ``psd`` if `joint`. In
    standardised units: with the Hermite basis, the value of a normal coordinate that does not
    depend on the others is about 0.1 if its mean is off by 0.1 standard deviations. Where
    coordinates are strongly correlated, ``"diag"`` leaves scores that vary far more than the
    draws, and large values come from Monte Carlo error alone: compare with `psd_test`.

    Raises
    ------
    MissingScoresError
        If there are no scores.
    TooFewDrawsError
        If a coordinate has no spread, or ``"full"`` meets a singular covariance.
    ValueError
        If an option is unknown, or draws and scores do not match.

    Warns
    -----
    UserWarning
        If draws that are not finite were left out, or scalars whose scores are all zero.

    Notes
    -----
    For a Gaussian target and the full basis, the discrepancy is zero exactly if all moments up to
    degree r agree (Proposition 1 of the paper). For other targets no such statement holds: for a
    Laplace target, say, orders 1 to 3 see only the means of sign(x) and of abs(x). At the optimum
    of a Gaussian variational family the features of degree 1 and 2 vanish whatever the quality of
    the fit, so that an order of at least 3 is needed there. With Student-t tails of nu degrees of
    freedom, a feature of degree k has a mean if nu > k - 2, and a variance if nu > 2 (k - 2).

    Examples
    --------
    Draws of a standard normal whose scale is 10 % too large, the second coordinate only:

    >>> import numpy as np
    >>> from ppl_ext.diagnostics import psd
    >>> x = np.random.default_rng(1).normal(size=(4, 1000, 2)) * [1.0, 1.1]
    >>> psd(x, -x).round(2)
    array([0.  , 0.14])

    The statistic of the paper:

    >>> options = {"joint": True, "interactions": True, "basis": "monomial", "standardize": None}
    >>> float(psd(x, -x, **options).round(2))
    0.4
    """
    if interactions not in (True, False):
        raise ValueError(f"interactions must be True or False, got {interactions!r}")
    order = order_for(data, order, "psd", group=group)
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
    features = SteinBasis(scored.dimension, order, interactions, basis)
    transform = standardization(scored, standardize)
    for notice in scored.exclusion_notices():
        warnings.warn(f"psd: {notice}", stacklevel=2)
    start = np.zeros(1, dtype=np.intp)
    parts = list(scored.chains()) if per_chain else [scored]
    found = [feature_sums(part, transform, features, start, unbiased) for part in parts]
    sums = np.concatenate([part.sums for part in found])
    squares = np.stack([part.squares for part in found])
    w = [part.finite if part.weights is None else part.weights for part in parts]
    totals = np.array([[part.sum()] for part in w])
    square_totals = np.array([[np.square(part).sum(dtype=float)] for part in w])
    with np.errstate(invalid="ignore", divide="ignore"):  # a chain may have no finite draw
        if unbiased:
            squared = (sums**2 - squares) / (totals**2 - square_totals)
        else:
            squared = (sums / totals) ** 2

    total = squared.sum(axis=-1) if joint else features.coordinate_sums(squared)
    values = total if unbiased else np.sqrt(total)
    values = values if per_chain else values[0]
    if not joint:
        return restore(scored.to_dataset(values))
    return restore(scored.joint_dataset("psd", np.asarray(values)))
