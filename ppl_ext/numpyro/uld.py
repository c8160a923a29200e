"""Underdamped Langevin dynamics as a NumPyro kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from numpyro.infer.initialization import init_to_uniform

from ppl_ext.kernels import uld
from ppl_ext.numpyro.kernel import Kernel
from ppl_ext.target import Array, PyTree, Target


class ULD(Kernel):
    """Underdamped Langevin dynamics: few gradients, and a small known bias or an accept step.

    Parameters
    ----------
    model : callable, optional
        NumPyro model with continuous latent sites only.
    potential_fn : callable, optional
        Potential energy of a PyTree of real arrays, instead of `model`; `MCMC.run` then needs
        `init_params`.
    integrator : {"baoab", "obabo", "ubu", "ee", "rmm", "quicksort", "kbk"}
        Discretisation, with its bias in the step size h: `baoab` (h^2, none on a Gaussian),
        `obabo` and `ubu` (h^2); `ee`, exponential Euler, the scheme of the theorem (h); `rmm`,
        randomised midpoint, and `quicksort` (h^3, two gradients per step); `kbk` (h^2), which
        integrates the Gaussian part of the prior exactly, so that its bias does not grow with
        the number of coordinates that the data do not inform.
    step_size : float, optional
        Time per integrator step in the preconditioned coordinates (posterior standard
        deviations). `None`: found in warm-up.
    friction : float, optional
        Inverse time in the same coordinates. `None`: one over the posterior's width.
    num_steps : int, optional
        Integrator steps, one gradient each, per draw. `None`: the time that the posterior's
        width needs, at most 1,024 steps.
    precondition : {"diag", "dense"} or None
        Inverse mass matrix learned in warm-up. `"dense"` for strongly correlated posteriors of
        up to about a thousand dimensions; not with `kbk`.
    adjust : {"ghmc", "malt"} or None
        Accept or reject each step, or all steps of a draw: exact at any step size. Not with
        `rmm` and `quicksort`, which have no acceptance ratio. `obabo` accepts most.
    bias_tolerance : float
        Bias allowed, in posterior standard deviations, averaged over coordinates; sets the
        energy error at which the step size settles. Not used with `adjust`.
    prior_precision : float or dict, optional
        For `kbk`: precision of the Gaussian part of the prior, centred at zero, by unconstrained
        site (other sites: none). `None`: read from the model's sites with a Normal prior of
        constant parameters, their means too. Needed with `potential_fn`.
    init_strategy : callable
        As for `numpyro.infer.NUTS`.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: discrete or Delta sites, subsampled plates, no latent site, empty data.
    ppl_ext.errors.InitializationError
        At `run`: no start with a finite density; names the site.

    Notes
    -----
    Biased unless `adjust` is given, with the bias monitored: see
    `ppl_ext.diagnostics.uld_report`. Steps that land where the density vanishes or is NaN, or whose
    energy error a Metropolis step would accept with a probability below exp(-20), are undone and
    counted (`diverging`, `num_divergences`). Every draw keeps its gradient, so that Stein
    diagnostics are free. `energy_error` is the sum of the steps' energy errors; `rmm` and
    `quicksort` have none (NaN), so that only the curvature and the Stein check limit their step.

    A run continued on data that move the posterior many standard deviations away keeps the step
    size of the old posterior and may stand still, as NUTS does: call `mcmc.warmup` again.
    `ppl_ext.to_arviz` warns of chains that stand still.

    Sources: arXiv 2603.02429; those of the integrators in `ppl_ext.kernels.uld_integrators`.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import ULD
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> mcmc = MCMC(ULD(model), num_warmup=300, num_samples=500, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), 3.0)
    >>> mcmc.get_samples()["mu"].shape
    (500,)
    """

    default_fields = (
        "z",
        "diverging",
        "unconstrained_z",
        "z_grad",
        "potential_energy",
        "energy",
        "energy_error",
        "mean_square_error",
        "accept_prob",
        "num_steps",
        "adapt_state.step_size",
    )

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Callable[[PyTree], Array] | None = None,
        *,
        integrator: uld.IntegratorName = "baoab",
        step_size: float | None = None,
        friction: float | None = None,
        num_steps: int | None = None,
        precondition: Literal["diag", "dense"] | None = "diag",
        adjust: Literal["ghmc", "malt"] | None = None,
        bias_tolerance: float = 0.025,
        prior_precision: float | Mapping[str, Any] | None = None,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        super().__init__(model, potential_fn, init_strategy=init_strategy)
        self._settings = uld.checked_settings(
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
    def settings(self) -> uld.Settings:
        """The arguments that the algorithm reads."""
        return self._settings

    def _check_target(self, target: Target) -> None:
        super()._check_target(target)
        uld.check_sites(self._settings, target)

    def _init(self, rng_key: Array, z: PyTree, target: Target) -> uld.State:
        return uld.init(rng_key, z, target, self._settings)

    def _step(self, state: uld.State, target: Target) -> uld.State:
        return uld.step(state, target, self._settings, self._num_warmup)

    def _refresh(self, state: uld.State, target: Target) -> uld.State:
        return uld.refresh(state, target)

    def at_half_step(self, state: uld.State) -> tuple[ULD, uld.State]:
        """Kernel and state that continue a run with half the step size, the rest as it was."""
        settings = self._settings
        if settings.num_steps is not None:
            settings = replace(settings, num_steps=2 * settings.num_steps)
        kernel = copy.copy(self)
        kernel._settings = settings
        adapt = state.adapt_state
        return kernel, state._replace(adapt_state=adapt._replace(step_size=adapt.step_size / 2))

    def run_facts(self, state: uld.State) -> dict[str, Any]:
        """What `ppl_ext.diagnostics.uld_report` reads; `state` is that of one chain or of all."""
        return uld.facts(state.adapt_state, self._settings)

    def get_diagnostics_str(self, state: uld.State) -> str:
        """Step size, steps per draw and undone steps, for the progress bar."""
        return (
            f"step size {state.adapt_state.step_size:.2e}, {state.num_steps} steps/draw, "
            f"{state.num_divergences} undone"
        )
