"""Distributions whose normalising constant is unknown, but from which data can be simulated.

A density f_theta(x) / Z(theta) with an unknown Z cannot go into NUTS; `ExchangeMH` needs f and
draws of x alone. A distribution of your own is a subclass of `Intractable` with `stats`,
`log_f_stats` and `simulate`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.distributions import Distribution
from numpyro.distributions.util import validate_sample

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.target import Array


class Simulation(NamedTuple):
    """Simulated values, and what they cost."""

    value: Array  # shape + event_shape
    effort: Array  # shape: work done, in the units of the distribution
    overflow: Array  # shape: whether the work reached its limit, so that the value is no draw


class Intractable(Distribution):
    """Base class of distributions with an unknown normalising constant.

    `log_f(x)` is the log density without its constant; `simulate(key)` draws x, exactly if `exact`.
    `log_prob` raises unless `has_normalizer`, so that no sampler takes one for the other.

    Attributes
    ----------
    exact : bool
        Whether `simulate` draws from the distribution itself, and not from a Markov chain of
        finite length.
    has_normalizer : bool
        Whether `log_normalizer` is computed.

    Raises
    ------
    ppl_ext.errors.UnsupportedModelError
        By `log_prob`, when the normalising constant is not known.

    Examples
    --------
    >>> import jax
    >>> from ppl_ext.numpyro import Graph, Ising
    >>> x = Ising(0.3, 0.0, Graph.lattice(20, 20))
    >>> simulation = x.simulate(jax.random.key(0))
    >>> simulation.value.shape, bool(simulation.overflow), x.has_normalizer
    ((20, 20), False, False)
    >>> float(x.log_f(simulation.value)) == float(0.3 * x.stats(simulation.value)[0])
    True
    """

    exact: bool = True
    has_normalizer: bool = False

    @abstractmethod
    def stats(self, value: Array) -> Array:
        """What `log_f` needs to know of a value: sufficient statistics, or the value itself.

        Shape (...) + `event_shape` -> (..., k).
        """

    @abstractmethod
    def log_f_stats(self, stats: Array) -> Array:
        """Log density without its constant, differentiable in the parameters: (..., k) -> (...)."""

    @abstractmethod
    def simulate(self, key: Array, shape: tuple[int, ...] | None = None, length: int = 1) -> Any:
        """`Simulation` of independent values.

        `shape` is a batch shape to which that of the distribution is expanded (`None`: as it is).
        A simulator that is not exact runs `length` times as long.
        """

    def log_normalizer(self) -> Array:
        """Log of the normalising constant, shape `batch_shape`, if `has_normalizer`."""
        raise UnsupportedModelError(
            f"The normalising constant of {type(self).__name__} depends on its parameters and is "
            "not known here, so that there is no log density: no NUTS, no log_likelihood, no loo. "
            "Sample the parameters with ppl_ext.numpyro.ExchangeMH."
        )

    def log_f(self, value: Array) -> Array:
        """Log density without its constant: (...) + `event_shape` -> (...)."""
        return self.log_f_stats(self.stats(value))

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        assert key is not None
        return self.simulate(key, (*sample_shape, *self.batch_shape)).value

    @validate_sample
    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        return self.log_f(value) - self.log_normalizer()

    def _simulate_each(
        self,
        one: Callable[[Array], Simulation],
        key: Array,
        shape: tuple[int, ...] | None,
    ) -> Simulation:
        """`one(key)` for each entry of `shape`, for distributions without a batch shape."""
        if not shape:
            return one(key)
        found = jax.vmap(one)(jax.random.split(key, math.prod(shape)))
        return jax.tree.map(lambda leaf: jnp.reshape(leaf, shape + leaf.shape[1:]), found)
