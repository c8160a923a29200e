"""Maps, densities and acceptance of Proximal-IMH against closed forms and quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from ppl_ext.kernels import proximal_imh as imh
from ppl_ext.target import Target


def slow(*values):
    """The programs of each map take seconds to compile."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(autouse=True)
def wide(x64):
    pass


def target(operator, noise_sd, y, prior_sd=1.0):
    """Normal prior and noise; the operator's own values are the deterministic site `u`."""
    size = len(np.atleast_1d(prior_sd))

    def potential(z):
        residual = (y - operator(z["x"])) / noise_sd
        return (residual @ residual + jnp.sum((z["x"] / prior_sd) ** 2)) / 2

    n = len(y)
    return Target(
        language="numpyro",
        sites=(),
        plates=(),
        structure={"x": (size,)},
        potential_energy=potential,
        constrain_sites=lambda z: {"x": z["x"], "u": operator(z["x"])},
        unconstrain_sites=lambda values: values,
        observation=lambda z: (operator(z["x"]), jnp.full(n, noise_sd**2)),
        prior_covariance=lambda: jnp.asarray(prior_sd, float) ** 2,
    )


def settings(correction, base=None, **options):
    site = "u" if correction == "latent" else None
    return imh.Settings(base or imh.LAPLACE, correction, latent_site=site, **options)


def found(problem, options):
    return jax.jit(lambda z: imh.find_fit(z, problem, options))(jnp.zeros(problem.exact.size))


def proposals(size, problem, options, fit):
    @jax.jit
    @jax.vmap
    def run(key):
        return imh.candidate_at(*imh.propose(key, problem, options, fit), problem, options, fit)

    return run(jax.random.split(jax.random.key(0), size))


# --- linear operators: everything in closed form -----------------------------------------------


def linear(size, num_data, error=0.3, seed=1):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(num_data, size))
    b = a + error * rng.normal(size=(num_data, size))
    prior_sd, noise_sd = rng.uniform(0.5, 2.0, size), 0.4
    y = a @ (prior_sd * rng.normal(size=size)) + noise_sd * rng.normal(size=num_data)
    exact = target(lambda x: a @ x, noise_sd, y, prior_sd)
    approx = target(lambda x: b @ x, noise_sd, y, prior_sd)
    return imh.Problem(exact, approx), a, b, y, noise_sd, np.diag(prior_sd**-2.0)


def gaussian_posterior(operator, y, noise_sd, precision):
    covariance = np.linalg.inv(precision + operator.T @ operator / noise_sd**2)
    return covariance @ operator.T @ y / noise_sd**2, covariance


def evidence(operator, y, noise_sd, precision):
    """Of the unnormalised density exp(-U) of `target`."""
    mean, covariance = gaussian_posterior(operator, y, noise_sd, precision)
    residual = (y - operator @ mean) / noise_sd
    energy = (residual @ residual + mean @ precision @ mean) / 2
    return -energy + np.linalg.slogdet(2 * np.pi * covariance)[1] / 2


@pytest.mark.parametrize(
    ("correction", "shape"),
    [
        *[("affine", shape) for shape in ((5, 3), (3, 5))],
        *[("argmin", shape) for shape in ((5, 3), (3, 5))],
        ("latent", (4, 4)),
        (None, (5, 3)),
        *[
            pytest.param(correction, shape, marks=pytest.mark.slow)
            for correction in ("gn", "frozen")
            for shape in ((5, 3), (3, 5))
        ],
    ],
    ids=str,
)
def test_linear_operators_give_the_closed_form_map_and_density(correction, shape):
    beta = 0.7
    problem, a, b, y, noise_sd, w = linear(*shape)
    options = settings(correction, beta=beta)
    fit = found(problem, options)
    h = a.T @ a / noise_sd**2 + beta * w
    matrix = np.linalg.solve(h, a.T @ b / noise_sd**2 + beta * w)
    if correction is None:
        matrix = np.eye(shape[0])
    if correction == "latent":
        matrix = np.linalg.solve(a, b)
    mean, covariance = gaussian_posterior(b, y, noise_sd, w)
    candidates = proposals(50, problem, options, fit)
    assert candidates.round_trip.all()
    np.testing.assert_allclose(candidates.z, candidates.base @ matrix.T, rtol=1e-6)
    np.testing.assert_allclose(candidates.log_det, np.linalg.slogdet(matrix)[1], atol=1e-7)
    law = stats.multivariate_normal(matrix @ mean, matrix @ covariance @ matrix.T)
    np.testing.assert_allclose(candidates.log_q, law.logpdf(candidates.z), rtol=1e-6, atol=1e-6)
    # and where it was not proposed
    point = mean + 0.3
    log_q, base = jax.jit(lambda z: imh.log_proposal(z, problem, options, fit))(point)
    np.testing.assert_allclose(log_q, law.logpdf(point), rtol=1e-6)
    np.testing.assert_allclose(matrix @ np.asarray(base), point, rtol=1e-6)
    # the base is the cheap posterior itself: its weights are all its evidence
    np.testing.assert_allclose(candidates.approx_log_weight, evidence(b, y, noise_sd, w), rtol=1e-9)


@pytest.mark.slow
def test_correlated_priors_and_noise_enter_as_metric_and_weight():
    problem, a, b, *_ = linear(5, 3)
    rng = np.random.default_rng(3)
    w = np.cov(rng.normal(size=(5, 20)))
    m = np.cov(rng.normal(size=(3, 20)))
    expected = np.linalg.solve(a.T @ m @ a + 0.5 * w, a.T @ m @ b + 0.5 * w)
    for correction in ("argmin", "affine"):
        options = settings(correction, beta=0.5, metric=m, weight=w)
        fit = found(problem, options)
        candidate = jax.tree.map(lambda leaf: leaf[0], proposals(1, problem, options, fit))
        np.testing.assert_allclose(candidate.z, expected @ candidate.base, rtol=1e-6)
        np.testing.assert_allclose(candidate.log_det, np.linalg.slogdet(expected)[1], rtol=1e-6)
        np.testing.assert_allclose(
            candidate.log_q,
            options.base.log_prob(candidate.base, fit) - candidate.log_det,
            rtol=1e-9,
        )


@pytest.mark.slow
def test_equal_operators_give_the_posterior_itself():
    """Every weight is the evidence, so that every proposal is accepted."""
    problem, a, _, y, noise_sd, w = linear(4, 4)
    problem = imh.Problem(problem.exact, problem.exact)
    for correction in (None, "gn", "affine"):
        batch, _ = batch_of(problem, settings(correction), 20)
        log_w = imh.log_weight(batch.potential_energy, batch.log_q)
        np.testing.assert_allclose(log_w, evidence(a, y, noise_sd, w), rtol=1e-8)


@pytest.mark.slow
def test_a_large_beta_leaves_the_draws_where_they_are():
    problem, *_ = linear(5, 3)
    for correction in ("gn", "affine"):
        options = settings(correction, beta=1e12)
        candidate = proposals(1, problem, options, found(problem, options))
        np.testing.assert_allclose(candidate.z, candidate.base, atol=1e-9)
        np.testing.assert_allclose(candidate.log_det, 0, atol=1e-9)


def test_the_operator_error_cancels_to_first_order_at_beta_one():
    """Of the covariance of proposals: halving the error divides it by four, elsewhere by two."""

    def distance(error, beta):
        problem, a, b, y, noise_sd, w = linear(4, 6, error)
        options = settings("affine", beta=beta)
        fit = found(problem, options)
        matrix = jax.jit(jax.jacfwd(lambda z: forward(z, problem, options, fit)))(jnp.zeros(4))
        _, approx = gaussian_posterior(b, y, noise_sd, w)
        _, exact = gaussian_posterior(a, y, noise_sd, w)
        return np.linalg.norm(matrix @ approx @ matrix.T - exact)

    # to second order in the error the ratios are 3.9998 and 1.94
    assert abs(distance(1e-3, 1.0) / distance(5e-4, 1.0) - 4) < 0.01
    assert abs(distance(1e-3, 3.0) / distance(5e-4, 3.0) - 2) < 0.1


def forward(z, problem, options, fit):
    """The map on unconstrained vectors."""
    u = imh._solve(fit.prior_scale, z)
    return imh._times(fit.prior_scale, imh.make_map(problem, options, fit).forward(u)[0])


# --- a nonlinear operator in the plane, against quadrature -------------------------------------

DELTA, SIGMA = 0.22, 0.25
B = np.array([[1.1, 0.15], [-0.1, 0.9], [0.35, 0.2]])
SHIFT = np.array([0.05, -0.02, 0.0])
Y = np.array([0.9, 0.5, 0.45])


def curved(x):
    u, v = x[0], x[1]
    return jnp.stack(
        [u + DELTA * v**2, v + DELTA * jnp.sin(1.5 * u), 0.3 * u + 0.2 * v + DELTA * u * v]
    )


def curved_cheap(x):
    return B @ x + SHIFT + 0.05 * jnp.sin(x[0]) * jnp.asarray([1.0, 0.5, -1.0])


def plane(cheap=curved_cheap, rows=slice(None)):
    sd = np.ones(2)
    exact = target(lambda x: curved(x)[rows], SIGMA, Y[rows], sd)
    return imh.Problem(exact, target(lambda x: cheap(x)[rows], SIGMA, Y[rows], sd))


def quadrature(problem):
    """Evidence, and mean of (x, y, x^2, xy), by Simpson's rule."""
    grid = np.linspace(-5, 5, 801)
    points = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1)
    energy = jax.jit(jax.vmap(jax.vmap(lambda x: problem.exact.potential_energy({"x": x}))))(points)
    density = np.exp(-np.asarray(energy))
    total = lambda f: integrate.simpson(integrate.simpson(f, x=grid), x=grid)  # noqa: E731
    z = total(density)
    x, y = points[..., 0], points[..., 1]
    return z, np.array([total(f * density) / z for f in (x, y, x**2, x * y)])


def batch_of(problem, options, size, seed=0):
    options = imh.Settings(**{**options.__dict__, "batch_size": size})
    fit = found(problem, options)

    @jax.jit
    def run(key):
        state = imh.init(key, {"x": jnp.zeros(problem.exact.size)}, problem, options, fit)
        return imh.refill(key, state, problem, options).batch

    return run(jax.random.key(seed)), fit


@pytest.mark.parametrize("correction", ["argmin", *slow("gn", "affine", "frozen", "latent")])
def test_log_determinants_are_those_of_the_map(correction):
    """Against differentiating the map itself, and its differences where it is a minimiser."""
    # `latent` needs as many numbers as unknowns
    rows = slice(2) if correction == "latent" else slice(None)
    problem, options = plane(rows=rows), settings(correction)
    fit = found(problem, options)
    candidates = proposals(10, problem, options, fit)
    move = jax.jit(jax.vmap(lambda z: forward(z, problem, options, fit)))
    np.testing.assert_allclose(move(candidates.base), candidates.z, rtol=1e-9)
    h = 1e-5
    shifts = [
        (move(candidates.base + h * e) - move(candidates.base - h * e)) / (2 * h) for e in np.eye(2)
    ]
    sign, expected = np.linalg.slogdet(np.stack(shifts, -1))
    np.testing.assert_allclose(candidates.log_det, expected, atol=1e-6)
    np.testing.assert_array_equal(candidates.sign, sign)


def test_the_minimiser_is_stationary_and_two_steps_come_near():
    problem = plane()
    options = settings("argmin")
    batch, fit = batch_of(problem, options, 100)
    assert batch.round_trip.all()
    exact, approx = imh.operators(problem, options, fit)

    @jax.grad
    def gradient(v, base):
        return (jnp.sum((exact(v) - approx(base)) ** 2) + jnp.sum((v - base) ** 2)) / 2

    assert jnp.abs(jax.jit(jax.vmap(gradient))(batch.z, batch.base)).max() < 1e-7
    two = settings("gn", steps=2)
    near = jax.jit(jax.vmap(lambda z: forward(z, problem, two, fit)))(batch.base)
    assert jnp.abs(near - batch.z).max() < 0.02


@pytest.mark.parametrize("correction", ["gn", "argmin", *slow(None, "affine", "frozen", "latent")])
def test_the_mean_weight_is_the_evidence_and_weighted_draws_have_the_moments(correction):
    """Five standard errors, 3e-6 false alarms per comparison; the error is below 0.3 %.

    What a wrong density does: 4 % for one unconverged step, 2 % without the curvature (argmin) or
    without the Jacobian (gn).
    """
    rows = slice(2) if correction == "latent" else slice(None)
    problem = plane(rows=rows)
    batch, _ = batch_of(problem, settings(correction), 20_000)
    evidence, moments = quadrature(problem)
    weight = np.exp(imh.log_weight(batch.potential_energy, batch.log_q)) / evidence
    error = weight.std() / np.sqrt(weight.size)
    assert error < (0.02 if correction is None else 0.003)
    assert abs(weight.mean() - 1) < 5 * error
    x, y = batch.z.T
    for f, moment in zip((x, y, x**2, x * y), moments, strict=True):
        term = weight * (f - moment)
        assert abs(term.mean()) < 5 * term.std() / np.sqrt(term.size)


def test_a_minimiser_that_was_not_reached_is_no_proposal(monkeypatch):
    """Treated as converged its weights would be 4 % too small; here they count as zero.

    The round trip would see it, too: it solves for stationarity.
    """
    monkeypatch.setattr(imh, "MAX_MINIMISE", 1)
    problem, options = plane(), settings("argmin")
    batch, fit = batch_of(problem, options, 200)
    assert not batch.round_trip.any()
    _, converged, _ = jax.jit(imh.make_map(problem, options, fit).forward)(batch.base[0])
    assert not converged
    assert np.isneginf(imh.log_weight(batch.potential_energy, batch.log_q)).all()


@pytest.mark.parametrize("correction", ["affine", *slow(None, "gn", "frozen", "argmin", "latent")])
def test_the_transition_keeps_exact_draws_exact(correction):
    """Draws of the posterior (by rejection from the prior) after one transition each.

    Five standard errors of 20,000 independent chains: 3e-6 false alarms per moment.
    """
    rows = slice(2) if correction == "latent" else slice(None)
    problem = plane(rows=rows)
    options = settings(correction, batch_size=1)
    fit = found(problem, options)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(400_000, 2))
    energy = jax.jit(jax.vmap(lambda x: problem.exact.potential_energy({"x": x})))(x)
    likelihood = np.asarray(-energy) + (x**2).sum(1) / 2
    x = x[np.log(rng.uniform(size=len(x))) < likelihood][:20_000]
    assert len(x) > 5_000

    @jax.vmap
    def move(x, key):
        key_propose, key_uniform = jax.random.split(key)
        state = imh.init(key, {"x": x}, problem, options, fit)
        log_q, _ = imh.log_proposal(x, problem, options, fit)
        state = imh.refill(key_propose, state._replace(log_q=log_q), problem, options)
        candidate = jax.tree.map(lambda leaf: leaf[0], state.batch)
        new = imh.transition(jax.random.uniform(key_uniform), candidate, state, problem)
        return new.z["x"], new.accept_prob

    new, accept_prob = jax.jit(move)(jnp.asarray(x), jax.random.split(jax.random.key(2), len(x)))
    _, moments = quadrature(problem)
    assert accept_prob.mean() > (0.25 if correction is None else 0.8)
    for f, moment in zip(
        (new[:, 0], new[:, 1], new[:, 0] ** 2, new[:, 0] * new[:, 1]), moments, strict=True
    ):
        assert abs(f.mean() - moment) < 5 * f.std() / np.sqrt(len(x))


# --- maps that are not injective ---------------------------------------------------------------


@pytest.mark.parametrize("correction", ["affine", *slow("gn", "argmin")])
def test_a_fold_costs_proposals_but_no_exactness(correction):
    """Two points of the cheap model lead to each point near the fold.

    The mean weight is the evidence of the points that are proposed at all, by quadrature; five
    standard errors. Without the round trip it is 1.3 times as large or more.
    """
    sd = 0.35
    a = lambda x: x + 0.35 * jnp.sin(1.7 * x)  # noqa: E731
    b = lambda x: 1.25 * x - 0.06 * x**3 + 0.1  # noqa: E731
    y = np.array([1.1])
    problem = imh.Problem(target(a, sd, y, np.ones(1)), target(b, sd, y, np.ones(1)))
    heavy = imh.Base(
        lambda key, fit: 3.0 * jax.random.t(key, 5.0, (1,)),
        lambda z, fit: jax.scipy.stats.t.logpdf(z[0], 5.0, 0.0, 3.0),
    )
    options = settings(correction, heavy)
    batch, fit = batch_of(problem, options, 20_000)
    grid = np.linspace(-9, 9, 10_001)

    @jax.jit
    @jax.vmap
    def density(x):
        log_q, _ = imh.log_proposal(x, problem, options, fit)
        return jnp.exp(-problem.exact.potential_energy({"x": x})), jnp.isfinite(log_q)

    pi, reached = map(np.asarray, density(grid[:, None]))
    evidence = integrate.trapezoid(pi * reached, grid)
    assert evidence > 0.5 * integrate.trapezoid(pi, grid)
    assert (batch.sign < 0).any() and not batch.round_trip.all()
    weight = np.exp(imh.log_weight(batch.potential_energy, batch.log_q)) / evidence
    assert abs(weight.mean() - 1) < 5 * weight.std() / np.sqrt(weight.size)
    every = jax.vmap(lambda z: heavy.log_prob(z, fit))(batch.base) - batch.log_det
    double = np.exp(imh.log_weight(batch.potential_energy, every)) / evidence
    assert double.mean() > 1.3


# --- the cheap posterior by a Markov chain -----------------------------------------------------


def test_the_inner_chain_starts_from_the_accepted_point():
    """500 independent chains of short inner steps, against quadrature; five standard errors.

    Continued from the proposed point instead, the error is above 20 of them.
    """
    sd, y = 0.35, np.array([1.1])
    a = lambda x: x + 0.35 * jnp.sin(1.7 * x)  # noqa: E731
    b = lambda x: 0.85 * x + 0.25 - 0.15 * jnp.cos(x)  # noqa: E731
    problem = imh.Problem(target(a, sd, y, np.ones(1)), target(b, sd, y, np.ones(1)))

    def walk(state, z):
        """Random-walk Metropolis on the cheap posterior."""
        key, key_move, key_accept = jax.random.split(state[0], 3)
        new = z + 0.35 * jax.random.normal(key_move, z.shape)
        log_ratio = problem.approx.log_density(new) - problem.approx.log_density(z)
        accepted = jnp.log(jax.random.uniform(key_accept)) < log_ratio
        return key, jnp.where(accepted, new, z)

    chain = imh.Chain(lambda key, z: (key, z), walk, lambda state: state[1])
    options = settings("affine", chain, inner_steps=1)
    fit = found(problem, options)

    def run(key):
        state = imh.init(key, {"x": jnp.ones(1)}, problem, options, fit)
        step = lambda state, _: (imh.step(state, problem, options), state.z["x"][0])  # noqa: E731
        _, x = jax.lax.scan(step, state, None, length=1000)
        x = x[200:]
        return jnp.stack([x.mean(), (x**2).mean()])

    moments = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 500))
    grid = np.linspace(-5, 5, 10_001)
    pi = np.exp(-jax.vmap(lambda x: problem.exact.potential_energy({"x": x}))(grid[:, None]))
    exact = np.array([np.sum(pi * grid), np.sum(pi * grid**2)]) / np.sum(pi)
    error = moments.std(0) / np.sqrt(500)
    assert (np.abs(moments.mean(0) - exact) < 5 * error).all()
