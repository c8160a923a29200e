"""Checks of the arguments that users give to kernels."""

from __future__ import annotations

from typing import Any


def argument_error(kernel: str, name: str, value: Any, needed: str) -> ValueError:
    """The error for a bad argument: what was found and what is needed."""
    return ValueError(f"{kernel}: `{name}` must be {needed}, got {value!r}.")


def check_positive(kernel: str, **values: Any) -> None:
    """Raise unless every value is `None` or a finite positive number."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise argument_error(kernel, name, value, "a positive number or None")
        if not (0 < value < float("inf")):
            raise argument_error(kernel, name, value, "a positive finite number or None")


def check_choice(kernel: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise argument_error(kernel, name, value, f"one of {', '.join(map(repr, choices))}")
