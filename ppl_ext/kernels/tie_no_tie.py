"""Random graphs of an exponential family by the tie-no-tie sampler, a Markov chain: not exact.

Each step toggles a dyad, half of the time one of the E edges, else any of the D dyads. It is
accepted with

    min(1, exp(coef . change) q(back) / q(forth))
    q(add) = 1 / (2 D), 1 / D if E = 0;   q(remove) = 1 / (2 E) + 1 / (2 D)

which moves faster than uniform toggles on sparse graphs (Morris, Handcock & Hunter 2008, J. Stat.
Softw. 24(4), section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_ext.target import Array


def dyads(num_nodes: int) -> np.ndarray:
    """All pairs i < j, (D, 2)."""
    return np.stack(np.triu_indices(num_nodes, 1), 1)


def adjacency(ties: Array, num_nodes: int) -> Array:
    """Ties of the dyads, (D,), as a symmetric matrix."""
    i, j = dyads(num_nodes).T
    upper = jnp.zeros((num_nodes, num_nodes), ties.dtype).at[i, j].set(ties)
    return upper + upper.T


def draw(
    key: Array,
    log_ratio: Callable[[Array, Array, Array], Array],
    start_logits: Array,
    num_nodes: int,
    num_toggles: int,
) -> Array:
    """Adjacency matrix after `num_toggles` steps from independent ties with `start_logits`, (D,).

    `log_ratio(graph, i, j)` is the log ratio of the weights with and without the tie, for a graph
    that does not have it.
    """
    pairs = jnp.asarray(dyads(num_nodes), jnp.int32)
    count = len(pairs)
    dtype = start_logits.dtype
    key_start, key_steps = jax.random.split(key)
    ties = jax.random.bernoulli(key_start, jax.nn.sigmoid(start_logits))
    # dyads with the ties first: a random tie costs one look-up
    order = jnp.argsort(~ties).astype(jnp.int32)
    graph = adjacency(ties.astype(dtype), num_nodes)
    num_ties = ties.sum(dtype=jnp.int32)

    def step(t: Array, carry: Any) -> Any:
        graph, order, num_ties = carry
        u = jax.random.uniform(jax.random.fold_in(key_steps, t), (3,), dtype)
        from_ties = (u[0] < 0.5) & (num_ties > 0)
        size = jnp.where(from_ties, num_ties, count)
        # a random dyad is one of a random order too
        at = jnp.minimum((u[1] * size).astype(jnp.int32), size - 1)
        dyad = order[at]
        i, j = pairs[dyad]
        tie = at < num_ties
        without = graph.at[i, j].set(0).at[j, i].set(0)
        fewer = jnp.where(tie, num_ties - 1, num_ties).astype(dtype)
        add = jnp.where(fewer > 0, -jnp.log(2.0 * count), -jnp.log(1.0 * count))
        remove = jnp.log(0.5 / (fewer + 1) + 0.5 / count)
        gain = log_ratio(without, i, j) + remove - add
        accepted = jnp.log(u[2]) < jnp.where(tie, -gain, gain)
        value = jnp.where(accepted, ~tie, tie).astype(dtype)
        graph = without.at[i, j].set(value).at[j, i].set(value)
        # swap with the last tie, or with the first dyad without one
        other = jnp.where(tie, num_ties - 1, num_ties)
        other = jnp.where(accepted, other, at)
        order = order.at[other].set(dyad).at[at].set(order[other])
        change = jnp.where(tie, -1, 1) * accepted
        return graph, order, num_ties + change.astype(jnp.int32)

    carry = (graph, order, num_ties)
    return jax.lax.fori_loop(0, num_toggles, step, carry)[0]
