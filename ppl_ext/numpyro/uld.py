"""Underdamped Langevin dynamics as a NumPyro kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpyro.infer.initialization import init_to_uniform

from ppl_ext.arguments import argument_error, check_choice, check_count, check_positive
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
        check_choice("ULD", "integrator", integrator, tuple(uld.INTEGRATORS))
        check_choice("ULD", "precondition", precondition, ("diag", "dense", None))
        optional = {"step_size": step_size, "friction": friction}
        check_positive("ULD", **{k: v for k, v in optional.items() if v is not None})
        check_positive("ULD", bias_tolerance=bias_tolerance)
        if num_steps is not None:
            check_count("ULD", num_steps=num_steps)
        check_choice("ULD", "adjust", adjust, ("ghmc", "malt", None))
        if adjust is not None and uld.INTEGRATORS[integrator].energy_order is None:
            raise ValueError(
                f'ULD: `integrator="{integrator}"` has no acceptance ratio, which '
                f'`adjust="{adjust}"` needs. Use "obabo", or `adjust=None`.'
            )
        if integrator == "kbk" and precondition == "dense":
            raise ValueError(
                'ULD: `integrator="kbk"` keeps the coordinates of the prior apart. Use '
                '`precondition="diag"` or None, or another integrator with "dense".'
            )
        if prior_precision is not None and integrator != "kbk":
            raise argument_error(
                "ULD", "prior_precision", prior_precision, f"None with integrator {integrator!r}"
            )
        if integrator == "kbk" and prior_precision is None and model is None:
            raise argument_error(
                "ULD", "prior_precision", None, "given for `potential_fn` with integrator 'kbk'"
            )
        _check_prior_precision(prior_precision)
        self._settings = uld.Settings(
            integrator,
            step_size,
            friction,
            num_steps,
            precondition,
            bias_tolerance,
            adjust,
            prior_precision,
        )

    @property
    def settings(self) -> uld.Settings:
        """The arguments that the algorithm reads."""
        return self._settings

    def _check_target(self, target: Target) -> None:
        target.check_continuous("ULD")
        given = self._settings.prior_precision
        if isinstance(given, Mapping) and (unknown := set(given) - set(target.structure)):
            raise ValueError(
                f"ULD: `prior_precision` names unknown sites {sorted(unknown)}; the model has "
                f"{sorted(target.structure)}."
            )

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
        adapt, settings = state.adapt_state, self._settings
        chains = lambda values: np.atleast_1d(np.asarray(values, np.float64))  # noqa: E731
        scale = np.asarray(adapt.scale, np.float64)
        inverse_mass = (scale**2).sum(-1) if settings.precondition == "dense" else scale**2
        facts: dict[str, Any] = {
            "uld_integrator": settings.integrator,
            "uld_adjust": settings.adjust or "none",
            "uld_step_size": chains(adapt.step_size),
            "uld_friction": chains(adapt.friction),
            "uld_trace": chains(adapt.trace),
            "uld_curvature": chains(adapt.curvature),
            "uld_width": chains(adapt.width),
            "uld_inverse_mass": inverse_mass.reshape(-1, inverse_mass.shape[-1]).mean(0),
        }
        if settings.integrator == "kbk":
            precision = np.asarray(adapt.prior_precision, np.float64)
            facts["uld_prior_precision"] = precision.reshape(-1, precision.shape[-1])[0]
        return facts

    def get_diagnostics_str(self, state: uld.State) -> str:
        """Step size, steps per draw and undone steps, for the progress bar."""
        return (
            f"step size {state.adapt_state.step_size:.2e}, {state.num_steps} steps/draw, "
            f"{state.num_divergences} undone"
        )


def _check_prior_precision(given: float | Mapping[str, Any] | None) -> None:
    named = given if isinstance(given, Mapping) else {"": given}
    for name, value in named.items():
        if value is None and not name:
            continue
        array = np.asarray(value)
        number = array.dtype.kind in "iuf"
        if not number or not (np.isfinite(array) & (array >= 0)).all():
            where = f"prior_precision[{name!r}]" if name else "prior_precision"
            raise argument_error("ULD", where, value, "finite numbers >= 0")
        if not name and array.ndim:
            raise argument_error("ULD", "prior_precision", value, "a number or a dict by site")
