"""Compiled chains: transitions made in blocks inside one loop.

A `Runner` holds the two compiled programs of a kernel, start and block of transitions. It is
found again for an equal algorithm and model, so that later chains and runs do not compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ppl_ext.target import Array, PyTree

# size of the buffers of one block, and the time a block should take: short enough for a smooth
# progress bar, and for little waste when the driver needs fewer draws than a block has
BUFFER_BYTES = 2**25
MAX_BLOCK = 1000
SECONDS_PER_BLOCK = 0.2

Fields = dict[str, np.ndarray]


class Transition(NamedTuple):
    """One chain's start and step, and what is kept of each draw."""

    init: Callable[[Array, PyTree, PyTree], Any]  # key, z, data -> state
    step: Callable[[Any, PyTree], Any]  # state, data -> state
    fields: Callable[[Any, PyTree], dict[str, Any]]  # state, data -> statistics of the draw, or z


class Algorithm(Protocol):
    """A kernel's settings: hashable, equal when they sample alike."""

    def __hash__(self) -> int: ...

    def transition(self, target: Any, num_warmup: int) -> Transition:
        """The algorithm on what `Functions.target` gives."""


class Functions(Protocol):
    """What a run evaluates: hashable, equal when they compute the same from their data."""

    def __hash__(self) -> int: ...

    @property
    def reusable(self) -> bool:
        """Whether compiled chains may be kept for equal functions; else they hold a model."""

    def target(self, structure: dict[str, tuple[int, ...]]) -> Any:
        """What `Algorithm.transition` is given: callables take the data as last argument."""


class Runner:
    """Compiled start and block of transitions for one chain, or for several at once."""

    def __init__(
        self, transition: Transition, batched: bool, extra_fields: tuple[str, ...]
    ) -> None:
        init, step, fields = transition

        def collect(state: Any, data: PyTree) -> dict[str, Any]:
            extra = {name: _attribute(state, name) for name in extra_fields}
            return {"z": state.z, **fields(state, data), **extra}

        if batched:
            init = jax.vmap(init, (0, 0, None))
            step = jax.vmap(step, (0, None))

        @partial(jax.jit, static_argnames="capacity")
        def block(
            state: Any, data: PyTree, count: Array, thinning: Array | None, capacity: int
        ) -> tuple[Any, Any]:
            shapes = jax.eval_shape(collect, state, data)
            buffers = jax.tree.map(lambda s: jnp.zeros((capacity, *s.shape), s.dtype), shapes)

            def body(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                state, buffers = carry
                if thinning is None:
                    state = step(state, data)
                else:
                    state = jax.lax.fori_loop(0, thinning, lambda _, s: step(s, data), state)
                kept = jax.tree.map(lambda b, x: b.at[i].set(x), buffers, collect(state, data))
                return state, kept

            return jax.lax.fori_loop(0, count, body, (state, buffers))

        self.init = jax.jit(init)
        self._block = block
        self.collect = collect

    def capacity(self, state: Any, data: PyTree) -> int:
        """Draws that the buffers of a block hold."""
        shapes = jax.eval_shape(self.collect, state, data)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        return int(np.clip(BUFFER_BYTES // max(size, 1), 1, MAX_BLOCK))

    def block(
        self, state: Any, data: PyTree, count: int, capacity: int, thinning: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """`count` kept draws, each after `thinning` transitions; axis 0 of each field.

        `thinning=None` is one transition in a program of its own, without the inner loop.
        """
        inner = None if thinning is None else jnp.asarray(thinning, jnp.int32)
        state, buffers = self._block(
            state, data, jnp.asarray(count, jnp.int32), inner, capacity=capacity
        )
        return state, jax.tree.map(lambda b: np.asarray(b)[:count], buffers)


def new_runner(
    algorithm: Algorithm,
    functions: Functions,
    structure: tuple[tuple[str, tuple[int, ...]], ...],
    num_warmup: int,
    batched: bool,
    extra_fields: tuple[str, ...],
) -> Runner:
    """The runner of an algorithm on what the functions compute."""
    transition = algorithm.transition(functions.target(dict(structure)), num_warmup)
    return Runner(transition, batched, extra_fields)


runner = lru_cache(maxsize=32)(new_runner)


class Chain:
    """A chain (or several) under way: its state, its data and the block size in use."""

    def __init__(self, runner: Runner, state: Any, data: PyTree) -> None:
        self.runner, self.state, self.data = runner, state, data
        self.capacity = runner.capacity(state, data)
        self.count = 1

    def draw(self, limit: int | None = None, thinning: int | None = None) -> dict[str, Any]:
        """The next block of draws, at most `limit` of them."""
        count = min(self.count, self.capacity, limit or self.capacity)
        started = time.perf_counter()
        self.state, fields = self.runner.block(
            self.state, self.data, count, self.capacity, thinning
        )
        seconds = max(time.perf_counter() - started, 1e-6)
        # the first block contains the compilation: its time says nothing
        wanted = count * SECONDS_PER_BLOCK / seconds
        self.count = int(np.clip(wanted, 1, 4 * count if count > 1 else 16))
        return fields


def _attribute(state: Any, path: str) -> Any:
    for name in path.split("."):
        state = state[name] if isinstance(state, Mapping) else getattr(state, name)
    return state
