"""The integrators against exact laws, and what warm-up finds against known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import block_diag
from scipy.special import gamma

from ppl_ext.diagnostics.uld_report import BAOAB_SHARE
from ppl_ext.kernels import uld
from ppl_ext.kernels.uld_integrators import stationary_covariance, step_on_quadratic
from ppl_ext.target import potential_target

CURVATURES = np.array([0.3, 1.0, 2.5])


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def gaussian(curvatures):
    return potential_target(
        lambda z: 0.5 * jnp.sum(jnp.asarray(curvatures) * z["x"] ** 2),
        {"x": np.zeros(len(curvatures))},
    )


def test_energy_error_target_keeps_the_bias_at_its_tolerance(x64):
    """Variance of W and bias of the standard deviation, both exact, to leading order in h."""
    steps = {"obabo": np.sqrt(8 * 0.01), "ubu": np.sqrt(12 * 0.01), "ee": 4 * 1.3 * 0.01}
    for name, h in steps.items():
        settings = uld.Settings(integrator=name, bias_tolerance=0.01)
        xx, xv, vv = stationary_covariance(name, h, 1.3, np.ones(1))[0]
        np.testing.assert_allclose(abs(np.sqrt(xx) - 1), 0.01, rtol=0.1)
        np.testing.assert_allclose(settings.max_step(1.0, 1.3), h, rtol=1e-6)

        # W = u A u / 2 with u ~ N(0, S), so that Var(W) = tr(A S A S) / 2
        normals = uld.INTEGRATORS[name].normals
        potential, zero, one = lambda x: x @ x / 2, jnp.zeros(1), jnp.ones(1)
        system = uld.System(potential, jnp.asarray(h), jnp.asarray(1.3), one, zero, zero)
        step = uld.INTEGRATORS[name].make(system)

        def work(u, step=step, potential=potential):
            x, v, noise = u[:1], u[1:2], u[2:, None]
            return step(uld.Noise(noise, 0.0), uld.Phase(x, v, potential(x), x))[1]

        form = np.asarray(jax.jit(jax.hessian(work))(jnp.zeros(2 + normals)))
        both = form @ block_diag([[xx, xv], [xv, vv]], np.eye(normals))
        variance = np.trace(both @ both) / 2
        np.testing.assert_allclose(variance, settings.energy_error_target(1.3), rtol=0.1)


@pytest.mark.parametrize(
    ("potential", "h"),
    [
        (lambda x: x**4 / 4, 0.5),
        pytest.param(lambda x: x**4 / 4 + x**2 / 2, 0.65, marks=pytest.mark.slow),
        pytest.param(lambda x: jnp.exp(x) - x, 0.5, marks=pytest.mark.slow),
        pytest.param(lambda x: 2 * jnp.logaddexp(x, -x), 0.75, marks=pytest.mark.slow),
    ],
    ids=["quartic", "quartic and square", "log of a gamma", "logistic"],
)
def test_bias_of_baoab_at_its_energy_error(potential, h, x64):
    """Step h in standard deviations, near the energy error that warm-up seeks, from exact draws.

    The bias of the sd is at most 0.025 (Var(W) / d)^(2/5), and a quarter of that of `obabo` on a
    Gaussian. Bounds three standard errors of 0.11 % wider: false alarms 0.5 % in all.
    """
    n = 400_000
    grid = np.linspace(-14, 8, 100_001)
    density = np.exp(-(potential(grid) - potential(grid).min()))
    density /= density.sum()
    mean = density @ grid
    sd = np.sqrt(density @ (grid - mean) ** 2)
    rng = np.random.default_rng(0)
    x, v = np.interp(rng.random((n, 1)), np.cumsum(density), grid), rng.normal(size=(n, 1))
    target = potential_target(lambda z: potential(z["x"]).sum(), {"x": np.zeros(1)})
    settings = uld.Settings("baoab", h * sd, 1 / sd, 30, None)
    x, _, _, energy_error = one_draw(target, settings, jnp.asarray(x), jnp.asarray(v))
    energy_error = energy_error.mean()
    assert 0.5 < energy_error / uld.Settings().energy_error_target() < 1.1
    bias = abs(np.sqrt(np.mean((x - mean) ** 2)) / sd - 1)
    obabo = stationary_covariance("obabo", h, 1.0, np.ones(1))[0, 0]
    assert bias < 0.025 * energy_error**0.4 + 0.0033
    assert bias < BAOAB_SHARE * (np.sqrt(obabo) - 1) + 0.0033


@pytest.mark.parametrize("name", list(uld.INTEGRATORS))
def test_step_cap_bounds_the_bias_of_the_stiffest_direction(name):
    """Exact bias of the standard deviation at the cap, for stiff, soft and damped directions."""
    for friction, curvature in ((1.0, 1.0), (1.0, 8.0), (3.0, 1.0), (0.3, 2.0)):
        settings = uld.Settings(integrator=name, bias_tolerance=0.025)
        h = float(settings.max_step(jnp.float32(curvature), jnp.float32(friction)))
        variance = stationary_covariance(name, h, friction, np.array([curvature] * 3))[0, 0]
        assert abs(np.sqrt(variance * curvature) - 1) < 0.034


def one_draw(target, settings, x, v, seed=0):
    """The next position of one chain per row of x, without warm-up."""
    start = uld.init(jax.random.key(0), {"x": x[0]}, target, settings)

    @jax.jit
    @jax.vmap
    def draw(key, x, v):
        state = start._replace(z={"x": x}, velocity=v, rng_key=key, stale=jnp.ones((), bool))
        state = uld.step(state, target, settings, 0)
        return state.z["x"], state.velocity, state.accept_prob, state.mean_square_error

    return draw(jax.random.split(jax.random.key(seed), len(x)), x, v)


def test_random_time_of_rmm_is_drawn_per_chain_and_step():
    """At friction 0 the midpoint alone is random: x' = x + h v - h^2 (1 - tau) under U = x.

    Each step adds h^4 / 12 to the variance; a time shared by chains gives 0, one shared by two
    steps doubles it. 8 % is five standard errors for 4,000 chains.
    """
    target = potential_target(lambda z: jnp.sum(z["x"]), {"x": np.zeros(1)})
    n, h = 4000, 0.5
    for steps in (1, 2):
        settings = uld.Settings("rmm", h, 1e-9, steps, None)
        x, *_ = one_draw(target, settings, jnp.zeros((n, 1)), jnp.zeros((n, 1)))
        np.testing.assert_allclose(np.var(x), steps * h**4 / 12, rtol=0.08)


def test_a_draw_of_several_blocks_of_noise_has_the_law_of_its_steps():
    """Mean and covariance after 19 steps on a Gaussian, exact, with blocks of 8.

    Five standard errors for 10,000 chains.
    """
    n, steps, h, g = 10_000, 19, 0.3, 0.6
    [(_, matrix, noise)] = step_on_quadratic("baoab", h, g, np.ones(1))
    mean, covariance = np.array([1.0, 0.0]), np.zeros((2, 2))
    for _ in range(steps):
        mean = matrix[0] @ mean
        covariance = matrix[0] @ covariance @ matrix[0].T + noise[0] @ noise[0].T
    settings = uld.Settings("baoab", h, g, steps, None)
    x, v, *_ = one_draw(gaussian(np.ones(1)), settings, jnp.ones((n, 1)), jnp.zeros((n, 1)))
    both = np.concatenate([x, v], 1)
    np.testing.assert_allclose(both.mean(0), mean, atol=5 / np.sqrt(n))
    np.testing.assert_allclose(np.cov(both.T), covariance, atol=5 * np.sqrt(2 / n))


@pytest.mark.parametrize("integrator", ["obabo", *map(slow, ["baoab", "ubu", "ee", "kbk"])])
@pytest.mark.parametrize("adjust", ["ghmc", "malt"])
def test_adjusted_draws_leave_a_quartic_target_invariant(adjust, integrator):
    """One draw of three large steps from exact draws: no moment drifts.

    Products with v see a velocity that is not reversed on rejection. |z| < 4.5 for five moments:
    a false alarm has probability 3e-5; without the accept step |z| is above 10.
    """
    n, d = 100_000, 3
    quartic = lambda x: x**4 / 4 + x**2 / 2  # noqa: E731
    target = potential_target(lambda z: jnp.sum(quartic(z["x"])), {"x": np.zeros(d)})
    grid = np.linspace(-5, 5, 100_001)
    cdf = np.cumsum(np.exp(-quartic(grid)))
    rng = np.random.default_rng(2)
    x = np.interp(rng.random((n, d)), cdf / cdf[-1], grid).astype(np.float32)
    v = rng.normal(size=(n, d)).astype(np.float32)
    precision = 0.7 if integrator == "kbk" else None
    settings = uld.Settings(integrator, 0.8, 1.5, 3, None, 0.025, adjust, precision)
    new_x, new_v, accept, _ = map(np.asarray, one_draw(target, settings, jnp.asarray(x), v))
    assert 0.05 < accept.mean() < 0.95
    for moment in (
        lambda x, v: x**2,
        lambda x, v: x**4,
        lambda x, v: x * v,
        lambda x, v: x**3 * v,
        lambda x, v: v**2,
    ):
        change = (moment(new_x, new_v) - moment(x, v)).mean(-1)
        assert abs(change.mean()) < 4.5 * change.std() / np.sqrt(n)


@pytest.mark.parametrize(("adjust", "goal"), uld.ACCEPTANCE.items())
def test_warm_up_finds_the_acceptance_probability(adjust, goal):
    settings = uld.Settings(integrator="obabo", adjust=adjust)
    _, (draws, _, _, accept) = run(gaussian(np.ones(200)), settings, num_samples=500)
    assert abs(accept.mean() - goal) < 0.06
    np.testing.assert_allclose((draws**2).mean(), 1, atol=0.02)


def test_stein_check_shrinks_a_step_whose_bias_shows(monkeypatch):
    """With its cap and energy error switched off, `ee` makes variances 40 % too large."""
    target = gaussian(np.ones(50))
    settings = uld.Settings(integrator="ee", friction=1.0)
    fair, _ = run(target, settings, 1000, 1)
    assert np.isinf(fair.adapt_state.max_step)
    monkeypatch.setattr(uld.Settings, "max_step", lambda self, c, g: 0.8 / jnp.sqrt(c))
    monkeypatch.setattr(uld.Settings, "energy_error_target", lambda self, g=1.0: 1.0)
    state, _ = run(target, settings, 1000, 1)
    np.testing.assert_allclose(state.adapt_state.step_size, 0.4, rtol=0.1)


def run(target, settings, num_warmup=600, num_samples=1000, seed=0):
    """Final state; draws, adaptation, undone steps and acceptance of each draw after warm-up."""

    def body(state, _):
        state = uld.step(state, target, settings, num_warmup)
        kept = state.z["x"], state.adapt_state, state.diverging, state.accept_prob
        return state, kept

    @jax.jit
    def chain(key):
        state = uld.init(key, {"x": jnp.ones(target.size)}, target, settings)
        return jax.lax.scan(body, state, length=num_warmup + num_samples)

    state, kept = chain(jax.random.key(seed))
    return state, jax.tree.map(lambda leaf: leaf[num_warmup:], kept)


def test_warm_up_finds_scales_curvature_trace_and_width_of_an_ill_scaled_gaussian():
    """Float32, scales 1e-3 to 1e3; the bounds hold for 20 of 20 seeds."""
    sd = np.logspace(-3, 3, 10)
    state, (_, adapt, *_) = run(gaussian(sd**-2), uld.Settings(), num_samples=10)
    found = state.adapt_state
    np.testing.assert_allclose(found.scale, sd, rtol=1e-4)
    whitened = np.asarray(found.scale) ** 2 / sd**2
    np.testing.assert_allclose(found.curvature, whitened.max(), rtol=1e-3)
    np.testing.assert_allclose(found.trace, whitened.sum(), rtol=0.3)
    assert 0.6 < found.width < 1.6
    frozen = jax.tree.map(lambda values: (values == values[0]).all(), adapt)
    assert all(jax.tree.leaves(frozen)), frozen


@pytest.mark.parametrize("size", [1, 2, 6, 200])
def test_lanczos_finds_the_largest_eigenvalue(size):
    """Of matrices with a gap of a tenth; small ones end in an invariant subspace."""
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(size, size)))[0]
    values = np.append(np.linspace(-1, 5, size - 1), 6.0)
    matrix = jnp.asarray((vectors * values) @ vectors.T, jnp.float32)
    start = jnp.asarray(rng.normal(size=size), jnp.float32)
    start /= jnp.linalg.norm(start)
    find = jax.jit(lambda start: uld.largest_eigenvalue(lambda v: matrix @ v, start, 6))
    found, direction = find(start)
    if size > 6:
        # two steps: the largest eigenvalue in the plane of the start and its image
        plane = np.linalg.qr(np.stack([start, matrix @ start], 1).astype(np.float64))[0]
        ritz = np.abs(np.linalg.eigvalsh(plane.T @ np.asarray(matrix) @ plane)).max()
        two, _ = uld.largest_eigenvalue(lambda v: matrix @ v, start, 2)
        np.testing.assert_allclose(two, ritz, rtol=1e-4)
        # go on from where it ended
        np.testing.assert_allclose(found, 6, rtol=0.1)
        for _ in range(5):
            found, direction = find(direction)
    np.testing.assert_allclose(found, 6, rtol=1e-3)
    np.testing.assert_allclose(abs(direction @ vectors[:, -1]), 1, rtol=2e-3)


def test_warm_up_finds_the_mean_square_energy_error():
    """With heavy tails of W: 0.65 of what is sought, 0.12 to 2.2 over 20 chains."""
    target = potential_target(lambda z: jnp.sum(z["x"] ** 4) / 4, {"x": np.zeros(8)})
    settings = uld.Settings()

    def body(state, _):
        state = uld.step(state, target, settings, 600)
        return state, state.mean_square_error

    @jax.jit
    @jax.vmap
    def chain(key):
        state = uld.init(key, {"x": jnp.ones(8)}, target, settings)
        return jax.lax.scan(body, state, length=1600)[1][600:].mean()

    found = chain(jax.random.split(jax.random.key(0), 20)) / settings.energy_error_target()
    assert 0.4 < found.mean() < 1.6


def test_lanczos_without_usable_products_keeps_its_start():
    start = jnp.array([0.6, 0.8])
    for product in (lambda v: jnp.nan * v, lambda v: 0 * v):
        found, direction = uld.largest_eigenvalue(product, start, 6)
        assert found == 0
        np.testing.assert_array_equal(direction, start)


@pytest.mark.parametrize("precondition", ["diag", None])
def test_hessian_vector_products_are_as_many_as_stated(precondition):
    """Counted by a potential that calls back, over a warm-up of 60 draws."""
    count = []

    @jax.custom_jvp
    def gradient(x):
        return x

    @gradient.defjvp
    def _(primals, tangents):
        jax.debug.callback(lambda: count.append(1))
        return primals[0], tangents[0]

    potential = jax.custom_vjp(lambda x: x @ x / 2)
    potential.defvjp(lambda x: (x @ x / 2, x), lambda x, g: (g * gradient(x),))
    target = potential_target(lambda z: potential(z["x"]), {"x": np.zeros(3)})
    settings = uld.Settings(precondition=precondition)
    jax.block_until_ready(run(target, settings, 60, 1))
    jax.effects_barrier()
    assert len(count) == uld.LANCZOS_STEPS + uld.curvature_products(settings, 60).sum()


def test_dense_metric_removes_a_correlation_of_0_999():
    """Relative error of variances below 0.4, ten times their Monte Carlo error."""
    covariance = np.array([[1.0, 0.999], [0.999, 1.0]])
    precision = jnp.asarray(np.linalg.inv(covariance))
    target = potential_target(lambda z: z["x"] @ precision @ z["x"] / 2, {"x": np.zeros(2)})
    state, (draws, *_) = run(target, uld.Settings(precondition="dense"))
    assert state.adapt_state.curvature < 3
    np.testing.assert_allclose(np.cov(draws.T), covariance, rtol=0.4)


@pytest.mark.parametrize("outside", [np.nan, np.inf])
def test_a_wall_is_never_crossed(outside):
    """Half-normal: the bounds are five standard deviations of the estimates wide."""
    target = potential_target(
        lambda z: jnp.sum(jnp.where(z["x"] > 0, z["x"] ** 2 / 2, outside)), {"x": np.zeros(1)}
    )
    state, (draws, _, diverging, _) = run(target, uld.Settings(step_size=0.2), num_samples=4000)
    assert (draws > 0).all()
    assert state.num_divergences > diverging.sum() > 0
    assert abs(draws.mean() - np.sqrt(2 / np.pi)) < 0.06
    assert abs((draws**2).mean() - 1) < 0.13


@pytest.mark.parametrize(
    "integrator", ["baoab", "rmm", "kbk", *map(slow, ["obabo", "ubu", "ee", "quicksort"])]
)
def test_moments_of_a_quartic_potential(integrator):
    """U = x^4 / 4 in each of 8 coordinates: bounds of five standard deviations, and the bias."""
    target = potential_target(lambda z: jnp.sum(z["x"] ** 4) / 4, {"x": np.zeros(8)})
    precision = 0.5 if integrator == "kbk" else None
    settings = uld.Settings(integrator=integrator, prior_precision=precision)
    _, (draws, _, diverging, _) = run(target, settings, num_samples=4000)
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
    state, (draws, *_) = run(gaussian(CURVATURES), uld.Settings(), num_warmup, num_samples=100)
    assert 0 < state.adapt_state.step_size * np.sqrt(2.5) <= uld.MAX_STABLE_STEP_BAOAB * 1.001
    assert np.isfinite(draws).all() and draws.std() > 0.1


def test_velocity_persists_from_draw_to_draw_after_warm_up():
    target = gaussian(CURVATURES)
    settings = uld.Settings(step_size=1e-4, friction=1e-4, num_steps=1)
    start = uld.init(jax.random.key(0), {"x": jnp.ones(3)}, target, settings)
    step = jax.jit(lambda state: uld.step(state, target, settings, 0))
    np.testing.assert_allclose(step(start).velocity, start.velocity, atol=5e-3)
