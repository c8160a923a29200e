"""Operators that JAX cannot see into: a function of NumPy arrays, run in processes of its own."""

from __future__ import annotations

import atexit
import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_ext.arguments import check_count


class BlackBox:
    """A Python function as an operator in a model, evaluated in batches by several processes.

    For a PDE code or any function of NumPy arrays that JAX cannot trace. It has no derivative. All
    points of a batch of proposals, of all chains, are one call from JAX; the processes are spawned,
    so that none of them shares threads or devices with JAX.

    Parameters
    ----------
    function : callable
        `function(x)`: NumPy array of a fixed shape in, array of shape `shape` out. It must be
        importable by name from a module (no lambda), since other processes run it.
    shape : tuple of int
        Shape of what it returns.
    processes : int
        Processes to start, when first called. 0: run in this process, for functions of
        microseconds.

    Attributes
    ----------
    num_calls, num_solves : int
        Calls from JAX so far, and points evaluated.

    Raises
    ------
    TypeError
        When `function` is not callable.
    ValueError
        For a bad `processes` or `shape`; at a call, when the function returns another shape.

    Notes
    -----
    With processes, the script that runs it must begin its work under
    `if __name__ == "__main__":`, as always with Python's `multiprocessing`.

    Examples
    --------
    >>> import numpy as np, jax.numpy as jnp
    >>> from ppl_ext import BlackBox
    >>> operator = BlackBox(np.cumsum, shape=(3,), processes=0)
    >>> operator(jnp.ones(3)).tolist()
    [1.0, 2.0, 3.0]
    """

    def __init__(
        self, function: Callable[[np.ndarray], Any], shape: tuple[int, ...], processes: int = 0
    ) -> None:
        if not callable(function):
            raise TypeError(
                f"BlackBox: `function` must be callable, got {type(function).__name__}."
            )
        if processes != 0:
            check_count("BlackBox", processes=processes)
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and n > 0 for n in shape):
            raise ValueError(f"BlackBox: `shape` must be a tuple of positive ints, got {shape!r}.")
        self.function, self.shape, self.processes = function, shape, processes
        self.num_calls = self.num_solves = 0
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, x: Any) -> jax.Array:
        """The function's value at `x`, also under `jit` and `vmap`."""
        x = jnp.asarray(x)
        dtype = jnp.result_type(x, jnp.float32)
        call = _Call(self, x.shape)
        result = jax.ShapeDtypeStruct(self.shape, dtype)
        return jax.pure_callback(call, result, x, vmap_method="expand_dims")

    def evaluate(self, points: np.ndarray) -> np.ndarray:
        """Values at each of `points`, shape (batch, ...): (batch, *shape)."""
        self.num_calls += 1
        self.num_solves += len(points)
        if self.processes == 0 or len(points) == 1:
            values = [self.function(point) for point in points]
        else:
            chunk = math.ceil(len(points) / (4 * self.processes))
            values = list(self._started().map(self.function, points, chunksize=chunk))
        arrays = [np.asarray(value) for value in values]
        for array in arrays:
            if array.shape != self.shape:
                raise ValueError(
                    f"BlackBox: `function` returned the shape {array.shape}, but `shape` is "
                    f"{self.shape}."
                )
        return np.stack(arrays)

    def close(self) -> None:
        """Stop the processes; the next call starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # a forked process would inherit JAX's threads and their locks
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.processes, mp_context=context)
            atexit.register(self.close)
        return self._pool

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


class _Call:
    """What JAX calls on the host: one point or a batch, with any number of leading axes."""

    def __init__(self, operator: BlackBox, shape: tuple[int, ...]) -> None:
        self.operator, self.shape = operator, shape

    def __call__(self, x: Any) -> np.ndarray:
        x = np.asarray(x)
        batch = x.shape[: x.ndim - len(self.shape)]
        values = self.operator.evaluate(x.reshape(-1, *self.shape))
        return values.reshape(*batch, *self.operator.shape).astype(x.dtype)

    # equal for equal operators: a program is compiled once
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and (self.operator, self.shape) == (
            other.operator,
            other.shape,
        )

    def __hash__(self) -> int:
        return hash((id(self.operator), self.shape))
