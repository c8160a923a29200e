"""Exceptions of ppl_ext. Each message names the argument or site, what was found and what to do."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The kernel cannot sample this model. The message names the site and another kernel."""


class InitializationError(RuntimeError):
    """No starting point with a finite log density and gradient. The message names the site."""


class MissingScoresError(ValueError):
    """The data hold no scores of the unconstrained log density."""


class TooFewDrawsError(ValueError):
    """Too few effective draws for the requested test."""


class TracingError(UnsupportedModelError):
    """A Pyro model that JAX cannot evaluate. The message names the operations or the line."""


class MismatchError(RuntimeError):
    """JAX and PyTorch disagree on a Pyro model. The message names the first operation that does."""


class CheckpointError(RuntimeError):
    """A run on disk cannot be taken up, read or written. The message says why and what to do."""
