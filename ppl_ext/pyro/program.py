"""A PyTorch function, recorded once, as a function of JAX arrays.

`record` runs the function on example inputs and writes down the ATen operations that depend on
an input, functionalised so that none has a side effect. All else is evaluated by PyTorch, once:
its tensors become constants of the program, which are arguments of `Program.evaluate`, so that
two recordings with other data of the same shapes are equal programs and share what XLA compiled
for them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pyro
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ppl_ext.errors import TracingError, UnsupportedModelError
from ppl_ext.pyro.operations import OPERATIONS, Result

aten = torch.ops.aten

# their result depends on shape and dtype of the input only
_SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

# they turn the value of a tensor into a Python number, or into the shape of another tensor
_VALUE_TO_PYTHON = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}

_GUARDS = {aten._local_scalar_dense.default, aten.is_nonzero.default}

# raised in PyTorch for a singular matrix; in JAX the result is NaN, which samplers reject
_CHECKS = {aten._linalg_check_errors.default, aten._assert_async.msg, aten._assert_async.default}

_INDEXING = {aten.index.Tensor, aten.index_put.default, aten._index_put_impl.default}

# arguments that say where and how PyTorch stores a result
_STORAGE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


@dataclass(frozen=True)
class Value:
    """The n-th value of a run: inputs first, then the results of the operations."""

    index: int


@dataclass(frozen=True)
class Constant:
    """The n-th constant."""

    index: int


@dataclass(frozen=True)
class Operation:
    """One call of an entry of the table; `results` is one `Result` or a tuple of them."""

    name: str
    args: tuple
    kwargs: dict[str, Any]
    results: Any
    no_grad: bool
    where: str
    function: Any  # PyTorch's own, for the self-check


@dataclass(frozen=True, eq=False)
class Program:
    """A sequence of operations; programs that compute the same are equal, whatever their data.

    `inputs` and `constants` have the shape and dtype of each, `outputs` says where each output
    is found.
    """

    inputs: dict[str, Result]
    constants: tuple[Result, ...]
    operations: tuple[Operation, ...]
    outputs: dict[str, Value | Constant]
    key: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def float_dtypes(self) -> set[str]:
        """Names of the floating and complex dtypes in use."""
        results = [*self.inputs.values(), *self.constants]
        for operation in self.operations:
            single = isinstance(operation.results, Result)
            results.extend([operation.results] if single else operation.results)
        dtypes = {jnp.dtype(result.dtype) for result in results}
        return {str(d) for d in dtypes if jnp.issubdtype(d, jnp.inexact)}

    def evaluate(
        self, inputs: Mapping[str, jax.Array], constants: Sequence[jax.Array]
    ) -> dict[str, jax.Array]:
        """Outputs by name."""
        values: list[Any] = [
            jnp.asarray(inputs[name], canonical(result.dtype))
            for name, result in self.inputs.items()
        ]
        for operation in self.operations:
            values.extend(apply(operation, values, constants))
        return {
            name: values[ref.index] if isinstance(ref, Value) else constants[ref.index]
            for name, ref in self.outputs.items()
        }

    def part(self, names: Sequence[str]) -> tuple[Program, tuple[int, ...]]:
        """The program of some outputs alone, and which of the constants it uses."""
        outputs = {name: self.outputs[name] for name in names}
        operations, outputs, used = _live(len(self.inputs), self.operations, outputs)
        constants = tuple(self.constants[i] for i in used)
        key = f"{self.key} {sorted(names)}"
        return Program(self.inputs, constants, operations, outputs, key), tuple(used)

    def depend_on(self, name: str) -> set[str]:
        """The outputs that depend on an input."""
        moving = {list(self.inputs).index(name)}
        count = len(self.inputs)
        for operation in self.operations:
            width = 1 if isinstance(operation.results, Result) else len(operation.results)
            used = {
                ref.index
                for ref in _refs((operation.args, operation.kwargs))
                if isinstance(ref, Value)
            }
            if used & moving:
                moving.update(range(count, count + width))
            count += width
        return {
            output
            for output, ref in self.outputs.items()
            if isinstance(ref, Value) and ref.index in moving
        }


class Recording(NamedTuple):
    """A program with the tensors of its constants, and the outcome of each guard met.

    A guard is a branch that Pyro or PyTorch themselves take on a latent value: a check of
    arguments, or of a division by zero.
    """

    program: Program
    constants: tuple[torch.Tensor, ...]
    guards: tuple[bool, ...]


def apply(operation: Operation, values: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
    """The results of one operation, always a list."""
    fill = lambda ref: (values if isinstance(ref, Value) else constants)[ref.index]  # noqa: E731
    args = substitute(operation.args, fill)
    kwargs = substitute(operation.kwargs, fill)
    single = isinstance(operation.results, Result)
    expected = (operation.results,) if single else operation.results
    expected = tuple(Result(r.shape, canonical(r.dtype)) for r in expected)
    found = OPERATIONS[operation.name](expected[0] if single else expected, *args, **kwargs)
    results = []
    for array, result in zip([found] if single else found, expected, strict=True):
        array = jnp.asarray(array)
        if array.shape != result.shape:
            raise TracingError(
                f"Operation '{operation.name}' at {operation.where}: JAX gives the shape "
                f"{array.shape}, PyTorch {result.shape}. Evaluate the model in PyTorch "
                '(engine="torch"), and report this.'
            )
        array = array.astype(result.dtype)
        results.append(jax.lax.stop_gradient(array) if operation.no_grad else array)
    return results


def substitute(tree: Any, fill: Callable[[Any], Any]) -> Any:
    """The arguments of an operation with each `Value` and `Constant` replaced."""
    if isinstance(tree, (Value, Constant)):
        return fill(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(substitute(leaf, fill) for leaf in tree)
    if isinstance(tree, Mapping):
        return {name: substitute(leaf, fill) for name, leaf in tree.items()}
    return tree


def canonical(dtype: Any) -> Any:
    """JAX's dtype: 64 bits where they are enabled."""
    return jax.dtypes.canonicalize_dtype(dtype)


def numpy_dtype(dtype: torch.dtype) -> Any:
    """NumPy's (or JAX's) dtype of the same name."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def record(
    function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    inputs: Mapping[str, torch.Tensor],
) -> Recording:
    """Record `function(inputs)`.

    Raises
    ------
    TracingError
        Naming all operations that have no entry in the table; or the line where the function
        draws random numbers, turns the value of an input into a Python number (control flow), or
        does what cannot be recorded.
    """
    try:
        return _record(function, inputs, in_place=False)
    except _WriteInPlace:
        return _record(function, inputs, in_place=True)


class _WriteInPlace(Exception):
    """The function writes into a tensor that depends on an input, or was read before."""


def _record(function: Callable, inputs: Mapping[str, torch.Tensor], in_place: bool) -> Recording:
    tensors = {name: value.detach().clone() for name, value in inputs.items()}
    names: list[str] = []

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        found = function(dict(zip(inputs, values, strict=True)))
        names.extend(found)
        return list(found.values())

    recorder = _Recorder(tensors, in_place)
    # a functionalised run turns every write in place into a new tensor; not the first choice,
    # because constants in it cannot be read by Python
    run = torch.func.functionalize(flat) if in_place else flat
    try:
        with (
            pyro.validation_enabled(False),
            # a distribution made while validation was on keeps it
            patch.object(torch.distributions.Distribution, "_validate_sample", _no_validation),
            recorder.refuse_custom_gradients(),
            recorder,
        ):
            outputs = run(*tensors.values())
    except _WriteInPlace as error:
        if not in_place:
            raise
        raise TracingError(
            f"The model writes into a tensor at {_line_of(error)} that shares its memory with "
            "others. Clone the tensor first, or build the result by torch.where or torch.stack."
        ) from error
    except (TracingError, UnsupportedModelError):
        raise
    except Exception as error:
        raise TracingError(
            f"The model cannot be traced: at {_line_of(error)} PyTorch raised "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        ) from error
    return recorder.finish(dict(zip(names, outputs, strict=True)))


def _no_validation(self: Any, value: Any) -> None:
    pass


class _Recorder(TorchDispatchMode):
    """Sees every ATen operation of a run and keeps those that depend on an input."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # or PyTorch would import its compiler, which takes seconds, at the first operation
        return False

    def __init__(self, inputs: Mapping[str, torch.Tensor], in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.guards: list[bool] = []
        self.inputs = {name: _result(x) for name, x in inputs.items()}
        # tensors are known by identity: each is held here, so that no id is used again
        self.held: list[torch.Tensor] = []
        self.values: dict[int, Value] = {}
        self.constants: dict[int, Constant] = {}
        self.constant_tensors: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.operations: list[Operation] = []
        self.count = 0
        for x in inputs.values():
            self.name(x)

    def name(self, tensor: torch.Tensor) -> None:
        # an operation that returns its input gives it a second name, the newer one
        self.held.append(tensor)
        self.values[id(tensor)] = Value(self.count)
        self.count += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise TracingError(
                f"The model draws random numbers at {_line()} ({function}), outside of "
                "pyro.sample. Draw them once, before the run, and pass them as an argument."
            )
        traced = any(
            id(leaf) in self.values
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        )
        if not traced or function in _SHAPE_ONLY or function in _CHECKS:
            return function(*args, **kwargs)
        if function in _GUARDS and args[0].dtype == torch.bool and _called_by_library():
            found = function(*args, **kwargs)
            self.guards.append(bool(found))
            return found
        if function in _VALUE_TO_PYTHON:
            raise TracingError(
                f"The model uses the value of a latent variable as a Python number or as a shape "
                f"at {_line()} ({function}): JAX would know it for one draw only. Use "
                "torch.where in place of `if`, and tensors in place of numbers."
            )
        written = None
        if function._schema.is_mutable:
            function, written = self.without_write(function, args), args[0]
        if function in _INDEXING:
            args = self.without_masks(function, args)
        name = str(function).removeprefix("aten.").removesuffix(".default")
        if name not in OPERATIONS:
            decomposed = self.decompose(function, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        if written is None:
            out = function(*args, **kwargs)
        else:
            out = written.copy_(function(*args, **kwargs))
        refs = tree_map(self.refer, (args, kwargs))
        single = isinstance(out, torch.Tensor)
        self.operations.append(
            Operation(
                name,
                tuple(refs[0]),
                {k: v for k, v in refs[1].items() if k not in _STORAGE},
                _result(out) if single else tuple(_result(x) for x in out),
                not torch.is_grad_enabled(),
                _line(),
                function,
            )
        )
        for x in [out] if single else out:
            self.name(x)
        return out

    @contextmanager
    def refuse_custom_gradients(self) -> Iterator[None]:
        """A torch.autograd.Function hides its backward pass from the record."""
        original = torch.autograd.Function.apply

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if any(id(x) in self.values or torch._is_functional_tensor(x) for x in tensors):
                raise TracingError(
                    f"The model uses a gradient of its own, the torch.autograd.Function "
                    f"'{cls.__name__}', at {_line()}. Write it with tensor operations."
                )
            return original.__func__(cls, *args, **kwargs)

        with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def refer(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.values.get(id(leaf)) or self.constant(leaf)
        if isinstance(leaf, torch.dtype):
            return str(numpy_dtype(leaf))
        return leaf

    def constant(self, tensor: torch.Tensor) -> Constant:
        if id(tensor) not in self.constants:
            self.held.append(tensor)
            self.constants[id(tensor)] = Constant(len(self.constant_tensors))
            self.constant_tensors.append(tensor)
            self.versions.append(tensor._version)
        return self.constants[id(tensor)]

    def decompose(self, function: Any, args: tuple, kwargs: dict) -> Any:
        from torch._decomp import core_aten_decompositions

        table = core_aten_decompositions()
        if function in table:
            with self:
                return table[function](*args, **kwargs)
        with self:
            return function.decompose(*args, **kwargs)

    def without_write(self, function: Any, args: tuple) -> Any:
        """The operation that gives as a new tensor what `function` writes into its first argument.

        Only for a traced tensor of which there is no view; else the run is functionalised.
        """
        written = args[0]
        storage = written.untyped_storage().data_ptr()
        alone = id(written) in self.values and not any(
            x is not written and x.untyped_storage().data_ptr() == storage for x in self.held
        )
        packet = getattr(aten, function._opname.removesuffix("_"), None)
        if not alone or not function._opname.endswith("_") or packet is None:
            raise _WriteInPlace
        return getattr(packet, function._overloadname)

    def without_masks(self, function: Any, args: tuple) -> tuple:
        """Arguments of an indexing operation with constant masks as integer indices."""
        x, indices, *rest = args
        new: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                new.append(index)
            elif id(index) not in self.values:
                new.extend(index.nonzero(as_tuple=True))
            elif function is aten.index_put.default and rest[0].numel() == 1 and len(indices) == 1:
                new.append(index)
            else:
                raise TracingError(
                    f"The model indexes by a mask that depends on a latent variable at {_line()}: "
                    "the number of selected elements would be known for one draw only. "
                    "Use torch.where."
                )
        return (x, new, *rest)

    def finish(self, outputs: Mapping[str, torch.Tensor]) -> Recording:
        for tensor, version in zip(self.constant_tensors, self.versions, strict=True):
            if tensor._version != version:
                if not self.in_place:
                    raise _WriteInPlace
                raise TracingError(
                    "The model changes a tensor in place that it did not create (shape "
                    f"{tuple(tensor.shape)}). Clone the tensor in the model first."
                )
        refs = {name: self.refer(tensor) for name, tensor in outputs.items()}
        operations, refs, used = _live(len(self.inputs), self.operations, refs)
        unknown: dict[str, str] = {}
        for operation in operations:
            if operation.name not in OPERATIONS:
                unknown.setdefault(operation.name, operation.where)
        if unknown:
            listed = ", ".join(f"'{name}' (at {where})" for name, where in unknown.items())
            raise TracingError(
                f"The model uses PyTorch operations that have no JAX counterpart here: {listed}."
            )
        constants = tuple(self.constant_tensors[i].detach() for i in used)
        program = Program(
            self.inputs, tuple(_result(c) for c in constants), operations, refs, key=""
        )
        content = repr(
            (
                program.inputs,
                program.constants,
                [(o.name, o.args, o.kwargs, o.results, o.no_grad) for o in operations],
                refs,
            )
        )
        object.__setattr__(program, "key", hashlib.sha256(content.encode()).hexdigest())
        return Recording(program, constants, tuple(self.guards))


def _live(
    num_inputs: int, operations: Sequence[Operation], outputs: dict[str, Any]
) -> tuple[tuple[Operation, ...], dict[str, Any], list[int]]:
    """Only what the outputs need, numbered anew; and which constants that uses."""
    count = num_inputs
    first = []
    for operation in operations:
        first.append(count)
        count += 1 if isinstance(operation.results, Result) else len(operation.results)
    needed = [ref.index for ref in outputs.values() if isinstance(ref, Value)]
    wanted = set(needed)
    kept = []
    for i in reversed(range(len(operations))):
        operation = operations[i]
        width = 1 if isinstance(operation.results, Result) else len(operation.results)
        if wanted.isdisjoint(range(first[i], first[i] + width)):
            continue
        kept.append(i)
        wanted.update(
            r.index for r in _refs((operation.args, operation.kwargs)) if isinstance(r, Value)
        )
    new_value = {i: Value(i) for i in range(num_inputs)}
    new_constant: dict[int, Constant] = {}

    def renumber(ref: Any) -> Any:
        if isinstance(ref, Value):
            return new_value[ref.index]
        return new_constant.setdefault(ref.index, Constant(len(new_constant)))

    live = []
    count = num_inputs
    for i in reversed(kept):
        o = operations[i]
        live.append(
            Operation(
                o.name,
                substitute(o.args, renumber),
                substitute(o.kwargs, renumber),
                o.results,
                o.no_grad,
                o.where,
                o.function,
            )
        )
        for j in range(1 if isinstance(o.results, Result) else len(o.results)):
            new_value[first[i] + j] = Value(count)
            count += 1
    renamed = {name: renumber(ref) for name, ref in outputs.items()}
    return tuple(live), renamed, list(new_constant)


def _refs(tree: Any) -> Iterator[Value | Constant]:
    found: list[Any] = []
    substitute(tree, lambda ref: found.append(ref))
    return iter(found)


def _result(tensor: torch.Tensor) -> Result:
    return Result(tuple(tensor.shape), numpy_dtype(tensor.dtype))


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy as a JAX array, on JAX's device of the same kind."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        dtype = canonical(numpy_dtype(tensor.dtype))
        if array.dtype.kind in "iu" and (array != array.astype(dtype)).any():
            raise OverflowError(
                f"The model holds an integer beyond {dtype}: {array[array != array.astype(dtype)]}."
                " Use float64 for its tensors, which gives 64-bit integers too."
            )
        return jnp.array(array, dtype)
    return jnp.array(jnp.from_dlpack(tensor.contiguous()))


def to_torch(array: Any, like: torch.Tensor) -> torch.Tensor:
    """A copy with dtype and device of `like`."""
    return torch.from_numpy(np.array(array)).to(like)


# --- lines of the model ----------------------------------------------------------------------

_LIBRARIES = tuple(
    os.path.dirname(str(module.__file__)) + os.sep
    for module in (torch, pyro, sys.modules["ppl_ext.pyro.operations"])
)


_DISTRIBUTIONS = (
    os.path.dirname(torch.distributions.__file__) + os.sep,
    os.path.dirname(pyro.__file__) + os.sep,
)


def _of_model(filename: str) -> bool:
    return not filename.startswith((*_LIBRARIES, "<frozen", "<string")) and (
        f"{os.sep}contextlib.py" not in filename and f"{os.sep}functools.py" not in filename
    )


def _called_by_library() -> bool:
    """Whether the code that asked for a value is Pyro's or of torch.distributions."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_LIBRARIES[2]):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_DISTRIBUTIONS)


def _line() -> str:
    """File and line of the innermost frame, below `_record`, that belongs to no library."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _record.__code__:
        if _of_model(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the densities of the sites"


def _line_of(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if _of_model(f.filename)]
    if not lines:
        return "the densities of the sites"
    return f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}"
