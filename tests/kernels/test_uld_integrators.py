"""Every integrator against independent formulas: noise, bias on Gaussians, strong order, W."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.linalg import block_diag, expm

from ppl_ext.kernels.uld_integrators import (
    INTEGRATORS,
    Noise,
    Phase,
    System,
    stationary_covariance,
    step_on_quadratic,
)

NAMES = list(INTEGRATORS)


def make(name, potential, d, h, g, scale=None, mean=0.0, precision=0.0, dtype=None):
    """The step, from (x, v, normals, uniform) to the new phase and W."""
    like = jnp.zeros(d, dtype)
    scale = jnp.ones_like(like) if scale is None else scale
    prior = jnp.full_like(like, mean), jnp.full_like(like, precision)
    system = System(potential, jnp.asarray(h, dtype), jnp.asarray(g, dtype), scale, *prior)
    step = INTEGRATORS[name].make(system)

    def one(x, v, normals, uniform=0.3):
        phase = Phase(x, v, *jax.value_and_grad(potential)(x))
        return step(Noise(normals, jnp.asarray(uniform, dtype)), phase)

    return one


# --- noise -------------------------------------------------------------------------------------


def covariance_of(rows, g, t, split=None):
    """Covariance of the integrals of `rows` over [0, t] with sqrt(2 g) dB, by quadrature."""
    points = None if split is None else [split]

    def product(a, b):
        return quad(lambda s: a(s) * b(s), 0, t, points=points)[0]

    return 2 * g * np.array([[product(a, b) for a in rows] for b in rows])


def free_noise(g, t):
    """Covariance of (xi_x, xi_v) over a time t."""
    return covariance_of([lambda s: -math.expm1(-g * s) / g, lambda s: math.exp(-g * s)], g, t)


@pytest.mark.parametrize("name", ["ee", "ubu", "rmm"])
@pytest.mark.parametrize("g", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("h", [0.02, 0.3, 1.5])
def test_noise_of_a_step_without_force(name, g, h):
    for _, matrix, noise in step_on_quadratic(name, h, g, np.zeros(3)):
        expected = expm(np.array([[0, 1], [0, -g]]) * h)
        np.testing.assert_allclose(matrix[0], expected, rtol=1e-12, atol=1e-15)
        covariance = noise[0] @ noise[0].T
        np.testing.assert_allclose(covariance, free_noise(g, h), rtol=1e-10)


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 0.93])
def test_noise_of_the_random_midpoint_and_of_the_end(x64, tau):
    """With a force at the midpoint only: x' and v' then hold the midpoint's noise."""
    g, h, lam = 2.0, 0.5, 3.0
    a, b = tau * h, (1 - tau) * h
    mid = lambda s: -np.expm1(-g * (a - s)) / g if s < a else 0.0  # noqa: E731
    end = [lambda s: -np.expm1(-g * (h - s)) / g, lambda s: np.exp(-g * (h - s))]
    pull = [h * lam * -np.expm1(-g * b) / g, h * lam * np.exp(-g * b)]
    rows = [lambda s, e=e, p=p: e(s) - p * mid(s) for e, p in zip(end, pull, strict=True)]
    expected = covariance_of(rows, g, h, a)

    step = make("rmm", lambda y: lam * jnp.sum(y**2) / 2, 1, h, g)
    end = lambda n: jnp.stack(step(jnp.zeros(1), jnp.zeros(1), n[:, None], tau)[0][:2])[:, 0]  # noqa: E731
    noise = np.asarray(jax.jacfwd(end)(jnp.zeros(4)))
    np.testing.assert_allclose(noise @ noise.T, expected, rtol=1e-9)


@pytest.mark.parametrize("m", [1e-8, 0.04, 1.0, 1.0 + 1e-9, 4.0, 100.0])
@pytest.mark.parametrize("h", [0.01, 0.7, 3.0])
def test_flow_of_the_prior_leaves_the_prior_invariant(m, h):
    """With friction 2 the flow is overdamped, critically damped at m = 1, and oscillating."""
    ((_, matrix, noise),) = step_on_quadratic("kbk", h, 2.0, np.full(3, m), np.full(3, m))
    expected = expm(np.array([[0, 1], [-m, -2.0]]) * h)
    np.testing.assert_allclose(matrix[0], expected, rtol=1e-9, atol=1e-12)
    covariance = noise[0] @ noise[0].T
    if m > 0.01:
        prior = np.diag([1 / m, 1])
        np.testing.assert_allclose(covariance, prior - expected @ prior @ expected.T, atol=1e-10)
    else:
        np.testing.assert_allclose(covariance, free_noise(2.0, h), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_right_at_tiny_friction_times_step(x64, name):
    """Noise covariance of a step, relative to float64; the closed form is off by 200 at 1e-3."""
    spec = INTEGRATORS[name]

    def columns(dtype):
        m = 0.5 if name == "kbk" else 0.0

        def noise(g):
            step = make(name, lambda y: jnp.sum(y**2) / 2, 1, 0.1, g, precision=m, dtype=dtype)
            end = lambda n: jnp.stack(step(*[jnp.zeros(1, dtype)] * 2, n[:, None])[0][:2])[:, 0]  # noqa: E731
            return jax.jacfwd(end)(jnp.zeros(spec.normals, dtype))

        frictions = 10.0 ** np.arange(1, -6, -1)
        return np.asarray(jax.jit(jax.vmap(noise))(jnp.asarray(frictions, dtype)), np.float64)

    narrow, wide = columns(jnp.float32), columns(jnp.float64)
    squares = [a @ np.swapaxes(a, 1, 2) for a in (narrow, wide)]
    np.testing.assert_allclose(*squares, rtol=2e-5)


# --- bias on Gaussians -------------------------------------------------------------------------


def reference_moments(name, h, g, lam, m=0.0):
    """Stationary (E y^2, E y v, E v^2) by matrix exponentials and quadrature."""
    if name == "rmm":
        nodes, weights = np.polynomial.legendre.leggauss(20)
        pieces = [
            (w / 2, *rmm_matrices(h, g, lam, (t + 1) / 2))
            for t, w in zip(nodes, weights, strict=True)
        ]
    elif name == "ee":
        # the force is frozen: a third, constant, variable
        flow = expm(h * np.array([[0, 1, 0], [0, -g, -1], [0, 0, 0]]))
        matrix = flow[:2, :2] + np.outer(flow[:2, 2], [lam, 0])
        pieces = [(1.0, matrix, free_noise(g, h))]
    else:
        matrix, noise = np.eye(2), np.zeros((2, 2))
        for letter in name.upper():
            t = h / name.upper().count(letter)
            drift = {
                "A": [[0, 1], [0, 0]],
                "B": [[0, 0], [-(lam - m), 0]],
                "O": [[0, 0], [0, -g]],
                "U": [[0, 1], [0, -g]],
                "K": [[0, 1], [-m, -g]],
            }[letter]
            # Van Loan 1978, equations 1.1-1.4
            diffusion = np.diag([0, 2 * g * (letter in "OUK")])
            a = np.array(drift, float)
            big = expm(t * np.block([[-a, diffusion], [np.zeros((2, 2)), a.T]]))
            e = big[2:, 2:].T
            matrix, noise = e @ matrix, e @ noise @ e.T + e @ big[:2, 2:]
        pieces = [(1.0, matrix, noise)]
    change = sum(w * np.kron(a, a) for w, a, _ in pieces)
    constant = sum(w * q.ravel() for w, _, q in pieces)
    return np.linalg.solve(np.eye(4) - change, constant)[[0, 1, 3]]


def rmm_matrices(h, g, lam, tau):
    a, b = tau * h, (1 - tau) * h
    drift = np.array([[0, 1, 0], [0, -g, -1], [0, 0, 0]])
    early, late = expm(a * drift), expm(b * drift)
    predictor = early[0, :2] + early[0, 2] * np.array([lam, 0])
    pull = h * lam * late[:2, 1]
    # noise: that of the first part, (x, v), then that of the second
    covariance = block_diag(free_noise(g, a), free_noise(g, b))
    gain = np.hstack([late[:2, :2] - np.outer(pull, [1, 0]), np.eye(2)])
    matrix = expm(h * drift)[:2, :2] - np.outer(pull, predictor)
    return matrix, gain @ covariance @ gain.T


@pytest.mark.parametrize("h", [0.1, 0.7])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "quicksort"])
def test_stationary_moments_are_those_of_the_reference(name, h):
    curvature, m = np.array([0.3, 1.0, 2.5]), 0.25 * (name == "kbk")
    found = stationary_covariance(name, h, 1.5, curvature, np.full(3, m))
    expected = [reference_moments(name, h, 1.5, lam, m) for lam in curvature]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("g", [0.5, 2.0])
@pytest.mark.parametrize(
    ("name", "order", "constant"),
    [
        ("obabo", 2, lambda g, lam: lam / 4),
        ("ubu", 2, lambda g, lam: -lam / 6),
        ("ee", 1, lambda g, lam: lam / (2 * g)),
        ("rmm", 3, lambda g, lam: lam**2 / (24 * g)),
        # here with half of the curvature in the prior
        ("kbk", 2, lambda g, lam: -lam / 16),
    ],
)
def test_bias_of_the_variance_to_leading_order(name, order, constant, g):
    h, lam = 0.02, np.array([0.7, 2.0])
    variance = stationary_covariance(name, h, g, lam, lam / 2 * (name == "kbk"))[:, 0]
    relative = (lam * variance - 1) / h**order / constant(g, lam)
    np.testing.assert_allclose(relative, 1, rtol=0.09 if name == "ee" else 5e-3)


def test_bias_of_quicksort_is_within_its_bound():
    for g in (0.2, 1.0, 3.0, 10.0):
        lam, h = np.array([0.3, 1.0, 3.0]), 0.1
        variance = stationary_covariance("quicksort", h, g, lam)[:, 0]
        assert (abs(lam * variance - 1) <= h**3 * lam * (g + lam / g) / 72).all()


# KL divergence of the x marginal, curvatures 10 i^-2 / sum (power law) or 1, friction
# 2 sqrt(largest); h in units of 1 / sqrt(largest)
POWER_LAW = [
    ("ee", 0.1, 1.74e-4),
    ("ee", 0.4, 3.01e-3),
    ("rmm", 0.4, 4.53e-7),
    ("obabo", 0.1, 1.70e-6),
    ("obabo", 0.4, 4.56e-4),
    ("ubu", 0.1, 7.51e-7),
    ("ubu", 0.4, 1.90e-4),
    ("quicksort", 0.4, 2.85e-7),
    ("baoab", 0.4, 0.0),
]
ISOTROPIC = [("ee", 0.1, 1.61e-3), ("obabo", 0.4, 4.22e-3), ("ubu", 0.4, 1.76e-3)]


@pytest.mark.parametrize(("name", "h", "expected"), POWER_LAW)
def test_bias_for_a_power_law_does_not_grow_with_dimension(name, h, expected):
    """In 10,000 dimensions the values are those of the table for 10."""
    lam = np.arange(1.0, 10_001) ** -2
    lam *= 10 / lam.sum()
    found = divergence(name, h, lam)
    np.testing.assert_allclose(found, expected, rtol=3e-3, atol=1e-9)


@pytest.mark.parametrize(("name", "h", "expected"), ISOTROPIC)
def test_bias_for_an_isotropic_gaussian(name, h, expected):
    np.testing.assert_allclose(10 / 3 * divergence(name, h, np.ones(3)), expected, rtol=3e-3)


def test_kbk_does_not_grow_with_the_coordinates_of_the_prior():
    """0.0020 for 100 coordinates as well; 15.5 with `ee`, 0.56 with `ubu`."""
    lam = np.arange(1.0, 10_001) ** -2
    lam *= 10 / lam.sum()
    found = divergence("kbk", 0.3, lam + 1, g=2.0, h_unit=1.0, prior=np.ones_like(lam))
    np.testing.assert_allclose(found, 0.0020, rtol=0.03)


def divergence(name, h, lam, g=None, h_unit=None, prior=None):
    unit = 1 / np.sqrt(lam.max()) if h_unit is None else h_unit
    g = 2 * np.sqrt(lam.max()) if g is None else g
    excess = stationary_covariance(name, h * unit, g, lam, prior)[:, 0] * lam - 1
    return 0.5 * np.sum(excess - np.log1p(excess))


# --- strong order ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order"),
    [
        pytest.param("ee", 1, marks=pytest.mark.slow),
        pytest.param("rmm", 1.5, marks=pytest.mark.slow),
        pytest.param("ubu", 2, marks=pytest.mark.slow),
        ("kbk", 2),
        ("quicksort", 3),
    ],
)
def test_strong_order_on_an_anharmonic_potential(x64, name, order):
    """Errors at time 2 against a fine solution driven by the same Brownian paths."""
    g, cells, paths, total = 1.3, 512, 256, 2.0
    delta = total / cells
    potential = lambda x: jnp.sum(jnp.cos(x) + x**2 / 2)  # noqa: E731
    path = np.random.default_rng(0).normal(size=(paths, cells)) * np.sqrt(delta)
    start = jnp.array([0.7]), jnp.array([-0.4])
    grad = jax.grad(potential)

    def exact(increments):
        def rate(x, v, db):
            return v, -g * v - grad(x) + np.sqrt(2 * g) * db / delta

        def cell(point, db):
            x, v = point
            a, p = rate(x, v, db)
            b, q = rate(x + delta / 2 * a, v + delta / 2 * p, db)
            c, r = rate(x + delta / 2 * b, v + delta / 2 * q, db)
            d, s = rate(x + delta * c, v + delta * r, db)
            mean = lambda *k: delta / 6 * (k[0] + 2 * k[1] + 2 * k[2] + k[3])  # noqa: E731
            return (x + mean(a, b, c, d), v + mean(p, q, r, s)), None

        return jax.lax.scan(cell, start, increments)[0][0]

    truth = jax.jit(jax.vmap(exact))(path)
    errors = []
    for steps in (4, 16):
        h = total / steps
        increments = path.reshape(paths, steps, -1)
        taus = np.random.default_rng(1).integers(1, increments.shape[-1], (paths, steps))
        normals = np.array(
            [
                [path_normals(name, i, h, g, t) for i, t in zip(p, tau, strict=True)]
                for p, tau in zip(increments, taus, strict=True)
            ]
        )
        precision = 0.6 * (name == "kbk")
        step = make(name, potential, 1, h, g, mean=0.2 * (name == "kbk"), precision=precision)

        def walk(normals, taus, step=step):
            def one(point, noise):
                new, _ = step(*point, noise[0], noise[1])
                return (new.x, new.v), None

            return jax.lax.scan(one, start, (normals, taus))[0][0]

        end = jax.jit(jax.vmap(walk))(normals[..., None], taus / increments.shape[-1])
        errors.append(np.sqrt(np.mean((np.asarray(end) - truth) ** 2)))
    assert order - 0.25 < np.log2(errors[0] / errors[1]) / 2 < order + 0.6, errors


def path_normals(name, increments, h, g, split):
    """The normals that make the step's noise that of a Brownian path on [0, h]."""
    n = len(increments)
    if name == "quicksort":
        middle = (np.arange(n) + 0.5) / n
        before = np.concatenate([[0], np.cumsum(increments)[:-1]])
        bridge = before + increments / 2 - middle * increments.sum()
        w, area, second = increments.sum(), bridge.mean(), (bridge * (0.5 - middle)).mean()
        return np.array([w, area * np.sqrt(12), second * np.sqrt(720)]) / np.sqrt(h)
    if name == "ee":
        return flow_normals(increments, h, g, 0.0)
    if name == "rmm":
        parts = (increments[:split], split / n * h), (increments[split:], (1 - split / n) * h)
    else:
        parts = (increments[: n // 2], h / 2), (increments[n // 2 :], h / 2)
    m = 0.6 * (name == "kbk")
    return np.concatenate([flow_normals(part, t, g, m) for part, t in parts])


def flow_normals(increments, t, g, m):
    """Normals for (xi_x, xi_v) of the flow with the prior's precision m."""
    return noise_map(len(increments), t, g, m) @ increments


@cache
def noise_map(n, t, g, m):
    values, vectors = np.linalg.eig(np.array([[0, 1], [-m, -g]], complex))
    modes = np.linalg.solve(vectors, [0, 1])[:, None]
    response = lambda left: np.real(vectors @ (modes * np.exp(values[:, None] * left)))  # noqa: E731
    nodes, weights = np.polynomial.legendre.leggauss(20)
    kernel = response((nodes + 1) * t / 2)
    covariance = 2 * g * (kernel * weights * t / 2) @ kernel.T
    cells = np.sqrt(2 * g) * response(t * (1 - (np.arange(n) + 0.5) / n))
    return np.linalg.solve(np.linalg.cholesky(covariance), cells)


# --- energy error ------------------------------------------------------------------------------

WITH_ENERGY_ERROR = [name for name, spec in INTEGRATORS.items() if spec.energy_order is not None]


def quartic(x):
    return jnp.sum(x**4 / 4 + x**2 / 2)


def quartic_draws(n):
    """Exact draws (x, v), each (n, 1)."""
    grid = np.linspace(-5, 5, 100_001)
    cdf = np.cumsum(np.exp(-(grid**4) / 4 - grid**2 / 2))
    rng = np.random.default_rng(2)
    x = np.interp(rng.random(n), cdf / cdf[-1], grid)[:, None]
    return jnp.asarray(x), jnp.asarray(rng.normal(size=(n, 1)))


@pytest.mark.parametrize("name", WITH_ENERGY_ERROR)
def test_energy_error_is_the_log_metropolis_ratio(x64, name):
    """E exp(-W) = 1 from exact draws of a quartic target, with a scale.

    A z-score beyond 4.5 has probability 7e-6; a missing term of W moves it by more than 20.
    """
    n = 200_000
    x, v = quartic_draws(n)
    normals = jax.random.normal(jax.random.key(1), (n, INTEGRATORS[name].normals, 1))
    scale = jnp.array([0.8])
    step = make(name, quartic, 1, 0.5, 1.5, scale, mean=0.3, precision=0.7)
    ratio = np.exp(-np.asarray(jax.jit(jax.vmap(lambda *u: step(*u)[1]))(x, v, normals)))
    assert ratio.std() > 0.01
    assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / np.sqrt(n)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in WITH_ENERGY_ERROR])
def test_an_integrator_without_metropolis_ratio_says_so(name):
    step = jax.jit(make(name, quartic, 2, 0.3, 1.0))
    _, w = step(jnp.ones(2), jnp.zeros(2), jnp.zeros((INTEGRATORS[name].normals, 2)))
    assert jnp.isnan(w)


@pytest.mark.parametrize("name", NAMES)
def test_scale_is_a_change_of_coordinates(x64, name):
    """One step in x with a scale L is one step in y = L^-1 x of the potential U(L y)."""
    d = 2
    dense = jnp.array([[1.3, 0.0], [0.4, 0.7]])
    scale = jnp.array([1.3, 0.7]) if name == "kbk" else dense
    times = lambda y: scale * y if name == "kbk" else scale @ y  # noqa: E731
    potential = lambda x: jnp.sum(x**4 / 4) + x[0] * x[1]  # noqa: E731
    y, v = jnp.array([0.7, -1.1]), jnp.array([0.3, 0.9])
    normals = jax.random.normal(jax.random.key(0), (INTEGRATORS[name].normals, d))
    mean, m = (0.2, 0.5) if name == "kbk" else (0.0, 0.0)
    in_x = make(name, potential, d, 0.4, 1.2, scale, mean=mean, precision=m)
    in_y = make(
        name,
        lambda y: potential(times(y)),
        d,
        0.4,
        1.2,
        mean=mean / scale if m else 0.0,
        precision=m * scale**2 if m else 0.0,
    )
    (new, w), (new_y, w_y) = jax.jit(in_x)(times(y), v, normals), jax.jit(in_y)(y, v, normals)
    np.testing.assert_allclose(new.x, times(new_y.x), rtol=1e-11)
    np.testing.assert_allclose(new.v, new_y.v, rtol=1e-11)
    np.testing.assert_allclose(w, w_y, rtol=1e-9)


@pytest.mark.parametrize("name", ["baoab", "obabo", "ee"])
def test_the_way_back_has_the_opposite_energy_error(x64, name):
    """From the end with the velocity reversed; the normals that lead back are solved for."""
    potential = lambda x: jnp.sum(x**4 / 4) + x[0] * x[1]  # noqa: E731
    scale = jnp.array([[1.3, 0.0], [0.4, 0.7]])
    step = jax.jit(make(name, potential, 2, 0.4, 1.2, scale))
    x, v = jnp.array([0.7, -1.1]), jnp.array([0.3, 0.9])
    normals = jax.random.normal(jax.random.key(0), (INTEGRATORS[name].normals, 2))
    end, error = step(x, v, normals)
    goal = jnp.concatenate([x, -v])

    def arrival(flat):
        new, _ = step(end.x, -end.v, flat.reshape(normals.shape))
        return jnp.concatenate([new.x, new.v]) - goal

    back = jnp.zeros(normals.size)
    for _ in range(20):
        back -= jnp.linalg.lstsq(jax.jacfwd(arrival)(back), arrival(back))[0]
    np.testing.assert_allclose(arrival(back), 0, atol=1e-10)
    _, error_back = step(end.x, -end.v, back.reshape(normals.shape))
    assert abs(error) > 1e-3
    np.testing.assert_allclose(error_back, -error, rtol=1e-8)
