"""Every registered NumPyro kernel under everything that NumPyro's MCMC and ArviZ do with one.

A kernel joins by being registered: its entry brings a model with an exact answer.
"""

import pickle
import subprocess
import sys
import textwrap

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import (
    MCMC,
    NUTS,
    DiscreteGibbs,
    Gibbs,
    Predictive,
    init_to_median,
    init_to_value,
)
from numpyro.infer.util import potential_energy

import ppl_ext
from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.registry import entries

ALL = [entry for entry in entries() if entry.language == "numpyro"]
ENTRIES = [entry for entry in ALL if not entry.own_models]
OTHER_METHODS = ("sequential", "parallel", jax.vmap)
METHODS = [
    "vectorized",
    *(pytest.param(method, marks=pytest.mark.adaptor) for method in OTHER_METHODS),
]


@pytest.fixture(params=ENTRIES, ids=lambda entry: entry.name, scope="module")
def entry(request, adapted):
    return adapted(request.param)


@pytest.fixture
def any_model(entry):
    """For tests whose models have no plate of data."""
    if entry.minibatch:
        pytest.skip(f"{entry.name} declares that it needs a plate of data")
    if entry.intractable:
        pytest.skip(f"{entry.name} declares that it needs an intractable likelihood")


def make(entry, model, num_chains=1, num_warmup=20, num_samples=20, **options):
    options = {"progress_bar": False, "chain_method": "vectorized", **options}
    return MCMC(
        entry.kernel(model, **entry.options),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        **options,
    )


def location(y, *, scale=1.0):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("datum", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, scale), obs=jnp.asarray(y)[i])


Y = np.linspace(-1.0, 1.0, 20)


@pytest.fixture(scope="module")
def short_run(entry):
    mcmc = make(entry, location, num_chains=2)
    mcmc.run(jax.random.key(0), Y)
    return mcmc


# JAX cannot donate the collection buffer to a program under vmap, for any kernel, and says so
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m if isinstance(m, str) else "vmap")
@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_every_chain_method_finds_the_exact_answer(entry, method):
    """|z| < 5 on means and sds: false alarms below 1e-5 per comparison."""
    example = entry.example()
    options = {"num_warmup": 400, "num_samples": 1000, "chain_method": method}
    mcmc = make(entry, example.model, 2, **options)
    mcmc.run(jax.random.key(1), *example.args, **example.kwargs)
    samples = mcmc.get_samples(group_by_chain=True)
    for name, mean in example.mean.items():
        draws = np.asarray(samples[name], np.float64).reshape(2, 1000, -1)
        sd = np.ravel(example.sd[name])
        for i, exact in enumerate(np.ravel(mean)):
            ess = float(az.ess(draws[:, :, i]))
            assert abs(draws[:, :, i].mean() - exact) < 5 * sd[i] / np.sqrt(ess)
            assert abs(draws[:, :, i].std() / sd[i] - 1) < 0.03 + 5 / np.sqrt(2 * ess)


@pytest.mark.adaptor
def test_sequential_and_vectorized_draws_agree_for_equal_keys(entry, x64):
    draws = []
    # JAX keeps the buffer of a NumPy constant by its identity, in whatever precision it was used
    y = Y.copy()
    for method in ("sequential", "vectorized"):
        mcmc = make(entry, location, 2, num_warmup=5, num_samples=5, chain_method=method)
        mcmc.run(jax.random.key(3), y)
        draws.append(mcmc.get_samples(group_by_chain=True)["mu"])
        assert draws[-1].dtype == jnp.float64
    np.testing.assert_allclose(*draws, rtol=1e-8)
    assert not np.allclose(draws[0][0], draws[0][1])


@pytest.mark.slow
def test_progress_bar_changes_no_draw(entry, progress_bar_possible, capsys):
    draws = []
    for shown in (True, False):
        mcmc = make(entry, location, progress_bar=shown, chain_method="sequential")
        mcmc.run(jax.random.key(0), Y)
        draws.append(mcmc.get_samples()["mu"])
    np.testing.assert_allclose(*draws, rtol=2e-4)


@pytest.mark.adaptor
def test_thinning_keeps_every_kth_draw(entry):
    mcmc = make(entry, location, 2, thinning=2)
    mcmc.run(jax.random.key(0), Y, extra_fields=("accept_prob",))
    assert mcmc.get_samples(group_by_chain=True)["mu"].shape == (2, 10)
    assert mcmc.get_extra_fields(group_by_chain=True)["accept_prob"].shape == (2, 10)
    assert ppl_ext.to_arviz(mcmc)["posterior"]["mu"].shape == (2, 10)


def test_draws_hold_deterministic_sites_and_the_energies_belong_to_them(short_run):
    mcmc = short_run
    samples = mcmc.get_samples()
    np.testing.assert_allclose(samples["twice"], 2 * samples["mu"], rtol=1e-6)
    if "potential_energy" not in mcmc.sampler.default_fields:
        return
    energy = mcmc.get_extra_fields()["potential_energy"]
    expected = jax.vmap(lambda mu: potential_energy(location, (Y,), {}, {"mu": mu}))(samples["mu"])
    np.testing.assert_allclose(energy, expected, rtol=1e-5)


@pytest.mark.adaptor
@pytest.mark.parametrize("start", ["init_params", "init_to_value", "init_to_median"])
def test_the_start_is_the_one_asked_for(entry, start, any_model):
    def model():
        numpyro.sample("x", dist.LogNormal(4.0, 0.1))

    strategies = {
        "init_params": {},
        "init_to_value": {"init_strategy": init_to_value(values={"x": jnp.exp(4.2)})},
        "init_to_median": {"init_strategy": init_to_median},
    }
    kernel = entry.kernel(model, **entry.options, **strategies[start])
    params = {"x": jnp.array(4.2)} if start == "init_params" else None
    state = kernel.init(jax.random.key(0), 0, params, (), {})
    expected = 4.0 if start == "init_to_median" else 4.2
    assert abs(float(state.z["x"]) - expected) < (0.15 if start == "init_to_median" else 1e-5)


@pytest.mark.slow
def test_one_compiled_program_serves_new_data_of_the_same_shape(entry):
    mcmc = make(entry, location, num_warmup=200, num_samples=200, jit_model_args=True)
    for shift in (0.0, 10.0, 20.0):
        mcmc.run(jax.random.key(0), jnp.asarray(Y + shift))
        assert abs(mcmc.get_samples()["mu"].mean() - shift) < 0.3


@pytest.mark.adaptor
def test_a_resumed_run_uses_the_new_data(entry):
    mcmc = make(entry, location, num_warmup=200, num_samples=200)
    mcmc.run(jax.random.key(0), Y)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), Y + 3)
    samples = mcmc.get_samples()["mu"]
    assert abs(samples[-100:].mean() - 3) < 0.3
    if "potential_energy" not in mcmc.sampler.default_fields:
        return
    expected = jax.vmap(lambda mu: potential_energy(location, (Y + 3,), {}, {"mu": mu}))(samples)
    np.testing.assert_allclose(mcmc.get_extra_fields()["potential_energy"], expected, rtol=1e-4)


@pytest.mark.adaptor
def test_a_resumed_run_refuses_latent_sites_of_another_shape(entry, any_model):
    def model(y):
        with numpyro.plate("datum", y.shape[0]):
            numpyro.sample("local", dist.Normal(0, 1))

    mcmc = make(entry, model)
    mcmc.run(jax.random.key(0), Y)
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(ValueError, match=r"latent sites \['local'\] have other shapes"):
        mcmc.run(jax.random.key(1), Y[:10])


@pytest.mark.slow
def test_pickles_go_on_in_a_new_process(entry, tmp_path):
    if entry.intractable:
        pytest.skip("the model of another process is not adapted")
    pickle.loads(pickle.dumps(entry.kernel(location, **entry.options)))
    example = textwrap.dedent(
        """
        import pickle, sys, jax, numpyro, numpyro.distributions as dist
        from numpyro.infer import MCMC
        from ppl_ext.registry import entries
        def model(y):
            mu = numpyro.sample("mu", dist.Normal(0, 10))
            with numpyro.plate("datum", len(y)) as i:
                numpyro.sample("y", dist.Normal(mu, 1), obs=jax.numpy.asarray(y)[i])
        path, name, stage = sys.argv[1:]
        import numpy as np
        if stage == "save":
            (entry,) = [e for e in entries() if (e.name, e.language) == (name, "numpyro")]
            mcmc = MCMC(entry.kernel(model, **entry.options), num_warmup=20, num_samples=20,
                        num_chains=2, chain_method="vectorized", progress_bar=False)
            mcmc = pickle.loads(pickle.dumps(mcmc))
            mcmc.run(jax.random.key(0), np.zeros(5))
            pickle.dump(mcmc, open(path, "wb"))
        else:
            mcmc = pickle.load(open(path, "rb"))
            mcmc.post_warmup_state = mcmc.last_state
            mcmc.run(jax.random.key(1), np.zeros(5))
            assert mcmc.get_samples()["mu"].shape == (40,)
        """
    )
    script, path = tmp_path / "script.py", tmp_path / "mcmc.pkl"
    script.write_text(example)
    for stage in ("save", "load"):
        subprocess.run([sys.executable, script, path, entry.name, stage], check=True)


@pytest.mark.slow
def test_leaks_no_tracer(entry):
    mcmc = make(entry, location, num_warmup=3, num_samples=3)
    with jax.checking_leaks():
        mcmc.run(jax.random.key(0), Y)


@pytest.mark.parametrize("outside", [jnp.nan, pytest.param(-jnp.inf, marks=pytest.mark.adaptor)])
def test_no_draw_lies_where_the_density_is_nan_or_zero(entry, outside, any_model):
    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.factor("wall", jnp.where(x < 1.5, 0.0, outside))

    mcmc = make(entry, model, 2, num_warmup=200, num_samples=500)
    mcmc.run(jax.random.key(0))
    x = mcmc.get_samples()["x"]
    assert jnp.isfinite(x).all() and (x < 1.5).all() and x.std() > 0.5
    assert mcmc.get_extra_fields()["diverging"].any()


@pytest.mark.adaptor
def test_value_dependent_and_improper_supports(entry, any_model):
    def model():
        a = numpyro.sample("a", dist.Uniform(0, 1))
        numpyro.sample("b", dist.Uniform(0, 1 - a))
        c = numpyro.sample("c", dist.ImproperUniform(dist.constraints.positive, (), ()))
        numpyro.factor("gamma", 2 * jnp.log(c) - c)

    mcmc = make(entry, model, 4, num_warmup=400, num_samples=1000)
    mcmc.run(jax.random.key(0))
    samples = mcmc.get_samples()
    assert (samples["a"] + samples["b"] < 1).all()
    for name, mean, bound in (("a", 0.5, 0.05), ("b", 0.25, 0.04), ("c", 3.0, 0.25)):
        assert abs(samples[name].mean() - mean) < bound, name


def test_a_potential_function_needs_no_model(entry):
    if not entry.potential_fn:
        pytest.skip(f"{entry.name} declares that it needs a model")
    kernel = entry.kernel(**entry.options, potential_fn=lambda z: 0.5 * jnp.sum((z["x"] - 1) ** 2))
    mcmc = MCMC(kernel, num_warmup=200, num_samples=500, progress_bar=False)
    with pytest.raises(ValueError, match="init_params"):
        mcmc.run(jax.random.key(0))
    mcmc.run(jax.random.key(0), init_params={"x": jnp.zeros(3)})
    assert abs(mcmc.get_samples()["x"].mean() - 1) < 0.3


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        (lambda: numpyro.sample("k", dist.Poisson(3)), (), "'k'"),
        (lambda: numpyro.sample("point", dist.Delta(1.0)), (), "'point'"),
        (lambda y: numpyro.sample("y", dist.Normal(0, 1), obs=y), (Y,), "no continuous latent"),
        (location, (Y[:0],), "data are empty"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(entry, model, args, words):
    with pytest.raises((UnsupportedModelError, ValueError), match=words):
        make(entry, model).run(jax.random.key(0), *args)


def gibbs_model(y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.array([4.0, 2.0, 2.0])))
    upper = numpyro.sample("upper", dist.Uniform(1.0, 2.0))
    numpyro.sample("inside", dist.Uniform(0.0, upper))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    numpyro.deterministic("sum", shift + scale)
    numpyro.sample("y", dist.Normal(shift + k + weights[0], scale), obs=y)


@pytest.mark.slow
@pytest.mark.adaptor
def test_block_of_gibbs_beside_discrete_gibbs_and_nuts(entry):
    """Against NUTS with the discrete site summed out; 0.15 is 5 MCSE of the slowest site."""
    if not entry.gibbs_block:
        pytest.skip(f"{entry.name} declares that it is no Gibbs block")
    if entry.intractable:
        pytest.skip("the other blocks have the model as it is")
    ours = ["scale", "weights", "upper", "inside"]
    gibbs = Gibbs(
        [
            (DiscreteGibbs(gibbs_model), ["k"]),
            (entry.kernel(gibbs_model, **entry.options), ours),
            (NUTS(gibbs_model), ["shift"]),
        ]
    )
    mcmc = MCMC(gibbs, num_warmup=500, num_samples=3000, progress_bar=False)
    mcmc.run(jax.random.key(0), 0.7)
    samples = mcmc.get_samples()
    rng = np.random.default_rng(0)
    n = 400_000
    prior = {
        "k": rng.integers(0, 2, n),
        "scale": np.exp(0.5 * rng.normal(size=n)),
        "weights": rng.dirichlet([4.0, 2.0, 2.0], n),
        "upper": rng.uniform(1, 2, n),
        "shift": rng.normal(size=n),
    }
    prior["inside"] = rng.uniform(0, prior["upper"])
    residual = (0.7 - prior["shift"] - prior["k"] - prior["weights"][:, 0]) / prior["scale"]
    weight = np.exp(-(residual**2) / 2) / prior["scale"]
    weight /= weight.sum()
    for name, values in prior.items():
        mean = np.tensordot(weight, values, 1)
        sd = np.sqrt(np.tensordot(weight, (values - mean) ** 2, 1))
        assert (np.abs(samples[name].mean(0) - mean) < 0.15 * sd).all(), name
    assert (samples["inside"] < samples["upper"]).all()


def test_a_model_that_cannot_start_names_the_site(entry, any_model):
    def model(y):
        rate = numpyro.sample("rate", dist.Exponential(1.0))
        numpyro.sample("waiting_time", dist.Exponential(rate), obs=y)

    with numpyro.validation_enabled(False), pytest.raises(InitializationError, match="waiting_t"):
        make(entry, model).run(jax.random.key(0), jnp.array(-1.0))


@pytest.mark.adaptor
def test_keyword_arguments_reach_the_model(entry):
    mcmc = make(entry, location, 2, num_warmup=200, num_samples=500)
    mcmc.run(jax.random.key(0), Y, scale=4.0)
    assert abs(mcmc.get_samples()["mu"].std() / (4 / np.sqrt(20)) - 1) < 0.25


def test_arviz_and_predictive_take_the_run(short_run):
    mcmc = short_run
    data = ppl_ext.to_arviz(mcmc)
    stats = data["sample_stats"]
    assert {"acceptance_rate", "diverging"} <= set(stats.data_vars)
    assert ("lp" in stats.data_vars) == ("potential_energy" in mcmc.sampler.default_fields)
    assert data["observed_data"]["y"].dims == ("datum",)
    if "z_grad" in mcmc.sampler.default_fields:
        assert {"n_steps", "step_size"} <= set(stats.data_vars)
        points, scores = data["unconstrained_posterior"], data["unconstrained_posterior_score"]
        assert points["mu"].shape == scores["mu"].shape == (2, 20)
        expected = -(points["mu"] / 100 + 20 * points["mu"] - Y.sum())
        np.testing.assert_allclose(scores["mu"], expected, atol=1e-3)
    plain = az.from_numpyro(mcmc, log_likelihood=False)
    np.testing.assert_array_equal(plain["posterior"]["mu"], data["posterior"]["mu"])
    predicted = Predictive(location, mcmc.get_samples())(jax.random.key(0), Y)
    assert predicted["twice"].shape == (40,)


@pytest.mark.adaptor
def test_only_a_full_size_subsample_is_taken(entry):
    def model(y, size):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("customers", len(y), subsample_size=size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.asarray(y)[i])

    if entry.refusal(ppl_ext.registry.target(model, Y, 19)) is None:
        pytest.skip(f"{entry.name} takes minibatches")
    make(entry, model).run(jax.random.key(0), Y, 20)
    with pytest.raises(UnsupportedModelError, match=r"customers.*HMCECS"):
        make(entry, model).run(jax.random.key(0), Y, 19)


@pytest.mark.adaptor
def test_runs_inside_jit(entry):
    def run(key, y):
        mcmc = make(entry, location, num_warmup=5, num_samples=5)
        mcmc.run(key, y)
        return mcmc.get_samples()["mu"]

    assert jnp.isfinite(jax.jit(run)(jax.random.key(0), jnp.asarray(Y))).all()


def test_a_support_that_depends_on_another_gibbs_block_is_refused(entry, any_model):
    def model():
        upper = numpyro.sample("upper", dist.Uniform(1.0, 2.0))
        numpyro.sample("inside", dist.Uniform(0.0, upper))

    ours = entry.kernel(model, **entry.options)
    gibbs = Gibbs([(NUTS(model), ["upper"]), (ours, ["inside"])])
    mcmc = MCMC(gibbs, num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.raises(UnsupportedModelError, match="'inside' depends on a site of another block"):
        mcmc.run(jax.random.key(0))
