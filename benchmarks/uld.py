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
from functools import partial
from pathlib import Path
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
    """Census income above 50,000 dollars on ten predictors and a constant, N = 48,842."""
    with np.load(Path(__file__).with_name("data") / "adult_logistic.npz") as stored:
        return stored["X"], stored["y"].astype(np.int32)


def timing(repeats: int) -> None:
    """Ratios within one run: the competitors take turns, and the fastest turns are compared."""
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
        programs = {
            "gradient": gradient_loop(target, data, steps),
            "with value": gradient_loop(target, data, steps, with_value=True),
        }
        programs |= {name: step_loop(target, data, steps, name) for name in names}
        seconds = take_turns(programs, repeats)
        ratios = pd.DataFrame(
            {
                f"over {what}": {name: seconds[name] / seconds[what] for name in names}
                for what in ("gradient", "with value")
            }
        )
        print(
            f"\n{case}: a gradient takes {1e3 * seconds['gradient'] / steps:.3f} ms, with the "
            f"value of the density {1e3 * seconds['with value'] / steps:.3f} ms"
        )
        print("Time of a step over both (rmm and quicksort have two gradients)")
        print(ratios.to_string(float_format="{:.2f}".format), flush=True)

    data = tuple(map(jnp.asarray, cases["adult logistic regression"][0]))
    target = registry.target(logistic, *data)
    one, many = (step_loop(target, data, 5, "baoab", chains) for chains in (None, 64))
    seconds = take_turns({"one": one, "many": many}, min(repeats, 5))
    print(
        f"adult: time per chain of 64 vectorised chains over that of one: "
        f"{seconds['many'] / 64 / seconds['one']:.2f}"
    )


def gradient_loop(
    target: Target, data: tuple, steps: int, with_value: bool = False
) -> Callable[[], Any]:
    """Gradients, one after the other; `with_value`, the density is needed, too."""

    @jax.jit
    def loop(x: jax.Array, *data: jax.Array) -> jax.Array:
        value_and_grad = jax.value_and_grad(lambda x: -target.log_density(x, *data))

        def move(_: Any, x: jax.Array) -> jax.Array:
            value, grad = value_and_grad(x)
            return x - 1e-9 * (grad + value if with_value else grad)

        return jax.lax.fori_loop(0, steps, move, x)

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
    """Least seconds of each program: other processes on the machine only add to them."""
    for program in programs.values():
        jax.block_until_ready(program())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


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


# these take minutes per seed: a gradient is dear, or the dimension large
DEAR = ("lotka_volterra", "power_law_10000", "adult")


def problems() -> dict[str, Callable[[], Problem]]:
    """The cheap ones first."""

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
    found |= {
        "gaussian_100": lambda: gaussian(np.geomspace(1, 1000, 100)),
        "funnel": model(funnel),
        "power_law_1000": lambda: gaussian(power_law(1000)),
        "item_response": model(item_response, student, item, correct),
        "state_space": model(state_space, walk),
        "adult": lambda: with_reference(logistic, adult(), {}, 300, 1500),
        "power_law_10000": lambda: gaussian(power_law(10_000)),
    }
    return dict(sorted(found.items(), key=lambda item: item[0] in DEAR))


def with_reference(
    program: Callable, args: tuple, kwargs: dict, warmup: int = 2000, draws: int = 5000
) -> Problem:
    """Second moments in unconstrained space from four chains of NUTS in float64."""
    with jax.enable_x64(True):
        mcmc = MCMC(
            NUTS(program, target_accept_prob=0.95),
            num_warmup=warmup,
            num_samples=draws,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(99), *args, **kwargs)
        bound = registry.target(program, *args, **kwargs).bind(*args, **kwargs)
        x = np.asarray(jax.jit(jax.vmap(bound.unconstrain))(mcmc.get_samples()))
    # the samplers run in 32 bits
    args, kwargs = jax.tree.map(_narrow, (args, kwargs))
    target = registry.target(program, *args, **kwargs).bind(*args, **kwargs)
    return Problem(target, (x**2).mean(0), (x**2).var(0))


def _narrow(data: Any) -> np.ndarray:
    data = np.asarray(data)
    dtype = {"f": np.float32, "i": np.int32}.get(data.dtype.kind, data.dtype)
    return data.astype(dtype)


# one draw: state -> state, position, gradients
Draw = Callable[[Any], tuple[Any, jax.Array, jax.Array]]
# a sampler, warmed up from a start: its state, the gradients spent, and how it draws
Sampler = Callable[[Callable, jax.Array, jax.Array, int], tuple[Any, jax.Array, Draw]]


def run_uld(
    potential: Callable, key: jax.Array, start: jax.Array, warmup: int, **options: Any
) -> tuple[Any, jax.Array, Draw]:
    kernel = ULD(potential_fn=potential, **options)
    spec = kernel.settings.spec
    # a Hessian-vector product costs about two gradients
    products = uld.LANCZOS_STEPS + uld.curvature_products(kernel.settings, warmup).sum()
    return warm_up(
        kernel,
        key,
        start,
        warmup,
        2 * int(products),
        lambda state: spec.gradients * state.num_steps + (not spec.grad_at_x),
    )


def run_nuts(
    potential: Callable, key: jax.Array, start: jax.Array, warmup: int, **options: Any
) -> tuple[Any, jax.Array, Draw]:
    # the search for a first step size is not counted
    kernel = NUTS(potential_fn=potential, **options)
    return warm_up(kernel, key, start, warmup, 0, lambda state: state.num_steps)


def warm_up(
    kernel: Any,
    key: jax.Array,
    start: jax.Array,
    warmup: int,
    spent: int,
    gradients: Callable[[Any], jax.Array],
) -> tuple[Any, jax.Array, Draw]:
    def draw(state: Any) -> tuple[Any, jax.Array, jax.Array]:
        state = kernel.sample(state, (), {})
        return state, state.z, gradients(state)

    def body(_: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, _, cost = draw(carry[0])
        return state, carry[1] + cost

    state = kernel.init(key, warmup, start, (), {})
    return *jax.lax.fori_loop(0, warmup, body, (state, jnp.asarray(spent))), draw


def run_mclmc(
    potential: Callable, key: jax.Array, start: jax.Array, warmup: int
) -> tuple[Any, jax.Array, Draw]:
    """BlackJAX MCLMC with its own tuning of about `warmup` steps; two gradients per step."""
    import blackjax

    density = lambda x: -potential(x)  # noqa: E731
    key_tune, key_run = jax.random.split(key)
    state, params, steps = blackjax.mclmc_find_L_and_step_size(
        mclmc_kernel=blackjax.mcmc.mclmc.build_kernel(),
        logdensity_fn=density,
        num_steps=3 * warmup,
        state=blackjax.mcmc.mclmc.init(start, density, key_tune),
        rng_key=key_tune,
    )
    algorithm = blackjax.mclmc(
        density, params.L, params.step_size, inverse_mass_matrix=params.inverse_mass_matrix
    )

    def draw(carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        key, key_step = jax.random.split(carry[1])
        state, _ = algorithm.step(key_step, carry[0])
        return (state, key), state.position, jnp.asarray(2)

    return (state, key_run), jnp.asarray(2 * steps), draw


def run_adjusted_mclmc(
    potential: Callable, key: jax.Array, start: jax.Array, warmup: int
) -> tuple[Any, jax.Array, Draw]:
    """BlackJAX's adjusted MCLMC (MAMS), its own tuning, random lengths; two gradients per step."""
    import blackjax

    mams = blackjax.mcmc.adjusted_mclmc_dynamic
    density = lambda x: -potential(x)  # noqa: E731
    key_init, key_tune, key_run = jax.random.split(key, 3)
    length = mams.make_random_trajectory_length_fn(True)
    state, params, steps = blackjax.adjusted_mclmc_find_L_and_step_size(
        mclmc_kernel=mams.build_kernel(integration_steps_fn=length),
        logdensity_fn=density,
        # it takes three tenths of this for its tuning
        num_steps=10 * warmup // 3,
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

    def draw(carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        key, key_step = jax.random.split(carry[1])
        state, info = algorithm.step(key_step, carry[0])
        return (state, key), state.position, 2 * info.num_integration_steps

    return (state, key_run), 2 * jnp.asarray(steps, jnp.int32), draw


# with the lengths of warm-up that are tried, and the number of draws
SAMPLERS: dict[str, tuple[Sampler, tuple[int, ...], int]] = {
    "ULD": (run_uld, (300, 1000), 2000),
    "NUTS": (run_nuts, (300, 1000), 2000),
    "MCLMC": (run_mclmc, (1000, 3000), 30_000),
    "MAMS": (run_adjusted_mclmc, (1000, 3000), 10_000),
}
# correlations above 0.99, which a diagonal metric cannot see
DENSE = ("kilpisjarvi", "kidscore_interaction")
SAMPLERS_DENSE: dict[str, tuple[Sampler, tuple[int, ...], int]] = {
    "ULD dense": (partial(run_uld, precondition="dense"), (300, 1000), 2000),
    "NUTS dense": (partial(run_nuts, dense_mass=True), (300, 1000), 2000),
}


def gradients(only: list[str], seeds: int, warmup: str) -> None:
    """Gradients, warm-up included, from which on the squared error stays below the tolerance.

    The error is that of the mean of x^2 over the draws so far, relative to Var x^2: its mean over
    coordinates, and the worst one. All start at the same points; the lengths of warm-up with the
    smaller median count.
    """
    print(f"Gradients until b^2 < {TOLERANCE}: median (quartiles) over seeds, warm-up in brackets")
    medians: dict[str, dict[tuple[str, str], float]] = {}
    for name, make in problems().items():
        if only and name not in only:
            continue
        problem = make()
        for sampler, (setup, lengths, draws) in (
            SAMPLERS | (SAMPLERS_DENSE if name in DENSE else {})
        ).items():
            lengths = {"short": lengths[:1], "long": lengths[1:], "both": lengths}[warmup]
            chains = max(1, seeds // 4) if name in DEAR else seeds
            began = time.perf_counter()
            try:
                spent = {w: spent_until(problem, setup, w, draws, chains) for w in lengths}
            except ImportError:
                print(f"{sampler}: left out, it needs the extra `bench`")
                continue
            cells = []
            for j, measure in enumerate(("mean", "worst")):
                best = min(lengths, key=lambda w, j=j: (median(spent[w][:, j]), w))
                medians.setdefault(sampler, {})[name, measure] = median(spent[best][:, j])
                cells.append(f"{measure} {_readable(spent[best][:, j])} [{best}]")
            took = time.perf_counter() - began
            print(
                f"{name:26} {sampler:10} {chains:2} seeds  {'  '.join(cells):75} {took:4.0f} s",
                flush=True,
            )
    table = pd.DataFrame(medians)
    for peer in (s for s in table if s != "ULD" and "dense" not in s):
        ratio = (table["ULD"] / table[peer])[np.isfinite(table[peer])].unstack()
        print(f"ULD over {peer}, median of the problems that {peer} solves:")
        print(ratio.median().to_string(float_format="{:.2f}".format), flush=True)


def spent_until(
    problem: Problem, setup: Sampler, warmup: int, draws: int, chains: int
) -> np.ndarray:
    """Gradients for the mean and the worst squared error, shape (chains, 2)."""
    moment = jnp.asarray(problem.second_moment, jnp.float32)
    variance = jnp.asarray(problem.variance, jnp.float32)

    @jax.jit
    @jax.vmap
    def run(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = jax.random.normal(jax.random.key(seed), moment.shape)
        state, spent, draw = setup(problem.potential, jax.random.key(1000 + seed), start, warmup)

        def body(carry: Any, n: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            state, spent, mean = carry
            state, x, cost = draw(state)
            mean += (x**2 - mean) / n
            error = (mean - moment) ** 2 / variance
            spent = spent + cost
            return (state, spent, mean), (spent, jnp.stack([error.mean(), error.max()]))

        carry = state, spent, jnp.zeros_like(moment)
        return jax.lax.scan(body, carry, jnp.arange(1.0, draws + 1))[1]

    spent, errors = map(np.asarray, run(jnp.arange(chains)))
    return np.array(
        [[first_stay(e, s) for e in error.T] for s, error in zip(spent, errors, strict=True)]
    )


def first_stay(error: np.ndarray, spent: np.ndarray) -> float:
    """Gradients at the draw from which on the error stays below the tolerance."""
    above = np.flatnonzero(~(error < TOLERANCE))
    first = 0 if above.size == 0 else above[-1] + 1
    return float(spent[first]) if first < len(spent) else math.inf


def median(values: np.ndarray) -> float:
    return float(np.percentile(values, 50, method="nearest"))


def _readable(values: np.ndarray) -> str:
    quartiles = np.percentile(values, [25, 50, 75], method="nearest")
    low, middle, high = (f"{q:.2g}" if np.isfinite(q) else "never" for q in quartiles)
    return f"{middle} ({low}, {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("bias", "time", "gradients"))
    parser.add_argument("--problems", nargs="*", default=[], help="of `gradients`; default: all")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="`time` with three repeats")
    parser.add_argument("--warmup", choices=("short", "long", "both"), default="both")
    options = parser.parse_args()
    if options.part in (None, "bias"):
        bias()
    if options.part in (None, "time"):
        timing(3 if options.quick else 15)
    if options.part == "gradients":
        gradients(options.problems, options.seeds, options.warmup)


if __name__ == "__main__":
    main()
