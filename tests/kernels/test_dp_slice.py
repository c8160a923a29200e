"""Slice samplers against all partitions of nine points, and the pieces against SciPy."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln, logsumexp

from ppl_ext.kernels import conjugate as cj
from ppl_ext.kernels import dp_slice as dp

EXACT = json.loads((Path(__file__).parent / "data" / "dp_partitions.json").read_text())
Y = np.array(EXACT["y"])
N = len(Y)
CHAINS = 8000

# base: s2 ~ InverseGamma(2, 2), mu ~ Normal(20, s2 / 0.1)
PRIOR = {"loc": jnp.zeros(1), "kappa": jnp.full(1, 0.1)}
PRIOR |= {"shape": jnp.full(1, 2.0), "rate": jnp.full(1, 2.0)}
ONE = jnp.ones((1, 1))
ROWS = {"y": jnp.asarray(Y, jnp.float32)[:, None], "offset": 20 * ONE, "scale": ONE, "mask": ONE}
ATOMS = cj.Product((cj.Member(cj.NormalInverseGamma(True), ROWS, PRIOR),), N)


def _draw(key):
    precision, mu = jnp.exp(cj.log_gamma(key, jnp.array(2.0))) / 2, jax.random.normal(key)
    return {"mu": 20 + mu / jnp.sqrt(0.1 * precision), "log_s2": -jnp.log(precision)}


def _log_base(atom):
    """Log density of mu and log s2."""
    log_s2 = atom["log_s2"]
    log_normal = jax.scipy.stats.norm.logpdf(atom["mu"], 20.0, jnp.exp(log_s2 / 2) / 0.1**0.5)
    return jnp.log(4.0) - 2 * log_s2 - 2 * jnp.exp(-log_s2) + log_normal


def _log_likelihood(atoms):
    squares = (jnp.asarray(Y, jnp.float32) - atoms["mu"]) ** 2 * jnp.exp(-atoms["log_s2"])
    return -(squares + atoms["log_s2"]) / 2


# the same base and likelihood without their closed form
ONE_BY_ONE = dp.Gradient(
    draw=_draw,
    log_base=_log_base,
    log_likelihood=_log_likelihood,
    center={"mu": jnp.float32(20.0), "log_s2": jnp.float32(0.3)},
    scale={"mu": jnp.float32(4.0), "log_s2": jnp.float32(0.8)},
)


@cache
def partitions():
    """All partitions of nine points as labels, and the log marginal likelihood of each."""
    labels = np.zeros((1, 1), int)
    for _ in range(N - 1):
        top = labels.max(1) + 1
        rows = np.repeat(np.arange(len(labels)), top + 1)
        last = np.concatenate([np.arange(t + 1) for t in top])
        labels = np.column_stack([labels[rows], last])
    subsets = np.array([[(s >> i) & 1 for i in range(N)] for s in range(1, 2**N)], bool)
    log_m = np.zeros(2**N)
    for s, members in enumerate(subsets, 1):
        # s2 (1 + 11') form: multivariate t with 4 degrees of freedom, scale matrix of rate / shape
        y = Y[members]
        scale = np.eye(len(y)) + 10.0
        log_m[s] = stats.multivariate_t(np.full(len(y), 20.0), scale, df=4).logpdf(y)
    codes = (labels[:, None, :] == np.arange(N)[:, None]) @ (1 << np.arange(N))
    return labels, log_m[codes].sum(1)


def log_prior(labels, alpha, d=0.0):
    """Log probability of partitions under the process, from the restaurant, point by point."""
    total = np.zeros(len(labels))
    for i in range(labels.shape[1]):
        own = (labels[:, :i] == labels[:, i : i + 1]).sum(1)
        clusters = labels[:, :i].max(1, initial=-1) + 1
        mass = np.where(own > 0, own - d, alpha + clusters * d)
        total += np.log(mass / (i + alpha)) if i else 0.0
    return total


@cache
def exact(alpha, d=0.0):
    """Posterior probability of each partition."""
    labels, log_m = partitions()
    log_p = log_m + log_prior(labels, alpha, d)
    return np.exp(log_p - logsumexp(log_p))


def statistics(labels):
    """Indicators of the number of clusters and of each pair of points."""
    labels = np.asarray(labels)
    ordered = np.sort(labels, 1)
    clusters = 1 + (np.diff(ordered, axis=1) != 0).sum(1)
    i, j = np.triu_indices(N, 1)
    return np.column_stack(
        [clusters[:, None] == np.arange(1, N + 1), labels[:, i] == labels[:, j]]
    ).astype(float)


def largest_z(labels, probability):
    """Largest |z| of the means of `statistics`, where at least 50 draws are expected either way."""
    all_labels, _ = partitions()
    mean = probability @ statistics(all_labels)
    n = len(labels)
    known = np.minimum(mean, 1 - mean) * n > 50
    z = (statistics(labels).mean(0) - mean) / np.sqrt(mean * (1 - mean) / n)
    return np.abs(z[known]).max()


def start_at(labels, settings, mixture, alpha):
    """States of many chains at given labels; what a sweep draws anew is zero."""
    one = jax.eval_shape(lambda k: dp.init(k, mixture, settings), jax.random.key(0))
    blank = jax.tree.map(
        lambda x: jnp.zeros((len(labels), *x.shape), x.dtype), one._replace(rng_key=None)
    )
    return blank._replace(
        labels=jnp.asarray(labels, jnp.int32),
        concentration=jnp.broadcast_to(jnp.asarray(alpha, jnp.float32), (len(labels),)),
        rng_key=jax.random.split(jax.random.key(7), len(labels)),
    )


def sweeps(method, split_merge, number, *, discount=None, prior=None, capacity=64, atoms=ATOMS):
    """A compiled function of (states, alpha, d): states after some sweeps."""
    settings = dp.Settings(method, capacity, 16, split_merge)

    def mixture(alpha, d):
        return dp.Mixture(
            N,
            atoms,
            concentration=None if prior else alpha,
            prior=prior,
            discount=None if discount is None else d,
        )

    def run(state, alpha, d):
        one = lambda _, s: dp.step(s, mixture(alpha, d), settings)  # noqa: E731
        return jax.lax.fori_loop(0, number, one, state)

    return (
        jax.jit(jax.vmap(run, (0, None, None))),
        lambda labels, alpha: start_at(labels, settings, mixture(1.0, 0.0), alpha),
    )


def draw_partitions(probability, seed, number=CHAINS):
    labels, _ = partitions()
    return labels[np.random.default_rng(seed).choice(len(labels), number, p=probability)]


def in_stick_order(labels, alpha, d, seed):
    """Labels as indices of sticks: the size-biased order of weights given the partition."""
    rng = np.random.default_rng(seed)
    out = np.empty_like(labels)
    for row, c in enumerate(labels):
        counts = np.bincount(c)
        h = len(counts)
        w = rng.dirichlet([*(counts - d), alpha + h * d])
        v = rng.beta(1 - d, alpha + d * (h + np.arange(1, 200)))
        new = w[-1] * v * np.cumprod(np.append(1.0, 1 - v[:-1]))
        weights = np.maximum(np.append(w[:-1], new), 1e-300)
        order = np.argsort(rng.exponential(size=len(weights)) / weights)
        out[row] = np.argsort(order)[c]
    return out


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_enumeration_is_that_of_the_file(alpha):
    """Numbers of another program, over all partitions."""
    labels, _ = partitions()
    assert len(labels) == 21147
    mean = exact(alpha) @ statistics(labels)
    file = EXACT["conjugate"][f"alpha={alpha}"]
    np.testing.assert_allclose(mean[:N], file["P_K"], atol=1e-6)
    np.testing.assert_allclose(
        mean[N:], np.array(file["coclustering"])[np.triu_indices(N, 1)], atol=1e-5
    )


@pytest.mark.parametrize(
    ("split_merge", "alphas"),
    [
        (3, [1.0]),
        pytest.param(0, [0.5, 1.0, 3.0], marks=pytest.mark.slow),
        pytest.param(3, [0.5, 3.0], marks=pytest.mark.slow),
    ],
)
def test_a_sweep_of_the_partition_keeps_the_posterior(split_merge, alphas):
    """From exact draws, three concentrations; |z| < 4.5 over 45 numbers: 3e-4 false alarms each.

    The counters are of the same sweep: their sum over chains against the law, |z| < 4.5.
    """
    run, start = sweeps("posterior", split_merge, 2)
    for alpha in alphas:
        probability = exact(alpha)
        after = run(start(draw_partitions(probability, 1), alpha), alpha, 0.0)
        fine = ~np.asarray(after.overflow)
        assert fine.mean() > 0.999
        assert largest_z(np.asarray(after.labels)[fine], probability) < 4.5
        overhead = np.asarray(after.overhead, float)[fine]
        predicted = np.asarray(after.overhead_predicted, float)[fine]
        error = (overhead - predicted).sum() / np.sqrt(((overhead - predicted) ** 2).sum())
        assert abs(error) < 4.5
        assert (np.asarray(after.num_instantiated - after.num_clusters)[fine] == overhead).all()
    if split_merge:
        assert 0.2 < after.num_accepted.mean() < 3


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_a_sweep_without_closed_form_keeps_the_posterior(broken, monkeypatch):
    """As above, labels and atoms; |z| < 4.5. Proposals 5 % too near to their mode are seen."""
    if broken:
        # the Gamma draw under the root of Student's t is 10 % larger than their density says
        right = dp.log_gamma
        monkeypatch.setattr(dp, "log_gamma", lambda key, a: right(key, a) + 0.1 * (a.ndim == 0))
    settings = dp.Settings("posterior", 64, 16, 3)
    run, start = sweeps("posterior", 3, 2, atoms=ONE_BY_ONE)
    for alpha in (0.5, 3.0):
        probability = exact(alpha)
        labels = draw_partitions(probability, 1)
        keys = jax.random.split(jax.random.key(5), len(labels))
        draw = lambda key, c: dp._draw_product(key, c, ATOMS, settings)[0]  # noqa: E731
        exact_atoms = jax.jit(jax.vmap(draw))(keys, jnp.asarray(labels, jnp.int32))
        atoms = {
            "mu": 20 + exact_atoms["mean"][..., 0],
            "log_s2": jnp.log(exact_atoms["spread"][..., 0]),
        }
        before = start(labels, alpha)._replace(atoms=atoms)
        after = run(before, alpha, 0.0)
        fine = ~np.asarray(after.overflow)
        assert fine.mean() > 0.999
        z = [largest_z(np.asarray(after.labels)[fine], probability)]
        chain = np.arange(len(labels))
        for point in (0, N - 1):
            for name, middle in (("mu", 20.0), ("log_s2", 0.0)):
                there, here = (
                    np.asarray(s.atoms[name])[chain, np.asarray(s.labels)[:, point]]
                    for s in (after, before)
                )
                change = (np.tanh(there - middle) - np.tanh(here - middle))[fine]
                z.append(abs(change.mean()) / change.std() * np.sqrt(len(change)))
        assert 0.2 < after.num_accepted.mean() < 3
        if broken:
            assert max(z) > 6
            return
        assert max(z) < 4.5


@pytest.mark.slow
def test_pitman_yor_keeps_the_posterior_and_is_the_dirichlet_process_at_zero():
    run, start = sweeps("posterior", 2, 2, discount=True, capacity=128)
    for d in (0.0, 0.1):
        probability = exact(1.0, d)
        after = run(start(draw_partitions(probability, 2), 1.0), 1.0, d)
        fine = ~np.asarray(after.overflow)
        assert fine.mean() > 0.99
        assert largest_z(np.asarray(after.labels)[fine], probability) < 4.5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kgw", "kgw_independent"])
def test_a_sweep_in_stick_order_keeps_the_posterior(method):
    run, start = sweeps(method, 0, 2, discount=True, capacity=128)
    for d in (0.0, 0.1):
        probability = exact(1.0, d)
        labels = in_stick_order(draw_partitions(probability, 3), 1.0, d, 4)
        # sticks beyond the slots are too rare to matter here
        after = run(start(np.minimum(labels, 127), 1.0), 1.0, d)
        fine = ~np.asarray(after.overflow)
        assert fine.mean() > 0.98
        assert largest_z(np.asarray(after.labels)[fine], probability) < 4.5


def draw_with_concentration(seed, shape=2.0, rate=4.0, number=CHAINS):
    """Exact draws of concentration and partition."""
    labels, log_m = partitions()
    clusters = labels.max(1) + 1
    log_sizes = log_m + log_prior(labels, 1.0)
    grid = np.linspace(1e-3, 12, 4000)
    log_mass = np.array([logsumexp(log_sizes[clusters == k]) for k in range(1, N + 1)])
    k = np.arange(1, N + 1)
    log_p = stats.gamma(shape, scale=1 / rate).logpdf(grid)[:, None] + k * np.log(grid)[:, None]
    log_p += (gammaln(grid) - gammaln(grid + N))[:, None] + log_mass
    p = np.exp(log_p - logsumexp(log_p))
    rng = np.random.default_rng(seed)
    cell = rng.choice(p.size, number, p=p.ravel())
    alpha, k = grid[cell // N], cell % N + 1
    out = np.empty((number, N), int)
    for clusters_now in range(1, N + 1):
        rows = np.flatnonzero(k == clusters_now)
        inside = np.flatnonzero(clusters == clusters_now)
        q = np.exp(log_sizes[inside] - logsumexp(log_sizes[inside]))
        out[rows] = labels[inside[rng.choice(len(inside), len(rows), p=q)]]
    marginal = np.zeros(len(labels))
    for clusters_now in range(1, N + 1):
        inside = clusters == clusters_now
        q = np.exp(log_sizes[inside] - logsumexp(log_sizes[inside]))
        marginal[inside] = p.sum(0)[clusters_now - 1] * q
    mean = (p.sum(1) * grid).sum()
    sd = np.sqrt((p.sum(1) * grid**2).sum() - mean**2)
    return out, alpha, marginal, mean, sd


@pytest.mark.slow
@pytest.mark.parametrize("method", ["posterior", "kgw"])
def test_random_concentration_keeps_the_posterior(method):
    labels, alpha, marginal, mean, sd = draw_with_concentration(5)
    prior = (jnp.float32(2.0), jnp.float32(4.0))
    run, start = sweeps(method, 0, 10, prior=prior, capacity=128)
    if method == "kgw":
        labels = np.concatenate(
            [
                in_stick_order(c[None], a, 0.0, i)
                for i, (c, a) in enumerate(zip(labels, alpha, strict=True))
            ]
        )
        labels = np.minimum(labels, 127)
    after = run(start(labels, alpha), 1.0, 0.0)
    assert not after.overflow.any()
    assert largest_z(after.labels, marginal) < 4.5
    assert abs(after.concentration.mean() - mean) < 4.5 * sd / np.sqrt(CHAINS)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["floor", "order", "overflow"])
def test_known_mistakes_are_seen(broken, monkeypatch):
    """The same comparison fails, |z| > 6, where the code is wrong on purpose."""
    capacity, alpha = 64, 1.0
    if broken == "floor":
        right = dp.exponential
        monkeypatch.setattr(dp, "exponential", lambda *a: jnp.minimum(right(*a), 1.0))
    if broken == "order":
        # labels are drawn before the leftover is broken into sticks
        right_assign = dp._assign

        def wrong_assign(key, labels, log_u, atoms, width, *rest):
            clusters = jnp.sum(dp.count(labels, capacity) > 0)
            width = jnp.where(jnp.arange(capacity) < clusters, width, -jnp.inf)
            return right_assign(key, labels, log_u, atoms, width, *rest)

        monkeypatch.setattr(dp, "_assign", wrong_assign)
    if broken == "overflow":
        capacity, alpha = 16, 10.0
        right_weights = dp._weights_of_partition

        def unseen(*args):
            *rest, end = right_weights(*args)
            return (*rest, end - jnp.inf)

        monkeypatch.setattr(dp, "_weights_of_partition", unseen)
    run, start = sweeps("posterior", 0, 10, capacity=capacity)
    probability = exact(alpha)
    after = run(start(draw_partitions(probability, 6), alpha), alpha, 0.0)
    assert largest_z(after.labels, probability) > 6


def test_concentration_given_sticks_keeps_their_joint_law():
    """Prior draws of concentration, sticks and labels; 20,000, |z| < 4.5: 7e-6 false alarms each.

    The rule for partitions (Escobar & West) keeps the law of the concentration and the partition,
    but not that of the labels, which are in the order of the sticks.
    """
    shape, rate, number, capacity = 2.0, 1.0, 20_000, 64
    rng = np.random.default_rng(1)
    alpha = rng.gamma(shape, 1 / rate, number)
    rest = -rng.exponential(size=(number, capacity)) / alpha[:, None]
    before = np.column_stack([np.zeros(number), np.cumsum(rest, 1)])
    log_weights = before[:, :-1] + np.log(-np.expm1(rest))
    labels = (1 - np.exp(before[:, None, 1:]) < rng.uniform(size=(number, N, 1))).sum(-1)
    labels = np.minimum(labels, capacity - 1)
    settings = dp.Settings("kgw", capacity, 16, 0)
    prior = jnp.float32(shape), jnp.float32(rate)
    state = start_at(labels, settings, dp.Mixture(N, ATOMS, prior=prior), alpha)._replace(
        log_weights=jnp.asarray(log_weights, jnp.float32),
        log_leftover=jnp.asarray(before[:, -1], jnp.float32),
        i=jnp.ones(number, jnp.int32),
    )

    def of_sticks(state):
        counts = dp.count(state.labels, capacity)
        return dp._concentration_of_sticks(state.rng_key, state, counts, *prior)

    def of_partition(state):
        clusters = jnp.sum(dp.count(state.labels, capacity) > 0)
        rule = dp._concentration_of_partition
        return rule(state.rng_key, state.concentration, clusters, N, *prior)

    def largest_z(rule):
        new = np.asarray(jax.jit(jax.vmap(rule))(state), float)
        last = labels.max(1)
        found = [new - alpha, new**2 - alpha**2, (new - alpha) * last, (new - alpha) * rest[:, 0]]
        return max(abs(x.mean()) / x.std() * np.sqrt(number) for x in found)

    assert largest_z(of_sticks) < 4.5
    assert largest_z(of_partition) > 6


@pytest.mark.slow
def test_more_slots_give_the_same_chain():
    chains = []
    for capacity in (64, 128):
        settings = dp.Settings("posterior", capacity, 16, 2)
        mixture = dp.Mixture(N, ATOMS, prior=(jnp.float32(2.0), jnp.float32(4.0)))
        key = jax.random.key(3)

        def run(key, mixture=mixture, settings=settings):
            state = dp.init(key, mixture, settings)
            one = lambda s, _: (lambda t: (t, (t.labels, t.concentration, t.overhead)))(  # noqa: E731
                dp.step(s, mixture, settings)
            )
            return jax.lax.scan(one, state, None, 30)[1]

        chains.append(jax.jit(run)(key))
    for a, b in zip(*chains, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_overflow_stays_and_shows():
    run, start = sweeps("posterior", 0, 1, capacity=16)
    state = start(draw_partitions(exact(3.0), 8, 300), 3.0)
    before = state
    for _ in range(4):
        before, state = state, run(state, 3.0, 0.0)
        lost = np.asarray(state.overflow)
        assert (lost >= np.asarray(before.overflow)).all()
        assert (np.asarray(state.labels)[lost] == -1).all()
        assert np.isnan(np.asarray(state.concentration)[lost]).all()
        assert (np.asarray(state.labels)[~lost] >= 0).all()
    assert 0.3 < lost.mean() < 1.0


# --- pieces ----------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [0.05, 1.0, 7.5, 1e6])
def test_gamma_draws(a):
    """Kolmogorov-Smirnov, p > 1e-4."""
    x = np.asarray(cj.log_gamma(jax.random.key(1), jnp.full(20000, a)), float)
    reference = stats.loggamma(a)
    assert stats.kstest(x, reference.cdf).pvalue > 1e-4


def bayes(pair, rows, prior, log_likelihood, log_base, log_posterior):
    """log m = log f + log g0 - log posterior at any atom, up to sum h; h from one atom's T eta."""
    atoms = cj.Product((cj.Member(pair, rows, prior),), len(rows["y"]))
    total = atoms.statistics(0, len(rows["y"])).sum(0)
    zero = jnp.zeros_like(total)
    for seed in range(3):
        (atom,) = atoms.draw(jax.random.key(seed), zero)
        fit = float(
            atoms.statistics(0, len(rows["y"])) @ atoms.natural((atom,)) @ jnp.ones(len(rows["y"]))
        )
        h = log_likelihood(atom) - fit
        log_m = log_likelihood(atom) + log_base(atom) - log_posterior(atom) - h
        np.testing.assert_allclose(float(atoms.log_marginal(total)), log_m, rtol=2e-4, atol=2e-3)
    draws = jax.vmap(lambda k: atoms.draw(k, total)[0])(jax.random.split(jax.random.key(9), 20000))
    return draws


@pytest.mark.slow
def test_conjugate_pairs_against_scipy():
    """Marginal likelihoods by Bayes's rule with SciPy's densities, posterior draws by 5 sd."""
    rng = np.random.default_rng(0)
    one = np.ones((1, 1))
    y = rng.normal(1.0, 2.0, (6, 1)).astype(np.float32)
    offset, scale = rng.normal(size=(6, 1)), rng.uniform(0.5, 2, (6, 1))
    mask = np.array([1, 1, 0, 1, 1, 1.0])[:, None]
    keep = mask[:, 0] > 0

    def close(draws, mean, sd):
        assert abs(float(draws.mean()) - mean) < 5 * sd / np.sqrt(20000)

    rows = {"y": y, "offset": offset, "scale": scale, "mask": mask}
    w, r = (mask / scale**2)[:, 0], (y - offset)[:, 0]
    precision = 0.5 + w.sum()
    mean = (0.5 * 0.3 + (w * r).sum()) / precision
    posterior = stats.norm(mean, precision**-0.5)
    draws = bayes(
        cj.NormalMean(),
        rows,
        {"loc": jnp.full(1, 0.3), "precision": jnp.full(1, 0.5)},
        lambda a: stats.norm(float(a["mean"][0]) + offset, scale).logpdf(y)[keep].sum(),
        lambda a: stats.norm(0.3, 0.5**-0.5).logpdf(float(a["mean"][0])),
        lambda a: posterior.logpdf(float(a["mean"][0])),
    )
    close(draws["mean"], mean, posterior.std())

    counts = rng.poisson(3.0, (6, 1)).astype(np.float32)
    exposure = rng.uniform(0.5, 2, (6, 1))
    rows = {"y": counts, "scale": exposure, "mask": mask}
    posterior = stats.gamma(2 + counts[keep].sum(), scale=1 / (1.5 + exposure[keep].sum()))
    draws = bayes(
        cj.GammaPoisson(),
        rows,
        {"shape": jnp.full(1, 2.0), "rate": jnp.full(1, 1.5)},
        lambda a: stats.poisson(float(a["rate"][0]) * exposure).logpmf(counts)[keep].sum(),
        lambda a: stats.gamma(2, scale=1 / 1.5).logpdf(float(a["rate"][0])),
        lambda a: posterior.logpdf(float(a["rate"][0])),
    )
    close(draws["rate"], posterior.mean(), posterior.std())

    times = rng.exponential(2.0, (6, 1)).astype(np.float32)
    posterior = stats.gamma(2 + keep.sum(), scale=1 / (1.5 + (exposure * times)[keep].sum()))
    draws = bayes(
        cj.GammaExponential(),
        {"y": times, "scale": exposure, "mask": mask},
        {"shape": jnp.full(1, 2.0), "rate": jnp.full(1, 1.5)},
        lambda a: stats.expon(scale=1 / (exposure * float(a["rate"][0]))).logpdf(times)[keep].sum(),
        lambda a: stats.gamma(2, scale=1 / 1.5).logpdf(float(a["rate"][0])),
        lambda a: posterior.logpdf(float(a["rate"][0])),
    )
    close(draws["rate"], posterior.mean(), posterior.std())

    trials = np.array([3, 5, 2, 4, 6, 1.0])[:, None]
    wins = np.minimum(rng.integers(0, 4, (6, 1)), trials).astype(np.float32)
    posterior = stats.beta(2 + wins[keep].sum(), 3 + (trials - wins)[keep].sum())
    draws = bayes(
        cj.BetaBinomial(),
        {"y": wins, "scale": trials, "mask": mask},
        {"a": jnp.full(1, 2.0), "b": jnp.full(1, 3.0)},
        lambda a: stats.binom(trials, float(a["probs"][0])).logpmf(wins)[keep].sum(),
        lambda a: stats.beta(2, 3).logpdf(float(a["probs"][0])),
        lambda a: posterior.logpdf(float(a["probs"][0])),
    )
    close(draws["probs"], posterior.mean(), posterior.std())

    table = rng.multinomial(4, [0.2, 0.3, 0.5], 6).astype(np.float32)
    parameters = np.array([1.0, 2.0, 0.7])
    after = parameters + table[keep].sum(0)
    as_float64 = lambda a: np.asarray(a["probs"], float) / np.asarray(a["probs"], float).sum()  # noqa: E731
    draws = bayes(
        cj.Dirichlet(),
        {"y": table, "mask": mask},
        {"a": jnp.asarray(parameters)},
        lambda a: stats.multinomial(4, as_float64(a)).logpmf(table)[keep].sum(),
        lambda a: stats.dirichlet(parameters).logpdf(as_float64(a)),
        lambda a: stats.dirichlet(after).logpdf(as_float64(a)),
    )
    for k in range(3):
        marginal = stats.beta(after[k], after.sum() - after[k])
        close(draws["probs"][:, k], marginal.mean(), marginal.std())

    rows = {"y": y, "offset": 0 * one, "scale": scale, "mask": mask}
    x = y[:, 0]
    kappa = 0.1 + w.sum()
    mean = (0.1 * 0.3 + (w * x).sum()) / kappa
    shape = 2 + keep.sum() / 2
    rate = 1.5 + ((w * x**2).sum() + 0.1 * 0.3**2 - kappa * mean**2) / 2

    def normal_gamma(a, m, k, s, b):
        tau, mu = float(a["spread"][0]), float(a["mean"][0])
        return stats.gamma(s, scale=1 / b).logpdf(tau) + stats.norm(m, (k * tau) ** -0.5).logpdf(mu)

    draws = bayes(
        cj.NormalInverseGamma(False),
        rows,
        {
            "loc": jnp.full(1, 0.3),
            "kappa": jnp.full(1, 0.1),
            "shape": jnp.full(1, 2.0),
            "rate": jnp.full(1, 1.5),
        },
        lambda a: (
            stats.norm(float(a["mean"][0]), scale * float(a["spread"][0]) ** -0.5)
            .logpdf(y)[keep]
            .sum()
        ),
        lambda a: normal_gamma(a, 0.3, 0.1, 2, 1.5),
        lambda a: normal_gamma(a, mean, kappa, shape, rate),
    )
    close(draws["spread"], shape / rate, shape**0.5 / rate)
    close(draws["mean"], mean, np.sqrt(rate / (shape - 1) / kappa))

    points = rng.normal(size=(6, 2)).astype(np.float32) + 1
    used = points[keep].astype(float)
    prior_scale, df = np.array([[2.0, 0.3], [0.3, 1.0]]), 4.0
    n, loc = len(used), np.array([0.2, -0.1])
    kappa = 0.5 + n
    mean = (0.5 * loc + used.sum(0)) / kappa
    scatter = prior_scale + used.T @ used + 0.5 * np.outer(loc, loc) - kappa * np.outer(mean, mean)

    def normal_wishart(a, m, k, s, nu):
        lam = np.asarray(a["spread"], float)
        return stats.wishart(nu, np.linalg.inv(s)).logpdf(lam) + stats.multivariate_normal(
            m, np.linalg.inv(k * lam)
        ).logpdf(np.asarray(a["mean"], float))

    draws = bayes(
        cj.NormalInverseWishart(2, False),
        {"y": points, "offset": 0 * one, "scale": one, "mask": mask},
        {
            "loc": jnp.asarray(loc),
            "kappa": jnp.float32(0.5),
            "df": jnp.float32(df),
            "scale": jnp.asarray(prior_scale),
        },
        lambda a: (
            stats.multivariate_normal(
                np.asarray(a["mean"], float), np.linalg.inv(np.asarray(a["spread"], float))
            )
            .logpdf(used)
            .sum()
        ),
        lambda a: normal_wishart(a, loc, 0.5, prior_scale, df),
        lambda a: normal_wishart(a, mean, kappa, scatter, df + n),
    )
    expected = (df + n) * np.linalg.inv(scatter)
    sd = np.sqrt(
        (df + n) * (np.linalg.inv(scatter) ** 2 + np.outer(*[np.diag(np.linalg.inv(scatter))] * 2))
    )
    assert (np.abs(np.asarray(draws["spread"]).mean(0) - expected) < 5 * sd / np.sqrt(20000)).all()
    close(draws["mean"][:, 0], mean[0], np.sqrt(scatter[0, 0] / (df + n - 3) / kappa))
