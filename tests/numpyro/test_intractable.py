"""Ising, Potts, ERGM and Conway-Maxwell-Poisson: densities and simulators against enumeration.

Simulators are compared with exact probabilities by chi-squared tests at fixed keys. Over 20 other
keys and all simulators, 400 tests, the smallest p-value was 0.0007; one below 1e-4 is an alarm.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from scipy import stats
from scipy.special import comb, gammaln, logsumexp

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.kernels import coupling_from_the_past as cftp
from ppl_ext.kernels import tie_no_tie
from ppl_ext.numpyro import ERGM, ConwayMaxwellPoisson, Graph, Ising, Potts
from ppl_ext.numpyro.ergm import gwesp, kstar, nodecov, nodematch

ALARM = 1e-4
TRIANGLE_AND_TAIL = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4)]


def draws(distribution, number, seed=0):
    simulate = jax.jit(lambda key: distribution.simulate(key, (number,)))
    return simulate(jax.random.key(seed))


def pvalue(observed, probabilities):
    """Chi-squared test of counts; cells with fewer than five expected are joined."""
    probabilities = np.asarray(probabilities, np.float64)
    expected = probabilities / probabilities.sum() * observed.sum()
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        assert observed[-1] < 30
        observed, expected = (
            observed[:-1],
            expected[:-1] * observed[:-1].sum() / expected[:-1].sum(),
        )
    return stats.chisquare(observed, expected).pvalue


# --- spins ---------------------------------------------------------------------------------------


def spin_weights(values, graph, pair, coupling, field):
    """All states and their log weights, with loops."""
    states = np.array(list(itertools.product(values, repeat=graph.num_nodes)))
    edges = graph.edges.tolist()
    coupling = np.broadcast_to(coupling, len(edges))
    total = [
        sum(c * pair(x[a], x[b]) for c, (a, b) in zip(coupling, edges, strict=True))
        + sum(field(i, x[i]) for i in range(graph.num_nodes))
        for x in states
    ]
    return states, np.array(total)


def ising_weights(graph, coupling, field):
    field = np.broadcast_to(np.ravel(field), graph.num_nodes)
    return spin_weights(
        (-1, 1), graph, lambda a, b: a * b, coupling, lambda i, x: float(field[i] * x)
    )


def potts_weights(graph, coupling, field):
    return spin_weights(
        range(len(field)), graph, lambda a, b: a == b, coupling, lambda i, x: float(field[x])
    )


LATTICE = Graph.lattice(3, 2)
SPINS = [
    # couplings of one sign, of both, for each edge; fields; both ways round for the lattice
    Ising(0.4, 0.2, Graph.lattice(2, 3)),
    Ising(np.linspace(-0.5, 0.8, 7), np.linspace(-0.3, 0.4, 6).reshape(3, 2), LATTICE),
    Ising(-0.3, np.linspace(0.5, -0.2, 5), Graph(5, TRIANGLE_AND_TAIL)),
    Potts(0.7, np.array([0.0, 0.3, -0.2]), LATTICE),
    Potts(np.linspace(0.1, 0.9, 5), np.array([0.2, 0.0, 0.0]), Graph(5, TRIANGLE_AND_TAIL)),
]


def weights(x):
    make = ising_weights if isinstance(x, Ising) else potts_weights
    return make(x.graph, np.asarray(x.coupling), np.asarray(x.field))


@pytest.mark.parametrize("x", SPINS, ids=lambda x: f"{type(x).__name__}{x.event_shape}")
def test_spin_densities_are_those_of_all_states(x):
    states, expected = weights(x)
    values = states.reshape(-1, *x.event_shape)
    found = jax.jit(
        lambda values: (
            x.log_f(values),
            x.log_normalizer(),
            jax.nn.logsumexp(x._log_f_of_all()),
            x.log_prob(values),
            x.support(values),
        )
    )(values)
    log_f, log_normalizer, by_enumeration, log_prob, support = found
    np.testing.assert_allclose(log_f, expected, atol=1e-5)
    np.testing.assert_allclose(log_normalizer, logsumexp(expected), rtol=1e-5)
    np.testing.assert_allclose(by_enumeration, logsumexp(expected), rtol=1e-5)
    np.testing.assert_allclose(log_prob, expected - logsumexp(expected), atol=2e-5, rtol=1e-5)
    assert support.all()


# the others are slow
FAST = {"Ising0-transfer", "Ising1-enumeration", "Potts3-transfer", "Potts4-cftp"}
FAST |= {"Potts4-gibbs", "antiferromagnet-cftp"}


def simulators():
    for i, x in enumerate(SPINS):
        for sampler in ("enumeration", "transfer", "cftp", "gibbs"):
            if sampler == "transfer" and not x.graph.free_lattice:
                continue
            # coupling from the past needs an order
            if sampler == "cftp" and float(x.coupling.min()) < 0:
                continue
            options = {"num_sweeps": 40} if sampler == "gibbs" else {}
            new = type(x)(x.coupling, x.field, x.graph, sampler=sampler, **options)
            yield f"{type(x).__name__}{i}-{sampler}", new
    # on a graph with two sides
    yield "antiferromagnet-cftp", Ising(-0.4, 0.3, LATTICE, sampler="cftp")


SIMULATORS = [
    pytest.param(x, id=name, marks=[] if name in FAST else pytest.mark.slow)
    for name, x in simulators()
]


@pytest.mark.parametrize("x", SIMULATORS)
def test_spin_simulators_draw_from_the_distribution(x):
    found = draws(x, 4000)
    assert not found.overflow.any() and found.value.dtype == jnp.int32
    states, log_weights = weights(x)
    q, low = x._q, states.min()
    digits = (np.asarray(found.value).reshape(4000, -1) - low) // (2 if low == -1 else 1)
    index = digits @ q ** np.arange(x.graph.num_nodes - 1, -1, -1)
    counts = np.bincount(index, minlength=len(states))
    assert pvalue(counts, np.exp(log_weights - logsumexp(log_weights))) > ALARM
    assert x.exact == (x.sampler != "gibbs")


def test_coupling_from_the_past_with_fresh_randomness_is_another_distribution():
    """A walk on 0, 1, 2, held at the ends, visits them equally often."""

    def sweep(x, key):
        return jnp.clip(x + jnp.where(jax.random.bernoulli(key), 1, -1), 0, 2)

    def fresh(key, sweep, extremes, max_sweeps):
        both = jax.vmap(sweep, in_axes=(0, None))

        def attempt(carry):
            past, _ = carry
            again = jax.random.fold_in(key, past)
            move = lambda k, s: both(s, jax.random.fold_in(again, past - k))  # noqa: E731
            return 2 * past, jax.lax.fori_loop(0, past, move, extremes)

        start = (jnp.ones((), jnp.int32), extremes)
        _, states = jax.lax.while_loop(lambda c: jnp.any(c[1][0] != c[1][1]), attempt, start)
        return cftp.Coalesced(states[0], jnp.ones((), jnp.int32), jnp.zeros((), bool))

    def counts(couple):
        one = lambda key: couple(key, sweep, jnp.array([0, 2]), 1024).state  # noqa: E731
        return np.bincount(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 3000)))

    assert stats.chisquare(counts(cftp.coupled)).pvalue > ALARM
    assert stats.chisquare(counts(fresh)).pvalue < 1e-12


def test_what_coupling_from_the_past_cannot_do_is_flagged():
    """Effort is bounded: near the critical temperature few sweeps do not suffice."""
    cold = draws(Ising(0.5, 0.0, Graph.lattice(8, 8), sampler="cftp", max_sweeps=8), 5)
    assert cold.overflow.all()
    # 1 + 2 + 4 + 8 sweeps
    np.testing.assert_array_equal(cold.effort, 15)
    frustrated = Ising(-0.3, 0.0, Graph(5, TRIANGLE_AND_TAIL), sampler="cftp")
    assert draws(frustrated, 5).overflow.all()


@pytest.mark.slow
def test_negative_couplings_of_the_random_cluster_model_are_flagged():
    assert draws(Potts(-0.3, jnp.zeros(3), LATTICE, sampler="cftp"), 5).overflow.all()


def test_transfer_matrix_of_a_large_lattice():
    """Onsager's energy; and draws whose mean statistics are the derivatives of log Z."""
    x = Ising(0.3, 0.1, Graph.lattice(9, 20))
    gradient = jax.jit(jax.grad(lambda t: Ising(t[0], t[1], x.graph).log_normalizer()))(
        jnp.array([0.3, 0.1])
    )
    values = draws(x, 2000).value
    assert values.shape == (2000, 9, 20) and x.sampler == "transfer"
    s = np.asarray(x.stats(values), float)
    z = (s.mean(0) - np.asarray(gradient)) / (s.std(0) / np.sqrt(2000))
    assert np.abs(z).max() < 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Graph(2, [(0, 2)]), "nodes outside 0 ... 1"),
        (lambda: Graph(2, [(1, 1)]), "joins node 1 to itself"),
        (lambda: Graph(2, [(0, 1), (1, 0)]), "an edge twice"),
        (lambda: Graph(2, [(0.5, 1)]), "pairs of integers"),
        (lambda: Graph.lattice(2, 5, periodic=True), "side below 3"),
        (lambda: Ising([0.1, 0.2], 0.0, LATTICE), r"`coupling` must be .* of shape \(7,\)"),
        (lambda: Ising(0.1, [0.1, 0.2], LATTICE), "`field` must be"),
        (lambda: Ising(0.1, 0.0, LATTICE, sampler="nuts"), "`sampler` must be one of"),
        (lambda: Ising(0.1, 0.0, Graph.lattice(5, 5), sampler="enumeration"), "1048576 states"),
        (lambda: Ising(0.1, 0.0, Graph(3, [(0, 1)]), sampler="transfer"), "free lattice"),
        (lambda: Ising(0.1, 0.0, LATTICE, max_sweeps=0), "`max_sweeps`"),
        (lambda: Potts(0.1, 0.0, LATTICE), "`field` must have one number for each"),
        (lambda: ERGM([1.0], ["edges", "triangles"], 4), r"shape \(2,\)"),
        (lambda: ERGM([1.0], ["isolates"], 4), "`terms` must be"),
        (lambda: ERGM([1.0], ["kstar"], 4), "`terms` must be"),
        (lambda: ERGM([1.0], [nodecov([1, 2])], 4), "2 values, but there are 4 nodes"),
        (lambda: ERGM([1.0], ["edges"], 1), "`num_nodes` must be 2 or more"),
        (lambda: ERGM([1.0], ["edges"], 4, num_toggles=0), "`num_toggles`"),
        (lambda: kstar(0), "`k` must be"),
        (lambda: gwesp(-1.0), "`decay` must be"),
        (lambda: ConwayMaxwellPoisson(1.0, 1.0, max_trials=0), "`max_trials`"),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_graph_that_is_none():
    with pytest.raises(TypeError, match="`graph` must be a Graph, got list"):
        Ising(0.1, 0.0, [(0, 1)])


# --- graphs --------------------------------------------------------------------------------------

GROUP, WEIGHT, DECAY = ["a", "b", "a", "b", "b"], [0.5, -1.0, 2.0, 0.0, 1.0], 0.4
TERMS = ["edges", "triangles", kstar(2), kstar(3), gwesp(DECAY), nodematch(GROUP), nodecov(WEIGHT)]


def graph_statistics(x):
    """Of one graph, with loops over nodes."""
    n = len(x)
    edges = [(i, j) for i, j in itertools.combinations(range(n), 2) if x[i, j]]
    shared = {(i, j): sum(x[i, k] and x[j, k] for k in range(n)) for i, j in edges}
    return [
        len(edges),
        sum(x[i, j] and x[j, k] and x[i, k] for i, j, k in itertools.combinations(range(n), 3)),
        sum(comb(x[i].sum(), 2) for i in range(n)),
        sum(comb(x[i].sum(), 3) for i in range(n)),
        sum(np.exp(DECAY) * (1 - (1 - np.exp(-DECAY)) ** shared[e]) for e in edges),
        sum(GROUP[i] == GROUP[j] for i, j in edges),
        sum(WEIGHT[i] + WEIGHT[j] for i, j in edges),
    ]


def all_graphs(n):
    i, j = np.triu_indices(n, 1)
    graphs = np.zeros((2 ** len(i), n, n), int)
    graphs[:, i, j] = (np.arange(len(graphs))[:, None] >> np.arange(len(i))) & 1
    return graphs + graphs.swapaxes(1, 2)


GRAPHS = all_graphs(5)
COEF = np.array([-0.6, 0.5, 0.1, -0.2, 0.3, 0.4, 0.2])


def test_graph_statistics_and_normaliser_are_those_of_all_graphs():
    x = ERGM(COEF, TERMS, 5)
    expected = np.array([graph_statistics(g) for g in GRAPHS])
    found = jax.jit(lambda x: (x.stats(GRAPHS), x.log_normalizer(), x.support(GRAPHS)))(x)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    np.testing.assert_allclose(found[1], logsumexp(expected @ COEF), rtol=1e-5)
    assert found[2].all()
    assert not x.support(np.triu(np.ones((5, 5)), 1)) and not x.support(np.eye(5))


def test_changes_of_the_statistics_are_differences():
    """Of the tie-no-tie sampler: for each dyad of random graphs."""
    x = ERGM(np.zeros(7), TERMS, 5)
    from ppl_ext.numpyro.ergm import _change

    changes = jax.jit(lambda g, i, j: jnp.stack([_change(t, g, i, j) for t in x.terms]))
    for graph in GRAPHS[[3, 500, 871, 1023]]:
        for i, j in tie_no_tie.dyads(5):
            without, with_tie = graph.copy(), graph.copy()
            without[[i, j], [j, i]], with_tie[[i, j], [j, i]] = 0, 1
            expected = np.subtract(graph_statistics(with_tie), graph_statistics(without))
            np.testing.assert_allclose(changes(without * 1.0, i, j), expected, atol=1e-5)


@pytest.mark.parametrize(
    "method", [pytest.param("enumeration", marks=pytest.mark.slow), "independent", "tie-no-tie"]
)
def test_graph_simulators_draw_from_the_distribution(method, monkeypatch):
    coef, terms = (
        (COEF, TERMS) if method != "independent" else (COEF[[0, 5, 6]], [TERMS[0], *TERMS[5:]])
    )
    x = ERGM(coef, terms, 5, num_toggles=200)
    assert x.exact and x.has_normalizer
    log_weights = np.asarray(x.stats(GRAPHS), float) @ coef
    np.testing.assert_allclose(x.log_normalizer(), logsumexp(log_weights), rtol=1e-5)
    if method == "tie-no-tie":
        monkeypatch.setattr(ERGM, "_few", False)
        assert not x.exact
    found = draws(x, 4000)
    i, j = np.triu_indices(5, 1)
    index = np.asarray(found.value)[:, i, j] @ 2 ** np.arange(10)
    counts = np.bincount(index, minlength=1024)
    assert pvalue(counts, np.exp(log_weights - logsumexp(log_weights))) > ALARM
    assert bool(x.support(found.value).all())
    np.testing.assert_array_equal(found.effort, 200 if method == "tie-no-tie" else 1)


@pytest.mark.slow
def test_tie_no_tie_without_its_proposal_ratio_is_another_distribution(monkeypatch):
    """The chi-squared test sees a sampler that takes toggles for symmetric."""
    x = ERGM(COEF, TERMS, 5, num_toggles=200)
    log_weights = np.asarray(x.stats(GRAPHS), float) @ COEF
    monkeypatch.setattr(ERGM, "_few", False)
    honest = tie_no_tie.draw

    def dishonest(key, log_ratio, *args):
        def other(graph, i, j):
            ties = graph.sum() / 2
            add = jnp.where(ties > 0, -jnp.log(20.0), -jnp.log(10.0))
            return log_ratio(graph, i, j) - jnp.log(0.5 / (ties + 1) + 0.05) + add

        return honest(key, other, *args)

    monkeypatch.setattr(tie_no_tie, "draw", dishonest)
    i, j = np.triu_indices(5, 1)
    index = np.asarray(draws(x, 4000).value)[:, i, j] @ 2 ** np.arange(10)
    counts = np.bincount(index, minlength=1024)
    assert pvalue(counts, np.exp(log_weights - logsumexp(log_weights))) < 1e-6


# --- counts --------------------------------------------------------------------------------------


def test_conway_maxwell_poisson_draws_from_its_series():
    location, dispersion = np.array([0.3, 2.7, 6.0, 4.0, 1.5]), np.array([0.5, 0.7, 1.0, 2.5, 1.3])
    x = ConwayMaxwellPoisson(location, dispersion)
    y = np.arange(400)
    expected = dispersion[:, None] * (y * np.log(location[:, None]) - gammaln(y + 1))
    values = np.broadcast_to(np.arange(20)[:, None], (20, 5))
    np.testing.assert_allclose(x.log_f(values), expected.T[:20], rtol=1e-4, atol=1e-4)
    found = (
        draws(x, 0) if False else jax.jit(lambda key: x.simulate(key, (4000, 5)))(jax.random.key(0))
    )
    assert not found.overflow.any() and found.effort.min() >= 1
    for row in range(5):
        counts = np.bincount(found.value[:, row], minlength=400)
        p = np.exp(expected[row] - logsumexp(expected[row]))
        assert pvalue(counts, p) > ALARM


@pytest.mark.slow
def test_conway_maxwell_poisson_that_gives_up_says_so():
    x = ConwayMaxwellPoisson(jnp.full(100, 50.0), 20.0, max_trials=1)
    found = x.simulate(jax.random.key(0))
    assert 0 < int(found.overflow.sum()) < 100 and int(found.effort.max()) == 1


# --- as NumPyro distributions --------------------------------------------------------------------


def test_density_without_a_normaliser_is_refused_by_name():
    x = Ising(0.3, 0.0, Graph.lattice(13, 13))
    with pytest.raises(UnsupportedModelError, match=r"Ising.*ExchangeMH"):
        x.log_prob(jnp.ones((13, 13)))
    with pytest.raises(UnsupportedModelError, match=r"ConwayMaxwellPoisson.*ExchangeMH"):
        ConwayMaxwellPoisson(1.0, 1.0).log_prob(1)
    with pytest.raises(UnsupportedModelError, match=r"ERGM.*ExchangeMH"):
        ERGM([0.0, 0.0], ["edges", "triangles"], 7).log_prob(jnp.zeros((7, 7)))


def test_values_from_predictive_and_in_plates():
    def model():
        with numpyro.plate("row", 3):
            numpyro.sample("x", Ising(0.3, 0.0, Graph.lattice(2, 3)))
            numpyro.sample("g", dist.Independent(ERGM([0.1], ["edges"], 4).expand([3]), 0))

    found = Predictive(model, num_samples=4)(jax.random.key(0))
    assert {k: v.shape for k, v in found.items()} == {
        "x": (4, 3, 2, 3),
        "g": (4, 3, 4, 4),
    }


@pytest.mark.parametrize(
    "x",
    [*SPINS[:1], ERGM(COEF, TERMS, 5)],
    ids=lambda x: type(x).__name__,
)
def test_distributions_are_pytrees(x):
    leaves, structure = jax.tree.flatten(x)
    again = jax.tree.unflatten(structure, leaves)
    key = jax.random.key(0)
    draw = jax.jit(lambda x: x.sample(key))
    np.testing.assert_array_equal(draw(again), draw(x))
