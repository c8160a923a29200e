"""Exponential random graph models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from ppl_ext.arguments import argument_error, check_count, check_positive
from ppl_ext.kernels import tie_no_tie
from ppl_ext.numpyro.intractable import Intractable, Simulation
from ppl_ext.target import Array

# graphs enumerated
_MOST_GRAPHS = 2**15
_BY_DYAD = ("edges", "nodematch", "nodecov")


@dataclass(frozen=True)
class Term:
    """A statistic of a graph: its name and its constants. Made by the functions of this module."""

    name: str
    constants: tuple[float, ...] = ()


def kstar(k: int) -> Term:
    """Number of k-stars: sum over nodes of (degree choose k)."""
    check_count("kstar", k=k)
    return Term("kstar", (int(k),))


def gwesp(decay: float) -> Term:
    """Geometrically weighted edgewise shared partners with a fixed decay.

    Sum over edges of e^decay (1 - (1 - e^-decay)^p), p the number of common neighbours of its ends
    (Hunter & Handcock 2006, eq. 25).
    """
    check_positive("gwesp", decay=decay)
    return Term("gwesp", (float(decay),))


def nodematch(attribute: Sequence[Any]) -> Term:
    """Number of edges between nodes with equal attributes; one (of any type) for each node."""
    _, codes = np.unique(np.asarray(attribute), return_inverse=True)
    return Term("nodematch", tuple(codes.tolist()))


def nodecov(attribute: Sequence[float]) -> Term:
    """Sum over edges of the sum of the numeric attributes of its ends."""
    return Term("nodecov", tuple(np.asarray(attribute, float).tolist()))


class _SimpleGraph(constraints._SingletonConstraint):
    """Symmetric matrices of 0 and 1 with zeros on the diagonal."""

    is_discrete = True
    event_dim = 2

    def __call__(self, x: Any) -> Any:
        plain = ((x == 0) | (x == 1)) & (x == jnp.swapaxes(x, -1, -2))
        loops = jnp.diagonal(x, axis1=-2, axis2=-1) != 0
        return jnp.all(plain, (-1, -2)) & ~jnp.any(loops, -1)

    def feasible_like(self, prototype: Any) -> Any:
        return jnp.zeros_like(prototype)


_simple_graph = _SimpleGraph()


class ERGM(Intractable):
    """Exponential random graph: p(x) = exp(coef . statistics of x) / Z on undirected graphs.

    Parameters
    ----------
    coef : array
        Shape (k,), one coefficient for each term.
    terms : sequence of str or Term
        `"edges"`, `"triangles"`, and from `ppl_ext.numpyro.ergm`: `kstar(k)`, `gwesp(decay)`,
        `nodematch(attribute)`, `nodecov(attribute)`.
    num_nodes : int
        Values are adjacency matrices of this size: symmetric, 0 and 1, zeros on the diagonal.
    num_toggles : int, optional
        Of the tie-no-tie sampler; 30 for each pair of nodes by default.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Notes
    -----
    Exact draws and `log_prob` for up to 6 nodes, by enumeration of the graphs, and for any number
    with the terms edges, nodematch and nodecov alone, whose edges are independent. Otherwise draws
    come from the tie-no-tie sampler, a Markov chain from a graph with independent edges, and
    `exact` is False. Effort: toggles proposed; 1 for exact draws.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from ppl_ext.numpyro import ERGM
    >>> x = ERGM(jnp.array([-1.0, 0.2]), ["edges", "triangles"], 10)
    >>> graph = x.sample(jax.random.key(0))
    >>> graph.shape, x.exact
    ((10, 10), False)
    >>> bool(x.stats(graph)[0] == graph.sum() / 2)
    True
    """

    arg_constraints: ClassVar = {"coef": constraints.real_vector}
    support = _simple_graph
    pytree_data_fields = ("coef",)
    pytree_aux_fields = ("terms", "num_nodes", "num_toggles")

    def __init__(
        self,
        coef: Any,
        terms: Sequence[str | Term],
        num_nodes: int,
        *,
        num_toggles: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        check_count("ERGM", num_nodes=num_nodes)
        if num_nodes < 2:
            raise argument_error("ERGM", "num_nodes", num_nodes, "2 or more")
        self.coef = jnp.asarray(coef, jnp.result_type(float))
        self.terms = tuple(Term(t) if isinstance(t, str) else t for t in terms)
        for term in self.terms:
            known = isinstance(term, Term) and term.name in (
                *_BY_DYAD,
                "triangles",
                "kstar",
                "gwesp",
            )
            if not known or (not term.constants and term.name not in ("edges", "triangles")):
                raise argument_error(
                    "ERGM",
                    "terms",
                    terms,
                    '"edges", "triangles", kstar(k), gwesp(decay), nodematch(attribute) and '
                    "nodecov(attribute)",
                )
            if term.name in ("nodematch", "nodecov") and len(term.constants) != num_nodes:
                raise ValueError(
                    f"ERGM: the attribute of term {term.name} has {len(term.constants)} values, "
                    f"but there are {num_nodes} nodes."
                )
        if self.coef.shape != (len(self.terms),):
            raise ValueError(
                f"ERGM: `coef` must have the shape ({len(self.terms)},), one for each term; its "
                f"shape is {self.coef.shape}."
            )
        self.num_nodes = int(num_nodes)
        if num_toggles is None:
            num_toggles = 30 * math.comb(self.num_nodes, 2)
        check_count("ERGM", num_toggles=num_toggles)
        self.num_toggles = int(num_toggles)
        super().__init__((), (self.num_nodes,) * 2, validate_args=validate_args)

    @property
    def _independent(self) -> bool:
        return all(term.name in _BY_DYAD for term in self.terms)

    @property
    def _few(self) -> bool:
        return 2 ** math.comb(self.num_nodes, 2) <= _MOST_GRAPHS

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self._independent or self._few

    @property
    def has_normalizer(self) -> bool:  # type: ignore[override]
        return self.exact

    def stats(self, value: Array) -> Array:
        x = jnp.asarray(value, self.coef.dtype)
        return jnp.stack([_statistic(term, x) for term in self.terms], -1)

    def log_f_stats(self, stats: Array) -> Array:
        return stats @ self.coef

    def log_normalizer(self) -> Array:
        if self._independent:
            return jnp.sum(jax.nn.softplus(self._tie_logits()))
        if self._few:
            return jax.nn.logsumexp(self.log_f_stats(self._table()))
        return super().log_normalizer()

    def simulate(self, key: Array, shape: tuple[int, ...] | None = None, length: int = 1) -> Any:
        """Graphs, and their effort: toggles proposed; 1 where draws are exact."""
        num_toggles = 1 if self.exact else length * self.num_toggles

        def one(key: Array) -> Simulation:
            graph = self._draw(key, num_toggles).astype(jnp.int32)
            return Simulation(graph, jnp.asarray(num_toggles, jnp.int32), jnp.zeros((), bool))

        return self._simulate_each(one, key, shape)

    def _draw(self, key: Array, num_toggles: int) -> Array:
        if self._independent:
            ties = jax.random.bernoulli(key, jax.nn.sigmoid(self._tie_logits()))
            return tie_no_tie.adjacency(ties.astype(jnp.int32), self.num_nodes)
        if self._few:
            found = jax.random.categorical(key, self.log_f_stats(self._table()))
            ties = (found >> jnp.arange(math.comb(self.num_nodes, 2))) & 1
            return tie_no_tie.adjacency(ties, self.num_nodes)

        def log_ratio(graph: Array, i: Array, j: Array) -> Array:
            return sum(
                c * _change(term, graph, i, j)
                for c, term in zip(self.coef, self.terms, strict=True)
            )

        return tie_no_tie.draw(key, log_ratio, self._tie_logits(), self.num_nodes, num_toggles)

    def _tie_logits(self) -> Array:
        """Of each dyad, (D,), by the terms under which edges are independent."""
        i, j = tie_no_tie.dyads(self.num_nodes).T
        empty = jnp.zeros((self.num_nodes, self.num_nodes), self.coef.dtype)
        logits = jnp.zeros(len(i), self.coef.dtype)
        for c, term in zip(self.coef, self.terms, strict=True):
            if term.name in _BY_DYAD:
                logits = logits + c * _change(term, empty, i, j)
        return logits

    def _table(self) -> Array:
        return jnp.asarray(_all_statistics(self.terms, self.num_nodes), self.coef.dtype)


def _statistic(term: Term, x: Array) -> Array:
    """Of adjacency matrices (..., n, n)."""
    if term.name == "edges":
        return x.sum((-1, -2)) / 2
    if term.name == "triangles":
        return jnp.sum((x @ x) * x, (-1, -2)) / 6
    if term.name == "kstar":
        return _choose(x.sum(-1), int(term.constants[0])).sum(-1)
    if term.name == "gwesp":
        return jnp.sum(x * _weight_of_partners(term, x @ x), (-1, -2)) / 2
    attribute = jnp.asarray(term.constants, x.dtype)
    if term.name == "nodematch":
        return jnp.sum(x * (attribute[:, None] == attribute), (-1, -2)) / 2
    return jnp.sum(x.sum(-1) * attribute, -1)


def _change(term: Term, x: Array, i: Array, j: Array) -> Array:
    """Change of the statistic of one matrix `x`, without the tie i-j, when it is added."""
    if term.name == "edges":
        return jnp.ones(jnp.shape(i), x.dtype)
    if term.name == "kstar":
        degree = x.sum(-1)
        k = int(term.constants[0]) - 1
        return _choose(degree[i], k) + _choose(degree[j], k)
    if term.name in ("triangles", "gwesp"):
        common = x[i] * x[j]
        if term.name == "triangles":
            return common.sum(-1)
        # the new edge, and those from its ends to their common neighbours, with one partner more
        change = _weight_of_partners(term, common.sum(-1))
        for end in (i, j):
            partners = x @ x[end]
            more = _weight_of_partners(term, partners + 1) - _weight_of_partners(term, partners)
            change = change + jnp.sum(common * more, -1)
        return change
    attribute = jnp.asarray(term.constants, x.dtype)
    if term.name == "nodematch":
        return (attribute[i] == attribute[j]).astype(x.dtype)
    return attribute[i] + attribute[j]


def _weight_of_partners(term: Term, partners: Array) -> Array:
    (decay,) = term.constants
    return math.exp(decay) * (1 - (1 - math.exp(-decay)) ** partners)


def _choose(n: Array, k: int) -> Array:
    """Binomial coefficients of integers n, small k: a product, exact in floating point."""
    value = jnp.ones_like(n)
    for m in range(k):
        value = value * (n - m) / (m + 1)
    return value


@cache
def _all_statistics(terms: tuple[Term, ...], num_nodes: int) -> np.ndarray:
    """(2^D, k): the graph of row r has the ties at the binary digits of r."""
    # in double precision whenever it is first asked for
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        count = math.comb(num_nodes, 2)
        ties = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        graphs = jax.vmap(lambda t: tie_no_tie.adjacency(t, num_nodes))(jnp.asarray(ties, float))
        return np.stack([np.asarray(_statistic(term, graphs)) for term in terms], 1)
