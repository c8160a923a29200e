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
# # High dimension: underdamped Langevin dynamics
#
# ULD makes one gradient evaluation per step and no accept step. What it costs is a small bias,
# which depends on the sum of the curvatures of the posterior and not on its dimension, and which
# its report bounds.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import ppl_ext
from ppl_ext.diagnostics import check, psd_test, uld_report
from ppl_ext.numpyro import ULD

# %% [markdown]
# ## Item-response model
#
# 400 students, 100 questions, 2,000 answers: 501 unknowns.

# %%
rng = np.random.default_rng(1)
student, item = rng.integers(0, 400, 2000), rng.integers(0, 100, 2000)
logits = rng.normal(size=400)[student] - rng.normal(size=100)[item] + 0.75
correct = (rng.random(2000) < 1 / (1 + np.exp(-logits))).astype(int)


def model(student, item, correct):
    mean = numpyro.sample("mean", dist.Normal(0.75, 1))
    ability = numpyro.sample("ability", dist.Normal(0, 1).expand([400]).to_event(1))
    difficulty = numpyro.sample("difficulty", dist.Normal(0, 1).expand([100]).to_event(1))
    logits = ability[student] - difficulty[item] + mean
    numpyro.sample("correct", dist.Bernoulli(logits=logits), obs=correct)


def run(kernel, num_samples=1000):
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("z_grad", "num_steps")
    mcmc.run(jax.random.key(0), student, item, correct, extra_fields=fields)
    return mcmc


uld, nuts = run(ULD(model)), run(NUTS(model))

# %% [markdown]
# ## The certificate
#
# The bias of each posterior variance that the step size implies, the energy error by which the step
# size was found, and the Stein test of the draws.

# %%
print(uld_report(uld))
print(check(ppl_ext.to_arviz(uld)))

# %% [markdown]
# `uld_report(mcmc, richardson=True)` would run once more at half the step and say what that
# changes.

# %% [markdown]
# ## Gradients against error
#
# A long run of NUTS stands for the posterior. The error is that of the second moments so far,
# squared, relative to their variance, averaged over the 501 unknowns and the four chains.

# %%
reference = run(NUTS(model), 4000).get_samples()
names = ("mean", "ability", "difficulty")


def flat(samples):
    parts = [samples[name].reshape(*samples["mean"].shape, -1) for name in names]
    return jnp.concatenate(parts, -1)


moment, spread = (flat(reference) ** 2).mean(0), (flat(reference) ** 2).var(0)
for name, mcmc, style in (("ULD", uld, "-"), ("NUTS", nuts, "--")):
    x = flat(mcmc.get_samples(group_by_chain=True))
    so_far = jnp.cumsum(x**2, 1) / jnp.arange(1, x.shape[1] + 1)[:, None]
    error = ((so_far - moment) ** 2 / spread).mean((0, 2))
    gradients = np.cumsum(mcmc.get_extra_fields(group_by_chain=True)["num_steps"].mean(0))
    plt.loglog(gradients, error, style, label=name)
plt.axhline(0.01, color="0.6", linewidth=0.7)
plt.xlabel("gradients of one chain after warm-up")
plt.ylabel("squared error of the second moments")
plt.legend()
plt.show()

# %% [markdown]
# ULD is ahead where accuracy is moderate, which is where most analyses stop: 0.01 is the error of
# 100 independent draws. [The page on ULD](../docs/uld.md) has the same comparison on twenty
# problems, and says where NUTS is ahead.
#
# ## No bias at all
#
# `adjust` adds an accept step to the same dynamics, `"malt"` to whole trajectories, `"ghmc"` to
# each step.

# %%
exact = run(ULD(model, integrator="obabo", adjust="malt"))
print("acceptance probability:", float(exact.get_extra_fields()["accept_prob"].mean()))
print(psd_test(ppl_ext.to_arviz(exact), var_names=["mean"]))

# %% [markdown]
# ## Which integrator?
#
# - `"baoab"`, the default: no bias in position on a Gaussian posterior.
# - `"obabo"`: for `adjust`.
# - `"kbk"`: integrates Gaussian priors exactly, for many unknowns with strong priors.
# - `"ubu"`, `"ee"`, `"rmm"`, `"quicksort"`: those of the theory.
