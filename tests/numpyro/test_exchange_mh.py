"""ExchangeMH on NumPyro models: densities, refusals, and a run from start to ArviZ."""

import json
import pickle
import warnings
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, Gibbs
from scipy import stats
from scipy.special import gammaln, logsumexp

import ppl_ext
from ppl_ext.diagnostics import exchange_report
from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.numpyro import ERGM, ConwayMaxwellPoisson, ExchangeMH, Graph, Ising
from ppl_ext.numpyro.entries import ising_on_a_small_lattice
from ppl_ext.numpyro.ergm import kstar
from ppl_ext.numpyro.target import target

RNG = np.random.default_rng(0)
GRAPH = Graph.lattice(2, 3)
X = RNG.choice([-1, 1], size=(2, 2, 3))
COUNTS, MASK, ROWS = RNG.poisson(2, size=4), np.array([True, False, True, True]), RNG.normal(size=4)


def everything(x, counts, outside):
    """Constrained sites, several intractable ones, in plates, masked, grouped; others beside."""
    coupling = numpyro.sample("coupling", dist.Uniform(0, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    dispersion = numpyro.sample("dispersion", dist.LogNormal(0, 0.5))
    numpyro.sample("outside", dist.Normal(slope, 1), obs=outside)
    numpyro.factor("penalty", -dispersion)
    with numpyro.plate("image", 2):
        numpyro.sample("x", Ising(coupling, 0.1, GRAPH), obs=x)
    with numpyro.plate("row", 4), numpyro.handlers.mask(mask=MASK):
        y = ConwayMaxwellPoisson(jnp.exp(slope * ROWS), dispersion)
        numpyro.sample("y", y, obs=counts)
    rows = ConwayMaxwellPoisson(jnp.exp(slope * ROWS), 1.5)
    numpyro.sample("whole", rows.to_event(1), obs=counts)


DATA = (X, COUNTS, 0.4)


def start(model, *args, **options):
    kernel = ExchangeMH(model, pool=16, **options)
    return kernel, kernel.init(jax.random.key(0), 0, None, args, {})


def test_the_parts_of_the_density_are_those_of_the_formula(x64):
    data = tuple(map(jnp.asarray, DATA))
    problem = ExchangeMH(everything)._bind(target(everything, *data), data, {})
    z = {"coupling": jnp.asarray(-0.4), "slope": jnp.asarray(0.3), "dispersion": jnp.asarray(0.2)}
    flat = problem.ravel(z)
    coupling, slope, dispersion = 1 / (1 + np.exp(0.4)), 0.3, np.exp(0.2)
    tractable = np.log(coupling * (1 - coupling))  # the Jacobian of a flat prior
    tractable += stats.norm.logpdf(0.3) + stats.norm.logpdf(0.4, 0.3, 1) - dispersion
    tractable += stats.norm.logpdf(0.2, 0, 0.5)
    np.testing.assert_allclose(problem.log_tractable(flat), tractable, rtol=1e-7)
    a, b = GRAPH.edges.T
    spins = X.reshape(2, 6)
    counts = COUNTS * slope * ROWS - gammaln(COUNTS + 1)
    expected = {
        "x": coupling * (spins[:, a] * spins[:, b]).sum(1) + 0.1 * spins.sum(1),
        "y": np.where(MASK, dispersion * counts, 0),
        "whole": 1.5 * counts,
    }
    found = problem.log_f(flat, problem.observed)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-7, atol=1e-9)
    drawn = jax.eval_shape(problem.simulate, flat, jax.random.key(1))
    shapes = {name: jnp.shape(leaf) for name, leaf in drawn.stats.items()}
    assert shapes == {name: jnp.shape(leaf) for name, leaf in problem.observed.items()}


def no_intractable(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def latent(y):
    coupling = numpyro.sample("coupling", dist.Normal(0, 1))
    numpyro.sample("x", Ising(coupling, 0.0, GRAPH))


def scaled(y):
    coupling = numpyro.sample("coupling", dist.Normal(0, 1))
    with numpyro.handlers.scale(scale=0.5):
        numpyro.sample("x", Ising(coupling, 0.0, GRAPH), obs=y)


def discrete(y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    numpyro.sample("x", Ising(0.1 * k, 0.0, GRAPH), obs=y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (no_intractable, "no observed site has one.*observed: 'y'.*NUTS"),
        (latent, r"Site 'x' \(Ising\) is latent"),
        (scaled, "site 'x' is scaled"),
        (discrete, "site 'k' is discrete"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(model, words):
    with pytest.raises(UnsupportedModelError, match=words):
        start(model, X[0])


def large(x):
    coupling = numpyro.sample("coupling", dist.Uniform(0, 1))
    numpyro.sample("x", Ising(coupling, 0.0, Graph.lattice(13, 13)), obs=x)


def test_other_kernels_are_refused_or_stop_with_a_word():
    x = jnp.ones((13, 13), int)
    found = ppl_ext.explain(large, x).verdicts
    assert found["ExchangeMH"] is None
    assert "normalising constant of site 'x' (Ising) is not known" in found["ULD"]
    with pytest.raises(UnsupportedModelError, match=r"Ising.*ExchangeMH"):
        MCMC(NUTS(large), num_warmup=2, num_samples=2, progress_bar=False).run(jax.random.key(0), x)
    assert "no observed site has one" in ppl_ext.explain(no_intractable, 0.3).verdicts["ExchangeMH"]


def test_data_outside_the_support_are_named():
    with pytest.raises(InitializationError, match=r"'x' has 1 values outside.*Ising"):
        start(large, jnp.zeros((13, 13), int))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"proposal": "nuts"}, "`proposal` must be one of 'random_walk'"),
        ({"pool": 1}, "`pool` must be 2 or more"),
        ({"num_aux": 0}, "`num_aux` must be"),
        ({"step_size": -1.0}, "`step_size` must be"),
        ({"target_accept_prob": 1.0}, "`target_accept_prob` must be less than 1"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        ExchangeMH(large, **options)


def run(model, *args, num_chains=4, num_warmup=300, num_samples=1500, key=0, **options):
    method = options.pop("chain_method", "vectorized")
    mcmc = MCMC(
        ExchangeMH(model, **options),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(key), *args)
    return mcmc


def z_scores(mcmc, mean, sd):
    """Errors of means and standard deviations in Monte Carlo standard errors."""
    found = []
    for name in mean:
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)[name], np.float64)
        draws = draws.reshape(*draws.shape[:2], -1)
        for k in range(draws.shape[2]):
            one, m, s = draws[..., k], np.ravel(mean[name])[k], np.ravel(sd[name])[k]
            square = (one - m) ** 2
            found.append((one.mean() - m) / (s / np.sqrt(float(az.ess(one)))))
            error = square.std() / np.sqrt(float(az.ess(square)))
            found.append((square.mean() - s**2) / error)
    return np.array(found)


def test_a_run_finds_the_exact_posterior_and_becomes_arviz():
    """|z| < 4.5 for mean and variance: false alarms below 1e-4."""
    example = ising_on_a_small_lattice()
    mcmc = run(example.model, *example.args, proposal="mala", num_aux=2)
    assert np.abs(z_scores(mcmc, example.mean, example.sd)).max() < 4.5
    fields = mcmc.get_extra_fields()
    assert fields["num_overflow"].max() == 0 and not fields["diverging"].any()
    assert (fields["sim_effort"] == 2).all()
    assert np.unique(fields["step_size"]).size == 4  # frozen, one for each chain
    assert abs(fields["accept_prob"].mean() - 0.585) < 0.1
    # it estimates log Z(t) / Z(u): after an equal number of moves up and down, about none
    assert np.isfinite(fields["aux_log_ratio"]).all() and fields["noise_variance"].mean() > 0.2

    data = ppl_ext.to_arviz(mcmc)
    statistics = {"aux_log_ratio", "sim_effort", "noise_variance", "num_overflow"}
    assert statistics <= set(data["sample_stats"].data_vars)
    assert data["sample_stats"].attrs["exact"] == 1
    np.testing.assert_array_equal(data["observed_data"]["x"], example.args[0])
    report = exchange_report(mcmc)
    assert report.exact and "exact simulations" in str(report)

    accept_prob = mcmc._states["accept_prob"]
    mcmc._states["accept_prob"] = np.broadcast_to(0.05, accept_prob.shape)
    with pytest.warns(UserWarning, match=r"mean acceptance of the run is 0.050.*init_strategy"):
        exchange_report(mcmc)
    mcmc._states["accept_prob"] = accept_prob

    mcmc._states["num_overflow"] = mcmc._states["num_overflow"] + 1
    with pytest.warns(UserWarning, match="reached their limit 1 times"):
        ppl_ext.to_arviz(mcmc)


def network(graph):
    coef = numpyro.sample("coef", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("graph", ERGM(coef, ["edges", "triangles"], 7, num_toggles=5), obs=graph)


def observed_network():
    i, j = np.triu_indices(7, 1)
    graph = np.zeros((7, 7), int)
    graph[i, j] = np.random.default_rng(1).uniform(size=21) < 0.4
    return graph + graph.T


# --- slower --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_simulator_that_is_not_exact_is_tagged_and_reported():
    with pytest.warns(UserWarning, match=r"site 'graph' \(ERGM\).*exchange_report") as caught:
        mcmc = run(network, observed_network(), num_chains=1, num_warmup=40, num_samples=100)
    assert sum("exchange_report" in str(w.message) for w in caught) == 1
    assert (mcmc.get_extra_fields()["sim_effort"] == 5).all()
    data = ppl_ext.to_arviz(mcmc)
    assert data["sample_stats"].attrs["exact"] == 0
    assert data["sample_stats"].attrs["inexact_sites"] == "site 'graph' (ERGM)"
    with pytest.raises(UnsupportedModelError, match="no log_likelihood, no loo"):
        ppl_ext.to_arviz(mcmc, log_likelihood=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = exchange_report(mcmc, lengths=(1, 3))
    assert list(report.table.index) == ["coef[0]", "coef[1]"]
    assert set(report.table.columns.get_level_values(0)) == {1, 3}
    assert report.worst_shift > 0 and report.table[3]["shift"].abs().max() == 0
    assert "by length" in str(report)
    with pytest.raises(ValueError, match="begin with 1 and grow"):
        exchange_report(mcmc, lengths=(2, 1))
    with pytest.raises(TypeError, match="ExchangeMH kernel, got int"):
        exchange_report(3)


def reference(name):
    """Model, data, and exact means and standard deviations (licence in the file)."""
    found = json.loads((Path(__file__).parent / "data" / "exchange_references.json").read_text())
    if name in found["ising"]:
        case = found["ising"][name]
        x = np.asarray(case["x"])
        graph = Graph.lattice(*x.shape)

        def model(x):
            coupling = numpyro.sample("theta", dist.Uniform(0, 1))
            numpyro.sample("x", Ising(coupling, 0.0, graph), obs=x)
    else:
        case = found["ergm"][name]
        x = np.asarray(case["graph"])
        terms = [kstar(2) if term == "kstar2" else term for term in case["terms"]]

        def model(x):
            prior = dist.Normal(0, case["prior_sd"]).expand([len(terms)]).to_event(1)
            numpyro.sample("x", ERGM(numpyro.sample("theta", prior), terms, len(x)), obs=x)

    return model, x, {"theta": case["mean"]}, {"theta": case["sd"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The simulator of:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        "ising_8x8_beta0.2",
        "ising_10x10_beta0.35",
        "florentine, edges",
        "seven families, edges and triangles",
        "seven families, edges and kstar2",
    ],
)
def test_exact_references_are_met(name):
    """|z| < 4 for means and variances: false alarms below 5e-4."""
    model, x, mean, sd = reference(name)
    draws = 1000 if "10x10" in name else 2500
    mcmc = run(model, x, num_samples=draws, proposal="mala")
    assert np.abs(z_scores(mcmc, mean, sd)).max() < 4


@pytest.mark.slow
def test_other_data_bring_another_posterior():
    example = ising_on_a_small_lattice()
    mcmc = run(example.model, *example.args)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), np.ones((3, 3), int))
    assert mcmc.get_samples()["coupling"].mean() > example.mean["coupling"] + example.sd["coupling"]


@pytest.mark.slow
@pytest.mark.parametrize("proposal", ["random_walk", "mala", "barker"])
def test_everything_at_once_agrees_with_a_grid(proposal):
    """Rows of counts with two unknowns, |z| < 4.5; Z by its series."""

    def model(rows, counts):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        dispersion = numpyro.sample("dispersion", dist.LogNormal(0, 0.5))
        numpyro.sample("outside", dist.Normal(slope, 1), obs=0.4)
        with numpyro.plate("row", len(counts)):
            y = ConwayMaxwellPoisson(jnp.exp(1 + slope * rows), dispersion)
            numpyro.sample("y", y, obs=counts)

    rng = np.random.default_rng(2)
    rows, counts = rng.normal(size=12), rng.poisson(3, size=12)
    slopes, logs = np.linspace(-2, 2, 161), np.linspace(-2, 2, 161)
    b, u = (g.ravel() for g in np.meshgrid(slopes, logs, indexing="ij"))
    nu, log_mu = np.exp(u), 1 + b[:, None] * rows
    series = np.arange(200)
    log_density = stats.norm.logpdf(b) + stats.norm.logpdf(u, 0, 0.5) + stats.norm.logpdf(0.4, b)
    for k, y in enumerate(counts):
        log_f = nu * (y * log_mu[:, k] - gammaln(y + 1))
        terms = nu[:, None] * (series * log_mu[:, k, None] - gammaln(series + 1))
        log_density += log_f - logsumexp(terms, axis=1)
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    values = {"slope": b, "dispersion": nu}
    mean = {name: weight @ v for name, v in values.items()}
    sd = {name: np.sqrt(weight @ (v - mean[name]) ** 2) for name, v in values.items()}
    mcmc = run(model, rows, counts, proposal=proposal)
    assert np.abs(z_scores(mcmc, mean, sd)).max() < 4.5
    assert mcmc.get_extra_fields()["num_overflow"].max() == 0


@pytest.mark.slow
def test_two_blocks_of_gibbs():
    """|z| < 4.5 against a grid; the pool of a block is drawn at other values of the other site."""
    graph = Graph.lattice(3, 3)
    x = np.array([[1, 1, -1], [1, 1, 1], [1, -1, -1]])

    def model(x):
        coupling = numpyro.sample("coupling", dist.Uniform(0, 1))
        field = numpyro.sample("field", dist.Normal(0, 0.5))
        numpyro.sample("x", Ising(coupling, field, graph), obs=x)

    grid = [np.linspace(0, 1, 101), np.linspace(-1.5, 1.5, 121)]
    j, h = (np.asarray(g.ravel()) for g in np.meshgrid(*grid, indexing="ij"))
    log_prob = jax.jit(jax.vmap(lambda j, h: Ising(j, h, graph).log_prob(x)))(j, h)
    weight = np.exp(np.asarray(log_prob, float) - 2 * h**2)
    weight /= weight.sum()
    values = {"coupling": j, "field": h}
    mean = {name: weight @ v for name, v in values.items()}
    sd = {name: np.sqrt(weight @ (v - mean[name]) ** 2) for name, v in values.items()}
    blocks = [(ExchangeMH(model, proposal="mala"), ["coupling"]), (ExchangeMH(model), ["field"])]
    mcmc = MCMC(Gibbs(blocks), num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(0), x)
    assert np.abs(z_scores(mcmc, mean, sd)).max() < 4.5


@pytest.mark.slow
def test_chains_resume_and_travel(x64):
    example = ising_on_a_small_lattice()
    options = {"num_chains": 2, "num_warmup": 10, "num_samples": 10, "pool": 32}
    one = run(example.model, *example.args, **options)
    other = run(example.model, *example.args, chain_method="sequential", **options)
    draws = one.get_samples(group_by_chain=True)["coupling"]
    np.testing.assert_allclose(draws, other.get_samples(group_by_chain=True)["coupling"], rtol=1e-8)
    assert not np.allclose(draws[0], draws[1])
    again = pickle.loads(pickle.dumps(ExchangeMH(large)))
    assert again.settings == ExchangeMH(large).settings
    # the same data: what warm-up found stays
    before = one.last_state
    one.post_warmup_state = before
    one.run(jax.random.key(1), *example.args)
    np.testing.assert_array_equal(one.last_state.fit.centre, before.fit.centre)
    assert (one.last_state.i == 30).all()
