"""Runs that stop and go on, dtypes, and what is compiled how often, for every NumPyro kernel."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC
from scipy import stats

from ppl_ext.registry import entries

ENTRIES = [e for e in entries() if e.language == "numpyro" and not e.own_models]
Y = np.linspace(-1.0, 1.0, 20)


@pytest.fixture(params=ENTRIES, ids=lambda entry: entry.name, scope="module")
def entry(request, adapted):
    return adapted(request.param)


def location(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def location_in_a_plate(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("datum", y.shape[0], subsample_size=5) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def model_for(entry):
    return location_in_a_plate if entry.minibatch else location


def make(kernel, num_chains=2, num_warmup=20, num_samples=20, **options):
    options = {"progress_bar": False, "chain_method": "vectorized", **options}
    return MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains, **options
    )


def count_calls(kernel, name):
    """Counts how often MCMC calls a method: for `sample`, once per compilation."""
    calls, method = [], getattr(kernel, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    setattr(kernel, name, counted)
    return calls


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_a_transition_keeps_structure_and_dtype_of_the_state(entry, wide):
    expected = jnp.dtype(jnp.float64 if wide else jnp.float32)

    def run(y, key):
        kernel = entry.kernel(model_for(entry), **entry.options)
        before = kernel.init(key, 5, None, (y,), {})
        after = kernel.sample(before, (y,), {})
        again = kernel.refresh(after, (y,), {})
        one = after.z if key.ndim == 0 else jax.tree.map(lambda leaf: leaf[0], after.z)
        return before, after, again, kernel.postprocess_fn((y,), {})(one)

    with jax.enable_x64(wide):
        for key in (jax.random.key(0), jax.random.split(jax.random.key(0), 2)):
            before, after, again, values = jax.eval_shape(run, jnp.asarray(Y), key)
            assert before == after == again
            floats = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating)]
            assert {x.dtype for x in floats} == {expected}
            assert {value.dtype for value in values.values()} == {expected}


@pytest.mark.adaptor
def test_run_goes_on_after_warmup_without_another_start(entry):
    kernel = entry.kernel(model_for(entry), **entry.options)
    starts = count_calls(kernel, "init")
    mcmc = make(kernel)
    mcmc.warmup(jax.random.key(0), Y)
    mcmc.run(jax.random.key(1), Y)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(2), Y)
    assert len(starts) == 1
    assert (mcmc.last_state.i == 60).all()


@pytest.mark.adaptor
def test_equal_keys_give_equal_draws_and_chains_differ(entry):
    draws = []
    for seed in (0, 0, 1):
        mcmc = make(entry.kernel(model_for(entry), **entry.options))
        mcmc.run(jax.random.key(seed), Y)
        draws.append(mcmc.get_samples(group_by_chain=True)["mu"])
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0][0] != draws[0][1]).all() and (draws[0] != draws[2]).all()


@pytest.mark.adaptor
def test_data_of_the_same_shape_are_compiled_once(entry):
    kernel = entry.kernel(model_for(entry), **entry.options)
    transitions = count_calls(kernel, "sample")
    mcmc = make(kernel, jit_model_args=True)
    mcmc.run(jax.random.key(0), jnp.asarray(Y))
    compiled = len(transitions)
    for shift in (5.0, 10.0):
        mcmc.run(jax.random.key(0), jnp.asarray(Y + shift))
    assert len(transitions) == compiled > 0


@pytest.mark.adaptor
def test_a_pickled_run_goes_on_like_the_original(entry):
    mcmc = make(entry.kernel(model_for(entry), **entry.options))
    mcmc.run(jax.random.key(0), Y)
    copy = pickle.loads(pickle.dumps(mcmc))
    draws = []
    for each in (mcmc, copy):
        draws.append(each.get_samples()["mu"])
        each.post_warmup_state = each.last_state
        each.run(jax.random.key(1), Y)
        draws.append(each.get_samples()["mu"])
    np.testing.assert_array_equal(draws[0], draws[2])
    np.testing.assert_array_equal(draws[1], draws[3])


@pytest.mark.slow
def test_progress_bars_of_parallel_chains_change_no_draw(entry, progress_bar_possible, capsys):
    draws = []
    for shown in (True, False):
        mcmc = make(
            entry.kernel(model_for(entry), **entry.options),
            progress_bar=shown,
            chain_method="parallel",
        )
        mcmc.run(jax.random.key(0), Y)
        draws.append(mcmc.get_samples()["mu"])
    np.testing.assert_allclose(*draws, rtol=2e-4)


@pytest.mark.adaptor
def test_fields_can_be_added_and_left_out(entry):
    mcmc = make(entry.kernel(model_for(entry), **entry.options))
    mcmc.run(jax.random.key(0), Y, extra_fields=("~z.mu", "i"))
    assert set(mcmc.get_samples()) == {"sigma"}
    assert mcmc.get_extra_fields(group_by_chain=True)["i"].tolist() == [[*range(21, 41)]] * 2


@pytest.mark.adaptor
@pytest.mark.parametrize("outside", [np.nan, -np.inf])
def test_normal_truncated_by_a_factor(entry, outside):
    """Five standard errors at an effective size of 1000: the sampler has 2000 or more."""
    if entry.minibatch or entry.intractable:
        pytest.skip(f"{entry.name} declares that it needs data")

    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.factor("wall", jnp.where(x > -0.5, 0.0, outside))

    mcmc = make(entry.kernel(model, **entry.options), num_warmup=300, num_samples=3000)
    mcmc.run(jax.random.key(0))
    x = np.asarray(mcmc.get_samples()["x"], np.float64)
    exact = stats.truncnorm(-0.5, np.inf)
    assert x.min() > -0.5
    assert abs(x.mean() - exact.mean()) < 5 * exact.std() / np.sqrt(1000)
    assert abs(x.std() / exact.std() - 1) < 0.1
