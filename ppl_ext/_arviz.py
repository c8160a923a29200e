"""ArviZ, whichever generation is installed.

ArviZ 0.2x keeps the result of a run in an ``InferenceData``, ArviZ 1.x in an
``xarray.DataTree``. The rest of the package works on xarray datasets and calls this module to
take them out of a container and to put them back, so that nothing else asks for a version.

ArviZ is imported when first needed: version 0.2x pulls in matplotlib.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import xarray as xr

FilterVars = Literal["like", "regex"] | None


@functools.cache
def arviz() -> ModuleType:
    """Return the module ``arviz``, imported without the announcement that 0.2x makes of 1.x."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz as az
    return az


def has_inference_data() -> bool:
    """Whether the installed ArviZ keeps its groups in ``InferenceData`` (0.2x).

    ArviZ 1.x has an alias ``arviz.InferenceData`` too, so only the version number can tell.
    """
    return int(arviz().__version__.split(".")[0]) < 1


def container_type() -> type[Any]:
    """Return the class that holds the groups of a run: ``InferenceData`` or ``DataTree``."""
    return arviz().InferenceData if has_inference_data() else xr.DataTree


def is_container(data: object) -> bool:
    """Whether `data` is the installed ArviZ's container of groups."""
    return isinstance(data, container_type())


def from_groups(groups: Mapping[str, xr.Dataset]) -> Any:
    """Return an ``InferenceData`` or ``DataTree`` with one group for each dataset.

    >>> import xarray as xr
    >>> from ppl_ext import _arviz
    >>> data = _arviz.from_groups({"posterior": xr.Dataset({"mu": (("chain", "draw"), [[1.0]])})})
    >>> _arviz.group_names(data)
    ('posterior',)
    """
    if has_inference_data():
        return container_type()(**groups)
    return xr.DataTree.from_dict(dict(groups))


def group_names(data: Any) -> tuple[str, ...]:
    """Return the names of the groups of a container."""
    return tuple(data.groups()) if has_inference_data() else tuple(data.children)


def get_group(data: Any, name: str) -> xr.Dataset | None:
    """Return the group `name` of a container as a dataset, or None if there is none."""
    if name not in group_names(data):
        return None
    group = data[name]
    return group.to_dataset() if isinstance(group, xr.DataTree) else group


def with_groups(data: Any, groups: Mapping[str, xr.Dataset]) -> Any:
    """Return a container like `data` in which `groups` are added or replaced.

    `data` itself is left as it is; the values of its other groups are shared, not copied.
    """
    if has_inference_data():
        kept = {name: data[name] for name in data.groups()}
        return container_type()(attrs=data.attrs, **(kept | dict(groups)))
    new = data.copy()
    for name, dataset in groups.items():
        new[name] = xr.DataTree(dataset)
    return new


def select(
    dataset: xr.Dataset,
    var_names: str | Sequence[str] | None = None,
    filter_vars: FilterVars = None,
    coords: Mapping[Hashable, Any] | None = None,
) -> xr.Dataset:
    """Return the variables and coordinates that ArviZ's arguments of these names select."""
    if var_names is not None:
        wanted: dict[str, Any] = {
            "var_names": [var_names] if isinstance(var_names, str) else list(var_names),
            "filter_vars": filter_vars,
        }
        if has_inference_data():
            dataset = arviz().extract(dataset, combined=False, keep_dataset=True, **wanted)
        else:
            arviz()  # which registers the accessor
            dataset = dataset.azstats.filter_vars(**wanted).dataset
    return dataset if coords is None else dataset.sel(coords)


def default_sample_dims() -> tuple[str, ...]:
    """Return the dimensions that ArviZ takes for the chains and the draws."""
    if has_inference_data():
        return ("chain", "draw")
    dims = arviz().rcParams["data.sample_dims"]
    return (dims,) if isinstance(dims, str) else tuple(dims)


def statistic_like(data: object, values: xr.Dataset, group: str) -> Any:
    """Return per-variable `values` in the type that ``arviz.ess`` returns for `data`.

    ArviZ 0.2x answers a dataset whatever it is given; 1.x answers a ``DataArray`` for a
    ``DataArray`` and a node of a ``DataTree`` for a ``DataTree``. `data` is no plain array here.
    """
    if has_inference_data():
        return values
    if isinstance(data, xr.DataArray):
        (name,) = values.data_vars
        return values[name].rename(data.name)
    if isinstance(data, xr.DataTree):
        return from_groups({group: values})[group]
    return values


def ess(series: xr.DataArray) -> xr.DataArray:
    """Return the effective sample size for the mean of each series in (chain, draw, ...)."""
    found: xr.Dataset = arviz().ess(series.to_dataset(name="series"), method="mean")
    return found["series"]


def pareto_k(log_weights: Any) -> float:
    """Return the Pareto shape of the largest of importance weights (PSIS)."""
    values = xr.DataArray(log_weights, dims=["sample"])
    if has_inference_data():
        return float(arviz().psislw(values.values)[1])
    arviz()  # which registers the accessor; it takes log likelihoods, the weights' negatives
    return float((-values).azstats.psislw(dim="sample")[1])
