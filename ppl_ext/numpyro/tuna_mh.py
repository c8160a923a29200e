"""TunaMH as a NumPyro kernel."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, Literal

from ppl_ext.arguments import (
    argument_error,
    check_choice,
    check_count,
    check_flag,
    check_fraction,
    check_positive,
)
from ppl_ext.kernels import tuna_mh
from ppl_ext.kernels.minibatch import Problem
from ppl_ext.numpyro.minibatch import Bounds, MinibatchKernel
from ppl_ext.target import Array


class TunaMH(MinibatchKernel):
    """Exact minibatch Metropolis-Hastings: about a hundred data a step, whatever their number.

    Parameters
    ----------
    model : callable
        NumPyro model with continuous latent sites and a plate of data. The data inside are indexed
        by the plate: `with numpyro.plate("N", N, subsample_size=100) as i:`, or
        `numpyro.subsample`. The subsample size has no meaning here. No latent site inside the
        plate.
    plate : str, optional
        Name of the plate; needed where several hold data and none is subsampled.
    bounds : "auto" or callable
        `"auto"`: from the distributions inside the plate, whose predictor must be affine in the
        unconstrained sites under a known link; see `ppl_ext.numpyro.bounds`. A callable
        `bounds(mode, scale, radius)` gives constants c_i, shape (N,), for which
        |R_i(x) - R_i(y)| <= c_i M(x, y) in the ball of all `mode + scale w` with |w| <= radius,
        `mode` and x of shape (d,), sites in the order of their names; `radius` is inf, and then a
        number, whose constants are taken where those for inf are not all finite.
        R_i is the Taylor remainder of log likelihood i, M that of `ppl_ext.kernels.tuna_mh`.
    order : {0, 1, 2}
        Of the Taylor polynomials that need no data. 0 draws as many data as a full-data step costs,
        and is there for tempered posteriors; 1 draws a number that does not grow with N; 2
        one that falls with N, for a Hessian of the data, (d, d), at the start.
    proposal : {"taylor-mala", "sgld", "barker", "random_walk"}
        In coordinates in which the Laplace approximation is standard normal. `"taylor-mala"` and
        `"barker"` take its gradient, which costs no data; `"sgld"` that of `grad_size` data more
        (Tuna-SGLD).
    rates : {"max", "tuna"}
        `"max"` has less noise for the same number of data; `"tuna"` is that of the first paper.
    chi : "auto" or float
        Data drawn in addition, chi (C M)^2, which make the acceptance less noisy. `"auto"`: found
        in warm-up for a noise variance of the log ratio of 1 (5.7 at order 0).
    fallback : bool
        Take all data where a bound does not hold or more than N data would be drawn. Without, the
        draws are those of the posterior restricted to the ball of the bounds.
    exact : bool
        `False`: bounds are estimated from random pairs of points, for likelihoods that have none.
        The draws may then be off, which the attributes of `sample_stats` say; violations are
        counted.
    delayed : bool
        First accept by the Taylor polynomials alone, and draw data only then.
    step_size : float, optional
        In posterior standard deviations. `None`: found in warm-up.
    target_accept_prob : float, optional
        For the step size. `None`: by the proposal.
    grad_size : int
        Data of the gradient of `"sgld"`.
    chunk_size : int
        Data evaluated at once. Any number is drawn.
    init_strategy : callable, optional
        As for `numpyro.infer.NUTS`. `None`: chains start at draws of the Laplace approximation.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: no plate of data, latent sites inside it, data that do not follow its indices, a
        likelihood without bounds; discrete sites.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density, or no mode.

    Notes
    -----
    Exact: the draws are those of the posterior of all the data. Statistics of a draw: `num_drawn`
    and `num_kept`, data of the last step; `noise_variance` of its log acceptance ratio;
    `fallback`, whether it took all data; `num_violations`, data whose term moved more than its
    bound, since the start: unless it is 0 the bounds are wrong and the draws are not exact;
    `ppl_ext.to_arviz` warns then. Deterministic sites inside the plate are dropped. All data are
    taken at the start, a few times, and in a fallback.

    Sources: arXiv 2006.11677, 2406.05242, 2407.19602; formulas in `ppl_ext.kernels.tuna_mh`.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import TunaMH
    >>> def model(x, y):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     with numpyro.plate("N", len(y), subsample_size=100) as i:
    ...         numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])
    >>> x = jax.random.normal(jax.random.key(0), (10_000, 2))
    >>> y = 1.0 * jax.random.bernoulli(jax.random.key(1), jax.nn.sigmoid(x[:, 0]))
    >>> mcmc = MCMC(TunaMH(model), num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(jax.random.key(2), x, y)
    >>> bool(mcmc.get_extra_fields()["num_drawn"].mean() < 300)
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
        "chi",
    )

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        plate: str | None = None,
        bounds: Literal["auto"] | Bounds = "auto",
        order: Literal[0, 1, 2] = 1,
        proposal: Literal["taylor-mala", "sgld", "barker", "random_walk"] = "taylor-mala",
        rates: Literal["max", "tuna"] = "max",
        chi: float | Literal["auto"] = "auto",
        fallback: bool = True,
        exact: bool = True,
        delayed: bool = False,
        step_size: float | None = None,
        target_accept_prob: float | None = None,
        grad_size: int = 20,
        chunk_size: int = 256,
        init_strategy: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            model, plate=plate, bounds=bounds, exact=exact, init_strategy=init_strategy
        )
        if isinstance(order, bool) or order not in (0, 1, 2):
            raise argument_error("TunaMH", "order", order, "0, 1 or 2")
        check_choice("TunaMH", "proposal", proposal, tuna_mh.PROPOSALS)
        check_choice("TunaMH", "rates", rates, ("max", "tuna"))
        if chi != "auto":
            if isinstance(chi, bool) or not isinstance(chi, Real) or not 0 <= chi < float("inf"):
                raise argument_error("TunaMH", "chi", chi, '"auto" or a number from 0')
            if chi == 0 and rates == "tuna":
                raise argument_error("TunaMH", "chi", chi, 'positive with rates="tuna"')
        check_flag("TunaMH", fallback=fallback, delayed=delayed)
        if step_size is not None:
            check_positive("TunaMH", step_size=step_size)
        if target_accept_prob is not None:
            check_fraction("TunaMH", target_accept_prob=target_accept_prob)
        check_count("TunaMH", grad_size=grad_size, chunk_size=chunk_size)
        self._settings = tuna_mh.Settings(
            order=order,
            proposal=proposal,
            rates=rates,
            fallback=fallback,
            delayed=delayed,
            chi=None if chi == "auto" else float(chi),
            step_size=step_size,
            target_accept_prob=target_accept_prob,
            grad_size=int(grad_size),
            chunk_size=int(chunk_size),
        )

    @property
    def settings(self) -> tuna_mh.Settings:
        """The arguments that the algorithm reads."""
        return self._settings

    @property
    def _order(self) -> int:
        return self._settings.order

    def _find_fit(self, start: Array, problem: Problem) -> tuna_mh.Fit:
        return tuna_mh.find_fit(start, problem, self._settings)

    def _start_chain(
        self, key: Array, x: Array | None, problem: Problem, fit: tuna_mh.Fit
    ) -> tuna_mh.State:
        return tuna_mh.init(key, x, problem, self._settings, fit)

    def _step(self, state: tuna_mh.State, target: Problem) -> tuna_mh.State:
        return tuna_mh.step(state, target, self._settings, self._num_warmup)

    def _refresh(self, state: tuna_mh.State, target: Problem) -> tuna_mh.State:
        return tuna_mh.refresh(state, target, self._settings)

    def _no_bound(self) -> str:
        return (
            f"TunaMH: a likelihood in plate '{self._found_plate}' has no bound on its derivative "
            f"of order {self._settings.order + 1}. Take a smaller `order`, or give `bounds`."
        )

    def get_diagnostics_str(self, state: tuna_mh.State) -> str:
        """Acceptance, data drawn and step size, for the progress bar."""
        return (
            f"acc. prob={state.mean_accept_prob:.2f}, {state.num_drawn} data, "
            f"step size {state.step_size:.2e}"
        )
