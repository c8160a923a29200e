"""Inference kernels and diagnostics for NumPyro and Pyro.

Kernels are in `ppl_ext.numpyro` and `ppl_ext.pyro`, reference problems in `ppl_ext.models`,
diagnostics in `ppl_ext.diagnostics`, runs on disk in `ppl_ext.checkpoint`,
chains over devices in `ppl_ext.devices`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppl_ext.black_box import BlackBox as BlackBox
    from ppl_ext.convert import to_arviz as to_arviz
    from ppl_ext.registry import available as available
    from ppl_ext.registry import explain as explain

__version__ = "0.1.0"
__all__ = ["BlackBox", "available", "explain", "to_arviz"]

# ArviZ and pandas are imported when first needed: `import ppl_ext` stays as cheap as NumPyro
_HOME = {
    "BlackBox": "ppl_ext.black_box",
    "available": "ppl_ext.registry",
    "explain": "ppl_ext.registry",
    "to_arviz": "ppl_ext.convert",
}
_SUBPACKAGES = ("checkpoint", "devices", "diagnostics", "models", "numpyro", "pyro")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _SUBPACKAGES:
        return import_module(f"ppl_ext.{name}")
    raise AttributeError(f"module 'ppl_ext' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
