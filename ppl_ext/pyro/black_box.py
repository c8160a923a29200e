"""Operators that PyTorch cannot see into: `ppl_ext.BlackBox` in Pyro models."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from ppl_ext import black_box
from ppl_ext.pyro.operations import OPERATIONS, Result

_count = count()
# an operation of a recorded program has no objects among its arguments, only their numbers
_known: WeakValueDictionary[int, BlackBox] = WeakValueDictionary()

# its name in a recorded program
NAME = "ppl_ext.black_box"


class BlackBox(black_box.BlackBox):
    """A Python function as an operator in a Pyro model, evaluated in batches by several processes.

    `ppl_ext.BlackBox` on tensors: `function` takes and returns NumPy arrays.

    Parameters
    ----------
    function, shape, processes
        As for `ppl_ext.BlackBox`.

    Raises
    ------
    TypeError
        When `function` is not callable.
    ValueError
        For a bad `processes` or `shape`; at a call, when the function returns another shape.
    RuntimeError
        When a gradient through it is asked for: it has none.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from ppl_ext.pyro import BlackBox
    >>> operator = BlackBox(np.cumsum, shape=(3,), processes=0)
    >>> operator(torch.ones(3))
    tensor([1., 2., 3.])
    """

    def __init__(self, function: Any, shape: tuple[int, ...], processes: int = 0) -> None:
        super().__init__(function, shape, processes)
        self._register()

    def __call__(self, x: Any) -> Any:
        """The function's value at a tensor `x`, or at an array of JAX."""
        if isinstance(x, torch.Tensor):
            return _black_box(x, self._number, list(self.shape))
        return super().__call__(x)

    def _register(self) -> None:
        self._number = next(_count)
        _known[self._number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        # in another process the numbers are others
        self.__dict__.update(state)
        self._register()


@torch.library.custom_op(NAME.replace(".", "::"), mutates_args=())
def _black_box(x: torch.Tensor, number: int, shape: list[int]) -> torch.Tensor:
    value = _known[number].evaluate(x.detach().cpu().numpy()[None])[0]
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return torch.from_numpy(np.array(value)).to(x.device, dtype)


@_black_box.register_autograd
def _no_derivative(context: Any, gradient: torch.Tensor) -> Any:
    raise RuntimeError(
        "A BlackBox has no derivative. Use it as the exact operator of ProximalIMH only; the cheap "
        "one must be written in PyTorch."
    )


def _operation(out: Result, x: Any, number: int, shape: list[int]) -> Any:
    return _known[number](x)


OPERATIONS[NAME] = _operation
