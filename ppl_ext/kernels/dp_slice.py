"""Slice samplers for Dirichlet-process and Pitman-Yor mixtures: exact, without a truncation level.

    y_i | c_i ~ f(. | theta_{c_i}),   P(c_i = k) = w_k,   theta_k ~ G0,
    w_k = v_k prod_{l<k} (1 - v_l),   v_k ~ Beta(1 - d, alpha + k d)

with concentration alpha and discount d (0: Dirichlet process). A slice u_i ~ U(0, w_{c_i}) for each
point leaves finitely many components that any point can join: those with w_k > min u. One sweep of
`posterior`, which works on the partition (labels carry no information, and are 0 ... H - 1):

    1. split-merge moves, with the atoms integrated out where they have a closed form
    2. concentration given the number of clusters H: eta ~ Beta(alpha, n),
       alpha ~ Gamma(a + H, b - log eta)
    3. atoms of the clusters given their points; those of empty slots from G0
    4. (w_1, ..., w_H, leftover) ~ Dirichlet(n_1 - d, ..., n_H - d, alpha + H d)
    5. u_i ~ U(0, w_{c_i}), then sticks of the leftover until what is left is below min u
    6. P(c_i = k) proportional to 1(w_k > u_i) f(y_i | theta_k), all points at once

`kgw` keeps the labels as indices of the sticks: v_k ~ Beta(1 - d + n_k, alpha + k d + n_{>k}), then
3, 5 and 6; `kgw_independent` draws u_i ~ U(0, xi_{c_i}) with xi_k geometric, and has the weights
w_k / xi_k in step 6, so that the number of components does not depend on the weights (Pitman-Yor).

Shapes are fixed: there are `capacity` slots. Noise of a slot has the slot's key, and sums over
slots run in blocks of `BLOCK`, so that a larger capacity gives the same chain. Step 6 runs over as
many blocks as are in use: spare slots cost memory and not time. When the sticks do not fit, the
sweep would be wrong: `overflow` is set for good, floats are NaN and labels -1 from then on.

Law of the overhead, the components beyond the clusters, given L = log(leftover / min u), for d = 0:

    overhead = 0 if L <= 0, else 1 + Poisson(alpha L)

Sources: Ge, Chen, Wan & Ghahramani 2015 (`posterior`); Kalli, Griffin & Walker 2011, sections 3 and
4 (`kgw`); Franzolini & Gaffi 2026, arXiv 2602.00878 (overhead O(log n)); Jain & Neal 2004 and 2007
and, for the launch state that makes split-merge parallel, the derivation at `_split_merges`;
Papaspiliopoulos & Roberts 2008 (moves of the labels).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.flatten_util import ravel_pytree
from jax.scipy.special import gammaln

from ppl_ext.kernels.conjugate import Product, log_gamma
from ppl_ext.target import Array, PyTree

Method = Literal["posterior", "kgw", "kgw_independent"]
METHODS = ("posterior", "kgw", "kgw_independent")

# slots that are worked on together
BLOCK = 16

# restricted scans of a split-merge launch
LAUNCH_SCANS = 2

# Langevin steps of each atom in a sweep, and the acceptance at which their size settles
ATOM_STEPS, ATOM_ACCEPTANCE = 3, 0.6

# least curvature of an atom's posterior that steps are scaled by, in units of the base's scale
LEAST_CURVATURE = 0.3

# Newton steps of the Laplace approximations in a split-merge move without closed form, the longest
# of them in units of the base's scale, and the degrees of freedom of proposals
NEWTON_STEPS, NEWTON_LENGTH, PROPOSAL_DF = 3, 3.0, 5.0

# clusters at the start, at most
START_CLUSTERS = 10

# swaps of neighbouring sticks that a sweep of `kgw` tries, among the first BLOCK
SWAPS = 8


@dataclass(frozen=True)
class Gradient:
    """Atoms without a closed form, moved by Metropolis-adjusted Langevin steps.

    Atoms are PyTrees of unconstrained numbers.

    Parameters
    ----------
    draw : callable
        `draw(key)`: one atom from G0.
    log_base : callable
        `log_base(atom)`: its log density, Jacobian included.
    log_likelihood : callable
        `log_likelihood(atoms)` of an atom for each point (leaves (n, ...)): shape (n,).
    center, scale : PyTree
        Means and standard deviations of the atom's numbers under G0, about.
    """

    draw: Callable[[Array], PyTree]
    log_base: Callable[[PyTree], Array]
    log_likelihood: Callable[[PyTree], Array]
    center: PyTree
    scale: PyTree


@dataclass(frozen=True)
class Mixture:
    """All that the sampler knows of a model, bound to its data and its other sites.

    Parameters
    ----------
    num_points : int
        n.
    atoms : Product or Gradient
        How atoms are drawn, and the likelihood.
    concentration : Array, optional
        alpha, where it is known or moved by someone else.
    prior : tuple of Array, optional
        Shape and rate of alpha's Gamma prior, where this sampler moves it. With d = 0 only.
    discount : Array, optional
        d; `None` is a Dirichlet process.
    """

    num_points: int
    atoms: Product | Gradient
    concentration: Array | None = None
    prior: tuple[Array, Array] | None = None
    discount: Array | None = None


@dataclass(frozen=True)
class Settings:
    """What is fixed for a run: slots, points per chunk, split-merge moves every few sweeps."""

    method: Method = "posterior"
    capacity: int = 64
    chunk: int = 16384
    split_merge: int = 5
    every: int = 1


class State(NamedTuple):
    labels: Array  # (n,) int32, the slot of each point; -1 after an overflow
    atoms: PyTree  # (capacity, ...), those of unused slots are draws of G0
    log_weights: Array  # (capacity,) of all slots, by further sticks where they are unused
    log_leftover: Array  # () log mass beyond the last slot
    concentration: Array  # ()
    num_clusters: Array  # () int32, H of this sweep: before step 6
    num_instantiated: Array  # () int32, components that min u asks for
    overhead: Array  # () int32, their number beyond H
    overhead_predicted: Array  # () its mean given leftover and min u; NaN unless d = 0
    overflow: Array  # () bool, sticky
    num_clusters_now: Array  # () int32, clusters of `labels`
    num_accepted: Array  # () int32, split-merge moves accepted in this sweep
    accept_prob: Array  # () of the atoms' moves; 1 in closed form
    log_step_size: Array  # () of the atoms' moves, in units of their curvature
    i: Array  # () int32, sweeps
    rng_key: Array


def init(key: Array, mixture: Mixture, settings: Settings) -> State:
    """Clusters around points that those found before explain badly, in the manner of k-means++."""
    key, key_start, key_atoms = random.split(key, 3)
    n, capacity = mixture.num_points, settings.capacity
    if isinstance(mixture.atoms, Product):
        labels = _start_of_product(key_start, mixture.atoms, settings)
    else:
        labels = _start_of_gradient(key_start, mixture.atoms, n)
    counts = count(labels, settings.capacity)
    # large clusters first: a likely order of the sticks
    labels = _inverse(jnp.argsort(-counts))[labels].astype(jnp.int32)
    counts = jnp.sort(counts, descending=True)
    if isinstance(mixture.atoms, Product):
        atoms = _draw_product(key_atoms, labels, mixture.atoms, settings)
    else:
        atoms = jax.vmap(mixture.atoms.draw)(_slot_keys(key_atoms, capacity))
    dtype = jax.tree.leaves(atoms)[0].dtype
    if mixture.prior is None:
        assert mixture.concentration is not None
        alpha = jnp.asarray(mixture.concentration, dtype)
    else:
        alpha = (mixture.prior[0] / mixture.prior[1]).astype(dtype)
    zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    clusters = jnp.sum(counts > 0).astype(jnp.int32)
    return State(
        labels=labels,
        atoms=atoms,
        log_weights=jnp.log(jnp.maximum(counts, 1e-30) / n).astype(dtype),
        log_leftover=zero - jnp.inf,
        concentration=alpha,
        num_clusters=clusters,
        num_instantiated=clusters,
        overhead=none,
        overhead_predicted=zero,
        overflow=jnp.array(False),
        num_clusters_now=clusters,
        num_accepted=none,
        accept_prob=zero + 1,
        log_step_size=zero,
        i=none,
        rng_key=key,
    )


def step(state: State, mixture: Mixture, settings: Settings, num_warmup: int = 0) -> State:
    """One sweep."""
    keys = random.split(state.rng_key, 9)
    key, key_moves, key_alpha, key_atoms, key_weights, key_sticks, key_slice, key_pick, key_swap = (
        keys
    )
    labels, atoms = state.labels, state.atoms
    alpha, dtype = state.concentration, state.concentration.dtype
    no_slot = jnp.array(False)
    accepted = jnp.zeros((), jnp.int32)
    if mixture.prior is None:
        assert mixture.concentration is not None
        alpha = jnp.asarray(mixture.concentration, dtype)
    discount = mixture.discount
    counts = count(labels, settings.capacity)
    if settings.method == "posterior":
        if settings.split_merge and mixture.num_points > 1:
            labels, counts, atoms, accepted, no_slot = _split_merges(
                key_moves, state.i, labels, counts, atoms, alpha, mixture, settings
            )
        clusters = jnp.sum(counts > 0).astype(jnp.int32)
        if mixture.prior is not None:
            alpha = _concentration_of_partition(
                key_alpha, alpha, clusters, mixture.num_points, *mixture.prior
            )
    else:
        clusters = jnp.sum(counts > 0).astype(jnp.int32)
        if mixture.prior is not None:
            alpha = _concentration_of_sticks(key_alpha, state, counts, *mixture.prior)

    if isinstance(mixture.atoms, Product):
        atoms = _draw_product(key_atoms, labels, mixture.atoms, settings)
        accept_prob, log_step_size = state.accept_prob, state.log_step_size
    else:
        atoms, accept_prob = _move_gradient(
            key_atoms, atoms, state.log_step_size, labels, counts, mixture.atoms
        )
        rate = (state.i + 1.0).astype(dtype) ** -0.6
        adapted = state.log_step_size + rate * (accept_prob - ATOM_ACCEPTANCE)
        log_step_size = jnp.where(state.i < num_warmup, adapted, state.log_step_size)

    if settings.method == "posterior":
        log_weights, before, leftover, end = _weights_of_partition(
            key_weights, key_sticks, counts, clusters, alpha, discount
        )
    else:
        log_weights, before, end = _weights_of_sticks(key_weights, counts, alpha, discount)
        labels, counts, log_weights, before, atoms = _swap_sticks(
            key_swap, labels, counts, log_weights, before, end, atoms
        )
        leftover = None

    independent = settings.method == "kgw_independent"
    if independent:
        log_ratio = jnp.log(slice_ratio(alpha, discount)).astype(dtype)
        log_slice_width = jnp.arange(settings.capacity) * log_ratio
    else:
        log_slice_width = log_weights
    log_u = log_slice_width[labels] - exponential(key_slice, labels.shape, dtype)
    log_min = jnp.min(log_u)
    if independent:
        instantiated = jnp.sum(log_slice_width >= log_min).astype(jnp.int32)
        overflow = log_slice_width[-1] + log_ratio >= log_min
        bias = log_weights - log_slice_width
    else:
        instantiated = jnp.sum(before > log_min).astype(jnp.int32)
        overflow = end > log_min
        bias = jnp.zeros_like(log_weights)
    labels = _assign(
        key_pick, labels, log_u, atoms, log_slice_width, bias, instantiated, mixture, settings
    )
    # the components that the leftover is broken into; in prior order some lie below a cluster
    predicted = jnp.array(jnp.nan, dtype)
    if leftover is not None and discount is None:
        room = leftover - log_min
        predicted = jnp.where(room > 0, 1 + alpha * room, 0.0).astype(dtype)

    overflow = state.overflow | overflow | no_slot
    counts = count(labels, settings.capacity)
    if settings.method == "posterior":
        order = jnp.argsort(counts == 0, stable=True)
        labels = _inverse(order)[labels].astype(jnp.int32)
        atoms = jax.tree.map(lambda leaf: leaf[order], atoms)
        log_weights = log_weights[order]
    lost = lambda x: jnp.where(overflow, jnp.array(jnp.nan, x.dtype), x)  # noqa: E731
    return State(
        labels=jnp.where(overflow, -1, labels),
        atoms=jax.tree.map(lost, atoms),
        log_weights=lost(log_weights),
        log_leftover=lost(end),
        concentration=lost(alpha),
        num_clusters=jnp.where(overflow, -1, clusters),
        num_instantiated=jnp.where(overflow, -1, instantiated),
        overhead=jnp.where(overflow, -1, jnp.maximum(instantiated - clusters, 0)),
        overhead_predicted=lost(predicted),
        overflow=overflow,
        num_clusters_now=jnp.where(overflow, -1, jnp.sum(counts > 0).astype(jnp.int32)),
        num_accepted=accepted,
        accept_prob=lost(accept_prob),
        log_step_size=lost(log_step_size),
        i=state.i + 1,
        rng_key=key,
    )


# --- concentration ---------------------------------------------------------------------------


def log_partition(counts: Array, alpha: Array, discount: Array | None = None) -> Array:
    """Log probability of a partition with these cluster sizes (zeros are ignored).

    Pitman 2006, equation 3.6: prod_{j=1}^{H-1} (alpha + j d) / (alpha + 1)_{n-1}
    prod_h (1 - d)_{n_h - 1}.
    """
    n, occupied = jnp.sum(counts), counts > 0
    clusters = jnp.sum(occupied)
    counts = jnp.where(occupied, counts, 1).astype(alpha.dtype)
    n = n.astype(alpha.dtype)
    rising = gammaln(alpha + n) - gammaln(alpha + 1)
    if discount is None:
        return (
            (clusters - 1) * jnp.log(alpha)
            - rising
            + jnp.sum(jnp.where(occupied, gammaln(counts), 0.0))
        )
    j = jnp.arange(counts.shape[0])
    new = jnp.where((j >= 1) & (j < clusters), alpha + j * discount, 1.0)
    sizes = gammaln(counts - discount) - gammaln(1 - discount)
    return jnp.sum(jnp.log(new)) - rising + jnp.sum(jnp.where(occupied, sizes, 0.0))


def log_sticks(
    log_weights: Array, log_leftover: Array, counts: Array, alpha: Array, discount: Array | None
) -> Array:
    """Log density of the sticks up to the last occupied one, the others integrated out."""
    log_v, log_rest = _sticks_of_weights(log_weights, log_leftover)
    k = jnp.arange(1, counts.shape[0] + 1)
    last = jnp.max(jnp.where(counts > 0, k, 0))
    if discount is None:
        terms = jnp.log(alpha) + (alpha - 1) * log_rest
    else:
        a, b = 1 - discount, alpha + k * discount
        beta = gammaln(a) + gammaln(b) - gammaln(a + b)
        terms = (a - 1) * log_v + (b - 1) * log_rest - beta
    return jnp.sum(jnp.where(k <= last, terms, 0.0))


def _concentration_of_partition(
    key: Array, alpha: Array, clusters: Array, n: int, shape: Array, rate: Array
) -> Array:
    """Step 2. In logs: eta underflows when alpha is small, and alpha would become zero."""
    dtype = alpha.dtype
    parameters = jnp.stack([alpha, jnp.array(n, dtype), (shape + clusters).astype(dtype)])
    log_a, log_n, log_new = log_gamma(key, parameters)
    log_eta = log_a - jnp.logaddexp(log_a, log_n)
    return (jnp.exp(log_new) / (rate - log_eta)).astype(dtype)


def _concentration_of_sticks(
    key: Array, state: State, counts: Array, shape: Array, rate: Array
) -> Array:
    """alpha ~ Gamma(a + C, b - sum_{k <= C} log(1 - v_k)), C the last occupied stick."""
    _, log_rest = _sticks_of_weights(state.log_weights, state.log_leftover)
    k = jnp.arange(1, counts.shape[0] + 1)
    last = jnp.max(jnp.where(counts > 0, k, 0))
    # the first sweep has no sticks of an earlier one
    total = _sum(jnp.where((k <= last) & jnp.isfinite(log_rest), log_rest, 0.0))
    dtype = state.concentration.dtype
    draw = jnp.exp(log_gamma(key, (shape + last).astype(dtype))) / (rate - total)
    return jnp.where(state.i == 0, state.concentration, draw).astype(dtype)


def _sticks_of_weights(log_weights: Array, log_leftover: Array) -> tuple[Array, Array]:
    """log v_k and log(1 - v_k), both (capacity,), of weights in the order of the sticks."""
    with_end = jnp.concatenate([log_weights, log_leftover[None]])
    from_here = lax.cumlogsumexp(with_end, reverse=True)
    return log_weights - from_here[:-1], from_here[1:] - from_here[:-1]


# --- weights ---------------------------------------------------------------------------------


def _weights_of_partition(
    key_weights: Array,
    key_sticks: Array,
    counts: Array,
    clusters: Array,
    alpha: Array,
    discount: Array | None,
) -> tuple[Array, Array, Array, Array]:
    """Steps 4 and 5: log weights, log mass before each slot, leftover of step 4, and at the end.

    "Before" is infinite for the clusters, which always count as instantiated.
    """
    capacity, dtype = counts.shape[0], alpha.dtype
    d = jnp.zeros((), dtype) if discount is None else discount
    occupied = counts > 0
    sizes = jnp.where(occupied, counts.astype(dtype) - d, 1.0)
    # one more key for the rest, which more slots do not move
    keys = _slot_keys(key_weights, capacity + 1, first=-1)
    log_mass = jax.vmap(log_gamma)(keys, jnp.append(alpha + clusters * d, sizes))
    rest, log_mass = log_mass[0], jnp.where(occupied, log_mass[1:], -jnp.inf)
    largest = jnp.maximum(jnp.max(log_mass), rest)
    total = largest + jnp.log(_sum(jnp.exp(log_mass - largest)) + jnp.exp(rest - largest))
    leftover = rest - total
    j = jnp.arange(capacity) - clusters + 1
    log_v, log_rest = _sticks(key_sticks, jnp.maximum(j, 1), alpha + clusters * d, discount, dtype)
    log_rest = jnp.where(occupied, 0.0, log_rest)
    mass = leftover + _cumsum(log_rest)
    before = jnp.concatenate([leftover[None], mass[:-1]])
    log_weights = jnp.where(occupied, log_mass - total, before + log_v)
    return log_weights, jnp.where(occupied, jnp.inf, before), leftover, mass[-1]


def _sticks(
    key: Array, j: Array, alpha: Array, discount: Array | None, dtype: Any
) -> tuple[Array, Array]:
    """log v and log(1 - v) of v ~ Beta(1 - d, alpha + j d), one for each slot."""
    keys = _slot_keys(key, j.shape[0])
    if discount is None:
        log_rest = -jax.vmap(lambda k: exponential(k, (), dtype))(keys) / alpha
        return jnp.log(-jnp.expm1(log_rest)), log_rest
    return _log_beta(keys, jnp.broadcast_to(1 - discount, j.shape), alpha + j * discount, dtype)


def _weights_of_sticks(
    key: Array, counts: Array, alpha: Array, discount: Array | None
) -> tuple[Array, Array, Array]:
    """v_k ~ Beta(1 - d + n_k, alpha + k d + n_{>k}): log weights, mass before, mass at the end."""
    dtype = alpha.dtype
    d = jnp.zeros((), dtype) if discount is None else discount
    k = jnp.arange(1, counts.shape[0] + 1)
    later = (jnp.sum(counts) - jnp.cumsum(counts)).astype(dtype)
    a, b = 1 - d + counts.astype(dtype), alpha + k * d + later
    log_v, log_rest = _log_beta(_slot_keys(key, counts.shape[0]), a, b, dtype)
    mass = _cumsum(log_rest)
    before = jnp.concatenate([jnp.zeros(1, dtype), mass[:-1]])
    return before + log_v, before, mass[-1]


def _swap_sticks(
    key: Array,
    labels: Array,
    counts: Array,
    log_weights: Array,
    before: Array,
    end: Array,
    atoms: PyTree,
) -> tuple[Array, Array, Array, Array, PyTree]:
    """Swap neighbouring components, weights and atoms with them: the likelihood stays.

    With P the mass before k, accept with (P - w_k) / (P - w_{k+1}): by the law of the size-biased
    order. Papaspiliopoulos & Roberts 2008, section 3.4, swap the labels alone.
    """
    capacity = counts.shape[0]
    if capacity < BLOCK:
        return labels, counts, log_weights, before, atoms

    def one(t: int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        order, weights, prior = carry
        key_k, key_u = random.split(random.fold_in(key, t))
        k = random.randint(key_k, (), 0, BLOCK - 1)
        here, there, mass = weights[k], weights[k + 1], prior[k]
        # log(P - w) = log P + log(1 - w / P)
        log_ratio = jnp.log1p(-jnp.exp(here - mass)) - jnp.log1p(-jnp.exp(there - mass))
        accept = jnp.log(random.uniform(key_u, dtype=mass.dtype)) < log_ratio
        swap = lambda x: x.at[k].set(x[k + 1]).at[k + 1].set(x[k])  # noqa: E731
        weights = jnp.where(accept, swap(weights), weights)
        order = jnp.where(accept, swap(order), order)
        between = mass + jnp.log1p(-jnp.exp(there - mass))
        prior = jnp.where(accept, prior.at[k + 1].set(between), prior)
        return order, weights, prior

    order, log_weights, before = lax.fori_loop(
        0, SWAPS, one, (jnp.arange(capacity), log_weights, before)
    )
    atoms = jax.tree.map(lambda leaf: leaf[order], atoms)
    return (
        _inverse(order)[labels].astype(jnp.int32),
        counts[order],
        log_weights,
        before,
        atoms,
    )


def slice_ratio(alpha: Any, discount: Any) -> Any:
    """xi_{k+1} / xi_k of `kgw_independent`.

    Any ratio is exact, also one that follows alpha, since the slices are drawn after it. The mean
    weights fall by (alpha + d) / (1 + alpha) at first; were xi to fall as fast or faster, points
    could hardly come to late sticks or leave them.
    """
    d = 0.0 if discount is None else discount
    return (1 + alpha + d) / (2 + alpha)


# --- atoms -----------------------------------------------------------------------------------


def _draw_product(key: Array, labels: Array, atoms: Product, settings: Settings) -> PyTree:
    """Atoms of all slots from their posteriors, those of empty slots from the prior."""

    def add(start: Array, fresh: Array, total: Array) -> Array:
        rows = jnp.where(fresh[:, None], atoms.statistics(start, fresh.size), 0.0)
        here = lax.dynamic_slice_in_dim(labels, start, fresh.size)
        return total + jax.ops.segment_sum(rows, here, settings.capacity)

    dtype = jax.eval_shape(lambda: atoms.statistics(0, 1)).dtype
    total = jnp.zeros((settings.capacity, atoms.size), dtype)
    total = _over_chunks(atoms.num_points, settings.chunk, add, total)
    return jax.vmap(atoms.draw)(_slot_keys(key, settings.capacity), total)


def _move_gradient(
    key: Array, x: PyTree, log_step_size: Array, labels: Array, counts: Array, atoms: Gradient
) -> tuple[PyTree, Array]:
    """Langevin steps of all clusters at once, each accepted by itself; new atoms elsewhere.

    The steps of an atom are scaled by the curvature of its posterior where it is, of whichever
    sign (Girolami & Calderhead 2011, section 5, without the derivatives of the metric). Slots are
    independent given the labels, so that the gradient of the sum is each slot's own.
    """
    capacity, dtype = counts.shape[0], log_step_size.dtype
    occupied = counts > 0
    center, as_atom = ravel_pytree(atoms.center)
    scale = ravel_pytree(atoms.scale)[0]
    size = center.shape[0]
    step_size = jnp.exp(log_step_size)

    def density(u: Array) -> Array:
        x = jax.vmap(as_atom)(center + scale * u)
        each = atoms.log_likelihood(jax.tree.map(lambda leaf: leaf[labels], x))
        return jax.ops.segment_sum(each, labels, capacity) + jax.vmap(atoms.log_base)(x)

    def local(u: Array) -> tuple[Array, ...]:
        """Log density, curvature and its axes, and where a step leads on average, by slot."""
        value, pull_back = jax.vjp(density, u)
        gradient = lambda u: jax.vjp(density, u)[1](jnp.ones_like(value))[0]  # noqa: E731
        along = lambda e: jax.jvp(gradient, (u,), (jnp.broadcast_to(e, u.shape),))[1]  # noqa: E731
        hessian = jnp.moveaxis(jax.vmap(along)(jnp.eye(size, dtype=dtype)), 0, -1)
        values, vectors = _curvature(hessian)
        slope = jnp.einsum("kij,ki->kj", vectors, pull_back(jnp.ones_like(value))[0])
        drift = jnp.einsum("kij,kj->ki", vectors, slope / values)
        return value, values, vectors, u + step_size**2 / 2 * drift

    def log_proposal(y: Array, here: tuple[Array, ...]) -> Array:
        _, values, vectors, mean = here
        noise = jnp.einsum("kij,ki->kj", vectors, y - mean) * jnp.sqrt(values) / step_size
        return jnp.sum(jnp.log(values) - noise**2, 1) / 2

    def one(t: int, carry: Any) -> Any:
        u, here, _ = carry
        key_noise, key_uniform = random.split(random.fold_in(key, t))
        noise = jax.vmap(lambda k: random.normal(k, (size,), dtype))(
            _slot_keys(key_noise, capacity)
        )
        _, values, vectors, mean = here
        y = mean + step_size * jnp.einsum("kij,kj->ki", vectors, noise / jnp.sqrt(values))
        there = local(y)
        log_ratio = there[0] - here[0] + log_proposal(u, there) - log_proposal(y, here)
        prob = jnp.where(jnp.isnan(log_ratio), 0.0, jnp.exp(jnp.minimum(log_ratio, 0.0)))
        uniform = jax.vmap(lambda k: random.uniform(k, dtype=dtype))(
            _slot_keys(key_uniform, capacity)
        )
        accept = occupied & (uniform < prob)
        pick = lambda a, b: jnp.where(accept.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        clusters = jnp.maximum(jnp.sum(occupied), 1)
        mean_prob = _sum(jnp.where(occupied, prob, 0.0)) / clusters
        return pick(y, u), jax.tree.map(pick, there, here), mean_prob.astype(dtype)

    u = (jax.vmap(lambda leaf: ravel_pytree(leaf)[0])(x) - center) / scale
    u, _, accept_prob = lax.fori_loop(0, ATOM_STEPS, one, (u, local(u), jnp.zeros((), dtype)))
    fresh = jax.vmap(atoms.draw)(_slot_keys(random.fold_in(key, ATOM_STEPS), capacity))
    moved = jax.vmap(as_atom)(center + scale * u)
    keep = lambda a, b: jnp.where(occupied.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
    return jax.tree.map(keep, moved, fresh), accept_prob


def _curvature(hessian: Array) -> tuple[Array, Array]:
    """Size of the curvature along its axes, no less than a fraction of the base's, and the axes."""
    values, vectors = jnp.linalg.eigh(-hessian)
    return jnp.maximum(jnp.abs(values), LEAST_CURVATURE), vectors


# --- labels ----------------------------------------------------------------------------------


def _assign(
    key: Array,
    labels: Array,
    log_u: Array,
    atoms: PyTree,
    log_width: Array,
    bias: Array,
    instantiated: Array,
    mixture: Mixture,
    settings: Settings,
) -> Array:
    """Step 6: one uniform per point picks among the slots whose width reaches the slice.

    Slots are seen block by block. A point keeps the choice made so far with the probability of the
    blocks so far among all up to here, and what the uniform did not decide goes on to the next.
    """
    n, chunk = labels.shape[0], min(settings.chunk, labels.shape[0])
    dtype = log_u.dtype
    # in (0, 1]: zero would pick a slot without mass
    uniform = 1 - random.uniform(key, (n,), dtype)
    blocks = (instantiated + BLOCK - 1) // BLOCK
    part = lambda x, b: lax.dynamic_slice_in_dim(x, b * BLOCK, BLOCK)  # noqa: E731

    def pick(score: Callable[[Array], Array], log_u: Array, uniform: Array) -> Array:
        def one(b: Array, carry: tuple[Array, Array, Array, Array]) -> Any:
            choice, uniform, peak, mass = carry
            z = score(b) + part(bias, b)[:, None]
            z = jnp.where(part(log_width, b)[:, None] >= log_u, z, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(z, 0))
            shift = jnp.where(jnp.isfinite(new_peak), new_peak, 0.0)
            e = jnp.exp(z - shift)
            cumulated = jnp.cumsum(e, 0)
            mass = mass * jnp.exp(peak - shift)
            total = mass + cumulated[-1]
            x = uniform * total
            switch = x > mass
            y = jnp.minimum(x - mass, cumulated[-1])
            below = cumulated < y
            # what is left of the uniform, given the choice
            low = jnp.max(jnp.where(below, cumulated, 0.0), 0)
            high = jnp.min(jnp.where(below, jnp.inf, cumulated), 0)
            rest = jnp.where(switch, (y - low) / (high - low), x / mass)
            rest = jnp.where(total > 0, jnp.clip(rest, jnp.finfo(dtype).tiny, 1.0), uniform)
            chosen = b * BLOCK + jnp.sum(below, 0, dtype=jnp.int32)
            return jnp.where(switch, chosen, choice), rest, new_peak, total

        start = (
            jnp.zeros(log_u.shape, jnp.int32),
            uniform,
            jnp.full(log_u.shape, -jnp.inf, dtype),
            jnp.zeros(log_u.shape, dtype),
        )
        return lax.fori_loop(0, blocks, one, start)[0]

    if isinstance(mixture.atoms, Gradient):
        likelihood = mixture.atoms.log_likelihood

        def of_slot(atom: PyTree) -> Array:
            each = lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape))  # noqa: E731
            return likelihood(jax.tree.map(each, atom))

        def score(b: Array) -> Array:
            # a density that is NaN is none
            z = lax.map(of_slot, jax.tree.map(lambda leaf: part(leaf, b), atoms))
            return jnp.where(jnp.isnan(z), -jnp.inf, z)

        return pick(score, log_u, uniform)

    product = mixture.atoms
    natural = jax.vmap(product.natural)(atoms)

    def one_chunk(start: Array, fresh: Array, labels: Array) -> Array:
        rows = product.statistics(start, chunk)

        def score(b: Array) -> Array:
            return jnp.matmul(part(natural, b), rows.T, precision="highest")

        here = lambda x: lax.dynamic_slice_in_dim(x, start, chunk)  # noqa: E731
        return lax.dynamic_update_slice_in_dim(
            labels, pick(score, here(log_u), here(uniform)), start, 0
        )

    return _over_chunks(n, chunk, one_chunk, labels)


def _split_merges(
    key: Array,
    sweep: Array,
    labels: Array,
    counts: Array,
    atoms: PyTree,
    alpha: Array,
    mixture: Mixture,
    settings: Settings,
) -> tuple[Array, Array, PyTree, Array, Array]:
    """Moves of a sweep, if it is their turn.

    Labels, cluster sizes and atoms after them, how many were accepted, and whether slots lacked.

    A move splits the cluster of two random points i and j, or merges their clusters; all points at
    once. Of the clusters' other points S, a fair coin or the atoms that suit i and j, then
    `LAUNCH_SCANS` scans make a launch split; each scan draws theta_a and theta_b given the split
    before, which has a share omega of the points on side a, then all of S independently with

        p_m = omega f(y_m | theta_a) / (omega f(y_m | theta_a) + (1 - omega) f(y_m | theta_b))

    One more such draw gives the proposal of a split, z ~ prod Bernoulli(p_m);
    for a merge, q is the same product at the split that is there. The launch does not look at that
    split, so that given the launch both moves are each other's reverse:

        A(split) = p(labels split) m(y_a) m(y_b) / (p(labels merged) m(y_ab) q),
        A(merge) = 1 / A(split)

    With atoms in closed form m is the marginal likelihood. Else the atoms are part of the move:
    theta' is drawn from a law g(. | y) around the mode of f(y | theta) g0(theta), a function of
    the points and the launch alone, and m(y) is f(y | theta) g0(theta) / g(theta | y) at the atom
    proposed, or at the one that is there.
    """

    def one(t: int, carry: Any) -> Any:
        labels, counts, atoms, accepted, no_slot = carry
        key_i, key_j, key_move, key_accept = random.split(random.fold_in(key, t), 4)
        n = mixture.num_points
        i = random.randint(key_i, (), 0, n)
        j = (i + random.randint(key_j, (), 1, n)) % n
        same = labels[i] == labels[j]
        if isinstance(mixture.atoms, Product):
            sides, sizes, log_ratio = _split_product(
                key_move, i, j, labels, mixture.atoms, settings
            )
        else:
            sides, sizes, log_ratio, new = _split_gradient(
                key_move, i, j, labels, atoms, mixture.atoms
            )
        clusters = jnp.sum(counts > 0).astype(jnp.int32)
        merged = jnp.where(same, clusters, clusters - 1)
        d = jnp.zeros((), alpha.dtype) if mixture.discount is None else mixture.discount
        a, b = sizes[0].astype(alpha.dtype), sizes[1].astype(alpha.dtype)
        log_ratio += (
            jnp.log(alpha + merged * d)
            + gammaln(a - d)
            + gammaln(b - d)
            - gammaln(1 - d)
            - gammaln(a + b - d)
        )
        log_ratio = jnp.where(same, log_ratio, -log_ratio)
        # no move where the ratio is NaN, for its reverse has the same
        accept = jnp.log(random.uniform(key_accept, dtype=alpha.dtype)) < log_ratio
        full = accept & same & (clusters >= settings.capacity)

        # clusters stay 0 ... H - 1: a new one comes last, and the last takes a merged one's place
        label_i, label_j, last = labels[i], labels[j], clusters - 1
        inside = (labels == label_i) | (labels == label_j)
        split = jnp.where(inside, jnp.where(sides, label_i, clusters), labels)
        joined = jnp.where(inside, label_i, labels)
        joined = jnp.where(joined == last, label_j, joined)
        labels = jnp.where(accept, jnp.where(same, split, joined), labels).astype(jnp.int32)
        if isinstance(mixture.atoms, Gradient):

            def moved(leaf: Array, side_a: Array, side_b: Array, both: Array) -> Array:
                split = leaf.at[label_i].set(side_a).at[clusters].set(side_b, mode="drop")
                joined = leaf.at[label_i].set(both)
                joined = joined.at[label_j].set(joined[last])
                return jnp.where(accept, jnp.where(same, split, joined), leaf)

            atoms = jax.tree.map(moved, atoms, *new)
        counts = count(labels, settings.capacity)
        return labels, counts, atoms, accepted + accept, no_slot | full

    start = (labels, counts, atoms, jnp.zeros((), jnp.int32), jnp.array(False))
    number = jnp.where(sweep % settings.every == 0, settings.split_merge, 0)
    return lax.fori_loop(0, number, one, start)


def _split_product(
    key: Array, i: Array, j: Array, labels: Array, atoms: Product, settings: Settings
) -> tuple[Array, Array, Array]:
    """Sides of a split (n,), sizes (2,), and log of m(y_a) m(y_b) / (m(y_ab) q)."""
    n = labels.shape[0]
    chunk = min(settings.chunk, n)
    dtype = jax.eval_shape(lambda: atoms.statistics(0, 1)).dtype
    label_i, label_j = labels[i], labels[j]
    same = label_i == label_j

    def scan(t: Array, carry: Any) -> Any:
        """Sides of the points, sums of both sides, log q; then the odds for the next scan."""
        sides, (difference, prior), *_ = carry
        key_scan, key_atoms = random.split(random.fold_in(key, t))
        last = t == LAUNCH_SCANS + 1

        def one(start: Array, fresh: Array, carry: Any) -> Any:
            sides, totals, sizes, log_q = carry
            index = start + jnp.arange(chunk)
            here = lax.dynamic_slice_in_dim(labels, start, chunk)
            rows = atoms.statistics(start, chunk)
            logits = jnp.matmul(rows, difference, precision="highest") + prior
            noise = random.logistic(random.fold_in(key_scan, start), (chunk,), dtype)
            side = logits + noise > 0
            side = jnp.where(last & ~same, here == label_i, side)
            side = (side | (index == i)) & (index != j)
            inside = fresh & ((here == label_i) | (here == label_j))
            free = inside & (index != i) & (index != j)
            log_p = jax.nn.log_sigmoid(jnp.where(side, logits, -logits))
            log_q += jnp.sum(jnp.where(free, log_p, 0.0))
            members = jnp.stack([inside & side, inside & ~side])
            totals += jnp.matmul(members.astype(rows.dtype), rows, precision="highest")
            sizes += jnp.sum(members, 1, dtype=jnp.int32)
            old = lax.dynamic_slice_in_dim(sides, start, chunk)
            sides = lax.dynamic_update_slice_in_dim(sides, jnp.where(fresh, side, old), start, 0)
            return sides, totals, sizes, log_q

        sides, totals, sizes, log_q = _over_chunks(n, chunk, one, (sides, *nothing))
        eta = jax.vmap(lambda key, s: atoms.natural(atoms.draw(key, s)))(
            random.split(key_atoms), totals
        )
        log_sizes = jnp.log(sizes.astype(dtype))
        odds = eta[0] - eta[1], log_sizes[0] - log_sizes[1]
        return sides, odds, totals, sizes, log_q

    nothing = jnp.zeros((2, atoms.size), dtype), jnp.zeros(2, jnp.int32), jnp.zeros((), dtype)
    coin = jnp.zeros(atoms.size, dtype), jnp.zeros((), dtype)
    sides, _, totals, sizes, log_q = lax.fori_loop(
        0, LAUNCH_SCANS + 2, scan, (jnp.zeros(n, bool), coin, *nothing)
    )
    both = atoms.log_marginal(totals[0] + totals[1])
    log_ratio = atoms.log_marginal(totals[0]) + atoms.log_marginal(totals[1]) - both - log_q
    return sides, sizes, log_ratio


def _split_gradient(
    key: Array, i: Array, j: Array, labels: Array, x: PyTree, atoms: Gradient
) -> tuple[Array, Array, Array, list[PyTree]]:
    """As `_split_product`, and the atoms of side a, of side b, and of both merged."""
    center, as_atom = ravel_pytree(atoms.center)
    scale = ravel_pytree(atoms.scale)[0]
    n, size, dtype = labels.shape[0], center.shape[0], center.dtype
    label_i, label_j = labels[i], labels[j]
    same = label_i == label_j
    inside = (labels == label_i) | (labels == label_j)
    index = jnp.arange(n)
    free = inside & (index != i) & (index != j)

    def log_likelihood(u: Array) -> Array:
        each = lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape))  # noqa: E731
        return atoms.log_likelihood(jax.tree.map(each, as_atom(center + scale * u)))

    def log_joint(u: Array, members: Array) -> Array:
        each = jnp.where(members, log_likelihood(u), 0.0)
        return jnp.sum(each) + atoms.log_base(as_atom(center + scale * u))

    def curvature(u: Array, members: Array) -> tuple[Array, Array]:
        return _curvature(jax.hessian(log_joint)(u, members))

    def newton(members: Array, u: Array) -> Array:
        values, vectors = curvature(u, members)
        step = vectors @ ((vectors.T @ jax.grad(log_joint)(u, members)) / values)
        length = jnp.linalg.norm(step)
        return u + step * jnp.minimum(1.0, NEWTON_LENGTH / jnp.maximum(length, 1e-30))

    def log_proposal(u: Array, mode: Array, values: Array, vectors: Array) -> Array:
        """Student's t around a mode, up to what is the same for all."""
        squares = jnp.sum(values * (vectors.T @ (u - mode)) ** 2)
        tail = jnp.log1p(squares / PROPOSAL_DF)
        return jnp.sum(jnp.log(values)) / 2 - (PROPOSAL_DF + size) / 2 * tail

    def draw(key: Array, mode: Array, values: Array, vectors: Array) -> Array:
        key_normal, key_gamma = random.split(key)
        spread = jnp.exp(log_gamma(key_gamma, jnp.array(PROPOSAL_DF / 2, dtype)))
        noise = random.normal(key_normal, (size,), dtype) * jnp.sqrt(PROPOSAL_DF / (2 * spread))
        return mode + vectors @ (noise / jnp.sqrt(values))

    def scan(t: Array, carry: Any) -> Any:
        """Modes of the two sides and of both, atoms drawn there, then sides of the points."""
        sides, first, modes, *_, log_q = carry
        key_scan, key_atoms = random.split(random.fold_in(key, t))
        # at first only i and j have a side
        seen = jnp.where(first, inside & ~free, inside)
        members = jnp.stack([seen & sides, seen & ~sides, inside])
        modes = lax.fori_loop(0, NEWTON_STEPS, lambda _, u: jax.vmap(newton)(members, u), modes)
        values, vectors = jax.vmap(curvature)(modes, members)
        u = jax.vmap(draw)(random.split(key_atoms, 3), modes, values, vectors)
        likelihood = jax.vmap(log_likelihood)(u[:2])
        log_sizes = jnp.log(jnp.sum(members[:2], 1).astype(dtype))
        logits = likelihood[0] - likelihood[1] + log_sizes[0] - log_sizes[1]
        side = logits + random.logistic(key_scan, (n,), dtype) > 0
        side = jnp.where((t == LAUNCH_SCANS) & ~same, labels == label_i, side)
        side = (side | (index == i)) & (index != j)
        new_log_q = jnp.sum(
            jnp.where(free, jax.nn.log_sigmoid(jnp.where(side, logits, -logits)), 0.0)
        )
        done = t > LAUNCH_SCANS
        sides, log_q = jnp.where(done, sides, side), jnp.where(done, log_q, new_log_q)
        # the merged atom is looked for between the others, whatever the points' sides now
        modes = modes.at[2].set(jnp.where(done, modes[2], (modes[0] + modes[1]) / 2))
        return sides, jnp.array(False), modes, values, vectors, u, log_q

    zeros = jnp.zeros((3, size), dtype)
    blank = jnp.zeros((3, size), dtype), jnp.zeros((3, size, size), dtype), zeros
    start = (index == i, jnp.array(True), zeros, *blank, jnp.zeros((), dtype))
    sides, _, modes, values, vectors, u, log_q = lax.fori_loop(0, LAUNCH_SCANS + 2, scan, start)

    old = jax.vmap(lambda leaf: (ravel_pytree(leaf)[0] - center) / scale)(
        jax.tree.map(lambda leaf: leaf[jnp.stack([label_i, label_j, label_i])], x)
    )
    # a split keeps the merged atom that is there, a merge the two of the sides
    u = jnp.where(same == jnp.array([True, True, False])[:, None], u, old)
    members = jnp.stack([inside & sides, inside & ~sides, inside])
    log_m = jax.vmap(log_joint)(u, members) - jax.vmap(log_proposal)(u, modes, values, vectors)
    # constants of the proposal's density, which m has once more in a split
    constant = (
        gammaln((PROPOSAL_DF + size) / 2)
        - gammaln(PROPOSAL_DF / 2)
        - size / 2 * jnp.log(PROPOSAL_DF * jnp.pi)
        - jnp.sum(jnp.log(scale))
    )
    log_ratio = log_m[0] + log_m[1] - log_m[2] - constant - log_q
    new = [as_atom(center + scale * u[k]) for k in range(3)]
    return sides, jnp.sum(members[:2], 1, dtype=jnp.int32), log_ratio, new


# --- start -----------------------------------------------------------------------------------


def _start_of_product(key: Array, atoms: Product, settings: Settings) -> Array:
    """Labels of the best of a few atoms, each drawn given one point that others explain badly.

    The point is drawn by how much better a cluster of its own would be: log of the marginal
    likelihood over that of the best atom so far.
    """
    n, chunk = atoms.num_points, min(settings.chunk, atoms.num_points)
    number = min(START_CLUSTERS, settings.capacity, n)

    def look(function: Callable[[Array], Array], dtype: Any) -> Array:
        def one(start: Array, _: Array, out: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(
                out, function(atoms.statistics(start, chunk)).astype(dtype), start, 0
            )

        return _over_chunks(n, chunk, one, jnp.zeros(n, dtype))

    dtype = jax.eval_shape(lambda: atoms.statistics(0, 1)).dtype
    alone = look(jax.vmap(atoms.log_marginal), dtype)

    def one(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        labels, best = carry
        key_point, key_atom = random.split(random.fold_in(key, k))
        gain = jnp.where(jnp.isfinite(best), jnp.maximum(alone - best, 0.0) + 1e-6, 1.0)
        point = random.categorical(key_point, jnp.log(gain))
        eta = atoms.natural(atoms.draw(key_atom, atoms.statistics(point, 1)[0]))
        score = look(lambda rows: jnp.matmul(rows, eta, precision="highest"), dtype)
        better = score > best
        return jnp.where(better, k, labels).astype(jnp.int32), jnp.where(better, score, best)

    start = (jnp.zeros(n, jnp.int32), jnp.full(n, -jnp.inf, dtype))
    return lax.fori_loop(0, number, one, start)[0]


def _start_of_gradient(key: Array, atoms: Gradient, n: int) -> Array:
    """Labels of the best of a few draws of G0."""

    def score(key: Array) -> Array:
        each = lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape))  # noqa: E731
        return atoms.log_likelihood(jax.tree.map(each, atoms.draw(key)))

    scores = lax.map(score, random.split(key, START_CLUSTERS))
    return jnp.argmax(jnp.where(jnp.isnan(scores), -jnp.inf, scores), 0).astype(jnp.int32)


# --- pieces ----------------------------------------------------------------------------------


def count(labels: Array, capacity: int) -> Array:
    """Points of each slot, (capacity,) int32; labels of -1 are nobody's."""
    return jax.ops.segment_sum(jnp.ones(labels.shape, jnp.int32), labels, capacity)


def exponential(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Exp(1) from 32 random bits: minus the log of a float32 uniform stops at 15.9."""
    bits = random.bits(key, shape, "uint32").astype(dtype)
    return -jnp.log(jnp.minimum((bits + 0.5) * 2.0**-32, 1.0))


def _log_beta(keys: Array, a: Array, b: Array, dtype: Any) -> tuple[Array, Array]:
    """log v and log(1 - v) of v ~ Beta(a, b), one for each key."""

    log_a, log_b = jax.vmap(log_gamma)(keys, jnp.stack([a, b], 1).astype(dtype)).T
    total = jnp.logaddexp(log_a, log_b)
    return log_a - total, log_b - total


def _slot_keys(key: Array, capacity: int, first: int = 0) -> Array:
    return jax.vmap(lambda slot: random.fold_in(key, slot))(jnp.arange(first, first + capacity))


def _inverse(order: Array) -> Array:
    """Where each old position has gone under `x[order]`."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))


def _sum(x: Array) -> Array:
    """Sum over slots, in an order that more slots do not change."""
    rows = x.reshape(-1, BLOCK)
    return jnp.sum(
        lax.fori_loop(0, rows.shape[0], lambda b, s: s + rows[b], jnp.zeros_like(rows[0]))
    )


def _cumsum(x: Array) -> Array:
    """Cumulated sums over slots, in an order that more slots do not change."""

    def one(carry: Array, row: Array) -> tuple[Array, Array]:
        out = carry + jnp.cumsum(row)
        return out[-1], out

    return lax.scan(one, jnp.zeros((), x.dtype), x.reshape(-1, BLOCK))[1].reshape(-1)


def _over_chunks(n: int, chunk: int, body: Callable, carry: Any) -> Any:
    """Run `body(start, fresh, carry)` over n points; `fresh` marks those not seen before.

    The last chunk reaches back to have the size of the others.
    """
    chunk = min(chunk, n)

    def one(i: Array, carry: Any) -> Any:
        start = jnp.minimum(i * chunk, n - chunk)
        return body(start, start + jnp.arange(chunk) >= i * chunk, carry)

    return lax.fori_loop(0, -(-n // chunk), one, carry)
