"""Conway-Maxwell-Poisson: counts with less or more variance than Poisson's."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from numpyro.distributions import constraints
from numpyro.distributions.util import promote_shapes

from ppl_ext.arguments import check_count
from ppl_ext.numpyro.intractable import Intractable, Simulation
from ppl_ext.target import Array


class ConwayMaxwellPoisson(Intractable):
    """Conway-Maxwell-Poisson distribution, with independent rows.

    p(y) = (location^y / y!)^dispersion / Z,   y = 0, 1, 2, ...

    Parameters
    ----------
    location : float or array
        The mode is its integer part. The rate of the other parametrisation is
        location^dispersion.
    dispersion : float or array
        1: Poisson; larger: less variance than the mean; smaller: more.
    max_trials : int
        Of the rejection sampler; a draw that needs more counts as overflow.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Notes
    -----
    Draws are exact, by rejection from a Poisson distribution (dispersion >= 1) or a geometric one:
    Benson & Friel 2021, Bayesian Analysis 16(3), 905-931. Effort: trials. The normalising constant
    is an infinite series; there is no `log_prob`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from ppl_ext.numpyro import ConwayMaxwellPoisson
    >>> y = ConwayMaxwellPoisson(jnp.array([2.0, 5.0]), 2.0)
    >>> y.sample(jax.random.key(0), (10,)).shape
    (10, 2)
    """

    arg_constraints: ClassVar = {
        "location": constraints.positive,
        "dispersion": constraints.positive,
    }
    support = constraints.nonnegative_integer
    pytree_aux_fields = ("max_trials",)

    def __init__(
        self,
        location: Any,
        dispersion: Any,
        *,
        max_trials: int = 10_000,
        validate_args: bool | None = None,
    ) -> None:
        check_count("ConwayMaxwellPoisson", max_trials=max_trials)
        dtype = jnp.result_type(float)
        location = jnp.asarray(location, dtype)
        dispersion = jnp.asarray(dispersion, dtype)
        self.location, self.dispersion = promote_shapes(location, dispersion)
        self.max_trials = int(max_trials)
        shape = jnp.broadcast_shapes(location.shape, dispersion.shape)
        super().__init__(shape, (), validate_args=validate_args)

    def stats(self, value: Array) -> Array:
        value = jnp.asarray(value, self.location.dtype)
        return jnp.stack([value, -gammaln(value + 1)], -1)

    def log_f_stats(self, stats: Array) -> Array:
        return self.dispersion * (stats[..., 0] * jnp.log(self.location) + stats[..., 1])

    def simulate(self, key: Array, shape: tuple[int, ...] | None = None, length: int = 1) -> Any:
        """Values, and their effort: trials."""
        shape = self.batch_shape if shape is None else shape
        mu = jnp.broadcast_to(self.location, shape)
        nu = jnp.broadcast_to(self.dispersion, shape)
        over = nu < 1
        # the log density less its constant, and that of the proposal
        log_f = lambda y: nu * (y * jnp.log(mu) - gammaln(y + 1))  # noqa: E731
        success = 2 * nu / (2 * mu * nu + 1 + nu)
        log_fail = jnp.log1p(-success)
        log_g = lambda y: jnp.where(over, y * log_fail, y * jnp.log(mu) - gammaln(y + 1))  # noqa: E731
        # where their ratio is largest
        top = jnp.floor(jnp.where(over, mu * jnp.exp(-log_fail / nu), mu))
        bound = log_f(top) - log_g(top)

        def trial(carry: Any) -> Any:
            y, wanted, trials = carry
            key_poisson, key_geometric, key_accept = jax.random.split(
                jax.random.fold_in(key, trials.max()), 3
            )
            poisson = jax.random.poisson(key_poisson, mu).astype(mu.dtype)
            uniform = jax.random.uniform(key_geometric, shape, mu.dtype, jnp.finfo(mu.dtype).tiny)
            new = jnp.where(over, jnp.floor(jnp.log(uniform) / log_fail), poisson)
            exponential = jax.random.exponential(key_accept, shape, mu.dtype)
            # written so that parameters of NaN, which no chain accepts, take one trial
            refused = -exponential > log_f(new) - log_g(new) - bound
            return jnp.where(wanted, new, y), wanted & refused, trials + wanted

        def going_on(carry: Any) -> Array:
            _, wanted, trials = carry
            return jnp.any(wanted) & (trials.max() < self.max_trials)

        start = (jnp.zeros(shape, mu.dtype), jnp.ones(shape, bool), jnp.zeros(shape, jnp.int32))
        y, wanted, trials = jax.lax.while_loop(going_on, trial, start)
        return Simulation(y.astype(jnp.int32), trials, wanted)
