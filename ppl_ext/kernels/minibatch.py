"""What the minibatch kernels share: the problem, and the table to draw data from.

Data are drawn with probabilities proportional to bounds c_i by integer weights: c_i is rounded
*up* to a multiple of a unit, so that it stays a bound, and a datum is found by bisection in the
cumulative sum of integers, which has no rounding error whatever the number of data. (A cumulative
sum of floats has: at 10^6 data in float32 the chance of a datum is off by several per cent, and
its likelihood by the same factor.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
