"""Kernels under `pyro.infer.MCMC`, and `ppl_ext.pyro.MCMC`: the drivers' every demand."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pyro = pytest.importorskip("pyro")

import pyro.distributions as dist
from pyro import poutine
from pyro.infer.mcmc.api import StreamingMCMC

import ppl_ext
from ppl_ext import _arviz
from ppl_ext.diagnostics import attach_scores, check, uld_report
from ppl_ext.errors import InitializationError, TracingError, UnsupportedModelError
from ppl_ext.pyro import HMC, MCMC, NUTS, ULD
from ppl_ext.pyro.entries import normal_with_known_variances
from ppl_ext.pyro.kernel import DensityKernel
from ppl_ext.pyro.runner import Transition
from ppl_ext.pyro.target import Posterior

Y = torch.tensor([0.3, -1.2, 0.7, 2.0])
# posterior of a normal mean with prior Normal(0, 10)
PRECISION = 4 + 0.01
MEAN, SD = float(Y.sum()) / PRECISION, PRECISION**-0.5


def location(y=Y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    pyro.deterministic("twice", 2 * mu)
    with pyro.plate("datum", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def hmc(model=location, **options):
    # a few steps only: it compiles fastest
    return HMC(model, trajectory_length=1.5, **options)


def run(kernel, *args, driver=pyro.infer.MCMC, samples=400, warmup=200, **options):
    pyro.set_rng_seed(0)
    mcmc = driver(kernel, samples, warmup, disable_progbar=True, **options)
    mcmc.run(*args)
    return mcmc


@pytest.mark.parametrize(
    "kernel", [HMC, *(pytest.param(k, marks=pytest.mark.slow) for k in (NUTS, ULD))]
)
def test_draws_are_of_the_posterior(kernel):
    """Five standard errors at an effective size of 400: all have more.

    No failure in 20 seeds.
    """
    mcmc = run(kernel(location), Y, samples=2000)
    mu = mcmc.get_samples()["mu"]
    assert mu.shape == (2000,) and mu.dtype is torch.float32
    assert abs(mu.mean() - MEAN) < 5 * SD / 20
    assert abs(mu.std() / SD - 1) < 5 / np.sqrt(2 * 400)
    stats = mcmc.diagnostics()
    assert stats["divergences"] == {"chain 0": []}
    assert 0.5 < stats["acceptance rate"]["chain 0"] <= 1
    assert len(stats["sample_stats"]["chain 0"]["step_size"]) == 2000
    mcmc.summary()


def test_one_kernel_serves_several_chains_which_all_start_anew():
    with pytest.warns(UserWarning, match="drawn sequentially"):
        mcmc = pyro.infer.MCMC(
            hmc(),
            300,
            100,
            num_chains=3,
            initial_params={"mu": torch.tensor([30.0, -30.0, 0.0])},
            disable_progbar=True,
        )
    pyro.set_rng_seed(1)
    mcmc.run(Y)
    mu = mcmc.get_samples(group_by_chain=True)["mu"]
    assert mu.shape == (3, 300)
    assert len(torch.unique(mu[:, 0])) == 3
    assert (abs(mu.mean(1) - MEAN) < 5 * SD / np.sqrt(50)).all()


def test_initial_params_are_where_the_chain_starts():
    kernel = HMC(location, step_size=1e-6, num_steps=1, adapt_step_size=False)
    mcmc = run(kernel, Y, samples=3, warmup=0, initial_params={"mu": torch.tensor(77.0)})
    assert mcmc.get_samples()["mu"] == pytest.approx([77.0] * 3, abs=1e-3)


def test_the_seed_of_pyro_decides():
    first, second = (run(hmc(), Y, samples=20).get_samples()["mu"] for _ in range(2))
    assert torch.equal(first, second)
    pyro.set_rng_seed(5)
    mcmc = pyro.infer.MCMC(hmc(), 20, 200, disable_progbar=True)
    mcmc.run(Y)
    assert not torch.equal(first, mcmc.get_samples()["mu"])


def test_hook_and_logging_see_every_draw():
    seen = []

    def hook(kernel, params, stage, i):
        seen.append((stage, i, float(params["mu"]), dict(kernel.logging())))

    mcmc = run(hmc(), Y, samples=30, warmup=20, hook_fn=hook)
    assert [(stage, i) for stage, i, *_ in seen] == [
        *(("Warmup", i) for i in range(20)),
        *(("Sample", i) for i in range(30)),
    ]
    np.testing.assert_array_equal([x for *_, x, _ in seen[20:]], mcmc.get_samples()["mu"])
    assert set(seen[-1][3]) == {"step size", "acc. prob"}


def test_streaming():
    mcmc = StreamingMCMC(hmc(), 400, 200, disable_progbar=True)
    pyro.set_rng_seed(0)
    mcmc.run(Y)
    assert abs(mcmc.get_statistics()[(0, "mu")]["mean"] - MEAN) < 5 * SD / 10


def test_kernels_are_pickled_before_and_during_a_run():
    kernel = hmc()
    kernel.setup(10, Y)
    kernel.sample(kernel.initial_params)
    again = pickle.loads(pickle.dumps(kernel))
    assert run(again, Y, samples=20).get_samples()["mu"].shape == (20,)


@pytest.mark.slow
def test_spawned_workers(monkeypatch):
    monkeypatch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: 4)
    mcmc = run(hmc(), Y, num_chains=2, mp_context="spawn")
    mu = mcmc.get_samples(group_by_chain=True)["mu"]
    assert (abs(mu.mean(1) - MEAN) < 5 * SD / 10).all()
    assert not torch.equal(mu[0], mu[1])


SHIFT = torch.tensor(0.0)


def reads_a_global():
    mu = pyro.sample("mu", dist.Normal(SHIFT, 1.0))
    pyro.sample("z", dist.Normal(mu, 1.0), obs=torch.tensor(0.0))


def test_a_run_sees_a_global_tensor_that_was_changed():
    global SHIFT
    kernel = hmc(reads_a_global)
    for driver in (pyro.infer.MCMC, MCMC):
        means = []
        for shift in (0.0, 40.0):
            SHIFT = torch.tensor(shift)
            means.append(float(run(kernel, driver=driver).get_samples()["mu"].mean()))
        assert means == pytest.approx([0.0, 20.0], abs=5 * 0.5**0.5 / 10)


def test_new_data_do_not_compile_anew():
    run(hmc(), Y, samples=10)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            compiled.append(event)
            if event == "/jax/core/compile/backend_compile_duration"
            else None
        )
    )
    mcmc = run(hmc(), Y + 3, samples=400)
    assert abs(mcmc.get_samples()["mu"].mean() - MEAN - 3 * 4 / PRECISION) < 5 * SD / 10
    assert not compiled


# --- ppl_ext.pyro.MCMC ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vectorized():
    return run(hmc(), Y, driver=MCMC, num_chains=4, thinning=2, extra_fields=("z_grad",))


def test_vectorized_chains(vectorized):
    mu = vectorized.get_samples(group_by_chain=True)["mu"]
    assert mu.shape == (4, 200)
    assert vectorized.get_samples()["mu"].shape == (800,)
    assert (abs(mu.mean(1) - MEAN) < 5 * SD / 10).all()
    assert len(torch.unique(mu)) > 700
    assert vectorized.diagnostics()["mu"]["r_hat"] < 1.05
    fields = vectorized.get_extra_fields()
    # the gradient of the potential energy of the draw beside it
    grad = PRECISION * (vectorized.get_samples()["mu"] - MEAN)
    np.testing.assert_allclose(fields["z_grad"]["mu"], grad, atol=1e-4)
    assert fields["step_size"].shape == (800,)


def test_sequential_chains_and_save_params():
    mcmc = run(hmc(), Y, driver=MCMC, num_chains=2, chain_method="sequential", save_params=["mu"])
    mu = mcmc.get_samples(group_by_chain=True)["mu"]
    assert mu.shape == (2, 400)
    assert not torch.equal(mu[0], mu[1])
    assert (abs(mu.mean(1) - MEAN) < 5 * SD / 10).all()


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"`kernel` must be one of ppl_ext.pyro.*got pyro\.infer"):
        MCMC(pyro.infer.NUTS(location), 10)
    with pytest.raises(
        ValueError, match="`chain_method` must be one of 'vectorized', 'sequential'"
    ):
        MCMC(hmc(), 10, chain_method="parallel")
    with pytest.raises(ValueError, match="`thinning` must be a positive integer, got 0"):
        MCMC(hmc(), 10, thinning=0)
    with pytest.raises(ValueError, match="exactly one of `model` and `potential_fn`"):
        NUTS()
    with pytest.raises(ValueError, match="`engine` must be one of 'auto', 'xla', 'torch', got 'ja"):
        NUTS(location, engine="jax")
    with pytest.raises(ValueError, match="`target_accept_prob` must be between 0 and 1"):
        NUTS(location, target_accept_prob=2.0)
    with pytest.raises(ValueError, match="`integrator` must be one of"):
        ULD(location, integrator="leapfrog")
    with pytest.raises(ValueError, match="`use_multinomial_sampling` must be True"):
        NUTS(location, use_multinomial_sampling=False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"nu": torch.zeros(())}, r"lacks the latent sites \['mu'\] and has the unknown.*\['nu'\]"),
        ({"mu": torch.zeros(3)}, r"`initial_params\['mu'\]` has shape \(3,\).*shape \(\)"),
    ],
)
def test_a_start_that_does_not_match_is_refused(params, words):
    with pytest.raises(ValueError, match=words):
        run(hmc(), Y, initial_params=params)


def test_a_start_without_density_is_refused():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("wall", dist.Normal(0.0, torch.where(x > 50, 1.0, torch.nan)), obs=Y[0])

    with pytest.raises(InitializationError, match="observed site 'wall'"):
        run(hmc(model))


def test_a_discrete_site_is_refused_by_name():
    def model():
        pyro.sample("k", dist.Bernoulli(0.5))

    with pytest.raises(UnsupportedModelError, match=r"'k' is discrete \(Bernoulli\).*pyro.infer"):
        run(hmc(model))


class Labels(DensityKernel):
    """An integer site beside a real one: what a kernel for discrete sites hands the driver."""

    @property
    def algorithm(self):
        return self

    def transition(self, target, num_warmup):
        from typing import NamedTuple

        class State(NamedTuple):
            z: dict
            z_grad: dict
            potential_energy: jax.Array

        init = lambda key, z, data: State(z, {"x": z["x"]}, jnp.zeros(()))  # noqa: E731
        step = lambda s, data: s._replace(z={"x": s.z["x"] + 0.5, "k": s.z["k"] + 1})  # noqa: E731
        names = ("accept_prob", "mean_accept_prob", "step_size")
        fields = lambda s, data: dict.fromkeys(names, jnp.ones(()))  # noqa: E731
        return Transition(init, step, fields)


def test_integer_sites_keep_values_and_dtype():
    start = {"x": torch.zeros(()), "k": torch.tensor(2**24, dtype=torch.int32)}
    kernel = Labels(potential_fn=lambda z: z["x"] ** 2 / 2)
    mcmc = run(kernel, driver=MCMC, samples=4, warmup=0, initial_params=start)
    k = mcmc.get_samples()["k"]
    assert k.dtype is torch.int32
    assert k.tolist() == [2**24 + i for i in range(1, 5)]


# --- PyTorch as the engine --------------------------------------------------------------------


def branching(y=Y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    # the same density on both sides
    mean = mu if mu > 0 else mu.abs().neg()
    pyro.sample("y", dist.Normal(mean, 1.0).expand([4]).to_event(1), obs=y)


def test_a_model_that_cannot_be_traced_runs_in_pytorch_with_a_warning():
    with pytest.warns(UserWarning, match=r"slow, because JAX cannot.*test_kernels.py:\d+"):
        mcmc = run(hmc(branching), Y, samples=100, warmup=50)
    assert abs(mcmc.get_samples()["mu"].mean() - MEAN) < 5 * SD / np.sqrt(40)
    with pytest.raises(TracingError, match="Python number"):
        run(hmc(branching, engine="xla"), Y)


def test_the_engine_pytorch_gives_value_gradient_and_hessian():
    from ppl_ext.pyro.potential import CallbackPotential

    start = {"a": torch.tensor([0.3, -0.2]), "b": torch.tensor(0.5)}
    by_torch = CallbackPotential(lambda z: (z["a"] ** 3).sum() * z["b"].exp(), start)
    by_jax = lambda z: (z["a"] ** 3).sum() * jnp.exp(z["b"])  # noqa: E731
    z = {n: jnp.array(x.numpy()) for n, x in start.items()}
    f = lambda z: by_torch(z, ())  # noqa: E731
    tangent = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(-0.5)}
    for transform in (
        lambda g: jax.value_and_grad(g)(z),
        lambda g: jax.jvp(jax.grad(g), (z,), (tangent,)),
        lambda g: jax.vmap(jax.grad(g))(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), z)),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            transform(f),
            transform(by_jax),
        )


# --- ArviZ ------------------------------------------------------------------------------------


@pytest.mark.arviz
def test_to_arviz(vectorized):
    data = ppl_ext.to_arviz(vectorized, log_likelihood=True)
    posterior = _arviz.get_group(data, "posterior")
    assert posterior["mu"].dims == ("chain", "draw")
    np.testing.assert_allclose(posterior["twice"], 2 * posterior["mu"], rtol=1e-6)
    terms = _arviz.get_group(data, "log_likelihood")["y"]
    assert terms.dims == ("chain", "draw", "datum")
    mu = posterior["mu"].values[..., None]
    exact = -((Y.numpy() - mu) ** 2) / 2 - np.log(2 * np.pi) / 2
    np.testing.assert_allclose(terms, exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(_arviz.get_group(data, "observed_data")["y"], Y)
    stats = _arviz.get_group(data, "sample_stats")
    assert {"lp", "acceptance_rate", "diverging", "n_steps", "step_size"} <= set(stats.data_vars)
    score = _arviz.get_group(data, "unconstrained_posterior_score")["mu"]
    np.testing.assert_allclose(score, -PRECISION * (posterior["mu"] - MEAN), atol=1e-4)
    assert {"finite", "divergences", "acceptance", "Stein test"} <= set(check(data).passed)


@pytest.mark.arviz
def test_scores_of_draws_made_by_pyros_own_sampler():
    kernel = pyro.infer.HMC(location, trajectory_length=1.5)
    mcmc = run(kernel, Y, samples=10, warmup=10)
    data = ppl_ext.to_arviz(mcmc, dims={"mu": []})
    assert _arviz.get_group(data, "unconstrained_posterior_score") is None
    scored = attach_scores(data, location, Y)
    score = _arviz.get_group(scored, "unconstrained_posterior_score")["mu"]
    mu = _arviz.get_group(data, "posterior")["mu"]
    np.testing.assert_allclose(score, -PRECISION * (mu - MEAN), atol=1e-4)


def test_a_run_must_come_first():
    with pytest.raises(ValueError, match=r"holds no draws: call `mcmc.run` first"):
        ppl_ext.to_arviz(pyro.infer.MCMC(hmc(), 10, disable_progbar=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = hmc()
    with pytest.raises(RuntimeError, match="`setup` must be called before `sample`"):
        kernel.sample({})


def test_gaussian_prior_is_read_from_the_model():
    def model(scale):
        fixed = pyro.sample("fixed", dist.Normal(torch.tensor([1.0, 2.0]), 0.5).to_event(1))
        with pyro.plate("group", 3):
            pyro.sample("wide", dist.Normal(0.0, scale))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        pyro.sample("given_tau", dist.Normal(0.0, tau))
        pyro.sample("partly", dist.Normal(torch.stack([tau, tau * 0 + 3]), 2.0).to_event(1))
        with poutine.scale(scale=2.0):
            pyro.sample("scaled", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(fixed.sum(), 1.0), obs=torch.tensor(0.0))

    mean, precision = Posterior(model, (torch.tensor(4.0),), {}).gaussian_prior()
    np.testing.assert_allclose(mean["fixed"], [1, 2])
    np.testing.assert_allclose(precision["fixed"], 4)
    np.testing.assert_allclose(precision["wide"], [1 / 16] * 3)
    np.testing.assert_allclose((mean["partly"], precision["partly"]), ([0, 3], [0, 0.25]))
    assert precision["given_tau"] == precision["tau"] == precision["scaled"] == 0


@pytest.mark.parametrize(
    ("driver", "prior_precision"),
    [(pyro.infer.MCMC, None), (MCMC, {"theta": 0.04}), (MCMC, None)],
)
def test_kbk_and_its_report(driver, prior_precision):
    example = normal_with_known_variances()
    kernel = ULD(example.model, integrator="kbk", prior_precision=prior_precision)
    pyro.set_rng_seed(3)
    mcmc = driver(kernel, 1000, 500, disable_progbar=True)
    mcmc.run(*example.args)
    z = (mcmc.get_samples()["theta"].numpy() - example.mean["theta"]) / example.sd["theta"]
    # adjacent draws correlate little: the standard error is about 0.04
    assert (np.abs(z.mean(0)) < 0.25).all()
    report = uld_report(mcmc)
    assert report.integrator == "kbk"
    assert abs(report.worst_variance_bias) < 0.1
    facts = _arviz.get_group(ppl_ext.to_arviz(mcmc), "sample_stats").attrs
    np.testing.assert_allclose(facts["uld_prior_precision"], 0.04, rtol=1e-6)
    with pytest.raises(TypeError, match="half the `step_size`"):
        uld_report(mcmc, richardson=True)


def test_uld_names_unknown_sites_of_prior_precision():
    mcmc = MCMC(ULD(location, integrator="kbk", prior_precision={"nu": 1.0}), 2, 2)
    with pytest.raises(ValueError, match="unknown sites \\['nu'\\]; the model has \\['mu'\\]"):
        mcmc.run()
