"""What the minibatch kernels share: the problem, the table to draw data from.

Data are drawn with probabilities proportional to bounds c_i by integer weights: c_i is rounded
*up* to a multiple of a unit, so that it stays a bound, and a datum is found in the cumulative sum
of integers, which has no rounding error whatever the number of data. (A cumulative sum of floats
has: at 10^6 data in float32 the chance of a datum is off by several per cent, and its likelihood by
the same factor.) The search starts from a guide, about one entry for each datum, so that it takes a
few steps whatever their number (Chen & Asau 1974).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppl_ext.kernels.chain import run_if
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
    bounds: Callable[..., Any]  # (size,) constants of the kernel's bound
    ravel: Callable[[PyTree], Array]
    unravel: Callable[[Array], PyTree]
    data: tuple[Array, ...] = ()  # all that may be others when a chain goes on
    given: Callable[[tuple[Array, ...]], Problem] | None = None  # the problem of other data

    def log_density(self, x: Array) -> Array:
        """Log density of all data at `x`."""
        return self.log_base(x) + jnp.sum(self.log_terms(x, jnp.arange(self.size)))

    def after(self, turn: Array) -> Problem:
        """The same problem, whose data are there only after `turn`, a number of a loop.

        XLA moves what does not depend on the turns of a loop out of it, and runs it always: a
        gather of all data, say, which is wanted once in a thousand steps.
        """
        if self.given is None:
            return self
        return self.given(jax.lax.optimization_barrier((turn, self.data))[1])

    def fingerprint(self) -> Array:
        """A number of 32 bits that other data do not have, but for one chance in 2^32."""
        return sum((_hash(leaf) for leaf in self.data), jnp.zeros((), jnp.uint32))


def _hash(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    else:
        bits = leaf
    if bits.dtype.itemsize == 8:
        bits = jax.lax.bitcast_convert_type(bits, jnp.uint32)
    bits = bits.ravel().astype(jnp.uint32)
    # the finaliser of MurmurHash3, of each value and its place; the value is multiplied, not the
    # place, because XLA would compute that product at every call
    bits = bits * jnp.uint32(0x9E3779B9) + jnp.arange(bits.size, dtype=jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    size = jnp.uint32((bits.size * 0x27D4EB2F) % 2**32)
    return size + jnp.sum(bits ^ (bits >> 16), dtype=jnp.uint32)


def current(
    stale: Array, x: Array, fit: Any, problem: Problem, find: Callable[[Array, Problem], Any]
) -> Any:
    """`fit`, a NamedTuple with a `fingerprint`, or where it is for other data `find` of them."""
    first = jnp.zeros((), jnp.int32)
    here = (first, fit.fingerprint)
    look = lambda at: (at[0], problem.after(at[0]).fingerprint())  # noqa: E731
    changed = run_if(stale, look, here)[1] != fit.fingerprint

    def again(at: Any) -> Any:
        first, x, old = at
        new = find(x, problem.after(first))
        return first, x, jax.tree.map(lambda new, old: new.astype(old.dtype), new, old)

    return run_if(changed, again, (first, x, fit))[2]


class Table(NamedTuple):
    """Integer weights of the data, in units of `unit`."""

    cumulative: Array  # (size,) int32
    guide: Array  # (2^k + 1,) int32: data from which to search, for each cell of positions
    num_steps: Array  # () of a search
    unit: Array  # ()

    @property
    def total(self) -> Array:
        """Sum of the bounds."""
        return self.unit * self.cumulative[-1]

    def find(self, position: Array) -> Array:
        """Datum of each integer of 0 ... `cumulative[-1]` - 1."""
        cell = position >> _shift(self.cumulative.size)

        def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = ends
            middle = (low + high) // 2
            below = self.cumulative[middle] <= position
            return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

        ends = self.guide[cell], self.guide[cell + 1]
        return jax.lax.fori_loop(0, self.num_steps, halve, ends)[0]

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
    cumulative = jnp.cumsum(weights.astype(jnp.int32), dtype=jnp.int32)
    # first datum beyond the start of each cell; the last cell ends at 2^31
    shift = _shift(bounds.size)
    starts = jnp.arange(2 ** (31 - shift), dtype=jnp.int32) << shift
    guide = jnp.searchsorted(cumulative, starts, side="right").astype(jnp.int32)
    last = jnp.full(1, bounds.size - 1, jnp.int32)
    guide = jnp.minimum(jnp.concatenate([guide, last]), bounds.size - 1)
    # a search among n + 1 data halves them until one is left
    longest = jnp.max(guide[1:] - guide[:-1])
    num_steps = 32 - jax.lax.clz(longest)
    return Table(cumulative, guide, num_steps, unit)


def _shift(size: int) -> int:
    """Bits of a position within its cell: about as many cells as data."""
    return 31 - min(max(size - 1, 1).bit_length(), 30)
