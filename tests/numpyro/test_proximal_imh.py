"""ProximalIMH: models with operators, proposals, corrections, and what it refuses, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import HMC, MCMC, NUTS, SVI, Gibbs, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import stats

from ppl_ext import BlackBox
from ppl_ext.diagnostics import imh_report
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro import ULD, ProximalIMH
from ppl_ext.numpyro.target import target

A = np.array([[1.0, 0.5, 0.2], [0.3, 1.2, -0.4], [0.1, 0.2, 0.9], [0.6, -0.5, 0.3]])
CHEAP = A + 0.15 * np.random.default_rng(0).normal(size=A.shape)
Y = np.array([0.7, -0.4, 1.1, 0.2])
SIGMA = 0.3


def exact_operator(x):
    return A @ x


def cheap_operator(x):
    return CHEAP @ x


def model(y, forward=exact_operator):
    x = numpyro.sample("x", dist.Normal(0, 1).expand([3]).to_event(1))
    u = numpyro.deterministic("u", forward(x))
    numpyro.sample("y", dist.Normal(u, SIGMA).to_event(1), obs=y)


def posterior(sigma=SIGMA):
    covariance = np.linalg.inv(np.eye(3) + A.T @ A / sigma**2)
    return covariance @ A.T @ Y / sigma**2, covariance


def run(kernel, num_samples=2000, num_chains=2, num_warmup=0, args=(Y,), seed=0, **options):
    options = {"chain_method": "vectorized", "progress_bar": False, **options}
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains, **options
    )
    mcmc.run(jax.random.key(seed), *args)
    return mcmc


def check(draws, ess):
    """Means and variances within five standard errors: 3e-6 false alarms for each of nine."""
    mean, covariance = posterior()
    sd = np.sqrt(np.diag(covariance))
    assert (np.abs(draws.mean(0) - mean) < 5 * sd / np.sqrt(ess)).all()
    correlation = np.cov(draws.T) / np.outer(sd, sd)
    assert (np.abs(correlation - covariance / np.outer(sd, sd)) < 5 * np.sqrt(2 / ess)).all()


@pytest.fixture(scope="module")
def affine_run():
    return run(ProximalIMH(model, approx=dict(forward=cheap_operator), correction="affine"))


def test_draws_have_the_exact_posterior_at_one_solve_each(affine_run):
    report = imh_report(affine_run)
    assert report.accept_prob > 0.85 and report.warnings == ()
    # three points of linearisation with three derivatives each
    assert report.num_solves == 4000 + 3 * (1 + 3)
    check(affine_run.get_samples()["x"], 1800)
    assert report.ess > 1800


def test_the_report_holds_evidence_estimates_and_the_approximate_posterior(affine_run):
    report = imh_report(affine_run)
    mean, covariance = posterior()
    law = stats.multivariate_normal(np.zeros(4), A @ A.T + SIGMA**2 * np.eye(4))
    assert abs(report.log_evidence - law.logpdf(Y)) < 5 * report.log_evidence_error
    assert report.log_evidence_error < 0.02
    estimates = report.importance_estimates()
    assert list(estimates.index) == ["x[0]", "x[1]", "x[2]"]
    assert (np.abs(estimates["mean"] - mean) < 5 * estimates["mean_mcse"]).all()
    np.testing.assert_allclose(estimates["sd"], np.sqrt(np.diag(covariance)), rtol=0.08)
    # the cheap posterior is the base itself: its draws have equal weights
    approx = np.linalg.inv(np.eye(3) + CHEAP.T @ CHEAP / SIGMA**2)
    expected = approx @ CHEAP.T @ Y / SIGMA**2
    np.testing.assert_allclose(report.comparison["approx_mean"], expected, atol=0.03)
    text = str(report)
    assert "correction affine: 4000 proposals" in text and "x[2]" in text


@pytest.mark.slow
def test_without_a_map_the_same_draws_are_exact_and_fewer(affine_run):
    plain = run(ProximalIMH(model, approx=dict(forward=cheap_operator), correction=None))
    accepted = [m.get_extra_fields()["accept_prob"].mean() for m in (plain, affine_run)]
    assert accepted[0] < accepted[1] - 0.1
    check(plain.get_samples()["x"], 600)


def test_auto_chooses_by_what_the_operators_offer():
    chosen = lambda kernel: (kernel.init(jax.random.key(0), 0, None, (Y,), {}), kernel.settings)[1]  # noqa: E731
    approx = dict(forward=cheap_operator)
    assert chosen(ProximalIMH(model, approx={})).correction is None
    black_box = dict(forward=BlackBox(np_operator, (4,)))
    assert chosen(ProximalIMH(model, approx=approx, exact=black_box)).correction == "affine"
    with pytest.raises(UnsupportedModelError, match=r"cheap model .* has no derivative"):
        chosen(ProximalIMH(model, approx=black_box))


def np_operator(x):
    return A @ np.asarray(x)


def test_a_black_box_is_called_once_for_all_chains_and_a_whole_batch():
    operator = BlackBox(np_operator, (4,))
    kernel = ProximalIMH(
        model, approx=dict(forward=cheap_operator), exact=dict(forward=operator), batch_size=100
    )
    mcmc = run(kernel, num_samples=1000, num_chains=4)
    check(mcmc.get_samples()["x"], 1800)
    # linearised three times, energies at the start, ten batches of four chains, and the
    # deterministic site of each draw
    solves = 3 * 4 + 4 + 10 * 4 * 100 + 4 * 1000
    assert solves <= operator.num_solves <= solves + 20
    assert 10 <= operator.num_calls <= 10 + 1000 + 20


@pytest.mark.slow
def test_a_black_box_runs_in_spawned_processes():
    operator = BlackBox(np.cumsum, (3,), processes=2)

    def sums(y, forward=operator):
        x = numpyro.sample("x", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(forward(x), SIGMA).to_event(1), obs=y)

    kernel = ProximalIMH(sums, approx=dict(forward=lambda x: 1.1 * jnp.cumsum(x)))
    try:
        mcmc = run(kernel, num_samples=1000, args=(Y[:3],))
    finally:
        operator.close()
    lower = np.tril(np.ones((3, 3)))
    covariance = np.linalg.inv(np.eye(3) + lower.T @ lower / SIGMA**2)
    error = mcmc.get_samples()["x"].mean(0) - covariance @ lower.T @ Y[:3] / SIGMA**2
    assert (np.abs(error) < 5 * np.sqrt(np.diag(covariance) / 1000)).all()


def noisy(y, forward=exact_operator):
    """Constrained sites and an unknown noise scale."""
    x = numpyro.sample("x", dist.Normal(0, 1).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(jnp.log(0.3), 0.1))
    weight = numpyro.sample("weight", dist.Uniform(0.9, 1.1))
    numpyro.sample("y", dist.Normal(weight * forward(x), sigma).to_event(1), obs=y)


def noisy_reference():
    """Mean of (x, sigma, weight): x integrated out, the others on a grid."""
    sigmas, weights = np.exp(np.linspace(-1.8, -0.6, 100)), np.linspace(0.901, 1.099, 100)
    total, sums = 0.0, np.zeros(5)
    for sigma in sigmas:
        for weight in weights:
            a = weight * A
            law = stats.multivariate_normal(np.zeros(4), a @ a.T + sigma**2 * np.eye(4))
            # the grid is even in log(sigma)
            p = np.exp(law.logpdf(Y)) * stats.norm.pdf(np.log(sigma), np.log(0.3), 0.1)
            mean = np.linalg.solve(np.eye(3) + a.T @ a / sigma**2, a.T @ Y / sigma**2)
            sums += p * np.concatenate([mean, [sigma, weight]])
            total += p
    return sums / total


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "gibbs"])
def test_noise_scale_and_constrained_sites(how):
    """Against integration; five standard errors at an effective size of 700 (measured: 900)."""
    approx = dict(forward=cheap_operator)
    if how == "alone":
        kernel = ProximalIMH(noisy, approx=approx, correction="affine", defensive=0.05)
        mcmc = run(kernel, num_samples=3000)
    else:
        block = ProximalIMH(noisy, approx=approx, correction="affine")
        gibbs = Gibbs([(block, ["x"]), (NUTS(noisy), ["sigma", "weight"])])
        mcmc = run(gibbs, 3000, num_chains=1, num_warmup=300)
    draws = mcmc.get_samples()
    columns = np.column_stack([draws["x"], draws["sigma"], draws["weight"]])
    error = np.abs(columns.mean(0) - noisy_reference())
    assert (error < 5 * columns.std(0) / np.sqrt(700)).all()


# --- proposals ---------------------------------------------------------------------------------


def fitted(guide_type):
    guide = guide_type(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.02), Trace_ELBO(10))
    result = svi.run(jax.random.key(0), 1500, Y, forward=cheap_operator, progress_bar=False)
    return guide, result.params


def normal_of_the_cheap_posterior():
    covariance = np.linalg.inv(np.eye(3) + CHEAP.T @ CHEAP / SIGMA**2)
    mean = covariance @ CHEAP.T @ Y / SIGMA**2
    return dist.MultivariateNormal(jnp.asarray(mean), jnp.asarray(1.2 * covariance))


SLOW = ["guide", "mean field", "draws", "kernel", "local"]
KINDS = ["distribution", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_proposal_gives_the_exact_posterior(kind):
    options = {}
    normal = normal_of_the_cheap_posterior()
    if kind == "distribution":
        proposal = normal
    elif kind == "guide":
        proposal = fitted(AutoMultivariateNormal)
    elif kind == "mean field":
        proposal = fitted(AutoNormal)
    elif kind == "draws":
        z = normal.sample(jax.random.key(5), (2000,))
        proposal = (z, normal.log_prob(z))
    elif kind == "kernel":
        proposal, options = NUTS(model), {"inner_steps": 2}
    else:
        proposal, options = "laplace", {"local_kernel": NUTS(model), "defensive": 0.1}
    kernel = ProximalIMH(
        model,
        approx=dict(forward=cheap_operator),
        proposal=proposal,
        correction="affine",
        **options,
    )
    mcmc = run(kernel, num_warmup=100 if kind == "local" else 0)
    check(mcmc.get_samples()["x"], 1000)


@pytest.mark.slow
def test_draws_after_the_last_given_one_are_nan():
    normal = normal_of_the_cheap_posterior()
    z = normal.sample(jax.random.key(5), (20,))
    kernel = ProximalIMH(
        model, approx=dict(forward=cheap_operator), proposal=(z, normal.log_prob(z))
    )
    x = run(kernel, num_samples=30).get_samples(group_by_chain=True)["x"]
    assert np.isfinite(x[:, :20]).all() and np.isnan(x[:, 20:]).all()


# --- arguments and refusals --------------------------------------------------------------------

APPROX = {"approx": {"forward": cheap_operator}}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"approx": cheap_operator}, TypeError, "`approx` must be a dict of keyword arguments"),
        ({**APPROX, "exact": 3}, TypeError, "`exact` must be a dict"),
        ({**APPROX, "correction": "prox"}, ValueError, "`correction` must be one of 'auto', 'gn'"),
        ({**APPROX, "beta": 0.0}, ValueError, "`beta` must be a positive finite number, got 0.0"),
        ({**APPROX, "steps": 0}, ValueError, "`steps`"),
        ({**APPROX, "batch_size": 1.5}, ValueError, "`batch_size`"),
        ({**APPROX, "defensive": 1.0}, ValueError, "`defensive` must be a number from 0 to 1"),
        ({**APPROX, "metric": "noise"}, ValueError, '`metric` must be "likelihood" or an array'),
        (
            {**APPROX, "weight": [[1.0, 2.0], [2.0, 1.0]]},
            ValueError,
            r"`weight`.*positive definite",
        ),
        ({**APPROX, "proposal": "normal"}, TypeError, "`proposal` must be .*got 'normal'"),
        ({**APPROX, "proposal": ULD(model)}, TypeError, "HMC, NUTS or BarkerMH, .* got ULD"),
        (
            {**APPROX, "proposal": NUTS(noisy)},
            ValueError,
            "`proposal` must be a kernel on the same",
        ),
        ({**APPROX, "local_kernel": HMC(noisy)}, ValueError, "`local_kernel` must be a kernel on"),
        ({**APPROX, "inner_steps": 3}, ValueError, "`inner_steps` must be None unless `proposal`"),
        (
            {**APPROX, "proposal": (np.zeros((5, 3)), np.zeros(4))},
            ValueError,
            r"shapes \(N, d\) and \(N,\), got \(5, 3\) and \(4,\)",
        ),
        (
            {**APPROX, "proposal": (np.zeros((5, 3)), np.zeros(5)), "defensive": 0.1},
            ValueError,
            "given draws have it at themselves only",
        ),
        (
            {**APPROX, "proposal": NUTS(model), "defensive": 0.1},
            ValueError,
            "`defensive` must be 0",
        ),
    ],
)
def test_a_bad_argument_is_named(arguments, error, words):
    with pytest.raises(error, match=words):
        ProximalIMH(model, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"proposal": dist.Normal(0, 1)}, r"one vector of 3 numbers.*\['x'\]"),
        ({"proposal": (np.zeros((5, 2)), np.zeros(5))}, "have 2 numbers, the model 3"),
        ({"correction": "latent"}, r"one deterministic site with 3 numbers.*\{'u': 4\}"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_at_the_start(arguments, words):
    kernel = ProximalIMH(model, **APPROX, **arguments)
    with pytest.raises(ValueError, match=words):
        kernel.init(jax.random.key(0), 0, None, (Y,), {})


def test_a_likelihood_without_a_prediction_is_refused():
    def factor(y, forward=exact_operator):
        x = numpyro.sample("x", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.factor("likelihood", -jnp.sum((forward(x) - y) ** 2))

    with pytest.raises(UnsupportedModelError, match=r"no observed site.*not as a factor"):
        ProximalIMH(factor, **APPROX).init(jax.random.key(0), 0, None, (Y,), {})


def test_black_boxes_check_what_they_are_given():
    with pytest.raises(TypeError, match="`function` must be callable, got int"):
        BlackBox(3, (2,))
    with pytest.raises(ValueError, match=r"`shape` must be a tuple of positive ints, got 3"):
        BlackBox(np.cumsum, 3)
    with pytest.raises(ValueError, match=r"returned the shape \(3,\), but `shape` is \(2,\)"):
        BlackBox(np.cumsum, (2,)).evaluate(np.ones((1, 3)))


def test_reports_are_of_finished_runs_of_this_kernel():
    with pytest.raises(TypeError, match=r"ProximalIMH, got one of ULD"):
        imh_report(MCMC(ULD(model), num_warmup=1, num_samples=1, progress_bar=False))
    with pytest.raises(ValueError, match="holds no draws"):
        imh_report(MCMC(ProximalIMH(model, **APPROX), num_warmup=1, num_samples=1))


# --- what the front end reads from a model -----------------------------------------------------


def test_predictions_and_noise_are_read_from_the_observed_sites():
    def both(y):
        x = numpyro.sample("x", dist.LogNormal(0, 1))
        numpyro.sample("a", dist.MultivariateNormal(jnp.array([x, 2 * x]), COVARIANCE), obs=y[:2])
        numpyro.sample("b", dist.StudentT(3.0, x, 2.0).expand([2]).to_event(1), obs=y[2:])
        numpyro.sample("c", dist.Poisson(3 * x), obs=4)

    found = target(both, Y).bind(Y)
    mean, covariance = found.observation({"x": jnp.log(2.0)})
    np.testing.assert_allclose(mean, [2, 4, 2, 2, 6], rtol=1e-6)
    expected = np.zeros((5, 5))
    expected[:2, :2] = COVARIANCE
    expected[2, 2] = expected[3, 3] = 4 * 6 / 4
    expected[4, 4] = 6
    np.testing.assert_allclose(covariance, expected, rtol=1e-6)


COVARIANCE = np.array([[2.0, 0.5], [0.5, 1.0]])


def test_prior_scales_are_exact_for_normal_priors_and_drawn_for_others():
    def priors():
        numpyro.sample("a", dist.MultivariateNormal(jnp.zeros(2), COVARIANCE))
        tau = numpyro.sample("b", dist.LogNormal(0, 0.5))
        numpyro.sample("c", dist.Normal(0, tau))
        mixing = dist.Categorical(jnp.array([0.25, 0.75]))
        parts = dist.Normal(jnp.array([-5.0, 5.0]), jnp.array([1.0, 2.0]))
        numpyro.sample("d", dist.MixtureSameFamily(mixing, parts))
        numpyro.sample("e", dist.Uniform(0, 1))
        numpyro.sample("f", dist.Normal(jnp.zeros(2), 3.0).to_event(1))

    covariance = target(priors).bind().prior_covariance()
    np.testing.assert_allclose(covariance[:2, :2], COVARIANCE)
    diagonal = np.diag(covariance)
    # log(tau), E tau^2, and the variance of a logistic variable, from 1000 draws
    np.testing.assert_allclose(diagonal[2], 0.25, rtol=0.25)
    np.testing.assert_allclose(diagonal[3], np.exp(0.5), rtol=0.25)
    np.testing.assert_allclose(diagonal[5], np.pi**2 / 3, rtol=0.25)
    np.testing.assert_allclose(diagonal[4], 0.25 * 1 + 0.75 * 4, rtol=1e-6)
    np.testing.assert_allclose(diagonal[6:], 9, rtol=1e-6)
    assert np.count_nonzero(covariance - np.diag(diagonal)) == 2


def test_the_prior_alone_has_its_density_and_draws():
    bound = target(noisy, Y).bind(Y)
    z = {"x": jnp.array([0.1, -0.2, 0.3]), "sigma": jnp.array(-1.0), "weight": jnp.array(0.4)}
    weight = 1 / (1 + np.exp(-0.4))
    expected = stats.norm.logpdf(z["x"]).sum() + stats.norm.logpdf(-1.0, np.log(0.3), 0.1)
    expected += np.log(weight * (1 - weight))
    np.testing.assert_allclose(bound.log_prior(z), expected, rtol=1e-5)
    draws = jax.vmap(bound.prior_draw)(jax.random.split(jax.random.key(0), 2000))
    assert abs(draws["sigma"].mean() - np.log(0.3)) < 5 * 0.1 / np.sqrt(2000)
