"""ExchangeMH as a NumPyro kernel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.initialization import init_to_uniform

from ppl_ext.arguments import (
    argument_error,
    check_choice,
    check_count,
    check_fraction,
    check_positive,
)
from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.kernels import exchange_mh
from ppl_ext.kernels.exchange_mh import Draw, Problem
from ppl_ext.numpyro.kernel import Kernel
from ppl_ext.numpyro.starting_point import describe_failure
from ppl_ext.numpyro.target import without_intractable
from ppl_ext.target import Array, PyTree, Target


def refusal(target: Target) -> str | None:
    """Why ExchangeMH cannot take this model, as far as static facts tell."""
    if target.language == "potential_fn":
        return "ExchangeMH needs a model, whose data it can simulate."
    sites = [site for site in target.sites if site.normalizer != "closed"]
    for site in sites:
        if site.kind == "latent":
            return (
                f"Site '{site.name}' ({site.distribution}) is latent. ExchangeMH needs the "
                "distributions with an unknown normalising constant observed: give it `obs=`."
            )
    reason = target.refusal_of_continuous_kernel("ExchangeMH", intractable=True)
    if reason is None and not sites:
        observed = [f"'{site.name}'" for site in target.sites if site.kind == "observed"]
        return (
            "ExchangeMH is for likelihoods with an unknown normalising constant, but no observed "
            f"site has one (observed: {', '.join(observed) or 'none'}). Use numpyro.infer.NUTS, or "
            "a distribution such as ppl_ext.numpyro.Ising."
        )
    return reason


class ExchangeMH(Kernel):
    """Exchange algorithm: exact posteriors of likelihoods with an unknown normalising constant.

    Parameters
    ----------
    model : callable
        NumPyro model with continuous latent sites, and one or more observed sites with an
        `Intractable` distribution, such as `Ising`, `Potts`, `ERGM` or `ConwayMaxwellPoisson`;
        other observed sites may stand beside them.
    proposal : {"random_walk", "mala", "barker"}
        In coordinates in which the posterior is about standard normal. `"mala"` and `"barker"` take
        the gradient of a Monte Carlo likelihood, from a pool of simulated data.
    pool : int
        Size of that pool. It is drawn at the start and again half-way through warm-up.
    num_aux : int
        Data sets drawn for each step. Several make the acceptance less noisy (averaged so that
        the chain stays exact), for as many times the work.
    step_size : float, optional
        In posterior standard deviations. `None`: found in warm-up.
    target_accept_prob : float, optional
        For the step size. `None`: by the proposal, the dimension and `num_aux`.
    init_strategy : callable, optional
        As for `numpyro.infer.NUTS`. `None`: chains start at draws of a normal approximation.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: no intractable likelihood, or a latent or scaled one; discrete sites.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density.

    Warns
    -----
    UserWarning
        At `run`: a simulator is not exact, so that neither are the draws.

    Notes
    -----
    Exact if the simulators are. Statistics of a draw: `aux_log_ratio`, what the simulated data add
    to the log acceptance ratio; `sim_effort`, work of the simulations, in the units of the
    distribution; `noise_variance` of the log ratio; `num_overflow`, simulations since warm-up that
    reached their limit: their proposals were rejected, which is a bias unless the count is 0;
    `ppl_ext.to_arviz` warns then. The start takes about 1,300 simulations more, and the pool
    twice.

    `ppl_ext.diagnostics.exchange_report` repeats a run with longer simulations.

    Sources: Murray, Ghahramani & MacKay 2006, arXiv 1206.6848; arXiv 2406.05242; formulas in
    `ppl_ext.kernels.exchange_mh`.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import ExchangeMH, Graph, Ising
    >>> graph = Graph.lattice(3, 3)
    >>> x = Ising(0.3, 0.0, graph).sample(jax.random.key(0))
    >>> def model(x):
    ...     coupling = numpyro.sample("coupling", dist.Uniform(0, 1))
    ...     numpyro.sample("x", Ising(coupling, 0.0, graph), obs=x)
    >>> mcmc = MCMC(ExchangeMH(model), num_warmup=100, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), x)
    >>> int(mcmc.last_state.num_overflow)
    0
    """

    default_fields = (
        "z",
        "diverging",
        "accept_prob",
        "aux_log_ratio",
        "sim_effort",
        "noise_variance",
        "num_overflow",
        "step_size",
    )

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        proposal: Literal["random_walk", "mala", "barker"] = "random_walk",
        pool: int = 200,
        num_aux: int = 1,
        step_size: float | None = None,
        target_accept_prob: float | None = None,
        init_strategy: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(model, init_strategy=init_strategy or init_to_uniform)
        self._given_start = init_strategy is not None
        check_choice("ExchangeMH", "proposal", proposal, exchange_mh.PROPOSALS)
        check_count("ExchangeMH", pool=pool, num_aux=num_aux)
        if pool < 2:
            raise argument_error("ExchangeMH", "pool", pool, "2 or more")
        if step_size is not None:
            check_positive("ExchangeMH", step_size=step_size)
        if target_accept_prob is not None:
            check_fraction("ExchangeMH", target_accept_prob=target_accept_prob)
        self._settings = exchange_mh.Settings(
            proposal=proposal,
            pool=int(pool),
            num_aux=int(num_aux),
            step_size=step_size,
            target_accept_prob=target_accept_prob,
        )
        self._length = 1
        self._inexact: tuple[str, ...] = ()

    @property
    def settings(self) -> exchange_mh.Settings:
        """The arguments that the algorithm reads."""
        return self._settings

    def with_simulations(self, length: int) -> ExchangeMH:
        """The same kernel with simulations that are `length` times as long where not exact."""
        check_count("ExchangeMH", length=length)
        kernel = copy.copy(self)
        kernel._length = int(length)
        kernel._reset()
        return kernel

    def _check_target(self, target: Target) -> None:
        reason = refusal(target)
        if reason is not None:
            raise UnsupportedModelError(reason)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: PyTree | None,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        self._started_at = init_params is not None or self._given_start
        state = super().init(rng_key, num_warmup, init_params, model_args, model_kwargs)
        if self._inexact:
            warnings.warn(
                f"The simulator of {' and '.join(self._inexact)} is a Markov chain of finite "
                "length, so that the draws are those of an approximation. "
                "ppl_ext.diagnostics.exchange_report shows what longer chains change.",
                stacklevel=4,
            )
        return state

    def _start(
        self,
        rng_key: Array,
        init_params: PyTree | None,
        batched: bool,
        model_args: tuple,
        model_kwargs: dict[str, Any],
    ) -> PyTree:
        # no start depends on the constants
        whole = self._model
        assert whole is not None
        self._model = without_intractable(whole)
        try:
            return super()._start(rng_key, init_params, batched, model_args, model_kwargs)
        finally:
            self._model = whole

    def _bind(self, target: Target, model_args: tuple, model_kwargs: dict[str, Any]) -> Problem:
        bound = target.bind(*model_args, **model_kwargs)
        assert bound.log_tractable is not None and bound.intractable is not None
        tractable, intractable = bound.log_tractable, bound.intractable

        def sites(x: Array) -> dict[str, Any]:
            return intractable(bound.unravel(x))

        def log_f(x: Array, stats: PyTree) -> PyTree:
            return {
                name: jnp.where(
                    site.weight > 0, site.distribution.log_f_stats(stats[name]), 0.0
                ).astype(x.dtype)
                for name, site in sites(x).items()
            }

        def simulate(x: Array, key: Array) -> Draw:
            stats, effort, overflow = {}, [], []
            for i, (name, site) in enumerate(sites(x).items()):
                drawn = site.distribution.simulate(
                    jax.random.fold_in(key, i), jnp.shape(site.weight), self._length
                )
                stats[name] = site.distribution.stats(drawn.value)
                effort.append(jnp.sum(drawn.effort, dtype=jnp.int32))
                overflow.append(jnp.sum(drawn.overflow & (site.weight > 0), dtype=jnp.int32))
            zero = jnp.zeros((), jnp.int32)
            return Draw(stats, sum(effort, zero), sum(overflow, zero))

        found = sites(jnp.zeros(target.size))
        self._inexact = tuple(
            f"site '{name}' ({type(site.distribution).__name__})"
            for name, site in found.items()
            if not site.distribution.exact
        )
        return Problem(
            log_tractable=lambda x: tractable(bound.unravel(x)),
            log_f=log_f,
            simulate=simulate,
            observed={n: site.distribution.stats(site.value) for n, site in found.items()},
            ravel=bound.ravel,
            unravel=bound.unravel,
        )

    def _init(self, rng_key: Array, z: PyTree, target: Problem) -> exchange_mh.State:
        x, stay = target.ravel(z), self._started_at
        return exchange_mh.init(rng_key, x, target, self._settings, stay=stay)

    def _step(self, state: exchange_mh.State, target: Problem) -> exchange_mh.State:
        return exchange_mh.step(state, target, self._settings, self._num_warmup)

    def _refresh(self, state: exchange_mh.State, target: Problem) -> exchange_mh.State:
        # nothing in the state has to belong to the data
        return state

    def _check_start(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any]) -> None:
        target, batched = self._target, np.ndim(state.i) > 0
        assert target is not None and self._model is not None
        problem = self._bind(target, model_args, model_kwargs)
        density = lambda z: problem.log_unnormalised(problem.ravel(z))  # noqa: E731
        start = jax.jit(jax.vmap(density) if batched else density)(state.z)
        if not np.isfinite(np.asarray(start)).all():
            failure = describe_failure(
                jax.random.key(0),
                without_intractable(self._model),
                self._init_strategy,
                model_args,
                model_kwargs,
            )
            raise InitializationError(f"ExchangeMH: {failure}")

    def run_facts(self, state: exchange_mh.State) -> dict[str, Any]:
        """Whether the simulators are exact."""
        return {"exact": int(not self._inexact), "inexact_sites": ", ".join(self._inexact)}

    def get_diagnostics_str(self, state: exchange_mh.State) -> str:
        """Acceptance and step size, for the progress bar."""
        return (
            f"acc. prob={state.mean_accept_prob:.2f}, step size {state.step_size:.2e}, "
            f"simulation effort {state.sim_effort}"
        )
