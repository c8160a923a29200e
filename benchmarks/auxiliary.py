"""Exact minibatch kernels: data per step, effective draws per second, and errors, beside peers.

    python benchmarks/auxiliary.py logistic   logistic regression, d = 10, N = 1e4, 1e5, 1e6
    python benchmarks/auxiliary.py adult      the Adult census data, N = 48,842

Without an argument: both. `--quick` takes N = 1e4 and fewer draws. All ratios are of one run.
Seconds are those of sampling, compilation and warm-up left out. `error` is the largest error of a
posterior mean against NUTS on all the data, in posterior standard deviations; `noise` is what Monte
Carlo error alone makes of it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import HMCECS, NUTS, BarkerMH

from ppl_ext.numpyro import TunaMH

WARMUP, BLOCK = 500, 100
DATA = Path(__file__).parent / "data"


def model(x: Any, y: Any, subsample_size: int | None = 100) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", x.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def simulated(size: int, dimension: int = 10) -> tuple[jax.Array, jax.Array]:
    """Standard normal covariates; coefficients from -1 to 1 over the square root of d."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, dimension))
    eta = x @ np.linspace(-1, 1, dimension) / np.sqrt(dimension)
    y = rng.uniform(size=size) < 1 / (1 + np.exp(-eta))
    return jax.numpy.asarray(x, float), jax.numpy.asarray(y, float)


def adult() -> tuple[jax.Array, jax.Array]:
    with np.load(DATA / "adult_logistic.npz") as data:
        return jax.numpy.asarray(data["X"], float), jax.numpy.asarray(data["y"], float)


def timed(kernel: Any, draws: int, x: jax.Array, y: jax.Array, size: int | None) -> dict[str, Any]:
    """Draws and their seconds: blocks of one compiled program, the first ones for warm-up.

    Not by `MCMC.run`, which compiles its loop anew in every run.
    """
    options = {} if size == 100 else {"subsample_size": size}
    state = kernel.init(jax.random.key(0), WARMUP, None, (x, y), options)

    def move(state: Any, _: Any) -> tuple[Any, Any]:
        state = kernel.sample(state, (x, y), options)
        z = state.hmc_state.z if hasattr(state, "hmc_state") else state.z
        return state, (z["beta"], getattr(state, "num_drawn", 0))

    block = jax.jit(lambda state: jax.lax.scan(move, state, length=BLOCK)).lower(state).compile()
    for _ in range(WARMUP // BLOCK):
        state, _ = jax.block_until_ready(block(state))
    found, start = [], time.perf_counter()
    for _ in range(draws // BLOCK):
        state, kept = jax.block_until_ready(block(state))
        found.append(kept)
    seconds = time.perf_counter() - start
    beta = np.concatenate([np.asarray(b, np.float64) for b, _ in found])[None]
    ess = min(float(az.ess(beta[..., j])) for j in range(beta.shape[-1]))
    drawn = np.mean([d for _, d in found]) if hasattr(state, "num_drawn") else np.nan
    return {"mean": beta[0].mean(0), "sd": beta[0].std(0), "ESS": ess, "seconds": seconds,
            "data per step": drawn}  # fmt: skip


def compare(x: jax.Array, y: jax.Array, quick: bool) -> pd.DataFrame:
    """All methods on the same data; NUTS on all of them is the reference."""
    many, few = (2000, 300) if quick else (20_000, 1000)
    found = {"NUTS, all data": timed(NUTS(model), few, x, y, None)}
    reference = found["NUTS, all data"]
    for name, options in {
        "TunaMH": {},
        "TunaMH, order 2": {"order": 2},
        "TunaMH, sgld": {"proposal": "sgld"},
    }.items():
        found[name] = timed(TunaMH(model, **options), many, x, y, 100)
    if not quick:
        found["BarkerMH, all data"] = timed(BarkerMH(model), few, x, y, None)
        proxy = HMCECS.taylor_proxy({"beta": jax.numpy.asarray(reference["mean"])})
        ecs = HMCECS(NUTS(model), num_blocks=10, proxy=proxy)
        found["HMCECS, Taylor proxy"] = timed(ecs, few, x, y, 100)
    rows = {}
    for name, run in found.items():
        error = np.abs(run["mean"] - reference["mean"]) / reference["sd"]
        rate = run["ESS"] / run["seconds"]
        rows[name] = {
            "data per step": run["data per step"],
            "ESS per draw": run["ESS"] / (few if "data" in name or "HMC" in name else many),
            "ESS per second": rate,
            "over NUTS": rate / (reference["ESS"] / reference["seconds"]),
            "error": error.max(),
            "noise": np.sqrt(1 / run["ESS"] + 1 / reference["ESS"]) * 2.2,
        }
    return pd.DataFrame(rows).T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help="logistic, adult; all by default")
    parser.add_argument("--quick", action="store_true", help="N = 1e4 and fewer draws")
    parser.add_argument("--sizes", type=float, nargs="*", help="N of `logistic`")
    options = parser.parse_args()
    sections = options.sections or ["logistic", "adult"]
    if "logistic" in sections:
        sizes = options.sizes or ([1e4] if options.quick else [1e4, 1e5, 1e6])
        for size in sizes:
            print(f"\nlogistic regression, d = 10, N = {size:.0e}", flush=True)
            table = compare(*simulated(int(size)), options.quick)
            print(table.to_string(float_format="{:.3g}".format), flush=True)
    if "adult" in sections and not options.quick:
        print("\nAdult, d = 11, N = 48,842", flush=True)
        print(compare(*adult(), False).to_string(float_format="{:.3g}".format), flush=True)


if __name__ == "__main__":
    main()
