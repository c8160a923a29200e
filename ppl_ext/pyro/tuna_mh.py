"""TunaMH as a Pyro kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ppl_ext.numpyro import tuna_mh
from ppl_ext.numpyro.kernel import Kernel as NumPyroKernel
from ppl_ext.numpyro.minibatch import Bounds
from ppl_ext.pyro.minibatch import MinibatchKernel


class TunaMH(MinibatchKernel):
    """Exact minibatch Metropolis-Hastings: about a hundred data a step, whatever their number.

    `ppl_ext.numpyro.TunaMH` for Pyro: the same algorithm, the same options.

    Parameters
    ----------
    model : callable
        Pyro model with continuous latent sites and a plate of data. The data inside are indexed by
        the plate: `with pyro.plate("N", N, subsample_size=100) as i:`. The subsample size has no
        meaning here. No latent site inside the plate. The parameters of a datum depend on no other
        datum.
    plate, bounds, order, proposal, rates, chi, fallback, exact, delayed, step_size, \
    target_accept_prob, grad_size, chunk_size
        As for `ppl_ext.numpyro.TunaMH`.
    init_strategy : callable, optional
        As for `pyro.infer.NUTS`. `None`: chains start at draws of the Laplace approximation.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: as for `ppl_ext.numpyro.TunaMH`; a distribution that NumPyro does not have.
    ppl_ext.errors.TracingError
        At `run`: JAX cannot evaluate the model.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density, or no mode.

    Notes
    -----
    Exact, see `ppl_ext.numpyro.TunaMH`. `ppl_ext.pyro.MCMC` keeps the statistics of each draw.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from ppl_ext.pyro import MCMC, TunaMH
    >>> def model(x, y):
    ...     beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with pyro.plate("N", len(y), subsample_size=100) as i:
    ...         pyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])
    >>> x = torch.randn(10_000, 2)
    >>> y = torch.bernoulli(torch.sigmoid(x[:, 0]))
    >>> mcmc = MCMC(TunaMH(model), 500, warmup_steps=200, disable_progbar=True)
    >>> mcmc.run(x, y)
    >>> bool(mcmc.get_extra_fields()["num_drawn"].mean() < 300)
    True
    """

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
            model,
            plate=plate,
            init_strategy=init_strategy,
            bounds=bounds,
            order=order,
            proposal=proposal,
            rates=rates,
            chi=chi,
            fallback=fallback,
            exact=exact,
            delayed=delayed,
            step_size=step_size,
            target_accept_prob=target_accept_prob,
            grad_size=grad_size,
            chunk_size=chunk_size,
        )

    def kernel(
        self, model: Callable[..., Any], init_strategy: Callable[..., Any] | None
    ) -> NumPyroKernel:
        return tuna_mh.TunaMH(
            model, plate=self._plate, init_strategy=init_strategy, **self._options
        )
