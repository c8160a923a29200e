"""`to_arviz` on runs that hold too little, or nothing worth looking at."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import ppl_ext
from ppl_ext.numpyro import ULD

pytestmark = pytest.mark.arviz


def model(y=0.0):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def mcmc_of(kernel):
    return MCMC(kernel, num_warmup=20, num_samples=20, progress_bar=False)


def test_anything_but_a_finished_run_is_refused():
    with pytest.raises(TypeError, match=r"numpyro.infer.MCMC or a pyro.infer.MCMC, got dict"):
        ppl_ext.to_arviz({})
    mcmc = mcmc_of(ULD(model))
    with pytest.raises(ValueError, match=r"call `mcmc.run` first"):
        ppl_ext.to_arviz(mcmc)
    mcmc.warmup(jax.random.key(0))
    with pytest.raises(ValueError, match=r"call `mcmc.run` first"):
        ppl_ext.to_arviz(mcmc)


def test_a_site_that_the_run_dropped_keeps_its_scores_or_is_named():
    mcmc = mcmc_of(ULD(model))
    mcmc.run(jax.random.key(0), extra_fields=("~z.mu",))
    data = ppl_ext.to_arviz(mcmc)
    assert "mu" not in data["posterior"]
    assert data["unconstrained_posterior_score"]["mu"].shape == (1, 20)

    mcmc = mcmc_of(NUTS(model))
    mcmc.run(jax.random.key(0), extra_fields=("~z.mu", "z_grad"))
    with pytest.raises(ValueError, match=r"dropped the sites \['mu'\]"):
        ppl_ext.to_arviz(mcmc)


def test_a_chain_that_stands_still_on_distant_data_is_told():
    """The step size of the old data fits nowhere on the new data: every step is undone."""

    def narrow(y):
        mu = numpyro.sample("mu", dist.Normal(0, 100))
        with numpyro.plate("datum", 100):
            numpyro.sample("y", dist.Normal(mu, 0.1), obs=y)

    mcmc = MCMC(ULD(narrow), num_warmup=200, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), np.zeros(100))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), np.full(100, 10.0))
    assert len(np.unique(mcmc.get_samples()["mu"])) == 1
    with pytest.warns(UserWarning, match=r"chains \[0\] diverged"):
        ppl_ext.to_arviz(mcmc)
