"""Atoms of a mixture in closed form: conjugate pairs of exponential families.

A pair writes the likelihood of one observation as

    log f(y | theta) = T(y) . eta(theta) + h(y)

so that the likelihoods of n points under K atoms are one matrix product, and all that a cluster's
posterior needs is the sum of its T(y), a vector of `size` numbers. h does not depend on the atom
and is left out everywhere. Observations have D independent components, each with an atom's
component of its own, but for `NormalInverseWishart` and `Dirichlet`, which join them.

What is known beside the atom travels with each observation: an offset, a scale, an exposure, and
`mask`, which is 0 where the observation is missing.

Source: Bernardo & Smith 1994, section 5.2 and appendix A; Murphy 2007, "Conjugate Bayesian analysis
of the Gaussian distribution".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import betaln, gammaln, multigammaln

from ppl_ext.target import Array

Rows = dict[str, Array]
Atom = dict[str, Array]
Prior = dict[str, Array]


def log_gamma(key: Array, a: Array) -> Array:
    """Log of a Gamma(a, 1) draw for each shape parameter. Marsaglia & Tsang 2000.

    As JAX's `loggamma`, whose loop within a loop takes ten times longer to compile. A sweep has
    several. The acceptance ratio is written so that it holds in float32 at a = 1e7.
    """
    small = a < 1
    d = jnp.where(small, a + 1, a) - 1 / 3
    tiny = jnp.finfo(a.dtype).tiny

    def propose(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        t, log_v, log_u, done = carry
        # the third number is for small a; one call, since each takes a second to compile
        u = random.uniform(random.fold_in(key, t), (3, *a.shape), a.dtype, minval=tiny)
        x = jnp.sqrt(2.0).astype(a.dtype) * lax.erf_inv(2 * u[0] - 1)
        y = jnp.maximum(x / (3 * jnp.sqrt(d)), -1.0)
        root = jnp.log1p(y)
        log_ratio = x**2 / 2 + d * (3 * (root - y) - 3 * y**2 - y**3)
        accept = ~done & (y > -1) & (jnp.log(u[1]) < log_ratio)
        keep = lambda new, old: jnp.where(accept, new, old)  # noqa: E731
        return t + 1, keep(3 * root, log_v), keep(jnp.log(u[2]), log_u), done | accept

    # a shape parameter that is NaN gives NaN, and must not hold up the others
    nan = jnp.full_like(a, jnp.nan)
    start = (jnp.zeros((), jnp.int32), nan, nan, ~(d > 0))
    _, log_v, log_u, _ = lax.while_loop(lambda carry: ~jnp.all(carry[3]), propose, start)
    return jnp.log(d) + log_v + jnp.where(small, log_u / a, 0.0)


class Pair(Protocol):
    """A conjugate pair. `prior` holds the parameters of the base distribution.

    `statistics` takes rows of observations (m, D) and returns (m, p); the other functions work on
    one atom: sums of statistics have the shape (p,).
    """

    def statistics(self, rows: Rows) -> Array: ...
    def natural(self, atom: Atom) -> Array: ...
    def draw(self, key: Array, total: Array, prior: Prior) -> Atom: ...
    def log_marginal(self, total: Array, prior: Prior) -> Array: ...


@dataclass(frozen=True)
class NormalMean:
    """y_d ~ Normal(mu_d + offset, scale), mu_d ~ Normal(loc, precision^-1/2)."""

    def statistics(self, rows: Rows) -> Array:
        weight = rows["mask"] / rows["scale"] ** 2
        return jnp.concatenate([weight, weight * (rows["y"] - rows["offset"])], -1)

    def natural(self, atom: Atom) -> Array:
        mean = atom["mean"]
        return jnp.concatenate([-(mean**2) / 2, mean])

    def draw(self, key: Array, total: Array, prior: Prior) -> Atom:
        precision, mean = self._posterior(total, prior)
        noise = random.normal(key, mean.shape, mean.dtype)
        return {"mean": mean + noise / jnp.sqrt(precision)}

    def log_marginal(self, total: Array, prior: Prior) -> Array:
        precision, mean = self._posterior(total, prior)
        squares = precision * mean**2 - prior["precision"] * prior["loc"] ** 2
        return jnp.sum(jnp.log(prior["precision"] / precision) + squares) / 2

    def _posterior(self, total: Array, prior: Prior) -> tuple[Array, Array]:
        weight, weighted = jnp.split(total, 2)
        precision = prior["precision"] + weight
        return precision, (prior["precision"] * prior["loc"] + weighted) / precision


@dataclass(frozen=True)
class NormalInverseGamma:
    """y_d ~ Normal(mu_d, scale tau_d^-1/2), mu_d ~ Normal(loc, (kappa tau_d)^-1/2).

    tau_d ~ Gamma(shape, rate) is the precision; with `variance`, the atom holds 1 / tau_d.
    """

    variance: bool

    def statistics(self, rows: Rows) -> Array:
        mask, y = rows["mask"], rows["y"] - rows["offset"]
        weight = mask / rows["scale"] ** 2
        return jnp.concatenate([mask, weight, weight * y, weight * y**2], -1)

    def natural(self, atom: Atom) -> Array:
        mean = atom["mean"]
        precision = 1 / atom["spread"] if self.variance else atom["spread"]
        return jnp.concatenate(
            [jnp.log(precision) / 2, -precision * mean**2 / 2, precision * mean, -precision / 2]
        )

    def draw(self, key: Array, total: Array, prior: Prior) -> Atom:
        kappa, mean, shape, rate = self._posterior(total, prior)
        key_gamma, key_normal = random.split(key)
        # in logs, so that a precision too small for its type is not zero
        log_precision = log_gamma(key_gamma, shape) - jnp.log(rate)
        noise = random.normal(key_normal, mean.shape, mean.dtype)
        spread = jnp.exp(-log_precision if self.variance else log_precision)
        return {
            "mean": mean + noise * jnp.exp(-log_precision / 2) / jnp.sqrt(kappa),
            "spread": spread,
        }

    def log_marginal(self, total: Array, prior: Prior) -> Array:
        kappa, _, shape, rate = self._posterior(total, prior)
        a, b = prior["shape"], prior["rate"]
        return jnp.sum(
            jnp.log(prior["kappa"] / kappa) / 2
            + a * jnp.log(b)
            - shape * jnp.log(rate)
            + gammaln(shape)
            - gammaln(a)
        )

    def _posterior(self, total: Array, prior: Prior) -> tuple[Array, Array, Array, Array]:
        count, weight, first, second = jnp.split(total, 4)
        kappa = prior["kappa"] + weight
        mean = (prior["kappa"] * prior["loc"] + first) / kappa
        # sums of squares about the prior mean, which cannot go below zero but by rounding
        centred = first - weight * prior["loc"]
        squares = second - 2 * prior["loc"] * first + weight * prior["loc"] ** 2
        rate = prior["rate"] + jnp.maximum(squares - centred**2 / kappa, 0.0) / 2
        return kappa, mean, prior["shape"] + count / 2, rate


@dataclass(frozen=True)
class NormalInverseWishart:
    """y ~ N(mu, Lambda^-1), mu ~ N(loc, (kappa Lambda)^-1), Lambda ~ Wishart(df, scale^-1).

    `prior["scale"]` is the inverse-Wishart's scale matrix. The atom's "spread" is Lambda, or with
    `covariance` its inverse.
    """

    dim: int
    covariance: bool

    def statistics(self, rows: Rows) -> Array:
        mask, y = rows["mask"][:, :1], rows["y"] - rows["offset"]
        products = (y[:, :, None] * y[:, None, :]).reshape(-1, self.dim**2)
        return jnp.concatenate([mask, mask * y, mask * products], -1)

    def natural(self, atom: Atom) -> Array:
        mean, precision = atom["mean"], atom["spread"]
        if self.covariance:
            precision = jnp.linalg.inv(precision)
        root = jnp.linalg.cholesky(precision)
        log_det = jnp.sum(jnp.log(jnp.diagonal(root)))
        first = precision @ mean
        return jnp.concatenate([(log_det - mean @ first / 2)[None], first, -precision.ravel() / 2])

    def draw(self, key: Array, total: Array, prior: Prior) -> Atom:
        kappa, mean, df, scale = self._posterior(total, prior)
        key_chi, key_normal, key_mean = random.split(key, 3)
        # Bartlett: Lambda = U^-T A A^T U^-1 with scale = U U^T and A lower triangular
        log_chi2 = log_gamma(key_chi, (df - jnp.arange(self.dim)) / 2) + math.log(2.0)
        below = jnp.tril(random.normal(key_normal, (self.dim, self.dim), mean.dtype), -1)
        factor = below + jnp.diag(jnp.exp(log_chi2 / 2))
        root = jnp.linalg.cholesky(scale)
        precision_root = solve_triangular(root, factor, lower=True, trans=1)
        # the inverse of precision_root, transposed, is a root of the covariance
        covariance_root = root @ solve_triangular(
            factor, jnp.eye(self.dim, dtype=mean.dtype), lower=True, trans=1
        )
        noise = random.normal(key_mean, (self.dim,), mean.dtype)
        spread = (
            covariance_root @ covariance_root.T
            if self.covariance
            else precision_root @ precision_root.T
        )
        return {"mean": mean + covariance_root @ noise / jnp.sqrt(kappa), "spread": spread}

    def log_marginal(self, total: Array, prior: Prior) -> Array:
        kappa, _, df, scale = self._posterior(total, prior)
        d = self.dim
        return (
            d * (jnp.log(prior["kappa"]) - jnp.log(kappa)) / 2
            + prior["df"] * jnp.linalg.slogdet(prior["scale"])[1] / 2
            - df * jnp.linalg.slogdet(scale)[1] / 2
            + multigammaln(df / 2, d)
            - multigammaln(prior["df"] / 2, d)
            # the multivariate gamma function's own constant cancels; powers of 2 belong to h
            + (df - prior["df"]) * d * math.log(2.0) / 2
        )

    def _posterior(self, total: Array, prior: Prior) -> tuple[Array, Array, Array, Array]:
        d = self.dim
        count, first, second = total[0], total[1 : 1 + d], total[1 + d :].reshape(d, d)
        loc = prior["loc"]
        kappa = prior["kappa"] + count
        centred = first - count * loc
        about_loc = (
            second - jnp.outer(first, loc) - jnp.outer(loc, first) + count * jnp.outer(loc, loc)
        )
        scale = prior["scale"] + about_loc - jnp.outer(centred, centred) / kappa
        return kappa, loc + centred / kappa, prior["df"] + count, scale


@dataclass(frozen=True)
class GammaPoisson:
    """y_d ~ Poisson(exposure * lambda_d), lambda_d ~ Gamma(shape, rate)."""

    def statistics(self, rows: Rows) -> Array:
        mask = rows["mask"]
        return jnp.concatenate([mask * rows["y"], mask * rows["scale"]], -1)

    def natural(self, atom: Atom) -> Array:
        return jnp.concatenate([jnp.log(atom["rate"]), -atom["rate"]])

    def draw(self, key: Array, total: Array, prior: Prior) -> Atom:
        events, exposure = jnp.split(total, 2)
        rate = prior["rate"] + exposure
        return {"rate": jnp.exp(log_gamma(key, prior["shape"] + events) - jnp.log(rate))}

    def log_marginal(self, total: Array, prior: Prior) -> Array:
        events, exposure = jnp.split(total, 2)
        a, b = prior["shape"], prior["rate"]
        return jnp.sum(
            a * jnp.log(b) - (a + events) * jnp.log(b + exposure) + gammaln(a + events) - gammaln(a)
        )


@dataclass(frozen=True)
class GammaExponential(GammaPoisson):
    """y_d ~ Exponential(scale * lambda_d), lambda_d ~ Gamma(shape, rate)."""

    def statistics(self, rows: Rows) -> Array:
        mask = rows["mask"]
        return jnp.concatenate(
            [mask * jnp.ones_like(rows["y"]), mask * rows["scale"] * rows["y"]], -1
        )


@dataclass(frozen=True)
class BetaBinomial:
    """y_d ~ Binomial(total, p_d), p_d ~ Beta(a, b); Bernoulli is total = 1."""

    def statistics(self, rows: Rows) -> Array:
        mask, y = rows["mask"], rows["y"]
        return jnp.concatenate([mask * y, mask * (rows["scale"] - y)], -1)

    def natural(self, atom: Atom) -> Array:
        # a probability that rounds to 0 or 1 has a large finite odds
        tiny = jnp.finfo(atom["probs"].dtype).tiny
        yes, no = atom["probs"], 1 - atom["probs"]
        return jnp.concatenate([jnp.log(jnp.maximum(yes, tiny)), jnp.log(jnp.maximum(no, tiny))])

    def draw(self, key: Array, total: Array, prior: Prior) -> Atom:
        yes, no = jnp.split(total, 2)
        both = log_gamma(key, jnp.stack([prior["a"] + yes, prior["b"] + no]))
        return {"probs": jax.nn.sigmoid(both[0] - both[1])}

    def log_marginal(self, total: Array, prior: Prior) -> Array:
        yes, no = jnp.split(total, 2)
        a, b = prior["a"], prior["b"]
        return jnp.sum(betaln(a + yes, b + no) - betaln(a, b))


@dataclass(frozen=True)
class Dirichlet:
    """y ~ Categorical(p) as counts of one, or Multinomial(total, p); p ~ Dirichlet(a)."""

    def statistics(self, rows: Rows) -> Array:
        return rows["mask"] * rows["y"]

    def natural(self, atom: Atom) -> Array:
        return jnp.log(jnp.maximum(atom["probs"], jnp.finfo(atom["probs"].dtype).tiny))

    def draw(self, key: Array, total: Array, prior: Prior) -> Atom:
        return {"probs": jax.nn.softmax(log_gamma(key, prior["a"] + total))}

    def log_marginal(self, total: Array, prior: Prior) -> Array:
        a = prior["a"]
        n = jnp.sum(total)
        return (
            gammaln(jnp.sum(a)) - gammaln(jnp.sum(a) + n) + jnp.sum(gammaln(a + total) - gammaln(a))
        )


@dataclass(frozen=True)
class Member:
    """One pair of a product, with the rows that it observes and its base distribution."""

    pair: Any
    rows: Rows  # "y" of shape (n, D); other leaves (n, D) or with ones in place of n or D
    prior: Prior


@dataclass(frozen=True)
class Product:
    """Independent conjugate pairs that make up one atom. An atom is a tuple, one for each member.

    Parameters
    ----------
    members : tuple of Member
        The parts, bound to their data.
    num_points : int
        n, the leading size of the members' rows.
    """

    members: tuple[Member, ...]
    num_points: int

    def statistics(self, start: Array | int, size: int) -> Array:
        """T of the points start ... start + size - 1: shape (size, p)."""

        def piece(rows: Rows) -> Rows:
            slices = {
                name: leaf
                if leaf.shape[0] == 1
                else jax.lax.dynamic_slice_in_dim(leaf, start, size)
                for name, leaf in rows.items()
            }
            shape = (size, rows["y"].shape[1])
            return {name: jnp.broadcast_to(leaf, shape) for name, leaf in slices.items()}

        return jnp.concatenate([m.pair.statistics(piece(m.rows)) for m in self.members], -1)

    def natural(self, atom: tuple[Atom, ...]) -> Array:
        return jnp.concatenate([m.pair.natural(a) for m, a in zip(self.members, atom, strict=True)])

    def draw(self, key: Array, total: Array) -> tuple[Atom, ...]:
        """An atom from its posterior given the sum of statistics; with zeros, from the prior."""
        keys = random.split(key, len(self.members))
        return tuple(
            m.pair.draw(k, t, m.prior)
            for m, k, t in zip(self.members, keys, self._parts(total), strict=True)
        )

    def log_marginal(self, total: Array) -> Array:
        """Log of the integral of the cluster's likelihood over the base distribution."""
        parts = self._parts(total)
        return sum(
            (m.pair.log_marginal(t, m.prior) for m, t in zip(self.members, parts, strict=True)),
            jnp.zeros((), total.dtype),
        )

    @property
    def size(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        sizes = []
        for m in self.members:
            one = jax.ShapeDtypeStruct((1, m.rows["y"].shape[1]), m.rows["y"].dtype)
            sizes.append(jax.eval_shape(m.pair.statistics, dict.fromkeys(m.rows, one)).shape[-1])
        return sizes

    def _parts(self, total: Array) -> list[Array]:
        parts, start = [], 0
        for size in self._sizes:
            parts.append(total[start : start + size])
            start += size
        return parts
