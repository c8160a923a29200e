"""Bounds on log likelihoods, from the distributions of a model.

For a datum with log likelihood psi(eta) in a predictor eta that is affine in the unconstrained
sites, eta = a'x + b, the kernels need suprema of |psi'|, |psi''| and |psi'''|. They are known per
distribution; a table has them, and `register_bounds` adds to it. Whether a predictor is affine is
read off the model's operations, not tried out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.extend.core import Literal as JaxLiteral
from numpyro.distributions import conjugate, continuous, discrete

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.target import Array

Link = Literal["identity", "exp", "softplus", "logistic", "probit"]
Derivatives = Callable[[Any, Array, Array, Array], tuple[Any, Any, Any]]

_INVERSE: dict[str, Callable[[Array], Array]] = {
    "identity": lambda p: p,
    "exp": jnp.log,
    "softplus": lambda p: p + jnp.log(-jnp.expm1(-p)),
    "logistic": lambda p: jnp.log(p) - jnp.log1p(-p),
    "probit": jax.scipy.special.ndtri,
}

# suprema, rounded up: of |s''| and |s'''| of the logistic function's integral s = softplus
_K2, _K3 = 0.25, 0.0962251  # 1 / (6 sqrt 3)
_INF = math.inf

# the link of a site with a latent scale
_SCALED = "scaled"
# of a mixture
_WEIGHTS = "weights"
_EXCEPT = " in another way than as the exponential of an affine function"


@dataclass(frozen=True)
class Rule:
    """What is known of one distribution.

    Parameters
    ----------
    parameter : str
        The attribute of the distribution that holds the predictor, under a link.
    derivatives : dict
        By link: `derivatives(distribution, value, low, high)` gives suprema of the absolute first,
        second and third derivative of the log density in the predictor on the interval from `low`
        to `high`, which may be infinite: three arrays of the shape of `value`, or numbers;
        infinite where there is no bound.
    constants : tuple of str
        Attributes that must not depend on latent sites.
    vector : bool
        Whether the predictor has a trailing axis; suprema are then operator norms.
    scaled : callable, optional
        As one of `derivatives`, for an identity link and a latent `scale` that is the exponential
        of an affine predictor: suprema of the norms of the derivatives in (predictor, log scale);
        `low` and `high` have a trailing axis of these two.
    """

    parameter: str
    derivatives: Mapping[str, Derivatives]
    constants: tuple[str, ...] = ()
    vector: bool = False
    scaled: Derivatives | None = None


def _bernoulli(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return 1.0, _K2, _K3


def _probit(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    # log Phi(s), s = eta or -eta: its slope, the inverse Mills ratio, falls in s
    least = jnp.where(y > 0, low, -high)
    slope = jnp.exp(-(least**2) / 2 - jax.scipy.special.log_ndtr(least)) / math.sqrt(2 * math.pi)
    # sup |third derivative| = 0.2957...
    return jnp.where(jnp.isfinite(least), slope, _INF), 1.0, 0.2958


def _binomial(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    n = fn.total_count
    return n, _K2 * n, _K3 * n


def _student_t(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return _heavy_tailed(fn.df, fn.scale)


def _cauchy(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return _heavy_tailed(1.0, fn.scale)


def _heavy_tailed(df: Any, scale: Any) -> tuple[Any, Any, Any]:
    # (3 + 2 sqrt 2) / 4 = 1.4571067...
    third = 1.457107 * (df + 1) / (df**1.5 * scale**3)
    return (df + 1) / (2 * jnp.sqrt(df) * scale), (df + 1) / (df * scale**2), third


def _logistic(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    # 1 / (3 sqrt 3) = 0.1924500...
    return 1 / fn.scale, 0.5 / fn.scale**2, 0.1924501 / fn.scale**3


def _laplace(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return 1 / fn.scale, _INF, _INF


def _normal(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    farthest = jnp.maximum(jnp.abs(y - low), jnp.abs(y - high))
    return farthest / fn.scale**2, fn.scale**-2.0, 0.0


def _normal_scaled(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    # psi = -s - r^2 / 2, r = (y - eta) exp(-s), s the log scale
    weight, least = jnp.exp(-low[..., 1]), jnp.exp(-high[..., 1])
    farthest = jnp.maximum(jnp.abs(y - low[..., 0]), jnp.abs(y - high[..., 0]))
    nearest = jnp.maximum(jnp.maximum(low[..., 0] - y, y - high[..., 0]), 0.0)
    r, slope = farthest * weight, farthest * weight**2
    slope_s = jnp.maximum(jnp.abs(r**2 - 1), jnp.abs((nearest * least) ** 2 - 1))
    return _norms(
        (slope, slope_s),
        (weight**2, 2 * slope, 2 * r**2),
        (0.0, 2 * weight**2, 4 * slope, 4 * r**2),
    )


def _student_t_scaled(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return _heavy_tailed_scaled(fn.df, low)


def _cauchy_scaled(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return _heavy_tailed_scaled(1.0, low)


def _heavy_tailed_scaled(df: Any, low: Array) -> tuple[Any, Any, Any]:
    # with rho = r / sqrt(df) all derivatives are df + 1 times bounded functions of rho:
    # 2 rho / (1 + rho^2)^2 <= 0.64952, |2 rho - 6 rho^3| / (1 + rho^2)^3 <= 0.548738 and
    # 4 rho^2 |1 - rho^2| / (1 + rho^2)^3 <= 0.384901
    weight = jnp.exp(-low[..., 1])
    n, root = df + 1, weight / jnp.sqrt(df)
    return _norms(
        (n / 2 * root, jnp.maximum(1.0, df)),
        (n * root**2, 0.649520 * n * root, n / 2),
        (1.457107 * n * root**3, 2 * n * root**2, 0.548738 * n * root, 0.384901 * n),
    )


def _norms(*derivatives: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Norms of the derivatives of order 1 to 3 in two variables: binomial counts of equal ones."""
    found = []
    for each in derivatives:
        order = len(each) - 1
        found.append(jnp.sqrt(sum(math.comb(order, k) * d**2 for k, d in enumerate(each))))
    first, second, third = found
    return first, second, third


def _poisson_log(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    rate = jnp.exp(high)
    return jnp.maximum(jnp.abs(y - rate), jnp.abs(y - jnp.exp(low))), rate, rate


def _poisson_softplus(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return jnp.maximum(1.0, y), _K2 + 0.1672 * y, _K3 + 0.06093 * y


def _negative_binomial(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    # y and r = the number of failures in y eta - (y + r) log(r + e^eta), up to the sign of eta
    r = fn.concentration
    return jnp.maximum(y, r), _K2 * (y + r), _K3 * (y + r)


def _gamma(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    # shape * eta - y exp(eta), eta the log rate
    shape = getattr(fn, "concentration", 1.0)
    most = y * jnp.exp(high)
    ends = jnp.abs(shape - most), jnp.abs(shape - y * jnp.exp(low))
    return jnp.maximum(*ends), most, most


def _categorical(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    # sqrt 2 = 1.4142135...; the covariance of a one-hot vector has norm at most 1/2
    return 1.4142136, 0.5, _INF


def _ordered(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
    return 1.0, 0.5, 0.1924501


_RULES: dict[type, Rule] = {
    discrete.BernoulliLogits: Rule("logits", {"identity": _bernoulli}),
    discrete.BernoulliProbs: Rule("probs", {"logistic": _bernoulli, "probit": _probit}),
    discrete.BinomialLogits: Rule("logits", {"identity": _binomial}, ("total_count",)),
    discrete.BinomialProbs: Rule("probs", {"logistic": _binomial}, ("total_count",)),
    discrete.CategoricalLogits: Rule("logits", {"identity": _categorical}, vector=True),
    dist.OrderedLogistic: Rule("predictor", {"identity": _ordered}, ("cutpoints",)),
    dist.StudentT: Rule("loc", {"identity": _student_t}, ("df", "scale"), scaled=_student_t_scaled),
    dist.Cauchy: Rule("loc", {"identity": _cauchy}, ("scale",), scaled=_cauchy_scaled),
    continuous.Logistic: Rule("loc", {"identity": _logistic}, ("scale",)),
    dist.Laplace: Rule("loc", {"identity": _laplace}, ("scale",)),
    dist.Normal: Rule("loc", {"identity": _normal}, ("scale",), scaled=_normal_scaled),
    dist.Poisson: Rule("rate", {"exp": _poisson_log, "softplus": _poisson_softplus}),
    dist.NegativeBinomial2: Rule("rate", {"exp": _negative_binomial}, ("concentration",)),
    conjugate.NegativeBinomialLogits: Rule(
        "logits", {"identity": _negative_binomial}, ("total_count",)
    ),
    dist.GammaPoisson: Rule("rate", {"exp": _negative_binomial}, ("concentration",)),
    dist.Gamma: Rule("rate", {"exp": _gamma}, ("concentration",)),
    dist.Exponential: Rule("rate", {"exp": _gamma}),
}


def register_bounds(distribution: type, rule: Rule) -> None:
    """Add a distribution to the table, or replace its rule.

    Parameters
    ----------
    distribution : type
        A class of `numpyro.distributions`, as found in the model: `BernoulliLogits`, say.
    rule : Rule
        Its predictor and the suprema of the derivatives.

    Examples
    --------
    >>> import numpyro.distributions as dist
    >>> from ppl_ext.numpyro import bounds
    >>> def gumbel(fn, y, low, high):
    ...     # psi = -s - exp(-s), s = (y - eta) / scale: bounded on an interval only
    ...     most = jnp.exp((high - y) / fn.scale)
    ...     return (1 + most) / fn.scale, most / fn.scale**2, most / fn.scale**3
    >>> bounds.register_bounds(
    ...     dist.Gumbel, bounds.Rule("loc", {"identity": gumbel}, constants=("scale",))
    ... )
    """
    _RULES[distribution] = rule


def rule_of(distribution: Any) -> Rule | None:
    """The rule for a distribution without wrappers, or `None`."""
    if isinstance(distribution, dist.MixtureSameFamily):
        return _mixture(_RULES.get(type(distribution.component_distribution)))
    return _RULES.get(type(distribution))


def _mixture(rule: Rule | None) -> Rule | None:
    """The rule of a mixture of one family of scalars with known weights, from the family's.

    The log density is log sum_k w_k exp(psi_k): a cumulant generating function, in which slopes are
    means over k, curvatures means and variances. A number between -a and a has a variance of at
    most a^2, and a third central moment of at most 8 a^3 / (6 sqrt 3).
    """
    if rule is None or rule.vector:
        return None

    def of_mixture(derivatives: Derivatives) -> Derivatives:
        def bound(fn: Any, y: Array, low: Array, high: Array) -> tuple[Any, Any, Any]:
            found = derivatives(fn.component_distribution, y[..., None], low, high)
            first, second, third = (jnp.broadcast_to(k, low.shape).max(-1) for k in found)
            skewness = 0.769801 * first**3
            return first, second + first**2, third + 3 * first * second + skewness

        return bound

    links = {link: of_mixture(derivatives) for link, derivatives in rule.derivatives.items()}
    return Rule(rule.parameter, links, (*rule.constants, _WEIGHTS), vector=True)


def _attribute(distribution: Any, name: str) -> Any:
    """Of a distribution, or of the components of a mixture."""
    if not isinstance(distribution, dist.MixtureSameFamily):
        return getattr(distribution, name)
    if name == _WEIGHTS:
        return distribution.mixing_distribution.probs
    return getattr(distribution.component_distribution, name)


def known_families() -> set[str]:
    """Names of the distributions in the table."""
    return {distribution.__name__ for distribution in _RULES}


# --- constants of a model ------------------------------------------------------------------------


def links(kernel: str, observed: Callable[[Array], Mapping[str, Any]], z: Array) -> dict[str, str]:
    """Link of the predictor of each observed site.

    Parameters
    ----------
    kernel : str
        Named in errors.
    observed : callable
        `observed(z)`: the sites at the flat unconstrained vector, for any few data.
    z : Array
        Any point, shape (d,).

    Raises
    ------
    UnsupportedModelError
        For a distribution that is not in the table, a predictor that is not affine under a known
        link, or another parameter that depends on latent sites; names the site.
    """
    kinds: dict[str, tuple[Rule, str]] = {}

    def parameters(z: Array) -> list[Any]:
        leaves = []
        for name, site in observed(z).items():
            rule = rule_of(site.distribution)
            if rule is None:
                family = type(site.distribution).__name__
                what = "a factor" if family == "Unit" else f"the distribution {family}"
                raise UnsupportedModelError(
                    f"{kernel} has no bounds for site '{name}', {what}. Known are "
                    f"{', '.join(sorted(known_families()))}. Add a rule by "
                    "ppl_ext.numpyro.bounds.register_bounds, give `bounds`, or let `exact=False` "
                    "estimate them."
                )
            kinds[name] = rule, type(site.distribution).__name__
            for parameter in (rule.parameter, *rule.constants):
                leaves.append(jnp.asarray(_attribute(site.distribution, parameter), float))
        return leaves

    labels = iter(_labels(parameters, z))
    found = {}
    for name, (rule, family) in kinds.items():
        label = next(labels)
        known = " or ".join(rule.derivatives)
        if label == "const":
            # any link: the predictor does not move
            label = next(iter(rule.derivatives))
        if label is None or label not in rule.derivatives:
            what = "not affine in the unconstrained sites" if label is None else f"`{label}`"
            raise UnsupportedModelError(
                f"{kernel} needs `{rule.parameter}` of site '{name}' ({family}) to be an affine "
                f"function of the unconstrained sites under the link {known}; it is {what}. Write "
                "it so, or give `bounds`."
            )
        found[name] = label
        for constant in rule.constants:
            label = next(labels)
            if label == "exp" and constant == "scale" and rule.scaled is not None:
                found[name] = _SCALED
            elif label != "const":
                raise UnsupportedModelError(
                    f"{kernel} needs a constant `{constant}` at site '{name}' ({family}), but it "
                    f"depends on latent sites{_EXCEPT if rule.scaled else ''}. Fix it, or give "
                    "`bounds`."
                )
    return found


def derivative_bounds(
    observed: Callable[[Array], Mapping[str, Any]],
    links: Mapping[str, str],
    size: int,
    order: int,
    mode: Array,
    scale: Array,
    radius: Array,
) -> Array:
    """Constants c_i of a kernel's bound, shape (size,): sums over the sites and numbers of a datum.

    Parameters
    ----------
    observed : callable
        `observed(z)`: the sites at the flat unconstrained vector, for all data.
    order : int
        Of the Taylor polynomial: c_i = sup |derivative order + 1| * norm^(order + 1).
    mode, scale, radius : Array
        The ball of all `mode + scale w`, |w| <= radius, on which the constants are bounds.
    """

    def predictors(z: Array) -> dict[str, Array]:
        return {
            name: _predictor(site, links[name]).astype(mode.dtype)
            for name, site in observed(z).items()
        }

    centre = predictors(mode)
    squares = jax.lax.map(
        lambda column: {
            name: slope**2 for name, slope in jax.jvp(predictors, (mode,), (column,))[1].items()
        },
        scale.T,
    )
    total = jnp.zeros(size, mode.dtype)
    for name, site in observed(mode).items():
        rule = rule_of(site.distribution)
        assert rule is not None
        norm, eta = jnp.sqrt(squares[name].sum(0)), centre[name]
        reach = jnp.where(norm > 0, norm * radius, 0.0)
        values = jnp.broadcast_to(site.value, site.shape)
        scaled = links[name] == _SCALED
        derivatives = rule.scaled if scaled else rule.derivatives[links[name]]
        assert derivatives is not None
        suprema = derivatives(site.distribution, values, eta - reach, eta + reach)[order]
        if rule.vector or scaled:
            # the Frobenius norm of the predictor's slope is no smaller than its operator norm
            norm = jnp.sqrt((norm**2).sum(-1))
        # where the predictor does not move, neither does the term
        powers = jnp.where(norm > 0, suprema * norm ** (order + 1), 0.0)
        each = jnp.where(site.weight > 0, site.weight * powers, 0.0)
        each = jnp.moveaxis(jnp.broadcast_to(each, site.shape), site.axis, 0)
        total = total + each.reshape(size, -1).sum(1)
    return total


def _predictor(site: Any, link: str) -> Array:
    rule = rule_of(site.distribution)
    assert rule is not None
    if link == _SCALED:
        both = getattr(site.distribution, rule.parameter), jnp.log(site.distribution.scale)
        return jnp.stack([jnp.broadcast_to(part, site.shape) for part in both], -1)
    value = _INVERSE[link](jnp.asarray(_attribute(site.distribution, rule.parameter)))
    return jnp.broadcast_to(value, site.shape + value.shape[-1:] if rule.vector else site.shape)


class BoundCheck(NamedTuple):
    """Largest |R_i(x) - R_i(y)| / (c_i M(x, y)) that was found, and where."""

    max_ratio: float  # at most 1, or the bounds are wrong
    datum: int  # its i
    num_violations: int  # pairs and data with a ratio above 1
    num_pairs: int


def check(
    model: Callable[..., Any],
    *args: Any,
    order: Literal[0, 1, 2] = 1,
    plate: str | None = None,
    bounds: Any = "auto",
    num_pairs: int = 200,
    seed: int = 0,
    **kwargs: Any,
) -> BoundCheck:
    """Try the bounds of `TunaMH` on random pairs of points and all data.

    Parameters
    ----------
    model, order, plate, bounds
        As for `TunaMH`; `bounds` may be your own.
    *args, **kwargs
        Of the model.
    num_pairs : int
        Pairs (x, y) within sqrt(d) + 4 standard deviations of the mode: far and near ones, and
        pairs on one ray, where the bounds are tightest.
    seed : int
        Of the pairs.

    Returns
    -------
    BoundCheck
        `max_ratio` above 1 shows that a bound is wrong; below 1 it proves nothing, but a ratio far
        below 1 tells how much smaller the bounds could be.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from ppl_ext.numpyro import bounds
    >>> def model(x, y):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1))
    ...     with numpyro.plate("N", len(y), subsample_size=2) as i:
    ...         numpyro.sample("y", dist.StudentT(4, x[i] * beta, 1), obs=y[i])
    >>> found = bounds.check(model, jnp.arange(5.0), 2 * jnp.arange(5.0))
    >>> found.max_ratio <= 1, found.num_violations
    (True, 0)
    """
    from ppl_ext.kernels.tuna_mh import distance, remainder_difference
    from ppl_ext.numpyro.tuna_mh import TunaMH

    kernel = TunaMH(model, order=order, plate=plate, bounds=bounds)
    fit, problem = kernel.fit(*args, **kwargs)
    size = fit.centre.size
    pairs = _pairs(seed, num_pairs, size, math.sqrt(size) + 4).astype(fit.centre.dtype)
    everything = jnp.arange(problem.size)
    constants = fit.table.bound(everything)

    @jax.jit
    def ratios(pair: Array) -> tuple[Array, Array, Array]:
        w, v = pair
        x, y = fit.from_standard(w), fit.from_standard(v)
        r, error = remainder_difference(x, y, everything, problem, kernel.settings, fit)
        moved = jnp.maximum(jnp.abs(r) - error, 0.0)
        bound = constants * distance(w, v, order)
        ratio = jnp.where(moved > 0, moved / bound, 0.0)
        return ratio.max(), ratio.argmax(), jnp.sum(ratio > 1)

    largest, datum, broken = jax.lax.map(ratios, pairs)
    worst = int(jnp.argmax(largest))
    return BoundCheck(float(largest[worst]), int(datum[worst]), int(broken.sum()), num_pairs)


def _pairs(seed: int, number: int, size: int, radius: Any) -> Array:
    """Pairs of points in a ball, (number, 2, size): far and near ones, every other on one ray."""
    keys = jax.random.split(jax.random.key(seed))
    direction = jax.random.normal(keys[0], (number, 2, size))
    direction /= jnp.linalg.norm(direction, axis=-1, keepdims=True)
    ray = jnp.arange(number)[:, None, None] % 2 == 0
    direction = jnp.where(ray, direction[:, :1], direction)
    return radius * jax.random.uniform(keys[1], (number, 2, 1)) ** 2 * direction


# --- estimates -----------------------------------------------------------------------------------


def empirical_bounds(
    log_terms: Callable[[Array, Array], Array],
    size: int,
    order: int,
    num_pairs: int = 100,
    factor: float = 2.0,
) -> Callable[[Array, Array, Array], Array]:
    """Estimates in the place of bounds: the largest ratios at random pairs, times `factor`.

    Parameters
    ----------
    log_terms : callable
        `log_terms(x, indices)`: log likelihoods of the data in `indices` at x, shape (d,).
    size : int
        Number of data N.
    order : {0, 1, 2}
        Of the Taylor polynomials at the mode.
    num_pairs : int
        Pairs of points in the ball, each with a pass over all data: half of them far and near ones,
        half neighbours near the rim, where remainders move most.
    factor : float
        By how much the estimates are larger than what was seen. In d dimensions a pair seldom
        points in the direction in which a datum moves most, so that estimates fall short as d
        grows.

    Returns
    -------
    callable
        `bounds(mode, scale, radius)` as `TunaMH` takes it: shape (N,), infinite for an infinite
        radius.
    """
    # imported here: the kernel's front end imports this module
    from ppl_ext.kernels.tuna_mh import distance

    everything = jnp.arange(size)

    def remainder(x: Array, mode: Array) -> Array:
        def along(t: Array) -> Array:
            return log_terms(mode + t * (x - mode), everything)

        zero = jnp.zeros((), x.dtype)
        known, derivative = along(zero), along
        for k in range(1, order + 1):
            derivative = jax.jacfwd(derivative)
            known = known + derivative(zero) / math.factorial(k)
        return log_terms(x, everything) - known

    def bounds(mode: Array, scale: Array, radius: Array) -> Array:
        here = jnp.where(jnp.isfinite(radius), radius, 1.0)
        pairs = _pairs(0, num_pairs, mode.size, here).astype(mode.dtype)
        rim = pairs[num_pairs // 2 :, :1]
        rim = 0.95 * here * rim / jnp.linalg.norm(rim, axis=-1, keepdims=True)
        neighbours = jnp.concatenate([rim, rim / 0.95], 1)
        pairs = jnp.concatenate([pairs[: num_pairs // 2], neighbours])

        def ratios(pair: Array) -> Array:
            moved = remainder(mode + scale @ pair[0], mode) - remainder(
                mode + scale @ pair[1], mode
            )
            return jnp.abs(moved) / distance(pair[0], pair[1], order)

        largest = jax.lax.fori_loop(
            0,
            num_pairs,
            lambda i, best: jnp.maximum(best, ratios(pairs[i])),
            jnp.zeros(size, mode.dtype),
        )
        return jnp.where(jnp.isfinite(radius), factor * largest, jnp.inf)

    return bounds


# --- which values are affine ---------------------------------------------------------------------

# A value is "const", or a known function of an affine one: "identity", "exp" (a non-zero constant
# times exp), "softplus" or "logistic"; None is anything else.
_SHAPE_ONLY = {
    "reshape", "broadcast_in_dim", "squeeze", "transpose", "slice", "copy", "rev", "expand_dims",
    "convert_element_type", "optimization_barrier", "copy_p",
}  # fmt: skip
_JOINS = {"concatenate", "stack", "add", "sub", "add_any", "pad"}
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat",
    "checkpoint",
}  # fmt: skip


def _labels(function: Callable[[Array], list[Any]], z: Array) -> list[str | None]:
    """Label of each output of `function`."""
    closed = jax.make_jaxpr(function)(z)
    return _walk(closed.jaxpr, ["identity"])


def _walk(jaxpr: Any, inputs: list[str | None]) -> list[str | None]:
    labels: dict[Any, str | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    labels.update(dict.fromkeys(jaxpr.constvars, "const"))

    has_erf = any(equation.primitive.name == "erf" for equation in jaxpr.eqns)
    for equation in jaxpr.eqns:
        found = _equation(equation, [_label(labels, v) for v in equation.invars])
        labels.update(zip(equation.outvars, found, strict=True))
        if has_erf and equation.primitive.name == "mul" and found == [None]:
            (made,) = equation.outvars
            if _history(jaxpr, made, labels) == _probit_link(made.aval.shape, str(made.aval.dtype)):
                labels[made] = "probit"
    return [_label(labels, v) for v in jaxpr.outvars]


def _equation(equation: Any, inputs: list[str | None]) -> list[str | None]:
    outputs = len(equation.outvars)
    if all(label == "const" for label in inputs):
        return ["const"] * outputs
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        moving = [v for v, label in zip(equation.invars, inputs, strict=True) if label != "const"]
        if inputs.count("identity") == len(moving) == 1 == len(inputs):
            aval = moving[0].aval
            if str(inner) == _softplus(aval.shape, str(aval.dtype)):
                return ["softplus"]
        return _walk(inner, inputs)
    return [_one(name, params, inputs)] * outputs


def _one(name: str, params: Mapping[str, Any], inputs: list[str | None]) -> str | None:
    """Label of the result of one operation of which not all inputs are constant."""
    first, rest = inputs[0], inputs[1:]
    kinds = set(inputs)
    if name in _SHAPE_ONLY:
        return first
    if name in ("gather", "dynamic_slice"):
        return first if all(label == "const" for label in rest) else None
    if name == "neg":
        return first if first in ("identity", "exp") else None
    if name in _JOINS:
        if kinds <= {"identity", "const"}:
            return "identity"
        return first if name in ("concatenate", "stack") and len(kinds) == 1 else None
    if name == "select_n":
        cases = set(rest)
        if first != "const":
            return None
        if cases <= {"identity", "const"}:
            return "identity"
        return cases.pop() if len(cases) == 1 else None
    if name in ("reduce_sum", "cumsum"):
        return "identity" if first == "identity" else None
    if name == "dot_general":
        return "identity" if kinds == {"identity", "const"} else None
    if name == "mul":
        if kinds == {"identity", "const"}:
            return "identity"
        return "exp" if kinds <= {"exp", "const"} else None
    if name == "div":
        if kinds == {"identity", "const"}:
            return "identity" if first == "identity" else None
        return "exp" if kinds <= {"exp", "const"} else None
    if name == "exp":
        return "exp" if first == "identity" else None
    if name == "log":
        return "identity" if first == "exp" else None
    if name == "logistic":
        return "logistic" if first == "identity" else None
    if name in ("integer_pow", "sqrt", "rsqrt", "square"):
        return "exp" if first == "exp" else None
    return None


@cache
def _softplus(shape: tuple[int, ...], dtype: str) -> str:
    """The operations of `jax.nn.softplus`, as they stand inside a call."""
    closed = jax.make_jaxpr(jax.nn.softplus)(jax.ShapeDtypeStruct(shape, dtype))
    return str(closed.jaxpr.eqns[0].params["jaxpr"].jaxpr)


@cache
def _probit_link(shape: tuple[int, ...], dtype: str) -> list[str]:
    """The operations of the standard normal distribution function, which are no call."""
    closed = jax.make_jaxpr(jax.scipy.special.ndtr)(jax.ShapeDtypeStruct(shape, dtype))
    labels: dict[Any, str | None] = dict.fromkeys(closed.jaxpr.invars, "identity")
    for equation in closed.jaxpr.eqns:
        found = _equation(equation, [_label(labels, v) for v in equation.invars])
        labels.update(zip(equation.outvars, found, strict=True))
    return _history(closed.jaxpr, closed.jaxpr.outvars[0], labels)


def _history(jaxpr: Any, variable: Any, labels: Mapping[Any, str | None]) -> list[str]:
    """The operations that make a variable of affine ones, with numbers in place of names."""
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    numbers: dict[Any, int] = {}
    lines: list[str] = []

    def visit(variable: Any) -> str:
        if isinstance(variable, JaxLiteral):
            return str(variable.val)
        if variable not in numbers:
            if labels.get(variable) is None and variable in makers:
                equation = makers[variable]
                inputs = [visit(v) for v in equation.invars]
                lines.append(f"{equation.primitive} {inputs} {equation.params}")
            numbers[variable] = len(numbers)
        return f"v{numbers[variable]}"

    visit(variable)
    return lines


def _label(labels: Mapping[Any, str | None], variable: Any) -> str | None:
    return "const" if isinstance(variable, JaxLiteral) else labels[variable]
