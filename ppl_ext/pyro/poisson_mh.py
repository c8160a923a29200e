"""PoissonMH as a Pyro kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ppl_ext.numpyro import poisson_mh
from ppl_ext.numpyro.kernel import Kernel as NumPyroKernel
from ppl_ext.numpyro.minibatch import Bounds
from ppl_ext.pyro.minibatch import MinibatchKernel


class PoissonMH(MinibatchKernel):
    """Exact minibatch Metropolis-Hastings whose minibatch shapes the proposal too.

    `ppl_ext.numpyro.PoissonMH` for Pyro: the same algorithm, the same options.

    Parameters
    ----------
    model : callable
        Pyro model as for `TunaMH`.
    plate, proposal, bounds, lam, local, temperature, fallback, exact, step_size, \
    target_accept_prob, chunk_size
        As for `ppl_ext.numpyro.PoissonMH`.
    init_strategy : callable, optional
        As for `pyro.infer.NUTS`. `None`: chains start at draws of the Laplace approximation.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: as for `ppl_ext.numpyro.PoissonMH`; a distribution that NumPyro does not have.
    ppl_ext.errors.TracingError
        At `run`: JAX cannot evaluate the model.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density, or no mode.

    Notes
    -----
    Exact, see `ppl_ext.numpyro.PoissonMH`. `ppl_ext.pyro.MCMC` keeps the statistics of each draw.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from ppl_ext.pyro import MCMC, PoissonMH
    >>> def model(x, y):
    ...     beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with pyro.plate("N", len(y), subsample_size=100) as i:
    ...         pyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])
    >>> x = torch.randn(2_000, 2)
    >>> y = torch.bernoulli(torch.sigmoid(x[:, 0]))
    >>> kernel = PoissonMH(model, temperature=100.0)
    >>> mcmc = MCMC(kernel, 200, warmup_steps=200, disable_progbar=True)
    >>> mcmc.run(x, y)
    >>> int(mcmc.get_extra_fields()["num_violations"].max())
    0
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        plate: str | None = None,
        proposal: Literal["barker", "mala", "random_walk"] = "barker",
        bounds: Literal["auto"] | Bounds = "auto",
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
            model,
            plate=plate,
            init_strategy=init_strategy,
            proposal=proposal,
            bounds=bounds,
            lam=lam,
            local=local,
            temperature=temperature,
            fallback=fallback,
            exact=exact,
            step_size=step_size,
            target_accept_prob=target_accept_prob,
            chunk_size=chunk_size,
        )

    def kernel(
        self, model: Callable[..., Any], init_strategy: Callable[..., Any] | None
    ) -> NumPyroKernel:
        return poisson_mh.PoissonMH(
            model, plate=self._plate, init_strategy=init_strategy, **self._options
        )
