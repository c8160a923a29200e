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
# # A kernel of your own
#
# An algorithm is a pure function of a `Target`: a log density on the real line and the maps to the
# model's sites. `Kernel` makes of it what NumPyro's `MCMC` and `Gibbs` ask for. The example is the
# Metropolis-adjusted Langevin algorithm (MALA).

# %%
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import ppl_ext
from ppl_ext import models, registry
from ppl_ext.arguments import check_positive
from ppl_ext.diagnostics import check, summary
from ppl_ext.numpyro.entries import normal_with_known_variances
from ppl_ext.numpyro.kernel import Kernel
from ppl_ext.registry import Entry
from ppl_ext.target import Array, PyTree, Target

# %% [markdown]
# ## The algorithm
#
# A state, and a step with its noise as an argument, so that a test can feed it. `target.ravel` and
# `target.unravel` go between sites by name and one flat vector.


# %%
class State(NamedTuple):
    z: PyTree  # unconstrained sites
    z_grad: PyTree  # gradient of the potential energy at z
    potential_energy: Array  # ()
    accept_prob: Array  # () of the last proposal
    rng_key: Array


def potential(x, target):
    return jax.value_and_grad(lambda x: -target.log_density(x))(x)


def init(key, z, target):
    energy, grad = potential(target.ravel(z), target)
    return State(z, target.unravel(grad), energy, jnp.zeros_like(energy), key)


def transition(noise, uniform, x, target, h):
    """Propose y = x - h grad U(x) + sqrt(2 h) noise, and accept or stay."""
    old, old_grad = potential(x, target)
    y = x - h * old_grad + jnp.sqrt(2 * h) * noise
    new, new_grad = potential(y, target)
    back = x - y + h * new_grad
    log_ratio = old - new - back @ back / (4 * h) + noise @ noise / 2
    prob = jnp.where(jnp.isnan(log_ratio), 0.0, jnp.exp(jnp.minimum(log_ratio, 0.0)))
    pick = lambda a, b: jnp.where(uniform < prob, a, b)  # noqa: E731
    return pick(y, x), pick(new, old), pick(new_grad, old_grad), prob


def step(state, target: Target, h):
    key, key_noise, key_uniform = jax.random.split(state.rng_key, 3)
    x = target.ravel(state.z)
    noise, uniform = jax.random.normal(key_noise, x.shape), jax.random.uniform(key_uniform)
    x, energy, grad, prob = transition(noise, uniform, x, target, h)
    return State(target.unravel(x), target.unravel(grad), energy, prob, key)


# %% [markdown]
# ## The kernel
#
# Three methods for one chain. `Kernel` does the rest: starts, several chains, data as arguments,
# continued runs, blocks of `Gibbs`, refusals of models with discrete sites or minibatches.


# %%
class MALA(Kernel):
    default_fields = ("z", "z_grad", "potential_energy", "accept_prob")

    def __init__(self, model=None, potential_fn=None, *, step_size=0.1, **kwargs):
        super().__init__(model, potential_fn, **kwargs)
        check_positive("MALA", step_size=step_size)
        self._step_size = step_size

    def _init(self, rng_key, z, target):
        return init(rng_key, z, target)

    def _step(self, state, target):
        return step(state, target, self._step_size)

    def _refresh(self, state, target):
        return init(state.rng_key, state.z, target)


# %% [markdown]
# ## Try it
#
# Against an exact answer: three normal means whose posterior is known. It is the example that the
# tests of this package run every kernel on.

# %%
example = normal_with_known_variances()
mcmc = MCMC(
    MALA(example.model, step_size=0.05),
    num_warmup=1000,
    num_samples=20_000,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), *example.args, extra_fields=("z_grad",))
theta = mcmc.get_samples()["theta"]
for k in range(3):
    print(
        f"theta[{k}]: mean {theta[:, k].mean():.3f} (exact {example.mean['theta'][k]:.3f}), "
        f"sd {theta[:, k].std():.3f} ({example.sd['theta'][k]:.3f})"
    )

# %% [markdown]
# `summary` and `check` work at once. The third mean has a scale of its own, for which one step size
# is too small: the effective sample size tells.

# %%
idata = ppl_ext.to_arviz(mcmc)
print(check(idata))
summary(idata)

# %% [markdown]
# ## A test that can fail
#
# One step from exact draws must give exact draws. It is a far sharper test than a long run: here
# with the acceptance ratio right, and with its proposal term forgotten.


# %%
def one_step(break_it):
    kernel = MALA(potential_fn=lambda x: x @ x / 2, step_size=0.5)
    x = jax.random.normal(jax.random.key(1), (200_000, 1))
    target = ppl_ext.target.potential_target(kernel._potential_fn, x[0])

    def move(key, x):
        key_noise, key_uniform = jax.random.split(key)
        noise, uniform = jax.random.normal(key_noise, (1,)), jax.random.uniform(key_uniform)
        if break_it:
            y = x - 0.5 * x + noise
            accept = uniform < jnp.exp((x @ x - y @ y) / 2)
            return jnp.where(accept, y, x)
        return transition(noise, uniform, x, target, 0.5)[0]

    y = jax.vmap(move)(jax.random.split(jax.random.key(2), len(x)), x)
    return float((y.var() - 1) / np.sqrt(2 / len(x)))


print(f"variance after a step, in standard errors off: {one_step(False):.1f}")
print(f"without the proposal ratio:                    {one_step(True):.1f}")

# %% [markdown]
# ## Register it
#
# An entry says what the kernel takes. A package of its own names the function that returns it in an
# entry point of the group `ppl_ext.kernels`:
#
# ```toml
# [project.entry-points."ppl_ext.kernels"]
# MALA = "my_package:mala"
# ```
#
# From then on it is in `ppl_ext.available()` and `explain`, and the conformance tests of this
# package run over it.


# %%
def mala():
    return Entry(
        name="MALA",
        language="numpyro",
        kernel=MALA,
        models="continuous sites, full data",
        exact=True,
        source="Roberts & Tweedie 1996",
        refusal=lambda target: target.refusal_of_continuous_kernel("MALA"),
        example=normal_with_known_variances,
        options={"step_size": 0.05},
    )


def counts():
    numpyro.sample("k", dist.Poisson(3.0))


print(mala().refusal(registry.target(counts)))

# %% [markdown]
# On a real posterior:

# %%
problem = models.load("nes_logit")
run = MCMC(
    MALA(problem.model, step_size=0.002), num_warmup=2000, num_samples=5000, progress_bar=False
)
run.run(jax.random.key(0), *problem.args, **problem.kwargs)
draws = problem.flat(run.get_samples())
for name, reference in problem.reference.items():
    plt.hist(
        (draws[name] - reference["mean"]) / reference["sd"],
        bins=50,
        density=True,
        histtype="step",
        label=name,
    )
x = np.linspace(-4, 4, 200)
plt.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), "k:", label="standard normal")
plt.xlabel("draws, in reference standard deviations")
plt.ylabel("density")
plt.legend(fontsize=8)
plt.show()
