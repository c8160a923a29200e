"""Pyro models at XLA speed: `ppl_ext.pyro.NUTS` beside `pyro.infer.NUTS` and NumPyro's NUTS.

Each model is written in Pyro and in NumPyro; data are simulated, except eight schools. Printed
for each sampler, on one core:

- `ess/s`: effective draws (smallest over coordinates) per second of sampling, without warm-up and
  compilation. The samplers that run in JAX take turns, REPEATS times 3,000 draws; the median.
- `ess/s of all`: of the first run, 3,000 draws after 1,000 of warm-up, everything included.
- `set-up`: seconds until a run of one draw is done: recording, check, compilation; and with the
  compiled programs in JAX's cache on disk.

Pyro's own samplers make fewer draws; their run of 3,000 is extrapolated from the time per draw.
Ratios are ours, with `ppl_ext.pyro.MCMC`, to the row's.

    python benchmarks/pyro.py [model ...] [--draws-of-pyro N]
"""

from __future__ import annotations

import sys

# a script's folder comes first in the path, where this file would be taken for the package pyro
sys.path.pop(0)

import argparse
import contextlib
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import arviz as az
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
from jax.experimental.compilation_cache import compilation_cache

import ppl_ext.pyro
from ppl_ext.pyro.runner import runner

DRAWS, WARMUP, REPEATS = 3000, 1000, 5


@dataclass(frozen=True)
class Model:
    """The same model twice, its data, and how many draws Pyro makes of it."""

    pyro: Callable[..., Any]
    numpyro: Callable[..., Any]
    data: tuple[np.ndarray, ...]
    draws_of_pyro: int


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

    return Model(p, n, (y, sigma), 300)


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

    return Model(p, n, (x, group, y), 200)


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

    return Model(p, n, (x, y), 100)


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

    return Model(p, n, (x, y), 200)


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

    return Model(p, n, (y,), 200)


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

    return Model(p, n, (x, y), 60)


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
        if not flat.size:  # a chain that stands still
            return np.nan
        smallest = min(smallest, float(az.ess(az.convert_to_dataset(flat))["x"].min()))
    return smallest


class Timed(ppl_ext.pyro.MCMC):
    """Notes how long the two stages of the last run took."""

    def _advance(self, prepared: Any, chain: Any, stage: str, *rest: Any) -> Any:
        start = time.perf_counter()
        found = super()._advance(prepared, chain, stage, *rest)
        self.seconds = time.perf_counter() - start  # of sampling, which comes last
        return found


def ours(model: Model) -> Callable[[], tuple[float, float]]:
    """Run of `ppl_ext.pyro.MCMC`: its smallest effective sample size and sampling time."""
    mcmc = Timed(ppl_ext.pyro.NUTS(model.pyro), DRAWS, WARMUP, disable_progbar=True)
    data = [torch.as_tensor(x) for x in model.data]

    def run() -> tuple[float, float]:
        mcmc.run(*data)
        return smallest_ess(mcmc.get_samples()), mcmc.seconds

    return run


def in_pyro(model: Model, kernel: Any, draws: int, warmup: int) -> Callable[[], Any]:
    """Run of `pyro.infer.MCMC`; the same two numbers."""
    data = [torch.as_tensor(x) for x in model.data]
    marks: dict[Any, float] = {}

    def hook(kernel: Any, params: Any, stage: str, i: int) -> None:
        marks[stage, i] = time.perf_counter()

    def run() -> tuple[float, float]:
        mcmc = pyro.infer.MCMC(kernel, draws, warmup, hook_fn=hook, disable_progbar=True)
        mcmc.run(*data)
        seconds = marks["Sample", draws - 1] - marks["Warmup", warmup - 1]
        return smallest_ess(mcmc.get_samples()), seconds

    return run


def in_numpyro(model: Model) -> Callable[[], tuple[float, float]]:
    """NumPyro's `MCMC` the first time; afterwards its kernel in one compiled loop.

    `MCMC.run` would compile its loop anew in each call.
    """
    data = [jnp.asarray(x) for x in model.data]
    kernel = numpyro.infer.NUTS(model.numpyro)
    state: Any = None
    loop: Any = None

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = kernel.sample(state, data, {})
        return state, kernel.postprocess_fn(data, {})(state.z)

    def run() -> tuple[float, float]:
        nonlocal state, loop
        if state is None:
            mcmc = numpyro.infer.MCMC(
                kernel, num_warmup=WARMUP, num_samples=DRAWS, progress_bar=False
            )
            mcmc.run(jax.random.key(0), *data)
            state = mcmc.last_state
            return smallest_ess(jax.device_get(mcmc.get_samples())), np.nan
        if loop is None:
            scan = jax.jit(lambda state: jax.lax.scan(step, state, length=DRAWS))
            loop = scan.lower(state).compile()
        start = time.perf_counter()
        state, draws = loop(state)
        draws = jax.device_get(draws)
        return smallest_ess(draws), time.perf_counter() - start

    return run


def set_up(model: Model) -> tuple[float, float]:
    """Seconds of a run of one draw after one of warm-up, in `ppl_ext.pyro` and in NumPyro."""
    data = model.data
    start = time.perf_counter()
    mcmc = ppl_ext.pyro.MCMC(ppl_ext.pyro.NUTS(model.pyro), 1, 1, disable_progbar=True)
    mcmc.run(*map(torch.as_tensor, data))
    between = time.perf_counter()
    kernel = numpyro.infer.NUTS(model.numpyro)
    other = numpyro.infer.MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    other.run(jax.random.key(0), *map(jnp.asarray, data))
    jax.block_until_ready(other.get_samples())
    return between - start, time.perf_counter() - between


def forget_compiled_programs() -> None:
    jax.clear_caches()
    runner.cache_clear()


def compare(name: str, draws_of_pyro: int | None) -> pd.DataFrame:
    model = MODELS[name]()
    few = draws_of_pyro or model.draws_of_pyro
    torch_nuts = functools.partial(pyro.infer.NUTS, model.pyro)
    runs = {
        "ppl_ext.pyro.MCMC": (ours(model), DRAWS),
        "ppl_ext in pyro.infer.MCMC": (
            in_pyro(model, ppl_ext.pyro.NUTS(model.pyro), DRAWS, WARMUP),
            DRAWS,
        ),
        "NumPyro": (in_numpyro(model), DRAWS),
        "Pyro": (in_pyro(model, torch_nuts(), few, few), few),
        "Pyro, jit": (
            in_pyro(model, torch_nuts(jit_compile=True, ignore_jit_warnings=True), few, few),
            few,
        ),
    }
    rates: dict[str, list[float]] = {label: [] for label in runs}
    of_all = {}
    pyro.set_rng_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        cold = dict(zip(("ppl_ext.pyro.MCMC", "NumPyro"), set_up(model), strict=True))
        forget_compiled_programs()
        with jax_cache(folder):
            set_up(model)
            forget_compiled_programs()
            warm = dict(zip(("ppl_ext.pyro.MCMC", "NumPyro"), set_up(model), strict=True))
    for label, (run, draws) in runs.items():
        forget_compiled_programs()
        start = time.perf_counter()
        ess, sampling = run()
        total = time.perf_counter() - start
        if draws < DRAWS:
            # to DRAWS draws and WARMUP of warm-up at this speed
            total += sampling / draws * (DRAWS - draws + WARMUP - draws)
            rates[label].append(ess / sampling)
        of_all[label] = ess * DRAWS / draws / total
    # the compiled programs are there from the second round on
    for repeat in range(REPEATS + 1):
        for label, (run, draws) in runs.items():
            if draws == DRAWS:
                ess, sampling = run()
                if repeat:
                    rates[label].append(ess / sampling)
    table = pd.DataFrame({"ess/s": {label: np.median(r) for label, r in rates.items()}})
    table["ratio"] = table["ess/s"].iloc[0] / table["ess/s"]
    table["ess/s of all"] = pd.Series(of_all)
    table["ratio of all"] = table["ess/s of all"].iloc[0] / table["ess/s of all"]
    table["set-up"] = pd.Series(cold)
    table["set-up, cached"] = pd.Series(warm)
    return table


@contextlib.contextmanager
def jax_cache(folder: str) -> Iterator[None]:
    """JAX's cache of compiled programs in `folder`."""
    options = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description="NUTS on Pyro models, beside its peers.")
    parser.add_argument("model", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument(
        "--draws-of-pyro", type=int, help="as many draws, and of warm-up, by Pyro's own NUTS"
    )
    parser.add_argument(
        "--quick", action="store_true", help="eight schools only, 50 draws by Pyro's own NUTS"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.draws_of_pyro = ["eight_schools"], 50
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in arguments.model or MODELS:
        table = compare(name, arguments.draws_of_pyro)
        print(f"\n{name}\n{table.to_string(float_format='{:.3g}'.format, na_rep='')}", flush=True)


if __name__ == "__main__":
    main()
