"""The target distribution: all that an algorithm may know about a model.

A front end builds a `Target` from a model of its language; algorithms, diagnostics and
`explain` read nothing else. Data are arguments of every callable, never part of a closure, so
that one `Target` serves all data sets of the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ppl_ext.errors import UnsupportedModelError

Array = jax.Array
PyTree = Any


@dataclass(frozen=True)
class Plate:
    """A plate of the model: `subsample_size < size` when the model draws minibatches."""

    name: str
    size: int
    subsample_size: int

    @property
    def subsampled(self) -> bool:
        return self.subsample_size < self.size


@dataclass(frozen=True)
class Site:
    """One named variable of the model, described by static facts only.

    `shape` is the shape of the value a user sees, `unconstrained_shape` the shape on the real
    line (`None` unless the site is a continuous latent variable whose support has a bijection to
    it). `dynamic_support` tells that
    the support depends on the value of another site. `normalizer`: of the distribution's density,
    "closed" form, "computed" or "unknown", as for `ppl_ext.numpyro.intractable`.
    """

    name: str
    kind: Literal["latent", "observed", "deterministic"]
    shape: tuple[int, ...]
    unconstrained_shape: tuple[int, ...] | None = None
    distribution: str = ""
    support: str = ""
    discrete: bool = False
    dynamic_support: bool = False
    event_dim: int = 0
    plates: tuple[str, ...] = ()
    normalizer: Literal["closed", "computed", "unknown"] = "closed"


@dataclass(frozen=True)
class Target:
    """A log density on R^size with the maps between that space and the model's own sites.

    Flat vectors hold the sites in the order of their sorted names.

    Parameters
    ----------
    language : str
        `"numpyro"`, `"pyro"`, or `"potential_fn"` when there is no model.
    sites, plates : tuple
        What the model declares, in the order of the model.
    structure : Mapping or PyTree of tuple
        Shapes of the unconstrained values, in the structure of a kernel state's `z`.
    potential_energy : callable
        `potential_energy(z, *args, **kwargs)`: minus the log density of the unconstrained `z`
        (a PyTree), Jacobian included, up to a constant.
    constrain_sites : callable
        `constrain_sites(z, *args, **kwargs)`: values of latent and deterministic sites.
    unconstrain_sites : callable
        `unconstrain_sites(values, *args, **kwargs)`: inverse of `constrain_sites`.
    gaussian_prior : callable, optional
        `gaussian_prior(*args, **kwargs)`: means and precisions, each in the structure of `z`, of
        the sites whose prior is normal with constant parameters; zeros for the other sites.
    observation : callable, optional
        `observation(z, *args, **kwargs)`: mean and noise covariance of all observed numbers at the
        unconstrained `z`, in the order of the model: shape (n,), and (n,) or (n, n). Where a
        distribution has no covariance, the inverse Fisher information of its mean.
    prior_covariance : callable, optional
        `prior_covariance(*args, **kwargs)`: covariance of the flat unconstrained vector under the
        prior, shape (size,) or (size, size): exact for normal priors with constant parameters, for
        mixtures of them within the components, else from draws and without correlations.
    prior_draw : callable, optional
        `prior_draw(key, *args, **kwargs)`: unconstrained draw from the prior; a site with an
        improper prior is uniform on (-2, 2).
    process : str, optional
        Where the model draws from a Dirichlet or Pitman-Yor process: how its atoms can be moved,
        or, after "no: ", why the model cannot be sampled so.
    log_prior : callable, optional
        `log_prior(z, *args, **kwargs)`: log density of the unconstrained `z` under the prior alone,
        with the Jacobian and without factors.
    log_base : callable, optional
        `log_base(z, plate, *args, **kwargs)`: log density of the unconstrained `z`, Jacobian
        included, without the observed sites and factors inside the plate of this name.
    log_likelihood_terms : callable, optional
        `log_likelihood_terms(z, plate, indices, *args, **kwargs)`: log likelihood of each datum of
        the plate in `indices`, shape (k,), without the scale of a minibatch.
    observed : callable, optional
        `observed(z, plate, indices, *args, **kwargs)`: the observed sites inside the plate by name,
        each with its distribution and values at the `indices`.
    log_tractable : callable, optional
        `log_tractable(z, *args, **kwargs)`: log density of the unconstrained `z`, Jacobian
        included, without the observed sites whose normaliser is not in closed form.
    intractable : callable, optional
        `intractable(z, *args, **kwargs)`: those sites by name, each with its distribution and
        value.
    """

    language: str
    sites: tuple[Site, ...]
    plates: tuple[Plate, ...]
    structure: PyTree
    potential_energy: Callable[..., Array]
    constrain_sites: Callable[..., dict[str, Array]]
    unconstrain_sites: Callable[..., PyTree]
    gaussian_prior: Callable[..., tuple[PyTree, PyTree]] | None = None
    observation: Callable[..., tuple[Array, Array]] | None = None
    prior_covariance: Callable[..., Array] | None = None
    prior_draw: Callable[..., PyTree] | None = None
    log_prior: Callable[..., Array] | None = None
    process: str | None = None
    log_base: Callable[..., Array] | None = None
    log_likelihood_terms: Callable[..., Array] | None = None
    observed: Callable[..., dict[str, Any]] | None = None
    log_tractable: Callable[..., Array] | None = None
    intractable: Callable[..., dict[str, Any]] | None = None

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        return sum(math.prod(shape) for shape in self._shapes)

    @property
    def latent(self) -> tuple[Site, ...]:
        """The latent sites, discrete ones included."""
        return tuple(site for site in self.sites if site.kind == "latent")

    def log_density(self, z: Array, *args: Any, **kwargs: Any) -> Array:
        """Log density of the flat unconstrained vector `z`, shape (size,), with the Jacobian."""
        return -self.potential_energy(self.unravel(z), *args, **kwargs)

    def constrain(self, z: Array, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Values of the latent and deterministic sites at the flat vector `z`."""
        return self.constrain_sites(self.unravel(z), *args, **kwargs)

    def unconstrain(self, values: Mapping[str, Array], *args: Any, **kwargs: Any) -> Array:
        """Flat unconstrained vector, shape (size,), of constrained latent `values`.

        Other entries of `values`, such as deterministic sites, are ignored.

        Raises
        ------
        ValueError
            When a latent site is missing from `values`.
        """
        names = [site.name for site in self.latent if site.unconstrained_shape is not None]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"`values` lacks latent sites {missing}; found {sorted(values)}.")
        latent = {name: values[name] for name in names}
        return self.ravel(self.unconstrain_sites(latent, *args, **kwargs))

    def ravel(self, z: PyTree) -> Array:
        """Flat vector of unconstrained site values."""
        leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(z)]
        return jnp.concatenate(leaves) if leaves else jnp.zeros(0)

    def unravel(self, z: Array) -> PyTree:
        """Unconstrained site values of a flat vector."""
        leaves, start = [], 0
        for shape in self._shapes:
            stop = start + math.prod(shape)
            leaves.append(jnp.reshape(z[start:stop], shape))
            start = stop
        return jax.tree.unflatten(self._treedef, leaves)

    def bind(self, *args: Any, **kwargs: Any) -> Target:
        """The same target with its data supplied: callables then take the position only."""
        return replace(
            self,
            potential_energy=_bound(self.potential_energy, args, kwargs),
            constrain_sites=_bound(self.constrain_sites, args, kwargs),
            unconstrain_sites=_bound(self.unconstrain_sites, args, kwargs),
            gaussian_prior=self.gaussian_prior and partial(self.gaussian_prior, *args, **kwargs),
            observation=self.observation and _bound(self.observation, args, kwargs),
            prior_covariance=self.prior_covariance
            and partial(self.prior_covariance, *args, **kwargs),
            prior_draw=self.prior_draw and _bound(self.prior_draw, args, kwargs),
            log_prior=self.log_prior and _bound(self.log_prior, args, kwargs),
            log_base=self.log_base and _bound(self.log_base, args, kwargs),
            log_likelihood_terms=self.log_likelihood_terms
            and _bound(self.log_likelihood_terms, args, kwargs),
            observed=self.observed and _bound(self.observed, args, kwargs),
            log_tractable=self.log_tractable and _bound(self.log_tractable, args, kwargs),
            intractable=self.intractable and _bound(self.intractable, args, kwargs),
        )

    def refusal_of_continuous_kernel(
        self, kernel: str, minibatch: bool = False, intractable: bool = False
    ) -> str | None:
        """Why a kernel that moves all continuous sites cannot take this model.

        With `minibatch` plates may be subsampled; with `intractable` normalisers be unknown.
        """
        pyro = self.language == "pyro"
        for site in self.sites:
            if site.normalizer == "unknown" and not intractable:
                return (
                    f"{kernel} needs log densities, but the normalising constant of site "
                    f"'{site.name}' ({site.distribution}) is not known. Use "
                    f"ppl_ext.{self.language}.ExchangeMH."
                )
        for site in self.latent:
            if site.discrete:
                way_out = (
                    f"It holds the labels of a process: use ppl_ext.{self.language}.DPSlice."
                    if self.process is not None
                    else "Sum it out of the model, or use pyro.infer.NUTS, which enumerates it."
                    if pyro
                    else "Sum it out of the model, or give it to a DiscreteGibbs block of "
                    "numpyro.infer.Gibbs beside this kernel."
                )
                return (
                    f"{kernel} moves continuous sites only, but site '{site.name}' is discrete "
                    f"({site.distribution}). {way_out}"
                )
            if site.distribution == "Delta":
                return (
                    f"Site '{site.name}' has a Delta distribution, which has no density. "
                    "Use a deterministic site for this value."
                )
            if site.unconstrained_shape is None:
                return (
                    f"Site '{site.name}' ({site.distribution}) has the support {site.support}, "
                    "which has no bijection to the real line. Reparametrise the site; for a "
                    "circular support use numpyro.infer.reparam.CircularReparam."
                )
        for plate in self.plates:
            if plate.subsampled and not minibatch:
                other = f", or use a minibatch kernel: ppl_ext.{self.language}.TunaMH (exact)"
                other += "" if pyro else " or numpyro.infer.HMCECS"
                return (
                    f"{kernel} evaluates all data, but plate '{plate.name}' draws "
                    f"{plate.subsample_size} of {plate.size} at random. Drop "
                    f"`subsample_size` (or set it to {plate.size}){other}."
                )
        for site in self.sites:
            if site.kind == "observed" and 0 in site.shape:
                return (
                    f"Observed site '{site.name}' is empty (shape {site.shape}). "
                    "Check the data passed to the model."
                )
        if self.size == 0:
            return "The model has no continuous latent site to sample."
        return None

    def check_continuous(self, kernel: str) -> None:
        """Raise `UnsupportedModelError` when `refusal_of_continuous_kernel` gives a reason."""
        reason = self.refusal_of_continuous_kernel(kernel)
        if reason is not None:
            raise UnsupportedModelError(reason)

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return jax.tree.leaves(self.structure, is_leaf=_is_shape)

    @property
    def _treedef(self) -> Any:
        return jax.tree.structure(self.structure, is_leaf=_is_shape)


def site_without_mean(name: str, family: str) -> UnsupportedModelError:
    """The error for an observed site from which no prediction can be read."""
    return UnsupportedModelError(
        f"Observed site '{name}' ({family}) has no mean or variance, from which the prediction of "
        "an operator could be read. Give the prediction as the mean of a Normal or StudentT site, "
        "or sample without correction."
    )


def model_without_observation() -> UnsupportedModelError:
    """The error for a model from which no prediction can be read."""
    return UnsupportedModelError(
        "The model has no observed site, from which the prediction of an operator could be read. "
        "Write the likelihood as a sample site with `obs=`, not as a factor."
    )


def potential_target(potential_fn: Callable[[PyTree], Array], z: PyTree) -> Target:
    """Target of a potential energy function without a model; `z` gives structure and shapes."""
    return Target(
        language="potential_fn",
        sites=tuple(
            Site(
                jax.tree_util.keystr(path) or "z",
                "latent",
                jnp.shape(leaf),
                jnp.shape(leaf),
                support="Real()",
            )
            for path, leaf in jax.tree_util.tree_leaves_with_path(z)
        ),
        plates=(),
        structure=jax.tree.map(jnp.shape, z),
        potential_energy=partial(_ignore_data, potential_fn),
        constrain_sites=_itself,
        unconstrain_sites=_itself,
    )


def _bound(function: Callable[..., Any], args: tuple, kwargs: dict) -> Callable[..., Any]:
    return lambda *position: function(*position, *args, **kwargs)


def _ignore_data(function: Callable[[PyTree], Array], z: PyTree, *_: Any, **__: Any) -> Array:
    return function(z)


def _itself(z: Any, *_: Any, **__: Any) -> Any:
    return z


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)
