"""Unconstrained draws and their scores from the constrained draws of any model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics.draws import UNCONSTRAINED, score_group
from ppl_ext.target import Site

Values = dict[str, npt.NDArray[Any]]
Groups = dict[str, xr.Dataset]

_DRAWS_AT_ONCE = 256


def attach_scores(data: Any, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `data` with the unconstrained draws of its posterior and their scores added.

    The score is the gradient of the model's log joint density of the unconstrained coordinates,
    with the log Jacobian of the constraining transformation. It is computed a few hundred draws
    at a time. Deterministic sites are left out: they are functions of the others.

    Parameters
    ----------
    data
        InferenceData (ArviZ 0.2x) or DataTree (ArviZ 1.x) with a posterior that holds every
        latent site of the model; it is left as it is.
    model
        The model that the draws are of.
    *args, **kwargs
        Arguments of the model, with its data.

    Returns
    -------
    A container like `data` with the groups ``unconstrained_posterior`` and
    ``unconstrained_posterior_score``. A site of the same shape on both sides keeps its dimensions
    and coordinates; others have dimensions ``{name}_unc_dim_{i}``.

    Raises
    ------
    TypeError
        If `data` is no container of groups.
    ValueError
        If there is no posterior; if the model has no latent site, a discrete one or a subsampled
        plate; or if a latent site is missing in the posterior or has another shape there.

    Warns
    -----
    UserWarning
        If draws have no finite unconstrained coordinates or scores: they lie on the boundary of
        their support, to the precision in which they are stored. The diagnostics leave them out.

    Examples
    --------
    >>> import numpy as np, xarray as xr, numpyro.distributions as dist
    >>> from numpyro import sample
    >>> from ppl_ext import _arviz
    >>> from ppl_ext.diagnostics import attach_scores
    >>> def model():
    ...     sample("sigma", dist.Exponential(2.0))
    >>> draws = xr.Dataset({"sigma": (("chain", "draw"), np.array([[0.5, 1.0]]))})
    >>> data = attach_scores(_arviz.from_groups({"posterior": draws}), model)
    >>> data["unconstrained_posterior_score"]["sigma"].values.round(3)  # 1 - 2 sigma
    array([[ 0., -1.]], dtype=float32)
    """
    if not _arviz.is_container(data):
        raise TypeError(
            f"data must be an arviz {_arviz.container_type().__name__} with a posterior, got "
            f"{type(data).__name__}"
        )
    posterior = _arviz.get_group(data, "posterior")
    if posterior is None:
        raise ValueError(
            f"the data have no group 'posterior' (groups: {', '.join(_arviz.group_names(data))})"
        )
    groups = scorer(model, args, kwargs)(posterior)
    if notice := boundary_notice(groups):
        warnings.warn(f"attach_scores: {notice}", stacklevel=2)
    return _arviz.with_groups(data, groups)


def scorer(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[xr.Dataset], Groups]:
    """Return a function from a posterior to its groups of unconstrained draws and of scores.

    The function compiles the model once, for all posteriors that are given to it.
    """
    from ppl_ext import registry

    target = registry.target(model, *args, **kwargs)
    if not target.latent:
        raise ValueError(
            "the model has no latent site of NumPyro, hence no score (is it a Pyro model? "
            "Only NumPyro models are read so far)"
        )
    discrete = [site.name for site in target.latent if site.discrete]
    if discrete:
        raise ValueError(
            f"the model has discrete latent sites {discrete}, for which there is no score: "
            "marginalise them out of the model"
        )
    circular = [site.name for site in target.latent if site.unconstrained_shape is None]
    if circular:
        raise ValueError(
            f"the sites {circular} have supports without a bijection to the real line, hence no "
            "score: reparametrise them (numpyro.infer.reparam.CircularReparam on a circle)"
        )
    for plate in target.plates:
        if plate.subsampled:
            raise ValueError(
                f"the plate {plate.name!r} takes {plate.subsample_size} of {plate.size} data at "
                "random, but a score is that of all data: make its subsample_size the full size"
            )

    # The arguments of the model stay in the closure, since they may be of any type.
    @jax.jit
    @jax.vmap
    def points_and_scores(draw: dict[str, jax.Array]) -> Any:
        z = target.unconstrain(draw, *args, **kwargs)
        score = jax.grad(target.log_density)(z, *args, **kwargs)
        return target.unravel(z), target.unravel(score)

    def groups_of(posterior: xr.Dataset) -> Groups:
        sample_dims = _arviz.default_sample_dims()
        sample_shape, values = _latent_values(posterior, target.latent, sample_dims)
        found = _in_chunks(points_and_scores, values, math.prod(sample_shape))
        shaped = jax.tree.map(lambda v: v.reshape(*sample_shape, *v.shape[1:]), found)
        points, scores = (unconstrained_dataset(part, posterior, sample_dims) for part in shaped)
        return {UNCONSTRAINED: points, score_group(UNCONSTRAINED): scores}

    return groups_of


def _latent_values(
    posterior: xr.Dataset, sites: Sequence[Site], sample_dims: tuple[str, ...]
) -> tuple[tuple[int, ...], Values]:
    """Return the shape of the draws, and the values of each site in shape (draws, *site)."""
    sample_shape: tuple[int, ...] = ()
    values: Values = {}
    for site in sites:
        if site.name not in posterior.data_vars:
            raise ValueError(
                f"the posterior has no draws of the latent site {site.name!r} (it has "
                f"{sorted(map(str, posterior.data_vars))}): the scores need every latent site"
            )
        array = posterior[site.name].transpose(*sample_dims, ...)
        sample_shape = array.shape[: len(sample_dims)]
        shape = array.shape[len(sample_dims) :]
        if shape != tuple(site.shape):
            raise ValueError(
                f"the draws of {site.name!r} have shape {shape}, but the model's site has "
                f"{tuple(site.shape)}: pass the arguments with which the model was run"
            )
        values[site.name] = array.values.reshape(-1, *shape)
    return sample_shape, values


def _in_chunks(function: Callable[[Values], Any], values: Values, n: int) -> Any:
    """Return what `function` makes of n draws, given a few hundred of them at a time.

    The loop is Python's, which `jax.lax.map` would take twice as long to compile.
    """
    size = min(n, _DRAWS_AT_ONCE)
    parts = []
    for start in range(0, n, size):
        # A last chunk that is not full would be compiled anew: repeat its last draw.
        rows = np.minimum(np.arange(start, start + size), n - 1)
        part = function({name: value[rows] for name, value in values.items()})
        parts.append(jax.tree.map(np.asarray, part))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:n], *parts)


def finite_sites(groups: Groups) -> xr.Dataset:
    """Return, by site and draw, whether all coordinates and scores are finite."""
    sample_dims = _arviz.default_sample_dims()
    finite: dict[Hashable, xr.DataArray] = {}
    for group in groups.values():
        for name, array in group.data_vars.items():
            other = [dim for dim in array.dims if dim not in sample_dims]
            finite[name] = (abs(array) < np.inf).all(other) & finite.get(name, True)
    return xr.Dataset(finite)


def boundary_notice(groups: Groups) -> str | None:
    """Return a sentence on the draws that have no finite score, or None if there are none."""
    finite = finite_sites(groups)
    kept = finite.to_dataarray().all("variable")
    if kept.all():
        return None
    sites = [name for name, ok in finite.data_vars.items() if not ok.all()]
    return (
        f"{int((~kept).sum())} of {kept.size} draws have no finite score (sites {sites}): they "
        "lie on the boundary of their support, to the precision in which they are stored. The "
        "diagnostics leave them out"
    )


def unconstrained_dataset(
    values: Mapping[str, npt.NDArray[Any] | jax.Array],
    posterior: xr.Dataset,
    sample_dims: tuple[str, ...] = ("chain", "draw"),
) -> xr.Dataset:
    """Values of shape (*sample shape, *unconstrained shape) with the posterior's dimensions."""
    arrays = {}
    for name, value in values.items():
        data = np.asarray(value)
        # a site that the run did not keep has scores all the same
        like = posterior[name].transpose(*sample_dims, ...) if name in posterior else None
        if like is not None and data.shape == like.shape:
            arrays[name] = like.copy(data=data)
        else:
            new = (f"{name}_unc_dim_{i}" for i in range(data.ndim - len(sample_dims)))
            coords = {dim: posterior[dim] for dim in sample_dims if dim in posterior.coords}
            arrays[name] = xr.DataArray(data, coords, (*sample_dims, *new))
    return xr.Dataset(arrays)
