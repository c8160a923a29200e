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
# # Large N: a hundred data a step, and the exact posterior
#
# Logistic regression of 48,842 people of the 1994 census: who earned more than 50,000 dollars? NUTS
# passes over all of them at every leapfrog step. Stochastic-gradient samplers look at a few and are
# biased. `TunaMH` looks at a few and is exact.

# %%
import time

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import HMCECS, MCMC, NUTS

import ppl_ext
from ppl_ext.diagnostics import check
from ppl_ext.numpyro import TunaMH

with np.load("../benchmarks/data/adult_logistic.npz") as stored:
    x, y = jnp.asarray(stored["X"]), jnp.asarray(stored["y"], float)
print("people, predictors:", x.shape)

# %% [markdown]
# ## The model
#
# The data sit in a plate and are indexed by it. That is all that a minibatch kernel needs.


# %%
def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("person", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


print(ppl_ext.explain(model, x, y).verdicts["TunaMH"] or "TunaMH takes it")

# %% [markdown]
# ## NUTS, on all the data
#
# The yardstick. The same model without `subsample_size`.


# %%
def full_model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("person", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def timed(kernel, warmup, draws, key=0):
    """A run of 2 chains and its seconds of sampling, compilation left out."""
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.warmup(jax.random.key(key), x, y)
    mcmc.run(jax.random.key(key + 1), x, y)  # compiles
    start = time.perf_counter()
    mcmc.run(jax.random.key(key + 2), x, y)
    return mcmc, time.perf_counter() - start


nuts, nuts_seconds = timed(NUTS(full_model), 200, 200)

# %% [markdown]
# ## TunaMH
#
# Each log likelihood is its Taylor polynomial at the mode, whose sum over the data is known, plus a
# remainder with a known bound. A step evaluates a random few of the remainders, so chosen that the
# chain is exact.

# %%
tuna, tuna_seconds = timed(TunaMH(model), 1000, 20_000)
idata = ppl_ext.to_arviz(tuna)
stats = idata["sample_stats"]
print("data per step:", float(stats["num_drawn"].mean()))
print("steps that took all data:", float(stats["fallback"].mean()))
print("violated bounds:", int(stats["num_violations"].max()))
print(check(idata))

# %% [markdown]
# ## A biased sampler
#
# NumPyro's HMCECS takes the same model, estimates the log likelihood from a minibatch, and targets
# an approximation of the posterior whose error shrinks with the size of the minibatch. Nothing in
# its output tells.

# %%
proxy = HMCECS.taylor_proxy({"beta": nuts.get_samples()["beta"].mean(0)})
ecs, ecs_seconds = timed(HMCECS(NUTS(model), num_blocks=10, proxy=proxy), 200, 200)
plain, plain_seconds = timed(HMCECS(NUTS(model), num_blocks=10), 200, 200)

# %% [markdown]
# ## Side by side
#
# The error is that of the posterior means against NUTS, in posterior standard deviations, at worst
# over the coefficients. With few draws a part of it is Monte Carlo error, about one over the root
# of the effective sample size.

# %%
reference = nuts.get_samples()["beta"]
center, scale = reference.mean(0), reference.std(0)
print(f"{'':24}{'error':>8}{'sd ratio':>10}{'ESS':>8}{'ESS / s':>10}")
for name, run, seconds in (
    ("NUTS", nuts, nuts_seconds),
    ("TunaMH", tuna, tuna_seconds),
    ("HMCECS, Taylor proxy", ecs, ecs_seconds),
    ("HMCECS, no proxy", plain, plain_seconds),
):
    draws = run.get_samples(group_by_chain=True)["beta"]
    ess = float(az.ess(az.convert_to_dataset({"beta": np.asarray(draws)}))["beta"].min())
    error = float(jnp.abs((draws.mean((0, 1)) - center) / scale).max())
    spread = draws.std((0, 1)) / scale
    worst = float(spread[jnp.abs(jnp.log(spread)).argmax()])
    print(f"{name:24}{error:8.2f}{worst:10.2f}{ess:8.0f}{ess / seconds:10.1f}")

# %% [markdown]
# Without a proxy the minibatch is far too noisy: the error is tens of standard deviations, and the
# chain reports nothing unusual. With a Taylor proxy HMCECS is close, and fast; how close, only a
# comparison such as this one tells. TunaMH needs no comparison.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5))
k = int(jnp.abs(center / scale).argmax())
for name, run, style in (("NUTS", nuts, "-"), ("TunaMH", tuna, "--")):
    values = np.asarray(run.get_samples()["beta"][:, k])
    density, edges = np.histogram(values, bins=40, density=True)
    axes[0].plot((edges[1:] + edges[:-1]) / 2, density, style, label=name)
axes[0].set(xlabel=f"beta[{k}]", ylabel="posterior density")
axes[0].legend()
axes[1].hist(stats["num_drawn"].values.ravel(), bins=60, color="0.4")
axes[1].set(xlabel="data drawn in a step", ylabel="steps", yscale="log")
plt.show()

# %% [markdown]
# ## What minibatches cost and save
#
# - A step of TunaMH costs about the same at ten thousand data and at a million; a step of NUTS
#   grows with them. At tens of thousands of data the two are closer than at a million.
# - The start is not free: the mode, its Hessian and the bounds take a few passes over the data.
# - The likelihood needs bounds. `explain` says whether a model has them, and for a distribution of
#   your own `ppl_ext.numpyro.bounds.register_bounds` adds them.
