"""The reference problems as NumPyro programs.

One function per problem, named as the problem. Its arguments are the data, under the names that
posteriordb gives them: first what the model conditions on, then, with default None, what it
observes, so that ``Predictive(model, samples)(key, *args)`` draws new observations. The sampled
and deterministic sites together carry every parameter of the reference posterior.

Sources: posteriordb (Magnusson et al., 2025, https://proceedings.mlr.press/v258/magnusson25a.html)
for the models; each function's docstring for its formula, where N(m, s) has standard deviation s,
N+ is restricted to positive values and HalfN(s) is N+(0, s).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints


def _flat(
    constraint: constraints.Constraint = constraints.real, shape: tuple[int, ...] = ()
) -> dist.ImproperUniform:
    """Return the improper flat density over the values of `shape` that fulfil `constraint`."""
    return dist.ImproperUniform(constraint, (), event_shape=shape)


# ------------------------------------------------------------------------------------ regressions


def GLM_Poisson(year: ArrayLike, C: ArrayLike | None = None) -> None:
    """C ~ Poisson(exp(alpha + beta1 t + beta2 t^2 + beta3 t^3)), t the standardised `year`.

    alpha ~ U(-20, 20); beta1, beta2, beta3 ~ U(-10, 10).
    """
    year = jnp.asarray(year)
    alpha = numpyro.sample("alpha", dist.Uniform(-20, 20))
    beta1 = numpyro.sample("beta1", dist.Uniform(-10, 10))
    beta2 = numpyro.sample("beta2", dist.Uniform(-10, 10))
    beta3 = numpyro.sample("beta3", dist.Uniform(-10, 10))
    log_rate = alpha + beta1 * year + beta2 * year**2 + beta3 * year**3
    with numpyro.plate("years", year.shape[0]):
        numpyro.sample("C", dist.Poisson(jnp.exp(log_rate)), obs=C)


def kidscore_interaction(
    mom_hs: ArrayLike, mom_iq: ArrayLike, kid_score: ArrayLike | None = None
) -> None:
    """kid_score ~ N(beta . (1, mom_hs, mom_iq, mom_hs mom_iq), sigma).

    beta flat; sigma ~ HalfCauchy(2.5).
    """
    mom_hs, mom_iq = jnp.asarray(mom_hs), jnp.asarray(mom_iq)
    design = jnp.stack([jnp.ones_like(mom_iq), mom_hs, mom_iq, mom_hs * mom_iq], axis=-1)
    with numpyro.plate("coefficients", design.shape[1]):
        beta = numpyro.sample("beta", _flat())
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    with numpyro.plate("children", design.shape[0]):
        numpyro.sample("kid_score", dist.Normal(design @ beta, sigma), obs=kid_score)


def kilpisjarvi(
    x: ArrayLike,
    pmualpha: ArrayLike,
    psalpha: ArrayLike,
    pmubeta: ArrayLike,
    psbeta: ArrayLike,
    y: ArrayLike | None = None,
) -> None:
    """y ~ N(alpha + beta x, sigma), x the year and y degrees Celsius.

    alpha ~ N(pmualpha, psalpha); beta ~ N(pmubeta, psbeta); sigma flat on the positive numbers.
    """
    x = jnp.asarray(x)
    alpha = numpyro.sample("alpha", dist.Normal(pmualpha, psalpha))
    beta = numpyro.sample("beta", dist.Normal(pmubeta, psbeta))
    sigma = numpyro.sample("sigma", _flat(constraints.positive))
    with numpyro.plate("years", x.shape[0]):
        numpyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def logmesquite(
    diam1: ArrayLike,
    diam2: ArrayLike,
    canopy_height: ArrayLike,
    total_height: ArrayLike,
    density: ArrayLike,
    group: ArrayLike,
    weight: ArrayLike | None = None,
) -> None:
    """log weight ~ N(beta . (1, log sizes, group), sigma), sizes in the order of the arguments.

    beta flat; sigma flat on the positive numbers. The observed site is `log_weight`.
    """
    sizes = jnp.stack(
        [jnp.asarray(size) for size in (diam1, diam2, canopy_height, total_height, density)],
        axis=-1,
    )
    design = jnp.column_stack([jnp.ones(sizes.shape[0]), jnp.log(sizes), jnp.asarray(group)])
    log_weight = None if weight is None else jnp.log(jnp.asarray(weight))
    with numpyro.plate("coefficients", design.shape[1]):
        beta = numpyro.sample("beta", _flat())
    sigma = numpyro.sample("sigma", _flat(constraints.positive))
    with numpyro.plate("bushes", design.shape[0]):
        numpyro.sample("log_weight", dist.Normal(design @ beta, sigma), obs=log_weight)


def nes2000(
    real_ideo: ArrayLike,
    race_adj: ArrayLike,
    age_discrete: ArrayLike,
    educ1: ArrayLike,
    gender: ArrayLike,
    income: ArrayLike,
    partyid7: ArrayLike | None = None,
) -> None:
    """partyid7 ~ N(beta . (1, real_ideo, race_adj, age 2, age 3, age 4, educ1, ...), sigma).

    "age k" indicates ``age_discrete == k``; gender and income are last. beta flat; sigma flat on
    the positive numbers.
    """
    real_ideo, age_discrete = jnp.asarray(real_ideo), jnp.asarray(age_discrete)
    design = jnp.column_stack(
        [
            jnp.ones_like(real_ideo),
            real_ideo,
            jnp.asarray(race_adj),
            age_discrete[:, None] == jnp.array([2, 3, 4]),
            jnp.asarray(educ1),
            jnp.asarray(gender),
            jnp.asarray(income),
        ]
    )
    with numpyro.plate("coefficients", design.shape[1]):
        beta = numpyro.sample("beta", _flat())
    sigma = numpyro.sample("sigma", _flat(constraints.positive))
    with numpyro.plate("voters", design.shape[0]):
        numpyro.sample("partyid7", dist.Normal(design @ beta, sigma), obs=partyid7)


def nes_logit(income: ArrayLike, vote: ArrayLike | None = None) -> None:
    """vote ~ Bernoulli(logit^-1(alpha + beta income)); alpha, beta flat."""
    income = jnp.asarray(income)
    alpha = numpyro.sample("alpha", _flat())
    beta = numpyro.sample("beta", _flat())
    with numpyro.plate("voters", income.shape[0]):
        numpyro.sample("vote", dist.Bernoulli(logits=alpha + beta * income), obs=vote)


def sblrc(X: ArrayLike, y: ArrayLike | None = None) -> None:
    """y ~ N(X beta, sigma); beta ~ N(0, 10); sigma ~ HalfN(10)."""
    X = jnp.asarray(X)
    with numpyro.plate("coefficients", X.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    with numpyro.plate("observations", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def wells_dist100(distance: ArrayLike, switched: ArrayLike | None = None) -> None:
    """switched ~ Bernoulli(logit^-1(alpha + beta distance / 100)); alpha, beta flat.

    distance in metres is posteriordb's `dist`.
    """
    distance100 = jnp.asarray(distance) / 100
    alpha = numpyro.sample("alpha", _flat())
    beta = numpyro.sample("beta", _flat())
    with numpyro.plate("households", distance100.shape[0]):
        numpyro.sample("switched", dist.Bernoulli(logits=alpha + beta * distance100), obs=switched)


# ----------------------------------------------------------------------------------- hierarchical


def eight_schools_centered(sigma: ArrayLike, y: ArrayLike | None = None) -> None:
    """y ~ N(theta, sigma); theta ~ N(mu, tau); mu ~ N(0, 5); tau ~ HalfCauchy(5)."""
    sigma = jnp.asarray(sigma)
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", sigma.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentered(sigma: ArrayLike, y: ArrayLike | None = None) -> None:
    """As `eight_schools_centered`, with theta = mu + tau theta_trans, theta_trans ~ N(0, 1)."""
    sigma = jnp.asarray(sigma)
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", sigma.shape[0]):
        theta_trans = numpyro.sample("theta_trans", dist.Normal(0, 1))
        theta = numpyro.deterministic("theta", mu + tau * theta_trans)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


# ------------------------------------------------------------------------------ Gaussian processes


def _squared_exponential(x: Array, alpha: Array, rho: Array, diagonal: ArrayLike) -> Array:
    """Return alpha^2 exp(-(x_i - x_j)^2 / (2 rho^2)), with `diagonal` added where i = j."""
    kernel = alpha**2 * jnp.exp(-0.5 * ((x[:, None] - x) / rho) ** 2)
    return kernel + diagonal * jnp.eye(x.shape[0])


def gp_regr(x: ArrayLike, y: ArrayLike | None = None) -> None:
    """y ~ N(0, K + sigma I), K_ij = alpha^2 exp(-(x_i - x_j)^2 / (2 rho^2)).

    rho ~ Gamma(25, rate 4); alpha ~ HalfN(2); sigma ~ HalfN(1): a variance, as it stands in the
    covariance without a square.
    """
    x = jnp.asarray(x)
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    covariance = _squared_exponential(x, alpha, rho, sigma)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(x.shape), covariance), obs=y)


def gp_pois_regr(x: ArrayLike, k: ArrayLike | None = None) -> None:
    """k ~ Poisson(exp f), f = L f_tilde, L the Cholesky factor of K + 1e-10 I, K as in `gp_regr`.

    f_tilde ~ N(0, 1); rho ~ Gamma(25, rate 4); alpha ~ HalfN(2).
    """
    x = jnp.asarray(x)
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    cholesky = jnp.linalg.cholesky(_squared_exponential(x, alpha, rho, 1e-10))
    with numpyro.plate("points", x.shape[0]):
        f_tilde = numpyro.sample("f_tilde", dist.Normal(0, 1))
        f = numpyro.deterministic("f", cholesky @ f_tilde)
        numpyro.sample("k", dist.Poisson(jnp.exp(f)), obs=k)


# ------------------------------------------------------------------------------------- time series


def arK(y: ArrayLike) -> None:
    """y_t ~ N(alpha + sum_k beta_k y_(t-k), sigma) for t > 5, given the first five values.

    alpha ~ N(0, 10); beta_1, ..., beta_5 ~ N(0, 10); sigma ~ HalfCauchy(2.5). The observed site
    `y` holds the values after the fifth.
    """
    order = 5
    y = jnp.asarray(y)
    length = y.shape[0]
    lags = jnp.stack([y[order - k : length - k] for k in range(1, order + 1)], axis=-1)
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    with numpyro.plate("lags", order):
        beta = numpyro.sample("beta", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    with numpyro.plate("times", length - order):
        numpyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y[order:])


def hmm_example(y: ArrayLike) -> None:
    """y_t ~ N(mu_(z_t), 1), z a Markov chain with transition rows theta1 and theta2.

    mu_1 ~ N(3, 1), mu_2 ~ N(10, 1), 0 < mu_1 < mu_2; theta1, theta2 flat on the simplex. z is
    summed out by the forward algorithm; z_1 has weight 1 in either state. The site `prior_mu` is
    a factor since no distribution of NumPyro is a normal restricted to ordered values, the site
    `likelihood` since none is a hidden Markov model.
    """
    y = jnp.asarray(y)
    mu = numpyro.sample("mu", _flat(constraints.positive_ordered_vector, (2,)))
    numpyro.factor("prior_mu", dist.Normal(jnp.array([3.0, 10.0]), 1).log_prob(mu).sum())
    theta1 = numpyro.sample("theta1", dist.Dirichlet(jnp.ones(2)))
    theta2 = numpyro.sample("theta2", dist.Dirichlet(jnp.ones(2)))
    log_theta = jnp.log(jnp.stack([theta1, theta2]))
    log_emission = dist.Normal(mu, 1).log_prob(y[:, None])

    def forward(log_alpha: Array, log_emission_t: Array) -> tuple[Array, None]:
        log_joint = log_alpha[:, None] + log_theta  # from state, to state
        return jax.nn.logsumexp(log_joint, axis=0) + log_emission_t, None

    log_alpha, _ = lax.scan(forward, log_emission[0], log_emission[1:])
    numpyro.factor("likelihood", jax.nn.logsumexp(log_alpha))


# --------------------------------------------------------------------------- differential equations


def _lotka_volterra_log(log_z0: Array, ts: Array, theta: Array, steps: int) -> Array:
    """Return log (u, v) at the times `ts` (n,), an array (n, 2), from `log_z0` at time 0.

    u' = (theta_1 - theta_2 v) u, v' = (theta_4 u - theta_3) v, by the classical Runge-Kutta method
    of order 4 with `steps` equal steps from each time to the next. The logarithms are what is
    integrated: they keep u and v positive and the relative error even, small v included.
    """

    def slope(log_z: Array) -> Array:
        u, v = jnp.exp(log_z)
        return jnp.stack([theta[0] - theta[1] * v, theta[3] * u - theta[2]])

    def interval(log_z: Array, length: Array) -> tuple[Array, Array]:
        h = length / steps

        def step(log_z: Array, _: None) -> tuple[Array, None]:
            k1 = slope(log_z)
            k2 = slope(log_z + h / 2 * k1)
            k3 = slope(log_z + h / 2 * k2)
            k4 = slope(log_z + h * k3)
            return log_z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        log_z, _ = lax.scan(step, log_z, None, length=steps)
        return log_z, log_z

    _, path = lax.scan(interval, log_z0, jnp.diff(ts, prepend=0))
    return path


def lotka_volterra(
    ts: ArrayLike, y_init: ArrayLike | None = None, y: ArrayLike | None = None
) -> None:
    """y_init ~ LogNormal(log z_init, sigma), y ~ LogNormal(log z(ts), sigma): hare and lynx.

    z = (u, v) solves u' = (theta_1 - theta_2 v) u, v' = (theta_4 u - theta_3) v from z_init at
    time 0; ts in years (n,), y in thousands of pelts (n, 2). theta_1, theta_3 ~ N+(1, 0.5);
    theta_2, theta_4 ~ N+(0.05, 0.05); z_init ~ LogNormal(log 10, 1); sigma ~ LogNormal(-1, 1).
    """
    ts = jnp.asarray(ts)
    prior_loc, prior_scale = jnp.array([1.0, 0.05, 1.0, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])
    with numpyro.plate("rates", 4):
        theta = numpyro.sample("theta", dist.TruncatedNormal(prior_loc, prior_scale, low=0))
    species = numpyro.plate("species", 2, dim=-1)
    with species:
        z_init = numpyro.sample("z_init", dist.LogNormal(jnp.log(10.0), 1))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        numpyro.sample("y_init", dist.LogNormal(jnp.log(z_init), sigma), obs=y_init)
    # 20 steps a year: the log density is off by less than 1e-5 over the posterior.
    log_z = _lotka_volterra_log(jnp.log(z_init), ts, theta, steps=20)
    with numpyro.plate("years", ts.shape[0], dim=-2), species:
        numpyro.sample("y", dist.LogNormal(log_z, sigma), obs=y)
