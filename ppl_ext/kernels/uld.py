"""Underdamped Langevin dynamics (ULD), discretised by a palindromic splitting.

Samples exp(-U(x)) on R^d with the diffusion

    dX = V dt,    dV = -friction V dt - grad U(X) dt + sqrt(2 friction) dB,

run in the coordinates y = L^-1 x, in which the inverse mass matrix L L^T becomes the identity.
A step of size h is a product of the exact flows (Leimkuhler & Matthews 2013, section 2)

    A(t): x += t L v      B(t): v -= t L^T grad U(x)      O(t): v = e v + sqrt(1 - e^2) xi,

with e = exp(-friction t). Each letter of `baoab` or `obabo` takes its share of h. One gradient
per step; memory O(d), whatever the number of steps.

Biased: there is no accept step. On a Gaussian target the law of x is exact for `baoab`, and
`obabo` has variance 1 / (lambda (1 - h^2 lambda / 4)) for curvature lambda in y coordinates. The
error is monitored through the energy error of each step ("shadow work"),

    W = U(x') - U(x) + sum over B parts of [ |v_after|^2 - |v_before|^2 ] / 2,

which is minus the log Metropolis ratio of the step, so that E exp(-W) = 1 at stationarity.

Warm-up sets, per chain: L from the draws and their gradients, the largest curvature by power
iteration on Hessian-vector products, the friction from the width of the posterior, and the step
size from the variance of W per dimension, capped by the curvature.

Sources: Zhang, Di, Li & Gu 2026, arXiv 2603.02429 (dimension-free convergence of ULD);
Robnik & Seljak 2024, arXiv 2412.08876 (the energy error bounds the average bias).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from ppl_ext.target import Array, PyTree, Target

SPLITTINGS = {"baoab": "BAOAB", "obabo": "OBABO"}

# Var(W) grows like step_size**ENERGY_ORDER at stationarity
ENERGY_ORDER = {"baoab": 5, "obabo": 6}

# a step is undone when its energy error exceeds this many standard deviations (plus this much):
# a Metropolis step would accept it with a probability below exp(-20)
MAX_ENERGY_ERROR = 20.0

# upper bound of step_size * sqrt(largest curvature); both splittings are unstable from 2 on
MAX_STABLE_STEP = 0.8

# dynamics time per draw, in units of the posterior width: adjacent draws then correlate little
TIME_PER_DRAW = 2.0

MAX_STEPS_PER_DRAW = 1024
MAX_STEPS_BEFORE_METRIC = 16
POWER_ITERATIONS = 10


@dataclass(frozen=True)
class Settings:
    """What the user fixes; `None` is found in warm-up. Step size is in y coordinates."""

    integrator: Literal["baoab", "obabo"] = "baoab"
    step_size: float | None = None
    friction: float | None = None
    num_steps: int | None = None
    precondition: Literal["diag", "dense"] | None = "diag"
    bias_tolerance: float = 0.025

    @property
    def energy_error_target(self) -> float:
        """Var(W) / d at which the average bias of the standard deviations is `bias_tolerance`.

        For `obabo` on a Gaussian, (variance bias)^2 / 2 = 0.2 (Var(W) / d)^(2/3); `baoab` is
        more accurate than this at equal energy error.
        """
        return (2 * self.bias_tolerance / math.sqrt(0.4)) ** 3

    @property
    def max_stable_step(self) -> float:
        """Cap on step_size * sqrt(curvature), also of the worst coordinate's bias."""
        if self.integrator == "obabo":
            return min(MAX_STABLE_STEP, math.sqrt(8 * self.bias_tolerance))
        return MAX_STABLE_STEP


class Phase(NamedTuple):
    """A point of phase space with its potential energy and gradient."""

    x: Array  # (d,) position
    v: Array  # (d,) velocity in y coordinates, unit variance
    potential_energy: Array  # ()
    grad: Array  # (d,) gradient of the potential energy at x


class AdaptState(NamedTuple):
    """What warm-up finds, frozen afterwards. All per chain."""

    step_size: Array  # () time in y coordinates
    friction: Array  # () inverse time
    scale: Array  # (d,) or (d, d): L, with L L^T the inverse mass matrix
    curvature: Array  # () largest eigenvalue of L^T (Hess U) L seen lately
    trace: Array  # () mean |L^T grad U|^2 = trace of E L^T (Hess U) L (Bartlett identity)
    width: Array  # () largest standard deviation of y in any direction
    log_step: Array  # () log of the step size that the energy error asks for
    direction: Array  # (d,) unit vector: iterate of the power method for `curvature`
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
    energy_error: Array  # () sum of W over the steps of this draw
    mean_square_error: Array  # () mean of W^2 per dimension over the steps of this draw
    num_steps: Array  # () integrator steps, one gradient each, of this draw
    accept_prob: Array  # () share of the steps that were kept
    diverging: Array  # () whether a step was undone
    num_divergences: Array  # () steps undone so far
    adapt_state: AdaptState
    stale: Array  # () whether the cached energy and gradient may belong to other data
    rng_key: Array


class State(_Fields):
    """Chain state. Field names are those that NumPyro and ArviZ know."""

    __slots__ = ()

    def _replace(self, **changes: Any) -> State:
        # MCMC resumes a chain by replacing its key, perhaps with new data: nothing cached
        # about the old data may survive that
        if set(changes) == {"rng_key"}:
            changes["stale"] = jnp.ones_like(self.stale)
        return super()._replace(**changes)

    @property
    def unconstrained_z(self) -> PyTree:
        """`z` under a name that drivers collect without constraining it."""
        return self.z


def init(key: Array, z: PyTree, target: Target, settings: Settings) -> State:
    """State at the unconstrained sites `z`, with a first step size from the curvature there."""
    key, key_velocity, key_direction = jax.random.split(key, 3)
    x = target.ravel(z)
    potential_energy, grad = _value_and_grad(target)(x)
    dtype = jnp.result_type(potential_energy, x)
    zero, zeros = jnp.zeros((), dtype), jnp.zeros(x.shape, dtype)
    ones, direction = jnp.ones_like(zeros), jax.random.normal(key_direction, x.shape, dtype)
    dense = settings.precondition == "dense"
    adapt = AdaptState(
        step_size=zero,
        friction=zero,
        scale=jnp.diag(ones) if dense else ones,
        curvature=zero,
        trace=zero,
        width=jnp.ones((), dtype),
        log_step=zero,
        direction=direction / jnp.linalg.norm(direction),
        widest=direction,
        num_draws=zero,
        mean=zeros,
        moment=jnp.diag(zeros) if dense else zeros,
        grad_mean=zeros,
        grad_moment=zeros,
    )
    adapt = _restart_step(_update_curvature(adapt, x, target, POWER_ITERATIONS), settings)
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
    potential_energy, grad = _value_and_grad(target)(target.ravel(state.z))
    dtype = state.potential_energy.dtype
    return state._replace(
        potential_energy=potential_energy.astype(dtype),
        energy=potential_energy.astype(dtype) + state.velocity @ state.velocity / 2,
        z_grad=target.unravel(grad.astype(dtype)),
        stale=jnp.zeros_like(state.stale),
    )


def step(state: State, target: Target, settings: Settings, num_warmup: int) -> State:
    """One draw: several integrator steps, then adaptation while `i < num_warmup`."""
    state = _run_if(state.stale, lambda s: refresh(s, target), state)
    key, key_steps, key_velocity = jax.random.split(state.rng_key, 3)
    warming = state.i < num_warmup
    adapt = state.adapt_state
    num_steps = _num_steps(state.i, adapt, settings, num_warmup)
    phase = Phase(
        target.ravel(state.z), state.velocity, state.potential_energy, target.ravel(state.z_grad)
    )
    size, dtype = phase.x.size, phase.x.dtype
    # on the way down from a far start the friction alone would take long to cool the chain
    fresh = jax.random.normal(key_velocity, (size,), dtype)
    phase = phase._replace(v=jnp.where(warming, fresh, phase.v))
    num_normals = SPLITTINGS[settings.integrator].count("O")
    bound = MAX_ENERGY_ERROR * (1 + math.sqrt(size * settings.energy_error_target))

    def body(j: Array, carry: tuple) -> tuple:
        phase, error, square, undone = carry
        noise = jax.random.normal(jax.random.fold_in(key_steps, j), (num_normals, size), dtype)
        new, w = integrator_step(noise, phase, target, settings.integrator, adapt)
        # a step into a region without density, or one that explodes, is undone: position kept,
        # velocity reversed, which is what a Metropolis step would do
        # (in warm-up a step downhill is kept, however inexact)
        downhill = warming & (new.potential_energy < phase.potential_energy)
        kept = jnp.isfinite(w) & ((w < bound) | downhill) & jnp.isfinite(new.grad).all()
        undo = phase._replace(v=-phase.v)
        phase = jax.tree.map(lambda a, b: jnp.where(kept, a, b), new, undo)
        w = jnp.where(kept, w, 0.0)
        return phase, error + w, square + w**2, undone + ~kept

    zero = jnp.zeros((), dtype)
    phase, error, square, undone = jax.lax.fori_loop(
        0, num_steps, body, (phase, zero, zero, jnp.zeros((), jnp.int32))
    )
    num_kept = num_steps - undone
    new = State(
        i=state.i + 1,
        z=target.unravel(phase.x),
        z_grad=target.unravel(phase.grad),
        velocity=phase.v,
        potential_energy=phase.potential_energy,
        energy=phase.potential_energy + phase.v @ phase.v / 2,
        energy_error=error,
        mean_square_error=square / (jnp.maximum(num_kept, 1) * size),
        num_steps=num_steps,
        accept_prob=(num_kept / num_steps).astype(dtype),
        diverging=undone > 0,
        num_divergences=state.num_divergences + undone,
        adapt_state=adapt,
        stale=state.stale,
        rng_key=key,
    )
    return _run_if(warming, lambda s: _adapt(s, phase, target, settings, num_warmup), new)


def integrator_step(
    noise: Array, phase: Phase, target: Target, integrator: str, adapt: AdaptState
) -> tuple[Phase, Array]:
    """One step of the splitting and its energy error W.

    `noise` holds one row of standard normals, shape (d,), for each O part.
    """
    value_and_grad = _value_and_grad(target)
    x, v, potential_energy, grad = phase
    letters = SPLITTINGS[integrator]
    work, moved, rows = jnp.zeros_like(potential_energy), False, iter(noise)
    for letter in letters:
        t = adapt.step_size / letters.count(letter)
        if letter == "A":
            x, moved = x + t * _times(adapt.scale, v), True
        elif letter == "O":
            v = jnp.exp(-adapt.friction * t) * v
            v += jnp.sqrt(-jnp.expm1(-2 * adapt.friction * t)) * next(rows)
        else:
            if moved:
                potential_energy, grad = value_and_grad(x)
                moved = False
            kick = t * _transposed_times(adapt.scale, grad)
            # (|v - kick|^2 - |v|^2) / 2, without the cancellation of the two squares
            work += kick @ (kick / 2 - v)
            v -= kick
    work += potential_energy - phase.potential_energy
    return Phase(x, v, potential_energy.astype(work.dtype), grad.astype(x.dtype)), work


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
    state: State, phase: Phase, target: Target, settings: Settings, num_warmup: int
) -> State:
    updates = metric_updates(num_warmup)
    update_metric = jnp.asarray(updates)[jnp.minimum(state.i - 1, len(updates) - 1)]
    if settings.precondition is None:
        update_metric &= False
    adapt = _update_moments(state.adapt_state, phase)
    adapt = _update_log_step(adapt, state, settings)
    # correlations seen on the way from the start mislead; scales do not
    with_correlations = state.i > 0.3 * num_warmup
    adapt = _run_if(update_metric, lambda a: _update_metric(a, with_correlations), adapt)
    # the curvature belongs to the coordinates: a new metric starts the power method again
    iterations = jnp.where(update_metric, POWER_ITERATIONS, 1)
    adapt = _update_curvature(adapt, phase.x, target, iterations)
    adapt = _run_if(update_metric, lambda a: _restart_step(a, settings), adapt)
    return state._replace(adapt_state=_set_step(adapt, settings))


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
    """Robbins-Monro recursion for the step size at which Var(W) / d meets its target."""
    order, target = ENERGY_ORDER[settings.integrator], settings.energy_error_target
    change = -jnp.log(state.mean_square_error / target + 1e-12) / order
    # a chain most steps of which are undone needs a smaller step at once
    change = jnp.where(state.accept_prob < 0.5, -jnp.inf, change)
    rate = jnp.maximum(0.1, 5 / (5 + a.num_draws))
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


def _update_curvature(a: AdaptState, x: Array, target: Target, iterations: Any) -> AdaptState:
    """Power method on Hessian-vector products; the largest recent value.

    The memory is a share of the window, so that the high curvatures on the way from the start
    to the posterior are forgotten.
    """
    grad = jax.grad(lambda x: -target.log_density(x))

    def body(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        direction, _ = carry
        tangent = _times(a.scale, direction)
        product = _transposed_times(a.scale, jax.jvp(grad, (x,), (tangent,))[1])
        product = product.astype(direction.dtype)
        norm = jnp.linalg.norm(product)
        usable = jnp.isfinite(norm) & (norm > 0)
        return jnp.where(usable, product / norm, direction), jnp.where(usable, norm, 0.0)

    direction, curvature = jax.lax.fori_loop(
        0, iterations, body, (a.direction, jnp.zeros_like(a.curvature))
    )
    remembered = a.curvature * (1 - 2 / (10 + a.num_draws))
    return a._replace(direction=direction, curvature=jnp.maximum(remembered, curvature))


def _restart_step(a: AdaptState, settings: Settings) -> AdaptState:
    """Step size, in new coordinates, from the curvature alone."""
    cap = settings.max_stable_step / jnp.sqrt(jnp.maximum(a.curvature, 1e-12))
    return _set_step(a._replace(log_step=jnp.log(cap / 2)), settings)


def _set_step(a: AdaptState, settings: Settings) -> AdaptState:
    cap = settings.max_stable_step / jnp.sqrt(jnp.maximum(a.curvature, 1e-12))
    log_step = jnp.minimum(a.log_step, jnp.log(cap))
    friction = 1 / a.width
    return a._replace(
        log_step=log_step,
        step_size=jnp.full_like(log_step, settings.step_size or jnp.exp(log_step)),
        friction=jnp.full_like(friction, settings.friction or friction),
    )


def _num_steps(i: Array, a: AdaptState, settings: Settings, num_warmup: int) -> Array:
    if settings.num_steps is not None:
        return jnp.full((), settings.num_steps, jnp.int32)
    updates = np.flatnonzero(metric_updates(num_warmup))
    # before the first metric the coordinates have any scale: do not run far
    first = updates[0] if updates.size and settings.precondition is not None else 0
    limit = jnp.where(i <= first, MAX_STEPS_BEFORE_METRIC, MAX_STEPS_PER_DRAW)
    return jnp.clip(jnp.ceil(TIME_PER_DRAW * a.width / a.step_size), 1, limit).astype(jnp.int32)


# --- small parts -----------------------------------------------------------------------------


def _value_and_grad(target: Target) -> Callable[[Array], tuple[Array, Array]]:
    return jax.value_and_grad(lambda x: -target.log_density(x))


def _times(scale: Array, v: Array) -> Array:
    return scale @ v if scale.ndim == 2 else scale * v


def _transposed_times(scale: Array, g: Array) -> Array:
    return scale.T @ g if scale.ndim == 2 else scale * g


def _run_if(condition: Array, function: Callable[[Any], Any], operand: Any) -> Any:
    """`function(operand)` if `condition`, else `operand`.

    A loop of one or no turn: unlike `lax.cond`, it costs nothing under `vmap` when no chain
    needs it.
    """
    return jax.lax.fori_loop(
        0, condition.astype(jnp.int32), lambda _, value: function(value), operand
    )
