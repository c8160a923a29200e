"""PoissonMH as a NumPyro kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ppl_ext.arguments import (
    argument_error,
    check_choice,
    check_count,
    check_flag,
    check_fraction,
    check_positive,
)
from ppl_ext.kernels import poisson_mh
from ppl_ext.kernels.minibatch import Problem
from ppl_ext.numpyro.minibatch import MinibatchKernel
from ppl_ext.target import Array, Target


class PoissonMH(MinibatchKernel):
    """Exact minibatch Metropolis-Hastings whose minibatch shapes the proposal too.

    For tempered posteriors, bounded likelihoods and likelihoods with a kink. Elsewhere use
    `TunaMH`: it draws a hundred data where this kernel draws as many as a full-data step.

    Parameters
    ----------
    model : callable
        NumPyro model as for `TunaMH`: continuous latent sites, and a plate of data without a
        latent site inside.
    plate : str, optional
        Name of the plate; needed where several hold data and none is subsampled.
    proposal : {"barker", "mala", "random_walk"}
        In coordinates in which the Laplace approximation is standard normal. `"barker"` and
        `"mala"` take the gradient of the minibatch (Poisson-Barker, Poisson-MALA);
        `"random_walk"` is PoissonMH.
    bounds : "auto" or callable
        `"auto"`: Lipschitz constants from the distributions inside the plate, whose predictor must
        be affine in the unconstrained sites under a known link; see `ppl_ext.numpyro.bounds`. A
        callable `bounds(mode, scale, radius)` gives, for the ball of all `mode + scale w` with
        |w| <= radius, either constants c_i, shape (N,), with
        |l_i(x) - l_i(y)| <= c_i |w_x - w_y|, or a pair (low, high) with low_i <= l_i <= high_i.
        l_i is log likelihood i before tempering. `radius` is inf, and then a number, whose values
        are taken where those for inf are not all finite.
    lam : "auto" or float
        Data kept on average beyond those that the bounds ask for; they make the acceptance less
        noisy. `"auto"`: found in warm-up for a noise variance of the log ratio of 1, or as near as
        less than N data a step allow.
    local : float, optional
        Posterior standard deviations around a random centre in which the bounds must hold, instead
        of the ball of all that the posterior reaches: smaller bounds, and smaller steps. Takes
        Lipschitz constants.
    temperature : float
        The target is prior times likelihood to the power 1 / `temperature`.
    fallback : bool
        Take all data outside the ball of the bounds, now and then inside, and always where a
        minibatch would be N and more. Without, the draws are those of the posterior restricted to
        the ball.
    exact : bool
        `False`: bounds are estimated from random pairs of points, for likelihoods that have none.
        The draws may then be off, which the attributes of `sample_stats` say; violations are
        counted.
    step_size : float, optional
        In posterior standard deviations. `None`: found in warm-up.
    target_accept_prob : float, optional
        For the step size. `None`: by the proposal.
    chunk_size : int
        Data evaluated at once. Any number is drawn.
    init_strategy : callable, optional
        As for `numpyro.infer.NUTS`. `None`: chains start at draws of the Laplace approximation.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: as for `TunaMH`.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density, or no mode.

    Notes
    -----
    Exact: the draws are those of the (tempered) posterior of all the data. Statistics of a draw as
    for `TunaMH`; data that are drawn once and looked at twice count once. The attribute
    `temperature` of `sample_stats` keeps the temperature.

    Sources: arXiv 1911.09771, 2406.05242; formulas in `ppl_ext.kernels.poisson_mh`.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import PoissonMH
    >>> def model(x, y):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
    ...     with numpyro.plate("N", len(y), subsample_size=100) as i:
    ...         numpyro.sample("y", dist.StudentT(4, x[i] @ beta, 1), obs=y[i])
    >>> x = jax.random.normal(jax.random.key(0), (10_000, 2))
    >>> y = x.sum(1) + jax.random.normal(jax.random.key(1), (10_000,))
    >>> kernel = PoissonMH(model, temperature=1000.0)
    >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(jax.random.key(2), x, y)
    >>> bool(mcmc.get_extra_fields()["num_drawn"].mean() < 1000)
    True
    """

    default_fields = (
        "z",
        "diverging",
        "accept_prob",
        "num_drawn",
        "num_kept",
        "noise_variance",
        "fallback",
        "num_violations",
        "step_size",
        "lam",
    )

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        plate: str | None = None,
        proposal: Literal["barker", "mala", "random_walk"] = "barker",
        bounds: Literal["auto"] | Callable[..., Any] = "auto",
        lam: float | Literal["auto"] = "auto",
        local: float | None = None,
        temperature: float = 1.0,
        fallback: bool = True,
        exact: bool = True,
        step_size: float | None = None,
        target_accept_prob: float | None = None,
        chunk_size: int = 256,
        init_strategy: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            model, plate=plate, bounds=bounds, exact=exact, init_strategy=init_strategy
        )
        check_choice("PoissonMH", "proposal", proposal, poisson_mh.PROPOSALS)
        check_positive("PoissonMH", temperature=temperature)
        if lam != "auto":
            check_positive("PoissonMH", lam=lam)
        if local is not None:
            check_positive("PoissonMH", local=local)
        check_flag("PoissonMH", fallback=fallback)
        if step_size is not None:
            check_positive("PoissonMH", step_size=step_size)
        if target_accept_prob is not None:
            check_fraction("PoissonMH", target_accept_prob=target_accept_prob)
        check_count("PoissonMH", chunk_size=chunk_size)
        self._temperature = float(temperature)
        self._settings = poisson_mh.Settings(
            proposal=proposal,
            local=None if local is None else float(local),
            lam=None if lam == "auto" else float(lam),
            fallback=fallback,
            step_size=step_size,
            target_accept_prob=target_accept_prob,
            chunk_size=int(chunk_size),
        )

    @property
    def settings(self) -> poisson_mh.Settings:
        """The arguments that the algorithm reads."""
        return self._settings

    @property
    def _order(self) -> int:
        return 0

    def _problem(self, target: Target, model_args: tuple, model_kwargs: dict[str, Any]) -> Problem:
        problem = super()._problem(target, model_args, model_kwargs)
        beta = 1 / self._temperature

        def bounds(mode: Array, scale: Array, radius: Array) -> Any:
            found = problem.bounds(mode, scale, radius)
            if isinstance(found, tuple) and self._settings.local is not None:
                raise argument_error(
                    "PoissonMH", "bounds", "a pair (low, high)", "Lipschitz constants with `local`"
                )
            return jax.tree.map(lambda leaf: beta * jnp.asarray(leaf), found)

        return problem._replace(
            log_terms=lambda x, indices: beta * problem.log_terms(x, indices), bounds=bounds
        )

    def _find_fit(self, start: Array, problem: Problem) -> poisson_mh.Fit:
        return poisson_mh.find_fit(start, problem, self._settings)

    def _start_chain(
        self, key: Array, x: Array | None, problem: Problem, fit: poisson_mh.Fit
    ) -> poisson_mh.State:
        return poisson_mh.init(key, x, problem, self._settings, fit)

    def _step(self, state: poisson_mh.State, target: Problem) -> poisson_mh.State:
        return poisson_mh.step(state, target, self._settings, self._num_warmup)

    def _refresh(self, state: poisson_mh.State, target: Problem) -> poisson_mh.State:
        return poisson_mh.refresh(state, target, self._settings)

    def _no_bound(self) -> str:
        return (
            f"PoissonMH: a likelihood in plate '{self._found_plate}' has no bound on its first "
            "derivative around the mode. Give `bounds`, or use TunaMH."
        )

    def run_facts(self, state: poisson_mh.State) -> dict[str, Any]:
        """The temperature, and whether the bounds are estimates."""
        return {**super().run_facts(state), "temperature": self._temperature}

    def get_diagnostics_str(self, state: poisson_mh.State) -> str:
        """Acceptance, data drawn and step size, for the progress bar."""
        return (
            f"acc. prob={state.mean_accept_prob:.2f}, {state.num_drawn} data, "
            f"step size {state.step_size:.2e}"
        )
