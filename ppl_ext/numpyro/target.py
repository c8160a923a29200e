"""NumPyro model -> `Target`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import block_diag
from numpyro import validation_enabled
from numpyro.distributions import (
    Cauchy,
    Delta,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    Unit,
    constraints,
)
from numpyro.distributions.transforms import biject_to
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer.gibbs import prototype_trace
from numpyro.infer.util import constrain_fn, potential_energy, unconstrain_fn
from numpyro.primitives import Messenger

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro.intractable import Intractable
from ppl_ext.target import (
    Array,
    Plate,
    PyTree,
    Site,
    Target,
    model_without_observation,
    site_without_mean,
)

# draws of the prior for the scales of what is not normal
_PRIOR_DRAWS = 1000

_BOUNDS = ("lower_bound", "upper_bound")
_VALUE_NEEDED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def target(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Target:
    """Look at a NumPyro model once and return its `Target`.

    The data given here are used for shapes only; every callable of the result takes the data
    again. Models with discrete sites, supports without a bijection to the real line or subsampled
    plates are described too: it is the kernel that refuses them, with their names.

    Raises
    ------
    TypeError
        When `model` is not callable.
    UnsupportedModelError
        When a plate of the model is empty.

    Examples
    --------
    >>> import numpyro, numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
    ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    ...     numpyro.sample("y", dist.Normal(mu, sigma), obs=y)
    >>> t = target(model, 0.5)
    >>> t.size, [site.name for site in t.latent]
    (2, ['mu', 'sigma'])
    """
    if not callable(model):
        raise TypeError(f"`model` must be a callable NumPyro program, got {type(model).__name__}.")
    # Staged, the model's operations are not run, which would compile each of them by itself. That
    # takes 25 times longer, but also works where Python asks for the value of something drawn:
    # the rows of NumPy data that belong to a minibatch, say.
    try:
        sites, plates, params = _staged(_look, model, args, kwargs)
        if params:
            sites, plates, params = _look(model, args, kwargs)
    except _VALUE_NEEDED:
        sites, plates, params = _look(model, args, kwargs)
    if params:
        # for example the weights of a neural network module: fixed at their initial values
        model = substitute(model, data=params)
    return Target(
        language="numpyro",
        sites=sites,
        plates=plates,
        structure={
            site.name: site.unconstrained_shape
            for site in sites
            if site.unconstrained_shape is not None
        },
        potential_energy=partial(_potential_energy, model),
        constrain_sites=partial(_constrain, model),
        unconstrain_sites=partial(_unconstrain, model),
        gaussian_prior=partial(_gaussian_prior, model, sites),
        observation=partial(_observation, model),
        prior_covariance=partial(_prior_covariance, model, sites),
        prior_draw=partial(_prior_draw, model),
        log_prior=partial(_log_prior, model),
        process=_process(model, sites, args, kwargs),
        log_base=partial(_log_base, model),
        log_likelihood_terms=partial(_log_likelihood_terms, model),
        observed=partial(_observed, model),
        log_tractable=partial(_log_tractable, model),
        intractable=partial(_intractable, model),
    )


def _look(
    model: Callable, args: tuple, kwargs: dict
) -> tuple[tuple[Site, ...], tuple[Plate, ...], dict[str, Any]]:
    """Return the sites, the plates and the initial values of the parameters of a model."""
    try:
        messages = prototype_trace(model, jax.random.key(0), args, kwargs)
    except AssertionError as error:
        if "size of plate" not in str(error):
            raise
        raise UnsupportedModelError(
            f"A plate of the model has size 0 ({error}): the data are empty. Check the data passed "
            "to it."
        ) from error
    sites = tuple(
        _describe(message)
        for message in messages.values()
        if message["type"] == "deterministic"
        # a `factor` is a sample site of the Unit distribution, without a value
        or (message["type"] == "sample" and not isinstance(message["fn"], Unit))
    )
    plates = tuple(
        Plate(name, message["args"][0], message["args"][1] or message["args"][0])
        for name, message in messages.items()
        if message["type"] == "plate"
    )
    params = {n: m["value"] for n, m in messages.items() if m["type"] in ("param", "mutable")}
    return sites, plates, params


def _process(model: Callable, sites: tuple[Site, ...], args: tuple, kwargs: dict) -> str | None:
    """How `DPSlice` would move the atoms, if the model draws from a process; or why it cannot."""
    if not any(site.distribution in ("Partition", "PitmanYorPartition") for site in sites):
        return None
    # imported here: the module reads models by this one's functions
    from ppl_ext.numpyro.mixture import look

    try:
        return look(model, args, kwargs).path
    except UnsupportedModelError as error:
        return f"no: {error}"


def _staged(function: Callable, *args: Any) -> Any:
    """Return what `function` returns, without running the JAX operations in it."""
    found = []
    jax.eval_shape(lambda: found.append(function(*args)))
    return found[0]


def _describe(message: Mapping[str, Any]) -> Site:
    name, shape = message["name"], np.shape(message["value"])
    plates = tuple(frame.name for frame in reversed(message.get("cond_indep_stack") or ()))
    if message["type"] == "deterministic":
        return Site(name, "deterministic", shape, plates=plates)
    distribution = message["fn"]
    support = distribution.support
    common: dict[str, Any] = dict(
        distribution=family(distribution),
        support=_readable(support),
        discrete=bool(support is not None and support.is_discrete),
        event_dim=distribution.event_dim,
        plates=plates,
    )
    base = bare(distribution)
    if isinstance(base, Intractable):
        common["normalizer"] = "computed" if base.has_normalizer else "unknown"
    if message["is_observed"]:
        return Site(name, "observed", shape, **common)
    if common["discrete"] or isinstance(distribution, Delta):
        return Site(name, "latent", shape, **common)
    try:
        # NumPyro maps a circle to the real line, but cut open at pi, where chains would stall
        bijection = None if _innermost(support) is constraints.circular else biject_to(support)
    except NotImplementedError:
        bijection = None
    if bijection is None:
        return Site(name, "latent", shape, **common)
    unconstrained = tuple(bijection.inverse_shape(shape))
    dynamic = any(not isinstance(getattr(support, b, 0.0), (int, float)) for b in _BOUNDS)
    return Site(name, "latent", shape, unconstrained, dynamic_support=dynamic, **common)


def family(distribution: Any) -> str:
    """Name of a distribution without the wrappers that expand, mask or group it."""
    return type(bare(distribution)).__name__


def bare(distribution: Any) -> Any:
    """The distribution without the wrappers that expand, mask or group it."""
    while isinstance(distribution, (Independent, ExpandedDistribution, MaskedDistribution)):
        distribution = distribution.base_dist
    return distribution


def unwrapped(distribution: Any) -> Any:
    """The distribution without the wrappers that expand it or group its dimensions."""
    while isinstance(distribution, (Independent, ExpandedDistribution)):
        distribution = distribution.base_dist
    return distribution


def peeled(distribution: Any) -> tuple[Any, Array]:
    """`bare` distribution, and the product of the masks, of the shape of a value."""
    shape = distribution.shape()
    weight = jnp.ones(shape)
    while True:
        distribution = unwrapped(distribution)
        if not isinstance(distribution, MaskedDistribution):
            return distribution, weight
        mask = jnp.asarray(distribution._mask)
        mask = jnp.reshape(mask, mask.shape + (1,) * distribution.event_dim)
        # the mask is of the shape of the distribution at this depth
        weight = weight * jnp.broadcast_to(mask, shape)
        distribution = distribution.base_dist


def _innermost(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _readable(support: Any) -> str:
    return type(_innermost(support)).__name__.lstrip("_")


def _potential_energy(model: Callable, z: PyTree, *args: Any, **kwargs: Any) -> Array:
    return potential_energy(model, args, kwargs, z)


def _constrain(model: Callable, z: PyTree, *args: Any, **kwargs: Any) -> dict[str, Array]:
    # the whole model is replayed, so that supports which depend on other sites come out right;
    # what the sites do not need (the likelihood) is removed by XLA
    # and so are sites that another block of Gibbs owns, which the replay may draw at random
    seeded = seed(model, jax.random.key(0))
    return constrain_fn(seeded, args, kwargs, z, return_deterministic=True)


def _unconstrain(model: Callable, values: PyTree, *args: Any, **kwargs: Any) -> PyTree:
    return unconstrain_fn(model, args, kwargs, values)


def _with_unknown_values(
    model: Callable, latent: Iterable[Site], args: tuple, kwargs: dict
) -> dict[str, Any]:
    """Messages of a replay with NaN for every latent value.

    A parameter that depends on one of them comes out as NaN.
    """
    unknown = {site.name: jnp.full(site.shape, jnp.nan) for site in latent}
    with validation_enabled(False):
        seeded = seed(substitute(model, data=unknown), jax.random.key(0))
        return trace(seeded).get_trace(*args, **kwargs)


def _gaussian_prior(
    model: Callable, sites: tuple[Site, ...], *args: Any, **kwargs: Any
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Means and precisions of the sites whose prior is normal with constant parameters."""
    latent = [site for site in sites if site.unconstrained_shape is not None]

    @jax.jit  # so that the likelihood, which is not needed, is removed and not run
    def replay() -> tuple[dict[str, Array], dict[str, Array]]:
        messages = _with_unknown_values(model, latent, args, kwargs)
        means, precisions = {}, {}
        for site in latent:
            message = messages[site.name]
            normal = unwrapped(message["fn"])
            mean = precision = jnp.zeros(site.unconstrained_shape)
            if isinstance(normal, Normal) and message.get("scale") is None:
                loc, scale = jnp.broadcast_arrays(normal.loc, normal.scale)
                known = jnp.isfinite(loc) & jnp.isfinite(scale) & (scale > 0)
                mean = jnp.broadcast_to(jnp.where(known, loc, 0.0), site.shape)
                precision = jnp.broadcast_to(jnp.where(known, scale, jnp.inf) ** -2.0, site.shape)
            means[site.name], precisions[site.name] = mean, precision
        return means, precisions

    return replay()


def _observation(model: Callable, z: PyTree, *args: Any, **kwargs: Any) -> tuple[Array, Array]:
    """Means of the observed sites, flat, and their covariance (or the inverse Fisher matrix)."""
    seeded = seed(model, jax.random.key(0))
    values = constrain_fn(seeded, args, kwargs, z)
    messages = trace(substitute(seeded, data=values)).get_trace(*args, **kwargs)
    means, covariances = [], []
    for name, message in messages.items():
        distribution = message.get("fn")
        if message["type"] != "sample" or not message["is_observed"]:
            continue
        if isinstance(distribution, Unit):
            continue
        shape = jnp.shape(message["value"])
        try:
            mean, covariance = map(jnp.asarray, _mean_and_covariance(distribution))
        except (NotImplementedError, AttributeError) as error:
            raise site_without_mean(name, family(distribution)) from error
        means.append(jnp.broadcast_to(mean, shape).ravel())
        if covariance.ndim != 2 or distribution.batch_shape or len(shape) != 1:
            covariance = jnp.broadcast_to(covariance, shape).ravel()
        covariances.append(covariance)
    if not means:
        raise model_without_observation()
    return jnp.concatenate(means), _block_diagonal(covariances)


def _mean_and_covariance(distribution: Any) -> tuple[Any, Any]:
    base = unwrapped(distribution)
    while isinstance(base, MaskedDistribution):
        base = unwrapped(base.base_dist)
    if isinstance(base, MultivariateNormal) and not distribution.batch_shape:
        return base.mean, base.covariance_matrix
    # of the location: the inverse Fisher information
    if isinstance(base, StudentT):
        return base.loc, base.scale**2 * (base.df + 3) / (base.df + 1)
    if isinstance(base, Cauchy):
        return base.loc, 2 * base.scale**2
    return distribution.mean, distribution.variance


def _block_diagonal(blocks: list[Array]) -> Array:
    """The vectors joined, or the matrix, if any block is one."""
    if all(block.ndim == 1 for block in blocks):
        return jnp.concatenate(blocks)
    return block_diag(*(jnp.diag(b) if b.ndim == 1 else b for b in blocks))


def _prior_covariance(model: Callable, sites: tuple[Site, ...], *args: Any, **kwargs: Any) -> Array:
    """Covariance of the unconstrained sites under the prior, in the order of their names."""
    latent = {site.name: site for site in sites if site.unconstrained_shape is not None}

    @jax.jit  # so that the likelihood, which is not needed, is removed and not run
    def replay() -> Array:
        known = _with_unknown_values(model, latent.values(), args, kwargs)
        draws = jax.vmap(lambda key: _prior_draw(model, key, *args, **kwargs))(
            jax.random.split(jax.random.key(0), _PRIOR_DRAWS)
        )
        blocks = []
        for name in sorted(latent):
            spread = jnp.var(draws[name].reshape(_PRIOR_DRAWS, -1), 0)
            exact = _normal_covariance(known[name]["fn"], latent[name].shape)
            if exact is None:
                blocks.append(spread)
            elif exact.ndim == 1:
                blocks.append(jnp.where(jnp.isfinite(exact), exact, spread))
            else:
                blocks.append(jnp.where(jnp.isfinite(exact), exact, jnp.diag(spread)))
        return _block_diagonal(blocks)

    return replay()


def _normal_covariance(distribution: Any, shape: tuple[int, ...]) -> Array | None:
    """Covariance of a normal distribution; of a mixture of them, that within the components."""
    base = unwrapped(distribution)
    if isinstance(base, MixtureSameFamily):
        parts, weights = unwrapped(base.component_distribution), base.mixing_distribution.probs
        if isinstance(parts, MultivariateNormal) and not distribution.batch_shape:
            return jnp.einsum("k,kij->ij", weights, parts.covariance_matrix)
        if isinstance(parts, Normal):
            # components are the last batch dimension
            variance = base.component_distribution.variance
            axis = base.mixture_dim - base.event_dim
            weights = weights.reshape(weights.shape + (1,) * base.event_dim)
            variance = jnp.sum(weights * variance, axis)
            return jnp.broadcast_to(variance, shape).ravel()
        return None
    if isinstance(base, MultivariateNormal):
        # XLA would multiply constants while it compiles, which takes minutes at 1,000 dimensions
        root = jax.lax.optimization_barrier(base.scale_tril)
        covariance = root @ jnp.swapaxes(root, -1, -2)
        if not distribution.batch_shape:
            return covariance
        count = int(np.prod(shape[:-1]))
        blocks = jnp.broadcast_to(covariance, (*shape[:-1], *covariance.shape[-2:]))
        return block_diag(*blocks.reshape(count, *covariance.shape[-2:]))
    if isinstance(base, Normal):
        return jnp.broadcast_to(base.variance, shape).ravel()
    return None


def _log_prior(model: Callable, z: PyTree, *args: Any, **kwargs: Any) -> Array:
    jacobians = {f"_{name}_log_det" for name in z}

    def hidden(message: Mapping[str, Any]) -> bool:
        observed = message["type"] == "sample" and message["is_observed"]
        return observed and message["name"] not in jacobians

    return -potential_energy(block(model, hide_fn=hidden), args, kwargs, z)


def _prior_draw(model: Callable, key: Array, *args: Any, **kwargs: Any) -> PyTree:
    """Unconstrained values of a draw from the prior; an improper one is drawn from (-2, 2)."""
    messages = prototype_trace(model, key, args, kwargs)
    values = {
        name: message["value"]
        for name, message in messages.items()
        if message["type"] == "sample" and not message["is_observed"]
    }
    return unconstrain_fn(model, args, kwargs, values)


# --- minibatches ---------------------------------------------------------------------------------


class at_indices(Messenger):
    """Handler that gives a plate these indices; all of them in their order by default.

    Unlike with `numpyro.handlers.substitute`, their number may be any. Arrays of NumPy among the
    arguments become those of JAX, which traced indices can select.
    """

    def __init__(self, fn: Callable[..., Any], plate: str, indices: Array | None = None) -> None:
        self._plate, self._indices = plate, indices
        super().__init__(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_arrays(args, kwargs)
        return super().__call__(*args, **kwargs)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] == self._plate:
            size = msg["args"][0]
            indices = jnp.arange(size) if self._indices is None else self._indices
            msg["value"], msg["args"] = indices, (size, len(indices))


def as_arrays(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments with JAX arrays in place of those of NumPy."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs)
    )


class Observed(NamedTuple):
    """An observed site inside a plate, with the wrappers of its distribution taken off."""

    distribution: Any
    value: Array
    shape: tuple[int, ...]  # of one value for each number of the site
    axis: int  # of the plate in `shape`
    weight: Array  # of the log density of each number: masks, and scales of the user


def _log_base(model: Callable, z: PyTree, plate: str, *args: Any, **kwargs: Any) -> Array:
    def inside(message: Mapping[str, Any]) -> bool:
        return _is_datum(message, plate)

    # the sites outside do not depend on the indices
    model = at_indices(model, plate, jnp.zeros(1, jnp.int32))
    return -potential_energy(block(model, hide_fn=inside), args, kwargs, z)


def _is_datum(message: Mapping[str, Any], plate: str) -> bool:
    frames = message.get("cond_indep_stack") or ()
    observed = message["type"] == "sample" and message["is_observed"]
    return observed and any(frame.name == plate for frame in frames)


def _data_messages(
    model: Callable, z: PyTree, plate: str, indices: Array, args: tuple, kwargs: dict
) -> dict[str, Any]:
    """Messages of the observed sites and factors inside the plate.

    Each has its plate's `axis` in the batch shape, and as `scale` the user's own alone.
    """
    model = seed(at_indices(model, plate, indices), jax.random.key(0))
    values = constrain_fn(model, args, kwargs, z)
    messages = trace(substitute(model, data=values)).get_trace(*args, **kwargs)
    minibatch_scale = messages[plate]["args"][0] / len(indices)
    data = {name: message for name, message in messages.items() if _is_datum(message, plate)}
    for message in data.values():
        (frame,) = (f for f in message["cond_indep_stack"] if f.name == plate)
        message["axis"] = len(message["fn"].batch_shape) + frame.dim
        scale = message["scale"]
        message["scale"] = 1.0 if scale is None else scale / minibatch_scale
    return data


def _log_likelihood_terms(
    model: Callable, z: PyTree, plate: str, indices: Array, *args: Any, **kwargs: Any
) -> Array:
    total = jnp.zeros(len(indices))
    for message in _data_messages(model, z, plate, indices, args, kwargs).values():
        shape = message["fn"].batch_shape
        terms = message["fn"].log_prob(message["value"]) * message["scale"]
        terms = jnp.moveaxis(jnp.broadcast_to(terms, shape), message["axis"], 0)
        total = total + terms.reshape(len(indices), -1).sum(1)
    return total


def _observed(
    model: Callable, z: PyTree, plate: str, indices: Array, *args: Any, **kwargs: Any
) -> dict[str, Observed]:
    found = {}
    for name, message in _data_messages(model, z, plate, indices, args, kwargs).items():
        distribution = message["fn"]
        shape = distribution.shape()
        scale = jnp.reshape(
            message["scale"], jnp.shape(message["scale"]) + (1,) * distribution.event_dim
        )
        distribution, weight = peeled(distribution)
        weight = weight * jnp.broadcast_to(scale, shape)
        value = message["value"]
        found[name] = Observed(distribution, value, shape, message["axis"], weight)
    return found


# --- unknown normalising constants ---------------------------------------------------------------


class Likelihood(NamedTuple):
    """An observed site with an `Intractable` distribution, wrappers taken off."""

    distribution: Intractable
    value: Array  # batch_shape + event_shape of the distribution
    weight: Array  # batch_shape: 0 where a log density is masked, else 1


def _is_intractable(message: Mapping[str, Any]) -> bool:
    observed = message["type"] == "sample" and message["is_observed"]
    return observed and isinstance(bare(message["fn"]), Intractable)


def without_intractable(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model with its intractable likelihoods hidden."""
    return block(model, hide_fn=_is_intractable)


def _log_tractable(model: Callable, z: PyTree, *args: Any, **kwargs: Any) -> Array:
    return -potential_energy(without_intractable(model), args, kwargs, z)


def _intractable(model: Callable, z: PyTree, *args: Any, **kwargs: Any) -> dict[str, Likelihood]:
    seeded = seed(model, jax.random.key(0))
    values = constrain_fn(seeded, args, kwargs, z)
    messages = trace(substitute(seeded, data=values)).get_trace(*args, **kwargs)
    found = {}
    for name, message in messages.items():
        if not _is_intractable(message):
            continue
        if message["scale"] is not None:
            raise UnsupportedModelError(
                f"The log density of site '{name}' is scaled: a power of it has another "
                "normalising constant, for which nothing can be simulated. Remove the `scale`."
            )
        base, weight = peeled(message["fn"])
        # one for each log density: the numbers of an event have the same
        weight = weight[(..., *(0,) * base.event_dim)]
        found[name] = Likelihood(base, jnp.asarray(message["value"]), weight)
    return found
