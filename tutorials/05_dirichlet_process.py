# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Dirichlet-process mixtures without a truncation level
#
# How many clusters are in the data? A Dirichlet-process mixture leaves the number open. `DPSlice`
# samples its posterior exactly: clusters come and go as the data say, and there is no truncation
# level to choose.

# %%
import time

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, Predictive

import ppl_ext
from ppl_ext.diagnostics import (
    check,
    clusters,
    overhead_report,
    plot_coclustering,
    plot_num_clusters,
    plot_predictive_density,
    predictive_density,
)
from ppl_ext.numpyro import DirichletProcess, DPSlice

# %% [markdown]
# ## Galaxies
#
# Velocities of 82 galaxies in 1,000 km/s (Roeder 1990). The model is written with a process `G`:
# its `base` holds the sites of one atom, `draw()` gives each point the atom of its cluster.

# %%
# fmt: off
velocities = np.array([
    9.172, 9.35, 9.483, 9.558, 9.775, 10.227, 10.406, 16.084, 16.17, 18.419, 18.552, 18.6, 18.927,
    19.052, 19.07, 19.33, 19.343, 19.349, 19.44, 19.473, 19.529, 19.541, 19.547, 19.663, 19.846,
    19.856, 19.863, 19.914, 19.918, 19.973, 19.989, 20.166, 20.175, 20.179, 20.196, 20.215, 20.221,
    20.415, 20.629, 20.795, 20.821, 20.846, 20.875, 20.986, 21.137, 21.492, 21.701, 21.814, 21.921,
    21.96, 22.185, 22.209, 22.242, 22.249, 22.314, 22.374, 22.495, 22.746, 22.747, 22.888, 22.914,
    23.206, 23.241, 23.263, 23.484, 23.538, 23.542, 23.666, 23.706, 23.711, 24.129, 24.285, 24.289,
    24.366, 24.717, 24.99, 25.633, 26.96, 26.995, 32.065, 32.789, 34.279,
])
# fmt: on


def base():
    variance = numpyro.sample("variance", dist.InverseGamma(2, 2))
    mean = numpyro.sample("mean", dist.Normal(20, (variance / 0.1) ** 0.5))
    return mean, variance


def model(y):
    concentration = numpyro.sample("concentration", dist.Gamma(2, 4))
    G = DirichletProcess("G", concentration, base)
    with numpyro.plate("galaxy", y.shape[0]):
        mean, variance = G.draw()
        numpyro.sample("y", dist.Normal(mean, variance**0.5), obs=y)


print(ppl_ext.explain(model, velocities).remarks["DPSlice"])

# %% [markdown]
# Base and likelihood are a conjugate pair, which the kernel has found by itself: atoms are drawn in
# closed form. Other pairs work too; their atoms are moved by gradients.

# %%
mcmc = MCMC(
    DPSlice(model),
    num_warmup=500,
    num_samples=2000,
    num_chains=2,
    chain_method="sequential",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), velocities, extra_fields=("labels",))
idata = ppl_ext.to_arviz(mcmc)
found = clusters(idata)
print(found)

# %% [markdown]
# Labels have no meaning from draw to draw, so that what is reported does not depend on them: the
# number of clusters, how often two points are together, a typical partition.

# %%
print(check(idata))

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4))
plot_num_clusters(found, ax=axes[0])
plot_coclustering(found, ax=axes[1])
plt.show()

# %%
grid = np.linspace(5, 40, 400)
ax = plot_predictive_density(predictive_density(mcmc, grid), grid)
ax.plot(velocities, np.zeros(82), "k|")
ax.set(xlabel="velocity, 1,000 km/s")
plt.show()

# %% [markdown]
# ## The model runs forward
#
# The same program simulates from the prior, and with the draws of the run from the posterior.


# %%
def unseen(n):
    concentration = numpyro.sample("concentration", dist.Gamma(2, 4))
    G = DirichletProcess("G", concentration, base)
    with numpyro.plate("galaxy", n):
        mean, variance = G.draw()
        numpyro.sample("y", dist.Normal(mean, variance**0.5))


prior = Predictive(unseen, num_samples=200)(jax.random.key(1), 82)
print("prior draws with 1, 2, ... clusters:", np.bincount(prior["G_num_clusters"])[1:])
new = Predictive(unseen, mcmc.get_samples())(jax.random.key(2), 1)["y"]
print(f"the next galaxy is slower than 15,000 km/s with probability {float((new < 15).mean()):.2f}")

# %% [markdown]
# ## A million points
#
# Three clusters in the plane. A sweep costs a pass over the data for the components in use, and the
# number of components instantiated beyond those in use grows as log n.

# %%
rng = np.random.default_rng(0)
n = 1_000_000
centers = np.array([[-4.0, 0.0], [0.0, 3.0], [4.0, -1.0]], np.float32)
where = rng.integers(0, 3, n)
points = (centers[where] + rng.normal(size=(n, 2))).astype(np.float32)


def plane():
    tau = numpyro.sample("tau", dist.Gamma(2, 2).expand([2]).to_event(1))
    mu = numpyro.sample("mu", dist.Normal(0, (0.1 * tau) ** -0.5).to_event(1))
    return mu, tau


def big(y):
    G = DirichletProcess("G", 1.0, plane)
    with numpyro.plate("point", y.shape[0]):
        mu, tau = G.draw()
        numpyro.sample("y", dist.Normal(mu, tau**-0.5).to_event(1), obs=y)


large = MCMC(DPSlice(big), num_warmup=20, num_samples=40, progress_bar=False, jit_model_args=True)
start = time.perf_counter()
large.run(jax.random.key(2), points)
print(f"60 sweeps of a million points: {time.perf_counter() - start:.0f} s with compilation")
print("clusters:", np.unique(large.get_samples()["G_num_clusters"]))

# %%
sizes = large.get_samples()["G_weights"][-1]
atoms = large.get_samples()["mu"][-1]
for k in np.argsort(-sizes)[:3]:
    print(f"weight {sizes[k]:.3f} at ({atoms[k, 0]:.3f}, {atoms[k, 1]:.3f})")

# %% [markdown]
# The overhead law is a self-test of the sampler: instantiated components beyond the clusters,
# observed and predicted.

# %%
print(overhead_report(ppl_ext.to_arviz(large)))
