"""Ising and Potts models on any graph."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from ppl_ext.arguments import argument_error, check_choice, check_count
from ppl_ext.kernels import coupling_from_the_past as cftp
from ppl_ext.kernels import transfer_matrix
from ppl_ext.numpyro.intractable import Intractable, Simulation
from ppl_ext.target import Array

Sampler = Literal["auto", "enumeration", "transfer", "cftp", "gibbs"]
SAMPLERS = ("auto", "enumeration", "transfer", "cftp", "gibbs")

# states enumerated for the normalising constant, and for each draw by "auto"
_MOST_STATES, _FEW_STATES = 2**20, 2**12
# states of a column of a lattice
_MOST_COLUMN_STATES = 2**12


class Graph:
    """An undirected graph: nodes 0 ... `num_nodes` - 1 and a list of edges.

    Parameters
    ----------
    num_nodes : int
    edges : iterable of pairs of int
        Each edge once, in any direction.

    Raises
    ------
    ValueError
        For nodes out of range, loops and repeated edges.

    Examples
    --------
    >>> from ppl_ext.numpyro import Graph
    >>> Graph(3, [(0, 1), (1, 2)]).event_shape
    (3,)
    >>> Graph.lattice(4, 5).event_shape, len(Graph.lattice(4, 5).edges)
    ((4, 5), 31)
    """

    def __init__(self, num_nodes: int, edges: Iterable[tuple[int, int]]) -> None:
        check_count("Graph", num_nodes=num_nodes)
        pairs = np.asarray(list(edges)).reshape(-1, 2)
        if pairs.size and not np.issubdtype(pairs.dtype, np.integer):
            raise argument_error("Graph", "edges", edges, "pairs of integers")
        pairs = np.sort(pairs.astype(np.int64), 1)
        if pairs.size and not (pairs.min() >= 0 and pairs.max() < num_nodes):
            raise ValueError(f"Graph: `edges` has nodes outside 0 ... {num_nodes - 1}.")
        if (pairs[:, 0] == pairs[:, 1]).any():
            node = pairs[pairs[:, 0] == pairs[:, 1]][0, 0]
            raise ValueError(f"Graph: `edges` joins node {node} to itself.")
        if len(np.unique(pairs, axis=0)) < len(pairs):
            raise ValueError("Graph: `edges` has an edge twice.")
        self.num_nodes = int(num_nodes)
        self.edges = pairs
        self.event_shape: tuple[int, ...] = (self.num_nodes,)
        # of a lattice with free boundaries
        self.free_lattice = False

    @classmethod
    def lattice(cls, rows: int, columns: int, *, periodic: bool = False) -> Graph:
        """Lattice with edges between nearest neighbours; values have the shape (rows, columns).

        `periodic` joins opposite sides; each then needs at least 3 sites.
        """
        check_count("Graph.lattice", rows=rows, columns=columns)
        if periodic and min(rows, columns) < 3:
            raise argument_error("Graph.lattice", "periodic", True, "False with a side below 3")
        node = np.arange(rows * columns).reshape(rows, columns)
        pairs = [(node[1:], node[:-1]), (node[:, 1:], node[:, :-1])]
        if periodic:
            pairs += [(node[:1], node[-1:]), (node[:, :1], node[:, -1:])]
        found = cls(rows * columns, np.concatenate([np.c_[a.ravel(), b.ravel()] for a, b in pairs]))
        found.event_shape = (int(rows), int(columns))
        found.free_lattice = not periodic
        return found

    @property
    def _content(self) -> tuple[Any, ...]:
        return (self.num_nodes, self.event_shape, self.free_lattice, self.edges.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __repr__(self) -> str:
        return f"Graph({self.num_nodes} nodes, {len(self.edges)} edges)"


@cache
def _neighbours(graph: Graph) -> cftp.Neighbours:
    return cftp.neighbours(graph.num_nodes, graph.edges)


@cache
def _sides(graph: Graph) -> np.ndarray | None:
    """1 and -1 on the two sides of a bipartite graph; `None` for others."""
    around = _neighbours(graph)
    sides = np.zeros(graph.num_nodes, int)
    for start in range(graph.num_nodes):
        if sides[start]:
            continue
        sides[start], waiting = 1, [start]
        while waiting:
            i = waiting.pop()
            for j in around.sites[i][around.real[i]]:
                if not sides[j]:
                    sides[j] = -sides[i]
                    waiting.append(j)
    a, b = graph.edges.T
    return None if (sides[a] == sides[b]).any() else sides


@cache
def _all_states(num_nodes: int, q: int) -> np.ndarray:
    """(q^n, n) states 0 ... q - 1."""
    states = list(itertools.product(range(q), repeat=num_nodes))
    return np.asarray(states, np.int8).reshape(-1, num_nodes)


class _Spin(constraints._SingletonConstraint):
    """-1 and 1."""

    is_discrete = True

    def __call__(self, x: Any) -> Any:
        return (x == 1) | (x == -1)

    def feasible_like(self, prototype: Any) -> Any:
        return jnp.ones_like(prototype)


_spin = _Spin()


class _Spins(Intractable):
    """What Ising and Potts models share: states 0 ... q - 1 inside, and the simulators."""

    pytree_data_fields = ("coupling", "field")
    pytree_aux_fields = ("graph", "sampler", "max_sweeps", "num_sweeps")

    def __init__(
        self,
        coupling: Any,
        field: Any,
        graph: Graph,
        *,
        sampler: Sampler,
        max_sweeps: int,
        num_sweeps: int,
        validate_args: bool | None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(graph, Graph):
            raise TypeError(f"{name}: `graph` must be a Graph, got {type(graph).__name__}.")
        check_choice(name, "sampler", sampler, SAMPLERS)
        check_count(name, max_sweeps=max_sweeps, num_sweeps=num_sweeps)
        dtype = jnp.result_type(float)
        self.coupling, self.field = jnp.asarray(coupling, dtype), jnp.asarray(field, dtype)
        if self.coupling.shape not in ((), (len(graph.edges),)):
            raise ValueError(
                f"{name}: `coupling` must be a number or of shape ({len(graph.edges)},), one for "
                f"each edge; its shape is {self.coupling.shape}."
            )
        self.graph, self.max_sweeps, self.num_sweeps = graph, int(max_sweeps), int(num_sweeps)
        self.sampler = sampler
        self.sampler = self._choose(sampler)
        super().__init__((), graph.event_shape, validate_args=validate_args)

    # --- of the two models ----------------------------------------------------------------------

    @property
    @abstractmethod
    def _q(self) -> int:
        """Number of states of a node."""

    @abstractmethod
    def _pair(self) -> np.ndarray:
        """(q, q) term of two neighbours, which the coupling multiplies."""

    @abstractmethod
    def _site_field(self) -> Array:
        """(n, q) term of each site in each state."""

    @abstractmethod
    def _values(self, states: Array) -> Array:
        """States 0 ... q - 1 as the model has them."""

    @abstractmethod
    def _from_the_past(self, key: Array) -> cftp.Coalesced:
        """Exact draw of states, (n,)."""

    # --- normalising constant -------------------------------------------------------------------

    def _choose(self, sampler: str) -> Sampler:
        name, states = type(self).__name__, self._q**self.graph.num_nodes
        if sampler == "enumeration" and states > _MOST_STATES:
            raise argument_error(
                name, "sampler", sampler, f"another one with more than {_MOST_STATES} states"
            )
        if sampler == "transfer" and not self._has_transfer_matrix:
            raise argument_error(
                name,
                "sampler",
                sampler,
                f"another one but on a free lattice with a side of at most {_MOST_COLUMN_STATES} "
                "states",
            )
        if sampler != "auto":
            return sampler  # type: ignore[return-value]
        if states <= _FEW_STATES:
            return "enumeration"
        return "transfer" if self._has_transfer_matrix else "cftp"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.sampler != "gibbs"

    @property
    def has_normalizer(self) -> bool:  # type: ignore[override]
        return self._has_transfer_matrix or self._q**self.graph.num_nodes <= _MOST_STATES

    @property
    def _has_transfer_matrix(self) -> bool:
        shorter = min(self.graph.event_shape)
        return self.graph.free_lattice and self._q**shorter <= _MOST_COLUMN_STATES

    def log_normalizer(self) -> Array:
        if self._has_transfer_matrix:
            return transfer_matrix.log_normalizer(self._lattice())
        if self.has_normalizer:
            return jax.nn.logsumexp(self._log_f_of_all())
        return super().log_normalizer()

    def _log_f_of_all(self) -> Array:
        states = self._values(jnp.asarray(_all_states(self.graph.num_nodes, self._q)))
        return self.log_f(states.reshape(-1, *self.event_shape))

    def _edge_couplings(self) -> Array:
        return jnp.broadcast_to(self.coupling, (len(self.graph.edges),))

    def _lattice(self) -> transfer_matrix.Lattice:
        """With the shorter side as a column."""
        rows, columns = self.graph.event_shape
        coupling, field = self._edge_couplings(), self._site_field().reshape(rows, columns, -1)
        split = (rows - 1) * columns
        down = coupling[:split].reshape(rows - 1, columns)
        across = coupling[split:].reshape(rows, columns - 1)
        if rows <= columns:
            down, across, field = down.T, across.T, jnp.swapaxes(field, 0, 1)
        else:
            down, across = across, down
        pair = jnp.asarray(self._pair(), field.dtype)
        return transfer_matrix.Lattice(down, across, field, pair)

    # --- simulation -----------------------------------------------------------------------------

    def simulate(self, key: Array, shape: tuple[int, ...] | None = None, length: int = 1) -> Any:
        """Values, and their effort: sweeps over all sites or bonds; 1 where there are none."""
        draw: Callable[[Array], tuple[Array, Array, Array]] = {
            "enumeration": self._by_enumeration,
            "transfer": self._by_transfer_matrix,
            "cftp": self._from_the_past,
            "gibbs": lambda key: self._by_gibbs(key, length),
        }[self.sampler]

        def one(key: Array) -> Simulation:
            states, effort, overflow = draw(key)
            value = self._values(states).reshape(self.event_shape)
            return Simulation(value, effort, overflow)

        return self._simulate_each(one, key, shape)

    def _by_enumeration(self, key: Array) -> tuple[Array, Array, Array]:
        # probabilities, not their cumulative sum: there is no rounding to be afraid of
        state = jax.random.categorical(key, self._log_f_of_all())
        digits = self._q ** np.arange(self.graph.num_nodes - 1, -1, -1)
        return (state // digits) % self._q, jnp.ones((), jnp.int32), jnp.zeros((), bool)

    def _by_transfer_matrix(self, key: Array) -> tuple[Array, Array, Array]:
        states = transfer_matrix.draw(key, self._lattice())
        rows, columns = self.graph.event_shape
        states = states.T if rows <= columns else states
        return states.ravel(), jnp.ones((), jnp.int32), jnp.zeros((), bool)

    def _by_gibbs(self, key: Array, length: int) -> tuple[Array, Array, Array]:
        """Sweeps of the heat bath from independent states; not exact."""
        around, field = _neighbours(self.graph), self._site_field()
        weights = jnp.where(around.real, self._edge_couplings()[around.edges], 0)
        pair = jnp.asarray(self._pair(), field.dtype)
        key_start, key_sweeps = jax.random.split(key)
        count = length * self.num_sweeps

        def sweep(t: Array, x: Array) -> Array:
            noise = jax.random.gumbel(jax.random.fold_in(key_sweeps, t), field.shape, field.dtype)
            for sites in around.classes:
                terms = weights[sites][..., None] * pair[x[around.sites[sites]]]
                x = x.at[sites].set(jnp.argmax(field[sites] + terms.sum(1) + noise[sites], -1))
            return x

        start = jax.random.categorical(key_start, field)
        x = jax.lax.fori_loop(0, count, sweep, start)
        return x, jnp.asarray(count, jnp.int32), jnp.zeros((), bool)

    def _flat(self, value: Array) -> Array:
        value = jnp.asarray(value)
        return value.reshape(*value.shape[: value.ndim - self.event_dim], self.graph.num_nodes)

    def _edge_stats(self, terms: Array) -> Array:
        """(..., m) terms of the edges -> (..., 1 or m)."""
        return terms.sum(-1, keepdims=True) if self.coupling.ndim == 0 else terms


class Ising(_Spins):
    """Ising (autologistic) model: spins -1 and 1 on the nodes of a graph.

    p(x) = exp(sum over edges of coupling x_i x_j + sum over nodes of field x_i) / Z

    Parameters
    ----------
    coupling : float or array
        A number, or one for each edge.
    field : float or array
        A number, or one for each node: flat, or of the shape of a lattice.
    graph : Graph
        `Graph.lattice(rows, columns)`, whose values have that shape, or `Graph(num_nodes, edges)`.
    sampler : {"auto", "enumeration", "transfer", "cftp", "gibbs"}
        `"enumeration"` of at most 2^20 states; `"transfer"`, the transfer matrix, on free lattices
        with a side of at most 12; `"cftp"`, coupling from the past, for couplings >= 0, on
        bipartite graphs also <= 0. These are exact. `"gibbs"`: `num_sweeps` sweeps of the heat
        bath, for any couplings; not exact. `"auto"`: the first of enumeration (up to 2^12 states),
        transfer matrix and coupling from the past that applies.
    max_sweeps : int
        Longest past of `"cftp"`; draws that need more, and couplings of the wrong sign, count as
        overflow.
    num_sweeps : int
        Of `"gibbs"`.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Notes
    -----
    `log_prob` is there for up to 2^20 states and where the transfer matrix is. Statistics: sum of
    x_i x_j over the edges and sum of x_i over the nodes (or the terms where there is one parameter
    for each).

    Examples
    --------
    >>> import jax
    >>> from ppl_ext.numpyro import Graph, Ising
    >>> Ising(0.3, 0.0, Graph.lattice(4, 4)).sample(jax.random.key(0)).shape
    (4, 4)
    >>> round(float(Ising(0.0, 0.0, Graph(3, [(0, 1), (1, 2)])).log_normalizer()), 3)  # log 8
    2.079
    """

    arg_constraints: ClassVar = {"coupling": constraints.real, "field": constraints.real}

    def __init__(
        self,
        coupling: Any,
        field: Any,
        graph: Graph,
        *,
        sampler: Sampler = "auto",
        max_sweeps: int = 16_384,
        num_sweeps: int = 1000,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(
            coupling,
            field,
            graph,
            sampler=sampler,
            max_sweeps=max_sweeps,
            num_sweeps=num_sweeps,
            validate_args=validate_args,
        )
        if self.field.shape not in ((), (graph.num_nodes,), graph.event_shape):
            raise ValueError(
                f"Ising: `field` must be a number or one for each of {graph.num_nodes} nodes, as "
                f"{graph.event_shape}; its shape is {self.field.shape}."
            )

    @constraints.dependent_property(is_discrete=True)
    def support(self) -> Any:
        return constraints.independent(_spin, self.event_dim)

    @property
    def _q(self) -> int:
        return 2

    def _pair(self) -> np.ndarray:
        return np.array([[1, -1], [-1, 1]])

    def _node_field(self) -> Array:
        return jnp.broadcast_to(self.field.ravel(), (self.graph.num_nodes,))

    def _site_field(self) -> Array:
        field = self._node_field()
        return jnp.stack([-field, field], 1)

    def _values(self, states: Array) -> Array:
        return 2 * states.astype(jnp.int32) - 1

    def stats(self, value: Array) -> Array:
        x = self._flat(value).astype(self.coupling.dtype)
        a, b = self.graph.edges.T
        field = x.sum(-1, keepdims=True) if self.field.ndim == 0 else x
        return jnp.concatenate([self._edge_stats(x[..., a] * x[..., b]), field], -1)

    def log_f_stats(self, stats: Array) -> Array:
        return stats @ jnp.concatenate([self.coupling.reshape(-1), self.field.reshape(-1)])

    def _from_the_past(self, key: Array) -> cftp.Coalesced:
        coupling, field = self._edge_couplings(), self._node_field()
        sides = _sides(self.graph)
        wrong = jnp.any(coupling < 0)
        flip = jnp.ones((), field.dtype)
        if sides is not None:
            # with the spins of one side turned over, an antiferromagnet is a ferromagnet
            opposed = jnp.all(coupling <= 0) & wrong
            wrong = wrong & ~opposed
            flip = jnp.where(opposed, jnp.asarray(sides, field.dtype), flip)
            coupling = jnp.where(opposed, -coupling, coupling)
        # where order is lost the loop would turn for nothing
        coupling = jnp.where(wrong, 0, coupling)
        found = cftp.draw_ising(
            key, _neighbours(self.graph), coupling, flip * field, self.max_sweeps
        )
        spins = found.state * flip.astype(found.state.dtype)
        return cftp.Coalesced((spins + 1) // 2, found.sweeps, found.overflow | wrong)


class Potts(_Spins):
    """Potts model: states 0 ... q - 1 on the nodes of a graph.

    p(x) = exp(coupling (number of edges with x_i = x_j) + sum over nodes of field[x_i]) / Z

    Parameters
    ----------
    coupling : float or array
        A number, or one for each edge.
    field : array
        One number for each state, shape (q,); zeros for none.
    graph : Graph
    sampler : {"auto", "enumeration", "transfer", "cftp", "gibbs"}
        As for `Ising`. `"cftp"` is that of the random-cluster model, for couplings >= 0 and any
        field: it stays fast below the critical temperature, but a sweep costs more; with q = 2 it
        serves Ising models too. `"transfer"`: q to the power of the shorter side at most 4096.
    max_sweeps, num_sweeps : int
        As for `Ising`.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Notes
    -----
    Statistics: number of edges between equal states (or one for each edge), and the number of nodes
    in each state.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from ppl_ext.numpyro import Graph, Potts
    >>> x = Potts(0.5, jnp.zeros(3), Graph.lattice(10, 10))
    >>> x.sampler, x.sample(jax.random.key(0)).shape
    ('cftp', (10, 10))
    """

    arg_constraints: ClassVar = {"coupling": constraints.real, "field": constraints.real_vector}

    def __init__(
        self,
        coupling: Any,
        field: Any,
        graph: Graph,
        *,
        sampler: Sampler = "auto",
        max_sweeps: int = 4096,
        num_sweeps: int = 1000,
        validate_args: bool | None = None,
    ) -> None:
        if jnp.ndim(field) != 1 or jnp.shape(field)[0] < 2:
            raise ValueError(
                "Potts: `field` must have one number for each of two or more states, shape (q,); "
                f"its shape is {jnp.shape(field)}."
            )
        self.field = jnp.asarray(field)
        super().__init__(
            coupling,
            field,
            graph,
            sampler=sampler,
            max_sweeps=max_sweeps,
            num_sweeps=num_sweeps,
            validate_args=validate_args,
        )

    @constraints.dependent_property(is_discrete=True)
    def support(self) -> Any:
        return constraints.independent(constraints.integer_interval(0, self._q - 1), self.event_dim)

    @property
    def _q(self) -> int:
        return self.field.shape[-1]

    def _pair(self) -> np.ndarray:
        return np.eye(self._q)

    def _site_field(self) -> Array:
        return jnp.broadcast_to(self.field, (self.graph.num_nodes, self._q))

    def _values(self, states: Array) -> Array:
        return states.astype(jnp.int32)

    def stats(self, value: Array) -> Array:
        x = self._flat(value)
        a, b = self.graph.edges.T
        same = (x[..., a] == x[..., b]).astype(self.coupling.dtype)
        count = jnp.sum(x[..., None] == jnp.arange(self._q), -2).astype(same.dtype)
        return jnp.concatenate([self._edge_stats(same), count], -1)

    def log_f_stats(self, stats: Array) -> Array:
        return stats @ jnp.concatenate([self.coupling.reshape(-1), self.field])

    def _from_the_past(self, key: Array) -> cftp.Coalesced:
        coupling = self._edge_couplings()
        wrong = jnp.any(coupling < 0)
        coupling = jnp.where(wrong, 0, coupling)
        found = cftp.draw_potts(
            key,
            _neighbours(self.graph),
            self.graph.edges,
            coupling,
            self.field,
            self.max_sweeps,
        )
        return found._replace(overflow=found.overflow | wrong)
