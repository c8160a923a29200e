"""Finished Pyro run -> ArviZ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from ppl_ext import _arviz, registry
from ppl_ext.diagnostics.draws import UNCONSTRAINED, score_group
from ppl_ext.diagnostics.scores import unconstrained_dataset
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.pyro.translated import TranslatedKernel
from ppl_ext.target import Site


def to_arviz(
    mcmc: Any,
    log_likelihood: bool,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """`ppl_ext.to_arviz` for `pyro.infer.MCMC` and `ppl_ext.pyro.MCMC`."""
    if getattr(mcmc, "_samples", None) is None:
        raise ValueError(
            "`mcmc` holds no draws: call `mcmc.run` first (StreamingMCMC never holds any)."
        )
    samples = {
        name: tensor.detach().cpu().numpy()
        for name, tensor in mcmc.get_samples(group_by_chain=True).items()
    }
    leading = next(iter(samples.values())).shape[:2]
    statistics = _pyro_statistics(mcmc, leading)
    grad = statistics.pop("z_grad", None)
    facts = [diagnostics.get("run_facts", {}) for diagnostics in mcmc._diagnostics]
    of_all_chains = {
        # numbers and texts are those of the kernel
        name: np.concatenate([chain[name] for chain in facts]) if np.ndim(fact) else fact
        for name, fact in facts[0].items()
    }
    groups = {"sample_stats": _labelled(statistics, {}, coords, dims).assign_attrs(of_all_chains)}
    sites: dict[str, Site] = {}
    sizes: dict[str, int] = {}
    points: Any = None
    translated = isinstance(mcmc.kernel, TranslatedKernel)
    refuse = getattr(mcmc.kernel, "refuse_log_likelihood", None)
    if log_likelihood and refuse is not None:
        raise UnsupportedModelError(refuse())
    if mcmc.kernel.model is not None:
        args, kwargs = mcmc._args, mcmc._kwargs
        model = mcmc.kernel.model
        if translated:
            model = mcmc.kernel.model_of_all_data(*args, **kwargs)
        double = any(values.dtype == np.float64 for values in samples.values())
        with jax.enable_x64(double):
            target: Any = registry.target(model, *args, **kwargs)
            sites = {site.name: site for site in target.sites}
            sizes = {plate.name: plate.subsample_size for plate in target.plates}
            if translated and not log_likelihood:
                # the draws hold all that there is, and a pass over all data is dear
                pass
            elif all(site.name in samples for site in target.latent):
                values = {site.name: samples[site.name] for site in target.latent}
                points = _each_draw(lambda v: target.unconstrain_sites(v, *args, **kwargs), values)
                known = [site.name for site in target.sites if site.kind != "observed"]
                if any(name not in samples for name in known):
                    found = _each_draw(lambda z: target.constrain_sites(z, *args, **kwargs), points)
                    samples = {name: samples.get(name, found[name]) for name in known}
            elif log_likelihood:
                missing = [site.name for site in target.latent if site.name not in samples]
                raise ValueError(
                    f"`log_likelihood` needs the draws of all latent sites, but {missing} were "
                    "not saved (`save_params`)."
                )
            if log_likelihood:
                found = _each_draw(
                    lambda z: target.log_likelihood_sites(z, *args, **kwargs), points
                )
                groups["log_likelihood"] = _labelled(
                    found, _plate_dims(sites, sizes, event=False), coords, dims
                )
        names = _plate_dims(sites, sizes, event=True)
        groups["observed_data"] = _labelled(
            dict(target.observed_values), names, coords, dims, leading=()
        )
    posterior = _labelled(samples, _plate_dims(sites, sizes, event=True), coords, dims)
    posterior.attrs["inference_library"] = "pyro"
    groups = {"posterior": posterior, **groups}
    if grad is not None and points is not None:
        scores = {name: -grad[name] for name in points}
        groups[UNCONSTRAINED] = unconstrained_dataset(points, posterior)
        groups[score_group(UNCONSTRAINED)] = unconstrained_dataset(scores, posterior)
    return _arviz.from_groups(groups)


def _pyro_statistics(mcmc: Any, leading: tuple[int, ...]) -> dict[str, Any]:
    """Statistics of the draws under ArviZ's names, each of shape (chain, draw)."""
    found: dict[str, Any] = {"diverging": np.zeros(leading, bool)}
    for chain, diagnostics in enumerate(mcmc._diagnostics):
        found["diverging"][chain, list(diagnostics.get("divergences", []))] = True
    chains = [diagnostics.get("sample_stats", {}) for diagnostics in mcmc._diagnostics]
    for name in chains[0]:
        values = jax.tree.map(lambda *parts: np.stack(parts), *[chain[name] for chain in chains])
        if name == "z_grad":
            found[name] = values
        elif name == "potential_energy":
            found["lp"] = -values
        elif name == "num_steps":
            found["n_steps"] = values
            if type(mcmc.kernel).__name__ == "NUTS":
                found["tree_depth"] = np.log2(np.maximum(values, 1)).astype(int) + 1
        # as ArviZ does for NumPyro's runs
        elif not isinstance(values, (dict, tuple)):
            found[{"accept_prob": "acceptance_rate"}.get(name, name)] = values
    return found


def _each_draw(function: Callable[[Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`function` of each draw of `values`, (chain, draw) in front."""
    leading = next(iter(values.values())).shape[:2]
    flat = {name: jnp.asarray(v).reshape(-1, *v.shape[2:]) for name, v in values.items()}
    mapped = jax.jit(lambda flat: jax.lax.map(function, flat, batch_size=256))(flat)
    return {name: np.asarray(v).reshape(*leading, *v.shape[1:]) for name, v in mapped.items()}


def _plate_dims(
    sites: Mapping[str, Site], sizes: Mapping[str, int], event: bool
) -> dict[str, list[str]]:
    """Dimensions of each site by its plates, where these explain the shape."""
    found = {}
    for name, site in sites.items():
        rank = len(site.shape) - site.event_dim
        plates = [plate for plate in site.plates if plate in sizes]
        shape = site.shape[: len(plates)]
        if plates and len(plates) <= rank and shape == tuple(sizes[plate] for plate in plates):
            rest = range(len(plates), len(site.shape) if event else rank)
            found[name] = [*plates, *(f"{name}_dim_{i}" for i in rest)]
    return found


def _labelled(
    values: Mapping[str, Any],
    plate_dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Any] | None,
    dims: Mapping[str, Sequence[str]] | None,
    leading: tuple[str, ...] = ("chain", "draw"),
) -> xr.Dataset:
    given = {**plate_dims, **(dims or {})}
    arrays = {}
    for name, value in values.items():
        array = np.asarray(value)
        rank = array.ndim - len(leading)
        names = list(given.get(name, ()))[:rank]
        names += [f"{name}_dim_{i}" for i in range(len(names), rank)]
        labels = {
            dim: (coords or {}).get(dim, np.arange(size))
            for dim, size in zip((*leading, *names), array.shape, strict=True)
        }
        arrays[name] = xr.DataArray(array, labels, (*leading, *names))
    return xr.Dataset(arrays)
