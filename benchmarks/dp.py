"""Dirichlet-process mixtures: time of a sweep, overhead by the number of points, peers.

    python benchmarks/dp.py time       seconds of a sweep by n, beside a matrix product of its size
    python benchmarks/dp.py overhead   components beyond the clusters, beside the law
    python benchmarks/dp.py peers      seconds to an error of the co-clustering, against peers

Without an argument: all of them. `peers` needs the extra `bench` (scikit-learn).
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS

import ppl_ext
from ppl_ext.diagnostics import overhead_report
from ppl_ext.numpyro import DirichletProcess, DPSlice


def model(y: Any) -> None:
    def base() -> Any:
        return numpyro.sample("mu", dist.Normal(0.0, 5.0).expand([y.shape[1]]).to_event(1))

    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 2.0))
    process = DirichletProcess("G", alpha, base)
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(process.draw(), 1.0).to_event(1), obs=y)


def points(n: int, clusters: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Points in the plane around `clusters` centres, and their cluster."""
    rng = np.random.default_rng(seed)
    centres = 5 * rng.standard_normal((clusters, 2))
    labels = rng.integers(0, clusters, n)
    return jnp.asarray(centres[labels] + rng.standard_normal((n, 2)), jnp.float32), labels


def seconds_of_sweep(y: Any, **options: Any) -> tuple[float, float]:
    """Seconds of a sweep, and of one matrix product (n, p) (p, capacity) with a softmax."""
    kernel = DPSlice(model, capacity=64, **options)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False, jit_model_args=True)
    mcmc.run(jax.random.key(0), y)
    state = mcmc.last_state
    sweep = jax.jit(lambda state, y: kernel.sample(state, (y,), {}))

    def best(function: Any, *args: Any) -> float:
        jax.block_until_ready(function(*args))
        found = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            found.append(time.perf_counter() - start)
        return min(found)

    # what an assignment cannot do without: all scores, and one exponential of each in use
    used = -(-int(state.num_instantiated) // 16) * 16
    product = jax.jit(lambda y, eta: jnp.sum(jnp.exp(y @ eta), 1))
    rows = jnp.concatenate([y, y], 1) / 10
    return best(sweep, state, y), best(product, rows, jnp.ones((4, used), y.dtype) / 10)


def speed(quick: bool) -> None:
    sizes = [10_000, 100_000] if quick else [100_000, 1_000_000, 10_000_000]
    rows = []
    for n in sizes:
        y, _ = points(n, 20)
        for moves in (0, 1):
            sweep, product = seconds_of_sweep(y, split_merge=moves)
            rows.append(
                {"n": n, "split-merge moves": moves, "seconds": sweep, "matrix product": product}
            )
            rows[-1]["ratio"] = sweep / product
    table = pd.DataFrame(rows)
    print("\nTime of a sweep: float32, two dimensions, 64 slots\n", table.round(4).to_string())
    plain = table[table["split-merge moves"] == 0]
    slope = np.polyfit(np.log(plain["n"]), np.log(plain["seconds"]), 1)[0]
    print(f"seconds grow like n^{slope:.2f}")


def overhead(quick: bool) -> None:
    rows = []
    for n in (100, 1000) if quick else (100, 1000, 10_000, 100_000):
        regimes = {"5": 5, "log n": round(math.log(n)), "sqrt n": round(math.sqrt(n))}
        for regime, clusters in regimes.items():
            y, _ = points(n, clusters)
            kernel = DPSlice(model, capacity=512, split_merge=1)
            mcmc = MCMC(kernel, num_warmup=100, num_samples=100, progress_bar=False)
            mcmc.run(jax.random.key(0), y)
            report = overhead_report(ppl_ext.to_arviz(mcmc))
            rows.append(
                {
                    "n": n,
                    "true clusters": regime,
                    "clusters": report.num_clusters,
                    "overhead": report.overhead,
                    "law": report.predicted,
                    "z": report.z,
                }
            )
    print("\nOverhead of a sweep\n", pd.DataFrame(rows).round(2).to_string())


def peers(quick: bool) -> None:
    from sklearn.mixture import BayesianGaussianMixture

    rows = []
    for n in (500,) if quick else (1000, 100_000):
        y, truth = points(n, 8, seed=3)
        pairs = np.random.default_rng(1).integers(0, n, (2, 4000))
        together = truth[pairs[0]] == truth[pairs[1]]

        def error(probability: np.ndarray, together: np.ndarray = together) -> float:
            return float(np.abs(probability - together).mean())

        start = time.perf_counter()
        kernel = DPSlice(model)
        mcmc = MCMC(kernel, num_warmup=100, num_samples=100, progress_bar=False)
        mcmc.run(jax.random.key(0), y, extra_fields=("labels",))
        labels = np.asarray(mcmc.get_extra_fields()["labels"])
        seconds = time.perf_counter() - start
        found = (labels[:, pairs[0]] == labels[:, pairs[1]]).mean(0)
        rows.append({"n": n, "sampler": "DPSlice", "seconds": seconds, "error": error(found)})

        start = time.perf_counter()
        fit = BayesianGaussianMixture(20, covariance_type="spherical", random_state=0)
        proba = fit.fit(np.asarray(y)).predict_proba(np.asarray(y))
        seconds = time.perf_counter() - start
        found = (proba[pairs[0]] * proba[pairs[1]]).sum(1)
        rows.append({"n": n, "sampler": "sklearn (VB)", "seconds": seconds, "error": error(found)})

        start = time.perf_counter()
        draws = 50 if quick else 200
        nuts = MCMC(NUTS(truncated), num_warmup=draws, num_samples=draws, progress_bar=False)
        nuts.run(jax.random.key(0), y)
        found = together_by_draws(nuts.get_samples(), y, pairs)
        seconds = time.perf_counter() - start
        rows.append(
            {"n": n, "sampler": "NUTS, 20 sticks", "seconds": seconds, "error": error(found)}
        )
    table = pd.DataFrame(rows)
    print("\nPeers: mean error of co-clustering against the truth\n", table.round(4).to_string())


def truncated(y: Any, size: int = 20) -> None:
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 2.0))
    v = numpyro.sample("v", dist.Beta(1, alpha).expand([size - 1]))
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([size, y.shape[1]]).to_event(2))
    log_w = jnp.append(jnp.log(v), 0.0) + jnp.append(0.0, jnp.cumsum(jnp.log1p(-v)))
    components = dist.Normal(mu, 1.0).to_event(1)
    mixture = dist.MixtureSameFamily(dist.Categorical(logits=log_w), components)
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", mixture, obs=y)


def together_by_draws(samples: Any, y: Any, pairs: np.ndarray) -> np.ndarray:
    def one(v: Any, mu: Any) -> Any:
        log_w = jnp.append(jnp.log(v), 0.0) + jnp.append(0.0, jnp.cumsum(jnp.log1p(-v)))

        def proba(points: Any) -> Any:
            squares = ((points[:, None] - mu) ** 2).sum(-1)
            return jax.nn.softmax(log_w - squares / 2, -1)

        return (proba(y[pairs[0]]) * proba(y[pairs[1]])).sum(-1)

    return np.asarray(jax.lax.map(lambda s: one(*s), (samples["v"], samples["mu"]))).mean(0)


if __name__ == "__main__":
    parts = {"time": speed, "overhead": overhead, "peers": peers}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=parts)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    for name, part in parts.items():
        if options.part in (None, name):
            part(options.quick)
