"""Proximal-IMH on Pyro models: the functions it is given, and runs against closed forms."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as npdist
import pytest

torch = pytest.importorskip("torch")
pyro = pytest.importorskip("pyro")

import pyro.distributions as dist
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import ppl_ext
from ppl_ext import _arviz, registry
from ppl_ext.diagnostics import imh_report
from ppl_ext.errors import TracingError, UnsupportedModelError
from ppl_ext.numpyro.target import target as numpyro_target
from ppl_ext.pyro import HMC, MCMC, NUTS, ULD, BlackBox, ProximalIMH
from ppl_ext.pyro.potential import build_function
from ppl_ext.pyro.proximal_imh import _auto_guide, _guide, _host_base, _prior_draw
from ppl_ext.pyro.target import Posterior

rng = np.random.default_rng(0)
EXACT = rng.normal(size=(5, 3))
CHEAP = EXACT + 0.05 * rng.normal(size=(5, 3))
Y = EXACT @ rng.normal(size=3) + 0.5 * rng.normal(size=5)
NOISE = 0.5
# posterior of a linear model with a standard normal prior
COVARIANCE = np.linalg.inv(EXACT.T @ EXACT / NOISE**2 + np.eye(3))
MEAN = COVARIANCE @ EXACT.T @ Y / NOISE**2
Y_TENSOR = torch.tensor(Y, dtype=torch.float32)


def operator(matrix):
    matrix = torch.tensor(matrix, dtype=torch.float32)
    return lambda x: matrix @ x


exact_operator, cheap_operator = operator(EXACT), operator(CHEAP)


def solver(x):
    return EXACT @ x


def model(y, forward=exact_operator):
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(forward(x), NOISE).to_event(1), obs=y)


def needs_its_operator(y, forward):
    model(y, forward)


APPROX = {"forward": cheap_operator}


def run(kernel, samples=2000, driver=MCMC, warmup=0, **options):
    pyro.set_rng_seed(0)
    mcmc = driver(kernel, samples, warmup, disable_progbar=True, **options)
    mcmc.run(Y_TENSOR)
    return mcmc


def assert_exact(mcmc, ess=None):
    """Four standard errors of means and standard deviations of three numbers: 4e-4 false alarms.

    None of the runs that use it failed at 20 seeds.
    """
    draws = mcmc.get_samples()["x"].numpy()
    ess = ess or imh_report(mcmc).ess
    sd = np.sqrt(np.diag(COVARIANCE))
    np.testing.assert_array_less(np.abs(draws.mean(0) - MEAN), 4 * sd / np.sqrt(ess))
    np.testing.assert_array_less(np.abs(draws.std(0) - sd), 4 * sd / np.sqrt(ess))


@pytest.fixture(scope="module")
def affine():
    return run(ProximalIMH(model, approx=APPROX, correction="affine"), 1000, num_chains=2)


def test_draws_have_the_exact_posterior_in_every_driver(affine):
    assert_exact(affine)
    assert affine.kernel.settings.correction == "affine"
    report = imh_report(affine)
    assert report.accept_prob > 0.8
    # one solve for each proposal; before them, for the map in 3 rounds, 1 + 3 derivatives
    assert report.num_solves == 2000 + 12
    other = run(ProximalIMH(model, approx=APPROX, correction="affine"), 500, pyro.infer.MCMC)
    assert imh_report(other).num_solves == 500 + 12


@pytest.mark.arviz
def test_to_arviz(affine):
    stats = _arviz.get_group(ppl_ext.to_arviz(affine), "sample_stats")
    assert {"acceptance_rate", "log_weight", "lp", "diverging"} <= set(stats)
    assert stats["log_weight"].shape == (2, 1000)
    assert stats.attrs["imh_correction"] == "affine"


def test_the_evidence_is_that_of_the_model(affine):
    report = imh_report(affine)
    predictive = EXACT @ EXACT.T + NOISE**2 * np.eye(5)
    value = npdist.MultivariateNormal(jnp.zeros(5), jnp.asarray(predictive)).log_prob(Y)
    assert abs(report.log_evidence - value) < 4 * report.log_evidence_error + 1e-4


def test_a_black_box_is_called_for_whole_batches_and_gives_the_same_draws(affine):
    """The same keys: only the rounding of the linearisation, by differences, tells them apart."""
    forward = BlackBox(solver, shape=(5,))
    kernel = ProximalIMH(
        needs_its_operator, approx=APPROX, exact={"forward": forward}, batch_size=250
    )
    mcmc = run(kernel, 500, num_chains=2)
    assert kernel.settings.correction == "affine"
    before = forward.num_calls
    assert forward.num_solves >= 1000
    # set-up, the map, 2 batches for both chains at once, and not a thousand
    assert before < 40
    assert_exact(mcmc)
    assert ppl_ext.to_arviz(mcmc)["posterior"]["x"].shape == (2, 500, 3)
    again = pickle.loads(pickle.dumps(forward))
    assert again._number != forward._number
    np.testing.assert_allclose(again(torch.ones(3)), solver(np.ones(3)), rtol=1e-6)


def test_a_black_box_has_no_gradient():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        BlackBox(solver, shape=(5,))(x).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"correction": "gn"},
        {"correction": "argmin"},
        {"correction": None},
        {"defensive": 0.2, "correction": "affine"},
        {"exact": {"forward": BlackBox(solver, shape=(5,))}, "engine": "torch"},
        {"metric": np.full(5, 4.0), "weight": np.ones(3), "correction": "frozen"},
    ],
    ids=["gn", "argmin", "none", "defensive", "torch", "metric"],
)
def test_every_option_gives_the_exact_posterior(options):
    assert_exact(run(ProximalIMH(model, approx=APPROX, **options)))


def linear_guide(y, forward=None):
    covariance = torch.tensor(1.2 * COVARIANCE, dtype=torch.float32)
    mean = torch.tensor(MEAN, dtype=torch.float32)
    pyro.sample("x", dist.MultivariateNormal(mean, covariance))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distribution", "guide", "draws", "kernel", "local"])
def test_every_proposal_gives_the_exact_posterior(kind):
    near = torch.distributions.MultivariateNormal(
        torch.tensor(MEAN), torch.tensor(1.2 * COVARIANCE)
    )
    near = torch.distributions.MultivariateNormal(near.loc.float(), near.covariance_matrix.float())
    torch.manual_seed(0)
    z = near.sample((2000,))
    options = {
        "distribution": {"proposal": near},
        "guide": {"proposal": linear_guide},
        "draws": {"proposal": (z, near.log_prob(z))},
        "kernel": {"proposal": HMC(model, trajectory_length=1.0), "inner_steps": 3},
        "local": {"local_kernel": HMC(model, trajectory_length=1.0)},
    }[kind]
    mcmc = run(ProximalIMH(model, approx=APPROX, correction="affine", **options), warmup=0)
    assert_exact(mcmc)


# --- what the algorithm is given ----------------------------------------------------------------


def pyro_model(y):
    c = torch.tensor([[1.0, 0.3], [0.3, 2.0]])
    pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), c))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    with pyro.plate("group", 3):
        b = pyro.sample("b", dist.Normal(1.0, 2.0))
        pyro.sample("t", dist.StudentT(5.0, b, s), obs=y)
    parts = dist.Normal(torch.tensor([-3.0, 3.0]), torch.tensor([0.5, 1.0]))
    m = pyro.sample("m", dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.3, 0.7])), parts))
    pyro.sample("u", dist.Normal(b * m, s).to_event(1), obs=y)
    pyro.sample("v", dist.MultivariateNormal(y[:2] * m, c), obs=y[:2])


def numpyro_model(y):
    c = jnp.array([[1.0, 0.3], [0.3, 2.0]])
    numpyro.sample("a", npdist.MultivariateNormal(jnp.zeros(2), c))
    s = numpyro.sample("s", npdist.LogNormal(0.0, 0.5))
    with numpyro.plate("group", 3):
        b = numpyro.sample("b", npdist.Normal(1.0, 2.0))
        numpyro.sample("t", npdist.StudentT(5.0, b, s), obs=y)
    parts = npdist.Normal(jnp.array([-3.0, 3.0]), jnp.array([0.5, 1.0]))
    m = numpyro.sample(
        "m", npdist.MixtureSameFamily(npdist.Categorical(jnp.array([0.3, 0.7])), parts)
    )
    numpyro.sample("u", npdist.Normal(b * m, s).to_event(1), obs=y)
    numpyro.sample("v", npdist.MultivariateNormal(y[:2] * m, c), obs=y[:2])


DATA = np.array([0.5, -1.0, 2.0], np.float32)


@pytest.fixture(scope="module")
def both():
    posterior = Posterior(pyro_model, (torch.tensor(DATA),), {})
    return posterior, numpyro_target(numpyro_model, DATA).bind(DATA)


@pytest.mark.parametrize("name", ["observation", "log_prior"])
def test_functions_are_those_of_the_same_numpyro_model(both, name):
    posterior, expected = both
    function, data = build_function(getattr(posterior, name), posterior.start, "xla")
    z = {n: jnp.asarray(x.numpy()) + 0.1 for n, x in posterior.start.items()}
    found = jax.tree.leaves(function(z, data))
    wanted = jax.tree.leaves(getattr(expected, name)(z))
    # outputs by name, covariance before mean
    for a, b in zip(found, wanted if len(wanted) == 1 else wanted[::-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_prior_scales_are_those_of_the_same_numpyro_model(both):
    """That of the log-normal site is drawn: five standard errors of a variance of 1,000 draws."""
    posterior, expected = both
    found, wanted = posterior.prior_covariance(), expected.prior_covariance()
    drawn = np.zeros_like(found, bool)
    # order of names: a (2), b (3), m, s
    drawn[6, 6] = True
    np.testing.assert_allclose(found[~drawn], np.asarray(wanted)[~drawn], rtol=1e-5, atol=1e-7)
    assert abs(found[6, 6] - 0.25) < 5 * 0.25 * np.sqrt(2 / 1000)


@pytest.mark.slow
def test_prior_draws_are_of_the_prior_and_decided_by_the_key(both):
    """Means of 400 draws within five standard errors."""
    posterior, _ = both
    draw = _prior_draw(posterior, posterior.start)
    keys = jax.random.split(jax.random.key(0), 400)
    draws = jax.jit(jax.vmap(draw))(keys)
    for name, mean, sd in (("a", 0.0, 1.5), ("b", 1.0, 2.0), ("s", 0.0, 0.5)):
        values = np.asarray(draws[name]).reshape(400, -1)
        np.testing.assert_array_less(np.abs(values.mean(0) - mean), 5 * sd / 20)
        assert len(np.unique(values)) == values.size
    again = draw(keys[7])
    np.testing.assert_array_equal(again["b"], draws["b"][7])


def two_sites(y):
    b = pyro.sample("b", dist.LogNormal(0.3, 0.5))
    a = pyro.sample(
        "a", dist.Normal(torch.tensor([1.0, -1.0]), torch.tensor([0.2, 2.0])).to_event(1)
    )
    pyro.sample("y", dist.Normal(a.sum() * b, 1.0), obs=y)


def two_sites_guide(y):
    pyro.sample("b", dist.LogNormal(0.3, 0.5))
    pyro.sample("a", dist.Normal(torch.tensor([1.0, -1.0]), torch.tensor([0.2, 2.0])).to_event(1))


@pytest.mark.parametrize("kind", ["own", "auto"])
def test_guides_have_their_density_in_the_order_of_names(kind):
    """The model's order is b, a: that of the vector is a, b. Means within five standard errors."""
    y = torch.tensor(0.5)
    posterior = Posterior(two_sites, (y,), {})
    target = posterior.target()
    mean, sd = np.array([1.0, -1.0, 0.3]), np.array([0.2, 2.0, 0.5])
    if kind == "auto":
        guide = AutoMultivariateNormal(two_sites)
        pyro.clear_param_store()
        guide(y)
        with torch.no_grad():
            guide.loc[:] = torch.tensor([0.3, 1.0, -1.0])
        guide.scale = torch.tensor([0.5, 0.2, 2.0])
        guide.scale_tril = torch.eye(3)
        parts = _auto_guide(guide, posterior)
    else:
        parts = _guide(two_sites_guide, target, posterior)
    base = _host_base(*parts, posterior.start, "xla")
    draws = np.asarray(
        jax.vmap(lambda key: base.sample(key, None))(jax.random.split(jax.random.key(0), 400))
    )
    np.testing.assert_array_less(np.abs(draws.mean(0) - mean), 5 * sd / 20)
    expected = npdist.Normal(mean, sd).log_prob(draws).sum(-1)
    found = jax.vmap(lambda z: base.log_prob(z, None))(draws)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"approx": 3}, TypeError, "`approx` must be a dict"),
        ({"proposal": "guess"}, TypeError, "`proposal` must be"),
        ({"proposal": AutoNormal}, TypeError, "`proposal` must be"),
        ({"proposal": ULD(model)}, TypeError, "which are reversible, got ULD"),
        ({"local_kernel": NUTS(needs_its_operator)}, ValueError, "on the same model"),
        ({"defensive": 1.0}, ValueError, "`defensive` must be"),
        ({"proposal": (torch.zeros(3), torch.zeros(3))}, ValueError, "must have the shapes"),
        ({"inner_steps": 3}, ValueError, "`inner_steps` must be None unless"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(options, error, words):
    with pytest.raises(error, match=words):
        ProximalIMH(model, **{"approx": APPROX, **options})


def branching(x):
    return cheap_operator(x) if float(x.detach()[0]) > 0 else exact_operator(x)


def other_sites_guide(y, forward=None):
    pyro.sample("w", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"approx": {"forward": branching}}, TracingError, "as a Python number"),
        ({"proposal": other_sites_guide}, UnsupportedModelError, "the guide samples"),
        ({"proposal": (np.zeros((9, 2)), np.zeros(9))}, ValueError, "have 2 numbers, the model 3"),
        ({"correction": "latent"}, UnsupportedModelError, "needs one deterministic site"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_the_model_is_refused_at_the_start(options, error, words):
    with pytest.raises(error, match=words):
        run(ProximalIMH(model, **{"approx": APPROX, **options}))


def test_a_likelihood_without_a_prediction_is_refused():
    def odd(y, forward=exact_operator):
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.factor("y", -(forward(x) ** 2).sum())

    with pytest.raises(UnsupportedModelError, match="no observed site"):
        run(ProximalIMH(odd, approx=APPROX))


def test_reports_are_of_finished_runs_of_this_kernel():
    kernel = ProximalIMH(model, approx=APPROX)
    with pytest.raises(ValueError, match="holds no draws"):
        imh_report(MCMC(kernel, 10))
    with pytest.raises(TypeError, match=r"takes a run of .*ProximalIMH"):
        imh_report(MCMC(HMC(model), 10))


def test_the_kernel_is_registered():
    names = {(entry.name, entry.language) for entry in registry.entries()}
    if ("NUTS", "pyro") not in names:
        pytest.skip("ppl_ext is not installed with its entry points")
    assert ("ProximalIMH", "pyro") in names
