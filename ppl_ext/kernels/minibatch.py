"""What the minibatch kernels share: the problem, the table to draw data from, and proposals.

Data are drawn with probabilities proportional to bounds c_i by integer weights: c_i is rounded
*up* to a multiple of a unit, so that it stays a bound, and a datum is found by bisection in the
cumulative sum of integers, which has no rounding error whatever the number of data. (A cumulative
sum of floats has: at 10^6 data in float32 the chance of a datum is off by several per cent, and
its likelihood by the same factor.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ppl_ext.target import Array, PyTree

# sum of the integer weights, before rounding up: room for 2^30 data below the limit of int32
_TOTAL = 2**30


class Problem(NamedTuple):
    """A posterior whose log density is `log_base(x)` + the sum of `size` terms.

    Positions are flat unconstrained vectors, shape (d,).
    """

    size: int  # number of data
    log_base: Callable[[Array], Array]  # () prior with its Jacobian, and all outside the plate
    log_terms: Callable[[Array, Array], Array]  # (x, indices (k,)) -> (k,) log likelihoods
    bounds: Callable[..., Array]  # (size,) constants of the kernel's bound
    ravel: Callable[[PyTree], Array]
    unravel: Callable[[Array], PyTree]

    def log_density(self, x: Array) -> Array:
        """Log density of all data at `x`."""
        return self.log_base(x) + jnp.sum(self.log_terms(x, jnp.arange(self.size)))


class Table(NamedTuple):
    """Integer weights of the data, in units of `unit`."""

    cumulative: Array  # (size,) int32
    unit: Array  # ()

    @property
    def total(self) -> Array:
        """Sum of the bounds."""
        return self.unit * self.cumulative[-1]

    def find(self, position: Array) -> Array:
        """Datum of each integer of 0 ... `cumulative[-1]` - 1."""
        return jnp.searchsorted(self.cumulative, position, side="right")

    def bound(self, index: Array) -> Array:
        """Rounded bound of each datum."""
        before = jnp.where(index > 0, self.cumulative[index - 1], 0)
        return self.unit * (self.cumulative[index] - before)


def make_table(bounds: Array) -> Table:
    """The table of non-negative `bounds`, shape (size,), which are rounded up.

    Where one of them is not finite, neither is the total.
    """
    # float rounding must not make them smaller
    bounds = bounds * (1 + 4 * jnp.finfo(bounds.dtype).eps)
    unit = jnp.sum(bounds) / _TOTAL
    usable = (unit > 0) & jnp.isfinite(unit)
    weights = jnp.ceil(bounds / jnp.where(usable, unit, 1))
    weights = jnp.where(usable, weights, jnp.where(unit == 0, 0, 1))
    return Table(jnp.cumsum(weights.astype(jnp.int32), dtype=jnp.int32), unit)


# --- proposals, in coordinates in which the posterior is about a standard normal ----------------

Proposal = Literal["taylor-mala", "sgld", "mala", "barker", "random_walk"]


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


def truncated(gradient: Array, length: float) -> Array:
    """`gradient`, not longer than `length`: far from the mode an approximate one overshoots."""
    norm = jnp.linalg.norm(gradient)
    return gradient * jnp.where(norm > length, length / norm, 1.0)


def run_if(condition: Array, function: Callable[[Any], Any], operand: Any) -> Any:
    """`function(operand)` if `condition`, else `operand`.

    A loop of one or no turn: unlike `lax.cond`, it costs nothing under `vmap` when no chain
    needs it. What `function` depends on must be in `operand`: XLA runs always what depends on
    captured values alone.
    """

    def body(i: Array, value: Any) -> Any:
        # depends on the turn: else XLA moves what does not change over the turns out of the loop,
        # and runs it always
        _, value = jax.lax.optimization_barrier((i, value))
        return function(value)

    return jax.lax.fori_loop(0, condition.astype(jnp.int32), body, operand)
