"""Checks of the arguments that users give to kernels."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

# counts are int32 on the device
MAX_COUNT = 2**31 - 1


def argument_error(kernel: str, name: str, value: Any, needed: str) -> ValueError:
    """The error for a bad argument: what was found and what is needed."""
    return ValueError(f"{kernel}: `{name}` must be {needed}, got {value!r}.")


def check_positive(kernel: str, **values: Any) -> None:
    """Raise unless every value is a finite positive number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise argument_error(kernel, name, value, "a positive number")
        if not (0 < float(value) < float("inf")):
            raise argument_error(kernel, name, value, "a positive finite number")


def check_count(kernel: str, **values: Any) -> None:
    """Raise unless every value is an integer from 1 to 2**31 - 1."""
    for name, value in values.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or not 0 < int(value) <= MAX_COUNT:
            raise argument_error(kernel, name, value, f"an integer from 1 to {MAX_COUNT}")


def check_choice(kernel: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise argument_error(kernel, name, value, f"one of {', '.join(map(repr, choices))}")


def check_fraction(kernel: str, **values: Any) -> None:
    """Raise unless every value is a number between 0 and 1, both left out."""
    check_positive(kernel, **values)
    for name, value in values.items():
        if value >= 1:
            raise argument_error(kernel, name, value, "less than 1")


def check_flag(kernel: str, **values: Any) -> None:
    """Raise unless every value is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise argument_error(kernel, name, value, "True or False")
