"""What the minibatch kernels share: the plate from which they draw data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro.minibatch import data_plate, refusal
from ppl_ext.pyro.translated import TranslatedKernel
from ppl_ext.target import Target


class MinibatchKernel(TranslatedKernel):
    """Kernel that draws data from a plate of the model."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        plate: str | None,
        init_strategy: Callable[..., Any] | None,
        **options: Any,
    ) -> None:
        self._plate, self._options = plate, options
        super().__init__(model, init_strategy)

    def check_target(self, target: Target) -> None:
        reason = refusal(type(self).__name__, target, self._plate)
        if reason is not None:
            raise UnsupportedModelError(reason)

    def data_plate(self, target: Target) -> str:
        return data_plate(type(self).__name__, target, self._plate)
