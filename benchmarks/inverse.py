"""Proximal-IMH: acceptance by operator error, effective draws per exact solve, and a picture.

    python benchmarks/inverse.py acceptance   a linear elliptic operator at four errors
    python benchmarks/inverse.py solves       effective draws per exact solve, against peers
    python benchmarks/inverse.py picture      1,024 unknowns in the plane; writes docs/inverse.png

Without an argument: all of them. `--quick`: a tenth of the draws, the elliptic problem only, no
picture. The picture needs the extra `plots`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import HMC, MCMC, NUTS

from ppl_ext.diagnostics import imh_report
from ppl_ext.kernels import proximal_imh as imh
from ppl_ext.numpyro import ProximalIMH
from ppl_ext.numpyro.target import target

HERE = Path(__file__).parent
CASES = json.loads((HERE / "data" / "inverse_problems.json").read_text())["cases"]

# --- acceptance --------------------------------------------------------------------------------


def acceptance(quick: bool) -> None:
    """Share accepted by the operator's error: 64 unknowns, 20 data, 2 % noise."""
    rng = np.random.default_rng(55)
    n, h = 64, 1 / 65
    laplacian = (2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)) / h**2
    s = np.arange(1, n + 1) * h
    reaction = 30.0 * (1 + 0.5 * np.sin(2 * np.pi * s))
    exact = 40 * np.linalg.inv(laplacian + np.diag(reaction))
    rows = np.sort(rng.choice(n, 20, replace=False))
    covariance = np.linalg.inv(np.eye(n) + 2e-3 * laplacian)
    covariance /= covariance.diagonal().mean()
    root = np.linalg.cholesky(covariance)
    truth = root @ rng.standard_normal(n)
    noise = 0.02 * np.abs(exact[rows] @ truth).max()
    y = exact[rows] @ truth + noise * rng.standard_normal(20)
    walk = np.cumsum(rng.standard_normal(n))
    walk /= np.abs(walk).max()

    def model(y: Any, operator: Any = exact) -> None:
        x = numpyro.sample("x", dist.MultivariateNormal(0.0, scale_tril=root))
        u = numpyro.deterministic("u", operator @ x)
        numpyro.sample("y", dist.Normal(u[rows], noise).to_event(1), obs=y)

    def share(correction: Any) -> Callable[[Any], Any]:
        # the operator is an argument, so that one program serves all errors
        @jax.jit
        def run(operator: Any) -> Any:
            kernel = ProximalIMH(model, approx={"operator": operator}, correction=correction)
            mcmc = MCMC(
                kernel,
                num_warmup=100,
                num_samples=2_000 if quick else 20_000,
                progress_bar=False,
            )
            mcmc.run(jax.random.key(0), y)
            return mcmc.get_extra_fields()["accept_prob"].mean()

        return run

    columns = {"approx": share(None), "latent": share("latent"), "proximal": share("affine")}
    table = {}
    for size in (0.01, 0.1, 1.0, 2.0):
        cheap = 40 * np.linalg.inv(laplacian + np.diag(reaction * np.exp(size * walk)))
        change = (cheap - exact)[rows]
        error = np.linalg.norm(change, 2) / np.linalg.norm(exact[rows], 2)
        table[f"{error:.2%}"] = {name: float(run(cheap)) for name, run in columns.items()}
        print(f"{error:.2%}", table[f"{error:.2%}"], flush=True)
    print("\nAcceptance by relative error of the operator")
    print(pd.DataFrame(table).T.to_string(float_format="{:.3f}".format))


# --- effective draws per exact solve -----------------------------------------------------------


def elliptic(theta: Any, cells: int = 400) -> Any:
    """u at 1/8, ..., 7/8 of -(exp(kappa) u')' = 1, by the midpoint rule on `cells` cells."""
    k = jnp.arange(1, 4)
    middle = (jnp.arange(cells) + 0.5) / cells
    kappa = jnp.cos(jnp.pi * jnp.outer(middle, k)) @ (theta * jnp.sqrt(2) / k)
    resistance = jnp.exp(-kappa) / cells
    first, second = jnp.cumsum(resistance), jnp.cumsum(resistance * middle)
    c = second[-1] / first[-1]
    u = jnp.concatenate([jnp.zeros(1), c * first - second])
    return jnp.interp(jnp.arange(1, 8) / 8, jnp.linspace(0, 1, cells + 1), u)


def heat(a: Any, steps: int = 0) -> Any:
    """u(j / 13, 1) of the heat equation; exact, or by implicit Euler steps."""
    k = jnp.arange(1, 16)
    rate = 0.01 * (k * jnp.pi) ** 2
    decay = (1 + rate / steps) ** -steps if steps else jnp.exp(-rate)
    modes = jnp.sqrt(2) * jnp.sin(jnp.pi * jnp.outer(jnp.arange(1, 13) / 13, k))
    return modes @ (decay * a)


def problems() -> dict[str, tuple[Callable, Callable, np.ndarray, np.ndarray, np.ndarray]]:
    """Model, cheap operator, data, and exact posterior means and standard deviations."""
    found = {}
    case = CASES["elliptic_1d_logpermeability"]
    reference = case["reference"]
    names = ("theta1", "theta2", "theta3")
    found["elliptic"] = (
        inverse_model(elliptic, np.ones(3), case["noise_sd"]),
        lambda x: elliptic(x, 8),
        np.array(case["y"]),
        np.array([reference[name]["mean"] for name in names]),
        np.array([reference[name]["sd"] for name in names]),
    )
    case = CASES["heat_1d_initial_condition"]
    found["heat"] = (
        inverse_model(heat, 1 / np.arange(1, 16), case["noise_sd"]),
        lambda x: heat(x, 8),
        np.array(case["y"]),
        np.array(case["reference"]["mean"]),
        np.array(case["reference"]["sd"]),
    )
    return found


def inverse_model(operator: Callable, prior_sd: np.ndarray, noise_sd: float) -> Callable:
    def model(y: Any, forward: Callable = operator) -> None:
        x = numpyro.sample("x", dist.Normal(0, prior_sd).to_event(1))
        numpyro.sample("y", dist.Normal(forward(x), noise_sd).to_event(1), obs=y)

    return model


def solves(quick: bool) -> None:
    """Least effective sample size per exact solve; forward, JVP and VJP count as one each."""
    for name, (model, cheap, y, mean, sd) in problems().items():
        if quick and name != "elliptic":
            continue
        count = 250 if quick else 2500
        at = jax.vmap(inverse_operator(model, y))(
            mean + sd * np.random.default_rng(0).normal(size=(50, len(mean)))
        )
        at_cheap = jax.vmap(cheap)(
            mean + sd * np.random.default_rng(0).normal(size=(50, len(mean)))
        )
        error = np.linalg.norm(at - at_cheap) / np.linalg.norm(at)
        rows: dict[str, dict] = {}
        for correction in ("affine", "gn", None):
            kernel = ProximalIMH(model, approx={"forward": cheap}, correction=correction)
            draws, mcmc = draws_of(kernel, y, 0, count)
            report = imh_report(mcmc)
            label = "Approx-IMH" if correction is None else f"ProximalIMH {correction}"
            rows[label] = row(draws, report.num_solves, mean, sd, report.accept_prob)
        for label, kernel in (
            ("NUTS", NUTS(model)),
            ("MALA", HMC(model, num_steps=1, trajectory_length=None, target_accept_prob=0.574)),
        ):
            draws, mcmc = draws_of(kernel, y, 1000, count, ("num_steps", "accept_prob"))
            fields = mcmc.get_extra_fields()
            spent = 2 * int(fields["num_steps"].sum())
            rows[label] = row(draws, spent, mean, sd, float(fields["accept_prob"].mean()))
        draws, accepted, spent = delayed_acceptance(model, cheap, y, 8 * count)
        rows["delayed acceptance"] = row(draws, spent, mean, sd, accepted)
        table = pd.DataFrame(rows).T
        table["to NUTS"] = table["ESS per solve"] / table.loc["NUTS", "ESS per solve"]
        print(f"\n{name}: relative error of the operator {error:.2%}")
        print(table.to_string(float_format="{:.3g}".format), flush=True)


def inverse_operator(model: Callable, y: Any) -> Callable:
    bound = target(model, y).bind(y)
    return lambda x: imh.prediction(bound, x)


def draws_of(
    kernel: Any, y: Any, num_warmup: int, num_samples: int, fields: tuple = ()
) -> tuple[np.ndarray, MCMC]:
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), y, extra_fields=fields)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["x"]), mcmc


def row(draws: np.ndarray, count: int, mean: Any, sd: Any, accepted: float) -> dict[str, float]:
    """Warm-up is not counted, which favours the peers."""
    ess = np.array([float(az.ess(draws[..., i])) for i in range(draws.shape[-1])])
    flat = draws.reshape(-1, draws.shape[-1])
    z = (flat.mean(0) - mean) / (sd / np.sqrt(ess))
    return {
        "accepted": accepted,
        "solves": count,
        "ESS": ess.min(),
        "ESS per solve": ess.min() / count,
        "largest |z|": np.abs(z).max(),
    }


def delayed_acceptance(
    model: Callable, cheap: Callable, y: Any, num_samples: int, chains: int = 4
) -> tuple[np.ndarray, float, int]:
    """Random walk, screened by the cheap posterior (Christen & Fox 2005, algorithm 1)."""
    found = target(model, y)
    exact, approx = found.bind(y), found.bind(y, forward=cheap)
    start = jnp.zeros(found.size)
    u, hessian, _, _ = jax.jit(lambda x: imh.minimise(lambda x: -approx.log_density(x), x))(start)
    root = 2.38 / np.sqrt(found.size) * np.linalg.cholesky(np.linalg.inv(hessian))

    def step(carry: Any, key: Any) -> Any:
        x, cheap_now, exact_now = carry
        keys = jax.random.split(key, 3)
        new = x + root @ jax.random.normal(keys[0], x.shape)
        cheap_new = approx.log_density(new)
        screened = jnp.log(jax.random.uniform(keys[1])) < cheap_new - cheap_now
        exact_new = exact.log_density(new)
        ratio = exact_new - exact_now - (cheap_new - cheap_now)
        accepted = screened & (jnp.log(jax.random.uniform(keys[2])) < ratio)
        pick = lambda a, b: jnp.where(accepted, a, b)  # noqa: E731
        carry = pick(new, x), pick(cheap_new, cheap_now), pick(exact_new, exact_now)
        return carry, (carry[0], screened, accepted)

    def chain(key: Any) -> Any:
        carry = u, approx.log_density(u), exact.log_density(u)
        return jax.lax.scan(step, carry, jax.random.split(key, num_samples))[1]

    keys = jax.random.split(jax.random.key(2), chains)
    draws, screened, accepted = jax.jit(jax.vmap(chain))(keys)
    half = num_samples // 2
    count = int(screened[:, half:].sum())
    return np.asarray(draws[:, half:]), float(accepted[:, half:].sum() / count), count


# --- a picture ---------------------------------------------------------------------------------


def picture(quick: bool) -> None:
    """Deblurring: the cheap blur is isotropic, the exact one turns and widens over the plane."""
    if quick:
        return
    import matplotlib.pyplot as plt

    side, noise = 32, 0.01
    s = (np.arange(side) + 0.5) / side
    points = np.stack(np.meshgrid(s, s, indexing="ij"), -1).reshape(-1, 2)
    away = points[:, None] - points[None]
    distance = np.linalg.norm(away, axis=-1)
    covariance = (1 + distance / 0.1) * np.exp(-distance / 0.1) + 1e-6 * np.eye(side**2)
    seen = np.arange(side**2).reshape(side, side)[::2, ::2].ravel()

    def blur(width: Any, stretch: Any, angle: Any) -> np.ndarray:
        turn = np.stack([np.cos(angle), np.sin(angle)], -1)
        along = np.einsum("ijk,ik->ij", away, turn)
        across = np.einsum("ijk,ik->ij", away, turn[:, ::-1] * [-1, 1])
        exponent = (along / (width * stretch)[:, None]) ** 2 + (
            across * stretch[:, None] / width[:, None]
        ) ** 2
        kernel = np.exp(-exponent / 2)
        return (kernel / kernel.sum(1, keepdims=True))[seen]

    one = np.ones(side**2)
    exact = blur(0.05 * (1 + 0.1 * points[:, 0]), 1 + 0.15 * points[:, 1], 2 * points[:, 0])
    cheap = blur(0.0525 * one, one, 0 * one)
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(covariance)
    truth = root @ rng.normal(size=side**2)
    y = exact @ truth + noise * rng.normal(size=len(seen))

    def model(y: Any, blur: Any = exact) -> None:
        x = numpyro.sample("x", dist.MultivariateNormal(0.0, scale_tril=root))
        numpyro.sample("y", dist.Normal(blur @ x, noise).to_event(1), obs=y)

    kernel = ProximalIMH(model, approx={"blur": cheap}, correction="affine", batch_size=100)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=5000, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    report = imh_report(mcmc)
    print(str(report).split("\n      ")[0])
    draws = np.asarray(mcmc.get_samples()["x"])
    gain = (
        covariance
        @ exact.T
        @ np.linalg.inv(exact @ covariance @ exact.T + noise**2 * np.eye(len(seen)))
    )
    mean = gain @ y
    sd = np.sqrt(np.diag(covariance - gain @ exact @ covariance))
    cheap_gain = (
        covariance
        @ cheap.T
        @ np.linalg.inv(cheap @ covariance @ cheap.T + noise**2 * np.eye(len(seen)))
    )
    biased = cheap_gain @ y
    error = np.linalg.norm(cheap - exact, 2) / np.linalg.norm(exact, 2)
    away_by = lambda m: np.sqrt(np.mean(((m - mean) / sd) ** 2))  # noqa: E731
    print(f"relative error of the operator {error:.1%}")
    print(
        f"distance from the exact posterior mean, in its standard deviations: approximate "
        f"{away_by(biased):.2f}, corrected {away_by(draws.mean(0)):.3f}"
    )
    ess = [float(az.ess(draws[None, :, i])) for i in range(side**2)]
    print(
        f"effective draws of the {side**2} unknowns: least {min(ess):.0f}, median "
        f"{np.median(ess):.0f}; largest |z| of a mean "
        f"{np.abs((draws.mean(0) - mean) / sd * np.sqrt(ess)).max():.2f}"
    )
    panels = {
        "truth": truth,
        "data": y,
        "approximate mean": biased,
        "corrected mean": draws.mean(0),
        "corrected sd": draws.std(0),
        "error of the approximate mean, sd": (biased - mean) / sd,
        "error of the corrected mean, sd": (draws.mean(0) - mean) / sd,
    }
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3 * len(panels), 3.2), layout="constrained"
    )
    limit = np.abs(truth).max()
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        shape = (side, side) if values.size == side**2 else (side // 2, side // 2)
        bounds = {"vmin": -limit, "vmax": limit}
        if title.endswith("sd"):
            bounds = (
                {"vmin": 0, "vmax": sd.max()}
                if title == "corrected sd"
                else {"vmin": -3, "vmax": 3}
            )
        image = axis.imshow(
            values.reshape(shape), cmap="RdBu_r" if title != "corrected sd" else "viridis", **bounds
        )
        axis.set_title(title, fontsize=9)
        axis.axis("off")
        figure.colorbar(image, ax=axis, shrink=0.7)
    path = HERE.parent / "docs" / "inverse.png"
    figure.savefig(path, dpi=80)
    print(f"wrote {path}")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    parts = {"acceptance": acceptance, "solves": solves, "picture": picture}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=parts)
    parser.add_argument("--quick", action="store_true", help="a tenth of the draws, no picture")
    arguments = parser.parse_args()
    for name, part in parts.items():
        if arguments.part in (None, name):
            part(arguments.quick)
