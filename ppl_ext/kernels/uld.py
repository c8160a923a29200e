"""Underdamped Langevin dynamics (ULD), unadjusted or with an accept step.

Samples exp(-U(x)) on R^d with the diffusion

    dX = V dt,    dV = -friction V dt - grad U(X) dt + sqrt(2 friction) dB,

run in the coordinates y = L^-1 x, in which the inverse mass matrix L L^T becomes the identity.
`uld_integrators` has the steps; memory is O(d), whatever their number.

Without accept step the draws are biased. On a Gaussian target the law of x is exact for `baoab`;
for the others the relative bias of the variance in a direction of curvature lambda (in y) is, for
a small step h and friction g,

    obabo      1 / (1 - h^2 lambda / 4) - 1, exactly    ubu  -h^2 lambda / 6
    rmm        h^3 lambda^2 / (24 g)                    ee   h lambda / (2 g)
    quicksort  h^3 lambda (g + lambda / g) / 72 at most
    kbk        -h^2 f (2 f + m) / (12 (f + m))

where `kbk` has m from the prior and f from the rest. The error is monitored through the energy
error W of each step, minus the log of its Metropolis ratio. `adjust="ghmc"` accepts each step with
probability min(1, exp(-W)), else stays and reverses the velocity (Horowitz 1991); `adjust="malt"`
draws a velocity, makes all steps of the draw, and accepts with the sum of W (Riou-Durand & Vogrinc
2022, arXiv 2202.13230, algorithm 1). Both are exact at any step size.

Warm-up sets, per chain: L from the draws and their gradients, the largest curvature by Lanczos
iterations on Hessian-vector products, the friction from the width of the posterior, and the step
size from the variance of W per dimension (or from the acceptance probability), capped by the
curvature. In its last fifth a Stein check, at no gradient, makes the step smaller while the draws
show a bias beyond the tolerance.

Sources: Zhang, Di, Li & Gu 2026, arXiv 2603.02429 (dimension-free convergence of ULD);
Robnik & Seljak 2024, arXiv 2412.08876 (the energy error bounds the average bias).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from scipy import special

from ppl_ext.arguments import argument_error, check_choice, check_count, check_positive
from ppl_ext.kernels.chain import Resumable, run_if
from ppl_ext.kernels.uld_integrators import INTEGRATORS, Integrator, Noise, Phase, System
from ppl_ext.target import Array, PyTree, Target

IntegratorName = Literal["baoab", "obabo", "ubu", "ee", "rmm", "quicksort", "kbk"]

# a step is undone when its energy error exceeds this many standard deviations (plus this much):
# a Metropolis step would accept it with a probability below exp(-20)
MAX_ENERGY_ERROR = 20.0

# upper bound of step_size * sqrt(largest curvature); the first integrators are unstable from 2 on,
# and `baoab` is exact on a Gaussian up to there
MAX_STABLE_STEP = 0.8
MAX_STABLE_STEP_BAOAB = 1.0
MAX_STABLE_STEP_ADJUSTED = 1.4

# the same for the frequency of the prior that `kbk` integrates exactly: it resonates from pi on
MAX_PRIOR_STEP = 2.0

# mean acceptance probability of one step (`ghmc`: each rejection turns the chain round) or of all
# the steps of a draw (`malt`)
ACCEPTANCE = {"ghmc": 0.95, "malt": 0.8}

# dynamics time per draw, in units of the posterior width: adjacent draws then correlate little
TIME_PER_DRAW = 2.0

MAX_STEPS_PER_DRAW = 1024
MAX_STEPS_BEFORE_METRIC = 16

# Hessian-vector products for the largest curvature: in new coordinates, and between
LANCZOS_STEPS, LANCZOS_STEPS_BETWEEN = 6, 2

# at most so many steps, and so many numbers, in one call of the random number generator
NOISE_BLOCK, NOISE_BLOCK_SIZE = 8, 4096

# the Stein check: windows of at least so many draws, batches per window, and false-alarm rate
STEIN_WINDOW, MAX_STEIN_WINDOWS = 100, 4
STEIN_BATCHES = 20
STEIN_LEVEL = 1e-3


@dataclass(frozen=True)
class Settings:
    """What the user fixes; `None` is found in warm-up. Step size is in y coordinates."""

    integrator: IntegratorName = "baoab"
    step_size: float | None = None
    friction: float | None = None
    num_steps: int | None = None
    precondition: Literal["diag", "dense"] | None = "diag"
    bias_tolerance: float = 0.025
    adjust: Literal["ghmc", "malt"] | None = None
    prior_precision: float | Mapping[str, Any] | None = None

    @property
    def spec(self) -> Integrator:
        """The integrator."""
        return INTEGRATORS[self.integrator]

    @property
    def draws_between(self) -> int:
        """Draws from one look at the curvature to the next.

        It varies over the posterior, and without an energy error nothing else limits the step.
        """
        return 10 if self.spec.energy_order is not None else 2

    def energy_error_target(self, friction: Any = 1.0) -> Any:
        """Var(W) / d at which the average bias of the standard deviations is `bias_tolerance`.

        For unit curvatures, which the preconditioner aims at. For `obabo` on a Gaussian,
        (variance bias)^2 / 2 = 0.2 (Var(W) / d)^(2/3). Var(W) / d is friction h^3 / 6 for `ubu`
        (for `kbk` at most) and h^3 / (2 friction) for `ee`. `baoab` has no bias on a Gaussian; on
        potentials x^4, x^4 + 2 x^2, exp(x) - x and log cosh x that of the standard deviation is at
        most 0.025 (Var(W) / d)^(2/5), a quarter of the tolerance here, up to Var(W) / d = 0.03.
        Beyond, the steps get unstable.
        """
        if self.integrator == "baoab":
            return (10 * min(self.bias_tolerance, 0.025)) ** 2.5
        if self.integrator in ("ubu", "kbk"):
            return friction * (12 * self.bias_tolerance) ** 1.5 / 6
        if self.integrator == "ee":
            return 32 * friction**2 * self.bias_tolerance**3
        return (2 * self.bias_tolerance / math.sqrt(0.4)) ** 3

    def max_step(self, curvature: Array, friction: Array) -> Array:
        """Step size at which the stiffest direction is stable and biased by the tolerance."""
        curvature = jnp.maximum(curvature, 1e-12)
        stable = 1 / jnp.sqrt(curvature)
        if self.adjust is not None:
            return MAX_STABLE_STEP_ADJUSTED * stable
        cap, tolerance = MAX_STABLE_STEP * stable, self.bias_tolerance
        if self.integrator == "baoab":
            cap = MAX_STABLE_STEP_BAOAB * stable
        if self.integrator == "obabo":
            cap = jnp.minimum(cap, math.sqrt(8 * tolerance) * stable)
        elif self.integrator in ("ubu", "kbk"):
            cap = jnp.minimum(cap, math.sqrt(12 * tolerance) * stable)
        elif self.integrator == "ee":
            cap = jnp.minimum(cap, 4 * friction * tolerance / curvature)
        elif self.integrator == "rmm":
            cap = jnp.minimum(cap, jnp.cbrt(48 * friction * tolerance / curvature**2))
        elif self.integrator == "quicksort":
            rate = curvature * (friction + curvature / friction)
            cap = jnp.minimum(cap, jnp.cbrt(144 * tolerance / rate))
        return cap


class SteinSums(NamedTuple):
    """Running sums over the 2 d + 1 Stein features, and the point they are centred at."""

    center: Array  # (d,)
    batch: Array  # (2 d + 1,) sum over the draws of this batch
    total: Array  # (2 d + 1,) sum of the batches
    square: Array  # (2 d + 1,) sum of squares of the batches


class AdaptState(NamedTuple):
    """What warm-up finds, frozen afterwards. All per chain."""

    step_size: Array  # () time in y coordinates
    friction: Array  # () inverse time
    scale: Array  # (d,) or (d, d): L, with L L^T the inverse mass matrix
    curvature: Array  # () largest eigenvalue of L^T (Hess U) L seen lately
    trace: Array  # () mean |L^T grad U|^2 = trace of E L^T (Hess U) L (Bartlett identity)
    width: Array  # () largest standard deviation of y in any direction
    log_step: Array  # () log of the step size that the energy error asks for
    max_step: Array  # () what the Stein check allows; infinite until it finds a bias
    stein: SteinSums  # sums of the Stein check
    prior_precision: Array  # (d,) what `kbk` integrates exactly, in x; (0,) for the others
    direction: Array  # (d,) unit vector: start of the next Lanczos iterations for `curvature`
    widest: Array  # (d,) running sum whose direction approaches the widest one
    num_draws: Array  # () draws in the running moments below
    mean: Array  # (d,) mean of x
    moment: Array  # (d,) or (d, d) centred second moment of x, times num_draws
    grad_mean: Array  # (d,) mean of grad U
    grad_moment: Array  # (d,) centred second moment of grad U, times num_draws


class _Fields(NamedTuple):
    i: Array  # () transitions made, warm-up included
    z: PyTree  # unconstrained sites
    z_grad: PyTree  # gradient of the potential energy: minus the score
    velocity: Array  # (d,)
    potential_energy: Array  # ()
    energy: Array  # () potential plus kinetic energy
    energy_error: Array  # () sum of W over the steps of this draw; NaN without energy error
    mean_square_error: Array  # () mean of W^2 per dimension over the steps of this draw, or NaN
    num_steps: Array  # () integrator steps of this draw
    accept_prob: Array  # () share of steps kept; with `adjust`, the mean acceptance probability
    diverging: Array  # () whether a step exploded or left the support
    num_divergences: Array  # () such steps so far
    adapt_state: AdaptState
    stale: Array  # () whether the cached energy and gradient may belong to other data
    rng_key: Array


class State(Resumable, _Fields):
    """Chain state. Field names are those that NumPyro and ArviZ know."""

    __slots__ = ()

    @property
    def unconstrained_z(self) -> PyTree:
        """`z` under a name that drivers collect without constraining it."""
        return self.z


def init(key: Array, z: PyTree, target: Target, settings: Settings) -> State:
    """State at the unconstrained sites `z`, with a first step size from the curvature there."""
    key, key_velocity, key_direction = jax.random.split(key, 3)
    x = target.ravel(z)
    potential_energy, grad = jax.value_and_grad(potential(target))(x)
    dtype = jnp.result_type(potential_energy, x)
    zero, zeros = jnp.zeros((), dtype), jnp.zeros(x.shape, dtype)
    ones, direction = jnp.ones_like(zeros), jax.random.normal(key_direction, x.shape, dtype)
    dense = settings.precondition == "dense"
    sums = jnp.zeros(2 * x.size + 1, dtype)
    adapt = AdaptState(
        step_size=zero,
        friction=zero,
        scale=jnp.diag(ones) if dense else ones,
        curvature=zero,
        trace=zero,
        width=jnp.ones((), dtype),
        log_step=zero,
        max_step=jnp.full((), jnp.inf, dtype),
        stein=SteinSums(zeros, sums, sums, sums),
        prior_precision=zeros[: zeros.size * (settings.integrator == "kbk")],
        direction=direction / jnp.linalg.norm(direction),
        widest=direction,
        num_draws=zero,
        mean=zeros,
        moment=jnp.diag(zeros) if dense else zeros,
        grad_mean=zeros,
        grad_moment=zeros,
    )
    prior = gaussian_prior(target, settings, zeros)
    adapt = _update_curvature(adapt, x, target, prior, settings, LANCZOS_STEPS)
    adapt = _restart_step(adapt, settings, prior)
    velocity = jax.random.normal(key_velocity, x.shape, dtype)
    potential_energy = potential_energy.astype(dtype)
    return State(
        i=jnp.zeros((), jnp.int32),
        z=target.unravel(x.astype(dtype)),
        z_grad=target.unravel(grad.astype(dtype)),
        velocity=velocity,
        potential_energy=potential_energy,
        energy=potential_energy + velocity @ velocity / 2,
        energy_error=zero,
        mean_square_error=zero,
        num_steps=jnp.zeros((), jnp.int32),
        accept_prob=zero,
        diverging=jnp.zeros((), bool),
        num_divergences=jnp.zeros((), jnp.int32),
        adapt_state=adapt,
        stale=jnp.zeros((), bool),
        rng_key=key,
    )


def refresh(state: State, target: Target) -> State:
    """The same point with potential energy and gradient computed for the target's data."""
    potential_energy, grad = jax.value_and_grad(potential(target))(target.ravel(state.z))
    dtype = state.potential_energy.dtype
    return state._replace(
        potential_energy=potential_energy.astype(dtype),
        energy=potential_energy.astype(dtype) + state.velocity @ state.velocity / 2,
        z_grad=target.unravel(grad.astype(dtype)),
        stale=jnp.zeros_like(state.stale),
    )


class _Tally(NamedTuple):
    """What is added up over the steps of a draw."""

    error: Array  # W
    square: Array  # W^2
    accept: Array  # acceptance probability, or 1 for a step that was kept
    exploded: Array  # steps that exploded or left the support


def step(state: State, target: Target, settings: Settings, num_warmup: int) -> State:
    """One draw: several integrator steps, then adaptation while `i < num_warmup`."""
    state = run_if(state.stale, lambda s: refresh(s, target), state)
    key, key_steps, key_velocity = jax.random.split(state.rng_key, 3)
    warming = state.i < num_warmup
    adapt, spec, adjust = state.adapt_state, settings.spec, settings.adjust
    num_steps = _num_steps(state.i, adapt, settings, num_warmup)
    start = Phase(
        target.ravel(state.z), state.velocity, state.potential_energy, target.ravel(state.z_grad)
    )
    size, dtype = start.x.size, start.x.dtype
    prior = gaussian_prior(target, settings, start.x)
    if settings.integrator == "kbk":
        # of the present data, for reports
        adapt = adapt._replace(prior_precision=prior[1])
    system = System(potential(target), adapt.step_size, adapt.friction, adapt.scale, *prior)
    advance = spec.make(system)
    # on the way down from a far start the friction alone would take long to cool the chain
    fresh = jax.random.normal(key_velocity, (size,), dtype)
    start = start._replace(v=jnp.where(warming | (adjust == "malt"), fresh, start.v))
    variance = size * jnp.asarray(settings.energy_error_target(adapt.friction), dtype)
    if spec.energy_order is None:
        # the change of the energy instead of W: it holds the heat, at most of order sqrt(d)
        variance = jnp.full((), size, dtype)
    bound = MAX_ENERGY_ERROR * (1 + jnp.sqrt(variance))

    def body(noise: Noise, uniform: Array, carry: tuple[Phase, _Tally]) -> tuple[Phase, _Tally]:
        phase, tally = carry
        new, w = advance(noise, phase)
        if spec.energy_order is not None:
            # W holds the kick of every gradient: it is not finite where one of them is not
            change = w
            finite = jnp.isfinite(w)
        else:
            change = _energy(new) - _energy(phase)
            finite = jnp.isfinite(change) & jnp.isfinite(new.grad).all()
        exploded = ~(finite & (change < bound))
        # in warm-up a step downhill is kept, however inexact
        downhill = finite & warming & (new.potential_energy < phase.potential_energy)
        if adjust == "ghmc":
            prob = jnp.where(finite, jnp.exp(-jnp.maximum(w, 0.0)), 0.0)
            kept = uniform < prob
        else:
            # a step into a region without density, or one that explodes, is undone: position
            # kept, velocity reversed, which is what a Metropolis step would do
            kept = ~exploded
            prob = kept.astype(dtype)
        kept |= downhill
        undo = phase._replace(v=-phase.v)
        phase = jax.tree.map(lambda a, b: jnp.where(kept, a, b), new, undo)
        w = jnp.where(exploded & ~kept, 0.0, w)
        return phase, _Tally(
            tally.error + w,
            tally.square + w**2,
            tally.accept + prob,
            tally.exploded + ~kept if adjust is None else tally.exploded + exploded,
        )

    # a call of the random number generator for several steps costs little more than for one
    length = max(1, min(NOISE_BLOCK, NOISE_BLOCK_SIZE // (spec.normals * size)))
    length = min(length, settings.num_steps or length)

    def block(k: Array, carry: tuple[Phase, _Tally]) -> tuple[Phase, _Tally]:
        key_normals, key_times, key_uniforms = jax.random.split(jax.random.fold_in(key_steps, k), 3)
        normals = jax.random.normal(key_normals, (length, spec.normals, size), dtype)
        times = jax.random.uniform(key_times, (length,), dtype)
        uniforms = jax.random.uniform(key_uniforms, (length,), dtype)
        return jax.lax.fori_loop(
            0,
            jnp.minimum(length, num_steps - k * length),
            lambda j, carry: body(Noise(normals[j], times[j]), uniforms[j], carry),
            carry,
        )

    zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    blocks = (num_steps + length - 1) // length
    phase, tally = jax.lax.fori_loop(0, blocks, block, (start, _Tally(zero, zero, zero, none)))
    accept_prob = tally.accept / num_steps
    if adjust == "malt":
        complete = tally.exploded == 0
        accept_prob = jnp.where(complete, jnp.exp(-jnp.maximum(tally.error, 0.0)), 0.0)
        kept = jax.random.uniform(jax.random.fold_in(key_velocity, 1), (), dtype) < accept_prob
        kept |= complete & warming & (phase.potential_energy < start.potential_energy)
        # reversed, so that the joint law with the velocity is exact, too
        start = start._replace(v=-start.v)
        phase = jax.tree.map(lambda a, b: jnp.where(kept, a, b), phase, start)
    if not spec.grad_at_x:
        phase = phase._replace(grad=jax.grad(system.potential)(phase.x).astype(dtype))
    new = State(
        i=state.i + 1,
        z=target.unravel(phase.x),
        z_grad=target.unravel(phase.grad),
        velocity=phase.v,
        potential_energy=phase.potential_energy,
        energy=_energy(phase),
        energy_error=tally.error,
        mean_square_error=tally.square / (jnp.maximum(num_steps - tally.exploded, 1) * size),
        num_steps=num_steps,
        accept_prob=accept_prob.astype(dtype),
        diverging=tally.exploded > 0,
        num_divergences=state.num_divergences + tally.exploded,
        adapt_state=adapt,
        stale=state.stale,
        rng_key=key,
    )
    return run_if(warming, lambda s: _adapt(s, phase, target, prior, settings, num_warmup), new)


def gaussian_prior(target: Target, settings: Settings, like: Array) -> tuple[Array, Array]:
    """Mean and precision, each (d,), of the prior that `kbk` integrates exactly, in x.

    The precision is zero where there is none, and for all other integrators. Any values give a
    correct integrator: what they do not take from U stays in its B part.
    """
    zeros = jnp.zeros_like(like)
    given = settings.prior_precision
    if settings.integrator != "kbk":
        return zeros, zeros
    if given is None:
        assert target.gaussian_prior is not None
        mean, precision = (target.ravel(z).astype(like.dtype) for z in target.gaussian_prior())
        return mean, precision
    shapes = jax.eval_shape(target.unravel, like)
    if isinstance(given, Mapping):
        sites = {
            name: jnp.broadcast_to(jnp.asarray(given.get(name, 0.0), like.dtype), leaf.shape)
            for name, leaf in shapes.items()
        }
        return zeros, target.ravel(sites)
    return zeros, jnp.full_like(like, given)


def _energy(phase: Phase) -> Array:
    return phase.potential_energy + phase.v @ phase.v / 2


# --- the front ends ---------------------------------------------------------------------------


def checked_settings(*, has_model: bool, **given: Any) -> Settings:
    """`Settings` of the arguments of a front end's `ULD`.

    Raises
    ------
    ValueError
        For a bad argument, or two that exclude each other, named.
    """
    settings = Settings(**given)
    integrator, adjust = settings.integrator, settings.adjust
    check_choice("ULD", "integrator", integrator, tuple(INTEGRATORS))
    check_choice("ULD", "precondition", settings.precondition, ("diag", "dense", None))
    optional = {"step_size": settings.step_size, "friction": settings.friction}
    check_positive("ULD", **{k: v for k, v in optional.items() if v is not None})
    check_positive("ULD", bias_tolerance=settings.bias_tolerance)
    if settings.num_steps is not None:
        check_count("ULD", num_steps=settings.num_steps)
    check_choice("ULD", "adjust", adjust, ("ghmc", "malt", None))
    if adjust is not None and settings.spec.energy_order is None:
        raise ValueError(
            f'ULD: `integrator="{integrator}"` has no acceptance ratio, which '
            f'`adjust="{adjust}"` needs. Use "obabo", or `adjust=None`.'
        )
    if integrator == "kbk" and settings.precondition == "dense":
        raise ValueError(
            'ULD: `integrator="kbk"` keeps the coordinates of the prior apart. Use '
            '`precondition="diag"` or None, or another integrator with "dense".'
        )
    precision = settings.prior_precision
    if precision is not None and integrator != "kbk":
        raise argument_error(
            "ULD", "prior_precision", precision, f"None with integrator {integrator!r}"
        )
    if integrator == "kbk" and precision is None and not has_model:
        raise argument_error(
            "ULD", "prior_precision", None, "given for `potential_fn` with integrator 'kbk'"
        )
    _check_prior_precision(precision)
    return settings


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


def check_sites(settings: Settings, target: Target) -> None:
    """Raise `ValueError` when `prior_precision` names sites that the target has not."""
    given = settings.prior_precision
    if isinstance(given, Mapping) and (unknown := set(given) - set(target.structure)):
        raise ValueError(
            f"ULD: `prior_precision` names unknown sites {sorted(unknown)}; the model has "
            f"{sorted(target.structure)}."
        )


def facts(adapt: AdaptState, settings: Settings) -> dict[str, Any]:
    """What `ppl_ext.diagnostics.uld_report` reads, of one chain or one after the other of all."""
    chains = lambda values: np.asarray(values, np.float64).ravel()  # noqa: E731
    scale = np.asarray(adapt.scale, np.float64)
    inverse_mass = (scale**2).sum(-1) if settings.precondition == "dense" else scale**2
    found: dict[str, Any] = {
        "uld_integrator": settings.integrator,
        "uld_adjust": settings.adjust or "none",
        "uld_step_size": chains(adapt.step_size),
        "uld_friction": chains(adapt.friction),
        "uld_trace": chains(adapt.trace),
        "uld_curvature": chains(adapt.curvature),
        "uld_width": chains(adapt.width),
        "uld_inverse_mass": chains(inverse_mass),
    }
    if settings.integrator == "kbk":
        found["uld_prior_precision"] = chains(adapt.prior_precision)
    return found


# --- warm-up ---------------------------------------------------------------------------------


def metric_updates(num_warmup: int) -> np.ndarray:
    """Whether L is updated after each warm-up transition, shape (max(num_warmup, 1),).

    Windows grow by one half, the first has 10 draws, and the last fifth of warm-up is left to
    the step size.
    """
    updates = np.zeros(max(num_warmup, 1), bool)
    last, window, end = int(0.8 * num_warmup), 10, 10
    while end < last:
        updates[end - 1] = True
        window += window // 2
        # no short window just before the end
        end = last if end + 2 * window > last else end + window
    if last >= 10:
        updates[last - 1] = True
    return updates


def _adapt(
    state: State,
    phase: Phase,
    target: Target,
    prior: tuple[Array, Array],
    settings: Settings,
    num_warmup: int,
) -> State:
    place = jnp.clip(state.i - 1, 0, max(num_warmup - 1, 0))
    update_metric = jnp.asarray(metric_updates(num_warmup))[place]
    if settings.precondition is None:
        update_metric &= False
    products = jnp.asarray(curvature_products(settings, num_warmup))[place]
    adapt = _update_moments(state.adapt_state, phase)
    adapt = _update_log_step(adapt, state, settings)
    # correlations seen on the way from the start mislead; scales do not
    with_correlations = state.i > 0.3 * num_warmup
    adapt = run_if(update_metric, lambda a: _update_metric(a, with_correlations), adapt)
    adapt = run_if(
        products > 0,
        lambda a: _update_curvature(a, phase.x, target, prior, settings, products),
        adapt,
    )
    adapt = run_if(update_metric, lambda a: _restart_step(a, settings, prior), adapt)
    adapt = _check_stein(adapt, phase, state.i, settings, num_warmup)
    return state._replace(adapt_state=_set_step(adapt, settings, prior))


def _update_moments(a: AdaptState, phase: Phase) -> AdaptState:
    """Welford's recursion for mean and covariance of x and of the gradient, trace and width."""
    count = a.num_draws + 1
    delta, grad_delta = phase.x - a.mean, phase.grad - a.grad_mean
    mean, grad_mean = a.mean + delta / count, a.grad_mean + grad_delta / count
    dense = a.scale.ndim == 2
    product = jnp.outer(delta, phase.x - mean) if dense else delta * (phase.x - mean)
    whitened_grad = _transposed_times(a.scale, phase.grad)
    # the projection on a direction found from earlier draws has no upward bias in high dimension
    y = solve_triangular(a.scale, delta, lower=True) if dense else delta / a.scale
    projection = y @ a.widest / jnp.linalg.norm(a.widest)
    variance = a.width**2 + (projection**2 - a.width**2) / count
    return a._replace(
        num_draws=count,
        mean=mean,
        moment=a.moment + product,
        grad_mean=grad_mean,
        grad_moment=a.grad_moment + grad_delta * (phase.grad - grad_mean),
        trace=a.trace + (whitened_grad @ whitened_grad - a.trace) / count,
        # the first draws of a window know neither mean nor direction
        width=jnp.where(count > 5, jnp.sqrt(variance), a.width),
        widest=jnp.where(count > 2, a.widest + projection * y, a.widest),
    )


def _update_log_step(a: AdaptState, state: State, settings: Settings) -> AdaptState:
    """Robbins-Monro recursion for the step size.

    It seeks the Var(W) / d of `Settings.energy_error_target`, with `adjust` the acceptance
    probability. Without an energy error the step grows to its cap.
    """
    if settings.adjust is not None:
        goal = ACCEPTANCE[settings.adjust]
        change = (state.accept_prob - goal) / (1 - goal) / 3
    elif settings.spec.energy_order is None:
        change = jnp.ones_like(a.log_step)
    else:
        # not the log of the ratio: W has heavy tails, and its mean square is sought
        ratio = state.mean_square_error / settings.energy_error_target(a.friction)
        change = (1 - ratio) / settings.spec.energy_order
    if settings.adjust != "malt":
        # a chain most steps of which are undone needs a smaller step at once
        change = jnp.where(state.accept_prob < 0.5, -jnp.inf, change)
    rate = jnp.maximum(0.03, 5 / (5 + a.num_draws))
    return a._replace(log_step=a.log_step + jnp.clip(rate * change, -math.log(2), 0.3))


def _update_metric(a: AdaptState, with_correlations: Array) -> AdaptState:
    """L from the moments of this window, then start a new window.

    The diagonal is the geometric mean of Var(x) and 1 / Var(grad U): exact for independent
    Gaussian coordinates even before the chain has travelled across them.
    """
    tiny = jnp.finfo(a.mean.dtype).tiny
    dense = a.scale.ndim == 2
    moment = jnp.diag(a.moment) if dense else a.moment
    ratio = jnp.maximum(moment, tiny) / jnp.maximum(a.grad_moment, tiny)
    diagonal = jnp.sqrt(ratio)
    # a coordinate that did not move, or whose gradient is constant, tells nothing
    old = jnp.sum(a.scale**2, -1) if dense else a.scale**2
    known = (moment > tiny) & (a.grad_moment > tiny) & jnp.isfinite(diagonal)
    diagonal = jnp.where(known, diagonal, old)
    if dense:
        weight = jnp.where(with_correlations, a.num_draws / (a.num_draws + 5), 0.0)
        covariance = weight * a.moment / (a.num_draws - 1) + (1 - weight) * jnp.diag(diagonal)
        # factor the correlation matrix: scales may differ by more than float32 resolves
        sd = jnp.sqrt(jnp.diag(covariance))
        factor = sd[:, None] * jnp.linalg.cholesky(covariance / jnp.outer(sd, sd))
        scale = jnp.where(jnp.isfinite(factor).all(), factor, a.scale)
    else:
        scale = jnp.sqrt(diagonal)
    zeros = jnp.zeros_like(a.mean)
    return a._replace(
        scale=scale,
        curvature=jnp.zeros_like(a.curvature),
        width=jnp.ones_like(a.width),
        num_draws=jnp.zeros_like(a.num_draws),
        mean=zeros,
        moment=jnp.zeros_like(a.moment),
        grad_mean=zeros,
        grad_moment=zeros,
    )


def curvature_products(settings: Settings, num_warmup: int) -> np.ndarray:
    """Hessian-vector products after each warm-up transition, shape (max(num_warmup, 1),).

    `init` takes `LANCZOS_STEPS` more.
    """
    updates = metric_updates(num_warmup)
    if settings.precondition is None:
        updates[:] = False
    products = np.zeros(len(updates), np.int32)
    last = -1
    for i, update in enumerate(updates):
        if update:
            # the curvature belongs to the coordinates
            products[i], last = LANCZOS_STEPS, i
        elif (i - last) % settings.draws_between == 0:
            products[i] = LANCZOS_STEPS_BETWEEN
    return products


def _update_curvature(
    a: AdaptState,
    x: Array,
    target: Target,
    prior: tuple[Array, Array],
    settings: Settings,
    steps: Any,
) -> AdaptState:
    """So many Lanczos steps on Hessian-vector products; the largest recent value.

    The memory is a share of the window, so that the high curvatures on the way from the start
    to the posterior are forgotten. What `kbk` integrates exactly does not count.
    """
    grad, precision = jax.grad(potential(target)), prior[1]

    def product(direction: Array) -> Array:
        tangent = _times(a.scale, direction)
        image = jax.jvp(grad, (x,), (tangent,))[1] - precision * tangent
        return _transposed_times(a.scale, image).astype(direction.dtype)

    curvature, direction = largest_eigenvalue(product, a.direction, steps)
    remembered = a.curvature * a.num_draws / (2 * settings.draws_between + a.num_draws)
    return a._replace(direction=direction, curvature=jnp.maximum(remembered, curvature))


def largest_eigenvalue(
    product: Callable[[Array], Array], start: Array, steps: Any
) -> tuple[Array, Array]:
    """Eigenvalue of largest modulus of a symmetric matrix: its modulus, and a unit vector.

    Lanczos iterations, at most `LANCZOS_STEPS`, with full orthogonalisation. Where a product is
    not finite they end; 0 and the start without any.
    """
    most, eps = LANCZOS_STEPS, 1e-4

    def body(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        basis, diagonal, beside = carry
        image = product(basis[j])
        image = jnp.where(jnp.isfinite(image).all(), image, 0.0)
        size = jnp.linalg.norm(image)
        diagonal = diagonal.at[j].set(basis[j] @ image)
        for _ in range(2):
            image -= basis.T @ (basis @ image)
        norm = jnp.linalg.norm(image)
        # an invariant subspace is found: what remains is rounding
        new = norm > eps * size
        following = jnp.where(new, image / jnp.where(new, norm, 1.0), 0.0)
        return basis.at[j + 1].set(following), diagonal, beside.at[j].set(jnp.where(new, norm, 0.0))

    zeros = jnp.zeros(most, start.dtype)
    basis = jnp.zeros((most + 1, start.size), start.dtype).at[0].set(start)
    basis, diagonal, beside = jax.lax.fori_loop(0, steps, body, (basis, zeros, zeros))
    # the last entry belongs to a step that was not made
    beside = jnp.where(jnp.arange(most) < steps - 1, beside, 0.0)[:-1]
    values, vectors = jnp.linalg.eigh(
        jnp.diag(diagonal) + jnp.diag(beside, 1) + jnp.diag(beside, -1)
    )
    values = jnp.abs(values)
    direction = basis[:-1].T @ vectors[:, jnp.argmax(values)]
    norm = jnp.linalg.norm(direction)
    usable = (values.max() > 0) & (norm > 0)
    return values.max(), jnp.where(usable, direction / jnp.where(usable, norm, 1.0), start)


def stein_windows(num_warmup: int) -> tuple[int, int, int]:
    """First draw of the Stein check, number of windows (0: no check), draws per batch."""
    start = int(0.8 * num_warmup)
    windows = min(MAX_STEIN_WINDOWS, (num_warmup - start) // STEIN_WINDOW)
    return start, windows, (num_warmup - start) // (STEIN_BATCHES * max(windows, 1))


def _check_stein(
    a: AdaptState, phase: Phase, i: Array, settings: Settings, num_warmup: int
) -> AdaptState:
    """At the end of a window, divide the step by sqrt(2) if the draws show a bias.

    With g = grad U and s_i^2 = (L L^T)_ii, the features are the means of s_i g_i, of
    1 - (x_i - c_i) g_i, and of the average of the latter over i: all vanish under the target. In a
    normal coordinate the first is the bias of the mean in standard deviations, the second minus
    that of the variance. A bias counts beyond its Monte Carlo error, from batch means at a
    Bonferroni level, plus the tolerance. It needs the gradients at the draws alone.
    """
    first, windows, batch_length = stein_windows(num_warmup)
    if windows == 0 or settings.step_size is not None or settings.adjust is not None:
        return a
    size, dtype = phase.x.size, phase.x.dtype
    sums = a.stein._replace(center=jnp.where(i < first, a.mean, a.stein.center))
    scale = jnp.sqrt(jnp.sum(a.scale**2, -1)) if a.scale.ndim == 2 else a.scale
    second = 1 - (phase.x - sums.center) * phase.grad
    features = jnp.concatenate([scale * phase.grad, second, second.mean(keepdims=True)])
    features = jnp.where(jnp.isfinite(features), features, 0.0)
    sums = sums._replace(batch=sums.batch + jnp.where(i > first, features, 0.0))
    place = jnp.maximum(i - first, 0)
    batch_ends = (place > 0) & (place % batch_length == 0)
    mean = sums.batch / batch_length
    sums = SteinSums(
        sums.center,
        jnp.where(batch_ends, 0.0, sums.batch),
        sums.total + jnp.where(batch_ends, mean, 0.0),
        sums.square + jnp.where(batch_ends, mean**2, 0.0),
    )
    window_ends = batch_ends & (place % (batch_length * STEIN_BATCHES) == 0)
    average = sums.total / STEIN_BATCHES
    variance = (sums.square / STEIN_BATCHES - average**2) / (STEIN_BATCHES - 1)
    level = STEIN_LEVEL / (windows * (2 * size + 1) * 2)
    error = -float(special.stdtrit(STEIN_BATCHES - 1, level)) * jnp.sqrt(jnp.maximum(variance, 0.0))
    # the variance of a coordinate is twice as biased as its standard deviation
    tolerance = settings.bias_tolerance * np.repeat([1.0, 2.0], [size, size + 1]).astype(dtype)
    visible = jnp.any(jnp.abs(average) > error + tolerance)
    smaller = jnp.where(window_ends & visible, a.step_size / math.sqrt(2), jnp.inf)
    sums = sums._replace(
        total=jnp.where(window_ends, 0.0, sums.total),
        square=jnp.where(window_ends, 0.0, sums.square),
    )
    return a._replace(max_step=jnp.minimum(a.max_step, smaller), stein=sums)


def _restart_step(a: AdaptState, settings: Settings, prior: tuple[Array, Array]) -> AdaptState:
    """Step size, in new coordinates, from the curvature alone."""
    cap = _step_cap(a, settings, prior)
    return _set_step(a._replace(log_step=jnp.log(cap / 2)), settings, prior)


def _set_step(a: AdaptState, settings: Settings, prior: tuple[Array, Array]) -> AdaptState:
    log_step = jnp.minimum(a.log_step, jnp.log(_step_cap(a, settings, prior)))
    return a._replace(
        log_step=log_step,
        step_size=jnp.full_like(log_step, settings.step_size or jnp.exp(log_step)),
        friction=_friction(a, settings),
    )


def _friction(a: AdaptState, settings: Settings) -> Array:
    return jnp.full_like(a.width, settings.friction or 1 / a.width)


def _step_cap(a: AdaptState, settings: Settings, prior: tuple[Array, Array]) -> Array:
    cap = jnp.minimum(settings.max_step(a.curvature, _friction(a, settings)), a.max_step)
    if settings.integrator == "kbk":
        frequency = jnp.sqrt(jnp.max(prior[1] * a.scale**2))
        cap = jnp.minimum(cap, MAX_PRIOR_STEP / jnp.maximum(frequency, 1e-6))
    return cap


def _num_steps(i: Array, a: AdaptState, settings: Settings, num_warmup: int) -> Array:
    if settings.num_steps is not None:
        return jnp.full((), settings.num_steps, jnp.int32)
    updates = np.flatnonzero(metric_updates(num_warmup))
    # before the first metric the coordinates have any scale: do not run far
    first = updates[0] if updates.size and settings.precondition is not None else 0
    limit = jnp.where(i <= first, MAX_STEPS_BEFORE_METRIC, MAX_STEPS_PER_DRAW)
    return jnp.clip(jnp.ceil(TIME_PER_DRAW * a.width / a.step_size), 1, limit).astype(jnp.int32)


# --- small parts -----------------------------------------------------------------------------


def potential(target: Target) -> Callable[[Array], Array]:
    """Potential energy as a function of the flat position."""
    return lambda x: -target.log_density(x)


def _times(scale: Array, v: Array) -> Array:
    return scale @ v if scale.ndim == 2 else scale * v


def _transposed_times(scale: Array, g: Array) -> Array:
    return scale.T @ g if scale.ndim == 2 else scale * g
