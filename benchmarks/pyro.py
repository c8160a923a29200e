"""Pyro models at XLA speed: `ppl_ext.pyro.NUTS` beside `pyro.infer.NUTS` and NumPyro's NUTS.

Each model is written in Pyro and in NumPyro; data are simulated, except eight schools. Printed
for each sampler, on one core: effective draws (smallest over coordinates) per second of sampling,
compilation and warm-up excluded; and of a whole run of 3,000 draws, 1,000 of warm-up, everything
included. Pyro's own samplers make fewer draws; their run of 3,000 is extrapolated from the time
per draw. Ratios are taken within one run of this file.

    python benchmarks/pyro.py [model ...]
"""

from __future__ import annotations

import sys
import time
import warnings

# a script's folder comes first in the path, where this file would be taken for the package pyro
sys.path.pop(0)

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as ndist
import pandas as pd
import pyro
import pyro.distributions as pdist
import pyro.infer
import torch
from numpyro.diagnostics import effective_sample_size

import ppl_ext.pyro

DRAWS, WARMUP = 3000, 1000


@dataclass(frozen=True)
class Model:
    """The same model twice, its data, and how many draws Pyro makes of it."""

    pyro: Callable[..., Any]
    numpyro: Callable[..., Any]
    data: tuple[np.ndarray, ...]
    pyro_draws: int
    pyro_warmup: int


def eight_schools() -> Model:
    y = np.array([28, 8, -3, 7, -1, 1, 18, 12], np.float32)
    sigma = np.array([15, 10, 16, 11, 9, 11, 10, 18], np.float32)

    def p(y, sigma):
        mu = pyro.sample("mu", pdist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", pdist.HalfCauchy(5.0))
        with pyro.plate("school", 8):
            eta = pyro.sample("eta", pdist.Normal(0.0, 1.0))
            pyro.sample("y", pdist.Normal(mu + tau * eta, sigma), obs=y)

    def n(y, sigma):
        mu = numpyro.sample("mu", ndist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", ndist.HalfCauchy(5.0))
        with numpyro.plate("school", 8):
            eta = numpyro.sample("eta", ndist.Normal(0.0, 1.0))
            numpyro.sample("y", ndist.Normal(mu + tau * eta, sigma), obs=y)

    return Model(p, n, (y, sigma), 300, 300)


def hierarchical_logistic() -> Model:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1000, 5)).astype(np.float32)
    group = rng.integers(0, 20, 1000)
    logits = x @ rng.standard_normal(5) + rng.standard_normal(20)[group]
    y = (rng.random(1000) < 1 / (1 + np.exp(-logits))).astype(np.float32)

    def p(x, group, y):
        beta = pyro.sample("beta", pdist.Normal(torch.zeros(5), 2.0).to_event(1))
        tau = pyro.sample("tau", pdist.HalfNormal(1.0))
        with pyro.plate("group", 20):
            eta = pyro.sample("eta", pdist.Normal(0.0, 1.0))
        with pyro.plate("datum", 1000):
            logits = x @ beta + tau * eta[group]
            pyro.sample("y", pdist.Bernoulli(logits=logits), obs=y)

    def n(x, group, y):
        beta = numpyro.sample("beta", ndist.Normal(jnp.zeros(5), 2.0).to_event(1))
        tau = numpyro.sample("tau", ndist.HalfNormal(1.0))
        with numpyro.plate("group", 20):
            eta = numpyro.sample("eta", ndist.Normal(0.0, 1.0))
        with numpyro.plate("datum", 1000):
            logits = x @ beta + tau * eta[group]
            numpyro.sample("y", ndist.Bernoulli(logits=logits), obs=y)

    return Model(p, n, (x, group, y), 200, 200)


def adult_logistic() -> Model:
    """A logistic regression of the size of the census data "adult"."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((48842, 15)).astype(np.float32)
    x[:, 0] = 1
    logits = x @ rng.standard_normal(15)
    y = (rng.random(48842) < 1 / (1 + np.exp(-logits))).astype(np.float32)

    def p(x, y):
        beta = pyro.sample("beta", pdist.Normal(torch.zeros(15), 2.0).to_event(1))
        with pyro.plate("datum", 48842):
            pyro.sample("y", pdist.Bernoulli(logits=x @ beta), obs=y)

    def n(x, y):
        beta = numpyro.sample("beta", ndist.Normal(jnp.zeros(15), 2.0).to_event(1))
        with numpyro.plate("datum", 48842):
            numpyro.sample("y", ndist.Bernoulli(logits=x @ beta), obs=y)

    return Model(p, n, (x, y), 100, 100)


def gaussian_process() -> Model:
    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(-3, 3, 60)).astype(np.float32)
    y = (np.sin(2 * x) + 0.3 * rng.standard_normal(60)).astype(np.float32)

    def p(x, y):
        length = pyro.sample("length", pdist.LogNormal(0.0, 1.0))
        scale = pyro.sample("scale", pdist.LogNormal(0.0, 1.0))
        noise = pyro.sample("noise", pdist.LogNormal(0.0, 1.0))
        distance = (x[:, None] - x[None, :]) ** 2
        covariance = scale**2 * torch.exp(-distance / (2 * length**2))
        covariance = covariance + (noise**2 + 1e-5) * torch.eye(60)
        pyro.sample("y", pdist.MultivariateNormal(torch.zeros(60), covariance), obs=y)

    def n(x, y):
        length = numpyro.sample("length", ndist.LogNormal(0.0, 1.0))
        scale = numpyro.sample("scale", ndist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", ndist.LogNormal(0.0, 1.0))
        distance = (x[:, None] - x[None, :]) ** 2
        covariance = scale**2 * jnp.exp(-distance / (2 * length**2))
        covariance = covariance + (noise**2 + 1e-5) * jnp.eye(60)
        numpyro.sample("y", ndist.MultivariateNormal(jnp.zeros(60), covariance), obs=y)

    return Model(p, n, (x, y), 200, 200)


def lkj_covariance() -> Model:
    rng = np.random.default_rng(4)
    factor = np.tril(rng.standard_normal((5, 5))) + 2 * np.eye(5)
    y = (rng.standard_normal((200, 5)) @ factor.T).astype(np.float32)

    def p(y):
        scale = pyro.sample("scale", pdist.HalfNormal(5 * torch.ones(5)).to_event(1))
        corr = pyro.sample("corr", pdist.LKJCholesky(5, 2.0))
        mu = pyro.sample("mu", pdist.Normal(torch.zeros(5), 5.0).to_event(1))
        with pyro.plate("datum", 200):
            tril = scale[:, None] * corr
            pyro.sample("y", pdist.MultivariateNormal(mu, scale_tril=tril), obs=y)

    def n(y):
        scale = numpyro.sample("scale", ndist.HalfNormal(5 * jnp.ones(5)).to_event(1))
        corr = numpyro.sample("corr", ndist.LKJCholesky(5, 2.0))
        mu = numpyro.sample("mu", ndist.Normal(jnp.zeros(5), 5.0).to_event(1))
        with numpyro.plate("datum", 200):
            tril = scale[:, None] * corr
            numpyro.sample("y", ndist.MultivariateNormal(mu, scale_tril=tril), obs=y)

    return Model(p, n, (y,), 200, 200)


def neural_network() -> Model:
    rng = np.random.default_rng(5)
    x = rng.uniform(-2, 2, (100, 1)).astype(np.float32)
    y = (np.sin(3 * x[:, 0]) + 0.2 * rng.standard_normal(100)).astype(np.float32)

    def p(x, y):
        a = pyro.sample("a", pdist.Normal(torch.zeros(1, 5), 2.0).to_event(2))
        b = pyro.sample("b", pdist.Normal(torch.zeros(5), 2.0).to_event(1))
        c = pyro.sample("c", pdist.Normal(torch.zeros(5), 1.0).to_event(1))
        sigma = pyro.sample("sigma", pdist.LogNormal(-1.0, 0.5))
        with pyro.plate("datum", 100):
            pyro.sample("y", pdist.Normal(torch.tanh(x @ a + b) @ c, sigma), obs=y)

    def n(x, y):
        a = numpyro.sample("a", ndist.Normal(jnp.zeros((1, 5)), 2.0).to_event(2))
        b = numpyro.sample("b", ndist.Normal(jnp.zeros(5), 2.0).to_event(1))
        c = numpyro.sample("c", ndist.Normal(jnp.zeros(5), 1.0).to_event(1))
        sigma = numpyro.sample("sigma", ndist.LogNormal(-1.0, 0.5))
        with numpyro.plate("datum", 100):
            numpyro.sample("y", ndist.Normal(jnp.tanh(x @ a + b) @ c, sigma), obs=y)

    return Model(p, n, (x, y), 60, 60)


MODELS = {
    f.__name__: f
    for f in (
        eight_schools,
        hierarchical_logistic,
        adult_logistic,
        gaussian_process,
        lkj_covariance,
        neural_network,
    )
}


def smallest_ess(draws: dict[str, Any]) -> float:
    """Over coordinates; those that do not move (a Cholesky factor's zeros) are left out."""
    smallest = np.inf
    for values in draws.values():
        flat = np.asarray(values, float).reshape(1, len(values), -1)
        flat = flat[..., flat.std(1)[0] > 1e-6]
        smallest = min(smallest, float(np.min(effective_sample_size(flat))))
    return smallest


def run_pyro(model: Model, kernel: Any, draws: int, warmup: int) -> dict[str, float]:
    """Seconds of the whole run and of its sampling phase, by `pyro.infer.MCMC`."""
    pyro.set_rng_seed(0)
    data = [torch.as_tensor(x) for x in model.data]
    marks: list[float] = []

    def hook(kernel: Any, params: Any, stage: str, i: int) -> None:
        if (stage, i) in (("Warmup", warmup - 1), ("Sample", draws - 1)):
            marks.append(time.perf_counter())

    start = time.perf_counter()
    mcmc = pyro.infer.MCMC(kernel, draws, warmup, hook_fn=hook, disable_progbar=True)
    mcmc.run(*data)
    ess = smallest_ess(mcmc.get_samples())
    sampling = marks[1] - marks[0]
    # to DRAWS draws at this speed
    total = marks[0] - start + sampling * DRAWS / draws
    return {"ess/s": ess / sampling, "ess/s of all": ess * DRAWS / draws / total, "seconds": total}


def run_numpyro(model: Model) -> dict[str, float]:
    data = [jnp.asarray(x) for x in model.data]
    kernel = numpyro.infer.NUTS(model.numpyro)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=WARMUP, num_samples=DRAWS, progress_bar=False)
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), *data)
    ess = smallest_ess(jax.device_get(mcmc.get_samples()))
    total = time.perf_counter() - start
    # MCMC.run would compile its loop anew in each call
    constrain = kernel.postprocess_fn(data, {})

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = kernel.sample(state, data, {})
        return state, constrain(state.z)

    loop = jax.jit(lambda state: jax.lax.scan(step, state, length=DRAWS)).lower(mcmc.last_state)
    compiled = loop.compile()
    start = time.perf_counter()
    draws = jax.device_get(compiled(mcmc.last_state)[1])
    sampling = time.perf_counter() - start
    return {"ess/s": smallest_ess(draws) / sampling, "ess/s of all": ess / total, "seconds": total}


def compare(name: str) -> pd.DataFrame:
    model = MODELS[name]()
    rows = {
        "ppl_ext.pyro.NUTS": run_pyro(model, ppl_ext.pyro.NUTS(model.pyro), DRAWS, WARMUP),
        "NumPyro NUTS": run_numpyro(model),
    }
    for label, options in (
        ("pyro NUTS", {}),
        ("pyro NUTS, jit", {"jit_compile": True, "ignore_jit_warnings": True}),
    ):
        kernel = pyro.infer.NUTS(model.pyro, **options)
        rows[label] = run_pyro(model, kernel, model.pyro_draws, model.pyro_warmup)
    table = pd.DataFrame(rows).T
    ours = table.loc["ppl_ext.pyro.NUTS"]
    table["ratio"] = ours["ess/s"] / table["ess/s"]
    table["ratio of all"] = ours["ess/s of all"] / table["ess/s of all"]
    return table


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names or MODELS:
        print(f"\n{name}\n{compare(name).to_string(float_format='{:.3g}'.format)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
