"""`check`: each flag on a run or on draws that show it, and none on those that do not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.infer import MCMC, NUTS

import ppl_ext
from ppl_ext import _arviz
from ppl_ext.diagnostics import check
from ppl_ext.numpyro import (
    DirichletProcess,
    DPSlice,
    ExchangeMH,
    Graph,
    Ising,
    ProximalIMH,
    TunaMH,
)

pytestmark = pytest.mark.arviz

SHAPE = (4, 500)
NORMAL = np.random.default_rng(0).normal(size=SHAPE)


def container(draws=NORMAL, score=None, attrs=None, **stats):
    """Draws of one site `mu`, with statistics that hold for all draws or for each."""
    named = lambda x: (("chain", "draw"), np.broadcast_to(x, np.shape(draws)))  # noqa: E731
    groups = {
        "posterior": xr.Dataset({"mu": named(draws)}),
        "sample_stats": xr.Dataset({k: named(v) for k, v in stats.items()}, attrs=attrs),
    }
    if score is not None:
        groups["unconstrained_posterior"] = groups["posterior"]
        groups["unconstrained_posterior_score"] = xr.Dataset({"mu": named(score)})
    return _arviz.from_groups(groups)


def flags(data):
    return [finding.flag for finding in check(data).findings]


def in_one_draw(value, other):
    return np.where(np.arange(np.prod(SHAPE)).reshape(SHAPE) == 7, value, other)


def test_a_clean_run_says_so():
    found = check(container(score=-NORMAL, diverging=False, acceptance_rate=0.8, n_steps=7))
    assert found.ok and found.not_checked == {}
    assert str(found) == (
        "4 chains of 500 draws: nothing found\n"
        "fine: finite, moving, divergences, acceptance, R-hat, ESS, Stein test"
    )


MIXTURE = dict(
    num_clusters=in_one_draw(3, 2), num_instantiated=4, overhead=2, overhead_predicted=2.0
)
BIASED = dict(uld_integrator="ee")


@pytest.mark.parametrize(
    ("flag", "bad", "good", "words"),
    [
        ("overflow", dict(overflow=in_one_draw(True, False), **MIXTURE),
         dict(overflow=False, **MIXTURE), "0.1% of the draws follow .*rerun"),
        ("overhead", dict(overflow=False, **{**MIXTURE, "overhead": 3}),
         dict(overflow=False, **MIXTURE), "44.7 standard deviations"),
        ("bounds", dict(num_violations=in_one_draw(3, 0)), dict(num_violations=0),
         "violated 3 times"),
        ("simulations", dict(num_overflow=in_one_draw(2, 0)), dict(num_overflow=0),
         "limit 2 times"),
        ("exactness", dict(attrs=dict(exact=0, inexact_sites="site 'g' (ERGM)"), num_overflow=0),
         dict(attrs=dict(exact=1, inexact_sites=""), num_overflow=0), "site 'g'.*exchange_report"),
        ("estimated bounds", dict(attrs=dict(estimated_bounds=1), num_violations=0),
         dict(attrs=dict(estimated_bounds=0), num_violations=0), "may be off"),
        ("finite", dict(draws=in_one_draw(np.nan, NORMAL)), {}, "NaN or infinite: mu"),
        ("moving", dict(draws=np.where([[1], [1], [0], [1]], NORMAL, 0.3)), {}, r"chains \[2\]"),
        ("moving", dict(diverging=np.arange(4)[:, None] == 1), dict(diverging=False),
         r"Every draw of chains \[1\] diverged"),
        ("divergences", dict(diverging=in_one_draw(True, False)), dict(diverging=False),
         "1 of 2000 draws .*target_accept_prob"),
        ("divergences", dict(diverging=np.arange(500) % 50 == 0, num_overflow=0),
         dict(diverging=in_one_draw(True, False), num_overflow=0), "40 of 2000 proposals"),
        ("acceptance", dict(acceptance_rate=0.3, n_steps=7), dict(acceptance_rate=0.5, n_steps=7),
         r"chains \[0, 1, 2, 3\] is below 0.4 \(least 0.3\)"),
        ("acceptance", dict(acceptance_rate=0.04), dict(acceptance_rate=0.06), "below 0.05"),
        ("acceptance", dict(acceptance_rate=0.005, log_weight=0.1 * NORMAL),
         dict(acceptance_rate=0.04, log_weight=0.1 * NORMAL), "below 0.01.*approximate operator"),
        ("acceptance", dict(acceptance_rate=np.nan), {}, "below"),
        ("R-hat", dict(draws=NORMAL + 0.3 * np.arange(4)[:, None]), {}, "mu 1.0"),
        ("ESS", dict(draws=np.repeat(NORMAL[:, :90], 6, axis=1)), {}, r"below 400 .*mu \(bulk\)"),
        ("Stein test", dict(score=-1.3 * NORMAL), dict(score=-NORMAL), r"p = 0.00"),
        ("weights", dict(log_weight=NORMAL**2), dict(log_weight=0.1 * NORMAL), "Pareto k"),
    ],
)  # fmt: skip
def test_flag(flag, bad, good, words):
    found = check(container(**bad))
    (finding,) = [finding for finding in found.findings if finding.flag == flag]
    assert flag in str(found) and finding.found in str(found) and finding.advice in str(found)
    assert re.search(words, str(finding), re.DOTALL), str(finding)
    assert flags(container(**good)) == []


def test_what_could_not_be_looked_at_is_told():
    found = check(container(NORMAL[:1], num_steps=3))
    assert set(found.not_checked) == {"R-hat", "Stein test"}
    assert "not checked: R-hat (one chain: run four)" in str(found)
    short = check(container(NORMAL[:, :3], score=-NORMAL[:, :3]))
    assert set(short.not_checked) == {"moving", "R-hat", "ESS", "Stein test"}
    lost = check(container(np.full(SHAPE, np.nan), score=NORMAL))
    assert {"R-hat", "ESS", "Stein test"} == set(lost.not_checked)


def test_anything_but_a_run_is_refused():
    with pytest.raises(TypeError, match=r"got Dataset.*ppl_ext\.to_arviz"):
        check(xr.Dataset())
    with pytest.raises(ValueError, match="needs the group 'posterior'"):
        check(_arviz.from_groups({"prior": xr.Dataset({"mu": (("chain", "draw"), NORMAL)})}))


# --- runs ----------------------------------------------------------------------------------------


def run(kernel, *args, num_warmup=200, num_samples=500, fields=(), **options):
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=2,
        chain_method="vectorized", progress_bar=False, **options,
    )  # fmt: skip
    mcmc.run(jax.random.key(0), *args, extra_fields=fields)
    return mcmc


def test_a_good_run_of_nuts_is_clean_and_a_funnel_is_not():
    def model(spread):
        log_scale = numpyro.sample("log_scale", dist.Normal(0, spread))
        numpyro.sample("x", dist.Normal(0, jnp.exp(log_scale)).expand([3]).to_event(1))

    fields = ("z_grad", "accept_prob", "num_steps")
    mcmc = run(NUTS(model), jnp.array(0.1), fields=fields, jit_model_args=True)
    good = check(ppl_ext.to_arviz(mcmc))
    assert good.ok and {"divergences", "acceptance", "R-hat", "Stein test"} <= set(good.passed)
    mcmc.run(jax.random.key(0), jnp.array(3.0), extra_fields=fields)
    funnel = ppl_ext.to_arviz(mcmc)
    assert {"divergences", "R-hat", "ESS"} <= set(flags(funnel))


@pytest.mark.slow
def test_weights_of_a_proposal_that_is_too_narrow():
    def model(y, forward=lambda x: x):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(forward(x), 0.5), obs=y)

    def of(factor):
        approx = dict(forward=lambda x: factor * x)
        kernel = ProximalIMH(model, approx=approx, correction=None)
        return ppl_ext.to_arviz(run(kernel, 0.5, num_warmup=0, num_samples=1000))

    # the proposal's standard deviation is 0.2 of the posterior's
    assert "weights" in flags(of(4.0))
    assert flags(of(1.05)) == []


@pytest.mark.slow
def test_a_bound_that_is_too_small():
    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
        with numpyro.plate("N", 30, subsample_size=5) as i:
            numpyro.sample("y", dist.Normal(theta, 1), obs=y[i])

    y = np.random.default_rng(0).normal(size=30)
    with pytest.warns(UserWarning, match="A bound was violated"):
        data = ppl_ext.to_arviz(
            run(TunaMH(model, bounds=lambda mode, scale, radius: jnp.full(30, 1e-3)), y)
        )
    assert "bounds" in flags(data)


@pytest.mark.slow
def test_too_few_slots():
    def model(y):
        G = DirichletProcess("G", 4.0, lambda: numpyro.sample("mu", dist.Normal(0, 3)))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(G.draw(), 1), obs=y)

    y = np.random.default_rng(0).normal(size=50)
    with pytest.warns(UserWarning, match="overflow"):
        data = ppl_ext.to_arviz(run(DPSlice(model, capacity=16), y, num_warmup=0, num_samples=100))
    assert "overflow" in flags(data) and "finite" not in flags(data)
    more = ppl_ext.to_arviz(run(DPSlice(model, capacity=128), y, num_samples=1000))
    assert not {"overflow", "overhead", "finite"} & set(flags(more))


@pytest.mark.slow
def test_simulations_at_their_limit():
    graph = Graph.lattice(4, 4)

    def model(x):
        coupling = numpyro.sample("coupling", dist.Uniform(0, 1))
        numpyro.sample("x", Ising(coupling, 0.0, graph, sampler="cftp", max_sweeps=32), obs=x)

    x = Ising(0.3, 0.0, graph).sample(jax.random.key(0))
    with pytest.warns(UserWarning, match="reached their limit"):
        data = ppl_ext.to_arviz(run(ExchangeMH(model), x))
    assert "simulations" in flags(data)
