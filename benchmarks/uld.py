"""ULD: bias on Gaussians, cost of a step, and gradients to a given error against peers.

    python benchmarks/uld.py bias        stationary bias of every integrator, exact
    python benchmarks/uld.py time        time of a step over the gradient's, of 64 chains over one's
    python benchmarks/uld.py gradients   gradients until the second moments are right (hours)

Without an argument: `bias` and `time`, which `--quick` repeats less often. The peers of `gradients`
need the extra `bench`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS

from ppl_ext import models, registry
from ppl_ext.kernels import uld
from ppl_ext.kernels.uld_integrators import INTEGRATORS, stationary_covariance
from ppl_ext.numpyro import ULD
from ppl_ext.target import Target, potential_target

# --- stationary bias ---------------------------------------------------------------------------

DIMENSIONS = (10, 100, 1000, 10_000)


def bias() -> None:
    """Bias of the x marginal, from the affine map and the noise of the kernels' own step."""
    print("Friction 2 sqrt(largest curvature); h in units of 1 / sqrt(largest curvature).")
    for kind in ("power law, trace 10", "isotropic"):
        tables: dict[str, dict] = {"KL divergence": {}, "Wasserstein-2 distance": {}}
        for name in (n for n in INTEGRATORS if n != "kbk"):
            for h in (0.1, 0.4):
                for d in DIMENSIONS:
                    lam = np.ones(d) if kind == "isotropic" else power_law(d)
                    # equal modes have equal laws
                    some, copies = (lam[:1], d) if kind == "isotropic" else (lam, 1)
                    unit = math.sqrt(lam.max())
                    variance = stationary_covariance(name, h / unit, 2 * unit, some)[:, 0]
                    kl, w2 = divergences(some, variance)
                    row = f"{name} h={h}"
                    tables["KL divergence"].setdefault(row, {})[d] = copies * kl
                    tables["Wasserstein-2 distance"].setdefault(row, {})[d] = math.sqrt(copies) * w2
        for title, rows in tables.items():
            print(f"\n{title}, {kind}, by dimension")
            print(pd.DataFrame(rows).T.to_string(float_format="{:.3g}".format))
    print("\nKL divergence with a prior of precision 1 added to the power law; friction 2, h = 0.3")
    rows = {
        name: {
            d: divergences(
                power_law(d) + 1,
                stationary_covariance(name, 0.3, 2.0, power_law(d) + 1, np.ones(d))[:, 0],
            )[0]
            for d in DIMENSIONS
        }
        for name in ("ee", "ubu", "kbk")
    }
    print(pd.DataFrame(rows).T.to_string(float_format="{:.3g}".format))


def power_law(d: int, trace: float = 10.0) -> np.ndarray:
    lam = np.arange(1.0, d + 1) ** -2
    return trace * lam / lam.sum()


def divergences(lam: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
    """KL divergence and W2 distance of independent Gaussians from those of precision lam."""
    excess = lam * variance - 1
    kl = 0.5 * np.sum(excess - np.log1p(excess))
    return float(kl), float(np.sqrt(np.sum((np.sqrt(1 + excess) - 1) ** 2 / lam)))


# --- time --------------------------------------------------------------------------------------


def logistic(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def simulated_logistic(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    y = rng.random(n) < 1 / (1 + np.exp(-x @ rng.normal(size=d) / math.sqrt(d)))
    return x, y.astype(np.int32)


def adult() -> tuple[np.ndarray, np.ndarray]:
    """Census income (Becker & Kohavi 1996), N = 48,842: dummies, and standardised numbers.

    Simulated data of the same shape where OpenML cannot be reached.
    """
    try:
        from sklearn.datasets import fetch_openml

        frame, income = fetch_openml("adult", version=2, return_X_y=True, as_frame=True)
    except Exception as error:
        print(f"adult: simulated data of its shape, (48,842, 105): {type(error).__name__}")
        return simulated_logistic(48_842, 105)
    x = pd.get_dummies(frame, drop_first=True).to_numpy(np.float32)
    x = np.column_stack([np.ones(len(x)), (x - x.mean(0)) / x.std(0)])
    return x.astype(np.float32), (income == ">50K").to_numpy(np.int32)


def timing(repeats: int) -> None:
    """Ratios within one run: the competitors take turns, and the medians are compared."""
    cases = {
        "adult logistic regression": (adult(), 20),
        "logistic regression n=500 d=100": (simulated_logistic(500, 100), 300),
        "Gaussian d=10,000": (None, 200),
    }
    for case, (data, steps) in cases.items():
        if data is None:
            lam = jnp.asarray(power_law(10_000), jnp.float32)
            target = potential_target(lambda x, lam=lam: jnp.sum(lam * x**2) / 2, np.zeros(10_000))
            data = ()
        else:
            data = tuple(map(jnp.asarray, data))
            target = registry.target(logistic, *data)
        if target.gaussian_prior is None:
            names = [name for name in INTEGRATORS if name != "kbk"]
        else:
            names = list(INTEGRATORS)
        programs = {"gradient": gradient_loop(target, data, steps)}
        programs |= {name: step_loop(target, data, steps, name) for name in names}
        seconds = take_turns(programs, repeats)
        ratios = pd.Series({name: seconds[name] / seconds["gradient"] for name in names})
        print(f"\n{case}: a gradient takes {1e3 * seconds['gradient'] / steps:.3f} ms")
        print("Time of a step over that of a gradient (rmm and quicksort have two gradients)")
        print(ratios.to_string(float_format="{:.2f}".format), flush=True)

    data = tuple(map(jnp.asarray, cases["adult logistic regression"][0]))
    target = registry.target(logistic, *data)
    one, many = (step_loop(target, data, 5, "baoab", chains) for chains in (None, 64))
    seconds = take_turns({"one": one, "many": many}, min(repeats, 5))
    print(
        f"adult: time per chain of 64 vectorised chains over that of one: "
        f"{seconds['many'] / 64 / seconds['one']:.2f}"
    )


def gradient_loop(target: Target, data: tuple, steps: int) -> Callable[[], Any]:
    @jax.jit
    def loop(x: jax.Array, *data: jax.Array) -> jax.Array:
        grad = jax.grad(lambda x: -target.log_density(x, *data))
        return jax.lax.fori_loop(0, steps, lambda _, x: x - 1e-9 * grad(x), x)

    return lambda: loop(jnp.zeros(target.size), *data)


def step_loop(
    target: Target, data: tuple, steps: int, integrator: str, chains: int | None = None
) -> Callable[[], Any]:
    """One draw of so many steps, adaptation over."""
    settings = uld.Settings(integrator, 1e-3, 1.0, steps, "diag")
    start = target.unravel(jnp.zeros(target.size))

    def first(key: jax.Array, *data: jax.Array) -> Any:
        return uld.init(key, start, target.bind(*data), settings)

    def draw(state: Any, *data: jax.Array) -> Any:
        return uld.step(state, target.bind(*data), settings, 0)

    keys = jax.random.key(0)
    if chains is not None:
        keys, shared = jax.random.split(keys, chains), (0,) + (None,) * len(data)
        first, draw = jax.vmap(first, shared), jax.vmap(draw, shared)
    state, draw = jax.jit(first)(keys, *data), jax.jit(draw)
    return lambda: draw(state, *data)


def take_turns(programs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each program."""
    for program in programs.values():
        jax.block_until_ready(program())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


# --- gradients to a given error ----------------------------------------------------------------

TOLERANCE = 0.01


@dataclass(frozen=True)
class Problem:
    """A density on R^d and its second moments: E x^2 and Var x^2 of each coordinate."""

    target: Target
    second_moment: np.ndarray
    variance: np.ndarray

    def potential(self, x: jax.Array) -> jax.Array:
        return -self.target.log_density(x)


def gaussian(lam: np.ndarray) -> Problem:
    curvature = jnp.asarray(lam, jnp.float32)
    target = potential_target(lambda x: jnp.sum(curvature * x**2) / 2, np.zeros(len(lam)))
    return Problem(target, 1 / lam, 2 / lam**2)


def state_space(y: Any) -> None:
    """Brownian motion seen with noise at each of its times (scales unknown)."""
    drift = numpyro.sample("drift_scale", dist.LogNormal(-2, 1))
    noise = numpyro.sample("noise_scale", dist.LogNormal(-2, 1))
    steps = numpyro.sample("steps", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    numpyro.sample("y", dist.Normal(drift * jnp.cumsum(steps), noise), obs=y)


def item_response(student: Any, item: Any, correct: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.75, 1))
    ability = numpyro.sample("ability", dist.Normal(0, 1).expand([400]).to_event(1))
    difficulty = numpyro.sample("difficulty", dist.Normal(0, 1).expand([100]).to_event(1))
    logits = ability[student] - difficulty[item] + mean
    numpyro.sample("correct", dist.Bernoulli(logits=logits), obs=correct)


def funnel() -> None:
    scale = numpyro.sample("scale", dist.Normal(0, 3))
    numpyro.sample("x", dist.Normal(0, jnp.exp(scale / 2)).expand([9]).to_event(1))


def problems() -> dict[str, Callable[[], Problem]]:
    def model(program: Callable, *args: Any, **kwargs: Any) -> Callable[[], Problem]:
        return lambda: with_reference(program, args, kwargs)

    rng = np.random.default_rng(1)
    walk = 0.1 * np.cumsum(rng.normal(size=1000)) + 0.15 * rng.normal(size=1000)
    student, item = rng.integers(0, 400, 2000), rng.integers(0, 100, 2000)
    logits = rng.normal(size=400)[student] - rng.normal(size=100)[item] + 0.75
    correct = (rng.random(2000) < 1 / (1 + np.exp(-logits))).astype(int)
    found: dict[str, Callable[[], Problem]] = {}
    for name in models.list():
        loaded = models.load(name)
        found[name] = model(loaded.model, *loaded.args, **loaded.kwargs)
    return found | {
        "gaussian_100": lambda: gaussian(np.geomspace(1, 1000, 100)),
        "power_law_1000": lambda: gaussian(power_law(1000)),
        "power_law_10000": lambda: gaussian(power_law(10_000)),
        "state_space": model(state_space, walk),
        "adult": lambda: with_reference(logistic, adult(), {}),
        "item_response": model(item_response, student, item, correct),
        "funnel": model(funnel),
    }


def with_reference(program: Callable, args: tuple, kwargs: dict) -> Problem:
    """Second moments in unconstrained space from four chains of NUTS in float64."""
    with jax.enable_x64(True):
        mcmc = MCMC(
            NUTS(program, dense_mass=False, target_accept_prob=0.95),
            num_warmup=2000,
            num_samples=5000,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(99), *args, **kwargs)
        target = registry.target(program, *args, **kwargs)
        bound = target.bind(*args, **kwargs)
        x = np.asarray(jax.jit(jax.vmap(bound.unconstrain))(mcmc.get_samples()))
    return Problem(
        registry.target(program, *args, **kwargs).bind(*args, **kwargs),
        (x**2).mean(0),
        (x**2).var(0),
    )


# a sampler returns the draws, shape (n, d), and the gradients spent up to each of them
Sampler = Callable[[Problem, jax.Array, jax.Array, int], tuple[np.ndarray, np.ndarray]]


def run_uld(
    problem: Problem, key: jax.Array, start: jax.Array, draws: int, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    kernel = ULD(potential_fn=problem.potential, **options)
    fields = run_numpyro(kernel, key, start, draws, ("num_steps",))
    warm = np.arange(2 * draws) < draws
    # a step of the power method costs a Hessian-vector product, about two gradients
    products = warm + uld.POWER_ITERATIONS * np.append(uld.metric_updates(draws), np.zeros(draws))
    spec = INTEGRATORS[options.get("integrator", "baoab")]
    spent = spec.gradients * fields["num_steps"] + (not spec.grad_at_x) + 2 * products
    return fields["z"][draws:], np.cumsum(spent)[draws:]


def run_nuts(
    problem: Problem, key: jax.Array, start: jax.Array, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    kernel = NUTS(potential_fn=problem.potential)
    fields = run_numpyro(kernel, key, start, draws, ("num_steps",))
    return fields["z"][draws:], np.cumsum(fields["num_steps"])[draws:]


def run_numpyro(
    kernel: Any, key: jax.Array, start: jax.Array, draws: int, names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Draws and extra fields, those of the warm-up first."""
    mcmc = MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)
    mcmc.warmup(key, init_params=start, extra_fields=names, collect_warmup=True)
    warm = {"z": mcmc.get_samples(), **mcmc.get_extra_fields()}
    mcmc.run(mcmc.post_warmup_state.rng_key, extra_fields=names)
    after = {"z": mcmc.get_samples(), **mcmc.get_extra_fields()}
    return {
        name: np.concatenate([np.asarray(warm[name]), np.asarray(after[name])])
        for name in ("z", *names)
    }


def run_mclmc(
    problem: Problem, key: jax.Array, start: jax.Array, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """BlackJAX MCLMC with its own tuning; two gradients per step."""
    import blackjax

    density = lambda x: -problem.potential(x)  # noqa: E731
    steps, key_tune, key_run = 10 * draws, *jax.random.split(key)
    state = blackjax.mcmc.mclmc.init(start, density, key_tune)
    state, params, tuning = blackjax.mclmc_find_L_and_step_size(
        mclmc_kernel=blackjax.mcmc.mclmc.build_kernel(),
        logdensity_fn=density,
        num_steps=steps,
        state=state,
        rng_key=key_tune,
        diagonal_preconditioning=True,
    )
    algorithm = blackjax.mclmc(
        density, params.L, params.step_size, inverse_mass_matrix=params.inverse_mass_matrix
    )

    def step(state: Any, key: jax.Array) -> Any:
        state, _ = algorithm.step(key, state)
        return state, state.position

    _, x = jax.jit(lambda s, k: jax.lax.scan(step, s, k))(state, jax.random.split(key_run, steps))
    return np.asarray(x), 2 * (int(tuning) + np.arange(1, steps + 1))


def run_adjusted_mclmc(
    problem: Problem, key: jax.Array, start: jax.Array, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """BlackJAX's adjusted MCLMC (MAMS), its own tuning, random lengths; two gradients per step."""
    import blackjax

    mams = blackjax.mcmc.adjusted_mclmc_dynamic
    density = lambda x: -problem.potential(x)  # noqa: E731
    proposals, (key_init, key_tune, key_run) = 4 * draws, jax.random.split(key, 3)
    length = mams.make_random_trajectory_length_fn(True)
    state, params, tuning = blackjax.adjusted_mclmc_find_L_and_step_size(
        mclmc_kernel=mams.build_kernel(integration_steps_fn=length),
        logdensity_fn=density,
        num_steps=proposals,
        state=mams.init(start, density, key_init),
        rng_key=key_tune,
        target=0.9,
    )
    algorithm = blackjax.adjusted_mclmc_dynamic(
        density,
        params.step_size,
        inverse_mass_matrix=params.inverse_mass_matrix,
        integration_steps_fn=length,
        integration_steps_params=(params.L / params.step_size,),
    )

    def step(state: Any, key: jax.Array) -> Any:
        state, info = algorithm.step(key, state)
        return state, (state.position, info.num_integration_steps)

    _, (x, n) = jax.jit(lambda s, k: jax.lax.scan(step, s, k))(
        state, jax.random.split(key_run, proposals)
    )
    return np.asarray(x), 2 * (float(np.sum(tuning)) + np.cumsum(n))


SAMPLERS: dict[str, Sampler] = {
    "ULD": run_uld,
    "NUTS": run_nuts,
    "MCLMC": run_mclmc,
    "MAMS": run_adjusted_mclmc,
}


def gradients(only: list[str], seeds: int, draws: int) -> None:
    """Gradients, warm-up included, from which on the squared error stays below the tolerance.

    The error is that of the mean of x^2 over the draws so far, relative to Var x^2: its mean over
    coordinates, and the worst one.
    """
    table: dict[tuple[str, str], dict[str, str]] = {}
    for name, make in problems().items():
        if only and name not in only:
            continue
        problem = make()
        for sampler, run in SAMPLERS.items():
            results = []
            for seed in range(seeds):
                # the same starting points for all
                start = jax.random.normal(jax.random.key(seed), (problem.target.size,))
                try:
                    x, spent = run(problem, jax.random.key(1000 + seed), start, draws)
                except ImportError:
                    print(f"{sampler}: left out, it needs the extra `bench`")
                    break
                results.append(spent_until(problem, x, spent))
            if results:
                quartiles = np.percentile(results, [25, 50, 75], axis=0, method="nearest").T
                table[name, sampler] = dict(
                    zip(("mean", "worst"), map(_readable, quartiles), strict=True)
                )
                print(name, sampler, table[name, sampler], flush=True)
    print(f"\nGradients until b^2 < {TOLERANCE}: median (quartiles) over {seeds} seeds")
    print(pd.DataFrame(table).T.to_string())


def spent_until(problem: Problem, x: np.ndarray, spent: np.ndarray) -> tuple[float, float]:
    count = np.arange(1, len(x) + 1)[:, None]
    moment = np.cumsum(x.astype(np.float64) ** 2, 0) / count
    error = (moment - problem.second_moment) ** 2 / problem.variance
    return first_stay(error.mean(1), spent), first_stay(error.max(1), spent)


def first_stay(error: np.ndarray, spent: np.ndarray) -> float:
    """Gradients at the draw from which on the error stays below the tolerance."""
    above = np.flatnonzero(~(error < TOLERANCE))
    first = 0 if above.size == 0 else above[-1] + 1
    return float(spent[first]) if first < len(spent) else math.inf


def _readable(quartiles: np.ndarray) -> str:
    low, median, high = (f"{q:.2g}" if np.isfinite(q) else "never" for q in quartiles)
    return f"{median} ({low}, {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("bias", "time", "gradients"))
    parser.add_argument("--problems", nargs="*", default=[], help="of `gradients`; default: all")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="`time` with three repeats")
    parser.add_argument("--draws", type=int, default=1000, help="in warm-up, and after it")
    options = parser.parse_args()
    if options.part in (None, "bias"):
        bias()
    if options.part in (None, "time"):
        timing(3 if options.quick else 9)
    if options.part == "gradients":
        gradients(options.problems, options.seeds, options.draws)


if __name__ == "__main__":
    main()
