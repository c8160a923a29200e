"""What `pyro.infer.MCMC` asks of a kernel, written once."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel

from ppl_ext.errors import InitializationError
from ppl_ext.pyro.potential import (
    ENGINES,
    CallbackPotential,
    Engine,
    TracedPotential,
    build_potential,
    precision_and_device,
)
from ppl_ext.pyro.runner import Algorithm, Chain, Functions, new_runner, runner
from ppl_ext.pyro.target import Posterior
from ppl_ext.target import PyTree, Target, potential_target

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Energy:
    """A potential energy, and a Gaussian prior or `None`; their data are a pair."""

    potential: TracedPotential | CallbackPotential

    @property
    def reusable(self) -> bool:
        return isinstance(self.potential, TracedPotential)

    def target(self, structure: dict[str, tuple[int, ...]]) -> Target:
        return Target(
            language="pyro",
            sites=(),
            plates=(),
            structure=structure,
            potential_energy=lambda z, data: self.potential(z, data[0]),
            constrain_sites=lambda z, data: z,
            unconstrain_sites=lambda z, data: z,
            gaussian_prior=lambda data: data[1],
        )


class Prepared(Protocol):
    """A model with data, ready to run chains of a kernel."""

    @property
    def transforms(self) -> dict[str, Any]:
        """Maps to the real line of the sites whose draws are unconstrained."""

    def starts(self, given: Tensors | None, num_chains: int) -> Tensors:
        """Values at which chains start, with a leading axis of chains: checked, or found."""

    def chain(
        self,
        starts: Tensors,
        num_warmup: int,
        num_chains: int | None,
        extra_fields: tuple[str, ...] = (),
    ) -> Chain:
        """One chain at `starts`; with a number, several, of which `starts` has a leading axis."""

    def draw(self, chain: Chain, **options: Any) -> tuple[Tensors, dict[str, Any]]:
        """A block of draws as tensors, and the statistics of each."""


class PreparedDensity:
    """A model or potential function with data: chains need its density alone."""

    def __init__(self, kernel: DensityKernel, args: tuple, kwargs: dict[str, Any]) -> None:
        self.kernel = kernel
        self.posterior: Posterior | None = None
        if kernel.model is not None:
            self.posterior = Posterior(
                kernel.model,
                args,
                kwargs,
                kernel.given_transforms,
                kernel.init_strategy,
            )
            kernel.check_target(self.posterior.target())

    @property
    def transforms(self) -> dict[str, Any]:
        """Maps of the sites to the real line."""
        return self.posterior.transforms if self.posterior else self.kernel.given_transforms or {}

    def starts(self, given: Tensors | None, num_chains: int) -> Tensors:
        """Unconstrained starts with a leading axis of chains: checked, or found."""
        if given is None:
            if self.posterior is None:
                raise ValueError(
                    "`initial_params` is needed with `potential_fn`: pass "
                    "MCMC(..., initial_params=...)."
                )
            return self.kernel.searched(self.posterior).initial_params(num_chains)
        if self.posterior is not None:
            _check_shapes(given, self.posterior.start)
        return {name: value.detach() for name, value in given.items()}

    def chain(
        self,
        starts: Tensors,
        num_warmup: int,
        num_chains: int | None,
        extra_fields: tuple[str, ...] = (),
    ) -> Chain:
        """One chain at `starts`; with a number, several, of which `starts` has a leading axis."""
        kernel, batched = self.kernel, num_chains is not None
        one = {name: value[0] for name, value in starts.items()} if batched else starts
        if not one:
            raise ValueError("The model has no continuous latent site to sample.")
        if self.posterior is None:
            kernel.check_target(_potential_only(one))
        functions, self.double, data = kernel.functions(self.posterior, one)
        self.like = one
        with precision_and_device(self.double, self.like):
            dtype = jax.numpy.result_type(float)
            z = {
                name: jax.numpy.array(x.cpu().numpy(), dtype if x.is_floating_point() else None)
                for name, x in starts.items()
            }
            make = runner if functions.reusable else new_runner
            compiled = make(
                kernel.algorithm,
                functions,
                tuple((name, tuple(x.shape)) for name, x in one.items()),
                num_warmup,
                batched,
                extra_fields,
            )
            state = compiled.init(random_keys(num_chains), z, data)
            _check_start(state)
            return Chain(compiled, state, data)

    def draw(self, chain: Chain, **options: Any) -> tuple[Tensors, dict[str, Any]]:
        """A block of draws as tensors, and the statistics of each."""
        with precision_and_device(self.double, self.like):
            fields = chain.draw(**options)
        z = fields.pop("z")
        return {n: torch.from_numpy(np.array(z[n])).to(x) for n, x in self.like.items()}, fields


class Kernel(MCMCKernel):
    """What `pyro.infer.MCMC` and `ppl_ext.pyro.MCMC` ask of a kernel.

    A subclass provides `prepare` and `check_target`. One object serves several chains, one after
    the other, and is pickled to the workers of parallel ones.
    """

    def __init__(
        self, model: Callable[..., Any] | None, init_strategy: Callable[..., Any] | None
    ) -> None:
        # MCMC reads `model` and `transforms`; the latter are there after `setup`
        self.model = model
        self.init_strategy = init_strategy
        self.transforms: dict[str, Any] | None = None
        self._initial_params: Tensors | None = None
        self._prepared: Prepared | None = None
        self._chain: Chain | None = None
        self._draws: Tensors = {}
        self._fields: dict[str, np.ndarray] = {}
        self._kept: list[dict[str, np.ndarray]] = []
        self._warmup_steps = self._t = self._position = self._size = 0

    # --- the algorithm -----------------------------------------------------------------------

    @abstractmethod
    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> Prepared:
        """The kernel on its model with these data."""

    def check_target(self, target: Target) -> None:
        """Raise `UnsupportedModelError` for a model that the kernel cannot take."""
        target.check_continuous(type(self).__name__)

    def progress(self, fields: dict[str, np.ndarray]) -> dict[str, str]:
        """What a progress bar shows of the statistics of one draw, or their means over chains."""
        return {
            "step size": f"{np.mean(fields['step_size']):.2e}",
            "acc. prob": f"{np.mean(fields['mean_accept_prob']):.3f}",
        }

    def run_facts(self, state: Any) -> dict[str, Any]:
        """Facts of a run for the attributes of `sample_stats`: numbers, text, flat arrays."""
        return {}

    # --- what MCMC calls ---------------------------------------------------------------------

    @property
    def initial_params(self) -> Tensors | None:
        """Unconstrained values at which the next chain starts."""
        return self._initial_params

    @initial_params.setter
    def initial_params(self, params: Tensors | None) -> None:
        self._initial_params = params

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Look at the model and find a start; `sample` records and compiles.

        MCMC also calls this, with 0 steps, only to learn the transforms.
        """
        self._reset()
        self._warmup_steps = warmup_steps
        self._prepared = self.prepare(args, kwargs)
        self.transforms = self._prepared.transforms
        given = self._initial_params
        batch = None if given is None else {n: torch.as_tensor(x)[None] for n, x in given.items()}
        starts = self._prepared.starts(batch, 1)
        self._initial_params = {name: x[0] for name, x in starts.items()}

    def sample(self, params: Tensors) -> Tensors:
        """The next draw; blocks of draws are made ahead."""
        if self._prepared is None:
            raise RuntimeError("`setup` must be called before `sample`.")
        if self._position == self._size:
            self._next_block()
        i = self._position
        self._position += 1
        self._t += 1
        return {name: values[i] for name, values in self._draws.items()}

    def _next_block(self) -> None:
        assert self._prepared is not None and self._initial_params is not None
        if self._chain is None:
            self._chain = self._prepared.chain(self._initial_params, self._warmup_steps, None)
        left = self._warmup_steps - self._t
        self._keep_statistics()
        self._draws, self._fields = self._prepared.draw(
            self._chain, limit=left if left > 0 else None
        )
        self._position, self._size = 0, len(self._fields["accept_prob"])

    def _keep_statistics(self) -> None:
        # a block never straddles the end of warm-up
        if self._position and self._t > self._warmup_steps:
            self._kept.append(jax.tree.map(lambda v: v[: self._position], self._fields))

    def logging(self) -> OrderedDict[str, str]:
        """The last draw's statistics, for the progress bar."""
        if not self._position:
            return OrderedDict()
        last = jax.tree.map(lambda values: values[self._position - 1], self._fields)
        return OrderedDict(self.progress(last))

    def diagnostics(self) -> dict[str, Any]:
        """Divergent draws, acceptance rate and statistics of all draws after warm-up."""
        self._keep_statistics()
        self._position = self._size = 0
        # warm-up froze what the facts tell, so that the end of a block tells it too
        facts = {} if self._chain is None else self.run_facts(self._chain.state)
        return summarise(_concatenate(self._kept), facts)

    def cleanup(self) -> None:
        """Make ready for the next chain."""
        self._reset()
        self._initial_params = None

    def _reset(self) -> None:
        self._prepared = self._chain = None
        self._warmup_steps = self._t = self._position = self._size = 0
        self._draws, self._fields, self._kept = {}, {}, []

    def __getstate__(self) -> dict[str, Any]:
        # workers set up their own chain
        state = {**self.__dict__, "_prepared": None, "_chain": None}
        return {**state, "_draws": {}, "_fields": {}, "_position": 0, "_size": 0}


class DensityKernel(Kernel):
    """Adaptor between an algorithm on a `Target` and Pyro's drivers.

    A subclass provides `algorithm`.
    """

    init_strategy: Callable[..., Any]

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Callable[[Tensors], torch.Tensor] | None = None,
        *,
        transforms: Mapping[str, Any] | None = None,
        init_strategy: Callable[..., Any] = init_to_uniform,
        engine: Engine = "auto",
    ) -> None:
        if (model is None) == (potential_fn is None):
            raise ValueError("Give exactly one of `model` and `potential_fn`.")
        for name, value in (("model", model), ("potential_fn", potential_fn)):
            if value is not None and not callable(value):
                raise TypeError(f"`{name}` must be callable, got {type(value).__name__}.")
        if engine not in ENGINES:
            raise ValueError(
                f"{type(self).__name__}: `engine` must be one of "
                f"{', '.join(map(repr, ENGINES))}, got {engine!r}."
            )
        super().__init__(model, init_strategy)
        self.potential_fn = potential_fn
        self.given_transforms = dict(transforms) if transforms is not None else None
        self.transforms = self.given_transforms
        self.engine = engine
        self.checked: set[str] = set()

    @property
    @abstractmethod
    def algorithm(self) -> Algorithm:
        """The algorithm with its settings."""

    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> PreparedDensity:
        return PreparedDensity(self, args, kwargs)

    def gaussian_prior(self, posterior: Posterior | None, start: Tensors) -> Any:
        """Means and precisions by site of a prior that the algorithm treats apart, or `None`."""
        return None

    def functions(
        self, posterior: Posterior | None, start: Tensors
    ) -> tuple[Functions, bool, PyTree]:
        """What the chains evaluate, whether in double precision, and its data."""
        potential_fn = self.potential_fn if posterior is None else posterior.potential_fn
        assert potential_fn is not None
        potential, constants = build_potential(potential_fn, start, self.engine, self.checked)
        with precision_and_device(potential.double, start):
            dtype = jax.numpy.result_type(float)
            prior = jax.tree.map(
                lambda x: jax.numpy.asarray(x, dtype), self.gaussian_prior(posterior, start)
            )
        return Energy(potential), potential.double, (constants, prior)

    def searched(self, posterior: Posterior) -> Posterior:
        """The posterior in which a start is searched."""
        return posterior


def summarise(statistics: dict[str, np.ndarray], facts: dict[str, Any]) -> dict[str, Any]:
    """The dict that a kernel's `diagnostics` returns, of the statistics of one chain."""
    diverging = statistics.get("diverging", np.zeros(0, bool))
    accept = statistics.get("accept_prob", np.zeros(0))
    return {
        "divergences": np.flatnonzero(diverging).tolist(),
        "acceptance rate": float(accept.mean()) if accept.size else float("nan"),
        "sample_stats": {k: v for k, v in statistics.items() if k != "mean_accept_prob"},
        "run_facts": facts,
    }


def _concatenate(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if not blocks:
        return {}
    return jax.tree.map(lambda *parts: np.concatenate(parts), *blocks)


def random_keys(num_chains: int | None) -> jax.Array:
    """One key, or several, from PyTorch's random state."""
    keys = jax.random.split(jax.random.key(int(torch.randint(2**31, ()))), num_chains or 1)
    return keys[0] if num_chains is None else keys


def _check_start(state: Any) -> None:
    energy = np.asarray(state.potential_energy)
    grad = getattr(state, "z_grad", {})
    grads = jax.tree.map(lambda g: bool(np.isfinite(np.asarray(g)).all()), grad)
    bad = [name for name, ok in grads.items() if not ok]
    if not np.isfinite(energy).all() or bad:
        raise InitializationError(
            f"The potential energy ({energy}) or its gradient (sites {bad}) is not finite at "
            "`initial_params`. Give another starting point."
        )


def _check_shapes(given: Mapping[str, Any], start: Tensors) -> None:
    missing = [name for name in start if name not in given]
    unknown = [name for name in given if name not in start]
    if missing or unknown:
        raise ValueError(
            f"`initial_params` lacks the latent sites {missing} and has the unknown sites "
            f"{unknown}; the latent sites are {list(start)}."
        )
    for name, value in start.items():
        if given[name].shape[1:] != value.shape:
            raise ValueError(
                f"`initial_params['{name}']` has shape {tuple(given[name].shape[1:])}, but the "
                f"unconstrained value of site '{name}' has shape {tuple(value.shape)}."
            )


def _potential_only(z: Tensors) -> Target:
    shapes = {name: np.zeros(tuple(value.shape)) for name, value in z.items()}
    return potential_target(lambda z: jax.numpy.zeros(()), shapes)
