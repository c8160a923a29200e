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
# # Quick start
#
# A model in NumPyro, a kernel of `ppl_ext`, NumPyro's own `MCMC`, and ArviZ. Then a question that
# R-hat does not ask: are these draws from the posterior?

# %%
import arviz as az
import jax
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import ppl_ext
from ppl_ext.diagnostics import check, plot_psd, psd_test, summary, uld_report
from ppl_ext.numpyro import ULD

# %% [markdown]
# ## A model
#
# Eight schools tried a coaching programme; `y` are the estimated effects on a test score, in
# points, and `sigma` their standard errors. The model is an ordinary NumPyro function.

# %%
y = jax.numpy.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
sigma = jax.numpy.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(sigma, y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("school", len(sigma)):
        offset = numpyro.sample("offset", dist.Normal(0, 1))
        theta = numpyro.deterministic("theta", mu + tau * offset)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


# %% [markdown]
# ## Which kernels take it?
#
# `explain` runs the model once. It lists the sites, and says of each kernel whether it fits, or why
# not.

# %%
print(ppl_ext.explain(schools, sigma, y))

# %% [markdown]
# ## Sample
#
# ULD is underdamped Langevin dynamics: it goes into `MCMC` in the place of NUTS.

# %%
mcmc = MCMC(
    ULD(schools),
    num_warmup=500,
    num_samples=1000,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), sigma, y)
idata = ppl_ext.to_arviz(mcmc)
summary(idata, var_names=["mu", "tau", "theta"])

# %% [markdown]
# The table is ArviZ's with two more columns. `psd` is the polynomial Stein discrepancy of the row,
# in posterior standard deviations: about the error that the draws have. `psd_t` sets it against its
# Monte Carlo error; above 4 there is a bias that chance does not explain.

# %% [markdown]
# ## Is anything wrong?
#
# `check` looks at all that a run tells, and says what to do next.

# %%
print(check(idata))

# %% [markdown]
# ULD has a small bias, which its report bounds. `ULD(schools, integrator="obabo", adjust="malt")`
# has none.

# %%
print(uld_report(mcmc))

# %% [markdown]
# ## Look at it in ArviZ

# %%
az.plot_forest(idata, var_names=["mu", "theta"], combined=True)
plt.xlabel("effect, points of the test")
plt.show()

# %%
plot_psd(idata)
plt.show()

# %% [markdown]
# ## The same check for any sampler
#
# NumPyro's NUTS keeps its gradients on request; the Stein test then works on its draws as well. A
# small p-value would say that they are not from the posterior.

# %%
nuts = MCMC(
    NUTS(schools),
    num_warmup=500,
    num_samples=1000,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
nuts.run(jax.random.key(0), sigma, y, extra_fields=("z_grad", "num_steps"))
print(psd_test(ppl_ext.to_arviz(nuts)))

# %% [markdown]
# ## Next
#
# [High dimension](06_high_dimension.ipynb) is where ULD is meant for, and [Is it
# right?](07_is_it_right.ipynb) says more on the Stein check. The pages of the documentation show
# the kernels for large data, unknown constants and mixtures.
