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
# # Inverse problems: a cheap solver proposes, the exact one accepts
#
# How permeable is a medium, seen from the pressure at seven points of it? The forward solver has
# 2,000 cells; a solver with 8 cells costs next to nothing and is wrong. `ProximalIMH` samples with
# the coarse solver, moves each of its draws to where the fine solver predicts what the coarse one
# did, and accepts it by the fine solver: the draws are those of the exact posterior.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import ppl_ext
from ppl_ext.diagnostics import check, imh_report
from ppl_ext.numpyro import ProximalIMH

# %% [markdown]
# ## The forward problem
#
# $-(e^{\kappa} u')' = 1$ on (0, 1), with $u = 0$ at both ends. The log-permeability $\kappa$ is a
# sum of three cosines with unknown coefficients.

# %%
points = jnp.arange(1, 8) / 8


def field(theta, x):
    k = jnp.arange(1, 4)
    return jnp.cos(jnp.pi * jnp.outer(x, k)) @ (theta * jnp.sqrt(2) / k)


def pressure(theta, cells=2000):
    """u at the seven points, by the midpoint rule."""
    middle = (jnp.arange(cells) + 0.5) / cells
    resistance = jnp.exp(-field(theta, middle)) / cells
    first, second = jnp.cumsum(resistance), jnp.cumsum(resistance * middle)
    u = jnp.concatenate([jnp.zeros(1), second[-1] / first[-1] * first - second])
    return jnp.interp(points, jnp.linspace(0, 1, cells + 1), u)


def coarse(theta):
    return pressure(theta, cells=8)


truth = jnp.array([0.7, -0.5, 0.3])
noise = 0.002
y = pressure(truth) + noise * jax.random.normal(jax.random.key(0), (7,))
error = jnp.abs(coarse(truth) - pressure(truth)).max()
print(f"the coarse solver is off by {float(error):.4f}; the noise is {noise}")


# %% [markdown]
# ## One model, its solver an argument


# %%
def model(y, forward=pressure):
    theta = numpyro.sample("theta", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(forward(theta), noise).to_event(1), obs=y)


def run(kernel, **kwargs):
    mcmc = MCMC(kernel, num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(1), y, **kwargs)
    return mcmc


proximal = run(ProximalIMH(model, approx=dict(forward=coarse)))
idata = ppl_ext.to_arviz(proximal)
print(imh_report(proximal))

# %%
print(check(idata))

# %% [markdown]
# ## Against the two obvious ways
#
# NUTS on the fine solver is right and takes a fine solve with its derivative at every leapfrog
# step. NUTS on the coarse solver is quick and wrong.

# %%
nuts = run(NUTS(model))
wrong = run(NUTS(model), forward=coarse)
x = jnp.linspace(0, 1, 200)
styles = {
    "NUTS, fine solver": (nuts, "0.6", "-"),
    "ProximalIMH": (proximal, "C0", "--"),
    "NUTS, coarse solver": (wrong, "C3", ":"),
}
figure, axes = plt.subplots(1, 2, figsize=(11, 4))
for name, (mcmc, colour, line) in styles.items():
    theta = mcmc.get_samples()["theta"]
    low, high = np.quantile(jax.vmap(lambda t: field(t, x))(theta), (0.05, 0.95), axis=0)
    axes[0].plot(x, low, line, color=colour, label=name)
    axes[0].plot(x, high, line, color=colour)
    density, edges = np.histogram(theta[:, 0], bins=50, density=True)
    axes[1].plot((edges[1:] + edges[:-1]) / 2, density, line, color=colour, label=name)
axes[0].plot(x, field(truth, x), "k", linewidth=1, label="truth")
axes[0].set(xlabel="x", ylabel="log-permeability, 90 % band")
axes[1].set(xlabel="theta[0]", ylabel="posterior density")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## A solver that is no JAX
#
# `ppl_ext.BlackBox` wraps a Python function of a NumPy array, importable by name: see [the page on
# Proximal-IMH](../docs/proximal_imh.md). `"affine"`, the correction that `"auto"` takes, needs no
# derivative of it.
