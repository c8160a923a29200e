"""The reference problems as Pyro programs.

Each function is the NumPyro program of the same name in `numpyro_programs`, where its formula and
its priors stand: the same arguments, here tensors, the same sites and the same log density.

Example:
    >>> import pyro
    >>> from pyro.infer import MCMC, NUTS
    >>> from ppl_ext import models
    >>> problem = models.load("nes_logit", ppl="pyro")
    >>> pyro.set_rng_seed(0)
    >>> mcmc = MCMC(NUTS(problem.model), num_samples=20, warmup_steps=20, disable_progbar=True)
    >>> mcmc.run(*problem.args, **problem.kwargs)
    >>> list(problem.flat(mcmc.get_samples()))
    ['alpha', 'beta']
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import biject_to


class _ImproperUniform(dist.ImproperUniform):
    """Pyro's ImproperUniform with the `sample` that Pyro calls when it looks for a start.

    `sample` transforms standard normals into the support: feasible values, not draws of a prior.
    """

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        transform = biject_to(self.support)
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        return transform(torch.randn(transform.inverse_shape(shape)))


def _flat(
    constraint: constraints.Constraint = constraints.real, shape: tuple[int, ...] = ()
) -> _ImproperUniform:
    """Return the improper flat density over the values of `shape` that fulfil `constraint`."""
    return _ImproperUniform(constraint, (), shape)


class _PositiveNormal(dist.TorchDistribution):
    """N(loc, scale) restricted to positive values."""

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    support = constraints.positive
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self._normal = dist.Normal(loc, scale)
        super().__init__(self._normal.batch_shape, validate_args=validate_args)

    @property
    def loc(self) -> Tensor:
        return self._normal.loc

    @property
    def scale(self) -> Tensor:
        return self._normal.scale

    def expand(
        self, batch_shape: torch.Size, _instance: _PositiveNormal | None = None
    ) -> _PositiveNormal:
        new = self._get_checked_instance(_PositiveNormal, _instance)
        new._normal = self._normal.expand(batch_shape)
        super(_PositiveNormal, new).__init__(new._normal.batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return self._normal.log_prob(value) - torch.log1p(-self._below_zero())

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        below = self._below_zero()
        uniform = torch.rand(self._extended_shape(torch.Size(sample_shape)), dtype=below.dtype)
        return self._normal.icdf(below + (1 - below) * uniform)

    def _below_zero(self) -> Tensor:
        """Return the probability that the unrestricted normal is negative."""
        return self._normal.cdf(torch.zeros_like(self.loc))


# ------------------------------------------------------------------------------------ regressions


def GLM_Poisson(year: Tensor, C: Tensor | None = None) -> None:
    """Poisson regression on a cubic polynomial of the standardised year."""
    alpha = pyro.sample("alpha", dist.Uniform(-20, 20))
    beta1 = pyro.sample("beta1", dist.Uniform(-10, 10))
    beta2 = pyro.sample("beta2", dist.Uniform(-10, 10))
    beta3 = pyro.sample("beta3", dist.Uniform(-10, 10))
    log_rate = alpha + beta1 * year + beta2 * year**2 + beta3 * year**3
    with pyro.plate("years", year.shape[0]):
        pyro.sample("C", dist.Poisson(log_rate.exp()), obs=C)


def kidscore_interaction(mom_hs: Tensor, mom_iq: Tensor, kid_score: Tensor | None = None) -> None:
    """Linear regression on two covariates and their product."""
    design = torch.stack([torch.ones_like(mom_iq), mom_hs, mom_iq, mom_hs * mom_iq], dim=-1)
    with pyro.plate("coefficients", design.shape[1]):
        beta = pyro.sample("beta", _flat())
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with pyro.plate("children", design.shape[0]):
        pyro.sample("kid_score", dist.Normal(design @ beta, sigma), obs=kid_score)


def kilpisjarvi(
    x: Tensor,
    pmualpha: Tensor,
    psalpha: Tensor,
    pmubeta: Tensor,
    psbeta: Tensor,
    y: Tensor | None = None,
) -> None:
    """Linear trend of the temperature over the years, which are not centred."""
    alpha = pyro.sample("alpha", dist.Normal(pmualpha, psalpha))
    beta = pyro.sample("beta", dist.Normal(pmubeta, psbeta))
    sigma = pyro.sample("sigma", _flat(constraints.positive))
    with pyro.plate("years", x.shape[0]):
        pyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def logmesquite(
    diam1: Tensor,
    diam2: Tensor,
    canopy_height: Tensor,
    total_height: Tensor,
    density: Tensor,
    group: Tensor,
    weight: Tensor | None = None,
) -> None:
    """Linear regression of the logarithmic weight on logarithmic sizes and a group."""
    sizes = torch.stack([diam1, diam2, canopy_height, total_height, density], dim=-1)
    design = torch.column_stack([torch.ones_like(group), sizes.log(), group])
    with pyro.plate("coefficients", design.shape[1]):
        beta = pyro.sample("beta", _flat())
    sigma = pyro.sample("sigma", _flat(constraints.positive))
    log_weight = None if weight is None else weight.log()
    with pyro.plate("bushes", design.shape[0]):
        pyro.sample("log_weight", dist.Normal(design @ beta, sigma), obs=log_weight)


def nes2000(
    real_ideo: Tensor,
    race_adj: Tensor,
    age_discrete: Tensor,
    educ1: Tensor,
    gender: Tensor,
    income: Tensor,
    partyid7: Tensor | None = None,
) -> None:
    """Linear regression on covariates and indicators of three of the four ages."""
    ages = age_discrete[:, None] == age_discrete.new_tensor([2, 3, 4])
    intercept = torch.ones_like(real_ideo)
    design = torch.column_stack([intercept, real_ideo, race_adj, ages, educ1, gender, income])
    with pyro.plate("coefficients", design.shape[1]):
        beta = pyro.sample("beta", _flat())
    sigma = pyro.sample("sigma", _flat(constraints.positive))
    with pyro.plate("voters", design.shape[0]):
        pyro.sample("partyid7", dist.Normal(design @ beta, sigma), obs=partyid7)


def nes_logit(income: Tensor, vote: Tensor | None = None) -> None:
    """Logistic regression on one covariate."""
    alpha = pyro.sample("alpha", _flat())
    beta = pyro.sample("beta", _flat())
    with pyro.plate("voters", income.shape[0]):
        pyro.sample("vote", dist.Bernoulli(logits=alpha + beta * income), obs=vote)


def sblrc(X: Tensor, y: Tensor | None = None) -> None:
    """Linear regression with proper priors."""
    with pyro.plate("coefficients", X.shape[1]):
        beta = pyro.sample("beta", dist.Normal(0, 10))
    sigma = pyro.sample("sigma", dist.HalfNormal(10))
    with pyro.plate("observations", X.shape[0]):
        pyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def wells_dist100(distance: Tensor, switched: Tensor | None = None) -> None:
    """Logistic regression on the distance in units of 100 metres."""
    distance100 = distance / 100
    alpha = pyro.sample("alpha", _flat())
    beta = pyro.sample("beta", _flat())
    with pyro.plate("households", distance100.shape[0]):
        pyro.sample("switched", dist.Bernoulli(logits=alpha + beta * distance100), obs=switched)


# ----------------------------------------------------------------------------------- hierarchical


def eight_schools_centered(sigma: Tensor, y: Tensor | None = None) -> None:
    """Eight schools, each effect sampled around their mean: a funnel."""
    mu = pyro.sample("mu", dist.Normal(0, 5))
    tau = pyro.sample("tau", dist.HalfCauchy(5))
    with pyro.plate("schools", sigma.shape[0]):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentered(sigma: Tensor, y: Tensor | None = None) -> None:
    """Eight schools, the effects being mu + tau theta_trans."""
    mu = pyro.sample("mu", dist.Normal(0, 5))
    tau = pyro.sample("tau", dist.HalfCauchy(5))
    with pyro.plate("schools", sigma.shape[0]):
        theta_trans = pyro.sample("theta_trans", dist.Normal(0, 1))
        theta = pyro.deterministic("theta", mu + tau * theta_trans, event_dim=0)
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


# ------------------------------------------------------------------------------ Gaussian processes


def _squared_exponential(x: Tensor, alpha: Tensor, rho: Tensor, diagonal: Tensor | float) -> Tensor:
    """Return alpha^2 exp(-(x_i - x_j)^2 / (2 rho^2)), with `diagonal` added where i = j."""
    kernel = alpha**2 * torch.exp(-0.5 * ((x[:, None] - x) / rho) ** 2)
    return kernel + diagonal * torch.eye(x.shape[0], dtype=x.dtype, device=x.device)


def gp_regr(x: Tensor, y: Tensor | None = None) -> None:
    """Gaussian process regression, the function being integrated out."""
    rho = pyro.sample("rho", dist.Gamma(25, 4))
    alpha = pyro.sample("alpha", dist.HalfNormal(2))
    sigma = pyro.sample("sigma", dist.HalfNormal(1))
    covariance = _squared_exponential(x, alpha, rho, sigma)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(x), covariance), obs=y)


def gp_pois_regr(x: Tensor, k: Tensor | None = None) -> None:
    """Poisson regression on a Gaussian process, whitened."""
    rho = pyro.sample("rho", dist.Gamma(25, 4))
    alpha = pyro.sample("alpha", dist.HalfNormal(2))
    cholesky = torch.linalg.cholesky(_squared_exponential(x, alpha, rho, 1e-10))
    with pyro.plate("points", x.shape[0]):
        f_tilde = pyro.sample("f_tilde", dist.Normal(0, 1))
        f = pyro.deterministic("f", cholesky @ f_tilde, event_dim=0)
        pyro.sample("k", dist.Poisson(f.exp()), obs=k)


# ------------------------------------------------------------------------------------- time series


def arK(y: Tensor) -> None:
    """Autoregression of order 5, given the first five values."""
    order = 5
    length = y.shape[0]
    lags = torch.stack([y[order - k : length - k] for k in range(1, order + 1)], dim=-1)
    alpha = pyro.sample("alpha", dist.Normal(0, 10))
    with pyro.plate("lags", order):
        beta = pyro.sample("beta", dist.Normal(0, 10))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with pyro.plate("times", length - order):
        pyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y[order:])


def _log_product(log_matrices: Tensor) -> Tensor:
    """Return the logarithm of the product, in order, of matrices (n, k, k) given by logarithms.

    Neighbours are multiplied by pairs, so that it takes log2 n rounds and not n.
    """
    while (n := log_matrices.shape[0]) > 1:
        left, right = log_matrices[: n - 1 : 2], log_matrices[1::2]
        products = torch.logsumexp(left[:, :, :, None] + right[:, None, :, :], dim=2)
        log_matrices = torch.cat([products, log_matrices[n - n % 2 :]])
    return log_matrices[0]


def hmm_example(y: Tensor) -> None:
    """Hidden Markov model of two states, which are summed out by products of matrices.

    `prior_mu` and `likelihood` are factors for the reasons given in the NumPyro program; Pyro's
    DiscreteHMM has a transition before the first value, this model has none.
    """
    mu = pyro.sample("mu", _flat(constraints.positive_ordered_vector, (2,)))
    pyro.factor("prior_mu", dist.Normal(torch.tensor([3.0, 10.0]), 1).log_prob(mu).sum())
    theta1 = pyro.sample("theta1", dist.Dirichlet(torch.ones(2)))
    theta2 = pyro.sample("theta2", dist.Dirichlet(torch.ones(2)))
    log_theta = torch.stack([theta1, theta2]).log()  # from state, to state
    log_emission = dist.Normal(mu, 1).log_prob(y[:, None])
    log_paths = _log_product(log_theta + log_emission[1:, None, :])  # from first, to last state
    pyro.factor("likelihood", torch.logsumexp(log_emission[0][:, None] + log_paths, dim=(0, 1)))


# --------------------------------------------------------------------------- differential equations


def _legendre_integrals(nodes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return times c (nodes + 1,) and integrals A (nodes + 1, nodes).

    c are the Gauss-Legendre points of [0, 1], then 1. A_ij is the integral from 0 to c_i of the
    polynomial of degree nodes - 1 that is 1 at c_j and 0 at the other points.
    """
    times = np.append((np.polynomial.legendre.leggauss(nodes)[0] + 1) / 2, 1)
    powers = np.arange(nodes)
    values = times[:-1, None] ** powers  # of the monomials t^k
    integrals = times[:, None] ** (powers + 1) / (powers + 1)
    return times, integrals @ np.linalg.inv(values)


def _lotka_volterra_log(log_z0: Tensor, ts: Tensor, theta: Tensor) -> Tensor:
    """Return log (u, v) at the times `ts` (n,), a tensor (n, 2), from `log_z0` at time 0.

    From each time to the next, by Gauss-Legendre collocation at 8 points (Hairer, Lubich & Wanner
    2006, Geometric Numerical Integration, section II.1.2), the equations solved by 8 Picard
    sweeps: log v from log u, then log u from log v. This takes a sixth of the operations of the
    NumPyro program's Runge-Kutta method, which would be slow as a loop in Python, and is exact to
    more digits.
    """
    times, integrals = (log_z0.new_tensor(a) for a in _legendre_integrals(8))
    growth_u, loss_u, loss_v, growth_v = theta.unbind(-1)
    log_u, log_v = log_z0.unbind(-1)
    path = []
    for length in torch.diff(ts, prepend=ts.new_zeros(1)):
        free_u = log_u + growth_u * length * times
        free_v = log_v - loss_v * length * times
        integrals_u, integrals_v = loss_u * length * integrals, growth_v * length * integrals
        path_u = log_u.expand(times.shape)
        for _ in range(8):
            path_v = free_v + integrals_v @ path_u[:-1].exp()
            path_u = free_u - integrals_u @ path_v[:-1].exp()
        log_u, log_v = path_u[-1], path_v[-1]
        path.append(torch.stack([log_u, log_v]))
    return torch.stack(path)


def lotka_volterra(ts: Tensor, y_init: Tensor | None = None, y: Tensor | None = None) -> None:
    """Lotka-Volterra equations with log-normal errors."""
    prior_loc, prior_scale = torch.tensor([1.0, 0.05] * 2), torch.tensor([0.5, 0.05] * 2)
    with pyro.plate("rates", 4):
        theta = pyro.sample("theta", _PositiveNormal(prior_loc, prior_scale))
    species = pyro.plate("species", 2, dim=-1)
    with species:
        z_init = pyro.sample("z_init", dist.LogNormal(math.log(10), 1))
        sigma = pyro.sample("sigma", dist.LogNormal(-1, 1))
        pyro.sample("y_init", dist.LogNormal(z_init.log(), sigma), obs=y_init)
    log_z = _lotka_volterra_log(z_init.log(), ts, theta)
    with pyro.plate("years", ts.shape[0], dim=-2), species:
        pyro.sample("y", dist.LogNormal(log_z, sigma), obs=y)
