"""The demonstration: ULD and NUTS on two real posteriors, against reference posteriors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pandas as pd
from numpyro.infer import MCMC, NUTS

from ppl_ext import models
from ppl_ext.convert import to_arviz
from ppl_ext.diagnostics import check, psd, summary, uld_report
from ppl_ext.models import Problem
from ppl_ext.numpyro import ULD

PROBLEMS = ("eight_schools_noncentered", "nes2000")
NUM_CHAINS, NUM_WARMUP, NUM_SAMPLES = 4, 500, 1000


@dataclass(frozen=True)
class Result:
    """One kernel on one problem."""

    problem: Problem
    kernel: str
    mcmc: MCMC
    data: Any
    gradients: int
    seconds: float

    def errors(self) -> pd.DataFrame:
        """Errors of mean and standard deviation in reference standard deviations."""
        draws = self.problem.flat(self.mcmc.get_samples())
        return pd.DataFrame(
            {
                name: {
                    "mean error": (draws[name].mean() - ref["mean"]) / ref["sd"],
                    "sd error": draws[name].std() / ref["sd"] - 1,
                }
                for name, ref in self.problem.reference.items()
            }
        ).T


def run(output: str) -> None:
    """Sample, print the tables and write the picture to `output`."""
    results = [
        _sample(models.load(name), kernel, algorithm)
        for name in PROBLEMS
        for kernel, algorithm in (("ULD", ULD), ("NUTS", NUTS))
    ]
    for result in results:
        errors = result.errors().abs()
        print(f"\n=== {result.problem.name}, {result.kernel} ===")
        print(summary(result.data).to_string())
        print(
            f"error against the reference posterior, in its sd: means at most "
            f"{errors['mean error'].max():.3f}, sds at most {errors['sd error'].max():.3f}"
        )
        print(
            f"gradients after warm-up: {result.gradients:,}; seconds, compilation included: "
            f"{result.seconds:.1f}"
        )
        if result.kernel == "ULD":
            print(uld_report(result.mcmc))
        print(check(result.data))
    _picture(results, output)
    print(f"\npicture: {output}")


def _sample(problem: Problem, kernel: str, algorithm: Any) -> Result:
    mcmc = MCMC(
        algorithm(problem.model),
        num_warmup=NUM_WARMUP,
        num_samples=NUM_SAMPLES,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(
        jax.random.key(0),
        *problem.args,
        **problem.kwargs,
        extra_fields=("num_steps", "z_grad"),
    )
    gradients = int(mcmc.get_extra_fields()["num_steps"].sum())
    seconds = time.perf_counter() - start
    return Result(problem, kernel, mcmc, to_arviz(mcmc), gradients, seconds)


def _picture(results: list[Result], output: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(PROBLEMS), 3, figsize=(13, 3.6 * len(PROBLEMS)))
    styles = {"ULD": dict(color="C0", marker="o"), "NUTS": dict(color="C1", marker="s")}
    for row, name in zip(axes, PROBLEMS, strict=True):
        mine = [result for result in results if result.problem.name == name]
        reference = mine[0].problem.reference
        for offset, result in zip((-0.15, 0.15), mine, strict=True):
            draws, style = result.problem.flat(result.mcmc.get_samples()), styles[result.kernel]
            intervals = []
            for parameter, ref in reference.items():
                standard = (draws[parameter] - ref["mean"]) / ref["sd"]
                intervals.append(np.quantile(standard, (0.05, 0.5, 0.95)))
            low, middle, high = np.array(intervals).T
            where = np.arange(len(reference)) + offset
            row[0].errorbar(
                middle,
                where,
                xerr=[middle - low, high - middle],
                fmt=style["marker"],
                color=style["color"],
                markersize=4,
                label=result.kernel,
            )
            values = psd(result.data)
            values = values.to_dataset() if hasattr(values, "to_dataset") else values
            features = np.concatenate([np.ravel(values[v].values) for v in values.data_vars])
            row[1].plot(features, style["marker"], color=style["color"], label=result.kernel)
        for place, ref in enumerate(reference.values()):
            ends = [(ref[q] - ref["mean"]) / ref["sd"] for q in ("q5", "q95")]
            row[0].plot(ends, [place, place], color="0.8", linewidth=9, zorder=0)
        row[0].set_yticks(range(len(reference)), list(reference), fontsize=7)
        row[0].set(xlabel="posterior, in reference sds (grey: reference 90 %)", title=name)
        row[1].set(xlabel="unconstrained coordinate", ylabel="Stein discrepancy", ylim=(0, None))
        row[1].set_title("polynomial Stein discrepancy, order 2")
        parameter = list(reference)[-1]
        trace = mine[0].problem.flat(mine[0].mcmc.get_samples(group_by_chain=True))[parameter]
        for chain in trace:
            row[2].plot(chain, linewidth=0.4)
        row[2].set(xlabel="draw", ylabel=parameter, title=f"ULD, {len(trace)} chains")
        row[0].legend(fontsize=7)
        row[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)
