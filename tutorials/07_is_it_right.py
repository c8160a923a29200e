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
# # Is it right?
#
# R-hat and the effective sample size ask whether chains mix. A chain that mixes well may still be
# somewhere else: a sampler without an accept step, a minibatch without correction, a variational
# guide. The polynomial Stein discrepancy (PSD) asks whether draws are from the posterior, from the
# gradients of its log density at the draws, in a time linear in their number.

# %%
import jax
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
import numpyro.infer.autoguide as autoguide
import numpyro.optim as optim
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO

import ppl_ext
from ppl_ext import models
from ppl_ext.diagnostics import from_svi, plot_psd_order, psd, psd_test, summary, tune
from ppl_ext.numpyro import ULD

# %% [markdown]
# ## A sampler that is off
#
# The eight schools, by NUTS, and by a ULD whose step size is far too large.

# %%
problem = models.load("eight_schools_noncentered")


def run(kernel, **options):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=2000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *problem.args, **problem.kwargs, extra_fields=("z_grad",))
    return ppl_ext.to_arviz(mcmc)


right = run(NUTS(problem.model))
wrong = run(ULD(problem.model, integrator="ee", step_size=0.9, friction=2.0))
summary(wrong)

# %%
summary(right)

# %% [markdown]
# R-hat is 1 in both. `psd_t` above 4 is a bias that chance does not explain. One test for all
# coordinates, which allows for the autocorrelation of the draws:

# %%
print(psd_test(right))
print(psd_test(wrong))

# %% [markdown]
# ## Tuning a biased sampler
#
# Small steps explore slowly, large steps are biased. `tune` runs a sampler for a short while at
# each value of a setting and takes the one with the smallest discrepancy, which counts both.

# %%
found = tune(
    lambda h: ULD(problem.model, integrator="ee", step_size=h, friction=2.0),
    [0.03, 0.1, 0.3, 0.9],
    problem.model,
    *problem.args,
    **problem.kwargs,
    num_samples=500,
)
print(found)

# %% [markdown]
# ## Variational inference
#
# A mean-field guide of the eight schools, in two ways of writing them: how far is it from the
# posterior? At the optimum of a Gaussian guide the features of order 1 and 2 vanish, whatever the
# guide; order 3 is the least that sees its error, and `from_svi` sees to that.


# %%
def fitted(name):
    schools = models.load(name)
    guide = autoguide.AutoNormal(schools.model)
    svi = SVI(schools.model, guide, optim.Adam(0.02), Trace_ELBO(num_particles=8))
    result = svi.run(jax.random.key(1), 4000, *schools.args, **schools.kwargs, progress_bar=False)
    return from_svi(svi, result, *schools.args, **schools.kwargs)


guides = {form: fitted(f"eight_schools_{form}") for form in ("centered", "noncentered")}
for form, draws in guides.items():
    print(form)
    print(psd_test(draws))

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.5), sharey=True)
for ax, (form, draws) in zip(axes, guides.items(), strict=True):
    plot_psd_order(draws, ax=ax)
    ax.set_title(f"{form} eight schools, mean-field guide")
plt.show()

# %% [markdown]
# ## What it does not see
#
# PSD looks at polynomials at the draws that there are. It is blind to a mode that no chain has
# visited: read it beside R-hat of several chains from different starts, not in its place. A large
# p-value says that these draws do not show a bias, no more.

# %%
print(psd(right))


# %%
def two_modes():
    mixture = dist.MixtureSameFamily(
        dist.Categorical(probs=jax.numpy.array([0.5, 0.5])),
        dist.Normal(jax.numpy.array([-20.0, 20.0]), 1.0),
    )
    numpyro.sample("x", mixture)


one_side = MCMC(NUTS(two_modes), num_warmup=500, num_samples=2000, progress_bar=False)
one_side.run(jax.random.key(0), extra_fields=("z_grad",), init_params={"x": -20.0})
print(psd_test(ppl_ext.to_arviz(one_side)))
