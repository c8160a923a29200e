"""What kernels share that read a model's distributions: they run NumPyro's on a translation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from numpyro.infer import init_to_uniform as np_init_to_uniform
from numpyro.infer import init_to_value as np_init_to_value
from pyro.infer.autoguide.initialization import init_to_uniform

from ppl_ext.numpyro.kernel import Kernel as NumPyroKernel
from ppl_ext.pyro.kernel import Kernel, Tensors, random_keys
from ppl_ext.pyro.potential import precision_and_device
from ppl_ext.pyro.program import to_jax
from ppl_ext.pyro.runner import Chain, Runner, Transition
from ppl_ext.pyro.target import Posterior
from ppl_ext.pyro.translation import Translation, whole


class TranslatedKernel(Kernel):
    """Adaptor between a kernel of `ppl_ext.numpyro` and Pyro's drivers.

    A subclass provides `kernel` and `check_target`.
    """

    def __init__(
        self, model: Callable[..., Any], init_strategy: Callable[..., Any] | None = None
    ) -> None:
        name = type(self).__name__
        if not callable(model):
            raise TypeError(f"`model` must be callable, got {type(model).__name__}.")
        if init_strategy is not None and not callable(init_strategy):
            raise TypeError(
                f"{name}: `init_strategy` must be callable, got {type(init_strategy).__name__}; "
                "see pyro.infer.autoguide.init_to_uniform."
            )
        super().__init__(model, init_strategy)
        self._compiled: tuple[Any, Runner, NumPyroKernel] | None = None
        # bad arguments show now
        self.kernel(_no_model, np_init_to_uniform)

    @abstractmethod
    def kernel(
        self, model: Callable[..., Any], init_strategy: Callable[..., Any] | None
    ) -> NumPyroKernel:
        """The kernel of `ppl_ext.numpyro` for the translated model."""

    def data_plate(self, target: Any) -> str | None:
        """Plate from which the kernel draws data, or `None`."""
        return None

    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> PreparedTranslation:
        return PreparedTranslation(self, args, kwargs)

    @property
    def initial_params(self) -> Tensors | None:
        """Values of the sites where the next chain starts; it is started by this."""
        if self._prepared is None:
            return None
        if self._chain is None:
            self._chain = self._prepared.chain({}, self._warmup_steps, None)
        assert isinstance(self._prepared, PreparedTranslation)
        return self._prepared.values(self._chain)

    @initial_params.setter
    def initial_params(self, params: Tensors | None) -> None:
        if params is not None:
            raise _no_initial_params(self)

    def progress(self, fields: dict[str, np.ndarray]) -> dict[str, str]:
        shown = {"acc. prob": f"{np.mean(fields['accept_prob']):.3f}"}
        if "step_size" in fields:
            shown = {"step size": f"{np.mean(fields['step_size']):.2e}", **shown}
        return shown

    def run_facts(self, state: Any) -> dict[str, Any]:
        return {} if self._compiled is None else self._compiled[2].run_facts(state)

    def model_of_all_data(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The model with all data in place of a minibatch."""
        assert self.model is not None
        plate = self.data_plate(Posterior(self.model, args, kwargs).target())
        return self.model if plate is None else whole(self.model, plate)

    def translated(self, *args: Any, **kwargs: Any) -> Translation:
        """The model with these data as a NumPyro model."""
        assert self.model is not None
        target = Posterior(self.model, args, kwargs).target()
        return Translation(self.model, args, kwargs, self.data_plate(target))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_compiled": None}


class PreparedTranslation:
    """A translated model with its data, ready to run chains of a kernel."""

    def __init__(self, kernel: TranslatedKernel, args: tuple, kwargs: dict[str, Any]) -> None:
        assert kernel.model is not None
        self.kernel = kernel
        self.transforms: dict[str, Any] = {}
        strategy = kernel.init_strategy
        posterior = Posterior(kernel.model, args, kwargs, None, strategy or init_to_uniform)
        target = posterior.target()
        kernel.check_target(target)
        self.translation = Translation(kernel.model, args, kwargs, kernel.data_plate(target))
        # by the strategy of the user, if there is one
        self._start = {} if strategy is None else posterior.values

    def starts(self, given: Tensors | None, num_chains: int) -> Tensors:
        """Nothing: chains start by themselves."""
        if given is not None:
            raise _no_initial_params(self.kernel)
        return {}

    def chain(
        self,
        starts: Tensors,
        num_warmup: int,
        num_chains: int | None,
        extra_fields: tuple[str, ...] = (),
    ) -> Chain:
        """One chain; with a number, several."""
        model, data = self.translation.model, self.translation.constants
        with precision_and_device(self.translation.double, self.translation.like):
            strategy = None
            if self._start:
                start = {name: to_jax(value) for name, value in self._start.items()}
                strategy = np_init_to_value(values=start)
            kernel = self.kernel.kernel(model, strategy)
            state = kernel.init(random_keys(num_chains), num_warmup, None, (data,), {})
            settings = getattr(kernel, "settings", None)
            key = (self.translation.key, num_warmup, num_chains, extra_fields, repr(settings))
            compiled = self.kernel._compiled
            if compiled is None or compiled[0] != key:
                runner = Runner(_transition(kernel, num_chains), False, extra_fields)
                compiled = self.kernel._compiled = key, runner, kernel
            return Chain(compiled[1], state, data)

    def draw(self, chain: Chain, **options: Any) -> tuple[Tensors, dict[str, Any]]:
        """A block of draws of the sites, and the statistics of each."""
        with precision_and_device(self.translation.double, self.translation.like):
            fields = chain.draw(**options)
        return self._tensors(fields.pop("z")), fields

    def values(self, chain: Chain) -> Tensors:
        """Values of the sites at the state of a chain."""
        with precision_and_device(self.translation.double, self.translation.like):
            return self._tensors(chain.runner.collect(chain.state, chain.data)["z"])

    def _tensors(self, z: dict[str, Any]) -> Tensors:
        device = next((x.device for x in self.translation.like.values()), torch.device("cpu"))
        return {name: torch.from_numpy(np.array(value)).to(device) for name, value in z.items()}


def _transition(kernel: NumPyroKernel, num_chains: int | None) -> Transition:
    """A NumPyro kernel, which maps over chains by itself."""
    names = [name for name in kernel.default_fields if name != "z"]

    def fields(state: Any, data: Any) -> dict[str, Any]:
        constrain = kernel.postprocess_fn((data,), {})
        z = (constrain if num_chains is None else jax.vmap(constrain))(state.z)
        return {"z": z, **{name: getattr(state, name) for name in names}}

    return Transition(
        lambda key, z, data: kernel.init(key, 0, z, (data,), {}),
        lambda state, data: kernel.sample(state, (data,), {}),
        fields,
    )


def _no_model(*args: Any) -> None:
    """Stands for a model while arguments are checked."""


def _no_initial_params(kernel: Kernel) -> ValueError:
    name = type(kernel).__name__
    return ValueError(
        f"{name} takes no `initial_params`: give a start by `{name}(model, init_strategy=...)`, "
        "such as pyro.infer.autoguide.init_to_value."
    )
