"""The programs' log densities against the models' formulas, written out with SciPy."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import unconstrain_fn
from scipy import stats
from scipy.integrate import solve_ivp
from scipy.special import expit

from ppl_ext import models
from ppl_ext.models import Problem

Values = dict[str, np.ndarray]
Density = tuple[float, float]  # log prior, log likelihood


def normal(x: Any, loc: Any, scale: Any) -> float:
    return float(np.sum(stats.norm.logpdf(x, loc, scale)))


def half_cauchy(x: Any, scale: float) -> float:
    return float(stats.halfcauchy.logpdf(x, scale=scale))


def half_normal(x: Any, scale: float) -> float:
    return float(stats.halfnorm.logpdf(x, scale=scale))


def poisson(k: Any, log_rate: Any) -> float:
    return float(np.sum(stats.poisson.logpmf(k, np.exp(log_rate))))


def bernoulli(y: Any, logit: Any) -> float:
    return float(np.sum(np.log(np.where(np.asarray(y) == 1, expit(logit), expit(-logit)))))


def log_normal(x: Any, log_median: Any, scale: Any) -> float:
    return float(np.sum(stats.lognorm.logpdf(x, scale, scale=np.exp(log_median))))


def GLM_Poisson(p: Values, year: Any, C: Any) -> Density:
    log_rate = np.polynomial.polynomial.polyval(
        year, [p["alpha"], p["beta1"], p["beta2"], p["beta3"]]
    )
    prior = stats.uniform.logpdf(p["alpha"], -20, 40)
    prior += sum(stats.uniform.logpdf(p[f"beta{i}"], -10, 20) for i in (1, 2, 3))
    return float(prior), poisson(C, log_rate)


def arK(p: Values, y: Any) -> Density:
    prior = normal(p["alpha"], 0, 10) + normal(p["beta"], 0, 10) + half_cauchy(p["sigma"], 2.5)
    likelihood = 0.0
    for t in range(5, 200):
        mean = p["alpha"] + sum(p["beta"][k - 1] * y[t - k] for k in (1, 2, 3, 4, 5))
        likelihood += normal(y[t], mean, p["sigma"])
    return prior, likelihood


def eight_schools_centered(p: Values, sigma: Any, y: Any) -> Density:
    prior = normal(p["mu"], 0, 5) + half_cauchy(p["tau"], 5) + normal(p["theta"], p["mu"], p["tau"])
    return prior, normal(y, p["theta"], sigma)


def eight_schools_noncentered(p: Values, sigma: Any, y: Any) -> Density:
    prior = normal(p["mu"], 0, 5) + half_cauchy(p["tau"], 5) + normal(p["theta_trans"], 0, 1)
    return prior, normal(y, p["mu"] + p["tau"] * p["theta_trans"], sigma)


def gp_kernel(p: Values, x: Any, diagonal: Any) -> np.ndarray:
    kernel = [
        [p["alpha"] ** 2 * np.exp(-((a - b) ** 2) / (2 * p["rho"] ** 2)) for a in x] for b in x
    ]
    return np.array(kernel) + np.diag(np.full(len(x), diagonal))


def gp_hyperprior(p: Values) -> float:
    return float(stats.gamma.logpdf(p["rho"], 25, scale=1 / 4)) + half_normal(p["alpha"], 2)


def gp_regr(p: Values, x: Any, y: Any) -> Density:
    covariance = gp_kernel(p, x, p["sigma"])
    likelihood = stats.multivariate_normal.logpdf(y, np.zeros(len(x)), covariance)
    return gp_hyperprior(p) + half_normal(p["sigma"], 1), float(likelihood)


def gp_pois_regr(p: Values, x: Any, k: Any) -> Density:
    f = np.linalg.cholesky(gp_kernel(p, x, 1e-10)) @ p["f_tilde"]
    return gp_hyperprior(p) + normal(p["f_tilde"], 0, 1), poisson(k, f)


def hmm_example(p: Values, y: Any) -> Density:
    """The likelihood as a product of matrices, diag(emission_t) Theta', scaled at each step."""
    theta = np.stack([p["theta1"], p["theta2"]])
    weight, log_scale = np.ones(2), 0.0
    for t, y_t in enumerate(y):
        weight = stats.norm.pdf(y_t, p["mu"], 1) * (weight if t == 0 else weight @ theta)
        log_scale += np.log(weight.sum())
        weight = weight / weight.sum()
    return normal(p["mu"], [3, 10], 1), float(log_scale)


def kidscore_interaction(p: Values, mom_hs: Any, mom_iq: Any, kid_score: Any) -> Density:
    b = p["beta"]
    mean = b[0] + b[1] * mom_hs + b[2] * mom_iq + b[3] * mom_hs * mom_iq
    return half_cauchy(p["sigma"], 2.5), normal(kid_score, mean, p["sigma"])


def kilpisjarvi(
    p: Values, x: Any, pmualpha: Any, psalpha: Any, pmubeta: Any, psbeta: Any, y: Any
) -> Density:
    prior = normal(p["alpha"], pmualpha, psalpha) + normal(p["beta"], pmubeta, psbeta)
    return prior, normal(y, p["alpha"] + p["beta"] * x, p["sigma"])


def logmesquite(
    p: Values,
    diam1: Any,
    diam2: Any,
    canopy_height: Any,
    total_height: Any,
    density: Any,
    group: Any,
    weight: Any,
) -> Density:
    b = p["beta"]
    mean = (
        b[0]
        + b[1] * np.log(diam1)
        + b[2] * np.log(diam2)
        + b[3] * np.log(canopy_height)
        + b[4] * np.log(total_height)
        + b[5] * np.log(density)
        + b[6] * group
    )
    return 0.0, normal(np.log(weight), mean, p["sigma"])


def lotka_volterra(p: Values, ts: Any, y_init: Any, y: Any) -> Density:
    a, b, g, d = p["theta"]

    def slope(_: float, z: np.ndarray) -> np.ndarray:
        u, v = z
        return np.array([(a - b * v) * u, (-g + d * u) * v])

    solution = solve_ivp(
        slope, (0, ts[-1]), p["z_init"], method="DOP853", t_eval=ts, rtol=1e-12, atol=1e-12
    )
    loc, scale = np.array([1, 0.05, 1, 0.05]), np.array([0.5, 0.05, 0.5, 0.05])
    prior = (
        float(stats.truncnorm.logpdf(p["theta"], -loc / scale, np.inf, loc, scale).sum())
        + log_normal(p["sigma"], -1, 1)
        + log_normal(p["z_init"], np.log(10), 1)
    )
    likelihood = log_normal(y_init, np.log(p["z_init"]), p["sigma"]) + log_normal(
        y, np.log(solution.y.T), p["sigma"]
    )
    return prior, likelihood


def nes2000(
    p: Values,
    real_ideo: Any,
    race_adj: Any,
    age_discrete: Any,
    educ1: Any,
    gender: Any,
    income: Any,
    partyid7: Any,
) -> Density:
    b = p["beta"]
    mean = (
        b[0]
        + b[1] * real_ideo
        + b[2] * race_adj
        + b[3] * (age_discrete == 2)
        + b[4] * (age_discrete == 3)
        + b[5] * (age_discrete == 4)
        + b[6] * educ1
        + b[7] * gender
        + b[8] * income
    )
    return 0.0, normal(partyid7, mean, p["sigma"])


def nes_logit(p: Values, income: Any, vote: Any) -> Density:
    return 0.0, bernoulli(vote, p["alpha"] + p["beta"] * income)


def sblrc(p: Values, X: Any, y: Any) -> Density:
    prior = normal(p["beta"], 0, 10) + half_normal(p["sigma"], 10)
    return prior, normal(y, np.einsum("nd,d->n", X, p["beta"]), p["sigma"])


def wells_dist100(p: Values, distance: Any, switched: Any) -> Density:
    return 0.0, bernoulli(switched, p["alpha"] + p["beta"] * distance / 100)


FORMULAS: dict[str, Callable[..., Density]] = {
    formula.__name__: formula
    for formula in (
        GLM_Poisson,
        arK,
        eight_schools_centered,
        eight_schools_noncentered,
        gp_pois_regr,
        gp_regr,
        hmm_example,
        kidscore_interaction,
        kilpisjarvi,
        logmesquite,
        lotka_volterra,
        nes2000,
        nes_logit,
        sblrc,
        wells_dist100,
    )
}


def random_points(problem: Problem, number: int) -> list[Values]:
    """Return values of the sampled sites: inverse links of standard normals, or near the mode."""
    rng = np.random.default_rng(20240607)
    seeded = handlers.seed(problem.model, 0)
    if problem.init_values is not None:
        seeded = handlers.substitute(seeded, data=problem.init_values)
        centre = unconstrain_fn(problem.model, problem.args, problem.kwargs, problem.init_values)
    else:
        centre = None
    uniform = handlers.substitute(seeded, substitute_fn=_zeros)
    trace = handlers.trace(uniform).get_trace(*problem.args, **problem.kwargs)
    latent = {
        name: site["fn"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    points = []
    for _ in range(number):
        point = {}
        for name, fn in latent.items():
            transform = biject_to(fn.support)
            shape = transform.inverse_shape(fn.shape())
            noise = rng.standard_normal(shape)
            z = noise if centre is None else centre[name] + 0.1 * noise
            point[name] = np.asarray(transform(jnp.asarray(z)))
        points.append(point)
    return points


def _zeros(site: dict[str, Any]) -> Any:
    """Give a sampled site, which may have no sampler, the value whose unconstrained value is 0."""
    if site["type"] != "sample" or site["is_observed"]:
        return None
    transform = biject_to(site["fn"].support)
    return transform(jnp.zeros(transform.inverse_shape(site["fn"].shape())))


def program_density(problem: Problem, point: Values) -> Density:
    """Return the log prior and the log likelihood of the program: latent and observed sites."""
    model = handlers.substitute(problem.model, data=point)
    trace = handlers.trace(model).get_trace(*problem.args, **problem.kwargs)
    prior = likelihood = 0.0
    for name, site in trace.items():
        if site["type"] == "sample":
            log_prob = float(jnp.sum(site["fn"].log_prob(site["value"])))
            if site["is_observed"] and name != "prior_mu":
                likelihood += log_prob
            else:
                prior += log_prob
    return prior, likelihood


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", models.list())
def test_log_density_is_the_formula(name: str) -> None:
    """Prior and likelihood agree with the formula at random points.

    They are compared apart, so that a large likelihood hides no error of the prior.
    """
    problem = models.load(name)
    points = random_points(problem, 6)
    formula = np.array([FORMULAS[name](p, *problem.args, **problem.kwargs) for p in points])
    program = np.array([program_density(problem, p) for p in points])
    # Runge-Kutta steps of fixed length against an adaptive method of order 8.
    atol = 1e-4 if name == "lotka_volterra" else 1e-9
    np.testing.assert_allclose(program, formula, rtol=1e-8, atol=atol)


@pytest.mark.usefixtures("x64")
def test_lotka_volterra_is_precise_over_the_posterior() -> None:
    """The error of the ODE solution changes the log likelihood by less than 1e-5."""
    problem = models.load("lotka_volterra")
    draws = problem.draws
    assert draws is not None
    for i in range(0, 10_000, 500):
        point = {
            site: np.array([draws[f"{site}[{j + 1}]"][i] for j in range(*shape)])
            for site, shape in problem.shapes.items()
        }
        exact = lotka_volterra(point, *problem.args, **problem.kwargs)[1]
        assert abs(program_density(problem, point)[1] - exact) < 1e-5
