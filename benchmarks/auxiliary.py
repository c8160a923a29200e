"""Exact minibatch kernels and the exchange algorithm: cost and errors, beside peers.

    python benchmarks/auxiliary.py logistic   logistic regression, d = 10, N = 1e4, 1e5, 1e6
    python benchmarks/auxiliary.py adult      the Adult census data, N = 48,842
    python benchmarks/auxiliary.py exchange   Ising models and networks with exact references

Without an argument: all. `--quick` takes N = 1e4 and fewer draws. All ratios are of one run.
Seconds are those of sampling, compilation and warm-up left out. `error` is the largest error of a
posterior mean against NUTS on all the data, in posterior standard deviations; `noise` is what Monte
Carlo error alone makes of it.

`exchange`: `ESS per 1000` simulated data sets, the least of all coordinates; `|z|`, the largest
error of a mean or variance against the exact posterior, in Monte Carlo standard errors. `plain` is
the exchange algorithm of the literature: a random walk with one step size for all coordinates,
tuned to the same acceptance.
"""

from __future__ import annotations

import argparse
import json
import math
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

from ppl_ext.kernels import exchange_mh
from ppl_ext.numpyro import ERGM, ExchangeMH, Graph, Ising, TunaMH
from ppl_ext.numpyro.ergm import kstar

WARMUP, BLOCK = 500, 100
DATA = Path(__file__).parent / "data"
REFERENCES = Path(__file__).parents[1] / "tests" / "numpyro" / "data" / "exchange_references.json"


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


# --- exchange -----------------------------------------------------------------------------------


def ising(graph: Graph) -> Any:
    def model(x: Any) -> None:
        coupling = numpyro.sample("theta", dist.Uniform(0, 1))
        numpyro.sample("x", Ising(coupling, 0.0, graph), obs=x)

    return model


def network(terms: list[Any], size: int, prior_sd: float) -> Any:
    def model(x: Any) -> None:
        prior = dist.Normal(0, prior_sd).expand([len(terms)]).to_event(1)
        numpyro.sample("x", ERGM(numpyro.sample("theta", prior), terms, size), obs=x)

    return model


def exchange_cases() -> Any:
    """Name, model, data, and exact means and standard deviations."""
    found = json.loads(REFERENCES.read_text())
    for name, case in found["ising"].items():
        x = np.asarray(case["x"])
        yield name, ising(Graph.lattice(*x.shape)), x, [case["mean"]], [case["sd"]]
    for name, case in found["ergm"].items():
        x = np.asarray(case["graph"])
        terms = [kstar(2) if t == "kstar2" else t for t in case["terms"]]
        model = network(terms, len(x), case["prior_sd"])
        yield name, model, x, case["mean"], case["sd"]


class Plain(ExchangeMH):
    """Random walk with one step size, in the unconstrained coordinates as they are."""

    def init(self, *args: Any, **kwargs: Any) -> Any:
        return self._unscaled(super().init(*args, **kwargs))

    def _step(self, state: Any, target: Any) -> Any:
        return self._unscaled(super()._step(self._unscaled(state), target))

    @staticmethod
    def _unscaled(state: Any) -> Any:
        identity = jax.numpy.eye(state.fit.centre.size)
        return state._replace(fit=state.fit._replace(whiten=identity, scale=identity))


def exchange_run(kernel: Any, x: Any, draws: int) -> tuple[np.ndarray, dict[str, Any]]:
    state = kernel.init(jax.random.key(0), WARMUP, None, (x,), {})

    def move(state: Any, _: Any) -> tuple[Any, Any]:
        state = kernel.sample(state, (x,), {})
        theta = kernel.postprocess_fn((x,), {})(state.z)["theta"]
        return state, (theta, state.accept_prob, state.sim_effort)

    block = jax.jit(lambda state: jax.lax.scan(move, state, length=BLOCK)).lower(state).compile()
    for _ in range(WARMUP // BLOCK):
        state, _ = block(state)
    jax.block_until_ready(state.i)
    found, start = [], time.perf_counter()
    for _ in range(draws // BLOCK):
        state, kept = jax.block_until_ready(block(state))
        found.append(kept)
    seconds = time.perf_counter() - start
    theta, accept, effort = (np.concatenate([np.asarray(f[k]) for f in found]) for k in range(3))
    facts = {"acceptance": accept.mean(), "effort": effort.mean(), "ms per step": 1e3 * seconds}
    facts["ms per step"] /= draws
    return theta.reshape(draws, -1).astype(np.float64), facts


def compare_exchange(model: Any, x: Any, mean: Any, sd: Any, draws: int) -> pd.DataFrame:
    kernels = {"plain": (Plain(model), 1)}
    for proposal in exchange_mh.PROPOSALS:
        kernels[proposal] = (ExchangeMH(model, proposal=proposal), 1)
    kernels["mala, num_aux=4"] = (ExchangeMH(model, proposal="mala", num_aux=4), 4)
    rows = {}
    for name, (kernel, simulations) in kernels.items():
        theta, facts = exchange_run(kernel, x, draws)
        worst, sizes = 0.0, []
        for k, (m, s) in enumerate(zip(mean, sd, strict=True)):
            square = (theta[:, k] - m) ** 2
            sizes.append(float(az.ess(theta[None, :, k])))
            error = square.std() / math.sqrt(float(az.ess(square[None])))
            worst = max(worst, abs(theta[:, k].mean() - m) / (s / math.sqrt(sizes[-1])))
            worst = max(worst, abs(square.mean() - s**2) / error)
        rows[name] = {
            "ESS per 1000": 1000 * min(sizes) / draws / simulations,
            "|z|": worst,
            **facts,
        }
    return pd.DataFrame(rows).T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help="logistic, adult, exchange; all by default")
    parser.add_argument("--quick", action="store_true", help="N = 1e4 and fewer draws")
    parser.add_argument("--sizes", type=float, nargs="*", help="N of `logistic`")
    options = parser.parse_args()
    sections = options.sections or ["logistic", "adult", "exchange"]
    if "logistic" in sections:
        sizes = options.sizes or ([1e4] if options.quick else [1e4, 1e5, 1e6])
        for size in sizes:
            print(f"\nlogistic regression, d = 10, N = {size:.0e}", flush=True)
            table = compare(*simulated(int(size)), options.quick)
            print(table.to_string(float_format="{:.3g}".format), flush=True)
    if "adult" in sections and not options.quick:
        print("\nAdult, d = 11, N = 48,842", flush=True)
        print(compare(*adult(), False).to_string(float_format="{:.3g}".format), flush=True)
    if "exchange" in sections:
        for name, model, x, mean, sd in exchange_cases():
            table = compare_exchange(model, x, mean, sd, 2000 if options.quick else 6000)
            print(f"\n{name}\n{table.to_string(float_format='{:.3g}'.format)}", flush=True)


if __name__ == "__main__":
    main()
