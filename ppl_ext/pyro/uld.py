"""Underdamped Langevin dynamics as a Pyro kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import torch
from pyro.infer.autoguide.initialization import init_to_uniform

from ppl_ext.kernels import uld
from ppl_ext.pyro.kernel import DensityKernel, Tensors
from ppl_ext.pyro.potential import Engine
from ppl_ext.pyro.runner import Transition
from ppl_ext.pyro.target import Posterior
from ppl_ext.target import Array, Target


@dataclass(frozen=True)
class _Algorithm:
    settings: uld.Settings

    def transition(self, target: Target, num_warmup: int) -> Transition:
        def fields(state: uld.State, data: Any) -> dict[str, Array]:
            return {
                "accept_prob": state.accept_prob,
                "diverging": state.diverging,
                "energy": state.energy,
                "energy_error": state.energy_error,
                "mean_accept_prob": 1 - state.num_divergences / jnp.maximum(state.i, 1),
                "mean_square_error": state.mean_square_error,
                "num_steps": state.num_steps,
                "potential_energy": state.potential_energy,
                "step_size": state.adapt_state.step_size,
                "z_grad": state.z_grad,
            }

        return Transition(
            lambda key, z, data: uld.init(key, z, target.bind(data), self.settings),
            lambda state, data: uld.step(state, target.bind(data), self.settings, num_warmup),
            fields,
        )


class ULD(DensityKernel):
    """Underdamped Langevin dynamics: few gradients, and a small known bias or an accept step.

    `ppl_ext.numpyro.ULD` for Pyro: the same algorithm, the same options.

    Parameters
    ----------
    model : callable, optional
        Pyro model with continuous latent sites only.
    potential_fn : callable, optional
        Potential energy of a dict of real tensors, instead of `model`; `MCMC` then needs
        `initial_params`.
    integrator, step_size, friction, num_steps, precondition, adjust, bias_tolerance, \
    prior_precision
        As for `ppl_ext.numpyro.ULD`.
    transforms : dict, optional
        Maps of sites to the real line; found from their supports where not given.
    init_strategy : callable
        As for `pyro.infer.NUTS`.
    engine : {"auto", "xla", "torch"}
        `"xla"`: the model runs in JAX, or an error says why it cannot. `"torch"`: PyTorch
        evaluates it in each step, which is slow. `"auto"`: the first where possible, else the
        second with a warning.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: discrete or Delta sites, subsampled plates, no latent site, empty data.
    ppl_ext.errors.MismatchError
        At `run`: JAX and PyTorch disagree on the model.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from pyro.infer import MCMC
    >>> from ppl_ext.pyro import ULD
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    ...     pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> mcmc = MCMC(ULD(model), num_samples=500, warmup_steps=300, disable_progbar=True)
    >>> mcmc.run(torch.tensor(3.0))
    >>> mcmc.get_samples()["mu"].shape
    torch.Size([500])
    """

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Callable[[Tensors], torch.Tensor] | None = None,
        *,
        integrator: uld.IntegratorName = "baoab",
        step_size: float | None = None,
        friction: float | None = None,
        num_steps: int | None = None,
        precondition: Literal["diag", "dense"] | None = "diag",
        adjust: Literal["ghmc", "malt"] | None = None,
        bias_tolerance: float = 0.025,
        prior_precision: float | Mapping[str, Any] | None = None,
        transforms: Mapping[str, Any] | None = None,
        init_strategy: Callable[..., Any] = init_to_uniform,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            model, potential_fn, transforms=transforms, init_strategy=init_strategy, engine=engine
        )
        self.settings = uld.checked_settings(
            integrator=integrator,
            step_size=step_size,
            friction=friction,
            num_steps=num_steps,
            precondition=precondition,
            bias_tolerance=bias_tolerance,
            adjust=adjust,
            prior_precision=prior_precision,
            has_model=model is not None,
        )

    @property
    def algorithm(self) -> _Algorithm:
        # the prior reaches the algorithm with the data: compiled programs do not depend on it
        return _Algorithm(replace(self.settings, prior_precision=None))

    def check_target(self, target: Target) -> None:
        super().check_target(target)
        uld.check_sites(self.settings, target)

    def gaussian_prior(self, posterior: Posterior | None, start: Tensors) -> Any:
        given = self.settings.prior_precision
        if self.settings.integrator != "kbk":
            return None
        if given is None:
            assert posterior is not None
            return posterior.gaussian_prior()
        by_site = given if isinstance(given, Mapping) else dict.fromkeys(start, given)
        mean = {name: np.zeros(tuple(x.shape)) for name, x in start.items()}
        return mean, {n: np.broadcast_to(by_site.get(n, 0.0), m.shape) for n, m in mean.items()}

    def run_facts(self, state: uld.State) -> dict[str, Any]:
        return uld.facts(state.adapt_state, self.settings)
