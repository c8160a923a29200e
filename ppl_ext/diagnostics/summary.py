"""ArviZ's summary table with the polynomial Stein discrepancy of every row."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics.batches import feature_series
from ppl_ext.diagnostics.draws import UNCONSTRAINED, read
from ppl_ext.diagnostics.features import Basis, FloatArray, SteinBasis
from ppl_ext.diagnostics.moments import Standardize, standardization
from ppl_ext.diagnostics.svi import order_for

_DECIMALS = {"psd": 3, "psd_t": 2}


def summary(
    data: Any,
    var_names: str | Sequence[str] | None = None,
    filter_vars: _arviz.FilterVars = None,
    coords: Mapping[Hashable, Any] | None = None,
    *,
    order: int | None = None,
    basis: Basis = "hermite",
    standardize: Standardize = "diag",
    round_to: int | str | None = None,
    **kwargs: Any,
) -> pd.DataFrame:
    """Return ``arviz.summary`` of the posterior with two Stein columns.

    ``psd`` is the marginal discrepancy of the row's unconstrained coordinate (see `psd`), which
    Monte Carlo error makes large where coordinates are strongly correlated. ``psd_t`` is the
    largest of |mean / MCSE| over the Stein features of degree 1 to `order` of the coordinate: a
    value above 4 says that the draws are biased by more than Monte Carlo error explains.

    The rows of a site whose unconstrained shape differs from its own (simplices, correlation
    matrices) all show the site's worst coordinate. Both columns are NaN for discrete and
    deterministic sites, and for scalars on which the density does not depend (all their scores
    are zero: NumPyro's latent values for data that ``obs_mask`` marks as observed).

    Parameters
    ----------
    data
        InferenceData (ArviZ 0.2x) or DataTree (ArviZ 1.x) with a posterior and the groups
        ``unconstrained_posterior`` and ``unconstrained_posterior_score``.
    var_names, filter_vars, coords
        Selection of variables and coordinates, as in ``arviz.summary``.
    order
        Highest degree of the features: by default 2, or 3 for the draws of `from_svi`.
    basis, standardize
        As for `psd`.
    round_to
        As for ``arviz.summary``: decimals, or ``"none"``. By default ``psd`` has 3 decimals and
        ``psd_t`` 2.
    **kwargs
        Further arguments of the installed ArviZ's ``summary``, except ``fmt`` and ``group``.

    Raises
    ------
    MissingScoresError
        If there are no scores.
    TooFewDrawsError
        If a coordinate has no spread, or the chains are shorter than four draws.
    TypeError
        If `data` is no container of groups, or ``fmt`` or ``group`` is given.

    Warns
    -----
    UserWarning
        If draws or scalars were left out of the Stein columns, or if `order` is too low
        for the draws of `from_svi`.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from ppl_ext import _arviz
    >>> from ppl_ext.diagnostics import summary
    >>> mu = np.random.default_rng(1).normal(size=(4, 500))
    >>> draws = xr.Dataset({"mu": (("chain", "draw"), mu)})
    >>> data = _arviz.from_groups({"posterior": draws, "unconstrained_posterior": draws,
    ...                            "unconstrained_posterior_score": -draws})
    >>> float(summary(data).loc["mu", "psd_t"])
    0.6
    """
    if not _arviz.is_container(data):
        raise TypeError(
            f"data must be an arviz {_arviz.container_type().__name__} with a posterior and "
            f"scores, got {type(data).__name__}"
        )
    for name in ("fmt", "group"):
        if name in kwargs:
            raise TypeError(
                f"summary got {name}={kwargs[name]!r}: the Stein columns belong to the rows of the "
                "posterior's wide table; use arviz.summary for others"
            )
    posterior = _arviz.get_group(data, "posterior")
    if posterior is None:
        raise ValueError(
            f"the data have no group 'posterior' (groups: {', '.join(_arviz.group_names(data))})"
        )
    order = order_for(data, order, "summary")
    stein = _stein_columns(data, order, basis, standardize)
    selected = _arviz.select(posterior, var_names, filter_vars, coords)
    if round_to is not None:
        kwargs["round_to"] = round_to
    table = _arviz.arviz().summary(
        data, var_names=list(selected.data_vars), coords=coords, group="posterior", **kwargs
    )
    for column, values in stein.items():
        rows = [_rows(posterior[name], values, coords) for name in selected.data_vars]
        table[column] = np.concatenate(rows)
        if isinstance(round_to, str) and round_to.lower() == "none":
            continue
        table[column] = table[column].round(
            round_to if isinstance(round_to, int) else _DECIMALS[column]
        )
    return table


def _stein_columns(
    data: Any, order: int, basis: Basis, standardize: Standardize
) -> dict[str, xr.Dataset]:
    """Return psd and the worst |t| of every unconstrained coordinate."""
    scored, _ = read(
        data,
        None,
        sample_dims=None,
        group=UNCONSTRAINED,
        var_names=None,
        filter_vars=None,
        coords=None,
        chain_axis=0,
        draw_axis=1,
    )
    for notice in scored.exclusion_notices():
        warnings.warn(f"summary: {notice}", stacklevel=3)
    features = SteinBasis(scored.dimension, order, False, basis)
    series = feature_series(scored, standardization(scored, standardize), features)

    # Without interactions the features are ordered by degree, then by coordinate.
    def by_degree(values: FloatArray) -> FloatArray:
        return values.reshape(order, scored.dimension)

    worst = np.abs(by_degree(series.t(series.mcse))).max(axis=0)
    return {
        "psd": scored.to_dataset(np.linalg.norm(by_degree(series.mean), axis=0)),
        "psd_t": scored.to_dataset(worst),
    }


def _rows(
    variable: xr.DataArray, values: xr.Dataset, coords: Mapping[Hashable, Any] | None
) -> FloatArray:
    """Return the values for the rows that `variable` has in the table, in their order."""
    sample_dims = _arviz.default_sample_dims()
    element = variable.isel({dim: 0 for dim in sample_dims}, drop=True)
    found = values.get(variable.name)
    if found is None:
        rows = xr.full_like(element, np.nan, dtype=float)
    elif found.dims == element.dims and found.shape == element.shape:
        rows = found
    else:
        rows = xr.full_like(element, float(found.max()), dtype=float)
    own = {} if coords is None else {dim: at for dim, at in coords.items() if dim in rows.dims}
    return np.atleast_1d(rows.sel(own).values).reshape(-1)
