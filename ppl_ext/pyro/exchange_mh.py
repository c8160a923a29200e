"""ExchangeMH as a Pyro kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

from numpyro.infer import init_to_uniform

from ppl_ext.arguments import check_count
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro import exchange_mh
from ppl_ext.numpyro.kernel import Kernel as NumPyroKernel
from ppl_ext.pyro.translated import TranslatedKernel
from ppl_ext.target import Target


class ExchangeMH(TranslatedKernel):
    """Exchange algorithm: exact posteriors of likelihoods with an unknown normalising constant.

    `ppl_ext.numpyro.ExchangeMH` for Pyro: the same algorithm, the same options.

    Parameters
    ----------
    model : callable
        Pyro model with continuous latent sites, and one or more observed sites with a distribution
        such as `ppl_ext.pyro.Ising`; other observed sites may stand beside them.
    proposal, pool, num_aux, step_size, target_accept_prob
        As for `ppl_ext.numpyro.ExchangeMH`.
    init_strategy : callable, optional
        As for `pyro.infer.NUTS`.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: as for `ppl_ext.numpyro.ExchangeMH`; a distribution that NumPyro does not have.
    ppl_ext.errors.TracingError
        At `run`: JAX cannot evaluate the model.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density.

    Warns
    -----
    UserWarning
        At `run`: a simulator is not exact, so that neither are the draws.

    Notes
    -----
    Exact if the simulators are, see `ppl_ext.numpyro.ExchangeMH`. `ppl_ext.pyro.MCMC` keeps the
    statistics of each draw.

    Examples
    --------
    >>> import pyro, pyro.distributions as dist
    >>> from ppl_ext.pyro import MCMC, ExchangeMH, Graph, Ising
    >>> graph = Graph.lattice(3, 3)
    >>> x = Ising(0.3, 0.0, graph).sample()
    >>> def model(x):
    ...     coupling = pyro.sample("coupling", dist.Uniform(0.0, 1.0))
    ...     pyro.sample("x", Ising(coupling, 0.0, graph), obs=x)
    >>> mcmc = MCMC(ExchangeMH(model), 100, warmup_steps=100, disable_progbar=True)
    >>> mcmc.run(x)
    >>> int(mcmc.get_extra_fields()["num_overflow"].max())
    0
    """

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
        self._options: dict[str, Any] = dict(
            proposal=proposal,
            pool=pool,
            num_aux=num_aux,
            step_size=step_size,
            target_accept_prob=target_accept_prob,
        )
        self._length = 1
        super().__init__(model, init_strategy)

    def kernel(
        self, model: Callable[..., Any], init_strategy: Callable[..., Any] | None
    ) -> NumPyroKernel:
        kernel = exchange_mh.ExchangeMH(
            model, init_strategy=init_strategy or init_to_uniform, **self._options
        )
        return kernel.with_simulations(self._length)

    def with_simulations(self, length: int) -> ExchangeMH:
        """The same kernel with simulations that are `length` times as long where not exact."""
        check_count("ExchangeMH", length=length)
        kernel = copy.copy(self)
        kernel._length = int(length)
        kernel._compiled = None
        return kernel

    def check_target(self, target: Target) -> None:
        reason = exchange_mh.refusal(target)
        if reason is not None:
            raise UnsupportedModelError(reason)
