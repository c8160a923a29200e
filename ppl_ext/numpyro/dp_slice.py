"""Dirichlet-process slice samplers as a NumPyro kernel."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.infer import MCMC, NUTS
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import is_prng_key, not_jax_tracer

from ppl_ext.arguments import argument_error, check_choice, check_count
from ppl_ext.errors import InitializationError
from ppl_ext.kernels import dp_slice as dp
from ppl_ext.numpyro import mixture as mx
from ppl_ext.numpyro.kernel import Kernel
from ppl_ext.target import Array, PyTree, Target

# number of points below which split-merge moves cost little
_SMALL = 20_000

# points whose likelihoods are held at once
_CHUNK = 16384

# discount from which on the leftover mass decays too slowly
_LARGE_DISCOUNT = 0.2

# slots chosen without being told
_MIN_CAPACITY, _MAX_CAPACITY = 64, 512


def refusal(target: Target) -> str | None:
    """Why DPSlice cannot take this model, as far as static facts tell."""
    if target.process is None:
        return (
            f"DPSlice samples models with a ppl_ext.{target.language}.DirichletProcess or "
            "PitmanYor; this one draws from none."
        )
    return target.process[4:] if target.process.startswith("no: ") else None


class State(NamedTuple):
    """State of one chain; counters of a sweep belong together (see `ppl_ext.kernels.dp_slice`)."""

    z: dict[str, Array]  # sites, atoms (capacity, ...), G_weights (capacity,), G_num_clusters
    labels: Array  # (n,) int32, cluster of each point, 0 ... K - 1 with method "posterior"
    num_clusters: Array  # ()
    concentration: Array  # ()
    num_instantiated: Array  # ()
    overhead: Array  # ()
    overhead_predicted: Array  # ()
    overflow: Array  # ()
    num_split_merge: Array  # () moves accepted
    accept_prob: Array  # () of the atoms' moves
    diverging: Array  # () of NUTS on the other sites
    sweep: dp.State
    globals: Any  # state of NUTS, or ()
    start_key: Array  # the key that the chain began with
    rng_key: Array


class DPSlice(Kernel):
    """Slice sampler for models with a `DirichletProcess` or `PitmanYor`: no truncation level.

    Parameters
    ----------
    model : callable
        NumPyro model that calls `draw` of one process in the plate of its data.
    method : {"posterior", "kgw", "kgw_independent"}
        `posterior` works on the partition, mixes best, and is the only one with split-merge
        moves. `kgw` and `kgw_independent` keep the order of the sticks (Kalli, Griffin & Walker);
        the latter needs a number of components that does not depend on the weights, which suits a
        Pitman-Yor process with a large discount.
    atoms : {"auto", "conjugate", "gradient"}
        How atoms are drawn. `auto`: in closed form where base and likelihood are conjugate, else
        by gradient (Langevin) moves with an accept step. `ppl_ext.explain` says which.
    split_merge : "auto" or int
        Split-merge moves per sweep, with the method `posterior`. `auto`: five, from 20,000 points
        on one every other sweep; by gradient, where a move costs as much as several sweeps, one,
        from 20,000 points on one every 20 sweeps.
    capacity : "auto" or int
        Slots for components, a multiple of 16. `auto`: chosen from the number of points and the
        concentration. When a sweep needs more, `overflow` is set, draws from then on are NaN (-1
        for integers), and `rerun` repeats the run with more.
    chunk : "auto" or int
        Points whose likelihoods are in memory at once, with closed-form atoms.
    init_strategy : callable
        For the sites beside the process, as for `numpyro.infer.NUTS`.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: no process, or two; atoms used outside of the data plate; discrete sites beside
        the process; `atoms="conjugate"` for a model without conjugate pairs.

    ppl_ext.errors.InitializationError
        At `run`: no observations, or observations that are NaN and not masked.

    Warns
    -----
    UserWarning
        At `run`: a Pitman-Yor process with a discount that the method does not suit.

    Notes
    -----
    Exact. A concentration with a Gamma prior is drawn in closed form, every other site beside the
    process, the discount too, by NUTS in the sweep. `get_samples()` holds those sites, the atoms
    under the names of the base with `capacity` slots, `<name>_weights` of the slots (what is
    missing to 1 is the mass of further components) and `<name>_num_clusters`. Labels of each draw
    are kept with `extra_fields=("labels",)`. Slots have no meaning from draw to draw: summarise
    with `ppl_ext.diagnostics.clusters`.

    Source: see `ppl_ext.kernels.dp_slice`; arXiv 2602.00878.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import DirichletProcess, DPSlice
    >>> def base():
    ...     return numpyro.sample("mu", dist.Normal(0, 10))
    >>> def model(y):
    ...     G = DirichletProcess("G", 1.0, base)
    ...     with numpyro.plate("data", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(G.draw(), 1), obs=y)
    >>> y = np.repeat([-10.0, 10.0], 20)
    >>> mcmc = MCMC(DPSlice(model), num_warmup=50, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), y, extra_fields=("labels",))
    >>> mcmc.get_samples()["G_num_clusters"].shape
    (100,)
    """

    default_fields = (
        "z",
        "num_clusters",
        "concentration",
        "num_instantiated",
        "overhead",
        "overhead_predicted",
        "overflow",
        "num_split_merge",
        "accept_prob",
        "diverging",
    )

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        method: dp.Method = "posterior",
        atoms: Literal["auto", "conjugate", "gradient"] = "auto",
        split_merge: int | Literal["auto"] = "auto",
        capacity: int | Literal["auto"] = "auto",
        chunk: int | Literal["auto"] = "auto",
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        super().__init__(model, init_strategy=init_strategy)
        check_choice("DPSlice", "method", method, dp.METHODS)
        check_choice("DPSlice", "atoms", atoms, ("auto", "conjugate", "gradient"))
        if split_merge != "auto" and split_merge != 0:
            check_count("DPSlice", split_merge=split_merge)
            if method != "posterior":
                raise argument_error(
                    "DPSlice", "split_merge", split_merge, f'0 or "auto" with method "{method}"'
                )
        if chunk != "auto":
            check_count("DPSlice", chunk=chunk)
        if capacity != "auto":
            check_count("DPSlice", capacity=capacity)
            if capacity % dp.BLOCK:
                raise argument_error("DPSlice", "capacity", capacity, f"a multiple of {dp.BLOCK}")
        self._method = method
        self._atoms = atoms
        self._split_merge = split_merge
        self._capacity = capacity
        self._chunk = chunk
        self._facts: mx.Facts | None = None
        self._settings: dp.Settings | None = None
        self._nuts: NUTS | None = None

    @property
    def settings(self) -> dp.Settings:
        """Slots, chunk and moves of the run; known after the start of it."""
        if self._settings is None:
            raise RuntimeError("The settings are chosen at the start of a run.")
        return self._settings

    # --- what MCMC calls -------------------------------------------------------------------------

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: PyTree | None,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> State:
        kwargs = model_kwargs or {}
        if init_params is not None:
            raise ValueError(
                "DPSlice starts by itself: give a start of the sites beside the process by "
                "`init_strategy`, not by `init_params`."
            )
        assert self._model is not None
        self._num_warmup = num_warmup
        mx.check_observations(self._model, model_args, kwargs)
        self._facts = mx.look(self._model, model_args, kwargs, self._atoms)
        warns = self._facts.discount and self._method != "kgw_independent"
        largest = None
        if warns or self._capacity == "auto":
            largest = self._largest(self._facts, model_args, kwargs)
        self._settings = self._chosen(self._facts, largest)
        if warns and largest is not None:
            self._warn_of_discount(self._facts, largest[1])
        if self._facts.global_sites:
            self._nuts = NUTS(self._facts.given, init_strategy=self._init_strategy)
        start = lambda key: self._start_chain(key, model_args, kwargs)  # noqa: E731
        batched = not is_prng_key(rng_key)
        state = jax.jit(jax.vmap(start) if batched else start)(rng_key)
        self._check_start(state, model_args, kwargs)
        self._sample_fn = self._sample
        return state

    def _warn_of_discount(self, facts: mx.Facts, largest: float) -> None:
        if largest > _LARGE_DISCOUNT:
            warnings.warn(
                f"The discount of '{facts.process}' can be {largest:.2f}, for which a sweep "
                f'of DPSlice\'s method "{self._method}" may need thousands of slots and overflow. '
                'Take method="kgw_independent", whose number of slots does not depend on it.',
                stacklevel=5,
            )

    def _check_start(self, state: State, args: tuple, kwargs: dict) -> None:
        atoms = jax.tree.leaves(state.sweep.atoms)
        if not_jax_tracer(atoms[0]) and not all(bool(jnp.isfinite(a).all()) for a in atoms):
            assert self._facts is not None
            raise InitializationError(
                f"The atoms of '{self._facts.process}' are not finite at the start. Check that the "
                "observations are finite (mask missing ones) and the parameters of the base."
            )

    def _per_chain(
        self,
        function: Callable[[Any, Any], Any],
        state: State,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        assert self._model is not None and self._facts is not None
        n = mx.num_points(self._model, model_args, model_kwargs or {})
        if n != self._facts.num_points:
            raise ValueError(
                f"These data have {n} points, the run that is continued has "
                f"{self._facts.num_points}. Start a new MCMC object."
            )
        one = lambda state: function(state, (model_args, model_kwargs or {}))  # noqa: E731
        return one(state) if is_prng_key(state.rng_key) else jax.vmap(one)(state)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        """Adds the deterministic sites that do not belong to the data plate."""
        if self._facts is None:
            return lambda z: z
        facts, kwargs = self._facts, model_kwargs or {}

        def with_deterministic(z: dict[str, Array]) -> dict[str, Array]:
            run = facts.run(model_args, kwargs, z)
            found = {
                name: message["value"]
                for name, message in run.messages.items()
                if message["type"] == "deterministic"
                and not any(f.name == facts.plate for f in message["cond_indep_stack"])
            }
            return {**z, **found}

        return with_deterministic

    # --- the algorithm ---------------------------------------------------------------------------

    def _start_chain(self, key: Array, args: tuple, kwargs: dict) -> State:
        facts, settings = self._facts, self._settings
        assert facts is not None and settings is not None
        rng_key, key_sites, key_sweep, key_nuts = random.split(key, 4)
        # a draw of the prior, which NUTS replaces where it has a say
        run = mx.run_model(facts.model, args, kwargs, {}, None, key_sites)
        values = {name: run.messages[name]["value"] for name in facts.global_sites}
        sweep = dp.init(key_sweep, facts.mixture(args, kwargs, values), settings)
        nuts: Any = ()
        if self._nuts is not None:
            given = self._given(sweep, values, args, kwargs)
            nuts = self._nuts.init(key_nuts, self._num_warmup, None, args, {**kwargs, **given})
            values = self._nuts.get_constrain_fn(args, {**kwargs, **given})(nuts.z)
        return self._state(sweep, nuts, values, args, kwargs, key, rng_key)

    def _step(self, state: State, target: Any) -> State:
        args, kwargs = target
        facts, settings = self._facts, self._settings
        assert facts is not None and settings is not None
        values = {name: state.z[name] for name in facts.global_sites}
        nuts = state.globals
        if self._nuts is not None:
            given = {**kwargs, **self._given(state.sweep, values, args, kwargs, state.z)}
            nuts = self._nuts.sample(self._nuts.refresh(nuts, args, given), args, given)
            values = self._nuts.get_constrain_fn(args, given)(nuts.z)
        mixture = facts.mixture(args, kwargs, values)
        sweep = dp.step(state.sweep, mixture, settings, self._num_warmup)
        return self._state(sweep, nuts, values, args, kwargs, state.start_key, state.rng_key)

    def _refresh(self, state: State, target: Any) -> State:
        return state

    def _given(
        self,
        sweep: dp.State,
        values: dict[str, Array],
        args: tuple,
        kwargs: dict,
        z: dict[str, Array] | None = None,
    ) -> dict[str, mx.Given]:
        facts, settings = self._facts, self._settings
        assert facts is not None and settings is not None
        sites = {} if facts.concentration is None else {facts.concentration: sweep.concentration}
        if z is None:
            atoms = facts.sites_of_atoms(sweep.atoms, args, kwargs, values)
        else:
            atoms = {name: z[name] for name in facts.base_sites}
        sticks = None
        if self._method != "posterior":
            sticks = (sweep.log_weights, sweep.log_leftover)
        counts = dp.count(sweep.labels, settings.capacity)
        return {mx.GIVEN: mx.Given(sites, atoms, sweep.labels, counts, sticks)}

    def _state(
        self,
        sweep: dp.State,
        nuts: Any,
        values: dict[str, Array],
        args: tuple,
        kwargs: dict,
        start_key: Array,
        rng_key: Array,
    ) -> State:
        facts = self._facts
        assert facts is not None
        z = dict(values)
        if facts.concentration is not None:
            z[facts.concentration] = sweep.concentration
        z |= facts.sites_of_atoms(sweep.atoms, args, kwargs, values)
        z[f"{facts.process}_weights"] = jnp.exp(sweep.log_weights)
        z[f"{facts.process}_num_clusters"] = sweep.num_clusters_now

        def kept(value: Array) -> Array:
            # here once more: XLA's functions may make a number of a NaN
            value = jnp.asarray(value)
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            return jnp.where(
                sweep.overflow, jnp.array(jnp.nan if floating else -1, value.dtype), value
            )

        z = {name: kept(value) for name, value in z.items()}
        return State(
            z=z,
            labels=sweep.labels,
            num_clusters=sweep.num_clusters,
            concentration=sweep.concentration,
            num_instantiated=sweep.num_instantiated,
            overhead=sweep.overhead,
            overhead_predicted=sweep.overhead_predicted,
            overflow=sweep.overflow,
            num_split_merge=sweep.num_accepted,
            accept_prob=sweep.accept_prob,
            # after an overflow there is nothing that could diverge
            diverging=(nuts.diverging if nuts else jnp.array(False)) & ~sweep.overflow,
            sweep=sweep,
            globals=nuts,
            start_key=start_key,
            rng_key=rng_key,
        )

    # --- settings --------------------------------------------------------------------------------

    def _largest(self, facts: mx.Facts, args: tuple, kwargs: dict) -> tuple[float, float] | None:
        """Largest concentration and discount in draws of the prior; `None` inside a trace."""
        number = 500 if facts.concentration or facts.global_sites else 1
        drawn = mx.process_draws(facts.model, args, kwargs, number)
        if not not_jax_tracer(drawn[0]):
            return None
        alpha, d = (float(np.asarray(values).max()) for values in drawn)
        return alpha, d

    def _chosen(self, facts: mx.Facts, largest: tuple[float, float] | None) -> dp.Settings:
        n = facts.num_points
        closed = facts.links is not None
        split_merge, every = self._split_merge, 1
        if split_merge == "auto" and self._method != "posterior":
            split_merge = 0
        elif split_merge == "auto":
            # without a closed form a move costs as much as several sweeps
            small, large = ((5, 1), (1, 2)) if closed else ((1, 1), (1, 20))
            split_merge, every = small if n < _SMALL else large
        chunk = _CHUNK if self._chunk == "auto" else self._chunk
        capacity = self._capacity
        if capacity == "auto":
            capacity = self._capacity_by_law(facts, *largest) if largest else _MAX_CAPACITY
        return dp.Settings(self._method, int(capacity), int(chunk), int(split_merge), every)

    def _capacity_by_law(self, facts: mx.Facts, alpha: float, d: float) -> int:
        """Clusters of the prior and the overhead's law, each with six standard deviations.

        log(leftover / min u) is about log n at most.
        """
        n = facts.num_points
        clusters = alpha * math.log1p(n / max(alpha, 1e-6))
        overhead = 1 + alpha * math.log(n + 1)
        if facts.discount:
            # n^d up to a factor, and a leftover that decays by a power
            clusters, overhead = (alpha + 1) * n ** max(d, 0.1), overhead * n ** (d / 2)
        if self._method == "kgw_independent":
            # the slices alone say how many; a point of the last cluster adds as much again
            overhead = 2 * math.log(n + 1) / -math.log(dp.slice_ratio(alpha, d))
        total = clusters + 6 * math.sqrt(clusters) + overhead + 6 * math.sqrt(overhead) + 8
        slots = math.ceil(min(total, _MAX_CAPACITY) / dp.BLOCK) * dp.BLOCK
        return max(slots, _MIN_CAPACITY)

    # --- after a run -----------------------------------------------------------------------------

    def rerun(
        self, mcmc: MCMC, capacity: int | None = None, *, extra_fields: tuple[str, ...] = ()
    ) -> MCMC:
        """Repeat a finished run with the same keys and more slots.

        Up to the overflow the draws are the same; after it they are those that should have been.

        Parameters
        ----------
        mcmc : numpyro.infer.MCMC
            A finished run of this kernel, which was not resumed from another.
        capacity : int, optional
            Slots, a multiple of 16. `None`: twice as many.
        extra_fields : tuple of str
            As for `mcmc.run`.

        Raises
        ------
        ValueError
            For a bad capacity, or an `mcmc` without draws.
        """
        state = mcmc.last_state
        if state is None or mcmc.sampler is not self:
            raise ValueError("`rerun` takes a finished run of this kernel: call `mcmc.run` first.")
        capacity = 2 * self.settings.capacity if capacity is None else capacity
        check_count("DPSlice.rerun", capacity=capacity)
        if capacity % dp.BLOCK:
            raise argument_error("DPSlice.rerun", "capacity", capacity, f"a multiple of {dp.BLOCK}")
        kernel = copy.copy(self)
        kernel._capacity = capacity
        kernel._reset()
        new = MCMC(
            kernel,
            num_warmup=mcmc.num_warmup,
            num_samples=mcmc.num_samples,
            num_chains=mcmc.num_chains,
            thinning=mcmc.thinning,
            chain_method=mcmc.chain_method,
            progress_bar=mcmc.progress_bar,
            jit_model_args=mcmc._jit_model_args,
        )
        new.run(state.start_key, *mcmc._args, extra_fields=extra_fields, **mcmc._kwargs)
        return new

    @staticmethod
    def refuse_log_likelihood() -> str:
        """Why ArviZ cannot have the log likelihood: it depends on labels that are not kept."""
        return (
            "The likelihood of DPSlice's draws depends on the labels of the points. Pointwise log "
            "densities without them are those of ppl_ext.diagnostics.predictive_density(mcmc, "
            "*args), where args are the model's arguments: take the logarithm."
        )

    def predictive_density(self, samples: dict[str, Array], *args: Any, **kwargs: Any) -> Array:
        """Density of new observations, see `ppl_ext.diagnostics.predictive_density`.

        Parameters
        ----------
        samples : dict
            `mcmc.get_samples(group_by_chain=True)`.
        *args, **kwargs
            Arguments of the model, with the new observations.

        Returns
        -------
        Array
            (chains, draws, points).
        """
        model = self._model
        assert model is not None
        mx.check_observations(model, args, kwargs)
        shape = jax.tree.leaves(samples)[0].shape[:2]
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)
        keys = random.split(random.key(0), shape[0] * shape[1])
        one = lambda x: mx.predictive_density(model, args, kwargs, *x)  # noqa: E731
        found = jax.jit(lambda draws, keys: lax.map(one, (draws, keys)))(flat, keys)
        return found.reshape(*shape, -1)

    def get_diagnostics_str(self, state: State) -> str:
        """Clusters, instantiated components and slots, for the progress bar."""
        text = f"{state.num_clusters} clusters, {state.num_instantiated} of "
        text += f"{self.settings.capacity} slots"
        return text + ", OVERFLOW" if bool(state.overflow) else text

    def _reset(self) -> None:
        super()._reset()
        self._facts = self._settings = self._nuts = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_nuts": None}
