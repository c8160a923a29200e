"""Finished run -> ArviZ, with the scores that Stein diagnostics need."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ppl_ext import _arviz, registry
from ppl_ext.diagnostics.check import wrong
from ppl_ext.diagnostics.draws import UNCONSTRAINED, score_group
from ppl_ext.diagnostics.scores import unconstrained_dataset
from ppl_ext.errors import UnsupportedModelError

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
        When a chain stands still, a bound of a minibatch kernel was violated, simulations of
        ExchangeMH reached their limit, or a mixture had too few slots.
        `ppl_ext.diagnostics.check` looks at the result for all that may be wrong.

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
    converter = registry.converter(mcmc)
    convert = _from_numpyro if converter is None else converter
    data = convert(mcmc, log_likelihood, **kwargs)
    for finding in wrong(data):
        warnings.warn(str(finding), stacklevel=2)
    return data


def _from_numpyro(mcmc: Any, log_likelihood: bool, **kwargs: Any) -> Any:
    """`to_arviz` for `numpyro.infer.MCMC`."""
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
    refuse = getattr(mcmc.sampler, "refuse_log_likelihood", None)
    if log_likelihood and refuse is not None:
        raise UnsupportedModelError(refuse())
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
            UNCONSTRAINED: unconstrained_dataset(points, posterior),
            score_group(UNCONSTRAINED): unconstrained_dataset(scores, posterior),
        },
    )


def _by_name(sites: Any) -> dict[str, jax.Array]:
    """Values by site; ArviZ's names where a potential energy function takes another PyTree."""
    if isinstance(sites, dict):
        return sites
    return {f"Param:{i}": leaf for i, leaf in enumerate(jax.tree.leaves(sites))}


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
