"""PoissonMH: detailed balance by enumeration of its random numbers, and the parts of a step."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ppl_ext.kernels import minibatch, poisson_mh

# exhaustive enumeration costs little; a chunk smaller than the counts makes the loop turn
CHUNK = 2


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(autouse=True)
def wide(x64):
    pass


# --- a posterior of two data in two dimensions ---------------------------------------------------

# small covariates keep the counts small
X = 0.02 * np.array([[0.5, -0.3], [-0.2, 0.6]])
Y = np.array([1.0, 0.0])
LAM, STEP, RHO = 0.2, 1.3, 2.0
GRID = np.array([[0.9, -0.2], [-0.4, 0.7], [0.1, 0.3], [-0.8, -0.9]])
CENTRES = np.array([[0.2, -0.1], [-0.3, 0.5]])


def problem(shrink=1.0, pair=False):
    x, y = jnp.asarray(X), jnp.asarray(Y)

    def log_terms(z, index):
        eta = x[index] @ z
        return y[index] * eta - jax.nn.softplus(eta)

    def bounds(mode, scale, radius):
        reach = shrink * jnp.linalg.norm(x @ scale, axis=1)
        if not pair:
            return reach
        value = log_terms(mode, jnp.arange(2))
        return value - reach * radius, value + reach * radius

    return minibatch.Problem(
        size=2,
        log_base=lambda z: -jnp.sum(z**2) / 2,
        log_terms=log_terms,
        bounds=bounds,
        ravel=lambda z: z["z"],
        unravel=lambda z: {"z": z},
    )


def terms(z):
    """With NumPy, in double precision."""
    eta = X @ z
    return Y * eta - np.logaddexp(0, eta)


def log_posterior(z):
    return -np.sum(z**2) / 2 + terms(z).sum()


@functools.cache
def outcomes(most):
    """Numbers of (datum 0 kept, dropped, datum 1 kept, dropped), all with a sum up to `most`."""
    counts = itertools.product(range(most + 1), repeat=4)
    return np.array([c for c in counts if sum(c) <= most])


class Enumeration:
    """The kernel density from point to point of GRID, summed over all random numbers.

    In the local form at fixed centres z: the law of z is part of the density.
    """

    def __init__(self, proposal, local=None, pair=False, most=10):
        # no step with all data: where they are drawn is another test
        self.settings = poisson_mh.Settings(
            proposal=proposal, local=local, fallback=False, chunk_size=CHUNK
        )
        self.proposal, self.local, self.most = proposal, local, most
        self.problem = problem(pair=pair)
        # any centre and metric will do
        fit = jax.jit(lambda *at: poisson_mh.fit_at(*at, self.problem, self.settings))
        self.fit = fit(jnp.array([0.1, -0.05]), jnp.array([[1.3, 0.2], [0.2, 1.1]]))
        self.mode, self.whiten, self.scale = (np.asarray(a) for a in self.fit[:3])
        self.counts = outcomes(most)
        self.tau = None if local is None else local / (math.sqrt(2) + 3)
        axes = (None, 0, None, None, None, 0, 0, 0)
        self.run = jax.jit(jax.vmap(self._accept_prob, in_axes=axes))

    def _accept_prob(self, x, normal, sign, centre, rate, count, position, uniform):
        """The real transition, fed with given numbers."""

        def chunk(k):
            part = (k * CHUNK + jnp.arange(CHUNK)) % self.most
            return position[part], uniform[part]

        noise = poisson_mh.Noise(
            normal=normal, sign=sign, centre=centre, choice=jnp.ones(()), last=jnp.zeros(()),
            # a wrong rate draws another number
            number=lambda r: jnp.where(jnp.abs(r / rate - 1) < 1e-7, count, 0),
            chunk=chunk,
        )  # fmt: skip
        y, info = poisson_mh.transition(
            noise, x, self.problem, self.settings, self.fit, jnp.asarray(STEP), jnp.asarray(LAM)
        )
        return info.accept_prob, y, info.num_violations

    def rates(self, z, low):
        total = self.bound.sum()
        return LAM * self.bound / total + terms(z) - low

    @functools.cached_property
    def bound(self):
        return np.asarray(self.fit.table.bound(jnp.arange(2)))

    def gradient(self, z, kept, low, centre):
        """Of the minibatches `kept`, (k, 2), in standard coordinates, by hand."""
        if self.proposal == "random_walk":
            return np.zeros((len(kept), 2))
        p = 1 / (1 + np.exp(-X @ z))
        slope = (Y - p)[:, None] * X / self.rates(z, low)[:, None]
        found = (-z + kept @ slope) @ self.scale
        length, longest = np.linalg.norm(found, axis=1), math.sqrt(2) + 4
        found *= np.minimum(1, longest / length)[:, None]
        if self.local is not None:
            found -= (self.whiten @ (z - self.mode) - centre) / self.tau**2
        return found

    def density(self, start, end, centre=None):
        """Of the transition start -> end in standard coordinates, acceptance included."""
        w, v = (self.whiten @ (z - self.mode) for z in (start, end))
        if self.local is None:
            low, law = np.asarray(self.fit.low), 1.0
            standard = np.zeros(2)
        else:
            low = terms(self.mode + self.scale @ centre) - self.bound / 2
            law = np.prod(stats.norm.pdf(centre - w, scale=self.tau))
            standard = (centre - w) / self.tau
        expected = LAM + self.bound.sum()
        rate = self.rates(start, low)
        most = LAM * self.bound / self.bound.sum() + self.bound
        keep = rate / most
        assert ((keep > 0) & (keep < 1)).all()

        # the law of the outcomes
        chance = np.stack([self.bound / self.bound.sum() * keep,
                           self.bound / self.bound.sum() * (1 - keep)], 1).ravel()  # fmt: skip
        number = self.counts.sum(1)
        log_law = stats.poisson.logpmf(number, expected)
        log_law += stats.multinomial.logpmf(self.counts, number, chance / chance.sum())
        assert stats.poisson.sf(self.most, expected) < 1e-10 / 4
        # numbers at the two sides of what decides
        stop = np.asarray(self.fit.table.cumulative)
        position = np.array([0, stop[0] - 1, stop[0], stop[1] - 1])
        uniform = np.stack([keep * (1 - 1e-9), keep * (1 + 1e-9)], 1).ravel()
        sequence = np.array(
            [np.repeat(np.arange(4), n).tolist() + [0] * (self.most - sum(n)) for n in self.counts]
        )

        gradient = self.gradient(start, self.counts[:, ::2], low, centre)
        normal = np.broadcast_to((v - w) / STEP, gradient.shape)
        if self.proposal == "barker":
            q = 2 * stats.norm.pdf(v - w, scale=STEP) / (1 + np.exp(-(v - w) * gradient))
        else:
            drift = STEP**2 / 2 * gradient
            normal, q = normal - drift / STEP, stats.norm.pdf(v - w - drift, scale=STEP)
        prob, there, broken = self.run(
            start, normal, np.zeros(2), standard, expected, number, position[sequence],
            uniform[sequence],
        )  # fmt: skip
        assert not np.asarray(broken).any()
        np.testing.assert_allclose(there, np.broadcast_to(end, there.shape), atol=1e-12)
        return law * np.sum(np.prod(q, 1) * np.exp(log_law) * np.asarray(prob))

    def imbalance(self):
        """Largest relative difference of pi_i K_ij and pi_j K_ji."""
        worst = 0.0
        centres = [None] if self.local is None else CENTRES
        for a, b in itertools.combinations(GRID, 2):
            for centre in centres:
                forth = np.exp(log_posterior(a)) * self.density(a, b, centre)
                back = np.exp(log_posterior(b)) * self.density(b, a, centre)
                worst = max(worst, abs(forth / back - 1))
        return worst


@pytest.mark.parametrize(
    ("proposal", "local", "pair"),
    [
        ("mala", None, False),
        ("barker", RHO, False),
        *slow(
            ("random_walk", None, True),
            ("random_walk", RHO, False),
            ("barker", None, False),
            ("mala", RHO, False),
        ),
    ],
)
def test_detailed_balance_over_all_random_numbers(proposal, local, pair):
    assert Enumeration(proposal, local, pair).imbalance() < 1e-10


# --- the set of the bounds -----------------------------------------------------------------------


def moves(settings, fit, choice, centre=(0.0, 0.0)):
    """Outcome of each step between two points of GRID."""
    task = problem()

    @jax.jit
    @jax.vmap
    def move(x, y):
        noise = poisson_mh.draw_noise(jax.random.key(0), fit, settings)
        noise = noise._replace(normal=y - x, choice=jnp.asarray(choice), centre=jnp.asarray(centre))
        return poisson_mh.transition(noise, x, task, settings, fit, jnp.ones(()), jnp.asarray(LAM))[
            1
        ]

    pairs = [(a, b) for a in GRID for b in GRID if a is not b]
    return pairs, move(*map(jnp.asarray, zip(*pairs, strict=True)))


def test_outside_the_ball_of_the_bounds_all_data_are_taken_and_sometimes_inside():
    """pi(x) s(x) a(x, y) = pi(y) s(y) a(y, x) for the probability s to take all data."""
    options = poisson_mh.Settings(proposal="random_walk", chunk_size=CHUNK)
    fit = jax.jit(lambda *at: poisson_mh.fit_at(*at, problem(), options))(jnp.zeros(2), jnp.eye(2))
    fit = fit._replace(radius=jnp.asarray(0.9))
    share = lambda z: 0.01 if np.linalg.norm(z) <= 0.9 else 1.0  # noqa: E731
    pairs, info = moves(options, fit, 0.0)
    assert info.fallback.all() and (info.num_drawn == 2).all()
    ratio = [np.exp(log_posterior(b) - log_posterior(a)) * share(b) / share(a) for a, b in pairs]
    assert len(set(map(share, GRID))) == 2
    np.testing.assert_allclose(info.accept_prob, np.minimum(1, ratio), rtol=1e-10)
    # a minibatch inside only, and none to the outside
    _, info = moves(options, fit, 0.5)
    inside = [share(a) < 1 for a, _ in pairs]
    assert (np.asarray(info.fallback) == ~np.array(inside)).all()
    leaves = np.array([share(a) < 1 and share(b) == 1 for a, b in pairs])
    assert leaves.any() and (np.asarray(info.accept_prob)[leaves] == 0).all()
    assert info.num_violations.sum() == 0


@pytest.mark.slow
def test_all_data_are_taken_where_a_minibatch_would_be_as_many():
    options = poisson_mh.Settings(proposal="mala", chunk_size=CHUNK)
    fit = poisson_mh.fit_at(jnp.zeros(2), jnp.eye(2), problem(), options)
    big = fit._replace(table=fit.table._replace(unit=100 * fit.table.unit))
    for table, full in ((fit, False), (big, True)):
        _, info = moves(options, table, 0.5)
        assert (np.asarray(info.fallback) == full).all()


@pytest.mark.slow
def test_a_centre_too_far_away_or_a_proposal_too_far_from_it_rejects():
    options = poisson_mh.Settings(proposal="random_walk", local=1.0, chunk_size=CHUNK)
    fit = poisson_mh.fit_at(jnp.zeros(2), jnp.eye(2), problem(), options)
    tau = 1 / (math.sqrt(2) + 3)
    for centre in ((0.5, 0.0), (4.0, 3.0)):
        pairs, info = moves(options, fit, 0.5, centre)
        middle = [a + tau * np.array(centre) for a, _ in pairs]
        near = [
            max(np.linalg.norm(a - z), np.linalg.norm(b - z)) <= 1
            for (a, b), z in zip(pairs, middle, strict=True)
        ]
        assert ((np.asarray(info.accept_prob) > 0) == near).all()
        assert info.num_violations.sum() == 0


# --- random numbers and bounds -------------------------------------------------------------------


def test_no_key_is_used_twice(monkeypatch):
    options = poisson_mh.Settings(proposal="barker", local=1.0, chunk_size=4)
    fit = poisson_mh.fit_at(jnp.zeros(2), jnp.eye(2), problem(), options)
    used = []

    def watch(name):
        original = getattr(jax.random, name)

        def watched(key, *args, **kwargs):
            used.append(tuple(jax.random.key_data(key).tolist()))
            return original(key, *args, **kwargs)

        monkeypatch.setattr(jax.random, name, watched)

    for name in ("normal", "uniform", "randint", "poisson"):
        watch(name)
    noise = poisson_mh.draw_noise(jax.random.key(0), fit, options)
    noise.number(jnp.ones(()))
    chunks = [noise.chunk(jnp.asarray(k)) for k in (0, 1, 2)]
    assert len(used) == len(set(used)) == 12
    assert len({float(uniform[0]) for _, uniform in chunks}) == 3
    # the second look at the minibatch sees the same data
    np.testing.assert_array_equal(noise.chunk(jnp.asarray(1))[0], chunks[1][0])


@pytest.mark.parametrize(("shrink", "found"), [(1.0, False), (0.99, True)])
def test_a_bound_that_is_one_per_cent_too_small_is_counted(shrink, found):
    """A term with the slope of its Lipschitz constant reaches the bounds at the ball's surface."""
    options = poisson_mh.Settings(proposal="random_walk", chunk_size=8)
    task = problem()._replace(
        log_terms=lambda z, i: 1e-3 * z[0] + 0 * i,
        bounds=lambda mode, scale, radius: shrink * 1e-3 * jnp.ones(2),
    )
    fit = poisson_mh.fit_at(jnp.zeros(2), jnp.eye(2), task, options)
    x = jnp.array([0.999 * (math.sqrt(2) + 4), 0.0])
    for start, end in ((x, 0.1 * x), (0.1 * x, x)):
        noise = poisson_mh.draw_noise(jax.random.key(0), fit, options)
        noise = noise._replace(
            normal=end - start, choice=jnp.ones(()), number=lambda rate: jnp.asarray(8)
        )
        _, info = poisson_mh.transition(
            noise, start, task, options, fit, jnp.ones(()),
            jnp.asarray(1.0),
        )  # fmt: skip
        assert (info.num_violations > 0) == found


@pytest.mark.slow
@pytest.mark.parametrize("proposal", poisson_mh.PROPOSALS)
def test_kept_counts_and_gradients_have_the_right_mean(proposal):
    """Mean kept data lam + sum phi; the gradient estimate has no bias: |z| < 5 on 4,000 draws."""
    options = poisson_mh.Settings(proposal=proposal, chunk_size=CHUNK)
    task = problem()
    fit = jax.jit(lambda *at: poisson_mh.fit_at(*at, task, options))(jnp.zeros(2), jnp.eye(2))
    x = jnp.asarray(GRID[0])

    @jax.jit
    @jax.vmap
    def draw(key):
        noise = poisson_mh.draw_noise(key, fit, options)
        number = noise.number(LAM + fit.table.total)
        batch = poisson_mh.Minibatch(noise, number, fit.centre, jnp.asarray(LAM))
        found = poisson_mh.minibatch_log_ratio(batch, x, x, True, task, options, fit)
        gradient = poisson_mh._gradient_of_log_rates(batch, x, task, options, fit)
        return found.num_kept, gradient, found.gradient, found.log_ratio

    kept, gradient, again, log_ratio = draw(jax.random.split(jax.random.key(1), 4000))
    mean = LAM + (terms(GRID[0]) - np.asarray(fit.low)).sum()
    assert abs(kept.mean() - mean) < 5 * math.sqrt(mean / 4000)
    p = 1 / (1 + np.exp(-X @ GRID[0]))
    error = np.asarray(gradient).mean(0) - (Y - p) @ X
    assert (np.abs(error) < 5 * np.asarray(gradient).std(0) / math.sqrt(4000)).all()
    assert (log_ratio == 0).all()
    if proposal != "random_walk":
        np.testing.assert_allclose(gradient, again, rtol=1e-12)


# --- the law of the draws ------------------------------------------------------------------------


def student(size, beta):
    """A 1-d robust regression to the power `beta`, and draws of its posterior by inversion."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=size)
    y = x + rng.standard_t(4, size=size)
    xs, ys = jnp.asarray(x), jnp.asarray(y)
    grid = np.linspace(-4, 6, 20_001)
    log_p = -(grid**2) / 8 + beta * stats.t.logpdf(y[:, None] - x[:, None] * grid, 4).sum(0)
    cdf = np.cumsum(np.exp(log_p - log_p.max()))
    cdf /= cdf[-1]
    slope = 5 / (2 * math.sqrt(4))
    task = minibatch.Problem(
        size=size,
        log_base=lambda z: -jnp.sum(z**2) / 8,
        log_terms=lambda z, i: beta * jax.scipy.stats.t.logpdf(ys[i] - xs[i] * z[0], 4),
        bounds=lambda mode, scale, radius: beta * slope * jnp.abs(xs * scale[0, 0]),
        ravel=lambda z: z["z"],
        unravel=lambda z: {"z": z},
    )
    return task, lambda u: np.interp(u, cdf, grid), lambda z: np.interp(z, grid, cdf)


@pytest.mark.parametrize(
    ("proposal", "local"),
    [
        *slow(
            ("barker", None), ("mala", None), ("random_walk", None), ("mala", 3.0), ("barker", 3.0)
        ),
    ],
)
def test_exact_draws_stay_exact(proposal, local):
    """KS test of 2,000 chains after 20 steps from exact draws: false alarms 1e-4, by the level."""
    task, draw, cdf = student(200, 0.1)
    options = poisson_mh.Settings(proposal=proposal, local=local, lam=20.0, chunk_size=16)
    fit = jax.jit(lambda x: poisson_mh.find_fit(x, task, options))(jnp.ones(1))
    assert fit.table.total + 20 < 200
    starts = draw(np.random.default_rng(1).uniform(size=2000))[:, None]

    @jax.jit
    @jax.vmap
    def run(key, x):
        state = poisson_mh.init(key, x, task, options, fit)

        def turn(_, carry):
            state, full = carry
            state = poisson_mh.step(state, task, options, 0)
            return state, full + state.fallback

        state, full = jax.lax.fori_loop(0, 20, turn, (state, 0))
        return state.z["z"][0], full / 20, state.num_violations

    keys = jax.random.split(jax.random.key(2), 2000)
    draws, full, violations = run(keys, jnp.asarray(starts))
    assert full.mean() < 0.05
    assert violations.sum() == 0
    assert stats.kstest(np.asarray(draws), cdf).pvalue > 1e-4
    assert np.mean(np.asarray(draws) != starts[:, 0]) > 0.99
