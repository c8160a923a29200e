"""Finished run -> ArviZ, with the scores that Stein diagnostics need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from ppl_ext import _arviz, registry
from ppl_ext.diagnostics.draws import UNCONSTRAINED, score_group
from ppl_ext.diagnostics.scores import unconstrained_dataset
from ppl_ext.target import Site

if TYPE_CHECKING:
    from numpyro.infer import MCMC


def to_arviz(mcmc: Any, *, log_likelihood: bool = False, **kwargs: Any) -> Any:
    """Convert a finished run to the container of the installed ArviZ.

    Parameters
    ----------
    mcmc : numpyro.infer.MCMC, pyro.infer.MCMC or ppl_ext.pyro.MCMC
        After `run`, with any kernel.
    log_likelihood : bool
        Also compute the log likelihood of each datum for each draw.
    **kwargs
        `coords` and `dims`, as ArviZ has them; for NumPyro all else that `arviz.from_numpyro`
        takes. Plates name the dimensions that are not given.

    Returns
    -------
    arviz.InferenceData or xarray.DataTree
        Groups `posterior`, `sample_stats` (for ULD with what `uld_report` reads in its
        attributes), `observed_data` and, where the run kept gradients,
        `unconstrained_posterior` and `unconstrained_posterior_score`. ULD always keeps them;
        HMC and NUTS do with `extra_fields=("z_grad",)`, which is an argument of
        `numpyro.infer.MCMC.run` and of `ppl_ext.pyro.MCMC`. For other runs call
        `ppl_ext.diagnostics.attach_scores` on the result.

    Raises
    ------
    TypeError
        When `mcmc` is not a `numpyro.infer.MCMC`.
    ValueError
        When `mcmc` has not been run.

    Warns
    -----
    UserWarning
        When every draw of a chain diverged: the chain stands still.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist, ppl_ext
    >>> from numpyro.infer import MCMC, NUTS
    >>> def model():
    ...     numpyro.sample("sigma", dist.HalfNormal(2.0))
    >>> mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=50, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), extra_fields=("z_grad",))
    >>> data = ppl_ext.to_arviz(mcmc)
    >>> data["unconstrained_posterior_score"]["sigma"].shape
    (1, 50)
    """
    if any(c.__module__.startswith("pyro.infer.mcmc") for c in type(mcmc).__mro__):
        return _from_pyro(mcmc, log_likelihood, **kwargs)
    # imported here: ArviZ alone should not load NumPyro
    from numpyro.infer import MCMC

    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"to_arviz takes a numpyro.infer.MCMC or a pyro.infer.MCMC, got {type(mcmc).__name__}."
        )
    # `warmup` leaves one state behind, which is no draw
    if mcmc.last_state is None or mcmc.last_state is mcmc.post_warmup_state:
        raise ValueError("`mcmc` holds no draws: call `mcmc.run` first.")
    fields = mcmc.get_extra_fields(group_by_chain=True)
    stuck = np.flatnonzero(np.all(fields.get("diverging", [[False]]), axis=-1))
    if stuck.size:
        warnings.warn(
            f"Every draw of chains {stuck.tolist()} diverged, so that they stand still. Call "
            "`mcmc.warmup` again after a change of data, or look at the model there.",
            stacklevel=2,
        )
    with warnings.catch_warnings():
        # ArviZ traces the model with its full-size plates, which NumPyro remarks on
        warnings.filterwarnings("ignore", ".*subsample_size.*", UserWarning)
        data = _arviz.arviz().from_numpyro(mcmc, log_likelihood=log_likelihood, **kwargs)
    run_facts = getattr(mcmc.sampler, "run_facts", None)
    stats = _arviz.get_group(data, "sample_stats")
    if run_facts is not None and stats is not None:
        facts = run_facts(mcmc.last_state)
        data = _arviz.with_groups(data, {"sample_stats": stats.assign_attrs(facts)})
    if "z_grad" not in fields:
        return data
    posterior = _arviz.get_group(data, "posterior")
    assert posterior is not None
    grad = _by_name(fields["z_grad"])
    if "unconstrained_z" in fields:
        points = _by_name(fields["unconstrained_z"])
    else:
        points = _unconstrained(mcmc, grad)
    scores = jax.tree.map(jnp.negative, grad)
    return _arviz.with_groups(
        data,
        {
            UNCONSTRAINED: _dataset(points, posterior),
            score_group(UNCONSTRAINED): _dataset(scores, posterior),
        },
    )


def _by_name(sites: Any) -> dict[str, jax.Array]:
    """Values by site; ArviZ's names where a potential energy function takes another PyTree."""
    if isinstance(sites, dict):
        return sites
    return {f"Param:{i}": leaf for i, leaf in enumerate(jax.tree.leaves(sites))}


def _from_pyro(
    mcmc: Any,
    log_likelihood: bool,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> Any:
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
        name: fact if isinstance(fact, str) else np.concatenate([chain[name] for chain in facts])
        for name, fact in facts[0].items()
    }
    groups = {"sample_stats": _labelled(statistics, {}, coords, dims).assign_attrs(of_all_chains)}
    sites: dict[str, Site] = {}
    sizes: dict[str, int] = {}
    points: Any = None
    if mcmc.kernel.model is not None:
        args, kwargs = mcmc._args, mcmc._kwargs
        double = any(values.dtype == np.float64 for values in samples.values())
        with jax.enable_x64(double):
            target: Any = registry.target(mcmc.kernel.model, *args, **kwargs)
            sites = {site.name: site for site in target.sites}
            sizes = {plate.name: plate.subsample_size for plate in target.plates}
            if all(site.name in samples for site in target.latent):
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
        groups[UNCONSTRAINED] = _dataset(points, posterior)
        groups[score_group(UNCONSTRAINED)] = _dataset(scores, posterior)
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
        elif not isinstance(values, dict):
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


def _unconstrained(mcmc: MCMC, sites: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Unconstrained values of the latent `sites`, computed from the constrained draws."""
    samples = _by_name(mcmc.get_samples(group_by_chain=True))
    removed = [name for name in sites if name not in samples]
    if removed:
        raise ValueError(
            f"The run dropped the sites {removed} (`extra_fields` with '~z.'), without which the "
            "scores have no points. Keep the sites, or leave out 'z_grad'."
        )
    model = mcmc.sampler.model
    if model is None:
        return {name: samples[name] for name in sites}
    args, kwargs = mcmc._args, mcmc._kwargs
    target = registry.target(model, *args, **kwargs)

    def one(draw: dict[str, jax.Array]) -> Any:
        return target.unravel(target.unconstrain(draw, *args, **kwargs))

    return jax.jit(jax.vmap(jax.vmap(one)))({name: samples[name] for name in sites})


def _dataset(values: dict[str, jax.Array], posterior: xr.Dataset) -> xr.Dataset:
    (shape,) = {value.shape[:2] for value in values.values()}
    flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in values.items()}
    return unconstrained_dataset(flat, posterior, ("chain", "draw"), shape)
