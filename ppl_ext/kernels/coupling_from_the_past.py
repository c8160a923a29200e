"""Exact draws from ferromagnets by monotone coupling from the past.

A chain with updates x -> phi(x, u) that keep an order, run from time -T to 0 from the largest and
from the smallest state with the same randomness u, has forgotten its start once both are equal at
time 0; that state is an exact draw. T doubles until they are, and the randomness of each time is
used again (Propp & Wilson 1996): drawing it anew, or giving up and starting over, is a bias.
So the randomness of time -t is a function of (key, t), and a limit on T is reported.

Two chains: the heat bath of the Ising model, site by site, fast above the critical temperature;
and that of the random-cluster model, bond by bond, for Potts models and strong couplings. With
external fields h_c the clusters C of the latter weigh W(|C|) = sum_c exp(h_c |C|); it stays
monotone because W(a + b) / (W(a) W(b)) grows with a and b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_ext.target import Array


class Coalesced(NamedTuple):
    """State at time 0."""

    state: Array
    sweeps: Array  # () sweeps run, all attempts together
    overflow: Array  # () whether the chains had not met at the limit: the state is no draw


def coupled(
    key: Array,
    sweep: Callable[[Array, Array], Array],
    extremes: Array,
    max_sweeps: int,
) -> Coalesced:
    """The common state at time 0 of chains started from `extremes`, shape (2, ...), long ago.

    `sweep(state, key)` moves one state, with all the randomness from the key. `max_sweeps` is the
    longest past.
    """
    both = jax.vmap(sweep, in_axes=(0, None))

    def attempt(carry: Any) -> Any:
        past, done, _ = carry
        # from time -past to 0
        move = lambda k, states: both(states, jax.random.fold_in(key, past - k))  # noqa: E731
        return 2 * past, done + past, jax.lax.fori_loop(0, past, move, extremes)

    def apart(carry: Any) -> Array:
        past, _, states = carry
        return jnp.any(states[0] != states[1]) & (past <= max_sweeps)

    start = (jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32), extremes)
    _, done, states = jax.lax.while_loop(apart, attempt, start)
    return Coalesced(states[0], done, jnp.any(states[0] != states[1]))


class Neighbours(NamedTuple):
    """A graph as arrays of fixed size, padded."""

    sites: np.ndarray  # (n, degree) neighbours
    edges: np.ndarray  # (n, degree) edges to them
    real: np.ndarray  # (n, degree) whether the entry is one
    classes: list[np.ndarray]  # sites that are no neighbours of each other


def neighbours(num_nodes: int, edges: np.ndarray) -> Neighbours:
    """Neighbours of each site, and a greedy colouring, for `edges` of shape (m, 2)."""
    around: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    for e, (a, b) in enumerate(edges.tolist()):
        around[a].append((b, e))
        around[b].append((a, e))
    degree = max(1, max((len(a) for a in around), default=1))
    table = np.zeros((3, num_nodes, degree), np.int32)
    colour = np.full(num_nodes, -1)
    for i, found in enumerate(around):
        for k, (j, e) in enumerate(found):
            table[:, i, k] = j, e, 1
        taken = {colour[j] for j, _ in found}
        colour[i] = next(c for c in range(degree + 1) if c not in taken)
    classes = [np.flatnonzero(colour == c) for c in range(colour.max() + 1)]
    return Neighbours(table[0], table[1], table[2].astype(bool), classes)


def ising_sweep(around: Neighbours, coupling: Array, field: Array) -> Callable:
    """Heat bath of all spins -1, 1, with `coupling` of shape (m,) and `field` of shape (n,)."""
    weights = jnp.where(around.real, coupling[around.edges], 0)

    def sweep(x: Array, key: Array) -> Array:
        uniform = jax.random.uniform(key, field.shape, field.dtype)
        for sites in around.classes:
            force = field[sites] + jnp.sum(weights[sites] * x[around.sites[sites]], 1)
            up = uniform[sites] < jax.nn.sigmoid(2 * force)
            x = x.at[sites].set(jnp.where(up, 1, -1).astype(x.dtype))
        return x

    return sweep


def draw_ising(
    key: Array, around: Neighbours, coupling: Array, field: Array, max_sweeps: int
) -> Coalesced:
    """Spins -1, 1 with weights exp(sum of coupling x_i x_j + sum of field x_i); couplings >= 0."""
    top = jnp.ones(field.shape, jnp.int32)
    sweep = ising_sweep(around, coupling, field)
    return coupled(key, sweep, jnp.stack([top, -top]), max_sweeps)


def draw_potts(
    key: Array,
    around: Neighbours,
    edges: np.ndarray,
    coupling: Array,
    field: Array,
    max_sweeps: int,
) -> Coalesced:
    """States 0 ... q - 1 with weights exp(sum of coupling [x_i = x_j] + sum of field[x_i]).

    `coupling` >= 0 of shape (m,), `field` of shape (q,). Bonds are drawn by coupling from the past,
    then each cluster gets one state.
    """
    key_bonds, key_states = jax.random.split(key)
    num_nodes, num_edges = len(around.sites), len(edges)
    open_prob = -jnp.expm1(-coupling)
    ends = jnp.asarray(edges)

    def log_weight(size: Array) -> Array:
        return jax.nn.logsumexp(field * size[..., None].astype(field.dtype), -1)

    def clusters(bonds: Array, ends: Array) -> Array:
        """Sites connected to each of two sites, (2, n)."""
        passable = bonds[around.edges] & around.real

        def spread(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            reached, _ = carry
            return reached | jnp.any(reached[:, around.sites] & passable, -1), reached

        start = jnp.arange(num_nodes) == ends[:, None]
        growing = lambda carry: jnp.any(carry[0] != carry[1]) & ~carry[0][0, ends[1]]  # noqa: E731
        return jax.lax.while_loop(growing, spread, (start, jnp.zeros_like(start)))[0]

    def sweep(bonds: Array, key: Array) -> Array:
        uniform = jax.random.uniform(key, (num_edges,), coupling.dtype)

        def update(e: Array, bonds: Array) -> Array:
            without = bonds.at[e].set(False)
            reached = clusters(without, ends[e])
            size = jnp.sum(reached, 1)
            joined = jnp.exp(log_weight(size.sum()) - log_weight(size).sum())
            p = open_prob[e]
            apart = p * joined / (1 - p + p * joined)
            prob = jnp.where(reached[0, ends[e, 1]], p, apart)
            return bonds.at[e].set(uniform[e] < prob)

        return jax.lax.fori_loop(0, num_edges, update, bonds)

    extremes = jnp.stack([jnp.ones(num_edges, bool), jnp.zeros(num_edges, bool)])
    found = coupled(key_bonds, sweep, extremes, max_sweeps)

    def spread(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # the smallest site of the cluster
        label, _ = carry
        passable = found.state[around.edges] & around.real
        smallest = jnp.where(passable, label[around.sites], num_nodes).min(1)
        return jnp.minimum(label, smallest), label

    label = jnp.arange(num_nodes)
    label, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[0] != carry[1]), spread, (label, label - 1)
    )
    size = jnp.zeros(num_nodes, field.dtype).at[label].add(1)
    states = jax.random.categorical(key_states, size[:, None] * field)
    return Coalesced(states[label].astype(jnp.int32), found.sweeps, found.overflow)
