"""The value that `tune` picks, on samplers whose best setting is known."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO, autoguide

from ppl_ext import _arviz
from ppl_ext.diagnostics import TooFewDrawsError, from_svi, psd, tune
from ppl_ext.numpyro import ULD

N, BATCH = 100, 10
STEPS = [5e-2, 1e-2, 5e-3, 1e-3, 5e-4, 1e-4, 5e-5, 1e-5]


def mixture(x: jax.Array) -> None:
    """The posterior of Welling and Teh (2011), section 5.1, with two modes merged into one."""
    theta = numpyro.sample("theta", dist.Normal(0.0, jnp.sqrt(jnp.array([10.0, 1.0]))).to_event(1))
    means = jnp.stack([theta[0], theta.sum()])
    components = dist.Normal(means, jnp.sqrt(2.0))
    numpyro.sample(
        "x", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), components), obs=x
    )


@functools.cache
def mixture_data() -> np.ndarray:
    rng = np.random.default_rng(5001)
    return (rng.integers(2, size=N) + np.sqrt(2) * rng.normal(size=N)).astype(np.float32)


def log_joint(theta: jax.Array, x: jax.Array) -> jax.Array:
    """Log prior of N / len(x) minibatches each, and the log likelihood of one minibatch."""
    prior = -(theta**2 / jnp.array([10.0, 1.0])).sum() / 2
    each = jnp.logaddexp(-((x - theta[0]) ** 2) / 4, -((x - theta.sum()) ** 2) / 4)
    return prior + N / len(x) * each.sum()


@functools.partial(jax.jit, static_argnums=2)
@functools.partial(jax.vmap, in_axes=(0, None, None))
def sgld(key: jax.Array, step_size: jax.Array, n: int) -> jax.Array:
    """`n` draws of stochastic gradient Langevin dynamics after `n` that are dropped."""
    x = jnp.asarray(mixture_data())
    key, start = jax.random.split(key)

    def step(theta: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, noise = jax.random.split(key)
        batch = x[jax.random.choice(rows, N, (BATCH,), replace=False)]
        gradient = jax.grad(log_joint)(theta, batch)
        noise = jnp.sqrt(step_size) * jax.random.normal(noise, (2,))
        theta = theta + step_size / 2 * gradient + noise
        return theta, theta

    keys = jax.random.split(key, 2 * n)
    return jax.lax.scan(step, jax.random.normal(start, (2,)), keys)[1][n:]


def sgld_tables(n: int, replicates: int, **options: Any) -> np.ndarray:
    """The discrepancies of each replicate, shape (replicates, steps)."""
    keys = jax.random.split(jax.random.key(0), replicates)
    draws = {step: np.asarray(sgld(keys, step, n)) for step in STEPS}
    found = [
        tune(lambda step, i=i: {"theta": draws[step][i : i + 1]}, STEPS, mixture, mixture_data(),
             **options)
        for i in range(replicates)
    ]
    assert all(t.best == STEPS[int(t.table["psd"].argmin())] for t in found)
    return np.stack([t.table["psd"] for t in found])
