"""Runs of DPSlice against all partitions of nine points, and posteriors of 82 galaxy velocities."""

import json
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from ppl_ext.numpyro import DirichletProcess, DPSlice

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
NINE = json.loads((TESTS / "kernels" / "data" / "dp_partitions.json").read_text())
GALAXIES = json.loads((TESTS / "numpyro" / "data" / "galaxies.json").read_text())


def conjugate():
    s2 = numpyro.sample("s2", dist.InverseGamma(2.0, 2.0))
    return numpyro.sample("mu", dist.Normal(20.0, jnp.sqrt(s2 / 0.1))), s2


def independent():
    s2 = numpyro.sample("s2", dist.InverseGamma(2.0, 2.0))
    return numpyro.sample("mu", dist.Normal(20.0, 8.0)), s2


BASES = {"conjugate": conjugate, "independent": independent}


def run(base, alpha, y, num_chains, num_samples, **options):
    def model(y):
        concentration = alpha or numpyro.sample("alpha", dist.Gamma(2.0, 4.0))
        process = DirichletProcess("G", concentration, BASES[base])
        with numpyro.plate("data", len(y)):
            mu, s2 = process.draw()
            numpyro.sample("y", dist.Normal(mu, jnp.sqrt(s2)), obs=y)

    mcmc = MCMC(
        DPSlice(model, **options),
        num_warmup=500,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), np.array(y), extra_fields=("labels",))
    assert not mcmc.get_extra_fields()["overflow"].any()
    return mcmc, np.asarray(mcmc.get_extra_fields()["labels"])


def share_together(labels, i, j):
    return (labels[:, i] == labels[:, j]).mean()


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("base", ["conjugate", "independent"])
def test_number_of_clusters_and_pairs_of_nine_points(base, alpha):
    """Total variation of P(K) and differences of co-clustering below 0.02, in float32.

    The Monte Carlo error of either is a quarter of that.
    """
    draws = (32, 4000) if base == "conjugate" else (64, 8000)
    mcmc, labels = run(base, alpha, NINE["y"], *draws)
    exact = NINE[base][f"alpha={alpha}"]
    clusters = np.asarray(mcmc.get_samples()["G_num_clusters"])
    p = np.bincount(clusters, minlength=10)[1:] / len(clusters)
    assert np.abs(p - exact["P_K"]).sum() / 2 < 0.02
    pairs = np.array(exact["coclustering"])
    for i in range(9):
        for j in range(i):
            assert abs(share_together(labels, i, j) - pairs[i, j]) < 0.02


@pytest.mark.parametrize("base", ["conjugate", "independent"])
def test_galaxies(base):
    """Mean number of clusters |z| < 4, pairs within 0.03, predictive density within 0.005."""
    draws = (8, 4000) if base == "conjugate" else (8, 20_000)
    mcmc, labels = run(base, 1.0 if base == "conjugate" else None, GALAXIES["y"], *draws)
    known = GALAXIES[base]
    samples = mcmc.get_samples(group_by_chain=True)
    quantities = {"G_num_clusters": (known["meanK"], known["mcse_meanK"])}
    if base == "independent":
        quantities["alpha"] = known["alpha_mean"], known["alpha_sd"] / np.sqrt(5000)
    for name, (mean, mcse) in quantities.items():
        values = np.asarray(samples[name], float)
        assert float(az.rhat(values)) < 1.05
        error = np.hypot(values.std() / np.sqrt(float(az.ess(values))), mcse)
        assert abs(values.mean() - mean) < 4 * error, name
    for i, j, p in known["coclustering_pairs"]:
        assert abs(share_together(labels, i, j) - p) < 0.03
    low, high, size = known["grid"]
    grid = np.linspace(low, high, size)
    thinned = {name: values[:, ::40] for name, values in samples.items()}
    density = np.asarray(mcmc.sampler.predictive_density(thinned, grid)).mean((0, 1))
    assert np.abs(density - known["density"]).max() < 0.005
    assert abs(density.sum() * (grid[1] - grid[0]) - 1) < 0.005
