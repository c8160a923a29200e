"""The programs against the reference posteriors."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_uniform, init_to_value
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy, unconstrain_fn
from scipy import stats

from ppl_ext import models
from ppl_ext.models import Problem

WITH_DRAWS = [name for name in models.list() if models.load(name).draws is not None]


def draws_of_sites(problem: Problem) -> dict[str, np.ndarray]:
    """Return the reference draws as samples of the sites, (draw, *site)."""
    draws = problem.draws
    assert draws is not None
    return {
        site: np.stack([draws[f"{site}[{i + 1}]"] for i in range(*shape)], axis=-1)
        if shape
        else draws[site]
        for site, shape in problem.shapes.items()
    }


def outside_the_funnel(
    problem: Problem, sites: dict[str, np.ndarray]
) -> tuple[Callable[..., None], dict[str, np.ndarray]]:
    """Return the model and the draws with (theta - mu) / tau sampled in place of theta.

    In a funnel the score of theta has no variance. eight_schools_noncentered has that site;
    in eight_schools_centered a reparametrisation of the program provides it.
    """
    new_site, model = {
        "eight_schools_noncentered": ("theta_trans", problem.model),
        "eight_schools_centered": (
            "theta_decentered",
            handlers.reparam(problem.model, config={"theta": LocScaleReparam(centered=0)}),
        ),
    }.get(problem.name, (None, problem.model))
    if new_site is None:
        return model, sites
    mu, tau = (sites[site][:, None] for site in ("mu", "tau"))
    rest = {site: values for site, values in sites.items() if site != "theta"}
    return model, rest | {new_site: (sites["theta"] - mu) / tau}


def stein_statistics(problem: Problem, model: Callable[..., None] | None = None) -> np.ndarray:
    """Return t statistics of four Stein identities for each parameter, shape (4, parameter).

    z are the reference draws of `problem` in unconstrained space, m and S their mean and
    covariance, s the score at z of `model`, which is the problem's own by default. The identities
    are E[s_i] = 0, E[1 + (z_i - m_i) s_i] = 0 and, with g = S s, E[g_i] = 0 and
    E[S_ii + (z_i - m_i) g_i] = 0. In a normal posterior g = m - z: with strong correlations, a
    wrong prior shows in g_i and is lost in the variance of s_i.
    """
    own_model, sites = outside_the_funnel(problem, draws_of_sites(problem))
    args = model or own_model, problem.args, problem.kwargs

    @jax.jit
    @jax.vmap
    def unconstrained_and_score(sites: dict[str, Any]) -> tuple[Any, Any]:
        z = unconstrain_fn(*args, sites)
        slope = jax.grad(lambda z: potential_energy(*args, z))(z)
        return z, {site: -slope[site] for site in z}

    z, score = (
        np.concatenate([np.reshape(v, (len(v), -1)) for v in values.values()], axis=1)
        for values in unconstrained_and_score(sites)
    )
    covariance = np.cov(z, rowvar=False)
    centred = z - z.mean(axis=0)
    g = score @ covariance
    terms = np.stack([score, 1 + centred * score, g, np.diag(covariance) + centred * g])
    return terms.mean(axis=1) / (terms.std(axis=1, ddof=1) / np.sqrt(len(z)))


def stein_bound(statistics: np.ndarray) -> float:
    """Return the bound that the largest of independent draws' statistics exceeds with 1e-3."""
    return float(stats.norm.isf(1e-3 / 2 / statistics.size))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", WITH_DRAWS)
def test_reference_draws_fulfil_the_stein_identities(name: str) -> None:
    """The score of the program averages to 0 over the reference draws, and z times it to -1.

    Both hold for the program's own posterior only. The test detects an error of the program, of
    its data or of the reference which shifts the posterior by a few hundredths of a standard
    deviation: a wrong scale of a prior that matters, a missing Jacobian, a wrong covariate. It is
    blind to a prior which the data overrule, as those of arK and lotka_volterra:
    `test_log_density_is_the_formula` sees these.

    False alarms: 1e-3 for each problem (Bonferroni over its statistics, normal approximation) if
    the reference draws are independent draws of the posterior.
    """
    problem = models.load(name)
    statistics = stein_statistics(problem)
    assert np.abs(statistics).max() < stein_bound(statistics), statistics


def schools_with_scales(mu_scale: float, tau_scale: float) -> Callable[..., None]:
    """Return `eight_schools_noncentered` with other scales of the priors of mu and tau."""

    def model(sigma: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, mu_scale))
        tau = numpyro.sample("tau", dist.HalfCauchy(tau_scale))
        with numpyro.plate("schools", len(sigma)):
            theta_trans = numpyro.sample("theta_trans", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu + tau * theta_trans, sigma), obs=y)

    return model


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scales", [(1.3 * 5, 5), (5, 1.3 * 5), (5 / 1.3, 5), (5, 5 / 1.3)])
def test_stein_identities_fail_for_a_wrong_prior(scales: tuple[float, float]) -> None:
    """The scale of a prior, wrong by a factor of 1.3, is detected."""
    problem = models.load("eight_schools_noncentered")
    statistics = stein_statistics(problem, schools_with_scales(*scales))
    assert np.abs(statistics).max() > stein_bound(statistics)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [n for n in models.list() if n != "eight_schools_centered"])
def test_nuts_agrees_with_the_reference(name: str) -> None:
    """NUTS's posterior means are within 4 combined Monte Carlo standard errors of the reference.

    eight_schools_centered is left out: NUTS is biased in its funnel. kilpisjarvi has a dense
    metric. False alarms: 6.3e-5 for each of the 87 parameters, 0.6% for all problems together.
    """
    problem = models.load(name)
    z = nuts_against_reference(problem)
    assert max(map(abs, z.values())) < 4, z


def nuts_against_reference(problem: Problem) -> dict[str, float]:
    """Return for each parameter NUTS's mean less the reference's, in standard errors."""
    strategy = (
        init_to_uniform
        if problem.init_values is None
        else init_to_value(values=problem.init_values)
    )
    kernel = NUTS(
        problem.model,
        dense_mass=problem.name == "kilpisjarvi",
        target_accept_prob=0.9,
        init_strategy=strategy,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *problem.args, **problem.kwargs)
    scores = {}
    for parameter, draws in problem.flat(mcmc.get_samples(group_by_chain=True)).items():
        expected = problem.reference[parameter]
        mcse = draws.std() / np.sqrt(effective_sample_size(draws))
        scores[parameter] = (draws.mean() - expected["mean"]) / np.hypot(
            mcse, expected["mcse_mean"]
        )
    return scores
