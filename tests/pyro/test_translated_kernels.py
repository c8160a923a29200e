"""Kernels that read a model's distributions, under Pyro's drivers.

Means are compared with exact ones: |z| < 4.5, the Monte Carlo error by ArviZ's ESS. A right kernel
fails one comparison in 150,000 if the error is right.
"""

from functools import cache

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as np_dist
import pytest

torch = pytest.importorskip("torch")
pyro = pytest.importorskip("pyro")

import pyro.distributions as dist
from pyro.infer.autoguide.initialization import init_to_value

import ppl_ext
import ppl_ext.numpyro
from ppl_ext.diagnostics import exchange_report
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.pyro import (
    ERGM,
    MCMC,
    NUTS,
    ULD,
    ConwayMaxwellPoisson,
    DirichletProcess,
    DPSlice,
    ExchangeMH,
    Graph,
    Ising,
    PoissonMH,
    Potts,
    TunaMH,
)
from ppl_ext.pyro import entries as pyro_entries

pytestmark = pytest.mark.arviz

ENTRIES = {
    "TunaMH": (pyro_entries.tuna_mh, 3000),
    "ExchangeMH": (pyro_entries.exchange_mh, 6000),
    "PoissonMH": (pyro_entries.poisson_mh, 4000),
    "DPSlice": (pyro_entries.dp_slice, 6000),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("PoissonMH", "DPSlice")]


def regression(x, y):
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("N", len(y), subsample_size=50) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def regression_in_numpyro(x, y):
    beta = numpyro.sample("beta", np_dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("N", len(y), subsample_size=50) as i:
        numpyro.sample("y", np_dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 2, generator=generator)
    y = torch.bernoulli(torch.sigmoid(x[:, 0]), generator=generator)
    return x, y


@pytest.fixture(scope="module")
def runs():
    """Runs on the examples of the registry, each made once."""

    @cache
    def run(name):
        make, draws = ENTRIES[name]
        entry = make()
        example = entry.example()
        pyro.set_rng_seed(1)
        kernel = entry.kernel(example.model, **entry.options)
        mcmc = MCMC(kernel, draws, warmup_steps=300, num_chains=2, disable_progbar=True)
        mcmc.run(*example.args, **example.kwargs)
        return mcmc, example

    return run


@pytest.mark.parametrize("name", ["TunaMH", "ExchangeMH", *SLOW])
def test_the_answer_is_exact_and_reaches_arviz(name, runs):
    mcmc, example = runs(name)
    posterior = ppl_ext.to_arviz(mcmc)["posterior"]
    for site, mean in example.mean.items():
        values = posterior[site]
        assert values.shape[:2] == (2, mcmc.num_samples)
        error = values.std() / np.sqrt(az.ess(posterior[[site]])[site])
        z = (values.mean(("chain", "draw")) - mean) / error
        assert (abs(z) < 4.5).all(), (site, z.values)


@pytest.mark.slow
def test_draws_are_those_of_the_numpyro_kernel_on_the_same_model_with_the_same_key(data):
    x, y = (jax.numpy.asarray(a.numpy()) for a in data)
    kernel = TunaMH(regression)
    translation = kernel.translated(*data)
    chains = []
    for sampler, args in (
        (kernel.kernel(translation.model, None), (translation.constants,)),
        (ppl_ext.numpyro.TunaMH(regression_in_numpyro), (x, y)),
    ):
        state = sampler.init(jax.random.key(3), 20, None, args, {})
        step = jax.jit(lambda state, args=args, sampler=sampler: sampler.sample(state, args, {}))
        for _ in range(30):
            state = step(state)
        chains.append(state)
    np.testing.assert_allclose(chains[0].z["beta"], chains[1].z["beta"], rtol=1e-4)
    assert int(chains[0].num_drawn) == int(chains[1].num_drawn)


def test_statistics_and_all_the_data_reach_arviz(runs):
    run, example = runs("TunaMH")
    found = ppl_ext.to_arviz(run, log_likelihood=True)
    (y,) = example.args
    np.testing.assert_array_equal(found["observed_data"]["y"], y.numpy())
    assert {"num_drawn", "num_kept", "noise_variance", "fallback", "num_violations"} <= set(
        found["sample_stats"].data_vars
    )
    theta = run.get_samples(group_by_chain=True)["theta"][1, 7]
    expected = dist.Normal(theta, 1.5).to_event(1).log_prob(y)
    np.testing.assert_allclose(
        found["log_likelihood"]["y"][1, 7], expected.numpy(), rtol=1e-4, atol=1e-5
    )


def test_a_density_without_its_constant_gives_no_log_likelihood(runs):
    run, _ = runs("ExchangeMH")
    with pytest.raises(UnsupportedModelError, match="no loo"):
        ppl_ext.to_arviz(run, log_likelihood=True)
    assert exchange_report(run).exact


@pytest.mark.slow
def test_chains_one_after_the_other_do_not_compile_again(data):
    kernel = TunaMH(regression)
    mcmc = MCMC(
        kernel, 20, 20, num_chains=2, chain_method="sequential", disable_progbar=True, thinning=2
    )
    mcmc.run(*data)
    assert mcmc.get_samples(group_by_chain=True)["beta"].shape == (2, 10, 2)
    compiled = kernel._compiled
    mcmc.run(*data)
    assert kernel._compiled is compiled


@pytest.mark.slow
def test_pyros_own_driver_runs_it(data):
    pyro.set_rng_seed(0)
    mcmc = pyro.infer.MCMC(TunaMH(regression), 50, warmup_steps=50, disable_progbar=True)
    mcmc.run(*data)
    assert mcmc.get_samples()["beta"].shape == (50, 2)
    assert 0.2 < mcmc.diagnostics()["acceptance rate"]["chain 0"] < 1
    assert ppl_ext.to_arviz(mcmc)["sample_stats"]["num_drawn"].shape == (1, 50)


def test_starts_come_from_the_strategy_not_from_initial_params(data):
    with pytest.raises(ValueError, match="TunaMH takes no `initial_params`"):
        MCMC(TunaMH(regression), 1, 0, initial_params={"beta": torch.zeros(2)}).run(*data)
    strategy = init_to_value(values={"beta": torch.tensor([4.0, -4.0])})
    kernel = TunaMH(regression, init_strategy=strategy)
    kernel.setup(0, *data)
    start = kernel.initial_params
    assert start is not None
    torch.testing.assert_close(start["beta"], torch.tensor([4.0, -4.0]))


# --- refusals --------------------------------------------------------------------------------


def normal():
    pyro.sample("mu", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (TunaMH, "no plate of the model holds an observed site"),
        (PoissonMH, "no plate of the model holds an observed site"),
        (ExchangeMH, "no observed site has one"),
        (DPSlice, "ppl_ext.pyro.DirichletProcess"),
    ],
)
def test_a_model_of_another_kind_is_refused(kernel, message):
    with pytest.raises(UnsupportedModelError, match=message):
        MCMC(kernel(normal), 1, 0, disable_progbar=True).run()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TunaMH(normal, order=3), "TunaMH: `order`"),
        (lambda: PoissonMH(normal, temperature=0.0), "PoissonMH: `temperature`"),
        (lambda: ExchangeMH(normal, pool=1), "ExchangeMH: `pool`"),
        (lambda: DPSlice(normal, capacity=10), "DPSlice: `capacity`"),
    ],
)
def test_bad_arguments_are_named_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


GRAPH = Graph.lattice(3, 3)
INTRACTABLE = {
    "Ising": (Ising(0.3, 0.1, GRAPH), (3, 3)),
    "Potts": (Potts(0.3, torch.zeros(3), GRAPH), (3, 3)),
    "ERGM": (ERGM(torch.tensor([-1.0, 0.1]), ["edges", "triangles"], 5), (5, 5)),
    "ConwayMaxwellPoisson": (ConwayMaxwellPoisson(torch.tensor([2.0, 3.0]), 1.5), (2,)),
}


@pytest.mark.parametrize("name", INTRACTABLE)
def test_no_other_kernel_takes_a_density_without_its_constant(name):
    distribution, shape = INTRACTABLE[name]
    pyro.set_rng_seed(0)
    x = distribution.sample()
    assert x.shape == shape and x.dtype == torch.get_default_dtype()
    with pytest.raises(UnsupportedModelError, match=r"ppl_ext\.pyro\.ExchangeMH"):
        distribution.log_prob(x)

    def model():
        pyro.sample("theta", dist.Normal(0.0, 1.0))
        pyro.sample("x", distribution, obs=x)

    for kernel in (NUTS(model), ULD(model)):
        with pytest.raises(UnsupportedModelError, match=r"ppl_ext\.pyro\.ExchangeMH"):
            MCMC(kernel, 1, 0, disable_progbar=True).run()
    assert ppl_ext.explain(model).verdicts["ExchangeMH"] is None


def test_explain_says_how_the_atoms_of_a_process_are_moved():
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        process = DirichletProcess("G", 1.0, lambda: pyro.sample("mu", dist.Normal(0.0, 3.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(process.draw(), scale), obs=y)

    found = ppl_ext.explain(model, torch.tensor([0.0, 1.0, 5.0]))
    assert found.verdicts["DPSlice"] is None
    # beside a random scale, too
    assert found.remarks["DPSlice"] == "atoms in closed form: mu of 'y' (NormalMean)"
    assert "ppl_ext.pyro.DPSlice" in found.verdicts["NUTS"]
