"""Underdamped Langevin dynamics as a NumPyro kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from numpyro.infer.initialization import init_to_uniform

from ppl_ext.arguments import argument_error, check_choice, check_positive
from ppl_ext.kernels import uld
from ppl_ext.numpyro.kernel import Kernel
from ppl_ext.target import Array, PyTree, Target


class ULD(Kernel):
    """Underdamped Langevin dynamics without accept step: few gradients, a small known bias.

    Parameters
    ----------
    model : callable, optional
        NumPyro model with continuous latent sites only.
    potential_fn : callable, optional
        Potential energy of a PyTree of real arrays, instead of `model`; `MCMC.run` then needs
        `init_params`.
    integrator : {"baoab", "obabo"}
        Splitting. `baoab` leaves Gaussian targets unbiased at any stable step size.
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
        up to about a thousand dimensions.
    bias_tolerance : float
        Bias allowed, in posterior standard deviations, averaged over coordinates; sets the
        energy error at which the step size settles.
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
    Biased, with the bias monitored: see `ppl_ext.diagnostics.uld_report`. Steps that land where
    the density vanishes or is NaN, or whose energy error a Metropolis step would accept with a
    probability below exp(-20), are undone and counted (`diverging`, `num_divergences`).
    Every draw keeps its gradient, so that Stein diagnostics
    are free. Sources: arXiv 2603.02429; Leimkuhler & Matthews, Appl. Math. Res. Express 2013.

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
        integrator: Literal["baoab", "obabo"] = "baoab",
        step_size: float | None = None,
        friction: float | None = None,
        num_steps: int | None = None,
        precondition: Literal["diag", "dense"] | None = "diag",
        bias_tolerance: float = 0.025,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        super().__init__(model, potential_fn, init_strategy=init_strategy)
        check_choice("ULD", "integrator", integrator, tuple(uld.SPLITTINGS))
        check_choice("ULD", "precondition", precondition, ("diag", "dense", None))
        check_positive("ULD", step_size=step_size, friction=friction, num_steps=num_steps)
        check_positive("ULD", bias_tolerance=bias_tolerance)
        if num_steps is not None and not isinstance(num_steps, int):
            raise argument_error("ULD", "num_steps", num_steps, "a positive integer or None")
        self._settings = uld.Settings(
            integrator, step_size, friction, num_steps, precondition, bias_tolerance
        )

    @property
    def settings(self) -> uld.Settings:
        """The arguments that the algorithm reads."""
        return self._settings

    def _check_target(self, target: Target) -> None:
        target.check_continuous("ULD")

    def _init(self, rng_key: Array, z: PyTree, target: Target) -> uld.State:
        return uld.init(rng_key, z, target, self._settings)

    def _step(self, state: uld.State, target: Target) -> uld.State:
        return uld.step(state, target, self._settings, self._num_warmup)

    def _refresh(self, state: uld.State, target: Target) -> uld.State:
        return uld.refresh(state, target)

    def get_diagnostics_str(self, state: uld.State) -> str:
        """Step size, steps per draw and undone steps, for the progress bar."""
        return (
            f"step size {state.adapt_state.step_size:.2e}, {state.num_steps} steps/draw, "
            f"{state.num_divergences} undone"
        )
