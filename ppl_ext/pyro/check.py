"""The self-check: JAX's potential and gradient against PyTorch's, before the first draw.

Whole programs are compared at several random points. Where they differ by more than rounding
can explain, every operation is compared alone, on the inputs that PyTorch gives it, in the order
of the program: the first that differs is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ppl_ext.errors import MismatchError, TracingError
from ppl_ext.pyro.black_box import NAME as BLACK_BOX
from ppl_ext.pyro.operations import Result
from ppl_ext.pyro.program import (
    Constant,
    Operation,
    Program,
    Recording,
    Value,
    apply,
    canonical,
    substitute,
    to_jax,
)

Tensors = dict[str, torch.Tensor]

NUM_POINTS = 3

# relative to the largest number in sight: what rounding makes of a whole program, where no
# operation is wrong, and of one operation
PROGRAM_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
GROSS = 0.05
OPERATION_TOLERANCE = {"float32": 2e-4, "float64": 1e-8}


def random_points(start: Tensors, count: int = NUM_POINTS) -> list[Tensors]:
    """The start and points around it, which do not touch PyTorch's random state."""
    generator = torch.Generator().manual_seed(0)
    points = [start]
    for _ in range(count - 1):
        points.append(
            {
                name: value + 0.3 * torch.randn(value.shape, generator=generator).to(value)
                if value.is_floating_point()
                else value
                for name, value in start.items()
            }
        )
    return points


def same_program(one: Recording, other: Recording) -> None:
    """Raise `TracingError` unless two recordings, made at different points, agree.

    They differ when the model reads a latent value past PyTorch's sight, or takes another branch.
    """
    if one.program != other.program or one.guards != other.guards:
        a, b = one.program.operations, other.program.operations
        pairs = zip(a, b, strict=False)
        differ = next((x for x, y in pairs if (x.name, x.args) != (y.name, y.args)), None)
        where = differ.where if differ is not None else "its end"
        raise TracingError(
            f"The model does not do the same at all values of its latent variables; the first "
            f"difference is at {where}. Use torch.where in place of `if`, and tensors in place "
            "of numbers."
        )
    for i, (x, y) in enumerate(zip(one.constants, other.constants, strict=True)):
        if not torch.equal(x.nan_to_num(), y.nan_to_num()):
            users = [o.where for o in one.program.operations if Constant(i) in _refs(o)]
            raise TracingError(
                f"The model computes a number from a latent variable outside of PyTorch; it is "
                f"used at {users[0] if users else 'its end'}. Use tensor operations throughout."
            )


def compare(
    recording: Recording,
    constants: Sequence[jax.Array],
    potential_fn: Any,
    points: Sequence[Tensors],
) -> None:
    """Raise `MismatchError`, naming the operation, unless values and gradients agree."""
    program, constants = recording.program, tuple(constants)
    pairs = []
    for point in points:
        expected, expected_grad = torch_value_and_grad(potential_fn, point)
        if not np.isfinite(expected):
            continue
        z = {name: to_jax(value) for name, value in point.items()}
        found, grad = _value_and_grad(program, z, constants)
        pairs.append((point, found, grad, expected, expected_grad))
    # the gradient vanishes at the mode: its size elsewhere tells what rounding may do
    largest = max((np.abs(g).max(initial=0) for *_, e in pairs for g in e.values()), default=0.0)
    for point, found, grad, expected, expected_grad in pairs:
        error = max(
            _relative_error([np.asarray(found)], [np.asarray(expected)], 1.0),
            *(
                _relative_error([np.asarray(grad[name])], [expected_grad[name]], largest)
                for name in expected_grad
            ),
        )
        if error <= PROGRAM_TOLERANCE[str(found.dtype)]:
            continue
        name_difference(recording, point)
        if error > GROSS:
            raise MismatchError(
                f"JAX gives the potential energy {float(found):.7g} where PyTorch gives "
                f"{float(expected):.7g}, or another gradient, though no single operation differs. "
                'Evaluate the model in PyTorch (engine="torch"), and report this.'
            )


def compare_values(
    recording: Recording, constants: Sequence[jax.Array], function: Any, points: Sequence[Tensors]
) -> None:
    """Raise `MismatchError` unless the outputs agree, at points where PyTorch's are finite."""
    for point in points:
        with torch.no_grad():
            expected = function(point)
        z = {name: to_jax(value) for name, value in point.items()}
        found = _evaluate(recording.program, z, tuple(constants))
        for name, value in expected.items():
            wanted = value.double().cpu().numpy()
            if not np.isfinite(wanted).all():
                continue
            error = _relative_error([np.asarray(found[name])], [wanted], 1.0)
            # whole numbers and truth values are equal, or not
            if error > PROGRAM_TOLERANCE.get(str(np.asarray(found[name]).dtype), 0.0):
                # a black box has no gradient to compare
                if not any(o.name == BLACK_BOX for o in recording.program.operations):
                    name_difference(recording, point)
                    if error <= GROSS:
                        continue
                raise MismatchError(
                    f"JAX and PyTorch give another '{name}' of the model (relative difference "
                    f'{error:.2g}). Evaluate the model in PyTorch (engine="torch"), and report '
                    "this."
                )


def torch_value_and_grad(potential_fn: Any, point: Tensors) -> tuple[float, dict[str, Any]]:
    """Potential energy and its gradient, in the real sites, by PyTorch."""
    inputs = {name: value.detach().clone() for name, value in point.items()}
    real = {name: x.requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
    try:
        value = potential_fn(inputs)
        grads = torch.autograd.grad(value, list(real.values()), allow_unused=True)
    except (RuntimeError, ValueError):
        # a factorisation that fails; JAX says NaN
        return np.nan, {}
    return value.item(), {
        name: np.zeros(x.shape) if g is None else g.detach().cpu().numpy()
        for (name, x), g in zip(real.items(), grads, strict=True)
    }


def name_difference(recording: Recording, point: Tensors) -> None:
    """Raise `MismatchError` for the first operation that differs in value or gradient."""
    program = recording.program
    values: list[Any] = [x.detach().to(torch_dtype(r.dtype)) for x, r in _inputs(program, point)]
    constants = recording.constants
    for operation in program.operations:
        fill = lambda ref: (values if isinstance(ref, Value) else constants)[ref.index]  # noqa: E731
        expected = _run_torch(operation, fill)
        tolerance = OPERATION_TOLERANCE.get(_dtype(operation), 2e-4)
        error, kind = _operation_error(operation, fill, expected, tolerance)
        if error > tolerance:
            raise MismatchError(
                f"Operation '{operation.name}' at {operation.where}: JAX and PyTorch give another "
                f"{kind} (relative difference {error:.2g}). Evaluate the model in PyTorch "
                '(engine="torch"), and report this.'
            )
        values.extend(expected)


def _operation_error(
    operation: Operation, fill: Any, expected: list[Any], tolerance: float
) -> tuple[float, str]:
    refs = _refs(operation)
    tensors = [fill(ref) for ref in refs]
    arrays = [to_jax(t) for t in tensors]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        table = dict(zip(refs, arrays, strict=True))
        values = {r.index: x for r, x in table.items() if isinstance(r, Value)}
        constants = {r.index: x for r, x in table.items() if isinstance(r, Constant)}
        return apply(operation, values, constants)  # type: ignore[arg-type]

    found = run(*arrays)
    numbers = [
        (np.asarray(a), t.detach().cpu().numpy())
        for a, t in zip(found, expected, strict=True)
        if t.is_floating_point() or not t.dtype.is_complex
    ]
    # results after the first are often scratch space of PyTorch's backward pass
    if operation.name.startswith(("_linalg", "linalg", "triangular_solve", "log_sigmoid")):
        numbers = numbers[:1]
    error = _relative_error([a for a, _ in numbers], [t for _, t in numbers])
    if error > tolerance:
        return error, "value"
    moving = [i for i, t in enumerate(tensors) if t.is_floating_point()]
    if operation.no_grad or not moving or not expected[0].is_floating_point():
        return error, "value"
    generator = np.random.default_rng(0)
    weight = generator.standard_normal(expected[0].shape)
    leaves = [tensors[i].detach().clone().requires_grad_() for i in moving]
    lookup = {refs[i]: leaf for i, leaf in zip(moving, leaves, strict=True)}
    out = _run_torch(operation, lambda ref: lookup.get(ref, fill(ref)))[0]
    if not out.requires_grad:
        grads: list[Any] = [None] * len(leaves)
    else:
        cotangent = torch.as_tensor(weight, dtype=out.dtype)
        grads = list(torch.autograd.grad(out, leaves, cotangent, allow_unused=True))

    def first(*moved: jax.Array) -> jax.Array:
        inputs = list(arrays)
        for i, x in zip(moving, moved, strict=True):
            inputs[i] = x
        return run(*inputs)[0]

    _, pull = jax.vjp(first, *[arrays[i] for i in moving])
    pulled = pull(jnp.asarray(weight, found[0].dtype))
    error = _relative_error(
        [np.asarray(g) for g in pulled],
        [np.zeros(x.shape) if g is None else g.numpy() for x, g in zip(leaves, grads, strict=True)],
    )
    return error, "gradient"


@partial(jax.jit, static_argnums=0)
def _evaluate(program: Program, z: Mapping[str, jax.Array], constants: tuple) -> Any:
    return program.evaluate(z, constants)


@partial(jax.jit, static_argnums=0)
def _value_and_grad(program: Program, z: Mapping[str, jax.Array], constants: tuple) -> Any:
    def potential(real: Mapping[str, jax.Array]) -> jax.Array:
        return program.evaluate({**z, **real}, constants)["potential_energy"]

    real = {name: x for name, x in z.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return jax.value_and_grad(potential)(real)


def _run_torch(operation: Operation, fill: Any) -> list[torch.Tensor]:
    args = substitute(operation.args, lambda ref: fill(ref))
    kwargs = substitute(operation.kwargs, lambda ref: fill(ref))
    if "dtype" in kwargs and isinstance(kwargs["dtype"], str):
        kwargs["dtype"] = getattr(torch, kwargs["dtype"])
    out = operation.function(*_lists(args), **kwargs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _lists(args: tuple) -> list[Any]:
    return [list(a) if isinstance(a, tuple) else a for a in args]


def _refs(operation: Operation) -> list[Any]:
    found: dict[Any, None] = {}
    substitute((operation.args, operation.kwargs), lambda ref: found.setdefault(ref))
    return list(found)


def _inputs(program: Program, point: Tensors) -> list[tuple[torch.Tensor, Result]]:
    return [(point[name], result) for name, result in program.inputs.items()]


def torch_dtype(dtype: Any) -> torch.dtype:
    """PyTorch's dtype of the same name."""
    return getattr(torch, str(jnp.dtype(dtype)))


def _dtype(operation: Operation) -> str:
    results = operation.results
    first = results if isinstance(results, Result) else results[0]
    return str(canonical(first.dtype))


def _relative_error(found: Sequence[Any], expected: Sequence[Any], least: float = 1e-6) -> float:
    """Largest difference over the largest number, at least `least`.

    Infinite where only one side is finite.
    """
    worst = 0.0
    scale = max([float(np.abs(e[np.isfinite(e)]).max(initial=0.0)) for e in expected], default=0.0)
    for a, b in zip(found, expected, strict=True):
        ok = np.isfinite(b)
        if not np.array_equal(ok, np.isfinite(a)):
            return float("inf")
        difference = np.abs(a[ok].astype(np.float64) - b[ok].astype(np.float64)).max(initial=0.0)
        worst = max(worst, float(difference) / max(scale, least))
    return worst
