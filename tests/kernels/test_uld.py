"""The integrators against exact laws, and what warm-up finds against known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov
from scipy.special import gamma

from ppl_ext.kernels import uld
from ppl_ext.target import potential_target

SETTINGS = uld.Settings()
CURVATURES = np.array([0.3, 1.0, 2.5])


def gaussian(curvatures):
    return potential_target(
        lambda z: 0.5 * jnp.sum(jnp.asarray(curvatures) * z["x"] ** 2),
        {"x": np.zeros(len(curvatures))},
    )


def adapt_state(target, **values):
    start = {"x": jnp.ones(target.size)}
    shapes = jax.eval_shape(lambda key: uld.init(key, start, target, SETTINGS), jax.random.key(0))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes.adapt_state)
    return ones._replace(**{name: jnp.asarray(value) for name, value in values.items()})


def affine_map(target, integrator, adapt):
    """Matrix and noise matrix of one step on a quadratic potential, read off the step."""
    d, rows = target.size, uld.SPLITTINGS[integrator].count("O")
    grad = jax.grad(lambda x: -target.log_density(x))

    def step(u):
        x, v, noise = u[:d], u[d : 2 * d], u[2 * d :].reshape(rows, d)
        phase = uld.Phase(x, v, -target.log_density(x), grad(x))
        new, _ = uld.integrator_step(noise, phase, target, integrator, adapt)
        return jnp.concatenate([new.x, new.v])

    jacobian = np.asarray(jax.jacfwd(step)(jnp.zeros((2 + rows) * d)))
    return jacobian[:, : 2 * d], jacobian[:, 2 * d :]


@pytest.mark.parametrize("h", [0.1, 0.8])
@pytest.mark.parametrize("friction", [0.2, 2.0])
@pytest.mark.parametrize("integrator", list(uld.SPLITTINGS))
def test_stationary_law_on_a_gaussian_is_the_known_one(x64, integrator, friction, h):
    target = gaussian(CURVATURES)
    adapt = adapt_state(target, step_size=h, friction=friction)
    matrix, noise = affine_map(target, integrator, adapt)
    covariance = solve_discrete_lyapunov(matrix, noise @ noise.T)
    contraction = 1 - h**2 * CURVATURES / 4
    if integrator == "baoab":
        expected = np.concatenate([1 / CURVATURES, contraction])
    else:
        expected = np.concatenate([1 / (CURVATURES * contraction), np.ones(3)])
    np.testing.assert_allclose(covariance, np.diag(expected), rtol=1e-9, atol=1e-10)


def test_energy_error_target_keeps_the_bias_of_obabo_at_its_tolerance(x64):
    """Variance of W and bias of the standard deviation, both exact, to leading order in h."""
    settings = uld.Settings(integrator="obabo", bias_tolerance=0.01)
    h, target = np.sqrt(8 * 0.01), gaussian([1.0])
    adapt = adapt_state(target, step_size=h, friction=1.0)
    matrix, noise = affine_map(target, "obabo", adapt)
    covariance = solve_discrete_lyapunov(matrix, noise @ noise.T)
    bias = np.sqrt(covariance[0, 0]) - 1
    np.testing.assert_allclose(bias, settings.bias_tolerance, rtol=0.05)

    def work(u):
        x, v, noise = u[:1], u[1:2], u[2:, None]
        phase = uld.Phase(x, v, -target.log_density(x), x)
        return uld.integrator_step(noise, phase, target, "obabo", adapt)[1]

    # W = u A u / 2 with u ~ N(0, S), so that Var(W) = tr(A S A S) / 2
    form = np.asarray(jax.hessian(work)(jnp.zeros(4)))
    both = form @ np.diag([covariance[0, 0], 1, 1, 1])
    np.testing.assert_allclose(np.trace(both @ both) / 2, settings.energy_error_target, rtol=0.1)


@pytest.mark.parametrize("integrator", list(uld.SPLITTINGS))
def test_a_step_runs_backwards_with_the_opposite_energy_error(x64, integrator):
    target = potential_target(
        lambda z: jnp.sum(z["x"] ** 4 / 4) + z["x"][0] * z["x"][1], {"x": np.zeros(2)}
    )
    scale = jnp.array([[1.3, 0.0], [0.4, 0.7]])
    h, friction = 0.4, 1.2
    adapt = adapt_state(target, step_size=h, friction=friction, scale=scale)
    value_and_grad = jax.value_and_grad(lambda x: -target.log_density(x))
    x, v = jnp.array([0.7, -1.1]), jnp.array([0.3, 0.9])
    noise = jax.random.normal(jax.random.key(0), (uld.SPLITTINGS[integrator].count("O"), 2))
    start = uld.Phase(x, v, *value_and_grad(x))
    end, error = uld.integrator_step(noise, start, target, integrator, adapt)

    # velocities before and after each O part, last part first
    if integrator == "baoab":
        e = np.exp(-friction * h)
        before = [start.v - h / 2 * scale.T @ start.grad]
        after = [end.v + h / 2 * scale.T @ end.grad]
    else:
        e = np.exp(-friction * h / 2)
        s = np.sqrt(1 - e**2)
        before = [(end.v - s * noise[1]) / e, start.v]
        after = [end.v, e * start.v + s * noise[0]]
    s = np.sqrt(1 - e**2)
    back = jnp.stack([(e * b - a) / s for a, b in zip(before, after, strict=True)])
    again, error_back = uld.integrator_step(back, end._replace(v=-end.v), target, integrator, adapt)
    np.testing.assert_allclose(again.x, start.x, rtol=1e-12)
    np.testing.assert_allclose(again.v, -start.v, rtol=1e-12)
    np.testing.assert_allclose(error_back, -error, rtol=1e-10)
    assert abs(error) > 1e-3


@pytest.mark.parametrize("integrator", list(uld.SPLITTINGS))
def test_energy_error_is_the_log_metropolis_ratio(x64, integrator):
    """E exp(-W) = 1 from exact draws of a quartic target.

    A z-score beyond 4.5 has probability 7e-6; a missing term of W moves it by more than 20.
    """
    potential = lambda x: x**4 / 4 + x**2 / 2  # noqa: E731
    target = potential_target(lambda z: jnp.sum(potential(z["x"])), {"x": np.zeros(1)})
    adapt = adapt_state(target, step_size=0.5, friction=1.5)
    n, key = 200_000, jax.random.key(1)
    grid = np.linspace(-5, 5, 100_001)
    cdf = np.cumsum(np.exp(-potential(grid)))
    rng = np.random.default_rng(2)
    x = jnp.asarray(np.interp(rng.random(n), cdf / cdf[-1], grid))[:, None]
    v = jnp.asarray(rng.normal(size=(n, 1)))
    noise = jax.random.normal(key, (n, uld.SPLITTINGS[integrator].count("O"), 1))

    def error(x, v, noise):
        value, grad = jax.value_and_grad(lambda x: -target.log_density(x))(x)
        return uld.integrator_step(noise, uld.Phase(x, v, value, grad), target, integrator, adapt)[
            1
        ]

    ratio = np.exp(-np.asarray(jax.vmap(error)(x, v, noise)))
    assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / np.sqrt(n)
    assert ratio.std() > 0.01


def test_noise_has_unit_stationary_variance_in_float32_at_tiny_friction():
    """O leaves N(0, 1) invariant: e^2 + s^2 = 1 to rounding, with s^2 = 2 friction h."""
    target = gaussian([1.0])
    adapt = adapt_state(target, step_size=np.float32(1e-3), friction=np.float32(1e-4))
    _, noise = affine_map(target, "baoab", adapt)
    np.testing.assert_allclose(noise[1, 0] ** 2, 2e-7, rtol=1e-4)


@pytest.mark.parametrize("integrator", list(uld.SPLITTINGS))
@pytest.mark.parametrize("dense", [False, True])
def test_a_scale_is_a_change_of_coordinates(x64, integrator, dense):
    """A step with L on U(x) is a step with the identity on U(L y), where x = L y."""
    scale = jnp.array([[0.5, 0.0, 0.0], [0.2, 2.0, 0.0], [-1.0, 0.3, 3.0]])
    factor = scale if dense else jnp.diag(jnp.diag(scale))
    energy = lambda x: jnp.sum(x**4 / 4) + x[0] * x[1]  # noqa: E731
    noise = jax.random.normal(jax.random.key(0), (uld.SPLITTINGS[integrator].count("O"), 3))
    y, v = jnp.array([0.4, -0.3, 0.2]), jnp.array([1.0, 0.5, -0.8])
    results = []
    for potential, position, used in (
        (energy, factor @ y, scale if dense else jnp.diag(scale)),
        (lambda y: energy(factor @ y), y, jnp.ones(3)),
    ):
        target = potential_target(lambda z, f=potential: f(z["x"]), {"x": np.zeros(3)})
        adapt = adapt_state(target, scale=used, step_size=0.3, friction=1.0)
        phase = uld.Phase(position, v, potential(position), jax.grad(potential)(position))
        results.append(uld.integrator_step(noise, phase, target, integrator, adapt))
    (new, error), (new_y, error_y) = results
    np.testing.assert_allclose(new.x, factor @ new_y.x, rtol=1e-12)
    np.testing.assert_allclose(new.v, new_y.v, rtol=1e-12)
    np.testing.assert_allclose(factor.T @ new.grad, new_y.grad, rtol=1e-11)
    np.testing.assert_allclose(error, error_y, rtol=1e-10)


def run(target, settings, num_warmup=600, num_samples=1000, seed=0):
    """Final state and the draws, step sizes and undone steps after warm-up."""

    def body(state, _):
        state = uld.step(state, target, settings, num_warmup)
        return state, (state.z["x"], state.adapt_state, state.diverging)

    @jax.jit
    def chain(key):
        state = uld.init(key, {"x": jnp.ones(target.size)}, target, settings)
        state, _ = jax.lax.scan(lambda s, _: (body(s, _)[0], None), state, length=num_warmup)
        return jax.lax.scan(body, state, length=num_samples)

    return chain(jax.random.key(seed))


def test_warm_up_finds_scales_curvature_trace_and_width_of_an_ill_scaled_gaussian():
    """Float32, scales 1e-3 to 1e3; the bounds hold for 20 of 20 seeds."""
    sd = np.logspace(-3, 3, 10)
    state, (_, adapt, _) = run(gaussian(sd**-2), uld.Settings(), num_samples=10)
    found = state.adapt_state
    np.testing.assert_allclose(found.scale, sd, rtol=1e-4)
    whitened = np.asarray(found.scale) ** 2 / sd**2
    np.testing.assert_allclose(found.curvature, whitened.max(), rtol=1e-3)
    np.testing.assert_allclose(found.trace, whitened.sum(), rtol=0.3)
    assert 0.6 < found.width < 1.6
    for name, values in adapt._asdict().items():
        assert np.ptp(values, axis=0).max() == 0, f"{name} is frozen after warm-up"


def test_dense_metric_removes_a_correlation_of_0_999():
    """Relative error of variances below 0.4, ten times their Monte Carlo error."""
    covariance = np.array([[1.0, 0.999], [0.999, 1.0]])
    precision = jnp.asarray(np.linalg.inv(covariance))
    target = potential_target(lambda z: z["x"] @ precision @ z["x"] / 2, {"x": np.zeros(2)})
    state, (draws, _, _) = run(target, uld.Settings(precondition="dense"))
    assert state.adapt_state.curvature < 3
    np.testing.assert_allclose(np.cov(draws.T), covariance, rtol=0.4)


@pytest.mark.parametrize("outside", [np.nan, np.inf])
def test_a_wall_is_never_crossed(outside):
    """Half-normal: the bounds are five standard deviations of the estimates wide."""
    target = potential_target(
        lambda z: jnp.sum(jnp.where(z["x"] > 0, z["x"] ** 2 / 2, outside)), {"x": np.zeros(1)}
    )
    state, (draws, _, diverging) = run(target, uld.Settings(step_size=0.2), num_samples=4000)
    assert (draws > 0).all()
    assert state.num_divergences > diverging.sum() > 0
    assert abs(draws.mean() - np.sqrt(2 / np.pi)) < 0.06
    assert abs((draws**2).mean() - 1) < 0.13


@pytest.mark.parametrize("integrator", list(uld.SPLITTINGS))
def test_moments_of_a_quartic_potential(integrator):
    """U = x^4 / 4 in each of 8 coordinates: the bounds are five standard deviations wide."""
    target = potential_target(lambda z: jnp.sum(z["x"] ** 4) / 4, {"x": np.zeros(8)})
    _, (draws, _, diverging) = run(target, uld.Settings(integrator=integrator), num_samples=4000)
    assert np.isfinite(draws).all() and not diverging.any()
    assert abs(draws.mean()) < 0.025
    # E x^2 = 2 Gamma(3/4) / Gamma(1/4), E x^4 = 1
    exact = 2 * gamma(0.75) / gamma(0.25)
    assert abs((draws**2).mean() / exact - 1) < 0.04
    assert abs((draws**4).mean() - 1) < 0.08


def test_new_data_replace_all_that_the_state_remembers():
    old, new = gaussian([1.0, 1.0]), gaussian([4.0, 9.0])
    state = uld.init(jax.random.key(0), {"x": jnp.ones(2)}, old, uld.Settings(num_steps=1))
    refreshed = uld.refresh(state, new)
    np.testing.assert_allclose(refreshed.potential_energy, 6.5, rtol=1e-6)
    np.testing.assert_allclose(refreshed.z_grad["x"], [4.0, 9.0], rtol=1e-6)
    kinetic = state.velocity @ state.velocity / 2
    np.testing.assert_allclose(refreshed.energy, 6.5 + kinetic, rtol=1e-6)
    # MCMC goes on with a chain by replacing its key
    resumed = state._replace(rng_key=refreshed.rng_key)
    step = jax.jit(lambda s: uld.step(s, new, uld.Settings(num_steps=1), 0))
    jax.tree.map(np.testing.assert_array_equal, step(resumed)[:-1], step(refreshed)[:-1])


@pytest.mark.parametrize("num_warmup", [0, 1, 5, 10, 100, 1000])
def test_metric_updates_leave_the_last_fifth_to_the_step_size(num_warmup):
    updates = uld.metric_updates(num_warmup)
    assert len(updates) == max(num_warmup, 1)
    assert updates.any() == (num_warmup >= 13)
    if num_warmup >= 100:
        assert np.flatnonzero(updates)[-1] == int(0.8 * num_warmup) - 1
        windows = np.diff(np.flatnonzero(updates))
        assert (windows >= 10).all() and (np.diff(windows[:-1]) > 0).all()


@pytest.mark.parametrize("num_warmup", [0, 1, 5])
def test_a_short_warm_up_leaves_a_usable_step(num_warmup):
    state, (draws, _, _) = run(gaussian(CURVATURES), uld.Settings(), num_warmup, num_samples=100)
    assert 0 < state.adapt_state.step_size * np.sqrt(2.5) <= uld.MAX_STABLE_STEP * 1.001
    assert np.isfinite(draws).all() and draws.std() > 0.1


def test_velocity_persists_from_draw_to_draw_after_warm_up():
    target = gaussian(CURVATURES)
    settings = uld.Settings(step_size=1e-4, friction=1e-4, num_steps=1)
    start = uld.init(jax.random.key(0), {"x": jnp.ones(3)}, target, settings)
    step = jax.jit(lambda state: uld.step(state, target, settings, 0))
    np.testing.assert_allclose(step(start).velocity, start.velocity, atol=5e-3)
