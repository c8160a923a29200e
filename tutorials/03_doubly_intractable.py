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
# # Unknown normalising constants
#
# The density of a lattice of spins or of a random network is known up to a constant that depends on
# the parameters. NUTS cannot sample such a posterior: its log density is not there. `ExchangeMH`
# needs only a simulator.

# %%
import warnings

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import ppl_ext
from ppl_ext.diagnostics import check, exchange_report
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro import ERGM, ExchangeMH, Graph, Ising
from ppl_ext.numpyro.ergm import gwesp

# %% [markdown]
# ## Spins on a lattice
#
# An Ising model on 20 x 20 spins. We draw a lattice at a known coupling, exactly, by coupling from
# the past, and ask for the coupling back.

# %%
graph = Graph.lattice(20, 20)
truth = 0.3
spins = Ising(truth, 0.0, graph).sample(jax.random.key(1))


def lattice(spins):
    coupling = numpyro.sample("coupling", dist.Uniform(0, 0.44))
    numpyro.sample("spins", Ising(coupling, 0.0, graph), obs=spins)


plt.imshow(spins, cmap="gray")
plt.title("a lattice at coupling 0.3")
plt.axis("off")
plt.show()

# %% [markdown]
# NUTS is refused: no sampler takes a density without its constant for a density.

# %%
try:
    MCMC(NUTS(lattice), num_warmup=1, num_samples=1).run(jax.random.key(0), spins)
except UnsupportedModelError as error:
    print(error)

# %%
mcmc = MCMC(ExchangeMH(lattice), num_warmup=300, num_samples=2000, progress_bar=False)
mcmc.run(jax.random.key(2), spins)
idata = ppl_ext.to_arviz(mcmc)
print(az.summary(idata))
print(check(idata))

# %%
az.plot_posterior(idata, var_names=["coupling"], ref_val=truth)
plt.show()

# %% [markdown]
# `exchange_report` tells whether the simulators are exact, how often proposals were accepted, and
# whether a simulation reached its limit.

# %%
print(exchange_report(mcmc))

# %% [markdown]
# ## Marriages in Florence
#
# Fifteenth-century Florence: 16 families, an edge where two of them were joined by a marriage
# (Padgett & Ansell 1993). An exponential random graph model with two terms: the number of edges,
# and `gwesp`, which counts pairs of partners that share further partners, each one less than the
# one before. Do families marry into families that they are already tied to?

# %%
families = [
    *("Acciaiuoli", "Albizzi", "Barbadori", "Bischeri", "Castellani", "Ginori", "Guadagni"),
    *("Lamberteschi", "Medici", "Pazzi", "Peruzzi", "Pucci", "Ridolfi", "Salviati", "Strozzi"),
    "Tornabuoni",
]
edges = [
    (0, 8), (1, 5), (1, 6), (1, 8), (2, 4), (2, 8), (3, 6), (3, 10), (3, 14), (4, 10), (4, 14),
    (6, 7), (6, 15), (8, 12), (8, 13), (8, 15), (9, 13), (10, 14), (12, 14), (12, 15),
]  # fmt: skip
network = np.zeros((16, 16), int)
for a, b in edges:
    network[a, b] = network[b, a] = 1

angle = np.linspace(0, 2 * np.pi, 16, endpoint=False)
place = np.c_[np.cos(angle), np.sin(angle)]
for a, b in edges:
    plt.plot(*place[[a, b]].T, "-", color="0.5")
plt.plot(*place.T, "ko")
for name, (u, v) in zip(families, 1.15 * place, strict=True):
    plt.text(u, v, name, ha="center", va="center", fontsize=8)
plt.axis("equal")
plt.axis("off")
plt.show()


# %%
def marriages(network):
    coef = numpyro.sample("coef", dist.Normal(jnp.zeros(2), jnp.array([2.0, 2.0])).to_event(1))
    graph = ERGM(coef, ["edges", gwesp(0.5)], 16)
    numpyro.sample("network", graph, obs=network)


with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    florence = MCMC(ExchangeMH(marriages), num_warmup=300, num_samples=2000, progress_bar=False)
    florence.run(jax.random.key(3), network)
print(*{str(warning.message) for warning in told}, sep="\n")

# %% [markdown]
# Sixteen nodes are too many to enumerate all graphs, so that graphs come from a Markov chain of
# finite length, and the kernel says so. The report repeats the run with simulations twice and four
# times as long: where nothing moves by more than its Monte Carlo error, they are long enough.

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    print(exchange_report(florence))

# %%
draws = florence.get_samples()["coef"]
plt.plot(*draws.T, ".", markersize=2, color="0.3")
plt.axhline(0, linewidth=0.5, color="k")
plt.xlabel("edges: log odds of a tie that shares no partner")
plt.ylabel("gwesp: what a shared partner adds")
plt.show()
print("P(gwesp > 0) =", float((draws[:, 1] > 0).mean()))

# %% [markdown]
# Marriages are rare (the first coefficient), and these 20 tell little about shared partners (the
# second one is on both sides of 0).
