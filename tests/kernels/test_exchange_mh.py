"""ExchangeMH: detailed balance by enumeration of the simulated data, and the parts of a step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from ppl_ext.kernels import exchange_mh


@pytest.fixture(autouse=True)
def wide(x64):
    pass


# --- a posterior with three unknown constants, and all data that can be ---------------------------

# a site with three states in two dimensions, and one with two rows of two states each
STATES = {
    "a": np.array([[0.0, 1.0], [1.0, -0.5], [2.0, 0.3]]),
    "b": np.array([0.0, 1.5]),
}
ROWS = np.array([[1.0, 0.4], [-0.3, 0.8]])
OBSERVED = {"a": STATES["a"][1], "b": STATES["b"][[1, 0]]}


def log_f(x, data):
    return {"a": data["a"] @ x, "b": data["b"] * (ROWS @ x)}


def log_tractable(x):
    return -jnp.sum(x**2) / 4 + 0.3 * jnp.sin(x[0])


def everything():
    """Each data set that can be drawn."""
    for a, i, j in itertools.product(STATES["a"], STATES["b"], STATES["b"]):
        yield {"a": a, "b": np.array([i, j])}


DATA = list(everything())


def log_constants(x):
    """Of the three densities."""
    a = logsumexp(STATES["a"] @ x)
    return np.array([a, *(logsumexp(STATES["b"] * eta) for eta in ROWS @ x)])


def log_likelihood(x, data):
    found = log_f(x, data)
    return found["a"] + found["b"].sum() - log_constants(x).sum()


PROBLEM = exchange_mh.Problem(
    log_tractable=log_tractable,
    log_f=log_f,
    simulate=lambda x, key: pytest.fail("the noise has the data"),
    observed=jax.tree.map(jnp.asarray, OBSERVED),
    ravel=lambda z: z["z"],
    unravel=lambda z: {"z": z},
)

GRID = np.array([[0.9, -0.2], [-0.4, 0.7], [0.1, 0.3], [-0.8, -0.9]])
STEP, POOL = 1.3, [2, 7, 0, 11, 7]


def stacked(data):
    return {name: np.stack([d[name] for d in data]) for name in ("a", "b")}


def fit():
    """Any centre, metric and pool will do."""
    scale = np.array([[0.9, 0.2], [0.0, 1.2]])
    centre = np.array([0.2, -0.1])
    pool = stacked([DATA[k] for k in POOL])
    return exchange_mh.Fit(
        centre=jnp.asarray(centre),
        whiten=jnp.linalg.inv(scale),
        scale=jnp.asarray(scale),
        fisher=jnp.eye(2),
        pool=jax.tree.map(jnp.asarray, pool),
        pool_log_f=jax.vmap(log_f, (None, 0))(centre, pool),
        observed=PROBLEM.observed,
    )


def surrogate_gradient(w, found):
    """In standard coordinates, by hand: observed statistics less weighted ones of the pool."""
    x = np.asarray(found.centre + found.scale @ w)
    centre = np.asarray(found.centre)
    pool = stacked([DATA[k] for k in POOL])
    gradient = -x / 2 + 0.3 * np.cos(x[0]) * np.array([1, 0])
    weight = np.exp(pool["a"] @ (x - centre))
    gradient = gradient + OBSERVED["a"] - weight @ pool["a"] / weight.sum()
    for row, direction in enumerate(ROWS):
        weight = np.exp(pool["b"][:, row] * (direction @ (x - centre)))
        mean = weight @ pool["b"][:, row] / weight.sum()
        gradient = gradient + (OBSERVED["b"][row] - mean) * direction
    return np.asarray(found.scale).T @ gradient


class Enumeration:
    """The kernel density between points of GRID, summed over all data and both ways."""

    def __init__(self, proposal, num_aux, coins=(0.25, 0.75)):
        self.fit = fit()
        self.proposal, self.num_aux, self.coins = proposal, num_aux, coins
        self.settings = exchange_mh.Settings(proposal=proposal, num_aux=num_aux)
        self.sets = list(itertools.product(range(len(DATA)), repeat=num_aux))
        self.run = jax.jit(jax.vmap(self._transition, (None, None, None, None, 0)))

    def _transition(self, x, normal, sign, coin, data):
        """The real transition, fed with given numbers."""

        def draw(positions):
            seen.append(positions)
            zero = jnp.zeros(self.num_aux, jnp.int32)
            return exchange_mh.Draw(data, zero, zero)

        seen = []
        noise = exchange_mh.Noise(normal, sign, coin, jnp.zeros(()), draw)
        y, info = exchange_mh.transition(
            noise, x, PROBLEM, self.settings, self.fit, jnp.asarray(STEP)
        )
        return info.accept_prob, y, seen[0]

    def flow(self, x, y):
        """pi(x) q(x, y) P(accept)."""
        w, v = (np.asarray(self.fit.whiten @ (p - self.fit.centre)) for p in (x, y))
        move = v - w
        sign = np.zeros(2)
        log_q = stats.norm.logpdf(move, 0, STEP).sum()
        if self.proposal != "random_walk":
            gradient = surrogate_gradient(w, self.fit)
        if self.proposal == "mala":
            log_q = stats.norm.logpdf(move, STEP**2 / 2 * gradient, STEP).sum()
            move = move - STEP**2 / 2 * gradient
        if self.proposal == "barker":
            log_q -= np.log1p(np.exp(-move * gradient)).sum()
        data = stacked([DATA[k] for k in np.ravel(self.sets)])
        data = {n: leaf.reshape(-1, self.num_aux, *leaf.shape[1:]) for n, leaf in data.items()}
        total = 0.0
        for coin in self.coins:
            accept, reached, positions = self.run(x, move / STEP, sign, coin, data)
            np.testing.assert_allclose(reached, np.broadcast_to(y, reached.shape), atol=1e-9)
            each = np.array(
                [[log_likelihood(t, d) for d in DATA] for t in np.asarray(positions[0])]
            )
            probability = np.exp(
                [sum(each[k, s] for k, s in enumerate(set_)) for set_ in self.sets]
            )
            np.testing.assert_allclose(probability.sum(), 1)
            total += probability @ np.asarray(accept) / len(self.coins)
        log_pi = log_tractable(x) + log_likelihood(x, OBSERVED)
        return float(np.exp(log_pi + log_q) * total)

    def imbalance(self):
        """Largest difference of the flows there and back, relative."""
        flows = np.array([[self.flow(x, y) for y in GRID] for x in GRID])
        return np.abs(flows - flows.T).max() / flows.max()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("proposal", "num_aux"),
    [
        ("random_walk", 2),
        ("mala", 1),
        ("barker", 2),
        pytest.param("random_walk", 1, marks=slow),
        pytest.param("mala", 2, marks=slow),
        pytest.param("barker", 1, marks=slow),
    ],
)
def test_detailed_balance(proposal, num_aux):
    assert Enumeration(proposal, num_aux).imbalance() < 1e-10


def test_the_average_of_exchange_ratios_is_biased():
    """The kernel without the coin: heads only."""
    assert Enumeration("random_walk", 2, coins=(0.25,)).imbalance() > 1e-3
    assert Enumeration("random_walk", 2, coins=(0.75,)).imbalance() > 1e-3


@pytest.mark.parametrize("proposal", ["mala", pytest.param("barker", marks=slow)])
def test_without_the_proposal_ratio_there_is_no_balance(proposal, monkeypatch):
    monkeypatch.setattr(exchange_mh, "log_proposal", lambda *args: jnp.zeros(()))
    assert Enumeration(proposal, 1).imbalance() > 1e-3


def test_a_simulation_that_reached_its_limit_is_rejected():
    def draw(positions):
        data = jax.tree.map(lambda leaf: leaf[None], PROBLEM.observed)
        return exchange_mh.Draw(data, jnp.array([7]), jnp.array([1]))

    noise = exchange_mh.Noise(jnp.zeros(2), jnp.zeros(2), jnp.zeros(()), jnp.zeros(()), draw)
    x = jnp.asarray(GRID[0])
    settings = exchange_mh.Settings()
    y, info = jax.jit(
        lambda x: exchange_mh.transition(noise, x, PROBLEM, settings, fit(), jnp.asarray(STEP))
    )(x)
    assert (y == x).all() and info.accept_prob == 0
    assert info.num_overflow == 1 and info.sim_effort == 7 and not info.diverging


# --- start and warm-up ----------------------------------------------------------------------------

DESIGN = np.array([[1.0, 0.5], [0.0, 1.0], [1.0, -1.0], [0.3, 0.2]])


def normal_problem(observed):
    """Normal rows with unit variance: the posterior is known, as if Z were not."""

    def simulate(x, key):
        y = jnp.asarray(DESIGN) @ x + jax.random.normal(key, (4,))
        return exchange_mh.Draw({"y": y}, jnp.asarray(3, jnp.int32), jnp.zeros((), jnp.int32))

    return PROBLEM._replace(
        log_tractable=lambda x: -jnp.sum(x**2) / 2,
        log_f=lambda x, data: {"y": data["y"] * (jnp.asarray(DESIGN) @ x)},
        simulate=simulate,
        observed={"y": jnp.asarray(observed)},
    )


Y = np.array([2.0, -1.0, 1.5, 0.4])
PRECISION = DESIGN.T @ DESIGN + np.eye(2)
NARROW = 1e4 * DESIGN.T @ DESIGN + np.eye(2)


def narrow_problem():
    """As `normal_problem`, with observations of the standard deviation 1/100."""
    wide = normal_problem(Y)

    def simulate(x, key):
        noise = jax.random.normal(key, (4,)) / 100
        return wide.simulate(x, key)._replace(stats={"y": jnp.asarray(DESIGN) @ x + noise})

    return wide._replace(
        log_f=lambda x, data: {"y": 1e4 * data["y"] * (jnp.asarray(DESIGN) @ x)},
        simulate=simulate,
        observed={"y": jnp.asarray(Y) / 100},
    )


def test_stochastic_approximation_finds_the_mode_and_the_metric():
    """Centre within half a standard deviation; precision within the error of 200 draws."""
    settings = exchange_mh.Settings()
    problem = normal_problem(Y)
    start = jnp.array([3.0, -4.0])
    found = jax.jit(
        lambda key: exchange_mh.find_fit(key, start, jnp.eye(2), jnp.asarray(30), problem, settings)
    )(jax.random.key(0))
    mode = np.linalg.solve(PRECISION, DESIGN.T @ Y)
    error = np.asarray(found.centre) - mode
    assert error @ PRECISION @ error < 0.25
    np.testing.assert_allclose(found.whiten.T @ found.whiten, PRECISION, rtol=0.3, atol=0.3)
    np.testing.assert_allclose(found.fisher, DESIGN.T @ DESIGN, rtol=0.3, atol=0.4)
    np.testing.assert_allclose(found.whiten @ found.scale, np.eye(2), atol=1e-9)
    assert found.pool["y"].shape == (200, 4)
    log_f = found.pool["y"] * (DESIGN @ found.centre)
    np.testing.assert_allclose(found.pool_log_f["y"], log_f)


@pytest.mark.parametrize("distance", [100.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_a_start_many_standard_deviations_away_is_no_obstacle(distance):
    """Centre within a standard deviation, metric within a factor of two; the chain starts there."""
    settings, problem = exchange_mh.Settings(), narrow_problem()
    start = jnp.full(2, distance / 100)
    state = jax.jit(lambda key: exchange_mh.init(key, start, problem, settings, stay=False))(
        jax.random.key(0)
    )
    for x, reach in ((state.fit.centre, 1.0), (state.z["z"], 5.0)):
        error = np.asarray(x) - np.linalg.solve(NARROW, 1e4 * DESIGN.T @ (Y / 100))
        assert error @ NARROW @ error < reach**2
    ratio = np.linalg.eigvals(np.linalg.solve(NARROW, state.fit.whiten.T @ state.fit.whiten))
    assert (ratio > 0.5).all() and (ratio < 2).all()
    # and where the start is asked for, it is kept
    state = exchange_mh.init(jax.random.key(0), start, problem, settings)
    assert (state.z["z"] == start).all()


def test_warm_up_tunes_then_freezes_and_new_data_bring_a_new_centre():
    settings = exchange_mh.Settings(proposal="mala", pool=64)
    start = exchange_mh.init(jax.random.key(0), jnp.zeros(2), normal_problem(Y), settings)
    move = jax.jit(
        lambda state, y: jax.lax.scan(
            lambda s, _: (lambda s: (s, (s.fit.centre, s.step_size, s.z["z"], s.accept_prob)))(
                exchange_mh.step(s, normal_problem(y), settings, 400)
            ),
            state,
            length=1200,
        )
    )
    state, (centre, step_size, z, accept) = move(start, Y)
    changes = np.flatnonzero(np.any(np.diff(centre, axis=0) != 0, 1)) + 1
    assert changes.tolist() == [200]
    assert (np.diff(step_size)[400:] == 0).all() and (np.diff(step_size)[:399] != 0).all()
    target = exchange_mh.target_acceptance(settings, 2)
    assert abs(accept[400:].mean() - target) < 0.1
    mean = np.linalg.solve(PRECISION, DESIGN.T @ Y)
    covariance = np.linalg.inv(PRECISION)
    # 800 draws, about one in eight independent: 4 standard errors
    assert (np.abs(z[400:].mean(0) - mean) < 0.4 * np.sqrt(np.diag(covariance))).all()
    # a continued run with other data
    again, (centre, *_) = move(state._replace(rng_key=jax.random.key(1)), Y + 5)
    assert np.flatnonzero(np.any(np.diff(centre, axis=0) != 0, 1)).size == 0
    new_mean = np.linalg.solve(PRECISION, DESIGN.T @ (Y + 5))
    assert np.abs(centre[0] - new_mean).max() < 1 and np.abs(state.fit.centre - new_mean).max() > 1
    # and with the same
    same, (centre, *_) = move(again, Y + 5)
    assert (centre == again.fit.centre).all() and same.num_overflow == 0
