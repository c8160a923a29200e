"""What the chains of all kernels share: states that drivers resume, and work done now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ppl_ext.target import Array


class Resumable:
    """First base of a state, a NamedTuple with the fields `rng_key` and `stale`."""

    __slots__ = ()

    def _replace(self, **changes: Any) -> Any:
        # MCMC resumes a chain by replacing its key, perhaps with new data: nothing cached
        # about the old data may survive that
        if set(changes) == {"rng_key"}:
            changes["stale"] = jnp.ones_like(self.stale)  # type: ignore[attr-defined]
        return super()._replace(**changes)  # type: ignore[misc]


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
