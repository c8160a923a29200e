"""Spins on a lattice with free boundaries: normalising constant and draws by the transfer matrix.

Sites are added one by one, column by column. The message before a site is the log of the sum over
all earlier spins, for each of the q^rows states of the last `rows` sites, the window; the sum of
the last message is the normalising constant, and going back from it draws the spins (Reeves &
Pettitt 2004, Biometrika 91). Work and memory grow with `rows * columns * q^rows`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ppl_ext.target import Array


class Lattice(NamedTuple):
    """Log weights: sum of `field`, and of coupling times `pair` of the two spins for each edge."""

    down: Array  # (columns, rows - 1) couplings within columns
    across: Array  # (columns - 1, rows) couplings between columns
    field: Array  # (columns, rows, q)
    pair: Array  # (q, q)


def log_normalizer(lattice: Lattice) -> Array:
    """Log of the sum of the weights of all q^(rows columns) configurations."""
    last, _ = _messages(lattice)
    return jax.nn.logsumexp(last)


def draw(key: Array, lattice: Lattice) -> Array:
    """Spins 0 ... q - 1 with probabilities proportional to their weights, (columns, rows)."""
    columns, rows, q = lattice.field.shape
    last, messages = _messages(lattice)
    key_last, key_rest = jax.random.split(key)
    window = jax.random.categorical(key_last, last)
    noise = jax.random.gumbel(key_rest, (columns * rows, q), last.dtype)
    rest = q ** (rows - 1)

    def back(window: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        # the site that left the window when the last one of it was added
        message, across, noise = at
        others, newest = window // q, window % q
        weights = message[jnp.arange(q) * rest + others] + across * lattice.pair[:, newest]
        oldest = jnp.argmax(weights + noise)
        return oldest * rest + others, oldest

    across = _by_site(lattice)[0]
    later = jax.tree.map(lambda leaf: leaf[rows:], (messages, across, noise))
    _, earlier = jax.lax.scan(back, window, later, reverse=True)
    final = (window // q ** jnp.arange(rows - 1, -1, -1)) % q
    return jnp.concatenate([earlier, final]).reshape(columns, rows)


def _by_site(lattice: Lattice) -> tuple[Array, Array, Array]:
    """Couplings to the site before, in the row and in the column; none at the boundaries."""
    columns, rows, q = lattice.field.shape
    across = jnp.pad(lattice.across, ((1, 0), (0, 0)))
    down = jnp.pad(lattice.down, ((0, 0), (1, 0)))
    return across.ravel(), down.ravel(), lattice.field.reshape(columns * rows, q)


def _messages(lattice: Lattice) -> tuple[Array, Array]:
    """The last message, (q^rows,), and those before each site, (sites, q^rows)."""
    _, rows, q = lattice.field.shape
    newest = jnp.arange(q ** (rows - 1)) % q

    def add(message: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        across, down, field = at
        # axes: the oldest site of the window, its others, the new site
        old = message.reshape(q, -1, 1) + across * lattice.pair[:, None, :]
        new = jax.nn.logsumexp(old, 0) + down * lattice.pair[newest] + field
        return new.reshape(-1), message

    # before the first column are spins that nothing is coupled to
    start = jnp.full(q**rows, -rows * math.log(q), lattice.field.dtype)
    return jax.lax.scan(add, start, _by_site(lattice))
