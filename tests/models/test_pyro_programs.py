"""The Pyro programs against the NumPyro programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.distributions import biject_to as numpyro_biject_to
from numpyro.infer.util import potential_energy, unconstrain_fn
from scipy import stats

from ppl_ext import models

pyro = pytest.importorskip("pyro", reason="Pyro is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import Predictive  # noqa: E402
from pyro.infer.autoguide.initialization import init_to_uniform, init_to_value  # noqa: E402
from pyro.infer.mcmc.util import initialize_model  # noqa: E402
from torch.distributions import biject_to  # noqa: E402

NAMES = models.list()
Values = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def double(x64: None) -> Any:
    """float64 in both languages."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def latent_sites(trace: Any) -> dict[str, Any]:
    """Return the sites that Pyro's kernels sample; plates are sample sites in Pyro."""
    plate = pyro.poutine.subsample_messenger._Subsample
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and not isinstance(site["fn"], plate)
    }


def pyro_potential(model: Any, problem: Any, z: Values) -> tuple[float, Values]:
    """Return minus the unconstrained log density and its gradient, from the trace's log_prob_sum.

    The model runs at the values that z, by Pyro's transforms, stands for.
    """
    prototype = poutine.trace(model).get_trace(*problem.args, **problem.kwargs)
    links = {n: biject_to(site["fn"].support) for n, site in latent_sites(prototype).items()}
    assert set(links) == set(z)
    z = {name: torch.tensor(value, requires_grad=True) for name, value in z.items()}
    values = {name: link(z[name]) for name, link in links.items()}
    conditioned = poutine.condition(model, data=values)
    log_density = poutine.trace(conditioned).get_trace(*problem.args, **problem.kwargs)
    total = log_density.log_prob_sum()
    for name, link in links.items():
        total = total + link.log_abs_det_jacobian(z[name], values[name]).sum()
    gradient = torch.autograd.grad(-total, list(z.values()))
    return -total.item(), dict(zip(z, (g.numpy() for g in gradient), strict=True))


def numpyro_start(name: str) -> Values:
    """Return unconstrained values in the middle of the posterior's support, or near its mode."""
    problem = models.load(name)

    def zeros(site: Any) -> Any:
        if site["type"] != "sample" or site["is_observed"]:
            return None
        link = numpyro_biject_to(site["fn"].support)
        return link(jnp.zeros(link.inverse_shape(site["fn"].shape())))

    substituted = handlers.substitute(handlers.seed(problem.model, 0), substitute_fn=zeros)
    trace = handlers.trace(substituted).get_trace(*problem.args, **problem.kwargs)
    sites = {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    sites |= problem.init_values or {}
    return unconstrain_fn(problem.model, problem.args, problem.kwargs, sites)


def differences(name: str, model: Any = None) -> tuple[float, float]:
    """Return the largest relative differences of the programs' potentials and gradients.

    Over 5 random points. The unit of a gradient is its largest element.
    """
    numpyro_problem, pyro_problem = models.load(name), models.load(name, ppl="pyro")
    start = numpyro_start(name)
    scale = 1.0 if numpyro_problem.init_values is None else 0.1
    rng = np.random.default_rng(20240607)

    @jax.jit
    def expected(z: Any) -> Any:
        def potential(z: Any) -> Any:
            args, kwargs = numpyro_problem.args, numpyro_problem.kwargs
            return potential_energy(numpyro_problem.model, args, kwargs, z)

        return jax.value_and_grad(potential)(z)

    value_error = gradient_error = 0.0
    for _ in range(5):
        z = {s: np.asarray(v) + scale * rng.standard_normal(v.shape) for s, v in start.items()}
        value, gradient = pyro_potential(model or pyro_problem.model, pyro_problem, z)
        expected_value, expected_gradient = jax.tree.map(np.asarray, expected(z))
        value_error = max(value_error, abs(value / expected_value - 1))
        unit = max(np.abs(g).max() for g in expected_gradient.values())
        for site, g in gradient.items():
            assert g.shape == expected_gradient[site].shape
            gradient_error = max(gradient_error, np.abs(g - expected_gradient[site]).max() / unit)
    return value_error, gradient_error


@pytest.mark.parametrize("name", NAMES)
def test_both_programs_have_the_same_density(name: str) -> None:
    """Value and gradient agree to 1e-6; for lotka_volterra this is what NumPyro's steps leave."""
    value, gradient = differences(name)
    assert max(value, gradient) < 1e-6, (value, gradient)


def test_another_prior_is_seen() -> None:
    """The scale of mu's prior is 6 and not 5."""

    def schools(sigma: Any, y: Any) -> None:
        mu = pyro.sample("mu", dist.Normal(0, 6))
        tau = pyro.sample("tau", dist.HalfCauchy(5))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, sigma), obs=y)

    value, gradient = differences("eight_schools_centered", schools)
    assert value > 1e-5 and gradient > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_tensors_of_the_default_dtype(name: str) -> None:
    expected = models.load(name)
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        problem = models.load(name, ppl="pyro")
        assert problem.kwargs.keys() == expected.kwargs.keys()
        values = [*problem.args, *problem.kwargs.values(), *(problem.init_values or {}).values()]
        assert all(isinstance(v, torch.Tensor) and v.dtype == dtype for v in values)
        for value, array in zip(problem.args, expected.args, strict=True):
            np.testing.assert_allclose(value, array, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_pyro_kernels_find_a_start(name: str) -> None:
    """As `initialize_model` finds it for Pyro's HMC: with finite density and gradient."""
    problem = models.load(name, ppl="pyro")
    strategy = (
        init_to_uniform
        if problem.init_values is None
        else init_to_value(values=problem.init_values)
    )
    pyro.set_rng_seed(0)
    start, potential, *_ = initialize_model(
        problem.model, problem.args, problem.kwargs, init_strategy=strategy
    )
    start = {site: value.requires_grad_() for site, value in start.items()}
    energy = potential(start)
    assert all(g.isfinite().all() for g in torch.autograd.grad(energy, list(start.values())))
    assert energy.isfinite() and energy.dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_flat_takes_the_sites_of_a_pyro_program(name: str) -> None:
    """Deterministic sites come from Predictive; what a model observes, it draws without data."""
    problem = models.load(name, ppl="pyro")
    pyro.set_rng_seed(0)
    values = problem.init_values or {}
    substituted = poutine.condition(problem.model, data=values)
    trace = poutine.trace(substituted).get_trace(*problem.args, **problem.kwargs)
    latent = {n: s["value"] for n, s in latent_sites(trace).items()} | values
    samples = {site: torch.stack([value] * 3) for site, value in latent.items()}
    deterministic = [site for site in problem.shapes if site not in samples]
    computed = Predictive(problem.model, samples, return_sites=deterministic)
    flat = problem.flat(samples | computed(*problem.args, **problem.kwargs))
    assert list(flat) == list(problem.reference)
    assert {value.shape for value in flat.values()} == {(3,)}
    if problem.kwargs and name != "GLM_Poisson":  # whose rate may exceed what torch can draw
        observed = {n: s for n, s in trace.nodes.items() if n in problem.kwargs}
        drawn = Predictive(problem.model, samples, return_sites=list(observed))(*problem.args)
        for site in observed:
            # Predictive pads with dimensions of size 1 where a model has plates
            assert drawn[site].squeeze().shape == (3, *observed[site]["value"].shape)


def test_positive_normal_draws_from_its_density() -> None:
    """Kolmogorov-Smirnov against SciPy; a false alarm once in 1,000 seeds, by construction."""
    from ppl_ext.models.pyro_programs import _PositiveNormal

    pyro.set_rng_seed(0)
    loc, scale = torch.tensor([1.0, -0.5]), torch.tensor([0.5, 1.0])
    positive_normal = _PositiveNormal(loc, scale).expand((3, 2))
    draws = positive_normal.sample((20_000,)).numpy()
    assert draws.shape == (20_000, 3, 2)
    for i in range(2):
        law = stats.truncnorm(
            -loc[i].item() / scale[i].item(), np.inf, loc[i].item(), scale[i].item()
        )
        assert stats.kstest(draws[:, 0, i], law.cdf).pvalue > 5e-4
        x = torch.full((3, 2), 0.7)
        np.testing.assert_allclose(positive_normal.log_prob(x)[0, i], law.logpdf(0.7), rtol=1e-12)
