"""Spins on a lattice with free boundaries: normalising constant and draws by the transfer matrix.

Columns of `rows` sites are added site by site. The message after a site is the log of the sum over
all earlier spins, for each of the q^rows states of the last `rows` sites; the sum of the last
message is the normalising constant, and going back from it draws the spins (Reeves & Pettitt 2004).
Work and memory grow with `rows * columns * q^rows`.
"""

from __future__ import annotations

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
    _, last = _messages(lattice)
    return jax.nn.logsumexp(last)


def draw(key: Array, lattice: Lattice) -> Array:
    """Spins 0 ... q - 1 with probabilities proportional to their weights, (columns, rows)."""
    columns, rows, q = lattice.field.shape
    messages, last = _messages(lattice)
    key_last, key_rest = jax.random.split(key)
    state = jax.random.categorical(key_last, last)
    powers = q ** jnp.arange(rows - 1, -1, -1)
    noise = jax.random.gumbel(key_rest, (columns - 1, rows, q), last.dtype)

    def back(spins: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        # the column before: its spins replace those of this one, from the last row to the first
        stored, across, noise = at
        right = spins
        for r in reversed(range(rows)):
            others = jnp.sum(spins * powers) - spins[r] * powers[r]
            candidates = stored[r][others + jnp.arange(q) * powers[r]]
            weights = candidates + across[r] * lattice.pair[right[r]]
            spins = spins.at[r].set(jnp.argmax(weights + noise[r]).astype(spins.dtype))
        return spins, spins

    final = (state // powers) % q
    _, earlier = jax.lax.scan(back, final, (messages, lattice.across, noise), reverse=True)
    return jnp.concatenate([earlier, final[None]])


def _messages(lattice: Lattice) -> tuple[Array, Array]:
    """Messages before each site from the second column on, (columns - 1, rows, q^rows); the last."""
    _, rows, q = lattice.field.shape
    size = q**rows
    digits = (jnp.arange(size)[:, None] // q ** jnp.arange(rows - 1, -1, -1)) % q
    first = jnp.sum(lattice.field[0][jnp.arange(rows), digits], 1)
    for r in range(1, rows):
        first = first + lattice.down[0, r - 1] * lattice.pair[digits[:, r - 1], digits[:, r]]

    def column(message: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        down, across, field = at
        stored = []
        for r in range(rows):
            stored.append(message)
            # axes: spins before, the old spin of this row, spins after; then the new spin
            old = message.reshape(q**r, q, -1)
            new = jax.nn.logsumexp(old[:, :, None, :] + across[r] * lattice.pair[:, :, None], 1)
            new = new + field[r][:, None]
            if r > 0:
                above = down[r - 1] * lattice.pair
                new = (new.reshape(-1, q, q, new.shape[-1]) + above[:, :, None]).reshape(new.shape)
            message = new.reshape(size)
        return message, jnp.stack(stored)

    last, messages = jax.lax.scan(
        column, first, (lattice.down[1:], lattice.across, lattice.field[1:])
    )
    return messages, last
