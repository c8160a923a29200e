"""The value that `tune` picks, on samplers whose best setting is known."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO, autoguide
from numpyro.infer.mcmc import MCMCKernel

from ppl_ext import _arviz
from ppl_ext.diagnostics import TooFewDrawsError, from_svi, psd, tune

N, BATCH = 100, 10
pytestmark = pytest.mark.arviz
STEPS = [5e-2, 1e-2, 5e-3, 1e-3, 5e-4, 1e-4, 5e-5, 1e-5]


def mixture(x: jax.Array) -> None:
    """The posterior of Welling and Teh (2011), section 5.1, with two modes merged into one."""
    theta = numpyro.sample("theta", dist.Normal(0.0, jnp.sqrt(jnp.array([10.0, 1.0]))).to_event(1))
    means = jnp.stack([theta[0], theta.sum()])
    components = dist.Normal(means, jnp.sqrt(2.0))
    numpyro.sample(
        "x", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), components), obs=x
    )


@functools.cache
def mixture_data() -> np.ndarray:
    rng = np.random.default_rng(5001)
    return (rng.integers(2, size=N) + np.sqrt(2) * rng.normal(size=N)).astype(np.float32)


def log_joint(theta: jax.Array, x: jax.Array) -> jax.Array:
    """Log prior of N / len(x) minibatches each, and the log likelihood of one minibatch."""
    prior = -(theta**2 / jnp.array([10.0, 1.0])).sum() / 2
    each = jnp.logaddexp(-((x - theta[0]) ** 2) / 4, -((x - theta.sum()) ** 2) / 4)
    return prior + N / len(x) * each.sum()


@functools.partial(jax.jit, static_argnums=2)
@functools.partial(jax.vmap, in_axes=(0, None, None))
def sgld(key: jax.Array, step_size: jax.Array, n: int) -> jax.Array:
    """`n` draws of stochastic gradient Langevin dynamics after `n` that are dropped."""
    x = jnp.asarray(mixture_data())
    key, start = jax.random.split(key)

    def epoch(theta: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        shuffle, noise = jax.random.split(key)
        batches = jax.random.permutation(shuffle, x).reshape(-1, BATCH)
        noise = jnp.sqrt(step_size) * jax.random.normal(noise, (len(batches), 2))

        def step(theta: jax.Array, given: tuple) -> tuple[jax.Array, jax.Array]:
            batch, noise = given
            theta = theta + step_size / 2 * jax.grad(log_joint)(theta, batch) + noise
            return theta, theta

        return jax.lax.scan(step, theta, (batches, noise))

    keys = jax.random.split(key, 2 * n * BATCH // N)
    draws = jax.lax.scan(epoch, jax.random.normal(start, (2,)), keys)[1]
    return draws.reshape(-1, 2)[n:]


def test_step_size_of_sgld() -> None:
    """A large step is biased, and a small one hardly moves: 20 of 20 seeds pick 5e-3."""
    steps = [5e-2, 5e-3, 5e-5]
    draws = {step: sgld(jax.random.split(jax.random.key(0), 4), step, 4000) for step in steps}
    found = tune(lambda step: {"theta": draws[step]}, steps, mixture, mixture_data())
    assert found.best == 5e-3
    assert list(found.table.index) == steps
    assert (found.order, found.n_features, found.interactions) == (2, 5, True)
    assert (found.table["draws"] == 2000).all()


@pytest.mark.slow
def test_step_size_of_sgld_as_published() -> None:
    """Single runs of 10,000 draws: the medians of 20 are smallest at 5e-3.

    Of 40 runs, 32 had their smallest value there, the other 8 at 1e-3. Order 1 sees means alone.
    """
    keys = jax.random.split(jax.random.key(5), 20)
    draws = {step: np.asarray(sgld(keys, step, 10_000)) for step in STEPS}
    runs = [
        tune(lambda step, i=i: {"theta": draws[step][[i]]}, STEPS, mixture, mixture_data())
        for i in range(20)
    ]
    table = np.median([run.table["psd"] for run in runs], axis=0)
    assert STEPS[int(table.argmin())] == 5e-3
    assert {run.best for run in runs} <= {5e-3, 1e-3}
    assert sum(run.best == 5e-3 for run in runs) > 10


def normal() -> None:
    numpyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def test_all_runs_are_measured_in_the_same_units() -> None:
    rng = np.random.default_rng(0)
    shape = (4, 250, 2)
    runs = {
        "exact": rng.normal(size=shape),
        "wide": 2.0 * rng.normal(size=shape) + 1.0,
        "narrow": 0.01 * rng.normal(size=shape) + 2.0,
    }
    found = tune(lambda name: {"x": runs[name]}, list(runs), normal)
    mean = np.median([x.mean(axis=(0, 1)) for x in runs.values()], axis=0)
    sd = np.median([x.std(axis=(0, 1)) for x in runs.values()], axis=0)
    options: dict[str, Any] = dict(joint=True, interactions=True, standardize=None)
    for name, x in runs.items():
        expected = psd((x - mean) / sd, -x * sd, **options)
        assert found.table.loc[name, "psd"] == pytest.approx(expected, rel=1e-4)
    assert found.best == "exact"
    # the features of exact draws have unit variance, so that 5 of them at 1,000 draws make this
    assert found.table.loc["exact", "noise"] == pytest.approx(np.sqrt(5 / 1000), rel=0.2)


def test_runs_that_diverge_or_stand_still_are_last() -> None:
    x = np.random.default_rng(0).normal(size=(2, 200, 2))
    overflow, still = x.copy(), x.copy()
    overflow[1, 190:] = np.inf
    still[..., 1] = 0.5
    runs = {"overflow": overflow, "still": still, "all": np.full_like(x, np.nan), "fine": x}
    found = tune(lambda name: {"x": runs[name]}, list(runs), normal)
    assert found.best == "fine"
    assert np.isinf(found.table["psd"]).tolist() == [True, True, True, False]
    assert found.table["not_finite"].tolist() == [10, 0, 400, 0]
    with pytest.raises(TooFewDrawsError, match="no value of the grid"):
        tune(lambda name: {"x": runs[name]}, ["overflow", "still"], normal)


class ULAState(NamedTuple):
    x: dict[str, jax.Array]
    rng_key: jax.Array


class ULA(MCMCKernel):
    """Euler's scheme for `normal`: its variance is 1 / (1 - h / 2)."""

    sample_field = "x"

    def __init__(self, step_size: float) -> None:
        self.step_size = step_size

    def init(self, rng_key: Any, *_: Any, **__: Any) -> ULAState:
        return ULAState({"x": jnp.zeros(2)}, rng_key)

    def sample(self, state: ULAState, *_: Any) -> ULAState:
        key, noise = jax.random.split(state.rng_key)
        h, x = self.step_size, state.x["x"]
        return ULAState({"x": x - h * x + jnp.sqrt(2 * h) * jax.random.normal(noise, (2,))}, key)


def test_kernels_are_run() -> None:
    """A variance that is 20 times too large, and a step of a hundredth of an autocorrelation."""
    found = tune(
        ULA, [1e-4, 0.2, 1.9], normal, num_warmup=100, num_samples=2000, num_chains=2, max_draws=800
    )
    assert found.best == 0.2
    assert (found.table["draws"] == 800).all()
    assert (found.table["seconds"] > 0).all()


def test_families_of_guides() -> None:
    """At its optimum a mean-field guide has the variances of the conditionals, 1 - 0.8^2."""
    covariance = jnp.array([[1.0, 0.8], [0.8, 1.0]])

    def model() -> None:
        numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(2), covariance))

    optima = {
        autoguide.AutoNormal: {"x_auto_loc": jnp.zeros(2), "x_auto_scale": jnp.full(2, 0.6)},
        autoguide.AutoMultivariateNormal: {
            "auto_loc": jnp.zeros(2),
            "auto_scale_tril": jnp.linalg.cholesky(covariance),
        },
    }

    def fitted(family: Any) -> Any:
        svi = SVI(model, family(model), numpyro.optim.Adam(0.02), Trace_ELBO())
        svi.init(jax.random.key(0))
        return from_svi(svi, optima[family])

    found = tune(fitted, optima, model)
    assert found.best is autoguide.AutoMultivariateNormal
    assert list(found.table.index) == ["AutoNormal", "AutoMultivariateNormal"]
    assert found.order == 3
    made = fitted(autoguide.AutoNormal)
    with pytest.warns(UserWarning, match="tune: order=2 cannot see"):
        tune(lambda _: made, [1, 2], model, order=2)


def test_containers_are_taken_with_their_scores() -> None:
    x = _arviz.arviz().convert_to_dataset({"x": np.random.default_rng(0).normal(size=(2, 99, 2))})
    posterior = _arviz.from_groups({"posterior": x})
    wrong = _arviz.from_groups(
        {"unconstrained_posterior": x, "unconstrained_posterior_score": -2 * x}
    )
    found = tune([posterior, wrong].__getitem__, [0, 1], normal, interactions=False)
    assert found.best == 0
    assert (found.n_features, found.interactions) == (4, False)


def test_what_is_shown() -> None:
    x = np.random.default_rng(0).normal(size=(2, 200, 2))
    found = tune(lambda scale: {"x": x * scale}, [0.5, 1.0], normal)
    assert repr(found).startswith(
        "Best of 2 values: 1.0 (PSD of order 2, 5 features with interactions)"
    )
    assert found._repr_html_().count("<tr") == 4
    plt = pytest.importorskip("matplotlib.pyplot")
    ax = found.plot()
    np.testing.assert_allclose(ax.lines[0].get_xydata().T, [[0.5, 1.0], found.table["psd"]])
    assert ax.get_xscale() == "log"
    assert found.plot(ax) is ax
    named = tune(lambda name: {"x": x}, ["a", "b"], normal).plot()
    assert [label.get_text() for label in named.get_xticklabels()] == ["a", "b"]
    plt.close("all")


def test_what_is_refused() -> None:
    x = np.random.default_rng(0).normal(size=(2, 200, 2))
    with pytest.raises(ValueError, match="at least two values"):
        tune(lambda _: {"x": x}, [1.0], normal)
    with pytest.raises(TypeError, match=r"kernel_factory\(1\) must return .*got ndarray"):
        tune(lambda _: x, [1, 2], normal)
    with pytest.raises(ValueError, match=r"draws of 'x' with shape \(200,\)"):
        tune(lambda _: {"x": x[0, :, 0]}, [1, 2], normal)
    with pytest.raises(ValueError, match="returned data without a posterior"):
        tune(lambda _: _arviz.from_groups({}), [1, 2], normal)
    with pytest.raises(ValueError, match='interactions must be True, False or "auto"'):
        tune(lambda _: {"x": x}, [1, 2], normal, interactions="some")
