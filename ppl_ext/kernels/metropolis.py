"""What the Metropolis-Hastings kernels share: coordinates, proposals, acceptance, step sizes.

All of them move in coordinates in which the posterior is about a standard normal, from a mode or
centre and a metric found in warm-up, so that one table of first step sizes serves them.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ppl_ext.target import Array

Proposal = Literal["taylor-mala", "sgld", "mala", "barker", "random_walk"]

# standard deviations beyond sqrt(d) that a posterior near a normal reaches: the ball on which
# bounds that are not global must hold, and the longest approximate gradient
MARGIN = 4.0

# step size in posterior standard deviations at the start, and the power of 1 / d, where nothing
# but the proposal makes the acceptance small; and the acceptance that is best then
_GRADIENT, _RANDOM_WALK = (1.65, 1 / 6), (2.38, 1 / 2)
FIRST_STEP: dict[str, tuple[float, float]] = {
    "taylor-mala": _GRADIENT,
    "sgld": _GRADIENT,
    "mala": _GRADIENT,
    "barker": _GRADIENT,
    "random_walk": _RANDOM_WALK,
}
ACCEPTANCE = {"taylor-mala": 0.55, "sgld": 0.55, "mala": 0.55, "barker": 0.45, "random_walk": 0.25}


class Coordinates:
    """First base of what a kernel finds of a posterior, a NamedTuple with these fields.

    `centre`, shape (d,): unconstrained. `whiten` and `scale`, inverse matrices of shape (d, d):
    w = whiten (x - centre) is about standard normal.
    """

    __slots__ = ()

    centre: Array
    whiten: Array
    scale: Array

    def to_standard(self, x: Array) -> Array:
        """Coordinates in which the posterior is about standard normal."""
        return self.whiten @ (x - self.centre)

    def from_standard(self, w: Array) -> Array:
        """The inverse of `to_standard`."""
        return self.centre + self.scale @ w


def first_step_size(proposal: Proposal, size: int) -> float:
    """Step size at the start in `size` dimensions, in posterior standard deviations."""
    factor, power = FIRST_STEP[proposal]
    return factor / size**power


# --- proposals ----------------------------------------------------------------------------------


def proposed(
    normal: Array, uniform: Array, w: Array, gradient: Array, step_size: Array, proposal: Proposal
) -> Array:
    """Proposal from `w` with the log density's `gradient` there, or what stands for it.

    MALA: w + h^2 g / 2 + h normal. Barker: each coordinate moves by +-h normal, with the sign +
    with probability 1 / (1 + exp(-h normal g)) (Livingstone & Zanella 2022, algorithm 1).
    """
    move = step_size * normal
    if proposal == "random_walk":
        return w + move
    if proposal == "barker":
        return w + jnp.where(uniform < jax.nn.sigmoid(move * gradient), move, -move)
    return w + step_size**2 / 2 * gradient + move


def log_proposal(
    w: Array, v: Array, gradient: Array, step_size: Array, proposal: Proposal
) -> Array:
    """Log density of the proposal `v` from `w`, without factors symmetric in the two."""
    if proposal == "random_walk":
        return jnp.zeros((), w.dtype)
    if proposal == "barker":
        return jnp.sum(jax.nn.log_sigmoid((v - w) * gradient))
    return -jnp.sum(((v - w) / step_size - step_size / 2 * gradient) ** 2) / 2


def truncated(gradient: Array) -> Array:
    """`gradient`, not longer than `MARGIN` + sqrt(d): far from the mode one overshoots."""
    length = math.sqrt(gradient.size) + MARGIN
    norm = jnp.linalg.norm(gradient)
    return gradient * jnp.where(norm > length, length / norm, 1.0)


def acceptance(log_ratio: Array) -> Array:
    """Probability min(1, ratio); NaN rejects."""
    prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    return jnp.where(jnp.isnan(log_ratio), 0.0, prob)


def mean_acceptance(mean: Array, prob: Array, i: Array, num_warmup: int) -> Array:
    """Mean of the acceptance since the last change of phase, after transition `i`."""
    n = jnp.where(i > num_warmup, i - num_warmup, i)
    return mean + (prob - mean) / n.astype(prob.dtype)


# --- adaptation ---------------------------------------------------------------------------------


class Tuned(NamedTuple):
    """A positive setting, adapted in warm-up; then the average of its second half."""

    log: Array  # ()
    mean_log: Array  # ()

    @property
    def value(self) -> Array:
        """The setting itself."""
        return jnp.exp(self.log)


def tuned(value: float | Array, dtype: jnp.dtype) -> Tuned:
    """The setting at its first value, which may be 0."""
    log = jnp.log(jnp.asarray(value, dtype))
    return Tuned(log, log)


def adapted(
    setting: Tuned,
    error: Array,
    i: Array,
    num_warmup: int,
    *,
    span: tuple[float | Array, float | Array] = (-math.inf, math.inf),
    restart: bool = False,
) -> Tuned:
    """Robbins-Monro step on the log after warm-up transition `i`: log + 2 error / sqrt(i).

    With `restart` the gains start anew half-way, where another metric may come.
    """
    dtype, half = setting.log.dtype, num_warmup // 2
    second = i - half
    n = jnp.where(second > 0, second, i) if restart else i
    log = jnp.clip(setting.log + 2 * error / jnp.sqrt(n.astype(dtype)), *span)
    # in the first half, the value itself
    weight = 1 / jnp.maximum(second, 1).astype(dtype)
    mean_log = setting.mean_log + weight * (log - setting.mean_log)
    new = Tuned(jnp.where(i == num_warmup, mean_log, log), mean_log)
    return jax.tree.map(lambda a, b: jnp.where(i <= num_warmup, a, b), new, setting)
