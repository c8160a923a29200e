"""Suprema of the table against derivatives by JAX, and which predictors count as affine."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro import TunaMH, bounds
from ppl_ext.numpyro.target import Observed

INF = np.inf
# name: distribution of a predictor, its rule's link, values, range, derivatives that attain it
CASES = {
    "Bernoulli": (lambda e: dist.Bernoulli(logits=e), "identity", [0, 1], INF, (0, 1, 2)),
    "Bernoulli probs": (
        lambda e: dist.Bernoulli(probs=jax.nn.sigmoid(e)), "logistic", [0, 1], INF, (0, 1, 2)
    ),
    "Bernoulli probit": (
        lambda e: dist.Bernoulli(probs=dist.Normal().cdf(e)), "probit", [0, 1], 3.0, (0, 2)
    ),
    "Binomial": (
        lambda e: dist.Binomial(5, logits=e), "identity", [0, 2, 5], INF, (1, 2)
    ),
    "StudentT": (lambda e: dist.StudentT(4.0, e, 0.7), "identity", [0.3], INF, (0, 1, 2)),
    "Cauchy": (lambda e: dist.Cauchy(e, 1.7), "identity", [0.3], INF, (0, 1, 2)),
    "Logistic": (lambda e: dist.Logistic(e, 0.6), "identity", [0.1], INF, (0, 1, 2)),
    "Laplace": (lambda e: dist.Laplace(e, 0.6), "identity", [0.1], INF, (0,)),
    "Normal": (lambda e: dist.Normal(e, 0.6), "identity", [0.1], 3.0, (0, 1, 2)),
    "Poisson": (lambda e: dist.Poisson(jnp.exp(e)), "exp", [0, 3], 2.0, (1, 2)),
    "Poisson softplus": (
        lambda e: dist.Poisson(jax.nn.softplus(e)), "softplus", [0, 3], INF, (1,)
    ),
    "NegativeBinomial2": (
        lambda e: dist.NegativeBinomial2(jnp.exp(e), 2.5), "exp", [0, 4], INF, (1, 2)
    ),
    "NegativeBinomial": (
        lambda e: dist.NegativeBinomial(2.5, logits=e), "identity", [0, 4], INF, (1, 2)
    ),
    "Gamma": (lambda e: dist.Gamma(2.0, 3 * jnp.exp(e)), "exp", [0.5, 2.0], 2.0, (0, 1, 2)),
    "Exponential": (lambda e: dist.Exponential(jnp.exp(-e)), "exp", [0.5, 2.0], 2.0, (1, 2)),
    "OrderedLogistic": (
        lambda e: dist.OrderedLogistic(e, jnp.array([-1.0, 0.5])), "identity", [0, 1, 2], INF, ()
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide(x64):
    pass


FAST = ("Bernoulli", "StudentT", "Poisson")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_suprema_hold_and_are_attained(name):
    make, link, values, reach, attained = CASES[name]
    end = min(reach, 30.0)
    # no derivative is taken at a kink
    grid = jnp.linspace(-end, end, 4001) + 1e-7
    rule = bounds.rule_of(make(jnp.zeros(())))
    assert link in rule.derivatives

    @jax.jit
    def derivatives(y):
        psi = lambda e: make(e).log_prob(y)  # noqa: E731
        first = jax.grad(psi)
        second = jax.grad(first)
        return [jnp.nanmax(jnp.abs(jax.vmap(f)(grid))) for f in (first, second, jax.grad(second))]

    best = np.zeros(3)
    for y in np.asarray(values):
        found = np.array(derivatives(y))
        predictor = bounds._INVERSE[link](getattr(make(grid), rule.parameter))
        low, high = (-INF, INF) if reach == INF else (predictor.min(), predictor.max())
        suprema = rule.derivatives[link](
            make(jnp.zeros(())), y, jnp.asarray(low), jnp.asarray(high)
        )
        suprema = np.array([float(k) for k in suprema])
        known = np.isfinite(suprema)
        assert (found[known] <= suprema[known] * (1 + 1e-6) + 1e-9).all(), (y, found, suprema)
        with np.errstate(invalid="ignore", divide="ignore"):
            best = np.fmax(best, np.where(suprema > 0, found / suprema, 1.0))
    for m in attained:
        assert best[m] > 0.97, (m, best)


def test_suprema_of_a_categorical_distribution():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(300, 4)) * 3)
    first, second, _ = bounds.rule_of(dist.Categorical(logits=logits[0])).derivatives["identity"](
        None, None, None, None
    )
    psi = lambda e: dist.Categorical(logits=e).log_prob(1)  # noqa: E731
    first_two = jax.jit(jax.vmap(lambda e: (jax.grad(psi)(e), jax.hessian(psi)(e))))(logits)
    slope = np.linalg.norm(first_two[0], axis=-1)
    curve = np.linalg.norm(first_two[1], ord=2, axis=(-2, -1))
    assert 0.9 * first < slope.max() <= first and 0.9 * second < curve.max() <= second


@pytest.mark.parametrize(
    "make", [dist.Normal, lambda m, s: dist.StudentT(3.0, m, s), dist.Cauchy], ids=["n", "t", "c"]
)
def test_suprema_with_a_latent_scale(make):
    """Against derivatives along lines in (predictor, log scale)."""
    y, low, high = 0.3, jnp.array([-1.0, -0.7]), jnp.array([1.5, 0.4])
    rule = bounds.rule_of(make(0.0, 1.0))
    suprema = rule.scaled(make(0.0, 1.0), y, low, high)
    points = jnp.stack(
        jnp.meshgrid(*(jnp.linspace(a, b, 41) for a, b in zip(low, high, strict=True))), -1
    )
    points = points.reshape(-1, 2)
    angles = jnp.linspace(0, jnp.pi, 61)
    directions = jnp.stack([jnp.cos(angles), jnp.sin(angles)], -1)

    @jax.jit
    def largest():
        def along(point, direction):
            def f(t):
                eta, log_scale = point + t * direction
                return make(eta, jnp.exp(log_scale)).log_prob(y)

            first = jax.grad(f)
            second = jax.grad(first)
            return jnp.abs(jnp.stack([first(0.0), second(0.0), jax.grad(second)(0.0)]))

        found = jax.vmap(jax.vmap(along, (None, 0)), (0, None))(points, directions)
        return found.max((0, 1))

    ratio = np.asarray(largest()) / np.array([float(k) for k in suprema])
    assert (ratio <= 1 + 1e-9).all() and (ratio > 0.2).all(), ratio


def mixture(eta):
    weights, scales = jnp.array([0.3, 0.7]), jnp.array([0.5, 1.0])
    return dist.MixtureSameFamily(dist.Categorical(probs=weights), dist.StudentT(4.0, eta, scales))


def test_suprema_of_a_mixture():
    """Against derivatives along lines in the predictors of two components."""
    values = jnp.array([-2.0, 0.1, 3.0])
    rule, anywhere = bounds.rule_of(mixture(jnp.zeros(2))), jnp.full((3, 2), INF)
    suprema = rule.derivatives["identity"](mixture(jnp.zeros(2)), values, -anywhere, anywhere)
    angles = jnp.linspace(0, jnp.pi, 25)
    directions = jnp.stack([jnp.cos(angles), jnp.sin(angles)], -1)
    line = jnp.linspace(-4, 4, 31)
    points = jnp.stack(jnp.meshgrid(line, line), -1).reshape(-1, 2)

    @jax.jit
    def largest(y):
        def along(point, direction):
            def f(t):
                return mixture(point + t * direction).log_prob(y)

            first = jax.grad(f)
            second = jax.grad(first)
            return jnp.abs(jnp.stack([first(0.0), second(0.0), jax.grad(second)(0.0)]))

        return jax.vmap(jax.vmap(along, (None, 0)), (0, None))(points, directions).max((0, 1))

    found = np.max([largest(y) for y in values], 0)
    ratio = found / np.array([float(jnp.max(k)) for k in suprema])
    assert (ratio <= 1 + 1e-9).all() and (ratio > 0.1).all(), ratio


X = jnp.arange(12.0).reshape(4, 3) / 10
GROUP = jnp.array([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("predictor", "label"),
    [
        (lambda t: X @ t + 0.5, "identity"),
        (lambda t: t[GROUP] - X[:, 0] * t[1] / 2, "identity"),
        (lambda t: X @ jnp.concatenate([t[:1], jnp.ones(1), -t[2:]]), "identity"),
        (lambda t: jnp.where(X[:, 0] > 0.3, X @ t, 0.0), "identity"),
        (lambda t: jnp.stack([X @ t, jnp.zeros(4)], -1), "identity"),
        (lambda t: 3 * jnp.exp(X @ t) / jnp.exp(t[0]), "exp"),
        (lambda t: jnp.log(jnp.exp(X @ t)), "identity"),
        (lambda t: jax.nn.softplus(X @ t), "softplus"),
        (lambda t: jax.nn.sigmoid(X @ t), "logistic"),
        (lambda t: dist.Normal(0, 2).cdf(X @ t), "probit"),
        (lambda t: jax.scipy.stats.norm.cdf(X @ t, loc=t[0]), "probit"),
        (lambda t: 0.5 * jax.scipy.special.erf(X @ t), None),
        (lambda t: 0.4 * jax.scipy.special.ndtr(X @ t), None),
        (lambda t: X[:, 0] + 1, "const"),
        (lambda t: jnp.exp(X @ t) + 1, None),
        (lambda t: jnp.exp(t[0]) * (X @ t), None),
        (lambda t: (X @ t) ** 2, None),
        (lambda t: jnp.where(t[0] > 0, X @ t, 0.0), None),
        (lambda t: jnp.where(X[:, 0] > 0.3, jnp.exp(X @ t), 0.0), None),
        (lambda t: X[:, 0] / t[0], None),
        (lambda t: jnp.maximum(X @ t, 0.0), None),
        (lambda t: jnp.logaddexp(X @ t, 1.0), None),
        (lambda t: X[jnp.argmax(t)], None),
        (lambda t: jnp.sort(t), None),
    ],
)
def test_affine_predictors_are_told_from_others(predictor, label):
    assert bounds._labels(lambda t: [predictor(t)], jnp.zeros(3)) == [label]


def test_constants_sum_over_numbers_masks_and_scales():
    """By hand: k2 |L' x|^2 summed over two outcomes of a datum, one of them masked."""
    x = np.random.default_rng(0).normal(size=(5, 2, 3))
    weight = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [2.0, 1.0], [1.0, 1.0]])
    scale = np.triu(np.random.default_rng(1).normal(size=(3, 3)))

    def observed(z):
        site = dist.Bernoulli(logits=jnp.asarray(x) @ z)
        return {"y": Observed(site, jnp.zeros((5, 2)), (5, 2), 0, jnp.asarray(weight))}

    found = bounds.derivative_bounds(
        observed, {"y": "identity"}, 5, 1, jnp.zeros(3), jnp.asarray(scale), jnp.asarray(INF)
    )
    expected = (0.25 * weight * ((x @ scale) ** 2).sum(-1)).sum(1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def regression(x, y, likelihood):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("N", len(y), subsample_size=3) as i:
        numpyro.sample("y", likelihood(x[i] @ beta, scale), obs=y[i])


@pytest.mark.parametrize(
    ("likelihood", "words"),
    [
        (lambda eta, s: dist.VonMises(eta, 1.0), r"no bounds for site 'y', the distribution VonM"),
        (lambda eta, s: dist.Bernoulli(logits=s * eta), r"`logits` of site 'y'.*not affine"),
        (lambda eta, s: dist.Poisson(1 + eta**2), r"`rate` of site 'y'.*link exp or softplus"),
        (lambda eta, s: dist.Normal(eta, 1 + s), r"constant `scale` at site 'y'"),
    ],
)
def test_likelihoods_without_bounds_are_refused_by_site(likelihood, words):
    x, y = np.ones((6, 2)), np.ones(6)
    with pytest.raises(UnsupportedModelError, match=words):
        TunaMH(regression).init(jax.random.key(0), 0, None, (x, y, likelihood), {})


@pytest.mark.slow
def test_a_registered_rule_is_used_and_check_finds_a_wrong_one(monkeypatch):
    monkeypatch.setattr(bounds, "_RULES", dict(bounds._RULES))

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("N", len(y), subsample_size=3) as i:
            numpyro.sample("y", dist.Logistic(x[i] @ beta, 1.0), obs=y[i])

    rng = np.random.default_rng(0)
    data = rng.normal(size=(30, 2)) / 5, rng.normal(size=30)
    found = bounds.check(model, *data)
    assert 0.9 < found.max_ratio <= 1 and found.num_violations == 0
    wrong = bounds.Rule("loc", {"identity": lambda *_: (1.0, 0.2, 0.1)}, ("scale",))
    bounds.register_bounds(dist.Logistic, wrong)
    found = bounds.check(model, *data)
    assert found.max_ratio > 2 and found.num_violations > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "likelihood",
    [
        dist.Normal,
        lambda eta, s: dist.StudentT(4.0, eta, s),
        lambda eta, s: dist.Bernoulli(probs=dist.Normal().cdf(eta)),
        lambda eta, s: mixture(jnp.stack([eta, eta + 1], -1)),
    ],
    ids=["normal", "student", "probit", "mixture"],
)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_bounds_of_models_hold_at_random_points(likelihood, order):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    y = rng.normal(size=60)
    y = np.where(y > 0, 1.0, 0.0) if likelihood(0.0, 1.0).is_discrete else y
    found = bounds.check(regression, x, y, likelihood, order=order)
    assert 0.01 < found.max_ratio <= 1 and found.num_violations == 0
