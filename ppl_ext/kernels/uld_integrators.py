"""One step of each discretisation of underdamped Langevin dynamics.

The diffusion, in the coordinates y = L^-1 x with U the potential energy,

    dY = V dt,    dV = -g V dt - grad U(Y) dt + sqrt(2 g) dB,

has the exact flows (g is the friction, e1(t) = (1 - e^(-g t)) / g, e2(t) = (t - e1(t)) / g)

    A(t): y += t v      B(t): v -= t grad U(y)      O(t): v = e^(-g t) v + sqrt(1 - e^(-2 g t)) n
    U(t): y += e1(t) v + xi_x,  v = e^(-g t) v + xi_v      (A and O together)
    K(t): U with the force of a Gaussian prior, -m (y - mu), added.

`baoab`, `obabo`, `ubu` and `kbk` are products of them, each letter with its share of the step:
Leimkuhler & Matthews 2013, section 2; Alamo & Zygalakis 2016 for `ubu`; Schuh 2026,
arXiv 2605.24070, for `kbk`, in which B has the force of U without the prior. `ee` freezes the
force over the step (Cheng, Chatterji, Bartlett & Jordan 2018: the scheme of the theorem in
arXiv 2603.02429); `rmm` takes it at a random time of the step (Shen & Lee 2019, arXiv
1909.05503, algorithm 1); `quicksort` is of order three (Scott, O'Kane, Jelincic & Foster 2025,
arXiv 2508.16485).

The noise of U over a time t is Gaussian with, per coordinate and z = g t,

    Var xi_v = 1 - e^(-2 z),  Cov(xi_x, xi_v) = (1 - e^-z)^2 / g,
    Var xi_x = (2 z - 3 + 4 e^-z - e^(-2 z)) / g^2,

the last of which loses all digits for small z and is summed as a series there.

The energy error W of a step is minus the log of its Metropolis ratio, the velocity being reversed
at the end, so that E exp(-W) = 1 at stationarity. For the products it is the change of U (for
`kbk` without the prior) plus the changes of |v|^2 / 2 in the B parts; for `ee` it follows from the
Gaussian transition density. `rmm` and `quicksort` have no tractable ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_ext.target import Array

# the step of an integrator, its coefficients computed: noise and point -> new point and W
Step = Callable[["Noise", "Phase"], tuple["Phase", Array]]


class Phase(NamedTuple):
    """A point of phase space with its potential energy and gradient.

    `ubu`, `kbk` and `quicksort` do not use the gradient, and leave it at another point of the step.
    """

    x: Array  # (d,) position
    v: Array  # (d,) velocity in y coordinates, unit variance
    potential_energy: Array  # () at x
    grad: Array  # (d,) gradient of the potential energy at x


class Noise(NamedTuple):
    """What is random in one step of one chain."""

    normals: Array  # (rows, d) standard normals
    uniform: Array  # () in [0, 1): the random time of `rmm`


class System(NamedTuple):
    """The dynamics of one chain."""

    potential: Callable[[Array], Array]  # U as a function of x, (d,) -> ()
    step_size: Array  # () time
    friction: Array  # () inverse time
    scale: Array  # (d,) or lower triangular (d, d): L, with L L^T the inverse mass matrix
    prior_mean: Array  # (d,) of the Gaussian prior that `kbk` integrates exactly, in x
    prior_precision: Array  # (d,) its precision in x; 0 where there is none

    def to_x(self, v: Array) -> Array:
        return self.scale @ v if self.scale.ndim == 2 else self.scale * v

    def pull_back(self, grad: Array) -> Array:
        """Gradient with respect to y."""
        return self.scale.T @ grad if self.scale.ndim == 2 else self.scale * grad


@dataclass(frozen=True)
class Integrator:
    """An integrator and what warm-up and reports know of it.

    Parameters
    ----------
    make : callable
        `make(system)`: the step.
    normals : int
        Rows of standard normals that a step takes.
    gradients : int
        Gradients per step.
    weak_order : int
        Power of the step size in the bias of moments.
    energy_order : int or None
        Power of the step size in Var(W) at stationarity; `None` without an energy error.
    grad_at_x : bool
        Whether a step leaves the gradient at its end point in `Phase`.
    """

    make: Callable[[System], Step]
    normals: int
    gradients: int
    weak_order: int
    energy_order: int | None
    grad_at_x: bool


# --- coefficients ----------------------------------------------------------------------------


def _series(z: Array, coefficients: list[float], closed: Array) -> Array:
    """A power series below z = 1/2, with 15 terms exact in float64, and `closed` above."""
    small = jnp.where(z < 0.5, z, 0.0)
    return jnp.where(z < 0.5, jnp.polyval(jnp.asarray(coefficients[::-1], z.dtype), small), closed)


_PHI2 = [(-1) ** k / math.factorial(k + 2) for k in range(15)]
_PSI = [(-1) ** k * (4 - 2**k) / (2 * math.factorial(k)) for k in range(3, 18)]


def _e1(t: Array, g: Array) -> Array:
    return -jnp.expm1(-g * t) / g


def _e2(t: Array, g: Array) -> Array:
    z = g * t
    above = jnp.maximum(z, 0.5)
    return t**2 * _series(z, _PHI2, (above + jnp.expm1(-above)) / above**2)


def _noise_factor(t: Array, g: Array) -> tuple[Array, Array, Array]:
    """Cholesky factor (xx, vx, vv) of the covariance of (xi_x, xi_v); finite at t = 0 too."""
    z = g * t
    above = jnp.maximum(z, 0.5)
    closed = (2 * above - 3 + 4 * jnp.exp(-above) - jnp.exp(-2 * above)) / (2 * above**3)
    psi = _series(z, _PSI, closed)  # Var xi_x = 2 g t^3 psi
    xx = t * jnp.sqrt(2 * z * psi)
    phi1 = jnp.where(z > 0, -jnp.expm1(-z) / jnp.where(z > 0, z, 1.0), 1.0)
    vx = jnp.sqrt(z) * phi1**2 / jnp.sqrt(2 * psi)
    return xx, vx, jnp.sqrt(jnp.maximum(-jnp.expm1(-2 * z) - vx**2, 0.0))


class _Flow(NamedTuple):
    """Linear flow of (y - mu, v) with Gaussian noise: K, and U where there is no prior."""

    xx: Array
    xv: Array
    vx: Array
    vv: Array
    factor: tuple[Array, Array, Array]

    def noise(self, normals: Array) -> tuple[Array, Array]:
        xx, vx, vv = self.factor
        return xx * normals[0], vx * normals[0] + vv * normals[1]


def _free_flow(t: Array, g: Array) -> _Flow:
    one = jnp.ones_like(t)
    return _Flow(one, _e1(t, g), jnp.zeros_like(t), jnp.exp(-g * t), _noise_factor(t, g))


# the noise covariance of K is integrated over t / 2**_DOUBLINGS by Gauss-Legendre quadrature, then
# doubled: sums of positive terms, exact to rounding for any m, unlike the closed form
# diag(1/m, 1) - E diag(1/m, 1) E^T
_DOUBLINGS = 8
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)


def _harmonic_matrix(t: Array, g: Array, m: Array) -> tuple[Array, Array, Array, Array]:
    """exp(t [[0, 1], [-m, -g]]), elementwise."""
    # with r = g/2: e^(-r t) [[C + r S, S], [-m S, C - r S]], where C = cos(w t), S = sin(w t) / w
    # and w^2 = m - r^2, or their hyperbolic forms
    r = g / 2
    square = m - r**2
    w = jnp.sqrt(jnp.abs(square))
    wt = w * t
    near = wt < 0.1  # with the critical damping w = 0
    safe = jnp.where(near, 1.0, w)
    q = jnp.where(near, square * t**2, 0.0)
    s_series = t * (1 - q / 6 * (1 - q / 20 * (1 - q / 42 * (1 - q / 72))))
    c_series = 1 - q / 2 * (1 - q / 12 * (1 - q / 30 * (1 - q / 56)))
    decay = jnp.exp(-r * t)
    # overdamped: e^(-r t) cosh(w t) from the slow rate m / (r + w), which is not r - w in floats
    slow = jnp.exp(-m / (r + w) * t)
    fast = jnp.exp(-2 * wt)
    over = square < 0
    s = jnp.where(
        near,
        decay * s_series,
        jnp.where(over, -slow * jnp.expm1(-2 * wt) / (2 * safe), decay * jnp.sin(wt) / safe),
    )
    c = jnp.where(
        near,
        decay * c_series,
        jnp.where(over, slow * (1 + fast) / 2, decay * jnp.cos(wt)),
    )
    return c + r * s, s, -m * s, c - r * s


def _harmonic_flow(t: Array, g: Array, m: Array) -> _Flow:
    # all times at once, (times, d): one small program
    short = t / 2**_DOUBLINGS
    nodes = jnp.asarray((_NODES + 1) / 2, m.dtype) * short
    doubled = short * 2.0 ** jnp.arange(_DOUBLINGS + 1, dtype=m.dtype)
    entries = _harmonic_matrix(jnp.concatenate([nodes, doubled])[:, None], g, m[None])
    _, ex, _, ev = (entry[: len(_NODES)] for entry in entries)
    weights = 2 * g * short * jnp.asarray(_WEIGHTS / 2, m.dtype)
    covariance = weights @ ex**2, weights @ (ex * ev), weights @ ev**2

    def double(
        covariance: tuple[Array, Array, Array], matrix: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array, Array], None]:
        (xx, xv, vv), (a, b, c, d) = covariance, matrix
        return (
            xx + a**2 * xx + 2 * a * b * xv + b**2 * vv,
            xv + a * c * xx + (a * d + b * c) * xv + b * d * vv,
            vv + c**2 * xx + 2 * c * d * xv + d**2 * vv,
        ), None

    matrices = tuple(entry[len(_NODES) : -1] for entry in entries)
    (xx, xv, vv), _ = jax.lax.scan(double, covariance, matrices)
    root = jnp.sqrt(xx)
    factor = root, xv / root, jnp.sqrt(jnp.maximum(vv - (xv / root) ** 2, 0.0))
    xx, xv, vx, vv = (entry[-1] for entry in entries)
    return _Flow(xx, xv, vx, vv, factor)


# --- steps -----------------------------------------------------------------------------------


def _splitting(letters: str) -> Callable[[System], Step]:
    """Product of A, B and O, with one evaluation of the gradient."""

    def make(system: System) -> Step:
        value_and_grad = jax.value_and_grad(system.potential)
        share = {letter: system.step_size / letters.count(letter) for letter in "ABO"}
        decay = jnp.exp(-system.friction * share["O"])
        spread = jnp.sqrt(-jnp.expm1(-2 * system.friction * share["O"]))

        def step(noise: Noise, phase: Phase) -> tuple[Phase, Array]:
            x, v, energy, grad = phase
            work, moved, rows = jnp.zeros_like(energy), False, iter(noise.normals)
            for letter in letters:
                if letter == "A":
                    x, moved = x + share["A"] * system.to_x(v), True
                elif letter == "O":
                    v = decay * v + spread * next(rows)
                else:
                    if moved:
                        energy, grad = value_and_grad(x)
                        moved = False
                    v, change = _kick(v, share["B"] * system.pull_back(grad))
                    work += change
            return _phase(x, v, energy, grad, phase), work + (energy - phase.potential_energy)

        return step

    return make


def _ubu(system: System) -> Step:
    half = _free_flow(system.step_size / 2, system.friction)
    return _kick_at_midpoint(system, half, jnp.zeros_like(system.prior_precision))


def _kbk(system: System) -> Step:
    # in y coordinates; the scale is diagonal
    precision = system.prior_precision * system.scale**2
    half = _harmonic_flow(system.step_size / 2, system.friction, precision)
    return _kick_at_midpoint(system, half, system.prior_precision)


def _kick_at_midpoint(system: System, half: _Flow, precision: Array) -> Step:
    """`half`, B, `half`, where B has the force of U without the prior of this `precision`."""
    value_and_grad = jax.value_and_grad(system.potential)
    mean = system.prior_mean

    def prior(x: Array) -> Array:
        return precision * (x - mean) @ (x - mean) / 2

    def flow(x: Array, v: Array, normals: Array) -> tuple[Array, Array]:
        noise_x, noise_v = half.noise(normals)
        if half.vx.ndim == 0:
            return x + system.to_x(half.xv * v + noise_x), half.vv * v + noise_v
        offset = (x - mean) / system.scale
        # (xx - 1) from the other entries would lose digits: only the change of x is added
        change = (half.xx - 1) * offset + half.xv * v + noise_x
        return x + system.scale * change, half.vx * offset + half.vv * v + noise_v

    def step(noise: Noise, phase: Phase) -> tuple[Phase, Array]:
        x, v = flow(phase.x, phase.v, noise.normals[:2])
        grad = value_and_grad(x)[1]
        v, work = _kick(v, system.step_size * system.pull_back(grad - precision * (x - mean)))
        x, v = flow(x, v, noise.normals[2:])
        energy = system.potential(x)
        work += energy - phase.potential_energy - (prior(x) - prior(phase.x))
        return _phase(x, v, energy, grad, phase), work

    return step


def _exponential_euler(system: System) -> Step:
    value_and_grad = jax.value_and_grad(system.potential)
    h, g = system.step_size, system.friction
    e1, e2, decay = _e1(h, g), _e2(h, g), jnp.exp(-g * h)
    flow = _free_flow(h, g)
    xx, vx, vv = flow.factor

    def step(noise: Noise, phase: Phase) -> tuple[Phase, Array]:
        noise_x, noise_v = flow.noise(noise.normals)
        force = system.pull_back(phase.grad)
        move = e1 * phase.v - e2 * force + noise_x
        x, v = phase.x + system.to_x(move), decay * phase.v - e1 * force + noise_v
        energy, grad = value_and_grad(x)
        # the normals that lead back, from (x', -v') to (x, -v)
        force = system.pull_back(grad)
        back_x = (e1 * v + e2 * force - move) / xx
        back_v = (decay * v + e1 * force - phase.v - vx * back_x) / vv
        back = jnp.stack([back_x, back_v])
        work = energy - phase.potential_energy + (v - phase.v) @ (v + phase.v) / 2
        work += jnp.sum((back - noise.normals) * (back + noise.normals)) / 2
        return _phase(x, v, energy, grad, phase), work

    return step


def _randomised_midpoint(system: System) -> Step:
    value_and_grad = jax.value_and_grad(system.potential)
    h, g = system.step_size, system.friction
    e1, decay = _e1(h, g), jnp.exp(-g * h)

    def step(noise: Noise, phase: Phase) -> tuple[Phase, Array]:
        # the noise of the step is that up to the random time, then that of the rest
        before = noise.uniform * h
        rest = h - before
        e1_rest, decay_rest = _e1(rest, g), jnp.exp(-g * rest)
        mid_x, mid_v = _free_flow(before, g).noise(noise.normals[:2])
        rest_x, rest_v = _free_flow(rest, g).noise(noise.normals[2:])
        noise_x, noise_v = mid_x + e1_rest * mid_v + rest_x, decay_rest * mid_v + rest_v

        predictor = _e1(before, g) * phase.v - _e2(before, g) * system.pull_back(phase.grad) + mid_x
        force = system.pull_back(value_and_grad(phase.x + system.to_x(predictor))[1])
        x = phase.x + system.to_x(e1 * phase.v - h * e1_rest * force + noise_x)
        v = decay * phase.v - h * decay_rest * force + noise_v
        energy, grad = value_and_grad(x)
        return _phase(x, v, energy, grad, phase), jnp.full_like(phase.potential_energy, jnp.nan)

    return step


def _quicksort(system: System) -> Step:
    value_and_grad = jax.value_and_grad(system.potential)
    h, g = system.step_size, system.friction
    left, right = (3 - math.sqrt(3)) / 6, (3 + math.sqrt(3)) / 6
    # a(t) = e1(t h), b(t) = e2(t h) / h
    a_left, a_right, a_third, a_one = (_e1(t * h, g) for t in (left, right, 1 / 3, 1.0))
    b_left, b_right, b_one = (_e2(t * h, g) / h for t in (left, right, 1.0))
    decay, decay_left, decay_right = (jnp.exp(-g * t * h) for t in (1.0, left, right))
    rho = jnp.sqrt(2 * g)

    def force(x: Array, move: Array) -> Array:
        return h * system.pull_back(value_and_grad(x + system.to_x(move))[1])

    def step(noise: Noise, phase: Phase) -> tuple[Phase, Array]:
        # increment, space-time and space-space-time Levy areas of the Brownian path
        shares = jnp.sqrt(jnp.array([1.0, 1 / 12, 1 / 720], phase.x.dtype) * h)
        area_w, area_h, area_k = shares[:, None] * noise.normals
        velocity = phase.v + rho * (area_h + 6 * area_k)
        w = rho * (area_w - 12 * area_k)
        force_1 = force(phase.x, a_left * velocity + b_left * w)
        force_2 = force(phase.x, a_right * velocity + b_right * w - a_third * force_1)
        move = a_one * velocity + b_one * w - (a_right * force_1 + a_left * force_2) / 2
        v = decay * velocity - (decay_right * force_1 + decay_left * force_2) / 2
        v += a_one / h * w - rho * (area_h - 6 * area_k)
        x = phase.x + system.to_x(move)
        energy = system.potential(x)
        # only its finiteness is used
        grad = force_1 + force_2
        return _phase(x, v, energy, grad, phase), jnp.full_like(phase.potential_energy, jnp.nan)

    return step


def _kick(v: Array, kick: Array) -> tuple[Array, Array]:
    """v - kick, and the change of |v|^2 / 2 without the cancellation of the two squares."""
    return v - kick, kick @ (kick / 2 - v)


def _phase(x: Array, v: Array, energy: Array, grad: Array, like: Phase) -> Phase:
    return Phase(
        x.astype(like.x.dtype),
        v.astype(like.v.dtype),
        energy.astype(like.potential_energy.dtype),
        grad.astype(like.grad.dtype),
    )


INTEGRATORS = {
    "baoab": Integrator(_splitting("BAOAB"), 1, 1, 2, 5, True),
    "obabo": Integrator(_splitting("OBABO"), 2, 1, 2, 6, True),
    "ubu": Integrator(_ubu, 4, 1, 2, 3, False),
    "ee": Integrator(_exponential_euler, 2, 1, 1, 3, True),
    "rmm": Integrator(_randomised_midpoint, 4, 2, 3, None, True),
    "quicksort": Integrator(_quicksort, 3, 2, 3, None, False),
    "kbk": Integrator(_kbk, 4, 1, 2, 3, False),
}


# --- exact law on a Gaussian -----------------------------------------------------------------


def step_on_quadratic(
    integrator: str,
    step_size: float,
    friction: float,
    curvature: np.ndarray,
    prior_precision: np.ndarray | None = None,
) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """Affine map and noise of one step on U = sum of curvature y^2 / 2, read off the step.

    Returns one `(weight, matrix, noise)` per node of a quadrature over the random time (a single
    one but for `rmm`): matrices (k, 2, 2) of (y, v) and (k, 2, rows) of the normals, for each of
    the k curvatures. Coordinates do not mix, so that k of them are read off at once.
    """
    nodes, weights = np.array([0.0]), np.array([2.0])
    if integrator == "rmm":
        nodes, weights = np.polynomial.legendre.leggauss(16)
    curvature = np.asarray(curvature, np.float64)
    prior = np.zeros_like(curvature) if prior_precision is None else prior_precision
    with jax.enable_x64(True):
        arguments = [jnp.asarray(a, jnp.float64) for a in (step_size, friction, curvature, prior)]
        return [
            (weight, *map(np.asarray, _columns(integrator, *arguments, jnp.float64(node))))
            for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True)
        ]


@partial(jax.jit, static_argnames="integrator")
def _columns(
    integrator: str, h: Array, g: Array, curvature: Array, prior: Array, uniform: Array
) -> tuple[Array, Array]:
    spec = INTEGRATORS[integrator]
    zeros, ones = jnp.zeros_like(curvature), jnp.ones_like(curvature)

    def potential(y: Array) -> Array:
        return jnp.sum(curvature * y**2) / 2

    step = spec.make(System(potential, h, g, ones, zeros, prior))

    def end(y: Array, v: Array, *normals: Array) -> Array:
        phase = Phase(y, v, potential(y), curvature * y)
        new, _ = step(Noise(jnp.stack(normals), uniform), phase)
        return jnp.stack([new.x, new.v], -1)

    inputs = 2 + spec.normals
    push = jax.linearize(end, *[zeros] * inputs)[1]
    columns = [push(*[ones if i == j else zeros for j in range(inputs)]) for i in range(inputs)]
    return jnp.stack(columns[:2], -1), jnp.stack(columns[2:], -1)


def stationary_covariance(
    integrator: str,
    step_size: float,
    friction: float,
    curvature: np.ndarray,
    prior_precision: np.ndarray | None = None,
) -> np.ndarray:
    """Stationary second moments E (y^2, y v, v^2) of each mode of a Gaussian, shape (k, 3).

    The exact solution of S = E (M S M^T + Q), with the affine map M and noise covariance Q of
    `step_on_quadratic`, the mean being over the random time of `rmm`. NaN where the step is
    unstable.
    """
    nodes = step_on_quadratic(integrator, step_size, friction, curvature, prior_precision)
    change = np.zeros((np.size(curvature), 3, 3))
    constant = np.zeros((np.size(curvature), 3))
    for weight, matrix, noise in nodes:
        (a, b), (c, d) = np.moveaxis(matrix, 0, -1)
        rows = [[a * a, 2 * a * b, b * b], [a * c, a * d + b * c, b * d], [c * c, 2 * c * d, d * d]]
        change += weight * np.moveaxis(np.array(rows), -1, 0)
        q = noise @ np.swapaxes(noise, 1, 2)
        constant += weight * np.stack([q[:, 0, 0], q[:, 0, 1], q[:, 1, 1]], -1)
    stable = np.abs(np.linalg.eigvals(change)).max(-1) < 1
    solution = np.linalg.solve(np.eye(3) - change, constant[..., None])[..., 0]
    return np.where(stable[:, None], solution, np.nan)
