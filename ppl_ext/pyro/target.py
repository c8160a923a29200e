"""Pyro model -> `Target`.

A model is looked at once by PyTorch (sites, plates, transforms to the real line) and recorded
once for each function of the target that is used (`ppl_ext.pyro.program`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch
from pyro import poutine
from pyro.distributions import (
    Cauchy,
    MaskedDistribution,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    Unit,
)
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.infer.autoguide.initialization import InitMessenger, init_to_uniform
from pyro.infer.mcmc.util import initialize_model
from pyro.poutine.subsample_messenger import _Subsample
from torch.distributions import biject_to, transform_to
from torch.distributions.constraints import MixtureSameFamilyConstraint
from torch.utils._pytree import tree_leaves

from ppl_ext.errors import InitializationError, TracingError, UnsupportedModelError
from ppl_ext.pyro.program import Program, Recording, record, to_jax
from ppl_ext.target import (
    Array,
    Plate,
    Site,
    Target,
    model_without_observation,
    site_without_mean,
)

Tensors = dict[str, torch.Tensor]

# draws of the prior for the scales of what is not normal
_PRIOR_DRAWS = 1000


@biject_to.register(MixtureSameFamilyConstraint)
@transform_to.register(MixtureSameFamilyConstraint)
def _of_the_components(support: Any) -> Any:
    """PyTorch knows no map for the support of a mixture, which is that of its components."""
    return biject_to(support.base_constraint)


@dataclass(frozen=True)
class PyroTarget(Target):
    """A `Target` with what ArviZ wants to know besides.

    Parameters
    ----------
    log_likelihood_sites : callable
        `log_likelihood_sites(z, *args, **kwargs)`: log density of each observation by site.
    observed_values : dict
        Observed values by site.
    """

    log_likelihood_sites: Callable[..., dict[str, Array]] = field(kw_only=True)
    observed_values: Mapping[str, np.ndarray] = field(kw_only=True)


def target(model: Callable[..., Any], *args: Any, **kwargs: Any) -> PyroTarget:
    """Look at a Pyro model once and return its `Target`.

    The callables of the result record the model when first called, and again when their data are
    other objects than before or tensors that were changed in place. Data of any type that the
    model takes are fine; they stay outside of JAX, so that under `jax.jit` they are constants.

    Raises
    ------
    TypeError
        When `model` is not callable.
    UnsupportedModelError
        When a site has a support without a bijection to the real line, or one that depends on
        the value of another site.
    TracingError
        When a callable is called that JAX cannot evaluate; names the operations or the line.

    Examples
    --------
    >>> import jax.numpy as jnp, pyro, torch, pyro.distributions as dist
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> y = torch.tensor(2.0)
    >>> t = target(model, y)
    >>> t.size, [site.name for site in t.latent]
    (1, ['mu'])
    >>> round(float(t.log_density(jnp.array([1.0]), y)), 3)  # -1 - log(2 pi)
    -2.838
    """
    return Posterior(model, args, kwargs).target()


def declares_sites(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a model is written in Pyro: it declares a site there before it ends or fails."""
    if isinstance(model, torch.nn.Module):
        return True
    with torch.random.fork_rng(devices=[]), torch.no_grad(), poutine.block():
        trace = poutine.trace(model)
        # what goes wrong in the model, its own front end will say
        with suppress(Exception):
            trace(*args, **kwargs)
    return any(node["type"] in ("sample", "param") for node in trace.trace.nodes.values())


class Posterior:
    """A model with its data: its functions in PyTorch, and their recordings."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        transforms: Mapping[str, Any] | None = None,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        if not callable(model):
            raise TypeError(f"`model` must be a callable Pyro program, got {type(model).__name__}.")
        self.model, self.args, self.kwargs = model, args, kwargs
        self.init_strategy = init_strategy
        self.trace = self._run()
        self.values = {
            name: node["value"].detach()
            for name, node in self._samples(self.trace)
            if not node["is_observed"]
        }
        self.transforms: dict[str, Any] = dict(transforms or {})
        self.sites = tuple(
            self._describe(name, node)
            for name, node in self._samples(self.trace)
            # a `factor` is a sample site of the Unit distribution, without a value
            if not isinstance(node["fn"], Unit)
        )
        self.plates = tuple(
            Plate(name, node["fn"].size, node["fn"].subsample_size or node["fn"].size)
            for name, node in self.trace.nodes.items()
            if node["type"] == "sample" and isinstance(node["fn"], _Subsample)
        )
        if any(site.dynamic_support for site in self.sites):
            self._refuse_dynamic_supports()

    # --- what the model is -------------------------------------------------------------------

    def target(self) -> PyroTarget:
        """The target of this model."""
        return PyroTarget(
            language="pyro",
            sites=self.sites,
            plates=self.plates,
            structure={
                site.name: site.unconstrained_shape
                for site in self.sites
                if site.unconstrained_shape is not None
            },
            potential_energy=_Recorded(self, "potential_energy"),
            constrain_sites=_Recorded(self, "constrain"),
            unconstrain_sites=_Recorded(self, "unconstrain"),
            process=self._process(),
            log_likelihood_sites=_Recorded(self, "log_likelihood"),
            observed_values=self.observed_values,
        )

    def _process(self) -> str | None:
        """How `DPSlice` would move the atoms, if the model draws from a process; or why not."""
        if not any(s.distribution in ("Partition", "PitmanYorPartition") for s in self.sites):
            return None
        # imported here: the translation is only for such models
        from ppl_ext.numpyro.mixture import look
        from ppl_ext.pyro.translation import Translation

        try:
            translation = Translation(self.model, self.args, self.kwargs)
            with jax.enable_x64(translation.double):
                return look(translation.model, (translation.constants,), {}).path
        except (TracingError, UnsupportedModelError) as error:
            return f"no: {error}"

    def _run(self) -> Any:
        """Trace of the model at values of the init strategy."""

        def start(site: Mapping[str, Any]) -> torch.Tensor:
            if site["fn"].support.is_discrete or _family(site["fn"]) == "Delta":
                return site["fn"].sample()
            return self.init_strategy(site)

        with poutine.block(), torch.no_grad():
            model = InitMessenger(start)(self.model)
            try:
                return poutine.trace(model).get_trace(*self.args, **self.kwargs)
            except ValueError as error:
                # Pyro names the site and a way out
                if "Continuous inference cannot handle" not in str(error):
                    raise
                raise UnsupportedModelError(str(error).splitlines()[0]) from error

    @staticmethod
    def _samples(trace: Any) -> list[tuple[str, Any]]:
        return [
            (name, node)
            for name, node in trace.nodes.items()
            if node["type"] == "sample" and not isinstance(node["fn"], _Subsample)
        ]

    def _describe(self, name: str, node: Mapping[str, Any]) -> Site:
        shape = tuple(node["value"].shape)
        # from left to right, as their axes are; a plate that is a loop has no axis
        frames = sorted(node["cond_indep_stack"], key=lambda frame: frame.dim or -1000)
        plates = tuple(frame.name for frame in frames)
        distribution = node["fn"]
        # `pyro.deterministic`, and a site that a reparametrisation computes from another one
        if node["is_observed"] and _family(distribution) == "Delta":
            return Site(name, "deterministic", shape, plates=plates)
        support = distribution.support
        common: dict[str, Any] = dict(
            distribution=_family(distribution),
            support=_readable(support),
            discrete=bool(support.is_discrete),
            event_dim=distribution.event_dim,
            plates=plates,
        )
        if hasattr(distribution, "has_normalizer"):
            common["normalizer"] = "computed" if distribution.has_normalizer else "unknown"
        if node["is_observed"]:
            return Site(name, "observed", shape, **common)
        if common["discrete"] or common["distribution"] == "Delta":
            return Site(name, "latent", shape, **common)
        if name not in self.transforms:
            try:
                self.transforms[name] = biject_to(support).inv
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"Site '{name}' ({common['distribution']}) has the support "
                    f"{common['support']}, which has no bijection to the real line. "
                    "Reparametrise the site."
                ) from error
        unconstrained = tuple(self.transforms[name].forward_shape(node["value"].shape))
        dynamic = bool(_bounds(support))
        return Site(name, "latent", shape, unconstrained, dynamic_support=dynamic, **common)

    def _refuse_dynamic_supports(self) -> None:
        """Pyro fixes the bounds of a support at set-up: two runs of the model must agree on them.

        A site whose bounds are tensors is marked; this compares them at other values.
        """
        again = dict(self._samples(self._run()))
        before = dict(self._samples(self.trace))
        for site in self.sites:
            if site.dynamic_support and not all(
                torch.equal(torch.as_tensor(a), torch.as_tensor(b))
                for a, b in zip(
                    _bounds(before[site.name]["fn"].support).values(),
                    _bounds(again[site.name]["fn"].support).values(),
                    strict=True,
                )
            ):
                raise UnsupportedModelError(
                    f"The support of site '{site.name}' ({site.distribution}) depends on the value "
                    "of another site; Pyro maps it to the real line with fixed bounds. Sample a "
                    "site with fixed bounds, such as Uniform(0, 1), and scale it."
                )

    @property
    def observed_values(self) -> dict[str, np.ndarray]:
        """Observed values by site."""
        names = [site.name for site in self.sites if site.kind == "observed"]
        return {name: self.trace.nodes[name]["value"].detach().cpu().numpy() for name in names}

    # --- functions in PyTorch ----------------------------------------------------------------

    @cached_property
    def potential_fn(self) -> Callable[[Tensors], torch.Tensor]:
        """Pyro's own potential energy of unconstrained values."""
        _, potential_fn, _, _ = initialize_model(
            self.model,
            self.args,
            self.kwargs,
            transforms=dict(self.transforms),
            initial_params=self.start,
        )
        return potential_fn

    @cached_property
    def start(self) -> Tensors:
        """Unconstrained values of the first run of the model."""
        return {name: t(self.values[name]).detach() for name, t in self.transforms.items()}

    def initial_params(self, num_chains: int) -> Tensors:
        """Unconstrained starting values by Pyro's search, with a leading axis of `num_chains`.

        Raises
        ------
        InitializationError
            When no start with a finite density and gradient is found; names the site.
        """
        try:
            params, _, _, _ = initialize_model(
                self.model,
                self.args,
                self.kwargs,
                transforms=dict(self.transforms),
                num_chains=num_chains,
                init_strategy=self.init_strategy,
            )
        except ValueError as error:
            if "valid initial params" not in str(error):
                raise
            raise InitializationError(self._describe_failure()) from error
        if num_chains == 1:
            params = {name: value[None] for name, value in params.items()}
        return {name: value.detach() for name, value in params.items()}

    def _describe_failure(self) -> str:
        guilty = []
        for name, node in self._samples(self._run()):
            log_prob = node["fn"].log_prob(node["value"])
            bad = int((~torch.isfinite(log_prob)).sum())
            if bad:
                role = "observed site" if node["is_observed"] else "site"
                guilty.append(
                    f"{role} '{name}' ({bad} of {log_prob.numel()} log densities not finite)"
                )
        where = "; ".join(guilty) if guilty else "no single site; the gradient or their sum"
        return (
            "No starting point with a finite log density and gradient was found. At fault: "
            f"{where}. Check the data and the priors, or give a start by `init_strategy` "
            "(pyro.infer.autoguide.init_to_value) or by `MCMC(..., initial_params=...)`."
        )

    def constrain(self, z: Tensors) -> Tensors:
        """Values of latent and deterministic sites."""
        values = {name: t.inv(z[name]) for name, t in self.transforms.items()}
        deterministic = [site.name for site in self.sites if site.kind == "deterministic"]
        if deterministic:
            trace = self._conditioned(values)
            values |= {name: trace.nodes[name]["value"] for name in deterministic}
        return values

    def unconstrain(self, values: Tensors) -> Tensors:
        """Inverse of `constrain`."""
        return {name: t(values[name]) for name, t in self.transforms.items()}

    def log_likelihood(self, z: Tensors) -> Tensors:
        """Log density of each observation, without mask and scale."""
        trace = self._conditioned({name: t.inv(z[name]) for name, t in self.transforms.items()})
        nodes = {s.name: trace.nodes[s.name] for s in self.sites if s.kind == "observed"}
        return {name: node["fn"].log_prob(node["value"]) for name, node in nodes.items()}

    def gaussian_prior(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Means and precisions of the sites whose prior is normal with constant parameters.

        They are those that come out the same at two points.
        """
        here, there = self._at_two_points()
        means, precisions = {}, {}
        for name, z in self.start.items():
            node, normal = here.nodes[name], _unwrapped(here.nodes[name]["fn"])
            mean = precision = torch.zeros_like(z)
            if isinstance(normal, Normal) and node["mask"] is None and node["scale"] == 1.0:
                other = _unwrapped(there.nodes[name]["fn"])
                known = (normal.loc == other.loc) & (normal.scale == other.scale)
                mean = torch.where(known, normal.loc, 0.0).expand(z.shape)
                precision = torch.where(known, normal.scale**-2.0, 0.0).expand(z.shape)
            means[name], precisions[name] = mean.cpu().numpy(), precision.cpu().numpy()
        return means, precisions

    def observation(self, z: Tensors) -> Tensors:
        """Mean and noise covariance of all observed numbers, as `Target.observation` has them."""
        trace = self._conditioned({name: t.inv(z[name]) for name, t in self.transforms.items()})
        means, covariances = [], []
        for site in self.sites:
            if site.kind != "observed":
                continue
            distribution = trace.nodes[site.name]["fn"]
            try:
                mean, covariance = _mean_and_covariance(distribution)
            except (NotImplementedError, AttributeError) as error:
                raise site_without_mean(site.name, site.distribution) from error
            means.append(mean.expand(site.shape).reshape(-1))
            if covariance.ndim != 2 or distribution.batch_shape or len(site.shape) != 1:
                covariance = covariance.expand(site.shape).reshape(-1)
            covariances.append(covariance)
        if not means:
            raise model_without_observation()
        return {"mean": torch.cat(means), "covariance": _block_diagonal(covariances)}

    def log_prior(self, z: Tensors) -> Tensors:
        """Log density of `z` under the prior alone, with the Jacobian and without factors."""
        values = {name: t.inv(z[name]) for name, t in self.transforms.items()}
        trace = self._conditioned(values)
        trace.compute_log_prob(site_filter=lambda name, _: name in self.transforms)
        total = torch.zeros(())
        for name, t in self.transforms.items():
            jacobian = t.log_abs_det_jacobian(values[name], z[name]).sum()
            total = total + trace.nodes[name]["log_prob_sum"] - jacobian
        return {"log_prior": total}

    def prior_draw(self) -> Tensors:
        """Unconstrained draw from the prior; of an improper one, uniform on (-2, 2)."""

        def draw(site: Mapping[str, Any]) -> torch.Tensor:
            improper = _family(site["fn"]) == "ImproperUniform"
            return init_to_uniform(site) if improper else site["fn"].sample()

        with poutine.block(), torch.no_grad():
            trace = poutine.trace(InitMessenger(draw)(self.model)).get_trace(
                *self.args, **self.kwargs
            )
        return {name: t(trace.nodes[name]["value"]) for name, t in self.transforms.items()}

    def prior_covariance(self) -> np.ndarray:
        """Covariance of the flat `z` under the prior, as `Target.prior_covariance` has it.

        Parameters of priors are constant when they come out the same at two points.
        """
        here, there = self._at_two_points()
        blocks: dict[str, torch.Tensor] = {}
        for name, z in self.start.items():
            exact = _normal_covariance(here.nodes[name]["fn"], z.shape)
            again = _normal_covariance(there.nodes[name]["fn"], z.shape)
            unknown = torch.full((z.numel(),), torch.nan, dtype=z.dtype)
            blocks[name] = (
                unknown if exact is None else torch.where(exact == again, exact, torch.nan)
            )
        if any(block.isnan().any() for block in blocks.values()):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                draws = [self.prior_draw() for _ in range(_PRIOR_DRAWS)]
            for name, block in blocks.items():
                spread = torch.stack([draw[name].reshape(-1) for draw in draws]).var(0)
                other = spread if block.ndim == 1 else spread.diag()
                blocks[name] = torch.where(block.isnan(), other, block)
        return _block_diagonal([blocks[name] for name in sorted(blocks)]).cpu().numpy()

    def _at_two_points(self) -> list[Any]:
        """Traces at two points: parameters that do not differ are taken for constant."""
        points = (self.start, {name: z + 0.3 for name, z in self.start.items()})
        with torch.no_grad():
            return [
                self._conditioned({name: t.inv(z[name]) for name, t in self.transforms.items()})
                for z in points
            ]

    def _conditioned(self, values: Tensors) -> Any:
        model = poutine.condition(self.model, values)
        with poutine.block():
            return poutine.trace(model).get_trace(*self.args, **self.kwargs)

    # --- recordings --------------------------------------------------------------------------

    def recording(self, name: str) -> Recording:
        """The recording of one of the functions above."""
        if name == "potential_energy":
            potential_fn = self.potential_fn
            return record(lambda z: {"potential_energy": potential_fn(z)}, self.start)
        if name == "unconstrain":
            return record(self.unconstrain, {n: self.values[n] for n in self.transforms})
        return record(getattr(self, name), self.start)


class _Recorded:
    """A function of a `Target`, recorded for the data that it is called with."""

    def __init__(self, posterior: Posterior, name: str) -> None:
        self.posterior, self.name = posterior, name
        self.data = _fingerprint(posterior.args, posterior.kwargs)
        self.program: tuple[Program, tuple[Array, ...]] | None = None

    def __call__(self, z: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        data = _fingerprint(args, kwargs)
        if self.program is None or data != self.data:
            if data != self.data:
                p = self.posterior
                self.posterior = Posterior(p.model, args, kwargs)
                self.data = data
            recording = self.posterior.recording(self.name)
            # under a JAX transformation too, the constants are values
            with jax.ensure_compile_time_eval():
                self.program = recording.program, tuple(map(to_jax, recording.constants))
        program, constants = self.program
        found = program.evaluate(z, constants)
        return found["potential_energy"] if self.name == "potential_energy" else found


def _fingerprint(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """What tells data from other data: the objects, and for tensors their version."""
    return [len(args), *sorted(kwargs), *map(_Same, tree_leaves((args, sorted(kwargs.items()))))]


class _Same:
    """Equal only for the same object, unchanged."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf
        self.version = leaf._version if isinstance(leaf, torch.Tensor) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        if isinstance(self.leaf, (int, float, str, bool, type(None))):
            return type(self.leaf) is type(other.leaf) and self.leaf == other.leaf
        return self.leaf is other.leaf and self.version == other.version


def _family(distribution: Any) -> str:
    distribution = _unwrapped(distribution)
    while isinstance(distribution, MaskedDistribution):
        distribution = _unwrapped(distribution.base_dist)
    return type(distribution).__name__


def _unwrapped(distribution: Any) -> Any:
    """The distribution without the wrappers that expand it or group its dimensions."""
    while isinstance(distribution, (torch.distributions.Independent, ExpandedDistribution)):
        distribution = distribution.base_dist
    return distribution


def _mean_and_covariance(distribution: Any) -> tuple[torch.Tensor, torch.Tensor]:
    base = _unwrapped(distribution)
    while isinstance(base, MaskedDistribution):
        base = _unwrapped(base.base_dist)
    if isinstance(base, MultivariateNormal) and not distribution.batch_shape:
        return base.mean, base.covariance_matrix
    # of the location: the inverse Fisher information
    if isinstance(base, StudentT):
        return base.loc, base.scale**2 * (base.df + 3) / (base.df + 1)
    if isinstance(base, Cauchy):
        return base.loc, 2 * base.scale**2
    return distribution.mean, distribution.variance


def _normal_covariance(distribution: Any, shape: torch.Size) -> torch.Tensor | None:
    """Covariance of a normal distribution; of a mixture of them, that within the components."""
    base = _unwrapped(distribution)
    batched = bool(distribution.batch_shape)
    if isinstance(base, MixtureSameFamily):
        parts = _unwrapped(base.component_distribution)
        weights = base.mixture_distribution.probs
        if isinstance(parts, MultivariateNormal) and not batched:
            return torch.einsum("k,kij->ij", weights, parts.covariance_matrix)
        if isinstance(parts, Normal):
            events = len(base.event_shape)
            weights = weights.reshape(*weights.shape, *(1,) * events)
            variance = (weights * base.component_distribution.variance).sum(-1 - events)
            return variance.expand(shape).reshape(-1)
        return None
    if isinstance(base, MultivariateNormal):
        if not batched:
            return base.covariance_matrix
        width = shape[-1]
        every = base.covariance_matrix.expand(*shape, width).reshape(-1, width, width)
        return torch.block_diag(*every)
    if isinstance(base, Normal):
        return base.variance.expand(shape).reshape(-1)
    return None


def _block_diagonal(blocks: list[torch.Tensor]) -> torch.Tensor:
    """The vectors joined, or the matrix, if any block is one."""
    if all(block.ndim == 1 for block in blocks):
        return torch.cat(blocks)
    return torch.block_diag(*(b.diag() if b.ndim == 1 else b for b in blocks))


def _innermost(support: Any) -> Any:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def _readable(support: Any) -> str:
    return type(_innermost(support)).__name__.lstrip("_")


def _bounds(support: Any) -> dict[str, Any]:
    """The tensors that a constraint is made of."""
    return {
        name: value
        for name, value in vars(_innermost(support)).items()
        if isinstance(value, torch.Tensor)
    }
