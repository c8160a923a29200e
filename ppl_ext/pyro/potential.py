"""The potential energy of a run as a function that JAX can differentiate.

`TracedPotential` evaluates the recorded program; `CallbackPotential` asks PyTorch at each step,
for models that cannot be recorded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ppl_ext.errors import TracingError, UnsupportedModelError
from ppl_ext.pyro.check import (
    compare,
    compare_values,
    random_points,
    same_program,
    torch_value_and_grad,
)
from ppl_ext.pyro.program import Program, record, to_jax, to_torch
from ppl_ext.target import Array, PyTree

Tensors = dict[str, torch.Tensor]
Engine = Literal["auto", "xla", "torch"]
ENGINES = ("auto", "xla", "torch")

# XLA takes seconds per thousand operations
MANY_OPERATIONS = 5000


@dataclass(frozen=True)
class TracedPotential:
    """`potential(z, data)` by a recorded program; `data` are its constants.

    Equal for equal programs, so that compiled samplers are found again.
    """

    program: Program

    def __call__(self, z: Mapping[str, Array], data: Sequence[Array]) -> Array:
        value = self.program.evaluate(z, data)["potential_energy"]
        return value.astype(jnp.result_type(float))

    @property
    def double(self) -> bool:
        """Whether PyTorch computes anything in double precision."""
        return not self.program.float_dtypes().isdisjoint({"float64", "complex128"})


class CallbackPotential:
    """`potential(z, data)` by a call to PyTorch; `data` is not used."""

    def __init__(self, potential_fn: Callable[[Tensors], torch.Tensor], start: Tensors) -> None:
        self.double = any(x.dtype == torch.float64 for x in start.values())
        self.start = start
        function = _torch_function(potential_fn, start)
        self._function = function

    def __call__(self, z: Mapping[str, Array], data: PyTree) -> Array:
        return self._function({name: jnp.asarray(z[name]) for name in self.start})


def build_potential(
    potential_fn: Callable[[Tensors], torch.Tensor],
    start: Tensors,
    engine: Engine = "auto",
    checked: set[str] | None = None,
) -> tuple[TracedPotential | CallbackPotential, tuple[Array, ...]]:
    """The potential and its data, compared with PyTorch at several points.

    `checked` holds the keys of programs for which that has been done, and gets new ones.

    Raises
    ------
    TracingError
        With `engine="xla"`, when the function cannot be recorded; with `"auto"` PyTorch
        evaluates it, and a warning says why.
    MismatchError
        When JAX and PyTorch disagree; names the operation.
    UnsupportedModelError
        When the function has two values at the same point.
    """
    points = random_points(start)
    if engine == "torch":
        return _callback(potential_fn, start, points[0]), ()
    wrapped = lambda z: {"potential_energy": potential_fn(z)}  # noqa: E731
    try:
        recording = record(wrapped, points[0])
        same_program(recording, record(wrapped, points[1]))
    except TracingError as error:
        if engine == "xla":
            raise
        callback = _callback(potential_fn, start, points[0])
        warnings.warn(
            f"PyTorch evaluates this model, which is slow, because JAX cannot: {error}",
            stacklevel=3,
        )
        return callback, ()
    potential = TracedPotential(recording.program)
    count = len(recording.program.operations)
    if count > MANY_OPERATIONS:
        warnings.warn(
            f"The model has {count} operations, a long Python loop perhaps, and will compile "
            'slowly. Write the loop with tensors, or let PyTorch evaluate it: engine="torch".',
            stacklevel=3,
        )
    with precision_and_device(potential.double, start):
        data = tuple(map(to_jax, recording.constants))
        if checked is None or recording.program.key not in checked:
            compare(recording, data, potential_fn, points)
    if checked is not None:
        checked.add(recording.program.key)
    return potential, data


@dataclass(frozen=True)
class TracedFunction:
    """`function(z, data)` by a recorded program, its outputs by name; no reals but JAX's."""

    program: Program

    def __call__(self, z: Mapping[str, Array], data: Sequence[Array]) -> dict[str, Array]:
        found = self.program.evaluate(z, data)
        return {name: value.astype(jnp.result_type(float)) for name, value in found.items()}


class CallbackFunction:
    """`function(z, data)` by a call to PyTorch, without derivatives; `data` is not used."""

    def __init__(self, function: Callable[[Tensors], Tensors], start: Tensors) -> None:
        self.function, self.start = function, start
        self.shapes = {name: tuple(value.shape) for name, value in function(start).items()}

    def __call__(self, z: Mapping[str, Array], data: PyTree) -> dict[str, Array]:
        dtype = jnp.result_type(float)

        def call(z: Mapping[str, Any]) -> dict[str, np.ndarray]:
            with torch.no_grad():
                found = self.function(_tensors(z, self.start))
            return {name: value.cpu().numpy().astype(dtype) for name, value in found.items()}

        shapes = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in self.shapes.items()}
        inputs = {name: jnp.asarray(z[name]) for name in self.start}
        return jax.pure_callback(call, shapes, inputs, vmap_method="sequential")


def build_function(
    function: Callable[[Tensors], Tensors], start: Tensors, engine: Engine
) -> tuple[TracedFunction | CallbackFunction, tuple[Array, ...]]:
    """A function of the sites besides the potential, and its data, compared with PyTorch.

    Raises
    ------
    TracingError
        With `engine="xla"`, when the function cannot be recorded.
    MismatchError
        When JAX and PyTorch disagree.
    """
    points = random_points(start, 2)
    if engine == "torch":
        return CallbackFunction(function, start), ()
    try:
        recording = record(function, points[0])
        same_program(recording, record(function, points[1]))
    except TracingError:
        if engine == "xla":
            raise
        return CallbackFunction(function, start), ()
    traced = TracedFunction(recording.program)
    double = not recording.program.float_dtypes().isdisjoint({"float64", "complex128"})
    with precision_and_device(double, start):
        data = tuple(map(to_jax, recording.constants))
        compare_values(recording, data, function, points)
    return traced, data


def _callback(
    potential_fn: Callable[[Tensors], torch.Tensor], start: Tensors, point: Tensors
) -> CallbackPotential:
    values = [float(torch_value_and_grad(potential_fn, point)[0]) for _ in range(2)]
    if values[0] != values[1] and not all(map(math.isnan, values)):
        raise UnsupportedModelError(
            f"The potential energy is {values[0]} and then {values[1]} at the same point: the "
            "model draws random numbers outside of `pyro.sample`. Draw them before the run and "
            "pass them as data."
        )
    return CallbackPotential(potential_fn, start)


@contextmanager
def precision_and_device(double: bool, start: Tensors) -> Iterator[None]:
    """JAX in the precision of the model and on the device of its tensors.

    Raises
    ------
    RuntimeError
        When the tensors are on a GPU that JAX does not have.
    """
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(double))
        device = next((x.device for x in start.values()), torch.device("cpu"))
        platform = "cpu" if device.type == "cpu" else "gpu"
        try:
            devices = jax.devices(platform)
        except RuntimeError as error:
            raise RuntimeError(
                f"The model's tensors are on '{device}', but JAX has no such device. Install JAX "
                "for it (for example jax[cuda13]), or move the tensors to the CPU."
            ) from error
        stack.enter_context(jax.default_device(devices[device.index or 0]))
        yield


def _torch_function(
    potential_fn: Callable[[Tensors], torch.Tensor], start: Tensors
) -> Callable[[dict[str, Array]], Array]:
    """`potential_fn` as a JAX function with first and second derivatives.

    The derivative of `potential` reads the gradient from `value_and_grad`, and that one's reads
    Hessian-vector products, so that forward over reverse mode works.
    """

    def host_value_and_grad(z: Mapping[str, Any]) -> Any:
        value, grad = torch_value_and_grad(potential_fn, _tensors(z, start))
        dtypes = {name: np.asarray(x).dtype for name, x in z.items()}
        if not np.isfinite(value) and not grad:
            grad = {name: np.full(np.shape(x), np.nan) for name, x in z.items()}
        dtype = next(iter(dtypes.values()))
        return np.asarray(value, dtype), {n: np.asarray(grad[n], dtypes[n]) for n in dtypes}

    def host_hessian_product(z: Mapping[str, Any], tangent: Mapping[str, Any]) -> Any:
        inputs = {name: x.requires_grad_() for name, x in _tensors(z, start).items()}
        leaves = list(inputs.values())
        directions = list(_tensors(tangent, start).values())
        try:
            grads = torch.autograd.grad(
                potential_fn(inputs), leaves, create_graph=True, allow_unused=True
            )
            along = sum(
                (g * d).sum() for g, d in zip(grads, directions, strict=True) if g is not None
            )
            products = torch.autograd.grad(along, leaves, allow_unused=True)
        except (RuntimeError, ValueError):
            products = tuple(torch.full_like(x, torch.nan) for x in leaves)
        return {
            name: np.zeros(np.shape(z[name]), np.asarray(z[name]).dtype)
            if p is None
            else p.detach().cpu().numpy().astype(np.asarray(z[name]).dtype)
            for name, p in zip(start, products, strict=True)
        }

    def shapes(z: dict[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in z.items()}

    @jax.custom_jvp
    def value_and_grad(z: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        value = jax.ShapeDtypeStruct((), jnp.result_type(*z.values()))
        return jax.pure_callback(
            host_value_and_grad, (value, shapes(z)), z, vmap_method="sequential"
        )

    @value_and_grad.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (z,), (t,) = primals, tangents
        value, grad = value_and_grad(z)
        product = jax.pure_callback(host_hessian_product, shapes(z), z, t, vmap_method="sequential")
        return (value, grad), (_inner(grad, t), product)

    @jax.custom_jvp
    def potential(z: dict[str, Array]) -> Array:
        return value_and_grad(z)[0]

    @potential.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (z,), (t,) = primals, tangents
        value, grad = value_and_grad(z)
        return value, _inner(grad, t)

    return potential


def _tensors(z: Mapping[str, Any], like: Tensors) -> Tensors:
    return {name: to_torch(z[name], x) for name, x in like.items()}


def _inner(a: dict[str, Array], b: dict[str, Array]) -> Array:
    return sum((jnp.vdot(a[name], b[name]) for name in a), jnp.zeros(()))
