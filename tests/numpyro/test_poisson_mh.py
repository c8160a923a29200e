"""PoissonMH on NumPyro models: arguments, temperature, bounds of the user."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC
from scipy import stats

import ppl_ext
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro import PoissonMH

RNG = np.random.default_rng(0)
Y = RNG.normal(1.0, 1.0, size=400)


def robust(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("N", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.StudentT(4, mu, 1.0), obs=y[i])


def exact(temperature):
    """Mean and standard deviation by quadrature."""
    grid = np.linspace(-4, 6, 4001)
    log_p = stats.norm.logpdf(grid, 0, 2)
    log_p = log_p + stats.t.logpdf(Y[:, None] - grid, 4).sum(0) / temperature
    weight = np.exp(log_p - log_p.max())
    weight /= weight.sum()
    return weight @ grid, np.sqrt(weight @ (grid - weight @ grid) ** 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"proposal": "sgld"}, "`proposal` must be one of 'random_walk'"),
        ({"lam": 0.0}, "`lam` must be a positive"),
        ({"local": -1.0}, "`local` must be"),
        ({"temperature": 0}, "`temperature` must be"),
        ({"fallback": "no"}, "`fallback` must be True or False"),
        ({"step_size": 0}, "`step_size` must be"),
        ({"target_accept_prob": 1.0}, "`target_accept_prob` must be less than 1"),
        ({"chunk_size": 0}, "`chunk_size` must be"),
        ({"bounds": 3}, "`bounds` must be"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        PoissonMH(robust, **options)


def test_a_pair_of_bounds_is_no_lipschitz_constant():
    def bounds(mode, scale, radius):
        return jnp.full(400, -100.0), jnp.zeros(400)

    with pytest.raises(ValueError, match=r"`bounds` must be Lipschitz constants with `local`"):
        PoissonMH(robust, bounds=bounds, local=1.0).init(jax.random.key(0), 0, None, (Y,), {})


def test_a_likelihood_without_bounds_is_refused_by_its_plate():
    def bounds(mode, scale, radius):
        return jnp.full(400, jnp.inf)

    with pytest.raises(UnsupportedModelError, match="plate 'N' has no bound on its first"):
        PoissonMH(robust, bounds=bounds).init(jax.random.key(0), 0, None, (Y,), {})


def attained(y):
    def bounds(mode, scale, radius):
        # everywhere on the ball: a Student density is largest at y
        low = mode[0] - scale[0, 0] * radius
        high = mode[0] + scale[0, 0] * radius
        far = jnp.maximum(jnp.abs(y - low), jnp.abs(y - high))
        return dist.StudentT(4, 0.0, 1.0).log_prob(far), jnp.full(
            len(y), dist.StudentT(4, 0.0, 1.0).log_prob(0.0)
        )

    return bounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"proposal": "barker"},
        {"proposal": "mala"},
        {"proposal": "random_walk", "bounds": attained(jnp.asarray(Y))},
        {"proposal": "mala", "local": 2.0},
        {"proposal": "barker", "fallback": False},
    ],
    ids=["barker", "mala", "pair", "local", "ball"],
)
def test_runs_find_the_tempered_posterior(options):
    """5 standard errors at an effective size of 400."""
    kernel = PoissonMH(robust, temperature=20.0, **options)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(0), Y)
    mu, fields = np.asarray(mcmc.get_samples()["mu"], np.float64), mcmc.get_extra_fields()
    mean, sd = exact(20.0)
    assert abs(mu.mean() - mean) < sd / 4 and abs(mu.std() / sd - 1) < 0.18
    assert fields["num_violations"].max() == 0
    assert fields["fallback"].mean() < 0.05
    assert fields["num_drawn"].mean() < 300
    assert np.unique(fields["lam"]).size == 1  # frozen
    data = ppl_ext.to_arviz(mcmc)
    assert data["sample_stats"].attrs["temperature"] == 20.0


@pytest.mark.slow
def test_without_temperature_all_data_are_taken_where_that_is_cheaper():
    mcmc = MCMC(PoissonMH(robust), num_warmup=500, num_samples=3000, progress_bar=False)
    mcmc.run(jax.random.key(0), Y[:40])
    mu = np.asarray(mcmc.get_samples()["mu"], np.float64)
    assert mcmc.get_extra_fields()["fallback"].all()
    grid = np.linspace(-4, 6, 4001)
    log_p = stats.norm.logpdf(grid, 0, 2) + stats.t.logpdf(Y[:40, None] - grid, 4).sum(0)
    weight = np.exp(log_p - log_p.max())
    mean = weight @ grid / weight.sum()
    sd = np.sqrt(weight @ (grid - mean) ** 2 / weight.sum())
    assert abs(mu.mean() - mean) < sd / 4 and abs(mu.std() / sd - 1) < 0.18
