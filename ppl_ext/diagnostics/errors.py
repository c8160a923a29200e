"""What the diagnostics refuse."""

from __future__ import annotations


class MissingScoresError(ValueError):
    """There are draws, but not the gradients of their log density."""


class TooFewDrawsError(ValueError):
    """The draws carry too little information for the diagnostic that was asked for."""
