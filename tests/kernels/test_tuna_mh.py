"""TunaMH: detailed balance by enumeration of its random numbers, and the parts of a step."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ppl_ext.kernels import minibatch, tuna_mh

# exhaustive enumeration costs little; a chunk smaller than the counts makes the loop turn
CHUNK = 2


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(autouse=True)
def wide(x64):
    pass


# --- a posterior of two data in two dimensions ---------------------------------------------------

X = np.array([[0.5, -0.3], [-0.2, 0.6]])
Y = np.array([1.0, 0.0])
SUPREMA = {0: 1.0, 1: 0.25, 2: 1 / (6 * math.sqrt(3))}
# the bounds of order 0 are larger: smaller covariates keep the counts small
SIZE = {0: 0.03, 1: 0.6, 2: 1.0}


def problem(order, shrink=1.0, repeats=1):
    x, y = jnp.asarray(np.tile(X, (repeats, 1)) * SIZE[order]), jnp.asarray(np.tile(Y, repeats))

    def log_terms(z, index):
        eta = x[index] @ z
        return y[index] * eta - jax.nn.softplus(eta)

    def bounds(mode, scale, radius):
        return shrink * SUPREMA[order] * jnp.linalg.norm(x @ scale, axis=1) ** (order + 1)

    return minibatch.Problem(
        size=len(x),
        log_base=lambda z: -jnp.sum(z**2) / 2,
        log_terms=log_terms,
        bounds=bounds,
        ravel=lambda z: z["z"],
        unravel=lambda z: {"z": z},
    )


def log_posterior(z, order):
    """With NumPy, in double precision."""
    eta = X @ z * SIZE[order]
    return -np.sum(z**2) / 2 + np.sum(Y * eta - np.logaddexp(0, eta))


def remainders(z, mode, order):
    """Taylor remainders of the two terms, by the closed form of their derivatives."""
    eta, eta0 = X @ z * SIZE[order], X @ mode * SIZE[order]
    p = 1 / (1 + np.exp(-eta0))
    value = Y * eta - np.logaddexp(0, eta)
    if order >= 1:
        value -= Y * eta0 - np.logaddexp(0, eta0) + (Y - p) * (eta - eta0)
    if order >= 2:
        value += p * (1 - p) * (eta - eta0) ** 2 / 2
    return value


def distance(w, v, order):
    move, far, further = np.linalg.norm(v - w), np.linalg.norm(w), np.linalg.norm(v)
    if order == 0:
        return move
    if order == 1:
        h = [move * np.linalg.norm(u) + abs((v - w) @ u) for u in (w, v)]
        return sum(h) / 4
    return move * (far**2 + far * further + further**2) / 6


GRID = np.array([[0.9, -0.2], [-0.4, 0.7], [0.1, 0.3], [-0.8, -0.9]])
STEP = 1.3


@functools.cache
def outcomes(most):
    """Numbers of (datum 0 kept, dropped, datum 1 kept, dropped), all with a sum up to `most`."""
    counts = itertools.product(range(most + 1), repeat=4)
    return np.array([c for c in counts if sum(c) <= most])


class Enumeration:
    """The kernel density from point to point of GRID, summed over all random numbers."""

    def __init__(self, order, proposal, rates="max", delayed=False, chi=0.3, most=7):
        self.order, self.proposal, self.rates, self.chi = order, proposal, rates, chi
        self.settings = tuna_mh.Settings(
            order=order, proposal=proposal, rates=rates, delayed=delayed, grad_size=1,
            chunk_size=CHUNK,
        )  # fmt: skip
        self.problem = problem(order)
        # any centre and metric will do
        fit = jax.jit(lambda *at: tuna_mh.fit_at(*at, self.problem, self.settings))
        self.fit = fit(jnp.array([0.1, -0.05]), jnp.array([[1.3, 0.2], [0.2, 1.1]]))
        self.counts = outcomes(most)
        self.most = most
        self.run = jax.jit(
            jax.vmap(self._accept_prob, in_axes=(None, None, None, None, None, 0, 0, 0))
        )

    def _accept_prob(self, x, normal, sign, batch, rate, count, position, uniform):
        """The real transition, fed with given numbers."""

        def chunk(k):
            part = (k * CHUNK + jnp.arange(CHUNK)) % self.most
            return position[part], uniform[part]

        noise = tuna_mh.Noise(
            normal=normal, sign=sign, batch=batch, first=jnp.zeros(()), last=jnp.zeros(()),
            # a wrong rate draws another number
            number=lambda r: jnp.where(jnp.abs(r / rate - 1) < 1e-7, count, 0),
            chunk=chunk,
        )  # fmt: skip
        y, info = tuna_mh.transition(
            noise,
            x,
            self.problem,
            self.settings,
            self.fit,
            jnp.asarray(STEP),
            jnp.asarray(self.chi),
        )
        return info.accept_prob, y, info.fallback

    def gradient(self, z, batch):
        """What stands for the gradient, in standard coordinates, by hand."""
        mode, scale = np.asarray(self.fit.centre), np.asarray(self.fit.scale)
        w = np.asarray(self.fit.whiten) @ (z - mode)
        if self.proposal == "random_walk":
            return np.zeros(2)
        if self.proposal != "sgld":
            return -w
        x = X * SIZE[self.order]
        eta, eta0 = x @ z, x @ mode
        p, p0 = 1 / (1 + np.exp(-eta)), 1 / (1 + np.exp(-eta0))
        slope, slope0, curve0 = Y - p, Y - p0, -p0 * (1 - p0)
        taylor = np.zeros(2)
        if self.order >= 1:
            taylor = slope0
        if self.order >= 2:
            taylor = slope0 + curve0 * (eta - eta0)
        grad = -z + taylor @ x + len(x) * (slope - taylor)[batch] @ x[batch]
        return scale.T @ grad

    def density(self, start, end):
        """Of the transition start -> end in standard coordinates, acceptance included."""
        fit = self.fit
        mode, whiten = np.asarray(fit.centre), np.asarray(fit.whiten)
        w, v = whiten @ (start - mode), whiten @ (end - mode)
        c = np.asarray(fit.table.bound(jnp.arange(2)))
        gap = distance(w, v, self.order)
        total = c.sum() * gap
        rate = total * (1 + self.chi * total)
        r = remainders(start, mode, self.order) - remainders(end, mode, self.order)
        dominating = c * gap * (1 + self.chi * total)
        if self.rates == "max":
            a = dominating - np.maximum(-r, 0)
        else:
            a = self.chi * total * c * gap + (c * gap + r) / 2
        keep = a / dominating
        assert total > 0 and (np.abs(r) <= c * gap).all()

        # the law of the outcomes
        chance = np.stack([c / c.sum() * keep, c / c.sum() * (1 - keep)], 1).ravel()
        number = self.counts.sum(1)
        log_law = stats.poisson.logpmf(number, rate) + stats.multinomial.logpmf(
            self.counts, number, np.maximum(chance, 1e-300) / np.maximum(chance, 1e-300).sum()
        )
        assert stats.poisson.sf(self.most, rate) < 1e-10 / 4
        # numbers at the two sides of what decides
        stop = np.asarray(fit.table.cumulative)
        position = np.array([0, stop[0] - 1, stop[0], stop[1] - 1])
        uniform = np.stack([keep * (1 - 1e-9), keep * (1 + 1e-9)], 1).ravel()
        sequence = np.array(
            [np.repeat(np.arange(4), n).tolist() + [0] * (self.most - sum(n)) for n in self.counts]
        )

        result = 0.0
        batches = range(2) if self.proposal == "sgld" else [0]
        for batch in batches:
            gradient = self.gradient(start, np.array([batch]))
            normal, sign = (v - w) / STEP, np.zeros(2)
            if self.proposal == "barker":
                q = np.prod(
                    2 * stats.norm.pdf(v - w, scale=STEP) / (1 + np.exp(-(v - w) * gradient))
                )
            else:
                drift = STEP**2 / 2 * gradient
                normal = normal - drift / STEP
                q = np.prod(stats.norm.pdf(v - w - drift, scale=STEP))
            prob, there, fallback = self.run(
                start, normal, sign, np.array([batch]), rate, number, position[sequence],
                uniform[sequence],
            )  # fmt: skip
            assert not fallback.any()
            np.testing.assert_allclose(there[0], end, atol=1e-12)
            result += q * np.sum(np.exp(log_law) * np.asarray(prob)) / len(batches)
        return result

    def imbalance(self):
        """Largest relative difference of pi_i K_ij and pi_j K_ji."""
        pi = [np.exp(log_posterior(z, self.order)) for z in GRID]
        worst = 0.0
        for i, j in itertools.combinations(range(len(GRID)), 2):
            forth = pi[i] * self.density(GRID[i], GRID[j])
            back = pi[j] * self.density(GRID[j], GRID[i])
            worst = max(worst, abs(forth / back - 1))
        return worst


@pytest.mark.parametrize(
    ("order", "proposal", "rates", "delayed"),
    [
        (1, "taylor-mala", "max", False),
        (2, "sgld", "tuna", True),
        *slow(
            (0, "random_walk", "tuna", False),
            (0, "sgld", "max", False),
            (1, "barker", "max", True),
            (1, "sgld", "tuna", False),
            (2, "barker", "max", False),
        ),
    ],
)
def test_detailed_balance_over_all_random_numbers(order, proposal, rates, delayed):
    assert Enumeration(order, proposal, rates, delayed).imbalance() < 1e-10


@pytest.mark.parametrize(
    ("order", "fallback"), [(1, True), *slow((0, True), (2, True), (1, False))]
)
def test_outside_the_ball_of_the_bounds_all_data_are_taken_both_ways(order, fallback):
    options = tuna_mh.Settings(
        order=order, proposal="random_walk", chunk_size=CHUNK, fallback=fallback
    )
    task = problem(order)
    fit = jax.jit(lambda *at: tuna_mh.fit_at(*at, task, options))(jnp.zeros(2), jnp.eye(2))
    fit = fit._replace(radius=jnp.asarray(0.9))

    @jax.jit
    @jax.vmap
    def move(x, y):
        noise = tuna_mh.draw_noise(jax.random.key(0), fit, task, options)
        noise = noise._replace(normal=y - x)
        return tuna_mh.transition(noise, x, task, options, fit, jnp.ones(()), jnp.ones(()))[1]

    pairs = [(a, b) for a in GRID for b in GRID if a is not b]
    info = move(*map(jnp.asarray, zip(*pairs, strict=True)))
    inside = [max(np.linalg.norm(a), np.linalg.norm(b)) <= 0.9 for a, b in pairs]
    assert 0 < sum(inside) < len(pairs)
    if not fallback:
        # the posterior restricted to the ball
        assert ((np.asarray(info.accept_prob) > 0) == inside).all() and not info.fallback.any()
        return
    assert (np.asarray(info.fallback) == ~np.array(inside)).all()
    ratio = [np.exp(log_posterior(b, order) - log_posterior(a, order)) for a, b in pairs]
    exact = np.minimum(1, ratio)[np.asarray(info.fallback)]
    np.testing.assert_allclose(info.accept_prob[np.asarray(info.fallback)], exact, rtol=1e-10)
    assert (np.asarray(info.num_drawn)[np.asarray(info.fallback)] == 2).all()


# --- the table, the random numbers, the bounds ---------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_million_data_are_drawn_with_the_probability_of_their_bound(dtype):
    """A cumulative sum of floats fails: in float32 single data are off by 6 per cent."""
    c = np.random.default_rng(0).gamma(2.0, size=10**6).astype(dtype)
    table = jax.jit(minibatch.make_table)(jnp.asarray(c))
    bound = np.asarray(table.bound(jnp.arange(c.size)), np.float64)
    weights = np.diff(np.asarray(table.cumulative, np.int64), prepend=0)
    # the chance of a datum is its number of integers
    np.testing.assert_allclose(weights / weights.sum(), bound / bound.sum(), rtol=1e-5)
    assert (bound >= c).all() and bound.sum() < 1.001 * c.sum(dtype=np.float64)
    np.testing.assert_allclose(table.total, bound.sum(), rtol=1e-5)
    ends = np.asarray(table.cumulative)[[0, 7, 7, -1]] - np.array([1, 1, 0, 1])
    assert table.find(jnp.asarray(ends)).tolist() == [0, 7, 8, c.size - 1]


@pytest.mark.parametrize("size", [1, 2, 3, 65, 1000])
def test_a_datum_is_found_from_the_guide(size):
    """The same as by bisection, with equal, few and very unequal weights."""
    rng = np.random.default_rng(size)
    for c in (np.ones(size), np.arange(size) % 7 == 0, np.exp(5 * rng.normal(size=size))):
        table = minibatch.make_table(jnp.asarray(c, float))
        stops = np.asarray(table.cumulative)
        position = np.concatenate([stops, stops - 1, rng.integers(0, stops[-1], 1000)])
        position = jnp.asarray(position[(position >= 0) & (position < stops[-1])])
        found = jnp.searchsorted(table.cumulative, position, side="right")
        assert (table.find(position) == found).all()
    # a few steps for any number of data
    assert minibatch.make_table(jnp.ones(size)).num_steps <= 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, bool, jnp.int32])
def test_other_data_have_another_fingerprint(dtype):
    """Also where two values change places; chance of a collision below 1e-5 for all pairs."""
    values = jnp.asarray(np.random.default_rng(0).integers(0, 2, 256), dtype)
    one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
    versions = {minibatch._hash(values).item(), minibatch._hash(values[:-1]).item()}
    flipped = [values.at[i].set(jnp.where(values[i] == zero, one, zero)) for i in (0, 1, 255)]
    first, last = jnp.argmin(values), 255 - jnp.argmax(values[::-1])
    swapped = values.at[first].set(values[last]).at[last].set(values[first])
    assert (swapped != values).any()
    versions |= {minibatch._hash(v).item() for v in (*flipped, swapped, values[::-1])}
    assert len(versions) == 7


def test_tables_without_bounds_and_with_infinite_ones():
    assert minibatch.make_table(jnp.zeros(3)).total == 0
    assert minibatch.make_table(jnp.array([1.0, jnp.inf])).total == jnp.inf
    table = minibatch.make_table(jnp.array([1.0, 0.0, 2.0]))
    assert set(table.find(jnp.arange(table.cumulative[-1], step=2**20)).tolist()) == {0, 2}


def test_no_key_is_used_twice(monkeypatch):
    options = tuna_mh.Settings(proposal="sgld", delayed=True, grad_size=2, chunk_size=4)
    task = problem(1)
    fit = tuna_mh.fit_at(jnp.zeros(2), jnp.eye(2), task, options)
    used = []

    def watch(name):
        original = getattr(jax.random, name)

        def watched(key, *args, **kwargs):
            used.append(tuple(jax.random.key_data(key).tolist()))
            return original(key, *args, **kwargs)

        monkeypatch.setattr(jax.random, name, watched)

    for name in ("normal", "uniform", "randint", "poisson"):
        watch(name)
    noise = tuna_mh.draw_noise(jax.random.key(0), fit, task, options)
    noise.number(jnp.ones(()))
    chunks = [noise.chunk(jnp.asarray(k)) for k in (0, 1, 2)]
    assert len(used) == len(set(used)) == 12
    assert len({float(uniform[0]) for _, uniform in chunks}) == 3


@pytest.mark.parametrize("rates", ["max", *slow(("tuna",))])
def test_kept_counts_are_independent_poisson_numbers(rates):
    """Chi-square on 10,000 draws of the real numbers: false alarms 1e-4, by the level."""
    options = tuna_mh.Settings(rates=rates, chunk_size=CHUNK)
    task = problem(1)
    fit = jax.jit(lambda *at: tuna_mh.fit_at(*at, task, options))(jnp.zeros(2), jnp.eye(2))
    x, y, chi = 4 * jnp.asarray(GRID[0]), 4 * jnp.asarray(GRID[1]), 0.5
    gap = tuna_mh.distance(fit.to_standard(x), fit.to_standard(y), 1)
    total = fit.table.total * gap
    rate = total * (1 + chi * total)

    @jax.jit
    @jax.vmap
    def counts(key):
        noise = tuna_mh.draw_noise(key, fit, task, options)
        result = tuna_mh.minibatch_log_ratio(
            noise, x, y, gap, jnp.asarray(chi), rate, task, options, fit
        )
        return jnp.stack([result[1], result[2]])

    drawn, kept = np.asarray(counts(jax.random.split(jax.random.key(1), 10_000))).T
    r = remainders(x, np.asarray(fit.centre), 1) - remainders(y, np.asarray(fit.centre), 1)
    c = np.asarray(fit.table.bound(jnp.arange(2)))
    dominating = c * gap * (1 + chi * total)
    a = dominating - (np.maximum(-r, 0) if rates == "max" else (c * gap - r) / 2)
    for number, mean in ((kept, a.sum()), (drawn - kept, rate - a.sum())):
        seen = np.bincount(number, minlength=5)[:5]
        law = stats.poisson.pmf(np.arange(5), float(mean))
        seen, law = np.append(seen, len(number) - seen.sum()), np.append(law, 1 - law.sum())
        if law[-1] * len(number) < 5:
            seen, law = seen[:-1], law[:-1] / law[:-1].sum()
        usable = law * seen.sum() >= 5
        expected = law[usable] / law[usable].sum() * seen[usable].sum()
        assert stats.chisquare(seen[usable], expected).pvalue > 1e-4


@pytest.mark.parametrize(("shrink", "found"), [(1.0, False), (0.99, True)])
def test_a_bound_that_is_one_per_cent_too_small_is_counted(shrink, found):
    """Two data with the same covariates and opposite outcomes attain the bound at the mode."""
    x = jnp.array([[1e-3, 0.0], [1e-3, 0.0]])
    options = tuna_mh.Settings(chunk_size=8)

    def bounds(mode, scale, radius):
        return shrink * 0.25 * jnp.linalg.norm(x @ scale, axis=1) ** 2

    task = problem(1)._replace(
        log_terms=lambda z, i: jnp.asarray(Y)[i] * (x[i] @ z) - jax.nn.softplus(x[i] @ z),
        bounds=bounds,
    )
    fit = tuna_mh.fit_at(jnp.zeros(2), jnp.eye(2), task, options)
    noise = tuna_mh.draw_noise(jax.random.key(0), fit, task, options)
    noise = noise._replace(number=lambda rate: 8)
    near, far = jnp.array([0.1, 0.0]), jnp.array([0.8, 0.0])
    gap = tuna_mh.distance(near, far, 1)
    *_, violations = tuna_mh.minibatch_log_ratio(
        noise, near, far, gap, jnp.zeros(()), jnp.ones(()), task, options, fit
    )
    assert (violations > 0) == found


# --- the law of the draws ------------------------------------------------------------------------


def logistic(size, seed=0):
    """A 1-d logistic regression with a normal prior, and draws of its posterior by inversion."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size)
    y = (rng.uniform(size=size) < 1 / (1 + np.exp(-x))).astype(float)
    xs, ys = jnp.asarray(x), jnp.asarray(y)
    grid = np.linspace(-1, 3, 20_001)
    log_p = -(grid**2) / 2 + sum(
        b * a * grid - np.logaddexp(0, a * grid) for a, b in zip(x, y, strict=True)
    )
    cdf = np.cumsum(np.exp(log_p - log_p.max()))
    cdf /= cdf[-1]
    suprema = lambda order: SUPREMA[order]  # noqa: E731

    def make(order):
        return minibatch.Problem(
            size=size,
            log_base=lambda z: -jnp.sum(z**2) / 2,
            log_terms=lambda z, i: ys[i] * xs[i] * z[0] - jax.nn.softplus(xs[i] * z[0]),
            bounds=lambda mode, scale, radius: (
                suprema(order) * jnp.abs(xs * scale[0, 0]) ** (order + 1)
            ),
            ravel=lambda z: z["z"],
            unravel=lambda z: {"z": z},
        )

    return make, lambda u: np.interp(u, cdf, grid), lambda z: np.interp(z, grid, cdf)


@pytest.mark.parametrize(
    ("order", "proposal", "fallback_share"),
    [
        *slow(
            (1, "taylor-mala", (0.0, 0.3)),
            (2, "barker", (0.0, 0.05)),
            (1, "sgld", (0.0, 0.3)),
            (0, "random_walk", (0.1, 0.9)),
        ),
    ],
)
def test_exact_draws_stay_exact(order, proposal, fallback_share):
    """KS test of 2,000 chains after 20 steps from exact draws: false alarms 1e-4, by the level.

    The fallback takes part.
    """
    make, draw, cdf = logistic(60)
    task, options = (
        make(order),
        tuna_mh.Settings(order=order, proposal=proposal, chi=0.02, chunk_size=8),
    )
    fit = jax.jit(lambda x: tuna_mh.find_fit(x, task, options))(jnp.zeros(1))
    starts = draw(np.random.default_rng(1).uniform(size=2000))[:, None]

    @jax.jit
    @jax.vmap
    def run(key, x):
        state = tuna_mh.init(key, x, task, options, fit)

        def turn(_, carry):
            state, full = carry
            state = tuna_mh.step(state, task, options, 0)
            return state, full + state.fallback

        state, full = jax.lax.fori_loop(0, 20, turn, (state, 0))
        return state.z["z"][0], full / 20, state.num_violations

    keys = jax.random.split(jax.random.key(2), 2000)
    draws, full, violations = run(keys, jnp.asarray(starts))
    assert fallback_share[0] <= full.mean() <= fallback_share[1]
    assert violations.sum() == 0
    assert stats.kstest(np.asarray(draws), cdf).pvalue > 1e-4
    assert np.mean(np.asarray(draws) != starts[:, 0]) > 0.99
