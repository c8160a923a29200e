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
# # Pyro
#
# A Pyro model stays as it is. Its potential is recorded from PyTorch once, compared with PyTorch's
# values and gradients, and runs in JAX: the kernels of this package, and NUTS and HMC, go into
# `pyro.infer.MCMC` in the place of Pyro's.

# %%
import time

import arviz as az
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import pyro.infer
import torch

import ppl_ext
from ppl_ext.diagnostics import check, clusters, plot_num_clusters, summary
from ppl_ext.pyro import MCMC, NUTS, ULD, DirichletProcess, DPSlice, TunaMH

# %% [markdown]
# ## One word changes

# %%
y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(sigma, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("school", len(sigma)):
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * offset)
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


pyro.set_rng_seed(0)
theirs = pyro.infer.MCMC(
    pyro.infer.NUTS(schools), num_samples=300, warmup_steps=300, disable_progbar=True
)
ours = pyro.infer.MCMC(NUTS(schools), num_samples=300, warmup_steps=300, disable_progbar=True)
print(f"pyro.infer.NUTS:   {seconds(lambda: theirs.run(sigma, y)):5.1f} s")
print(f"ppl_ext.pyro.NUTS: {seconds(lambda: ours.run(sigma, y)):5.1f} s, compilation included")

# %% [markdown]
# `ppl_ext.pyro.MCMC` is Pyro's without its Python loop over draws: all chains in one program, and
# the statistics of each draw.

# %%
vectorized = MCMC(ULD(schools), 2000, warmup_steps=500, num_chains=4, disable_progbar=True)
print(f"8,000 draws of ULD: {seconds(lambda: vectorized.run(sigma, y)):.1f} s")
idata = ppl_ext.to_arviz(vectorized)
print(check(idata))

# %%
summary(idata, var_names=["mu", "tau", "theta"])

# %%
az.plot_forest(idata, var_names=["theta"], combined=True)
plt.xlabel("effect, points of the test")
plt.show()

# %% [markdown]
# ## Minibatches, exactly
#
# Pyro's own kernels refuse a subsampled plate. `TunaMH` draws from it, and from the posterior of
# all the data.

# %%
x = torch.randn(20_000, 3)
z = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -0.5, 0.0])))


def regression(x, z):
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    with pyro.plate("datum", len(z), subsample_size=100) as i:
        pyro.sample("z", dist.Bernoulli(logits=x[i] @ beta), obs=z[i])


tuna = MCMC(TunaMH(regression), 5000, warmup_steps=500, disable_progbar=True)
tuna.run(x, z)
minibatch = ppl_ext.to_arviz(tuna)
print("data per step:", float(minibatch["sample_stats"]["num_drawn"].mean()))
az.summary(minibatch, var_names=["beta"])

# %% [markdown]
# ## Mixtures without a truncation level


# %%
def base():
    return pyro.sample("mean", dist.Normal(0.0, 10.0))


def mixture(y):
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 2.0))
    G = DirichletProcess("G", concentration, base)
    with pyro.plate("point", len(y)):
        pyro.sample("y", dist.Normal(G.draw(), 1.0), obs=y)


points = torch.cat([torch.randn(40) - 6, torch.randn(40), torch.randn(20) + 7])
print(ppl_ext.explain(mixture, points).remarks["DPSlice"])
dp = MCMC(DPSlice(mixture), 1000, warmup_steps=200, disable_progbar=True, extra_fields=["labels"])
dp.run(points)
plot_num_clusters(clusters(ppl_ext.to_arviz(dp)))
plt.show()

# %% [markdown]
# ## What cannot run in JAX
#
# A branch on a latent value, random numbers outside of `pyro.sample`, a gradient of your own: the
# error names the line, and [the page on Pyro](../docs/pyro.md) the ways out.


# %%
def branching():
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    if mu > 0:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=torch.tensor(1.0))


try:
    MCMC(NUTS(branching, engine="xla"), 10, 10, disable_progbar=True).run()
except ppl_ext.errors.TracingError as error:
    print(error)
