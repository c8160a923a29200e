"""What the minibatch kernels share: the plate of data, the refusals, the problem of a model."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_uniform

from ppl_ext.arguments import check_flag
from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.kernels.minibatch import Problem
from ppl_ext.numpyro.bounds import derivative_bounds, empirical_bounds, links
from ppl_ext.numpyro.kernel import Kernel
from ppl_ext.numpyro.starting_point import describe_failure
from ppl_ext.numpyro.target import as_arrays, at_indices
from ppl_ext.numpyro.target import target as build_target
from ppl_ext.target import Array, PyTree, Target

Bounds = Callable[[Array, Array, Array], Array]


def data_plate(kernel: str, target: Target, plate: str | None) -> str:
    """Name of the plate from which data are drawn: the one given, subsampled, or the only one.

    Raises
    ------
    UnsupportedModelError
        When there is none or more than one, a latent site lies inside, or another is subsampled.
    """
    reason, name = _find_plate(kernel, target, plate)
    if reason is not None:
        raise UnsupportedModelError(reason)
    return name


def refusal(kernel: str, target: Target, plate: str | None = None) -> str | None:
    """Why a minibatch kernel cannot take this model, as far as static facts tell."""
    reason = target.refusal_of_continuous_kernel(kernel, minibatch=True)
    return reason or _find_plate(kernel, target, plate)[0]


def _find_plate(kernel: str, target: Target, plate: str | None) -> tuple[str | None, str]:
    if target.language == "potential_fn":
        return f"{kernel} needs a model, whose data it can draw one by one.", ""
    inside: dict[str, list[str]] = {p.name: [] for p in target.plates}
    latent = {name: list[str]() for name in inside}
    for site in target.sites:
        for name in site.plates:
            if site.kind == "observed":
                inside[name].append(site.name)
            if site.kind == "latent":
                latent[name].append(site.name)
    names = {p.name for p in target.plates}
    if plate is not None and plate not in names:
        return f"{kernel}: the model has no plate '{plate}'; it has {sorted(names) or 'none'}.", ""
    subsampled = [p.name for p in target.plates if p.subsampled]
    if len(subsampled) > 1:
        return f"{kernel} draws from one plate, but {subsampled} are subsampled.", ""
    candidates = subsampled or [n for n in inside if inside[n] and not latent[n]]
    if plate is None and len(candidates) > 1:
        return f"{kernel}: several plates hold data, {candidates}. Name one as `plate`.", ""
    if plate is None and not candidates:
        held = [n for n in inside if inside[n] and latent[n]]
        if held:
            plate = held[0]
        else:
            return (
                f"{kernel} draws data from a plate, but no plate of the model holds an observed "
                'site. Write `with numpyro.plate("N", N, subsample_size=100) as i:` around the '
                "likelihood, and index the data by `i`.",
                "",
            )
    name = plate if plate is not None else candidates[0]
    if subsampled and subsampled != [name]:
        return f"{kernel}: plate '{subsampled[0]}' is subsampled, but `plate` is '{name}'.", ""
    if latent[name]:
        return (
            f"{kernel} draws data from plate '{name}', but the latent site '{latent[name][0]}' "
            "lies inside it: there is one value for each datum. Sum or integrate it out, or take "
            "another plate as `plate`.",
            "",
        )
    return None, name


class MinibatchKernel(Kernel):
    """Kernel that draws data from a plate of the model."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        plate: str | None,
        bounds: Any,
        exact: bool,
        init_strategy: Callable[..., Any] | None,
    ) -> None:
        super().__init__(model, init_strategy=init_strategy or init_to_uniform)
        check_flag(self._name, exact=exact)
        if not exact and bounds != "auto":
            raise ValueError(
                f"{self._name}: `exact=False` estimates the bounds; leave out `bounds`, got "
                f"{bounds!r}."
            )
        self._exact = exact
        if not (plate is None or isinstance(plate, str)):
            raise TypeError(
                f"{self._name}: `plate` must be the name of a plate, got {type(plate).__name__}."
            )
        if not (callable(bounds) or (isinstance(bounds, str) and bounds == "auto")):
            raise ValueError(
                f'{self._name}: `bounds` must be "auto" or a callable (mode, scale, radius) -> '
                f"(N,), got {bounds!r}."
            )
        self._program = model  # as the user wrote it
        self._plate = plate
        self._bounds = bounds
        self._given_start = init_strategy is not None

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    @abstractmethod
    def _order(self) -> int:
        """Of the Taylor polynomials whose remainders the bounds are of."""

    def run_facts(self, state: Any) -> dict[str, Any]:
        """Whether the bounds are estimates."""
        return {"estimated_bounds": int(not self._exact)}

    def _check_target(self, target: Target) -> None:
        reason = refusal(self._name, target, self._plate)
        if reason is not None:
            raise UnsupportedModelError(reason)

    def _make_bounds(self, target: Target, plate: str, size: int, z: Array) -> Bounds:
        """Bounds on derivatives of one order more, from the distributions of the model."""

        def observed(x: Array, indices: Array) -> Any:
            assert target.observed is not None
            return target.observed(target.unravel(x), plate, indices)

        # from a look at two data
        found = links(self._name, lambda x: observed(x, jnp.arange(2)), z)

        def bounds(mode: Array, scale: Array, radius: Array) -> Array:
            every = lambda x: observed(x, jnp.arange(size))  # noqa: E731
            return derivative_bounds(every, found, size, self._order, mode, scale, radius)

        return bounds

    def fit(self, *args: Any, **kwargs: Any) -> tuple[Any, Problem]:
        """Mode, metric and bounds for the data `args`, `kwargs` of the model, and the problem."""
        state = self.init(jax.random.key(0), 0, None, args, kwargs)
        assert self._target is not None
        return state.fit, self._bind(self._target, args, kwargs)

    # --- data -----------------------------------------------------------------------------------

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: PyTree | None,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        if GIBBS_SITES_KWARG in (model_kwargs or {}):
            raise UnsupportedModelError(
                f"{self._name} is no block of Gibbs: each move of another block would change the "
                "log likelihoods of all the data. Let it sample all sites."
            )
        args, kwargs = as_arrays(model_args, model_kwargs or {})
        target = build_target(self._program, *args, **kwargs)
        self._check_target(target)
        plate = data_plate(self._name, target, self._plate)
        dropped = [s.name for s in target.sites if s.kind == "deterministic" and plate in s.plates]
        if dropped:
            warnings.warn(
                f"{self._name} drops the deterministic sites {dropped} inside plate '{plate}', "
                "which would take all the data for each draw.",
                stacklevel=4,
            )
        if not self._exact:
            warnings.warn(
                f"{self._name}: the bounds are estimates (`exact=False`), so that the draws may be "
                "off; `num_violations` in `sample_stats` counts where a bound did not hold.",
                stacklevel=4,
            )
        self._dropped, self._found_plate = frozenset(dropped), plate
        # all that looks at the model as a whole sees all the data
        self._model = at_indices(self._program, plate)
        self._started_at = init_params is not None or self._given_start
        # refusals that need the data come before the search for a start
        self._bind(build_target(self._model, *args, **kwargs), args, kwargs)
        return super().init(rng_key, num_warmup, init_params, model_args, model_kwargs)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        whole = super().postprocess_fn(model_args, model_kwargs)
        dropped = self._dropped

        def constrain(z: PyTree) -> PyTree:
            return {name: value for name, value in whole(z).items() if name not in dropped}

        return constrain

    def _bind(self, target: Target, model_args: tuple, model_kwargs: dict[str, Any]) -> Problem:
        leaves, tree = jax.tree.flatten(as_arrays(model_args, model_kwargs))
        arrays = [isinstance(leaf, jax.Array) for leaf in leaves]
        others = [leaf for leaf, array in zip(leaves, arrays, strict=True) if not array]
        # numbers that a program is compiled for, and functions by their address
        seed = jnp.asarray(crc32(repr(others).encode()), jnp.uint32)

        def given(data: tuple[Array, ...]) -> Problem:
            rest, values = iter(others), iter(data[1:])
            found = [next(values) if array else next(rest) for array in arrays]
            args, kwargs = jax.tree.unflatten(tree, found)
            return self._problem(target, args, kwargs)._replace(data=data, given=given)

        data = (seed, *(leaf for leaf, array in zip(leaves, arrays, strict=True) if array))
        self._check_indices(target.bind(*model_args, **model_kwargs), self._found_plate)
        return given(data)

    def _problem(self, target: Target, model_args: tuple, model_kwargs: dict[str, Any]) -> Problem:
        """The problem of these data."""
        plate, bound = self._found_plate, target.bind(*model_args, **model_kwargs)
        (size,) = (p.size for p in target.plates if p.name == plate)
        assert bound.log_base is not None and bound.log_likelihood_terms is not None
        base, terms = bound.log_base, bound.log_likelihood_terms
        bounds = self._bounds
        log_terms = lambda x, indices: terms(bound.unravel(x), plate, indices)  # noqa: E731
        if not self._exact:
            bounds = empirical_bounds(log_terms, size, self._order)
        elif isinstance(bounds, str):
            bounds = self._make_bounds(bound, plate, size, jnp.zeros(target.size))
        return Problem(
            size=size,
            log_base=lambda x: base(bound.unravel(x), plate),
            log_terms=log_terms,
            bounds=bounds,
            ravel=bound.ravel,
            unravel=bound.unravel,
        )

    def _check_indices(self, target: Target, plate: str) -> None:
        """The data must follow the plate's indices: two of them give two data."""
        (size,) = (p.size for p in target.plates if p.name == plate)
        if size == 2:
            return

        def look(x: Array) -> dict[str, tuple[int, ...]]:
            assert target.observed is not None
            found = target.observed(target.unravel(x), plate, jnp.arange(2))
            shapes.update(
                {name: (jnp.shape(site.value), site.axis) for name, site in found.items()}
            )
            return {}

        shapes: dict[str, Any] = {}
        how = (
            f'Index the data by the plate: `with numpyro.plate("{plate}", {size}, '
            "subsample_size=100) as i: numpyro.sample(..., obs=y[i])`."
        )
        try:
            jax.eval_shape(look, jnp.zeros(target.size))
        except (ValueError, TypeError) as error:
            raise UnsupportedModelError(
                f"{self._name}: the model does not run on 2 data of plate '{plate}' ({error}). "
                f"{how}"
            ) from error
        for name, (shape, axis) in shapes.items():
            if shape and (axis >= len(shape) or shape[axis] not in (1, 2)):
                raise UnsupportedModelError(
                    f"{self._name}: the values of site '{name}' do not follow the indices of plate "
                    f"'{plate}': of 2 data they have the shape {shape}. {how}"
                )

    # --- start ----------------------------------------------------------------------------------

    def _compiled_init(self, rng_key: Array, z: PyTree, bound: Problem, batched: bool) -> Any:
        assert bound.given is not None
        given = bound.given

        # the data as arguments: XLA would compute with constants while it compiles
        @jax.jit
        def start(rng_key: Array, z: PyTree, data: tuple[Array, ...]) -> Any:
            return self._init_chains(rng_key, z, given(data), batched)

        return start(rng_key, z, bound.data)

    def _init_chains(self, rng_key: Array, z: PyTree, bound: Problem, batched: bool) -> Any:
        one = jax.tree.map(lambda leaf: leaf[0], z) if batched else z
        # once for all chains
        fit = self._find_fit(bound.ravel(one), bound)

        def chain(key: Array, z: PyTree) -> Any:
            return self._start_chain(key, bound.ravel(z) if self._started_at else None, bound, fit)

        return (jax.vmap(chain) if batched else chain)(rng_key, z)

    @abstractmethod
    def _find_fit(self, start: Array, problem: Problem) -> Any:
        """What is found once for all chains."""

    @abstractmethod
    def _start_chain(self, key: Array, x: Array | None, problem: Problem, fit: Any) -> Any:
        """State of one chain at `x`, or where the kernel likes to start."""

    def _check_start(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any]) -> None:
        fit, target = state.fit, self._target
        assert target is not None and self._model is not None
        energy = lambda z: target.potential_energy(z, *model_args, **model_kwargs)  # noqa: E731
        batched = np.ndim(state.i) > 0
        start = jax.jit(jax.vmap(energy) if batched else energy)(state.z)
        metric = np.isfinite(np.asarray(fit.whiten)).all() and np.isfinite(fit.centre).all()
        if not (metric and np.isfinite(np.asarray(start)).all()):
            failure = describe_failure(
                jax.random.key(0), self._model, self._init_strategy, model_args, model_kwargs
            )
            raise InitializationError(
                f"{self._name} found no mode of the posterior with a positive definite Hessian "
                f"from the start, or no density there. {failure}"
            )
        if not np.isfinite(np.asarray(fit.table.unit)).all():
            raise UnsupportedModelError(self._no_bound())

    def _no_bound(self) -> str:
        return f"{self._name}: a bound is not finite. Give `bounds`."
