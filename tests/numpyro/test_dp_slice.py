"""Processes in NumPyro models: what the kernel reads from a model, and what a run gives back."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, Predictive

import ppl_ext
from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.kernels import conjugate as cj
from ppl_ext.kernels.dp_slice import Gradient
from ppl_ext.numpyro import DirichletProcess, DPSlice, PitmanYor
from ppl_ext.numpyro import mixture as mx
from ppl_ext.numpyro.dirichlet_process import Partition
from ppl_ext.numpyro.entries import three_points_of_a_process

N = 6
RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(N, 2)).astype(np.float32)
COUNTS = RNG.poisson(3.0, N)
MASK = np.array([1, 1, 0, 1, 1, 1], bool)


def mixture(base, likelihood, y):
    """A model with a process over `base` and the distribution `likelihood(atom)` of its points."""

    def model(y):
        process = DirichletProcess("G", 1.0, base)
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihood(process.draw()), obs=y)

    return model, (y,)


def normal_gamma():
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.5).expand([2]).to_event(1))
    return numpyro.sample("mu", dist.Normal(1.0, (0.1 * tau) ** -0.5).to_event(1)), tau


def normal_wishart():
    precision = numpyro.sample("precision", dist.Wishart(4.0, rate_matrix=2 * jnp.eye(2)))
    mu = numpyro.sample(
        "mu", dist.MultivariateNormal(jnp.ones(2), precision_matrix=0.5 * precision)
    )
    return mu, precision


def inverse_wishart():
    cov = numpyro.sample("cov", dist.InverseWishart(4.0, scale_matrix=2 * jnp.eye(2)))
    return numpyro.sample("mu", dist.MultivariateNormal(jnp.ones(2), cov / 0.5)), cov


EXPOSURE = RNG.uniform(0.5, 2.0, N).astype(np.float32)
CASES = {
    "normal": (
        lambda: numpyro.sample("mu", dist.Normal(1.0, 3.0).expand([2]).to_event(1)),
        lambda mu: dist.Normal(mu + EXPOSURE[:, None], 0.7).to_event(1),
        REAL,
        "NormalMean",
    ),
    "masked": (
        lambda: numpyro.sample("mu", dist.Normal(1.0, 3.0).expand([2]).to_event(1)),
        lambda mu: dist.Normal(mu, 0.7).to_event(1).mask(MASK),
        REAL,
        "NormalMean",
    ),
    "masked numbers": (
        lambda: numpyro.sample("mu", dist.Normal(1.0, 3.0).expand([2]).to_event(1)),
        lambda mu: dist.Normal(mu, 0.7).mask(np.stack([MASK, ~MASK], 1)).to_event(1),
        REAL,
        "NormalMean",
    ),
    "normal-gamma": (
        normal_gamma,
        lambda atom: dist.Normal(atom[0], atom[1] ** -0.5).to_event(1),
        REAL,
        "NormalInverseGamma",
    ),
    "wishart": (
        normal_wishart,
        lambda atom: dist.MultivariateNormal(atom[0], precision_matrix=atom[1]),
        REAL,
        "NormalInverseWishart",
    ),
    "inverse wishart": (
        inverse_wishart,
        lambda atom: dist.MultivariateNormal(atom[0], atom[1]),
        REAL,
        "NormalInverseWishart",
    ),
    "poisson": (
        lambda: numpyro.sample("rate", dist.Gamma(2.0, 1.0)),
        lambda rate: dist.Poisson(rate * EXPOSURE),
        COUNTS,
        "GammaPoisson",
    ),
    "exponential": (
        lambda: numpyro.sample("rate", dist.Gamma(2.0, 1.0)),
        lambda rate: dist.Exponential(rate),
        EXPOSURE,
        "GammaExponential",
    ),
    "bernoulli": (
        lambda: numpyro.sample("p", dist.Beta(2.0, 1.0).expand([2]).to_event(1)),
        lambda p: dist.Bernoulli(p).to_event(1),
        (REAL > 0).astype(int),
        "BetaBinomial",
    ),
    "binomial": (
        lambda: numpyro.sample("p", dist.Beta(2.0, 1.0)),
        lambda p: dist.Binomial(np.arange(5, 5 + N), p),
        COUNTS.clip(0, 5),
        "BetaBinomial",
    ),
    "categorical": (
        lambda: numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5]))),
        lambda p: dist.Categorical(p),
        COUNTS % 3,
        "Dirichlet",
    ),
    "multinomial": (
        lambda: numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5]))),
        lambda p: dist.Multinomial(4, p),
        RNG.multinomial(4, [0.2, 0.3, 0.5], N),
        "Dirichlet",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        case
        if case in ("masked numbers", "poisson")
        else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_conjugate_pairs_are_found_and_have_the_likelihood_of_the_model(case):
    base, likelihood, y, pair = CASES[case]
    model, args = mixture(base, likelihood, y)
    facts = mx.look(model, args, {})
    assert facts.links is not None, facts.reason
    (link,) = facts.links
    assert type(link.pair).__name__ == pair and pair in facts.path
    atoms = facts.mixture(args, {}, {}).atoms
    rows = atoms.statistics(0, N)
    ours, theirs = [], []
    for seed in range(2):
        atom = atoms.draw(jax.random.key(seed), jnp.zeros(atoms.size))
        sites = facts.sites_of_atoms(jax.tree.map(lambda x: x[None], atom), args, {}, {})
        each = {k: jnp.broadcast_to(v[0], (N, *v.shape[1:])) for k, v in sites.items()}
        run = facts.run(args, {}, {}, each)
        theirs.append(mx._log_likelihood(run, "data", N))
        ours.append(rows @ atoms.natural(atom))
    np.testing.assert_allclose(ours[1] - ours[0], theirs[1] - theirs[0], rtol=2e-3, atol=2e-3)


def test_missing_values_may_be_nan():
    base, likelihood, _, _ = CASES["masked"]
    y = np.where(MASK[:, None], REAL, np.nan)
    model, args = mixture(base, likelihood, y)
    atoms = mx.look(model, args, {}).mixture(args, {}, {}).atoms
    rows = np.asarray(atoms.statistics(0, N))
    assert np.isfinite(rows).all() and (rows[2] == 0).all() and (rows[0] != 0).any()


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.full(N, np.nan), "'y' has NaN values.*mask"),
        (None, "'data' of 'G' has no observed site"),
    ],
)
def test_data_that_are_not_there_are_told(y, words):
    base, _, _, _ = CASES["normal"]
    model, _ = mixture(base, lambda mu: dist.Normal(mu[:, 0], 1), y)
    with pytest.raises(InitializationError, match=words):
        mx.check_observations(model, (y,), {})


def independent():
    return numpyro.sample("mu", dist.Normal(0, 3)), numpyro.sample("s2", dist.InverseGamma(2, 2))


@pytest.mark.parametrize(
    ("base", "likelihood", "words"),
    [
        (independent, lambda a: dist.Normal(a[0], jnp.sqrt(a[1])), "makes no conjugate pair"),
        (
            lambda: numpyro.sample("mu", dist.Normal(0, 3)),
            lambda m: dist.StudentT(3, m),
            "StudentT",
        ),
        (
            lambda: numpyro.sample("mu", dist.Normal(0, 3)),
            lambda m: dist.Normal(2 * m, 1),
            "makes no conjugate pair",
        ),
        (
            lambda: numpyro.sample("p", dist.Beta(1, 1)),
            lambda p: dist.Bernoulli(p / 2 + 0.25),
            "makes no conjugate pair",
        ),
    ],
)
def test_other_models_take_gradient_moves(base, likelihood, words):
    y = np.ones(N)
    model, args = mixture(base, likelihood, y)
    facts = mx.look(model, args, {})
    assert facts.links is None and words in facts.path
    assert isinstance(facts.mixture(args, {}, {}).atoms, Gradient)
    with pytest.raises(UnsupportedModelError, match='atoms="conjugate"'):
        mx.look(model, args, {}, "conjugate")


def test_the_sites_beside_the_process_are_sorted_out():
    def model(y, other):
        alpha = numpyro.sample("alpha", dist.Gamma(2.0, 4.0))
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        if other:
            numpyro.sample("reads_alpha", dist.Normal(alpha, 1), obs=0.3)
        G = DirichletProcess("G", alpha, lambda: numpyro.sample("mu", dist.Normal(0, 3)))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(G.draw() + shift, 1), obs=y)

    facts = mx.look(model, (REAL[:, 0], False), {})
    assert facts.concentration == "alpha" and facts.global_sites == ("shift",)
    facts = mx.look(model, (REAL[:, 0], True), {})
    assert facts.concentration is None and facts.global_sites == ("alpha", "shift")


def draws_twice(y):
    G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(0, 3)))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(G.draw() - G.draw(), 1), obs=y)


def has_discrete_site(y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(0, 3)))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(G.draw() + k, 1), obs=y)


def uses_atoms_outside(y):
    G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(0, 3)))
    with numpyro.plate("data", N):
        mu = G.draw()
    numpyro.sample("total", dist.Normal(mu.sum(), 1), obs=y.sum())


def has_no_plate(y):
    G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(0, 3)))
    numpyro.sample("y", dist.Normal(G.draw(), 1), obs=y)


def has_batched_base(y):
    G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(jnp.zeros(2), 3)))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(G.draw()[:, 0], 1), obs=y)


def has_discrete_base(y):
    G = DirichletProcess("G", 1.0, lambda: numpyro.sample("k", dist.Poisson(3.0)))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(G.draw(), 1), obs=y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda y: numpyro.sample("y", dist.Normal(0, 1), obs=y), "draws from none"),
        (draws_twice, "one call of `draw`"),
        (has_discrete_site, "'k' is discrete"),
        (uses_atoms_outside, "'total' depends on the atoms"),
        (has_no_plate, "inside one plate"),
        (has_discrete_base, "'k' of the base of 'G' is discrete"),
        (has_batched_base, r"'mu'.*batch shape \(2,\).*to_event"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(model, words):
    with pytest.raises(UnsupportedModelError, match=words):
        mx.look(model, (REAL[:, 0],), {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 20}, "`capacity` must be a multiple of 16"),
        ({"chunk": 0}, "`chunk`"),
        ({"method": "walker"}, "`method`"),
        ({"method": "kgw", "split_merge": 2}, "`split_merge`"),
        ({"atoms": "closed"}, "`atoms`"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        DPSlice(draws_twice, **options)


def test_processes_check_their_arguments():
    for base in (3.0, dist.Normal(0, 1)):
        with pytest.raises(TypeError, match="`base` must be a function"):
            DirichletProcess("G", 1.0, base)
    with pytest.raises(ValueError, match="`concentration` of 'G' must be positive"):
        DirichletProcess("G", -1.0, independent)
    with pytest.raises(ValueError, match=r"`discount` of 'G' must lie in \[0, 1\)"):
        PitmanYor("G", 1.0, 1.0, independent)


@pytest.mark.parametrize("discount", [None, 0.5])
def test_forward_labels_have_the_law_of_the_restaurant(discount):
    """All 52 partitions of five points, 40,000 draws: |z| < 4.5, 4e-4 false alarms."""
    partition = Partition(5, 1.0, discount)
    draws = np.asarray(partition.sample(jax.random.key(1), (40_000,)))
    values, counts = np.unique(draws, axis=0, return_counts=True)
    p = np.exp(jax.vmap(partition.log_prob)(jnp.asarray(values)))
    assert len(values) == 52 and abs(p.sum() - 1) < 1e-5
    assert (np.abs(counts / 4e4 - p) < 4.5 * np.sqrt(p * (1 - p) / 4e4)).all()


def test_draws_of_the_process_predict_from_its_mass():
    def model():
        G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(100, 1)))
        with numpyro.plate("data", 1000):
            numpyro.deterministic("theta", G.draw())

    draws = {"G_weights": np.tile([0.5, 0.2], (20, 1)), "mu": np.tile([-1.0, 1.0], (20, 1))}
    found = Predictive(model, draws)(jax.random.key(0))
    labels = np.asarray(found["G_labels"])
    # 20,000 draws; five standard errors
    assert abs((labels == 0).mean() - 0.5) < 0.02 and abs((labels >= 2).mean() - 0.3) < 0.02
    with pytest.raises(ValueError, match=r"not the atoms' sites \['mu'\]"):
        Predictive(model, {"G_weights": draws["G_weights"]})(jax.random.key(0))


def test_explain_says_which_path_a_model_takes():
    model, args = mixture(*CASES["normal"][:3])
    found = ppl_ext.explain(model, *args)
    assert found.verdicts["DPSlice"] is None
    assert "DPSlice: fits, atoms in closed form: mu of 'y' (NormalMean)" in str(found)
    assert "use ppl_ext.numpyro.DPSlice" in found.verdicts["ULD"]
    found = ppl_ext.explain(has_discrete_site, REAL[:, 0])
    assert "'k' is discrete" in found.verdicts["DPSlice"]


def test_a_run_gives_draws_statistics_and_labels_and_goes_on():
    example = three_points_of_a_process()
    kernel = DPSlice(example.model, capacity=32)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), *example.args, extra_fields=("labels",))
    samples, fields = mcmc.get_samples(), mcmc.get_extra_fields()
    assert samples["mu"].shape == samples["G_weights"].shape == (20, 32)
    labels = np.asarray(fields["labels"])
    assert (labels.max(1) + 1 == samples["G_num_clusters"]).all()
    assert all(len(np.unique(row)) == row.max() + 1 for row in labels)
    assert (fields["overhead"] == fields["num_instantiated"] - fields["num_clusters"]).all()
    assert ((samples["G_weights"].sum(1) > 0) & (samples["G_weights"].sum(1) < 1 + 1e-5)).all()
    with pytest.raises(UnsupportedModelError, match="predictive_density"):
        ppl_ext.to_arviz(mcmc, log_likelihood=True)
    stats = ppl_ext.to_arviz(mcmc)["sample_stats"]
    assert {"num_clusters", "overhead", "overhead_predicted", "overflow"} <= set(stats.data_vars)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), *example.args)
    with pytest.raises(ValueError, match="have 2 points, the run that is continued has 3"):
        mcmc.run(jax.random.key(1), example.args[0][:2])
    with pytest.raises(ValueError, match="init_strategy"):
        mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
        mcmc.run(jax.random.key(0), *example.args, init_params={"mu": 1.0})


@pytest.mark.slow
def test_a_rerun_has_the_draws_that_should_have_been():
    def model(y):
        G = DirichletProcess("G", 4.0, lambda: numpyro.sample("mu", dist.Normal(0, 3)))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(G.draw(), 1), obs=y)

    kernel = DPSlice(model, capacity=16)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), REAL[:, 0])
    lost = np.asarray(mcmc.get_extra_fields()["overflow"])
    assert lost.any() and not lost[0]
    for name in ("mu", "G_weights"):
        assert jnp.isnan(mcmc.get_samples()[name][lost]).all()
    found = Predictive(model, mcmc.get_samples())(jax.random.key(0), None)["y"]
    assert (jnp.isnan(found).all(1) == lost).all()
    with pytest.warns(UserWarning, match="follow an overflow of the slots.*rerun"):
        ppl_ext.to_arviz(mcmc)
    again = kernel.rerun(mcmc, 128)
    assert not again.get_extra_fields()["overflow"].any()
    for name in ("mu", "G_weights"):
        ours, theirs = mcmc.get_samples()[name][~lost], again.get_samples()[name][~lost, :16]
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"atoms": "gradient"}, {"method": "kgw"}])
def test_other_paths_find_the_exact_number_of_clusters(options):
    """|z| < 4.5 on the mean, with the effective sample size that ArviZ finds."""
    import arviz as az

    example = three_points_of_a_process()
    mcmc = MCMC(
        DPSlice(example.model, **options),
        num_warmup=500,
        num_samples=5000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), *example.args)
    k = np.asarray(mcmc.get_samples(group_by_chain=True)["G_num_clusters"], float)
    mean, sd = example.mean["G_num_clusters"], example.sd["G_num_clusters"]
    assert abs(k.mean() - mean) < 4.5 * sd / np.sqrt(float(az.ess(k)))


@pytest.mark.slow
def test_global_sites_and_a_free_concentration_against_quadrature():
    """Two points: the posterior of the shift and of the concentration on a grid; |z| < 4.5."""
    import arviz as az

    y = np.array([0.5, 2.0])

    def model(y):
        alpha = numpyro.sample("alpha", dist.LogNormal(0.0, 0.5))
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        G = DirichletProcess("G", alpha, lambda: numpyro.sample("mu", dist.Normal(0, 1)))
        with numpyro.plate("data", 2):
            numpyro.sample("y", dist.Normal(G.draw() + shift, 0.5), obs=y)

    mcmc = MCMC(
        DPSlice(model),
        num_warmup=500,
        num_samples=4000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), y)
    # together: covariance of mu shared; apart: independent; the shift is shared by both
    density = {}
    for same in (True, False):
        shared = 1.0 + np.eye(2) * 0.25 + (1.0 if same else np.eye(2))
        density[same] = np.exp(-(y @ np.linalg.solve(shared, y) + np.linalg.slogdet(shared)[1]) / 2)
    alpha = np.exp(0.5 * np.random.default_rng(0).normal(size=400_000))
    apart = alpha / (1 + alpha)
    weight = apart * density[False] + (1 - apart) * density[True]
    exact = {"alpha": np.average(alpha, weights=weight)}
    together = ((1 - apart) * density[True]).sum() / weight.sum()
    shift = {}
    for same in (True, False):
        shared = 1.0 + np.eye(2) * 0.25 + (1.0 if same else np.eye(2))
        shift[same] = np.linalg.solve(shared, y).sum()
    exact["shift"] = together * shift[True] + (1 - together) * shift[False]
    samples = mcmc.get_samples(group_by_chain=True)
    assert not mcmc.get_extra_fields()["overflow"].any()
    for name, mean in exact.items():
        draws = np.asarray(samples[name], float)
        error = draws.std() / np.sqrt(float(az.ess(draws)))
        assert abs(draws.mean() - mean) < 4.5 * error + 0.003, name
    k = np.asarray(samples["G_num_clusters"], float)
    assert abs((k == 1).mean() - together) < 0.03


def test_families_of_the_table_are_all_tried():
    assert {pair for *_, pair in CASES.values()} == {
        cls.__name__ for cls in mx._BINDINGS if cls is not cj.Product
    }


@pytest.mark.slow
def test_closed_form_atoms_beside_a_random_scale_are_exact():
    """Three points, a scale with a prior: sum over partitions, quadrature over the scale.

    |z| < 4.5 with ArviZ's ESS: a right kernel fails once in 150,000.
    """
    y, alpha, prior_sd = np.array([-1.0, 0.5, 4.0]), 1.5, 3.0

    def model(y):
        sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 0.5))
        process = DirichletProcess(
            "G", alpha, lambda: numpyro.sample("mu", dist.Normal(0.0, prior_sd))
        )
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Normal(process.draw(), sigma), obs=y)

    assert mx.look(model, (y,), {}).links is not None
    sigma = np.exp(np.linspace(-2.5, 2.5, 1001))
    weights, clusters = [], []
    for labels in ([0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 1, 2]):
        sizes = np.bincount(labels)
        same = prior_sd**2 * np.equal.outer(labels, labels)
        covariance = same + sigma[:, None, None] ** 2 * np.eye(3)
        solved = np.linalg.solve(covariance, np.broadcast_to(y[:, None], (1001, 3, 1)))
        quadratic = solved[..., 0] @ y
        log_density = -(quadratic + np.linalg.slogdet(covariance)[1]) / 2
        prior = alpha ** len(sizes) * np.prod(np.maximum(sizes - 1, 1))
        # a grid in log sigma takes its normal density
        weights.append(prior * np.exp(log_density - 2 * np.log(sigma) ** 2))
        clusters.append(len(sizes))
    weights = np.array(weights)
    exact = {
        "G_num_clusters": np.average(clusters, weights=weights.sum(1)),
        "sigma": np.average(sigma, weights=weights.sum(0)),
    }
    mcmc = MCMC(DPSlice(model), num_warmup=500, num_samples=10_000, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    draws = ppl_ext.to_arviz(mcmc)["posterior"]
    for name, mean in exact.items():
        error = float(draws[name].std()) / np.sqrt(float(az.ess(draws[[name]])[name]))
        assert abs(float(draws[name].mean()) - mean) < 4.5 * error, (name, mean)
