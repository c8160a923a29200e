"""What `numpyro.infer.MCMC`, `numpyro.infer.Gibbs` and ArviZ ask of a kernel, written once."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import identity, is_prng_key, not_jax_tracer

from ppl_ext.errors import InitializationError
from ppl_ext.numpyro.starting_point import (
    check_density,
    check_gibbs_supports,
    check_init_params,
    check_observations,
    describe_failure,
)
from ppl_ext.numpyro.target import target as build_target
from ppl_ext.target import Array, PyTree, Target, potential_target


class Kernel(MCMCKernel):
    """Adaptor between an algorithm on a `Target` and NumPyro's drivers.

    A subclass implements `_init` (or, for all chains at once, `_init_chains`), `_step` and
    `_refresh` for one chain. Data reach them through the
    target, which is bound anew at each call, so that no data set is remembered.
    """

    sample_field = "z"

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Callable[[PyTree], Array] | None = None,
        *,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        if (model is None) == (potential_fn is None):
            raise ValueError("Give exactly one of `model` and `potential_fn`.")
        for name, value in (("model", model), ("potential_fn", potential_fn)):
            if value is not None and not callable(value):
                raise TypeError(f"`{name}` must be callable, got {type(value).__name__}.")
        if not callable(init_strategy):
            raise TypeError(
                f"`init_strategy` must be callable, got {type(init_strategy).__name__}; "
                "see numpyro.infer.init_to_uniform."
            )
        self._model = model
        self._potential_fn = potential_fn
        self._init_strategy = init_strategy
        self._num_warmup = 0
        self._target: Target | None = None
        self._sample_fn: Callable[..., Any] | None = None

    # --- the algorithm -----------------------------------------------------------------------

    def _init(self, rng_key: Array, z: PyTree, target: Any) -> Any:
        """State of one chain at the unconstrained sites `z`."""
        raise NotImplementedError("a kernel has `_init` or its own `_init_chains`")

    @abstractmethod
    def _step(self, state: Any, target: Any) -> Any:
        """Next state of one chain."""

    @abstractmethod
    def _refresh(self, state: Any, target: Any) -> Any:
        """The same point of one chain with everything cached about the data computed again."""

    def _check_target(self, target: Target) -> None:
        """Raise `UnsupportedModelError` for a model that the kernel cannot take."""
        target.check_continuous(type(self).__name__)

    # --- what MCMC calls ---------------------------------------------------------------------

    @property
    def model(self) -> Callable[..., Any] | None:
        """The model, or `None` when the kernel was given a potential energy function."""
        return self._model

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: PyTree | None,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        model_kwargs = model_kwargs or {}
        self._num_warmup = num_warmup
        batched = not is_prng_key(rng_key)
        if self._model is None:
            if init_params is None:
                raise ValueError(
                    "`init_params` is needed with `potential_fn`: pass "
                    "`mcmc.run(key, init_params=...)`."
                )
            one = jax.tree.map(lambda leaf: leaf[0], init_params) if batched else init_params
            assert self._potential_fn is not None
            self._target = potential_target(self._potential_fn, one)
            z = init_params
        else:
            self._target = build_target(self._model, *model_args, **model_kwargs)
            self._check_target(self._target)
            check_observations(self._model, model_args, model_kwargs)
            split = jax.vmap(jax.random.split)(rng_key) if batched else jax.random.split(rng_key)
            rng_key, key_start = (split[:, 0], split[:, 1]) if batched else split
            z = self._start(key_start, init_params, batched, model_args, model_kwargs)
        bound = self._bind(self._target, model_args, model_kwargs)
        state = self._compiled_init(rng_key, z, bound, batched)
        if all(map(not_jax_tracer, jax.tree.leaves(state))):
            self._check_start(state, model_args, model_kwargs)
        # MCMC calls `init` again before every run unless it finds this attribute set
        self._sample_fn = self._sample
        return state

    def _bind(self, target: Target, model_args: tuple, model_kwargs: dict[str, Any]) -> Any:
        """What `_init`, `_step` and `_refresh` are given: the target with its data."""
        return target.bind(*model_args, **model_kwargs)

    def _compiled_init(self, rng_key: Array, z: PyTree, bound: Any, batched: bool) -> Any:
        # one program compiles much faster than its operations one by one
        return jax.jit(lambda key, z: self._init_chains(key, z, bound, batched))(rng_key, z)

    def _init_chains(self, rng_key: Array, z: PyTree, bound: Any, batched: bool) -> Any:
        start = lambda key, z: self._init(key, z, bound)  # noqa: E731
        return (jax.vmap(start) if batched else start)(rng_key, z)

    def _check_start(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any]) -> None:
        """Raise `InitializationError` when the start of a chain has no finite density."""
        assert self._target is not None
        check_density(state, self._model, self._target, model_args, model_kwargs)

    def _start(
        self,
        rng_key: Array,
        init_params: PyTree | None,
        batched: bool,
        model_args: tuple,
        model_kwargs: dict[str, Any],
    ) -> PyTree:
        """Unconstrained starting values, given or found by the init strategy."""
        assert self._target is not None
        if init_params is not None:
            if GIBBS_SITES_KWARG in model_kwargs:
                # Gibbs hands constrained values to the blocks that are not HMC
                z = self._target.unconstrain_sites(init_params, *model_args, **model_kwargs)
                check_gibbs_supports(z, self._target, model_args, model_kwargs)
                return z
            return check_init_params(init_params, self._target, rng_key.shape[:1] * batched)
        try:
            info = initialize_model(
                rng_key,
                self._model,
                init_strategy=self._init_strategy,
                dynamic_args=True,
                model_args=model_args,
                model_kwargs=model_kwargs,
            )
        except RuntimeError as error:
            if "valid initial parameters" not in str(error):
                raise
            key = rng_key[0] if batched else rng_key
            raise InitializationError(
                describe_failure(key, self._model, self._init_strategy, model_args, model_kwargs)
            ) from error
        return info.param_info.z

    def sample(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        if self._sample_fn is None:
            raise RuntimeError("`init` must be called before `sample`.")
        return self._sample_fn(state, model_args, model_kwargs)

    def _sample(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        return self._per_chain(self._step, state, model_args, model_kwargs)

    def _per_chain(
        self,
        function: Callable[[Any, Any], Any],
        state: Any,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        model_kwargs = model_kwargs or {}
        target = self._current_target(state, model_args, model_kwargs)
        bound = self._bind(target, model_args, model_kwargs)
        one = lambda state: function(state, bound)  # noqa: E731
        return one(state) if is_prng_key(state.rng_key) else jax.vmap(one)(state)

    def _current_target(self, state: Any, model_args: tuple, model_kwargs: dict) -> Target:
        """The target, after a check that these data leave the latent sites as they were.

        Runs when a program is traced, once per data shape.
        """
        assert self._target is not None
        if self._model is None:
            return self._target
        now = build_target(self._model, *model_args, **model_kwargs)
        if now.structure != self._target.structure:
            changed = {
                name
                for name in {*now.structure, *self._target.structure}
                if now.structure.get(name) != self._target.structure.get(name)
            }
            raise ValueError(
                f"With these data the latent sites {sorted(changed)} have other shapes than in "
                "the run that is continued. Start a new MCMC object (or call `warmup` again on "
                "a new kernel)."
            )
        return self._target

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        if self._target is None:
            return identity
        return self._target.bind(*model_args, **(model_kwargs or {})).constrain_sites

    # --- what `to_arviz` calls -----------------------------------------------------------------

    def run_facts(self, state: Any) -> dict[str, Any]:
        """Facts of a run for the attributes of `sample_stats`: numbers, text, flat arrays."""
        return {}

    # --- what Gibbs calls --------------------------------------------------------------------

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        return self._per_chain(self._refresh, state, model_args, model_kwargs)

    def wrap_model(self, wrapper: Callable[[Callable], Callable]) -> Kernel:
        if self._model is None:
            raise ValueError("A kernel built from `potential_fn` has no model to wrap.")
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._reset()
        return kernel

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        return self.postprocess_fn(model_args, model_kwargs)

    def _reset(self) -> None:
        self._target = None
        self._sample_fn = None

    def __getstate__(self) -> dict[str, Any]:
        # closures are rebuilt by the next `init`
        return {**self.__dict__, "_target": None, "_sample_fn": None}
