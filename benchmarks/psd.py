"""Evidence for the polynomial Stein discrepancy: tables in Markdown, on standard output.

    python benchmarks/psd.py [SECTION ...] [--replicates N] [--quick]

Sections: analytic, level, lambda, power, posteriors, time; by default all. At their full number of
replicates (1,000 for levels, 2,000 for powers) `level` takes half an hour of one core, `lambda`
80 minutes and `power` two hours; `--replicates` bounds them. Set OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.signal
from scipy import stats

from ppl_ext import models, registry
from ppl_ext.diagnostics import TooFewDrawsError, ksd, psd, psd_test
from ppl_ext.diagnostics.features import n_features

HERE = Path(__file__).parent
ANALYTIC = HERE.parent / "tests" / "diagnostics" / "data" / "psd_analytic.json"
PUBLISHED = HERE / "data" / "published_psd_power.json"
LEVEL, QUICK_REPLICATES = 0.05, 10
Draw = Callable[[np.random.Generator], Any]
PAPER = {"basis": "monomial", "standardize": None}


def table(title: str, columns: list[str], rows: Iterator[list[str]]) -> None:
    """Print a Markdown table, each row as soon as there is one."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def analytic(_: int | None) -> None:
    """Population values: six draws with the moments of N(0, 1) to degree 5."""
    known = json.loads(ANALYTIC.read_text())
    normal = np.sqrt(3.0) * np.array([-1.0, 0, 0, 0, 0, 1])
    options = PAPER | {"joint": True, "interactions": True}

    def rows() -> Iterator[list[str]]:
        for case in known["cases"]:
            mean, variance = map(float, re.findall(r"[-\d.]+", case["Q"]))
            x = (mean + np.sqrt(variance) * normal)[None]
            found = float(psd(x, -x, order=case["r"], **options))
            error = abs(found - case["PSD"])
            yield [case["Q"], str(case["r"]), f"{case['PSD']:.6f}", f"{found:.6f}", f"{error:.0e}"]
        rho, expected = known["two_d"]["example"].values()
        z = np.array(list(itertools.product(normal, repeat=2)))
        x = (z @ np.linalg.cholesky([[1, rho], [rho, 1]]).T)[None]
        found = float(psd(x, -x, order=2, **options))
        error = abs(found - expected)
        yield [f"correlation {rho}", "2", f"{expected:.6f}", f"{found:.6f}", f"{error:.0e}"]

    table(
        "Population values of the monomial discrepancy from N(0, 1)",
        ["draws", "order", "exact", "found", "error"],
        rows(),
    )


def rates(draw: Draw, replicates: int, tests: list[dict[str, Any]]) -> list[str]:
    """Return each test's rejection rate at `LEVEL` over the same draws; refusals count apart."""
    rng = np.random.default_rng(1)
    rejected, refused = np.zeros(len(tests), int), np.zeros(len(tests), int)
    for _ in range(replicates):
        x = draw(rng)
        for i, options in enumerate(tests):
            try:
                rejected[i] += psd_test(x, -x, n_boot=199, **options).pvalue <= LEVEL
            except TooFewDrawsError:
                refused[i] += 1
    return [
        "refused"
        if no == replicates
        else f"{yes / (replicates - no):.3f}" + (f" ({no})" if no else "")
        for yes, no in zip(rejected, refused, strict=True)
    ]


def level(replicates: int | None) -> None:
    """Rejection of exact draws: four stationary AR(1) chains of d = 5."""
    replicates = replicates or 1000
    columns: dict[str, dict[str, Any]] = {
        "`batch`": {},
        "`batch`, diag": {"standardize": "diag"},
        "`max`": {"method": "max"},
        "`gamma`": {"method": "gamma"},
        "`hotelling`": {"method": "hotelling"},
        "`lambda`": {"method": "lambda"},
        "`iid`": {"method": "iid"},
        "`batch`, order 4": {"order": 4},
        "`max`, order 4": {"order": 4, "method": "max"},
    }

    def rows() -> Iterator[list[str]]:
        for rho, n in ((0.0, 500), (0.5, 500), (0.8, 500), (0.9, 2000), (0.95, 5000)):

            def draw(rng: np.random.Generator, rho: float = rho, n: int = n) -> Any:
                noise = rng.normal(size=(4, n, 5))
                noise[:, 1:] *= np.sqrt(1 - rho**2)
                return scipy.signal.lfilter([1.0], [1.0, -rho], noise, axis=1)

            tau = (1 + rho) / (1 - rho)
            tests = [{"interactions": True} | options for options in columns.values()]
            yield [f"{tau:.0f}", f"4 x {n}", *rates(draw, replicates, tests)]

    table(
        f"Rejection of exact draws at a level of {LEVEL}, d = 5, {replicates} replicates "
        "(in brackets: refused)",
        ["autocorrelation time", "draws", *columns],
        rows(),
    )


ALTERNATIVES: dict[str, Callable[..., Any]] = {
    "null": lambda rng, n, d: rng.normal(size=(1, n, d)),
    "perturbed_gauss": lambda rng, n, d: (
        rng.normal(size=(1, n, d)) * np.sqrt(1 + 0.7 * (np.arange(d) == 0))
    ),
    "gauss_t": lambda rng, n, d: rng.standard_t(5, size=(1, n, d)),
    "laplace": lambda rng, n, d: rng.laplace(scale=np.sqrt(0.5), size=(1, n, d)),
}


def alternative(name: str, n: int, d: int) -> Draw:
    """Return the function that draws from an alternative of the published experiments."""
    return lambda rng: ALTERNATIVES[name](rng, n, d)


def published_power(replicates: int | None) -> None:
    """The published power of lambda-PSD and of its sum at unit weights."""
    replicates = replicates or 2000
    tests = {f"psd_Q{q}": (q + 1, "unit") for q in range(5)} | {
        f"wpsd_Q{q}": (q + 1, "fitted") for q in (1, 3)
    }
    common = {"method": "lambda", "train_fraction": 0.7, "standardize": None}
    options = [{"order": order, "lambda_weights": kind} | common for order, kind in tests.values()]
    for name, known in json.loads(PUBLISHED.read_text())["experiments"].items():
        found = [rates(alternative(name, known["n"], d), replicates, options) for d in known["d"]]
        expected = [known["rejection_rate"][test] for test in tests]
        pairs = [
            list(zip(row, published, strict=True))
            for row, published in zip(zip(*found, strict=True), expected, strict=True)
        ]
        table(
            f"Power of method `lambda`, found / published (100 replicates): {known['alternative']},"
            f" n = {known['n']}, {replicates} replicates",
            ["order", "weights", *(f"d = {d}" for d in known["d"])],
            (
                [str(order), kind, *(f"{ours} / {theirs:.2f}" for ours, theirs in row)]
                for (order, kind), row in zip(tests.values(), pairs, strict=True)
            ),
        )
        differences = [
            abs(float(ours.split()[0]) - theirs)
            for (_, kind), row in zip(tests.values(), pairs, strict=True)
            for ours, theirs in row
            if kind == "unit"
        ]
        print(f"\nLargest difference at unit weights: {max(differences):.3f}.", flush=True)


def power(replicates: int | None) -> None:
    """Power of the polynomial statistic itself on the same alternatives."""
    replicates = replicates or 2000
    kinds = {
        "monomial, as they are, `iid`": PAPER | {"method": "iid"},
        "Hermite, whitened, `batch`": {"method": "batch"},
        "Hermite, whitened, `max`": {"method": "max"},
    }
    orders, dimensions = (1, 2, 3, 4), (2, 4, 8, 16)
    for name, known in json.loads(PUBLISHED.read_text())["experiments"].items():
        found = {}
        for d in dimensions:
            tests = {
                (order, label): {"order": order, "interactions": True} | options
                for order, (label, options) in itertools.product(orders, kinds.items())
                if n_features(d, order, True) <= 500
            }
            powers = rates(
                alternative(name, known["n"], d),
                replicates,
                list(tests.values()),
            )
            found |= {(*test, d): power for test, power in zip(tests, powers, strict=True)}
        published = dict(zip(known["d"], known["rejection_rate"]["IMQ KSD"], strict=True))
        table(
            f"Power of the polynomial statistic: {known['alternative']}, n = {known['n']}, "
            f"{replicates} replicates",
            ["order", "test", *(f"d = {d}" for d in dimensions)],
            iter(
                [
                    *(
                        [str(order), label, *(found.get((order, label, d), "") for d in dimensions)]
                        for order, label in itertools.product(orders, kinds)
                    ),
                    ["", "IMQ KSD, published", *(f"{published[d]:.2f}" for d in dimensions)],
                ]
            ),
        )


def predicted_power(covariance: np.ndarray, j: int, factor: float, n: int) -> float:
    """Power of n independent draws of a normal law of which one scale is too large.

    With the eigenvalues v of the wrong covariance relative to the right one, the whitened Hermite
    statistic of order 2 is chi-squared with noncentrality n sum (1 - v)^2 / 2.
    """
    scale = np.where(np.arange(len(covariance)) == j, factor, 1.0)
    v = np.linalg.eigvals(np.linalg.solve(covariance, covariance * np.outer(scale, scale))).real
    freedom = n_features(len(covariance), 2, True)
    critical = stats.chi2.isf(LEVEL, freedom)
    return float(stats.ncx2.sf(critical, freedom, n * np.square(1 - v).sum() / 2))


def unconstrained_draws(problem: Any) -> tuple[Any, np.ndarray]:
    """Return the target of a problem, and its reference draws, shape (n, d), in random order."""
    target = registry.target(problem.model, *problem.args, **problem.kwargs)
    sites = {}
    for site, shape in problem.shapes.items():
        parts = [v for k, v in problem.draws.items() if k == site or k.startswith(f"{site}[")]
        sites[site] = np.stack(parts, axis=-1).reshape(-1, *shape)
    if "theta_trans" in {site.name for site in target.latent}:  # of eight_schools_noncentered
        sites["theta_trans"] = (sites["theta"] - sites["mu"][:, None]) / sites["tau"][:, None]
    latent = {site.name: sites[site.name] for site in target.latent}

    def unconstrain(draw: Any) -> Any:
        return target.unconstrain(draw, *problem.args, **problem.kwargs)

    z = np.asarray(jax.jit(jax.vmap(unconstrain))(latent))
    return target, np.random.default_rng(1).permutation(z)


def posteriors(_: int | None) -> None:
    """Reference draws, and the same with one unconstrained scale times 1.15."""
    jax.config.update("jax_enable_x64", True)
    columns: dict[str, dict[str, Any]] = {
        "`batch`, full": {},
        "`batch`, diag": {"standardize": "diag"},
        "`max`, full": {"method": "max"},
        "`max`, diag": {"method": "max", "standardize": "diag"},
    }

    def rows() -> Iterator[list[str]]:
        for name in models.list():
            problem = models.load(name)
            if problem.draws is None:
                continue
            target, everything = unconstrained_draws(problem)

            def log_density(z: Any, target: Any = target, problem: Any = problem) -> Any:
                return target.log_density(z, *problem.args, **problem.kwargs)

            for n in (1000, len(everything)):
                z = everything[None, :n]
                pvalues = [
                    f"{psd_test(z, log_density, **options).pvalue:.3f}"
                    for options in columns.values()
                ]
                yield [name, str(n), "none", "", *pvalues]
                covariance = np.cov(everything.T)
                for j in range(z.shape[2]) if n == 1000 else ():
                    wrong = z.copy()
                    wrong[..., j] += 0.15 * (z[..., j] - z[..., j].mean())
                    pvalues = [
                        f"{psd_test(wrong, log_density, **options).pvalue:.3f}"
                        for options in columns.values()
                    ]
                    predicted = predicted_power(covariance, j, 1.15, n)
                    yield [name, str(n), f"z[{j}] x 1.15", f"{predicted:.2f}", *pvalues]

    table(
        "p-values of reference draws, and of the same with one scale too large (order 2)",
        ["posterior", "draws", "change", "predicted power", *columns],
        rows(),
    )


def seconds(function: Callable[[], Any], least: float = 0.5) -> float:
    """Return the least CPU time of a call among those that fit into `least` seconds.

    Set OPENBLAS_NUM_THREADS=1: the time of all threads counts, and waiting ones spin.
    """
    function()  # imports and caches
    times: list[float] = []
    while not times or sum(times) < least:
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def run_times(_: int | None) -> None:
    """CPU seconds for the joint statistic of d = 10; scores are given."""

    def rows() -> Iterator[list[str]]:
        for n in (1000, 10_000, 100_000, 1_000_000):
            x = np.random.default_rng(0).normal(size=(4, n // 4, 10))
            s = -x
            orders = (1, 2, 3, 4) if n < 1_000_000 else (1, 2)
            times = [
                seconds(lambda x=x, s=s, r=r: psd(x, s, order=r, joint=True, interactions=True))
                for r in orders
            ]
            row = [f"{n:,}", *(f"{t:.2g}" for t in times), *[""] * (4 - len(times))]
            if n <= 10_000:
                kernel = seconds(lambda x=x, s=s: ksd(x, s, joint=True))
                row += [f"{kernel:.2g}", f"{kernel / times[1]:.0f}"]
            yield [*row, *[""] * (7 - len(row))]

    table(
        "CPU seconds for the joint discrepancy of d = 10 coordinates with interactions",
        ["draws", "order 1", "order 2", "order 3", "order 4", "KSD", "KSD / order 2"],
        rows(),
    )


SECTIONS = {
    "analytic": analytic,
    "level": level,
    "lambda": published_power,
    "power": power,
    "posteriors": posteriors,
    "time": run_times,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--replicates", type=int, help="instead of 1,000 or 2,000")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPLICATES} replicates")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"no section {sorted(unknown)}; there are {list(SECTIONS)}")
    replicates = QUICK_REPLICATES if arguments.quick else arguments.replicates
    warnings.simplefilter("ignore")
    for name in arguments.sections or SECTIONS:
        SECTIONS[name](replicates)


if __name__ == "__main__":
    main()
