"""TunaMH on NumPyro models: terms, refusals, and a run from start to ArviZ."""

import warnings

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, init_to_value
from scipy import stats

import ppl_ext
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro import TunaMH, bounds
from ppl_ext.numpyro.entries import normal_in_a_subsampled_plate
from ppl_ext.numpyro.target import target

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(7, 2)), RNG.normal(size=7)
REPEATS, MASK = RNG.integers(0, 2, size=(7, 3)), RNG.uniform(size=7) < 0.6
OUTSIDE = 0.4


def everything(x, y, repeats, mask):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    rate = numpyro.sample("rate", dist.Exponential(2.0))
    numpyro.sample("outside", dist.Normal(beta[0], 1), obs=OUTSIDE)
    numpyro.factor("penalty", -rate)
    with numpyro.plate("N", len(y), subsample_size=3) as i:
        rows = numpyro.subsample(x, event_dim=1)
        with numpyro.handlers.mask(mask=mask[i]):
            numpyro.sample("y", dist.Normal(rows @ beta, 0.5), obs=y[i])
        with numpyro.handlers.scale(scale=0.25):
            numpyro.sample("vector", dist.Normal(0.0, rate).expand([3]).to_event(1), obs=repeats[i])
    with numpyro.plate("repeat", 3, dim=-2), numpyro.plate("N2", 7, dim=-1):
        pass


def by_hand(beta, rate, i):
    terms = MASK[i] * stats.norm.logpdf(Y[i], X[i] @ beta, 0.5)
    return terms + 0.25 * stats.norm.logpdf(REPEATS[i], 0, rate).sum(1)


def test_terms_and_the_rest_are_those_of_the_formula(x64):
    found = target(everything, X, Y, REPEATS, MASK)
    data = tuple(map(jnp.asarray, (X, Y, REPEATS, MASK)))
    beta, log_rate = np.array([0.3, -0.7]), 0.2
    z = {"beta": jnp.asarray(beta), "rate": jnp.asarray(log_rate)}
    rate = np.exp(log_rate)
    indices = jnp.array([5, 0, 0, 6, 2])
    terms = jax.jit(lambda z, i: found.log_likelihood_terms(z, "N", i, *data))(z, indices)
    np.testing.assert_allclose(terms, by_hand(beta, rate, np.asarray(indices)), rtol=1e-9)
    base = jax.jit(lambda z: found.log_base(z, "N", *data))(z)
    expected = stats.norm.logpdf(beta).sum() + stats.expon.logpdf(rate, scale=0.5) + log_rate
    expected += stats.norm.logpdf(OUTSIDE, beta[0], 1) - rate
    np.testing.assert_allclose(base, expected, rtol=1e-9)
    # what the bounds read
    sites = found.observed(z, "N", indices, *data)
    assert sites["y"].weight.tolist() == MASK[np.asarray(indices)].tolist()
    assert sites["vector"].weight.tolist() == [[0.25] * 3] * 5 and sites["vector"].axis == 0


def nested(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("time", 3, dim=-2), numpyro.plate("N", 7, subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[:, i])


def test_a_plate_inside_or_around_belongs_to_the_datum(x64):
    y = jnp.asarray(RNG.normal(size=(3, 7)))
    found = target(nested, y)
    terms = found.log_likelihood_terms({"mu": jnp.asarray(0.5)}, "N", jnp.array([4, 1]), y)
    np.testing.assert_allclose(terms, stats.norm.logpdf(y, 0.5).sum(0)[[4, 1]], rtol=1e-9)
    assert found.observed({"mu": jnp.asarray(0.5)}, "N", jnp.array([4, 1]), y)["y"].axis == 1


def start(kernel, *args):
    return kernel.init(jax.random.key(0), 0, None, args, {})


def local(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("N", len(y), subsample_size=2) as i:
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(theta, 1), obs=y[i])


def no_plate(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1).expand([len(y)]).to_event(1), obs=y)


def two_plates(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    for name in ("A", "B"):
        with numpyro.plate(name, len(y)) as i:
            numpyro.sample(f"y{name}", dist.Normal(mu, 1), obs=y[i])


def not_indexed(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("N", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def with_factor(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("N", len(y), subsample_size=2) as i:
        numpyro.factor("loss", -((y[i] - mu) ** 2))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (local, {}, "latent site 'theta' lies inside"),
        (no_plate, {}, "no plate of the model holds an observed site"),
        (two_plates, {}, r"several plates hold data, \['A', 'B'\]"),
        (two_plates, {"plate": "C"}, "no plate 'C'"),
        (nested, {"plate": "time"}, "'N' is subsampled, but `plate` is 'time'"),
        (not_indexed, {}, "plate 'N'.*Index the data by the plate"),
        (with_factor, {}, "no bounds for site 'loss', a factor"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(model, options, words):
    y = np.ones((3, 7)) if model is nested else Y
    with pytest.raises(UnsupportedModelError, match=words):
        start(TunaMH(model, **options), y)


def test_a_block_of_gibbs_is_refused():
    with pytest.raises(UnsupportedModelError, match="no block of Gibbs"):
        TunaMH(nested).init(jax.random.key(0), 0, None, (Y,), {"_gibbs_sites": {}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": 3}, "`order` must be 0, 1 or 2, got 3"),
        ({"proposal": "nuts"}, "`proposal` must be one of 'taylor-mala'"),
        ({"rates": "min"}, "`rates` must be"),
        ({"chi": -1.0}, "`chi` must be"),
        ({"chi": 0.0, "rates": "tuna"}, "`chi` must be positive"),
        ({"fallback": 1}, "`fallback` must be"),
        ({"step_size": 0}, "`step_size` must be"),
        ({"target_accept_prob": 1.5}, "`target_accept_prob` must be"),
        ({"grad_size": 0}, "`grad_size` must be"),
        ({"chunk_size": 1.5}, "`chunk_size` must be"),
        ({"bounds": "empirical"}, "`bounds` must be"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        TunaMH(nested, **options)


def test_a_run_finds_the_exact_posterior_and_becomes_arviz():
    """|z| < 5 for means and sds at an effective size of 400: false alarms below 1e-5."""
    example = normal_in_a_subsampled_plate()
    kernel = TunaMH(example.model)
    mcmc = MCMC(
        kernel, num_warmup=300, num_samples=1500, num_chains=2, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(0), *example.args)
    draws, fields = np.asarray(mcmc.get_samples()["theta"]), mcmc.get_extra_fields()
    assert (np.abs(draws.mean(0) - example.mean["theta"]) < example.sd["theta"] / 4).all()
    assert (np.abs(draws.std(0) / example.sd["theta"] - 1) < 0.18).all()
    assert fields["num_violations"].max() == 0
    # drawn without fallback most of the time, and all taken into account
    assert 1 < fields["num_drawn"][~fields["fallback"]].mean() < 40
    assert fields["fallback"].mean() < 0.5
    assert (fields["num_kept"] <= fields["num_drawn"]).all()
    assert (fields["num_drawn"][fields["fallback"]] == 40).all()
    assert 0.3 < fields["accept_prob"].mean() < 0.8
    assert np.unique(fields["step_size"]).size == 2  # frozen, one for each chain

    data = ppl_ext.to_arviz(mcmc)
    statistics = {"num_drawn", "num_kept", "noise_variance", "fallback", "num_violations"}
    assert statistics <= set(data["sample_stats"].data_vars)
    np.testing.assert_allclose(data["observed_data"]["y"], example.args[0], rtol=1e-6)
    assert "log_likelihood" not in list(data.groups() if hasattr(data, "groups") else data)

    mcmc._states["num_violations"] = mcmc._states["num_violations"] + 1
    with pytest.warns(UserWarning, match="A bound was violated 1 times"):
        ppl_ext.to_arviz(mcmc)

    # other data: the fit is found again
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), example.args[0] + 5)
    shifted = np.asarray(mcmc.get_samples()["theta"])[500:]
    exact = example.mean["theta"] + 5 * 40 * example.sd["theta"] ** 2 / 1.5**2
    assert (np.abs(shifted.mean(0) - exact) < example.sd["theta"] / 4).all()


# --- slower --------------------------------------------------------------------------------------


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def tall_data(size, dimension=3):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(size, dimension))
    y = rng.uniform(size=size) < 1 / (1 + np.exp(-x @ np.linspace(-1, 1, dimension)))
    return x, y.astype(float)


def drawn(kernel, data, num_samples=4000):
    mcmc = MCMC(kernel, num_warmup=500, num_samples=num_samples, progress_bar=False)
    mcmc.run(jax.random.key(0), *data)
    return np.asarray(mcmc.get_samples()["beta"], np.float64), mcmc.get_extra_fields()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"proposal": "sgld"},
        {"proposal": "barker", "delayed": True},
        {"order": 2},
        {"proposal": "random_walk", "rates": "tuna"},
        {"init_strategy": init_to_value(values={"beta": jnp.array([3.0, 0.0, -3.0])})},
    ],
    ids=str,
)
def test_options_agree_with_nuts(options):
    """5 standard errors of the difference, effective sizes of 300 and 2,000."""
    data = tall_data(5000)
    ours, fields = drawn(TunaMH(logistic, **options), data)
    full = lambda x, y: logistic_full(x, y)  # noqa: E731
    theirs, _ = drawn(NUTS(full), data, 2000)
    sd = theirs.std(0)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5 * sd * np.sqrt(1 / 300 + 1 / 2000)).all()
    assert (np.abs(ours.std(0) / sd - 1) < 5 * np.sqrt(1 / 600 + 1 / 4000)).all()
    assert fields["num_violations"].max() == 0


def logistic_full(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=jnp.asarray(x) @ beta), obs=y)


@pytest.mark.slow
def test_the_data_drawn_do_not_grow_with_their_number():
    small, large = (
        drawn(TunaMH(logistic), tall_data(n), 1000)[1]["num_drawn"].mean() for n in (10**4, 10**5)
    )
    assert 0.7 < large / small < 1.4 and large < 100


@pytest.mark.slow
def test_a_kinked_likelihood_needs_order_zero():
    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("N", len(y), subsample_size=3) as i:
            numpyro.sample("y", dist.Laplace(x[i] @ beta, 1.0), obs=y[i])

    with pytest.raises(UnsupportedModelError, match=r"derivative of order 2.*smaller `order`"):
        start(TunaMH(model), X, Y)


@pytest.mark.slow
def test_deterministic_sites_inside_the_plate_are_dropped_with_a_warning():
    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("N", len(y), subsample_size=3) as i:
            eta = numpyro.deterministic("eta", x[i] @ beta)
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y[i])

    mcmc = MCMC(TunaMH(model), num_warmup=5, num_samples=5, progress_bar=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(jax.random.key(0), X, Y)
    assert any("['eta']" in str(w.message) for w in caught)
    assert set(mcmc.get_samples()) == {"beta"}


@pytest.mark.slow
def test_a_factor_is_taken_with_bounds_of_the_user():
    """-(y - mu)^2 / 2 has the second derivative 1: a normal posterior; 5 standard errors."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("N", len(y), subsample_size=2) as i:
            numpyro.factor("loss", -((y[i] - mu) ** 2) / 2)

    y = RNG.normal(size=50) + 1
    kernel = TunaMH(model, bounds=lambda mode, scale, radius: jnp.full(50, scale[0, 0] ** 2))
    mcmc = MCMC(kernel, num_warmup=300, num_samples=3000, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    mu, fields = np.asarray(mcmc.get_samples()["mu"]), mcmc.get_extra_fields()
    assert abs(mu.mean() - y.sum() / 51) < 5 * 51**-0.5 / np.sqrt(500)
    assert abs(mu.std() * 51**0.5 - 1) < 5 / np.sqrt(1000)
    assert fields["num_violations"].max() == 0 and fields["num_drawn"].mean() < 40


# --- estimated bounds ------------------------------------------------------------------------


def extremes(x, y):
    """Gumbel noise, which has no bounds."""
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    with numpyro.plate("N", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.Gumbel(slope * x[i], 1.0), obs=y[i])


def test_likelihoods_without_bounds_and_half_of_a_request_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"Gumbel.*`exact=False`"):
        MCMC(TunaMH(extremes), num_warmup=1, num_samples=1).run(
            jax.random.key(0), RNG.normal(size=20), RNG.normal(size=20)
        )
    with pytest.raises(ValueError, match="leave out `bounds`"):
        TunaMH(extremes, exact=False, bounds=lambda mode, scale, radius: 1.0)


@pytest.mark.slow
def test_bounds_are_estimated_on_request_and_the_run_says_so():
    """The mean against quadrature: |z| < 4.5, once in 150,000 for a right kernel.

    Without violations the draws are exact.
    """
    rng = np.random.default_rng(2)
    x = rng.normal(size=300)
    y = 0.7 * x + rng.gumbel(size=300)
    mcmc = MCMC(TunaMH(extremes, exact=False), num_warmup=500, num_samples=8000, progress_bar=False)
    with pytest.warns(UserWarning, match="the bounds are estimates"):
        mcmc.run(jax.random.key(0), x, y)
    fields = mcmc.get_extra_fields()
    assert fields["num_violations"].max() == 0 and fields["fallback"].mean() < 0.05
    grid = np.linspace(0, 1.5, 3001)
    log_density = stats.norm.logpdf(grid, 0, 2) + sum(
        stats.gumbel_r.logpdf(b, grid * a) for a, b in zip(x, y, strict=True)
    )
    weight = np.exp(log_density - log_density.max())
    exact = (grid * weight).sum() / weight.sum()
    draws = ppl_ext.to_arviz(mcmc)
    assert draws["sample_stats"].attrs["estimated_bounds"] == 1
    slope = draws["posterior"]["slope"]
    error = float(slope.std()) / np.sqrt(float(az.ess(slope)["slope"]))
    assert abs(float(slope.mean()) - exact) < 4.5 * error


@pytest.mark.parametrize("order", [0, 1, 2])
def test_estimated_bounds_are_near_the_true_ones(order):
    """Of a cubic, whose Taylor polynomials at 0 vanish."""
    coefficient = jnp.array([0.5, -2.0, 0.0])
    found = bounds.empirical_bounds(lambda x, i: coefficient[i] * x[0] ** 3, 3, order, factor=1.0)(
        jnp.array([0.0]), jnp.array([[2.0]]), jnp.array(3.0)
    )
    # |w^3 - v^3| over the distance is largest where w and v are both 3, and x = 2 w
    true = jnp.abs(coefficient) * 8 * jnp.array([27.0, 9.0, 6.0])[order]
    assert (found <= true * (1 + 1e-4)).all() and (found >= 0.9 * true).all()
    assert jnp.isinf(
        bounds.empirical_bounds(lambda x, i: coefficient[i] * x[0], 3, order)(
            jnp.array([0.0]), jnp.array([[2.0]]), jnp.inf
        )
    ).all()
