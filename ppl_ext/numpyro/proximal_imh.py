"""Proximal independent Metropolis-Hastings as a NumPyro kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution
from numpyro.handlers import substitute
from numpyro.infer import HMC, BarkerMH
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import potential_energy

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.kernels import proximal_imh as imh
from ppl_ext.numpyro.kernel import Kernel
from ppl_ext.target import Array, PyTree, Target


class _Bound(NamedTuple):
    """What the algorithm is given: both models with their data, and its settings."""

    problem: imh.Problem
    settings: imh.Settings


class ProximalIMH(Kernel):
    """Independence sampler from a cheap operator, corrected to the exact one: exact draws.

    The model takes its operator as an argument. Draws of the cheap model's posterior are moved to
    where the exact operator predicts what the cheap one predicted, and accepted with the exact
    model. Few of them are rejected where the corrected cheap model is good, so that draws are
    nearly independent at one exact solve each (`affine`).

    Parameters
    ----------
    model : callable
        NumPyro model with continuous latent sites only. Predictions are read from the means of its
        observed sites.
    approx : dict
        Keyword arguments that make the model cheap, for example `dict(forward=coarse_solver)`.
        Empty: the model as it is, for an independence sampler without correction.
    exact : dict, optional
        Keyword arguments that make it exact, where the model has no such defaults.
    proposal : "laplace", numpyro.distributions.Distribution, tuple or MCMCKernel
        Draws before the correction. `"laplace"`: normal at the cheap posterior's mode. A
        distribution of the flat unconstrained vector, shape (d,), sites in the order of their
        names. A fitted guide with its parameters, `(guide, params)`. Draws with their log density,
        `(z, log_prob)`, shapes (N, d) and (N,), unconstrained; each chain takes each of them once,
        and draws after the N-th, warm-up included, are NaN. `numpyro.infer.HMC`, `NUTS` or
        `BarkerMH` on the same model, which then samples the cheap posterior from the accepted point
        each time, adapted once before the run.
    correction : {"auto", "gn", "affine", "frozen", "argmin", "latent"} or None
        The map. `"gn"`: `steps` Gauss-Newton steps on the proximal objective. `"affine"`: the
        exact operator linearised at one point; one exact solve per proposal and no derivative of
        the exact operator. `"frozen"`: one step with a fixed gain. `"argmin"`: the converged
        minimiser. `"latent"`: `steps` Newton steps towards the cheap operator's latent state, which
        is the deterministic site with as many numbers as there are unknowns. `None`: no map.
        `"auto"`: `"affine"`; `None` where `approx` is empty.
        `settings` says which after the start.
    beta : float
        Weight of staying near the draw; 1 cancels the operator's error to first order.
    metric : "likelihood" or array
        Inverse noise covariance in the map, shape (n,) or (n, n), data in the order of the model.
        Read from the model at the cheap posterior's mode, by default.
    weight : "prior" or array
        Prior precision in the map, shape (d,) or (d, d), unconstrained. Read from the model, by
        default: exact for normal priors, within the components for mixtures of them, else from
        draws without correlations.
    steps : int
        Of `"gn"` and `"latent"`.
    batch_size : int
        Proposals made at once per chain, in parallel, before they are accepted one by one.
    defensive : float
        Share of proposals that are draws of the prior, for posteriors that the corrected ones do
        not reach. Not with draws or a kernel as the proposal.
    inner_steps : int, optional
        Transitions of a kernel given as `proposal` for each proposal; 5 by default.
    local_kernel : MCMCKernel, optional
        `numpyro.infer.HMC`, `NUTS` or `BarkerMH` on the same model, which makes a transition on
        the exact posterior after each proposal. Not with draws as the proposal.
    init_strategy : callable
        As for `numpyro.infer.NUTS`. The first proposal with a finite weight is accepted.

    Raises
    ------
    ValueError
        For a bad argument, named.
    TypeError
        When `approx` or `exact` is no dict, or `proposal` of an unknown type.
    ppl_ext.errors.UnsupportedModelError
        At `run`: discrete or Delta sites, subsampled plates, no latent site, empty data; sites that
        differ between the models; no observed site with a mean.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density; names the site.

    Notes
    -----
    Exact for any map and proposal: the inverse of the map is found for every proposal, and one that
    it does not lead back to is rejected, so that folds of the map do no harm. Points that the
    proposal does not reach are not sampled. `ppl_ext.diagnostics.imh_report` tells how good the
    proposals are. A rejected proposal without finite weight is counted as `diverging`.

    In a block of `numpyro.infer.Gibbs` the map and the Laplace proposal are found anew a few times
    in warm-up and then kept, and proposals are made one at a time.

    Source: arXiv 2602.21426; densities in `ppl_ext.kernels.proximal_imh`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import ProximalIMH
    >>> def solver(x, cells=100):
    ...     s = (jnp.arange(cells) + 0.5) / cells
    ...     return jnp.mean(jnp.exp(x[0] + x[1] * s)[:, None] * jnp.stack([s, 1 - s], 1), 0)
    >>> def model(y, forward=solver):
    ...     x = numpyro.sample("x", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(forward(x), 0.05).to_event(1), obs=y)
    >>> kernel = ProximalIMH(model, approx=dict(forward=lambda x: solver(x, cells=2)))
    >>> mcmc = MCMC(kernel, num_warmup=0, num_samples=500, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), jnp.array([0.6, 0.5]))
    >>> bool(mcmc.get_extra_fields()["accept_prob"].mean() > 0.7)
    True
    """

    default_fields = (
        "z",
        "diverging",
        "potential_energy",
        "accept_prob",
        "log_weight",
        "candidate",
    )

    _approx: dict[str, Any]
    _proposal: Any
    _correction: imh.Correction | Literal["auto"] | None
    _local_kernel: MCMCKernel | None
    _settings: imh.Settings

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        approx: Mapping[str, Any],
        exact: Mapping[str, Any] | None = None,
        proposal: Any = "laplace",
        correction: imh.Correction | Literal["auto"] | None = "auto",
        beta: float = 1.0,
        metric: Any = "likelihood",
        weight: Any = "prior",
        steps: int = 2,
        defensive: float = 0.0,
        inner_steps: int | None = None,
        local_kernel: MCMCKernel | None = None,
        batch_size: int = 256,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        self._approx = imh.checked_operators("approx", approx)
        # the model of the kernel, of ArviZ and of Gibbs is the exact one
        whole = partial(model, **imh.checked_operators("exact", exact)) if exact else model
        super().__init__(whole, init_strategy=init_strategy)
        for name, kernel in (("proposal", proposal), ("local_kernel", local_kernel)):
            if isinstance(kernel, MCMCKernel) or (name == "local_kernel" and kernel is not None):
                _check_reversible(name, kernel, model)
        self._local_kernel = local_kernel
        self._proposal = _checked_proposal(proposal)
        self._correction = correction
        self._settings = imh.checked_settings(
            proposal=self._proposal,
            proposal_is_kernel=isinstance(proposal, MCMCKernel),
            correction=correction,
            beta=beta,
            metric=metric,
            weight=weight,
            steps=steps,
            defensive=defensive,
            inner_steps=inner_steps,
            batch_size=batch_size,
            has_local_kernel=local_kernel is not None,
        )

    @property
    def settings(self) -> imh.Settings:
        """The arguments that the algorithm reads; the chosen correction after `init`."""
        return self._settings

    def _bind(self, target: Target, model_args: tuple, model_kwargs: dict[str, Any]) -> _Bound:
        cheap = {**model_kwargs, **self._approx}
        problem = imh.Problem(
            target.bind(*model_args, **model_kwargs), target.bind(*model_args, **cheap)
        )
        settings = replace(self._settings, base=self._base(target, model_args, cheap))
        if self._local_kernel is not None:
            local = self._chain(self._local_kernel, self._num_warmup, model_args, model_kwargs)
            settings = replace(settings, local=local)
        if GIBBS_SITES_KWARG in model_kwargs:
            if isinstance(settings.base, imh.Draws):
                raise UnsupportedModelError(
                    "ProximalIMH: given draws have no density at the points to which other blocks "
                    "of Gibbs lead. Give a distribution as `proposal`."
                )
            # the other blocks move before the second of a batch would be used
            settings = replace(settings, batch_size=1)
        return _Bound(problem, settings)

    def _base(
        self, target: Target, model_args: tuple, cheap: dict[str, Any]
    ) -> imh.Base | imh.Draws | imh.Chain:
        proposal = self._proposal
        if isinstance(proposal, str):
            return imh.LAPLACE
        if isinstance(proposal, imh.Draws):
            imh.check_draws(proposal, target)
            return proposal
        if isinstance(proposal, MCMCKernel):
            return self._chain(
                proposal, 0, model_args, cheap, max(self._num_warmup, imh.INNER_WARMUP)
            )
        if isinstance(proposal, tuple):
            guide, params = proposal
            if not isinstance(guide, AutoContinuous):
                return _guide_base(substitute(guide, data=params), target, model_args, cheap)
            # its vector has the order and the transforms of ours
            proposal = guide.get_posterior(params)
        imh.check_width(proposal.event_shape, proposal.batch_shape, target)
        return imh.Base(lambda key, fit: proposal.sample(key), lambda z, fit: proposal.log_prob(z))

    def _chain(
        self,
        kernel: MCMCKernel,
        num_warmup: int,
        model_args: tuple,
        model_kwargs: dict[str, Any],
        warmup_at_start: int = 0,
    ) -> imh.Chain:
        """Another kernel of NumPyro on one of the models, warmed up at the start or as it runs."""
        assert self._target is not None
        target = self._target

        def start(key: Array, z: Array) -> PyTree:
            total = max(num_warmup, warmup_at_start)
            state = kernel.init(key, total, target.unravel(z), model_args, model_kwargs)
            transition = lambda _, s: kernel.sample(s, model_args, model_kwargs)  # noqa: E731
            return jax.lax.fori_loop(0, warmup_at_start, transition, state)

        def move(state: PyTree, z: Array) -> PyTree:
            there = state._replace(z=target.unravel(z))
            there = kernel.refresh(there, model_args, model_kwargs)
            return kernel.sample(there, model_args, model_kwargs)

        return imh.Chain(start, move, lambda state: target.ravel(state.z))

    def _start(
        self,
        rng_key: Array,
        init_params: PyTree | None,
        batched: bool,
        model_args: tuple,
        model_kwargs: dict[str, Any],
    ) -> PyTree:
        # the search for a start needs gradients, which the exact operator may not have
        cheap = {**model_kwargs, **self._approx}
        assert self._target is not None
        imh.check_cheap(self._target.bind(*model_args, **cheap))
        return super()._start(rng_key, init_params, batched, model_args, cheap)

    def _init_chains(self, rng_key: Array, z: PyTree, bound: _Bound, batched: bool) -> Any:
        problem = bound.problem
        self._check_problem(problem)
        one = jax.tree.map(lambda leaf: leaf[0], z) if batched else z
        start = problem.exact.ravel(one)
        settings = self._chosen(bound)
        # once for all chains
        fit = imh.find_fit(start, problem, settings)
        chain = lambda key, z: imh.init(key, z, problem, settings, fit)  # noqa: E731
        return (jax.vmap(chain) if batched else chain)(rng_key, z)

    def _check_problem(self, problem: imh.Problem) -> None:
        shapes = [
            jax.eval_shape(lambda t=t: t.constrain_sites(t.unravel(jnp.zeros(t.size))))
            for t in problem
        ]
        latent = {site.name for site in problem.exact.latent}
        different = [n for n in latent if shapes[0][n].shape != shapes[1][n].shape]
        if different:
            raise UnsupportedModelError(
                f"ProximalIMH: the latent sites {sorted(different)} have other shapes with "
                f"`approx`. Both models must have the same unknowns."
            )

    def _chosen(self, bound: _Bound) -> imh.Settings:
        """The settings with the correction."""
        correction = imh.chosen_correction(self._correction, cheap_is_exact=not self._approx)
        site = imh.latent_site(bound.problem.exact) if correction == "latent" else None
        self._settings = replace(self._settings, correction=correction, latent_site=site)
        return replace(bound.settings, correction=correction, latent_site=site)

    def wrap_model(self, wrapper: Callable[[Callable], Callable]) -> ProximalIMH:
        kernel = super().wrap_model(wrapper)
        assert isinstance(kernel, ProximalIMH)
        if isinstance(self._proposal, MCMCKernel):
            kernel._proposal = self._proposal.wrap_model(wrapper)
        if self._local_kernel is not None:
            kernel._local_kernel = self._local_kernel.wrap_model(wrapper)
        return kernel

    def _step(self, state: imh.State, bound: _Bound) -> imh.State:
        return imh.step(state, bound.problem, bound.settings)

    def _refresh(self, state: imh.State, bound: _Bound) -> imh.State:
        return imh.block_refresh(state, bound.problem, bound.settings, self._num_warmup)

    def run_facts(self, state: imh.State) -> dict[str, Any]:
        return imh.facts(state, self._settings)

    def get_diagnostics_str(self, state: imh.State) -> str:
        """Correction and acceptance probability, for the progress bar."""
        return f"correction {self._settings.correction}, acc. prob={state.accept_prob:.2f}"


def _checked_proposal(proposal: Any) -> Any:
    if isinstance(proposal, str):
        if proposal == "laplace":
            return proposal
    elif isinstance(proposal, Distribution | MCMCKernel):
        return proposal
    elif isinstance(proposal, tuple) and len(proposal) == 2:
        first, second = proposal
        if callable(first) and isinstance(second, Mapping):
            return proposal
        if not callable(first):
            return imh.checked_draws(np.asarray(first), np.asarray(second))
    raise TypeError(
        'ProximalIMH: `proposal` must be "laplace", a numpyro Distribution of the unconstrained '
        "vector, a fitted guide with its parameters (guide, params), draws with their log density "
        "(z, log_prob), or a kernel, got "
        f"{proposal if isinstance(proposal, str) else type(proposal).__name__!r}."
    )


def _check_reversible(name: str, kernel: Any, model: Callable[..., Any]) -> None:
    if not isinstance(kernel, HMC | BarkerMH):
        raise TypeError(
            f"ProximalIMH: `{name}` must be numpyro.infer.HMC, NUTS or BarkerMH, which are "
            f"reversible, got {type(kernel).__name__}."
        )
    if kernel.model is not model:
        raise ValueError(f"ProximalIMH: `{name}` must be a kernel on the same model.")


def _guide_base(guide: Callable, target: Target, args: tuple, kwargs: dict[str, Any]) -> imh.Base:
    """A hand-written guide: its log density is that of a model with its sites."""
    from numpyro.handlers import seed, trace

    names = sorted(target.structure)

    def sample(key: Array, _: imh.Fit) -> Array:
        messages = trace(seed(guide, key)).get_trace(*args, **kwargs)
        sites = {n for n, m in messages.items() if m["type"] == "sample" and not m["is_observed"]}
        imh.check_guide(sites, target)
        values = {name: messages[name]["value"] for name in names}
        return target.unconstrain(values, *args, **kwargs)

    def log_prob(z: Array, _: imh.Fit) -> Array:
        return -potential_energy(guide, args, kwargs, target.unravel(z))

    return imh.Base(sample, log_prob)
