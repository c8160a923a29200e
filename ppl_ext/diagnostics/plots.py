"""Pictures of the polynomial Stein discrepancy, beside those that ArviZ has of R-hat and ESS.

They are drawn on matplotlib's axes, in the style that is in force (``arviz.style.use``), with the
names that ``arviz.summary`` gives to scalars. Monte Carlo error alone makes a discrepancy of about
the norm of the standard errors of its features; every picture shows that level.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ppl_ext._arviz import FilterVars
from ppl_ext.diagnostics.batches import feature_series
from ppl_ext.diagnostics.draws import UNCONSTRAINED, ScoredDraws, read
from ppl_ext.diagnostics.features import Basis, FloatArray, SteinBasis
from ppl_ext.diagnostics.goodness_of_fit import most_features
from ppl_ext.diagnostics.moments import Standardize, standardization
from ppl_ext.diagnostics.svi import order_for

LARGE_T = 4
"""|t| above which a scalar is marked: its bias is more than Monte Carlo error explains."""


def pyplot(caller: str) -> ModuleType:
    """Return ``matplotlib.pyplot``, imported on behalf of `caller`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib, which is not installed: pip install 'ppl-ext[plots]'"
        ) from error
    return pyplot


def plot_psd(
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
    ax: Any = None,
) -> Any:
    """Draw the marginal discrepancy of every scalar.

    One row a scalar: a dot at its discrepancy, and a grey bar as long as the discrepancy that
    Monte Carlo error alone makes on average. The dot is red where a Stein feature of the scalar
    is more than 4 standard errors from zero (`summary` has the numbers).

    Parameters
    ----------
    data, score, sample_dims, group, var_names, filter_vars, coords, basis, standardize
        As for `psd`.
    order
        Highest degree of the features: by default 2, or 3 for the draws of `from_svi`.
    ax
        Matplotlib axes to draw on; by default, new ones.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is missing.
    MissingScoresError, TooFewDrawsError, ValueError
        As for `psd`.

    Examples
    --------
    >>> import numpy as np
    >>> from ppl_ext.diagnostics import plot_psd
    >>> x = np.random.default_rng(1).normal(size=(4, 1000, 2)) * [1.0, 1.2]
    >>> ax = plot_psd(x, -x)
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['x[0]', 'x[1]']
    """
    plt = pyplot("plot_psd")
    order = order_for(data, order, "plot_psd", group=group)
    scored = _read(data, score, "plot_psd", sample_dims, group, var_names, filter_vars, coords)
    features = SteinBasis(scored.dimension, order, False, basis)
    series = feature_series(scored, standardization(scored, standardize), features)
    mcse = series.mcse
    psd, noise = (np.sqrt(features.coordinate_sums(values**2)) for values in (series.mean, mcse))
    # without interactions the features are ordered by degree, then by coordinate
    worst = np.abs(series.t(mcse)).reshape(order, scored.dimension).max(axis=0)

    rows = np.arange(scored.dimension)
    if ax is None:
        ax = plt.subplots(figsize=(6.4, 1.2 + 0.25 * len(rows)), layout="constrained")[1]
    ax.barh(rows, noise, height=0.6, color="0.85", label="from Monte Carlo error")
    for large, color, label in ((False, "C0", f"|t| up to {LARGE_T}"), (True, "C3", "|t| above")):
        chosen = (worst > LARGE_T) == large
        if chosen.any():
            ax.plot(psd[chosen], rows[chosen], "o", color=color, label=label)
    ax.set_yticks(rows, scored.labels)
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel(f"PSD of order {order}")
    ax.legend()
    return ax


def plot_psd_order(
    data: Any,
    score: Any = None,
    *,
    sample_dims: str | Sequence[str] | None = None,
    group: str = UNCONSTRAINED,
    var_names: str | Sequence[str] | None = None,
    filter_vars: FilterVars = None,
    coords: Mapping[Hashable, Any] | None = None,
    max_order: int = 4,
    interactions: bool | Literal["auto"] = "auto",
    basis: Basis = "hermite",
    standardize: Standardize = "diag",
    ax: Any = None,
) -> Any:
    """Draw the joint discrepancy against its order.

    The order at which the curve leaves the level of Monte Carlo error (dashed) says what is wrong:
    1 the means, 2 scales and correlations, 3 skewness, 4 tails. For the draws of a Gaussian guide
    at its optimum (`from_svi`), orders 1 and 2 show nothing whatever the fit.

    Parameters
    ----------
    data, score, sample_dims, group, var_names, filter_vars, coords, basis, standardize
        As for `psd`.
    max_order
        Highest order to draw.
    interactions
        Whether to take products of several coordinates. ``"auto"``: if there are at most 2,000
        features at `max_order` then, and five draws for each.
    ax
        Matplotlib axes to draw on; by default, new ones.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is missing.
    MissingScoresError, TooFewDrawsError, ValueError
        As for `psd`.

    Examples
    --------
    >>> import numpy as np
    >>> from ppl_ext.diagnostics import plot_psd_order
    >>> x = np.random.default_rng(1).normal(size=(4, 1000, 2)) * [1.0, 1.2]
    >>> ax = plot_psd_order(x, -x)
    >>> ax.lines[0].get_ydata().round(2)
    array([0.03, 0.3 , 0.31, 0.31])
    """
    plt = pyplot("plot_psd_order")
    caller = "plot_psd_order"
    scored = _read(data, score, caller, sample_dims, group, var_names, filter_vars, coords)
    features = SteinBasis(scored.dimension, max_order, interactions is not False, basis)
    if interactions == "auto" and len(features) > most_features(scored.n_draws):
        features = SteinBasis(scored.dimension, max_order, False, basis)
    series = feature_series(scored, standardization(scored, standardize), features)
    degrees = np.concatenate([np.full(len(at), sum(k)) for k, at in features.patterns])
    orders = np.arange(1, max_order + 1)

    def up_to_each_order(values: FloatArray) -> FloatArray:
        by_degree = np.bincount(degrees, values**2, minlength=max_order + 1)[1:]
        return np.sqrt(np.cumsum(by_degree))

    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    ax.plot(orders, up_to_each_order(series.mean), "o-", color="C0", label="discrepancy")
    noise = up_to_each_order(series.mcse)
    ax.plot(orders, noise, "--", color="gray", label="from Monte Carlo error")
    kind = "with" if features.interactions else "without"
    ax.set_xticks(orders)
    ax.set_ylim(bottom=0)
    ax.set(xlabel="order", ylabel=f"joint PSD, {kind} interactions")
    ax.legend()
    return ax


def _read(
    data: Any,
    score: Any,
    caller: str,
    sample_dims: str | Sequence[str] | None,
    group: str,
    var_names: str | Sequence[str] | None,
    filter_vars: FilterVars,
    coords: Mapping[Hashable, Any] | None,
) -> ScoredDraws:
    """Return the draws, with a warning on behalf of `caller` of those that are not finite."""
    scored, _ = read(
        data,
        score,
        sample_dims=sample_dims,
        group=group,
        var_names=var_names,
        filter_vars=filter_vars,
        coords=coords,
        chain_axis=0,
        draw_axis=1,
    )
    for notice in scored.exclusion_notices():
        warnings.warn(f"{caller}: {notice}", stacklevel=3)
    return scored
