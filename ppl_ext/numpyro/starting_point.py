"""Starting points: checks, and messages that name the site at fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import MaskedDistribution, Unit
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, prototype_trace
from numpyro.util import not_jax_tracer

from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.numpyro.target import family, unwrapped
from ppl_ext.target import Array, PyTree, Target


def check_init_params(init_params: Any, target: Target, batch: tuple[int, ...]) -> PyTree:
    """`init_params` if it holds a value of the right shape for every latent site.

    Values are unconstrained; `batch` is the leading shape for several chains.
    """
    if not isinstance(init_params, Mapping):
        raise TypeError(
            "`init_params` must be a dict of unconstrained values by site name, got "
            f"{type(init_params).__name__}."
        )
    missing = [name for name in target.structure if name not in init_params]
    unknown = [name for name in init_params if name not in target.structure]
    if missing or unknown:
        raise ValueError(
            f"`init_params` lacks the latent sites {missing} and has the unknown sites "
            f"{unknown}; the latent sites are {list(target.structure)}."
        )
    for name, shape in target.structure.items():
        found = jnp.shape(init_params[name])
        if found != batch + shape:
            raise ValueError(
                f"`init_params['{name}']` has shape {found}, but the unconstrained value of "
                f"site '{name}' has shape {batch + shape} here."
            )
    return {name: jnp.asarray(init_params[name]) for name in target.structure}


def check_gibbs_supports(
    z: PyTree, target: Target, model_args: tuple, model_kwargs: dict[str, Any]
) -> None:
    """Raise `UnsupportedModelError` when a support depends on a site of another Gibbs block.

    Gibbs constrains a block's draws without the other blocks' values, so that such a site would
    come out wrong: with and without those values the sites must be the same.
    """
    alone = {k: v for k, v in model_kwargs.items() if k != GIBBS_SITES_KWARG}
    here = target.constrain_sites(z, *model_args, **model_kwargs)
    there = target.constrain_sites(z, *model_args, **alone)
    for site in target.latent:
        if not site.dynamic_support:
            continue
        same = jnp.all(here[site.name] == there[site.name])
        if not not_jax_tracer(same) or not same:
            raise UnsupportedModelError(
                f"The support of site '{site.name}' depends on a site of another block (or may: "
                "under a JAX transformation this cannot be told). Gibbs does not support that; "
                "put both sites in one block."
            )


def check_observations(
    model: Callable[..., Any], model_args: tuple, model_kwargs: dict[str, Any]
) -> None:
    """Raise `InitializationError` when observed values lie outside their site's support.

    Some densities are finite there, so that a sampler would not notice. Missing (NaN) and masked
    values are left alone.
    """
    messages = prototype_trace(model, jax.random.key(0), model_args, model_kwargs)
    for name, message in messages.items():
        if message["type"] != "sample" or not message["is_observed"]:
            continue
        distribution, value = message["fn"], message["value"]
        if isinstance(unwrapped(distribution), (MaskedDistribution, Unit)):
            continue
        numbers = isinstance(value, (jax.Array, np.ndarray, np.generic, int, float))
        if not numbers or jnp.dtype(getattr(value, "dtype", float)).kind not in "biuf":
            raise InitializationError(
                f"Observed site '{name}' holds no array of numbers but "
                f"{getattr(value, 'dtype', type(value).__name__)}. Convert it with numpy.asarray."
            )
        valid = distribution.support(value)
        missing = jnp.isnan(value)
        missing = missing.any(tuple(range(missing.ndim - distribution.event_dim, missing.ndim)))
        outside = ~(valid | missing)
        if not_jax_tracer(outside) and outside.any():
            raise InitializationError(
                f"Observed site '{name}' has {int(outside.sum())} values outside the support of "
                f"its distribution {family(distribution)}. Check the data."
            )


def check_density(
    state: Any,
    model: Callable[..., Any] | None,
    target: Target,
    model_args: tuple,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise `InitializationError` unless energy and gradient are finite in every chain.

    The state of a kernel without gradients has none.
    """
    finite = jnp.isfinite(state.potential_energy)
    grad_finite = {
        jax.tree_util.keystr(path, simple=True): bool(jnp.isfinite(leaf).all())
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, "z_grad", {}))
    }
    if bool(finite.all()) and all(grad_finite.values()):
        return
    if model is None:
        raise InitializationError(
            "The potential energy or its gradient is not finite at `init_params` (potential "
            f"energy {np.asarray(state.potential_energy)}). Give another starting point."
        )
    bad = [name for name, ok in grad_finite.items() if not ok]
    z = state.z
    if finite.ndim:
        chain = int(jnp.argmin(finite))
        z = jax.tree.map(lambda leaf: leaf[chain], z)
    values = target.constrain_sites(z, *model_args, **model_kwargs)
    guilty = _guilty_sites(substitute(model, data=values), model_args, model_kwargs)
    raise InitializationError(_message(guilty or [f"gradient of site '{b}'" for b in bad]))


def describe_failure(
    rng_key: Array,
    model: Any,
    init_strategy: Callable[..., Any],
    model_args: tuple,
    model_kwargs: dict[str, Any],
) -> str:
    """Message for a model at which the init strategy found no finite density."""
    strategy = init_strategy if isinstance(init_strategy, partial) else init_strategy()
    seeded = substitute(seed(model, rng_key), substitute_fn=strategy)
    return _message(_guilty_sites(seeded, model_args, model_kwargs))


def _guilty_sites(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> list[str]:
    guilty = []
    messages = trace(seed(model, jax.random.key(0))).get_trace(*args, **kwargs)
    for name, message in messages.items():
        if message["type"] != "sample":
            continue
        log_prob = message["fn"].log_prob(message["value"])
        valid = jnp.all(message["fn"].support(message["value"]))
        if not_jax_tracer(log_prob) and not (jnp.isfinite(log_prob).all() and valid):
            role = "observed site" if message["is_observed"] else "site"
            count = int((~jnp.isfinite(log_prob)).sum())
            reason = (
                f"{count} of {log_prob.size} log densities not finite"
                if valid
                else "has values outside its support"
            )
            guilty.append(f"{role} '{name}' ({reason})")
    return guilty


def _message(guilty: list[str]) -> str:
    where = "; ".join(guilty) if guilty else "no single site; the gradient or their sum"
    return (
        f"No starting point with a finite log density and gradient was found. At fault: {where}. "
        "Check the data and the priors, or give a start by `init_strategy` "
        "(numpyro.infer.init_to_value) or by `mcmc.run(..., init_params=...)`."
    )
