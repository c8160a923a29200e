"""Proximal independent Metropolis-Hastings: exact posteriors from a cheap operator.

The exact model predicts the data by A(z), a cheap one by B(z). Draws z' of (an approximation of)
the cheap model's posterior are moved by a map T to where the exact operator predicts what the cheap
one predicted at z', and the moved points are the proposals of an independence sampler:

    z = T(z'),   q(z) = q'(z') / |det DT(z')|,   accept with min(1, w(z) / w(current)),   w = pi / q

so that the draws are exact whatever the map and however poor the cheap model. T is one of

    argmin   z = argmin |A(z) - B(z')|^2_M / 2 + beta |z - z'|^2_W / 2
    gn       `steps` Gauss-Newton steps on this, from z'
    affine   z' + G (B(z') - a - J z'), with A(z) ~ a + J z at a reference point
    frozen   z' + G (B(z') - A(z')), G from J as before
    latent   `steps` Newton steps on F(z) = F'(z'), with F the latent state of the operator
    None     z'

with M the inverse noise covariance, W the prior precision and G = (J^T M J + beta W)^-1 J^T M. At
beta = 1 the error of the operator cancels to first order. All is done in coordinates in which M and
W are the identity.

The Jacobian is exact: for `argmin` by the implicit function theorem, with the curvature of A

    DT = H^-1 N,   H = J^T J + sum_i r_i D^2 A_i + beta,   N = J^T B' + beta,   r = A(z) - B(z')

for `gn` and `latent` by differentiating the steps themselves; for `affine` and `frozen` from
det(I + h' G) = det(I + G h'), h the bracket above, whichever is smaller.

T need not be injective. Its inverse S is found by Newton's method from z, a deterministic
function, and a proposal counts only if S(T(z')) = z': on those points T is injective. So folds
cost proposals, not exactness. Points that T does not reach are never proposed: `defensive` mixes
the prior into q, whose density is (1 - defensive) q_T + defensive * prior.

Where the cheap posterior is reachable by MCMC only, m steps of a reversible kernel on it lead from
S(current) to z', and w = pi(z) / pushforward of the cheap posterior (surrogate transition: Liu
2001, section 9.4.3). The inner chain starts from the accepted point each time.

Source: Chen & Biros 2026, arXiv 2602.21426 (idea and name of the method). The objective and the
densities here are derived, not taken from the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular

from ppl_ext.arguments import argument_error, check_choice, check_count, check_positive
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.kernels.chain import Resumable, run_if
from ppl_ext.target import Array, PyTree, Target

Correction = Literal["gn", "affine", "frozen", "argmin", "latent"]
CORRECTIONS = ("gn", "affine", "frozen", "argmin", "latent")

# Newton iterations before an inverse, or a minimum, counts as not found
MAX_NEWTON, MAX_MINIMISE = 20, 100

# Gauss-Newton steps from the cheap model's mode to the point where A is linearised
REFERENCE_STEPS = 2

# least number of transitions that adapt a kernel on the cheap posterior, before the run
INNER_WARMUP = 300

# numbers held at once while Jacobians of a batch are computed
MAX_CHUNK = 2**24


class Problem(NamedTuple):
    """The exact and the cheap model, both bound to the data.

    They need `observation` for all corrections but `latent` and `None`, `prior_covariance` unless
    `weight` is given, and `prior_draw` and `log_prior` for `defensive`.
    """

    exact: Target
    approx: Target


@dataclass(frozen=True)
class Base:
    """Where the draws before the map come from, on flat unconstrained vectors.

    Parameters
    ----------
    sample : callable
        `sample(key, fit)`: one draw, shape (d,).
    log_prob : callable
        `log_prob(z, fit)`: its log density, normalised.
    """

    sample: Callable[[Array, Fit], Array]
    log_prob: Callable[[Array, Fit], Array]


@dataclass(frozen=True)
class Draws:
    """Given draws before the map, shape (N, d), with their log density, shape (N,).

    Each chain takes each of them once, in an order of its own: drawn again they would be a
    discrete distribution, and the chain exact for nothing. Draws after the N-th are NaN.
    """

    z: Array
    log_prob: Array


@dataclass(frozen=True)
class Chain:
    """A Markov kernel that keeps a distribution, on flat unconstrained vectors.

    Parameters
    ----------
    start : callable
        `start(key, z)`: its state, adapted or to be adapted while it moves.
    move : callable
        `move(state, z)`: its state after one transition from `z`.
    position : callable
        `position(state)`: the vector, shape (d,).
    """

    start: Callable[[Array, Array], PyTree]
    move: Callable[[PyTree, Array], PyTree]
    position: Callable[[PyTree], Array]


@dataclass(frozen=True)
class Settings:
    """What the user fixes. `metric` and `weight` are precisions; `None`: read from the model.

    `base` may be a reversible `Chain` on the cheap posterior, of which `inner_steps` transitions
    are made for each proposal; `local` is a `Chain` on the exact one.
    """

    base: Base | Draws | Chain
    correction: Correction | None
    beta: float = 1.0
    metric: Any = None
    weight: Any = None
    steps: int = 2
    batch_size: int = 256
    latent_site: str | None = None
    defensive: float = 0.0
    inner_steps: int = 5
    local: Chain | None = None


class Fit(NamedTuple):
    """What is found once for each data set, and then kept."""

    prior_scale: Array  # (d,) or (d, d) lower: square root of W^-1
    noise_scale: Array  # (n,) or (n, n) lower: square root of M^-1; (0,) without correction
    mode: Array  # (d,) of the cheap posterior
    factor: Array  # (d, d) lower Cholesky factor of the Hessian there, in prior coordinates
    reference: Array  # (d,) where A is linearised, in prior coordinates; (0,) if it is not
    value: Array  # (n,) A there, in noise units
    jacobian: Array  # (n, d) dA there
    num_solves: Array  # () exact solves that this took


class Candidate(NamedTuple):
    """A proposal. Leading axis: the batch."""

    z: Array  # (d,)
    base: Array  # (d,) the draw before the map
    potential_energy: Array  # () of the exact model at z
    log_q: Array  # () log density of the proposal at z; NaN when the round trip failed
    log_det: Array  # () log |det DT|
    sign: Array  # () of det DT
    round_trip: Array  # () whether the inverse of the map led back
    approx_log_weight: Array  # () log density of the cheap model minus that of the base, at `base`
    num_solves: Array  # () exact solves


class _Fields(NamedTuple):
    i: Array  # () transitions made
    z: PyTree  # unconstrained sites
    potential_energy: Array  # ()
    log_q: Array  # () log density of the proposal at z; inf: the next proposal is accepted
    accept_prob: Array  # () of the last proposal
    diverging: Array  # () whether the last proposal had no finite weight
    candidate: Candidate  # the last proposal
    batch: Candidate  # proposals made ahead
    used: Array  # () of them
    base: Array  # (d,) the draw before the map that led to z
    inner: PyTree  # state of a `base` that is a chain
    local: PyTree  # state of the local kernel
    fit: Fit
    order_key: Array  # of the order in which given draws are taken
    stale: Array  # () whether fit and cached energies may belong to other data
    rng_key: Array


class State(Resumable, _Fields):
    """Chain state. Field names are those that NumPyro and ArviZ know."""

    __slots__ = ()

    @property
    def log_weight(self) -> Array:
        """Log of pi / q of the last proposal; its mean is the evidence. -inf: no proposal."""
        return log_weight(self.candidate.potential_energy, self.candidate.log_q)


def init(key: Array, z: PyTree, problem: Problem, settings: Settings, fit: Fit) -> State:
    """State at the unconstrained sites `z`; the first proposal with a finite weight is accepted.

    `batch_size` proposals are made when the first is needed.
    """
    key, order_key, key_inner, key_local = jax.random.split(key, 4)
    dtype = fit.mode.dtype
    x = problem.exact.ravel(z).astype(dtype)
    energy = problem.exact.potential_energy(z).astype(dtype)
    inner, base, size = (), x, settings.batch_size
    if isinstance(settings.base, Chain):
        inner, size = settings.base.start(key_inner, x), 0
        base = settings.base.position(inner).astype(dtype)
    local = () if settings.local is None else settings.local.start(key_local, x)
    shape = jax.eval_shape(lambda z: candidate_at(z, z[0], problem, settings, fit), x)
    one = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return State(
        i=jnp.zeros((), jnp.int32),
        z=problem.exact.unravel(x),
        potential_energy=energy,
        log_q=jnp.full((), jnp.inf, dtype),
        accept_prob=jnp.zeros((), dtype),
        diverging=jnp.zeros((), bool),
        candidate=one,
        batch=jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), one),
        used=jnp.full((), size, jnp.int32),
        base=base,
        inner=inner,
        local=local,
        fit=fit,
        order_key=order_key,
        stale=jnp.zeros((), bool),
        rng_key=key,
    )


def step(state: State, problem: Problem, settings: Settings) -> State:
    """One transition: take the next proposal, make a new batch if there is none, accept or stay."""
    state = run_if(state.stale, lambda s: restart(s, problem, settings), state)
    key, key_propose, key_uniform = jax.random.split(state.rng_key, 3)
    if isinstance(settings.base, Chain):
        candidate, inner = inner_proposal(state, problem, settings)
        state = state._replace(inner=inner)
    else:
        empty = state.used == settings.batch_size
        fill = lambda pair: (pair[0], refill(pair[0], pair[1], problem, settings))  # noqa: E731
        _, state = run_if(empty, fill, (key_propose, state))
        candidate = jax.tree.map(lambda leaf: leaf[state.used], state.batch)
        state = state._replace(used=state.used + 1)
    uniform = jax.random.uniform(key_uniform, dtype=state.log_q.dtype)
    state = transition(uniform, candidate, state, problem)
    if settings.local is not None:
        state = local_move(state, problem, settings)
    if isinstance(settings.base, Draws):
        used_up = state.i >= len(settings.base.z)
        z = jax.tree.map(lambda leaf: jnp.where(used_up, jnp.nan, leaf), state.z)
        state = state._replace(z=z)
    return state._replace(i=state.i + 1, stale=state.stale, rng_key=key)


def inner_proposal(state: State, problem: Problem, settings: Settings) -> tuple[Candidate, PyTree]:
    """A proposal by the chain on the cheap posterior, from the accepted point's draw."""
    chain = settings.base
    assert isinstance(chain, Chain)

    def move(_: Any, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        inner = chain.move(*carry)
        return inner, chain.position(inner).astype(state.base.dtype)

    inner, base = jax.lax.fori_loop(0, settings.inner_steps, move, (state.inner, state.base))
    log_base = -_potential(problem.approx, base)
    candidate = candidate_at(base, log_base, problem, settings, state.fit)
    energy = _potential(problem.exact, candidate.z).astype(state.log_q.dtype)
    return candidate._replace(potential_energy=energy), inner


def local_move(state: State, problem: Problem, settings: Settings) -> State:
    """A transition of the local kernel, after which the proposal's density is found again."""
    assert settings.local is not None
    dtype = state.log_q.dtype
    local = settings.local.move(state.local, problem.exact.ravel(state.z))
    x = settings.local.position(local).astype(dtype)
    log_q, base = log_proposal(x, problem, settings, state.fit)
    return state._replace(
        z=problem.exact.unravel(x),
        potential_energy=_potential(problem.exact, x).astype(dtype),
        log_q=log_q.astype(dtype),
        base=base.astype(dtype),
        local=local,
    )


def transition(uniform: Array, candidate: Candidate, state: State, problem: Problem) -> State:
    """Accept the candidate with probability min(1, w(candidate) / w(state)), or stay."""
    new = log_weight(candidate.potential_energy, candidate.log_q)
    log_ratio = new - log_weight(state.potential_energy, state.log_q)
    # two points without weight: -inf - (-inf)
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    accepted = uniform < accept_prob
    z = problem.exact.unravel(candidate.z)
    return state._replace(
        z=jax.tree.map(lambda a, b: jnp.where(accepted, a, b), z, state.z),
        potential_energy=jnp.where(accepted, candidate.potential_energy, state.potential_energy),
        log_q=jnp.where(accepted, candidate.log_q, state.log_q),
        base=jnp.where(accepted, candidate.base, state.base),
        accept_prob=accept_prob,
        diverging=jnp.isneginf(new),
        candidate=candidate,
    )


def log_weight(potential_energy: Array, log_q: Array) -> Array:
    """Log of pi / q; -inf where either is not a number or the density vanishes."""
    log_w = -potential_energy - log_q
    return jnp.where(jnp.isnan(log_w), -jnp.inf, log_w)


def refill(key: Array, state: State, problem: Problem, settings: Settings) -> State:
    """State with a new batch of proposals, all made in parallel."""
    base, size, fit = settings.base, settings.batch_size, state.fit
    key_base, key_prior = jax.random.split(key)
    if isinstance(base, Draws):
        order = jax.random.permutation(state.order_key, len(base.z))
        # the last one again when they are used up: `step` makes NaN of it
        taken = order[jnp.minimum(state.i + jnp.arange(size), len(base.z) - 1)]
        drawn = base.z[taken], base.log_prob[taken]
    else:
        draw = lambda key: propose(key, problem, settings, fit)  # noqa: E731
        drawn = jax.vmap(draw)(jax.random.split(key_base, size))
    prior = prior_draws(key_prior, problem, settings) if settings.defensive else None

    def make(drawn: Any) -> Candidate:
        (base, log_base), prior = drawn
        return candidate_at(base, log_base, problem, settings, fit, prior)

    # the maps in chunks, for their Jacobians; the exact energies at once, for host operators
    numbers = max(fit.mode.size * max(fit.noise_scale.shape[0], 1), 1)
    chunk = max(1, MAX_CHUNK // numbers)
    if size <= chunk:
        batch = jax.vmap(make)((drawn, prior))
    else:
        batch = jax.lax.map(make, (drawn, prior), batch_size=chunk)
    energy = jax.vmap(lambda z: _potential(problem.exact, z))(batch.z)
    batch = batch._replace(potential_energy=energy.astype(batch.log_q.dtype))
    return state._replace(batch=batch, used=jnp.zeros_like(state.used))


def block_refresh(state: State, problem: Problem, settings: Settings, num_warmup: int) -> State:
    """The same point for new values of the other blocks of a Gibbs sampler.

    Map and base are found again after 1, 2, 4, ... transitions of warm-up, since those of the start
    may belong to values that are far from typical. Then they are kept: any fixed ones are valid.
    """
    again = (state.i & (state.i - 1) == 0) & (state.i < num_warmup)
    state = run_if(again, lambda s: restart(s, problem, settings), state)
    return run_if(~again, lambda s: refresh(s, problem, settings), state)


def refresh(state: State, problem: Problem, settings: Settings) -> State:
    """The same point with energy and proposal density for the problem's data; `fit` is kept.

    Proposals made ahead are dropped.
    """
    x = problem.exact.ravel(state.z)
    energy = problem.exact.potential_energy(state.z).astype(state.potential_energy.dtype)
    log_q, base = log_proposal(x, problem, settings, state.fit)
    # a start that was never proposed stays one
    start = jnp.isposinf(state.log_q)
    return state._replace(
        potential_energy=energy,
        log_q=jnp.where(start, jnp.inf, log_q).astype(state.log_q.dtype),
        base=jnp.where(start, state.base, base).astype(state.base.dtype),
        used=jnp.full_like(state.used, len(state.batch.log_q)),
        stale=jnp.zeros_like(state.stale),
    )


def restart(state: State, problem: Problem, settings: Settings) -> State:
    """The same point with everything found again for the problem's data."""
    fit = jax.tree.map(
        lambda new, old: new.astype(old.dtype),
        find_fit(problem.exact.ravel(state.z), problem, settings, state.fit.prior_scale),
        state.fit,
    )
    state = refresh(state._replace(fit=fit), problem, settings)
    # unreachable by the new proposal: a start like any other
    return state._replace(log_q=jnp.where(jnp.isneginf(state.log_q), jnp.inf, state.log_q))


# --- proposals -------------------------------------------------------------------------------


def prior_draws(key: Array, problem: Problem, settings: Settings) -> tuple[Array, Array]:
    """Whether each proposal of a batch is to be a draw of the prior, and that draw."""
    key_share, key_draws = jax.random.split(key)
    keys = jax.random.split(key_draws, settings.batch_size)
    assert problem.approx.prior_draw is not None
    draws = jax.vmap(problem.approx.ravel)(jax.vmap(problem.approx.prior_draw)(keys))
    share = jax.random.uniform(key_share, (settings.batch_size,), draws.dtype)
    return share < settings.defensive, draws


def propose(key: Array, problem: Problem, settings: Settings, fit: Fit) -> tuple[Array, Array]:
    """A draw of the base, shape (d,), with its log density."""
    assert isinstance(settings.base, Base)
    base = settings.base.sample(key, fit)
    return base, settings.base.log_prob(base, fit)


def candidate_at(
    base: Array,
    log_base: Array,
    problem: Problem,
    settings: Settings,
    fit: Fit,
    prior: tuple[Array, Array] | None = None,
) -> Candidate:
    """The draw `base` moved by the map, with its density; the energy is left at zero.

    `prior` has whether to propose a draw of the prior instead, and that draw.
    """
    dtype = fit.mode.dtype
    mapped = make_map(problem, settings, fit)
    u = _solve(fit.prior_scale, base)
    v, converged, solves = mapped.forward(u)
    if prior is not None:
        instead, draw = prior
        v = jnp.where(instead, _solve(fit.prior_scale, draw), v)
    back, inverse_solves = mapped.inverse(v)
    if prior is None:
        round_trip = converged & _same(back, u)
    else:
        # the mixture has its density at the prior's draw, too
        again, converged_again, more_solves = mapped.forward(back)
        reached = converged_again & _same(again, v)
        round_trip = jnp.where(instead, reached, converged & _same(back, u))
        u = jnp.where(instead, back, u)
        log_base = jnp.where(
            instead, log_density(_times(fit.prior_scale, u), problem, settings, fit), log_base
        )
        solves = solves + more_solves
    log_det, sign, more = mapped.log_det(u, v)
    log_q = jnp.where(round_trip, log_base - log_det, jnp.nan)
    z = _times(fit.prior_scale, v)
    if prior is not None:
        log_q = mixture(jnp.where(instead & ~round_trip, -jnp.inf, log_q), z, problem, settings)
    log_cheap = -_potential(problem.approx, base)
    drawn = log_density(base, problem, settings, fit) if prior is not None else log_base
    return Candidate(
        z=z.astype(dtype),
        base=base.astype(dtype),
        potential_energy=jnp.zeros((), dtype),
        log_q=log_q.astype(dtype),
        log_det=log_det.astype(dtype),
        sign=sign.astype(dtype),
        round_trip=round_trip,
        approx_log_weight=(log_cheap - drawn).astype(dtype),
        num_solves=jnp.asarray(solves + more + inverse_solves + 1, jnp.int32),
    )


def mixture(log_q: Array, z: Array, problem: Problem, settings: Settings) -> Array:
    """Log density of the defensive mixture of the corrected draws and the prior."""
    share = settings.defensive
    if share == 0:
        return log_q
    assert problem.approx.log_prior is not None
    log_prior = problem.approx.log_prior(problem.approx.unravel(z))
    return jnp.logaddexp(math.log1p(-share) + log_q, math.log(share) + log_prior)


def log_proposal(z: Array, problem: Problem, settings: Settings, fit: Fit) -> tuple[Array, Array]:
    """Log density of the proposal at any flat vector `z`, -inf where it is never made.

    Also returns the draw of the base that leads there. Given draws have no density elsewhere:
    there it is NaN.
    """
    mapped = make_map(problem, settings, fit)
    v = _solve(fit.prior_scale, z)
    u, _ = mapped.inverse(v)
    again, converged, _ = mapped.forward(u)
    log_det, _, _ = mapped.log_det(u, v)
    base = _times(fit.prior_scale, u)
    log_q = log_density(base, problem, settings, fit) - log_det
    reached = converged & _same(again, v)
    return mixture(jnp.where(reached, log_q, -jnp.inf), z, problem, settings), base


def log_density(base: Array, problem: Problem, settings: Settings, fit: Fit) -> Array:
    """Log density of the draws before the map: up to a constant for a chain."""
    if isinstance(settings.base, Base):
        return settings.base.log_prob(base, fit)
    if isinstance(settings.base, Chain):
        return -_potential(problem.approx, base)
    return jnp.full((), jnp.nan, base.dtype)


def laplace_sample(key: Array, fit: Fit) -> Array:
    """A draw of the normal distribution at the cheap posterior's mode, shape (d,)."""
    noise = jax.random.normal(key, fit.mode.shape, fit.mode.dtype)
    spread = solve_triangular(fit.factor, noise, lower=True, trans="T")
    return fit.mode + _times(fit.prior_scale, spread)


def laplace_log_prob(z: Array, fit: Fit) -> Array:
    """Its log density; its precision is the Hessian at the mode."""
    scaled = fit.factor.T @ _solve(fit.prior_scale, z - fit.mode)
    log_det = jnp.log(jnp.diag(fit.factor)).sum() - _log_det(fit.prior_scale)
    return log_det - scaled @ scaled / 2 - z.size * math.log(2 * math.pi) / 2


LAPLACE = Base(laplace_sample, laplace_log_prob)


# --- maps ------------------------------------------------------------------------------------


class Map(NamedTuple):
    """T on vectors in prior coordinates. Each function also returns its number of exact solves."""

    forward: Callable[[Array], tuple[Array, Array, Any]]  # u -> T(u), whether it was found
    log_det: Callable[[Array, Array], tuple[Array, Array, Any]]  # u, T(u) -> log |det|, sign
    inverse: Callable[[Array], tuple[Array, Any]]  # v -> u


def make_map(problem: Problem, settings: Settings, fit: Fit) -> Map:
    """The map of `settings.correction`."""
    correction = settings.correction
    if correction is None:
        yes, zero = jnp.ones((), bool), jnp.zeros(())
        return Map(lambda u: (u, yes, 0), lambda u, v: (zero, zero + 1, 0), lambda v: (v, 0))
    exact, approx = operators(problem, settings, fit)
    size, num_data = fit.mode.size, fit.noise_scale.shape[0]
    if correction == "argmin":
        return _argmin_map(exact, approx, settings.beta)
    if correction in ("affine", "frozen"):
        gain = ridge(fit.jacobian, jnp.eye(num_data, dtype=fit.mode.dtype), settings.beta)
        if correction == "affine":
            bracket = lambda u: (  # noqa: E731
                approx(u) - fit.value - fit.jacobian @ (u - fit.reference)
            )
        else:
            bracket = lambda u: approx(u) - exact(u)  # noqa: E731
        return _low_rank_map(bracket, gain, per_call=int(correction == "frozen"))
    if correction == "latent":
        forward = lambda u: newton_steps(exact, approx(u), u, settings.steps)  # noqa: E731
        return _explicit_map(forward, settings.steps * (1 + size), size)
    forward = lambda u: gauss_newton(  # noqa: E731
        exact, approx(u), u, settings.beta, settings.steps
    )
    return _explicit_map(forward, settings.steps * (1 + min(size, num_data)), size)


def operators(
    problem: Problem, settings: Settings, fit: Fit
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """A and B on vectors in prior coordinates, in noise units; for `latent` F, as it is."""

    def operator(target: Target) -> Callable[[Array], Array]:
        if settings.latent_site is not None:
            name = settings.latent_site
            return lambda u: jnp.ravel(target.constrain(_times(fit.prior_scale, u))[name])
        return lambda u: _solve(fit.noise_scale, prediction(target, _times(fit.prior_scale, u)))

    return operator(problem.exact), operator(problem.approx)


def gauss_newton(
    exact: Callable[[Array], Array], goal: Array, u: Array, beta: float, steps: int
) -> Array:
    """`steps` Gauss-Newton steps on |exact(v) - goal|^2 / 2 + beta |v - u|^2 / 2 from v = u."""
    v = u
    for _ in range(steps):
        value, jacobian = value_and_jacobian(exact, v)
        v = u + ridge(jacobian, goal - value + jacobian @ (v - u), beta)
    return v


def newton_steps(exact: Callable[[Array], Array], goal: Array, u: Array, steps: int) -> Array:
    """`steps` Newton steps on exact(v) = goal from v = u."""
    v = u
    for _ in range(steps):
        v = v + jnp.linalg.solve(jax.jacfwd(exact)(v), goal - exact(v))
    return v


def ridge(jacobian: Array, rhs: Array, beta: float) -> Array:
    """(J^T J + beta)^-1 J^T rhs, by the smaller of the two systems."""
    num_data, size = jacobian.shape
    if num_data < size:
        gram = jacobian @ jacobian.T + beta * jnp.eye(num_data, dtype=jacobian.dtype)
        return jacobian.T @ jnp.linalg.solve(gram, rhs)
    gram = jacobian.T @ jacobian + beta * jnp.eye(size, dtype=jacobian.dtype)
    return jnp.linalg.solve(gram, jacobian.T @ rhs)


def value_and_jacobian(function: Callable[[Array], Array], u: Array) -> tuple[Array, Array]:
    """Value (n,) and Jacobian (n, d), by min(d, n) derivative passes."""
    twice = lambda u: (lambda value: (value, value))(function(u))  # noqa: E731
    n = jax.eval_shape(function, u).size
    jacobian, value = (jax.jacrev if n < u.size else jax.jacfwd)(twice, has_aux=True)(u)
    return value, jacobian


def _explicit_map(forward: Callable[[Array], Array], per_call: int, size: int) -> Map:
    """A map that is its own definition: Jacobian and inverse by differentiating it."""

    def log_det(u: Array, _: Array) -> tuple[Array, Array, Any]:
        sign, log_det = jnp.linalg.slogdet(jax.jacfwd(forward)(u))
        return log_det, sign, per_call * size

    def inverse(v: Array) -> tuple[Array, Any]:
        def move(u: Array) -> Array:
            return jnp.linalg.solve(jax.jacfwd(forward)(u), v - forward(u))

        u, iterations = _newton(move, v)
        return u, iterations * per_call * (1 + size)

    return Map(lambda u: (forward(u), jnp.ones((), bool), per_call), log_det, inverse)


def _low_rank_map(bracket: Callable[[Array], Array], gain: Array, per_call: int) -> Map:
    """u + G h(u), with determinants and solves in the smaller of the spaces of data and of u."""
    size, num_data = gain.shape
    if num_data < size:

        def pieces(u: Array, v: Array) -> tuple[Array, Array, Array]:
            value, push = jax.linearize(bracket, u)
            residual = v - u - gain @ value
            pushed = jax.vmap(push, 1, 1)(jnp.concatenate([gain, residual[:, None]], 1))
            small = jnp.eye(num_data, dtype=u.dtype) + pushed[:, :-1]
            return small, residual, pushed[:, -1]

        def move(u: Array, v: Array) -> Array:
            small, residual, pushed = pieces(u, v)
            return residual - gain @ jnp.linalg.solve(small, pushed)
    else:

        def pieces(u: Array, v: Array) -> tuple[Array, Array, Array]:
            value, slope = value_and_jacobian(bracket, u)
            small = jnp.eye(size, dtype=u.dtype) + gain @ slope
            return small, v - u - gain @ value, value

        def move(u: Array, v: Array) -> Array:
            small, residual, _ = pieces(u, v)
            return jnp.linalg.solve(small, residual)

    width = min(size, num_data)

    def log_det(u: Array, v: Array) -> tuple[Array, Array, Any]:
        sign, log_det = jnp.linalg.slogdet(pieces(u, v)[0])
        return log_det, sign, per_call * width

    def inverse(v: Array) -> tuple[Array, Any]:
        u, iterations = _newton(lambda u: move(u, v), v)
        return u, iterations * per_call * (1 + width)

    def forward(u: Array) -> tuple[Array, Array, Any]:
        return u + gain @ bracket(u), jnp.ones((), bool), per_call

    return Map(forward, log_det, inverse)


def _argmin_map(
    exact: Callable[[Array], Array], approx: Callable[[Array], Array], beta: float
) -> Map:
    """The converged minimiser; its derivative by the implicit function theorem."""

    def loss(v: Array, u: Array, goal: Array) -> Array:
        residual, away = exact(v) - goal, v - u
        return (residual @ residual + beta * away @ away) / 2

    def forward(u: Array) -> tuple[Array, Array, Any]:
        goal = approx(u)
        v, _, converged, iterations = minimise(lambda v: loss(v, u, goal), u)
        return v, converged, iterations * (2 + u.size)

    def mixed(u: Array, jacobian: Array) -> Array:
        _, slope = value_and_jacobian(approx, u)
        return jacobian.T @ slope + beta * jnp.eye(u.size, dtype=u.dtype)

    def log_det(u: Array, v: Array) -> tuple[Array, Array, Any]:
        _, jacobian = value_and_jacobian(exact, v)
        # the Hessian of the loss, with the curvature of the operator
        hessian = jax.hessian(loss)(v, u, approx(u))
        sign_m, log_m = jnp.linalg.slogdet(mixed(u, jacobian))
        sign_h, log_h = jnp.linalg.slogdet(hessian)
        return log_m - log_h, sign_m * sign_h, min(jacobian.shape) + u.size

    def inverse(v: Array) -> tuple[Array, Any]:
        # stationarity, solved for u: J^T (exact(v) - approx(u)) + beta (v - u) = 0
        value, jacobian = value_and_jacobian(exact, v)

        def move(u: Array) -> Array:
            gradient = jacobian.T @ (value - approx(u)) + beta * (v - u)
            return jnp.linalg.solve(mixed(u, jacobian), gradient)

        u, _ = _newton(move, v)
        return u, 1 + min(jacobian.shape)

    return Map(forward, log_det, inverse)


# --- what is found once for each data set ----------------------------------------------------


def find_fit(
    start: Array, problem: Problem, settings: Settings, prior_scale: Array | None = None
) -> Fit:
    """Scales, the cheap posterior's mode and Hessian from `start`, and A linearised.

    `prior_scale` is that of an earlier fit, which serves any data.
    """
    dtype = jnp.result_type(start, jnp.float32)
    size = start.size
    if settings.weight is not None:
        prior_scale = _inverse_root(jnp.asarray(settings.weight, dtype))
    elif prior_scale is None:
        assert problem.approx.prior_covariance is not None
        prior_scale = _root(problem.approx.prior_covariance().astype(dtype))
    energy = lambda u: _potential(problem.approx, _times(prior_scale, u))  # noqa: E731
    u, hessian, _, _ = minimise(energy, _solve(prior_scale, start.astype(dtype)))
    mode = _times(prior_scale, u)
    none = jnp.zeros(0, dtype)
    fit = Fit(
        prior_scale=prior_scale,
        noise_scale=none,
        mode=mode,
        factor=jnp.linalg.cholesky(hessian),
        reference=none,
        value=none,
        jacobian=jnp.zeros((0, size), dtype),
        num_solves=jnp.zeros((), jnp.int32),
    )
    if settings.correction is None or settings.latent_site is not None:
        return fit
    if settings.metric is None:
        assert problem.approx.observation is not None
        _, covariance = problem.approx.observation(problem.approx.unravel(mode))
        noise_scale = _root(covariance.astype(dtype))
    else:
        noise_scale = _inverse_root(jnp.asarray(settings.metric, dtype))
    fit = fit._replace(noise_scale=noise_scale)
    if settings.correction not in ("affine", "frozen"):
        return fit
    exact, approx = operators(problem, settings, fit)
    linearise, cost = linearisation(exact, u)
    goal = approx(u)

    def move(_: Any, carry: Any) -> Any:
        # Gauss-Newton steps of the map at the mode lead to where corrected draws lie
        reference, value, jacobian = carry
        right = goal - value + jacobian @ (reference - u)
        reference = u + ridge(jacobian, right, settings.beta)
        return reference, *linearise(reference)

    # without a Jacobian the first step stays at the mode
    carry = (u, goal, jnp.zeros((goal.size, size), dtype))
    reference, value, jacobian = jax.lax.fori_loop(0, REFERENCE_STEPS + 1, move, carry)
    return fit._replace(
        reference=reference.astype(dtype),
        value=value.astype(dtype),
        jacobian=jacobian.astype(dtype),
        num_solves=jnp.asarray((REFERENCE_STEPS + 1) * cost, jnp.int32),
    )


def linearisation(
    function: Callable[[Array], Array], u: Array
) -> tuple[Callable[[Array], tuple[Array, Array]], int]:
    """`value_and_jacobian` of a function, and its cost; by differences if it has no derivative."""
    if differentiable(function, u):
        n = jax.eval_shape(function, u).size
        return lambda u: value_and_jacobian(function, u), 1 + min(n, u.size)

    def differences(u: Array) -> tuple[Array, Array]:
        # one batch of d + 1 solves
        h = jnp.finfo(u.dtype).eps ** 0.5
        points = jnp.concatenate([u[None], u + h * jnp.eye(u.size, dtype=u.dtype)])
        values = jax.vmap(function)(points)
        return values[0], (values[1:] - values[0]).T / h

    return differences, 1 + u.size


def differentiable(function: Callable[[Array], Array], u: Array) -> bool:
    """Whether JAX can differentiate `function`: not through a host callback."""
    try:
        jax.eval_shape(lambda u: jax.jvp(function, (u,), (u,)), u)
    except ValueError as error:
        if "callback" not in str(error):
            raise
        return False
    return True


# --- what a front end asks -------------------------------------------------------------------


def checked_operators(name: str, value: Any) -> dict[str, Any]:
    """The argument `approx` or `exact` of a front end, a dict of keyword arguments of the model.

    Raises
    ------
    TypeError
        When it is none.
    """
    if not isinstance(value, Mapping):
        raise TypeError(
            f"ProximalIMH: `{name}` must be a dict of keyword arguments of the model, such as "
            f"dict(forward=solver), got {type(value).__name__}."
        )
    return dict(value)


def checked_settings(
    *,
    proposal: Any,
    proposal_is_kernel: bool,
    correction: Any,
    beta: Any,
    metric: Any,
    weight: Any,
    steps: Any,
    defensive: Any,
    inner_steps: Any,
    batch_size: Any,
    has_local_kernel: bool,
) -> Settings:
    """`Settings` of the arguments of a front end's `ProximalIMH`, correction and base left open.

    Raises
    ------
    ValueError
        For a bad argument, or two that exclude each other, named.
    """
    check_choice("ProximalIMH", "correction", correction, ("auto", *CORRECTIONS, None))
    check_positive("ProximalIMH", beta=beta)
    check_count("ProximalIMH", steps=steps, batch_size=batch_size)
    number = isinstance(defensive, Real) and not isinstance(defensive, bool)
    if not number or not 0 <= float(defensive) < 1:
        raise argument_error("ProximalIMH", "defensive", defensive, "a number from 0 to 1")
    if inner_steps is not None:
        check_count("ProximalIMH", inner_steps=inner_steps)
        if not proposal_is_kernel:
            raise argument_error(
                "ProximalIMH", "inner_steps", inner_steps, "None unless `proposal` is a kernel"
            )
    if proposal_is_kernel and defensive:
        raise argument_error("ProximalIMH", "defensive", defensive, "0 when `proposal` is a kernel")
    if isinstance(proposal, Draws) and (defensive or has_local_kernel):
        raise ValueError(
            "ProximalIMH: `defensive` and `local_kernel` need the density of the proposal "
            "everywhere, but given draws have it at themselves only. Give a distribution."
        )
    return Settings(
        base=LAPLACE,
        correction=None,
        beta=float(beta),
        metric=_checked_precision("metric", metric, "likelihood"),
        weight=_checked_precision("weight", weight, "prior"),
        steps=int(steps),
        defensive=float(defensive),
        inner_steps=int(inner_steps or 5),
        batch_size=int(batch_size),
    )


def checked_draws(z: np.ndarray, log_prob: np.ndarray) -> Draws:
    """`Draws` of the argument `proposal` of a front end.

    Raises
    ------
    ValueError
        When their shapes do not fit, or a number is not finite.
    """
    if z.ndim != 2 or log_prob.shape != z.shape[:1] or not len(z):
        raise ValueError(
            "ProximalIMH: `proposal` (z, log_prob) must have the shapes (N, d) and (N,), got "
            f"{z.shape} and {log_prob.shape}."
        )
    for name, values in (("z", z), ("log_prob", log_prob)):
        if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
            raise ValueError(f"ProximalIMH: `proposal`: `{name}` must hold finite numbers.")
    return Draws(jnp.asarray(z, float), jnp.asarray(log_prob, float))


def _checked_precision(name: str, value: Any, default: str) -> np.ndarray | None:
    if isinstance(value, str):
        if value == default:
            return None
        raise argument_error("ProximalIMH", name, value, f'"{default}" or an array')
    array = np.asarray(value)
    square = array.ndim == 1 or (array.ndim == 2 and array.shape[0] == array.shape[1])
    if array.dtype.kind not in "iuf" or not square or not np.isfinite(array).all():
        raise argument_error("ProximalIMH", name, value, "a vector or square matrix of numbers")
    spectrum = array if array.ndim == 1 else np.linalg.eigvalsh(array)
    if (spectrum <= 0).any():
        raise argument_error("ProximalIMH", name, value, "positive definite")
    return array


def check_width(shape: tuple[int, ...], batch_shape: tuple[int, ...], target: Target) -> None:
    """Raise `ValueError` unless a distribution is one of the target's flat vector."""
    if shape != (target.size,) or batch_shape != ():
        raise ValueError(
            f"ProximalIMH: `proposal` must be a distribution of one vector of {target.size} "
            f"numbers, the unconstrained sites {sorted(target.structure)} in this order; its "
            f"event shape is {tuple(shape)}, its batch shape {tuple(batch_shape)}."
        )


def check_draws(draws: Draws, target: Target) -> None:
    """Raise `ValueError` unless given draws are of the target's flat vector."""
    if draws.z.shape[1] != target.size:
        raise ValueError(
            f"ProximalIMH: the draws in `proposal` have {draws.z.shape[1]} numbers, the "
            f"model {target.size}: the unconstrained sites {sorted(target.structure)}."
        )


def check_guide(sites: set[str], target: Target) -> None:
    """Raise `UnsupportedModelError` unless a guide samples the target's sites and no others."""
    if sites != set(target.structure):
        raise UnsupportedModelError(
            f"ProximalIMH: the guide samples {sorted(sites)}, the model "
            f"{sorted(target.structure)}. A guide without other sites has a density; use an "
            "AutoContinuous guide, or a Distribution."
        )


def chosen_correction(
    correction: Correction | Literal["auto"] | None, cheap_is_exact: bool
) -> Correction | None:
    """What `correction="auto"` is.

    `affine`, whose proposals cost one solve: the derivatives that `gn` takes for its determinant
    and its inverse cost more solves than its better proposals save.
    """
    if correction != "auto":
        return correction
    return None if cheap_is_exact else "affine"


def check_cheap(target: Target) -> None:
    """Raise `UnsupportedModelError` unless the cheap model, with its data, has derivatives."""
    if not differentiable(partial(_potential, target), jnp.zeros(target.size)):
        raise UnsupportedModelError(
            "ProximalIMH: the cheap model (`approx`) calls a function that has no derivative in "
            "JAX, such as a BlackBox. Its derivatives are needed for the start and to invert the "
            "map; give a cheap operator written in JAX."
        )


def facts(state: State, settings: Settings) -> dict[str, Any]:
    """What `imh_report` is told of a run besides its draws; `state` of one chain or several."""
    return {
        "imh_correction": str(settings.correction).lower(),
        "imh_fit_solves": np.atleast_1d(np.asarray(state.fit.num_solves)),
    }


def latent_site(target: Target) -> str:
    """The deterministic site with as many numbers as there are unknowns.

    Raises
    ------
    UnsupportedModelError
        When there is none, or several.
    """
    found = {s.name: math.prod(s.shape) for s in target.sites if s.kind == "deterministic"}
    fitting = [name for name, size in found.items() if size == target.size]
    if len(fitting) != 1:
        raise UnsupportedModelError(
            f'ProximalIMH: `correction="latent"` needs one deterministic site with {target.size} '
            f"numbers, as many as there are unknowns, for the latent state of the operator; the "
            f"deterministic sites have {found or 'none'}. Use another correction."
        )
    return fitting[0]


# --- small parts -----------------------------------------------------------------------------


def minimise(function: Callable[[Array], Array], start: Array) -> tuple[Array, Array, Array, Any]:
    """Local minimum near `start` by Newton's method with Levenberg-Marquardt damping.

    Returns the point, the Hessian there, whether the last step was below the tolerance, and the
    iterations. A deterministic function of `start`.
    """
    dtype, size = start.dtype, start.size
    tolerance = jnp.finfo(dtype).eps ** 0.6
    identity = jnp.eye(size, dtype=dtype)

    def body(carry: Any) -> Any:
        x, value, grad, hessian, move, damping, _, i = carry
        new_value, new_grad = jax.value_and_grad(function)(x + move)
        new_hessian = jax.hessian(function)(x + move)
        slack = 10 * jnp.finfo(dtype).eps * (1 + jnp.abs(new_value))
        # a Hessian that is not positive definite has a NaN factor, and so a NaN move
        better = (new_value <= value + slack) & jnp.isfinite(new_grad).all()
        small = jnp.linalg.norm(move) <= tolerance * (1 + jnp.linalg.norm(x))
        # a damped step is short without being near the minimum
        done = better & small & (damping == 0) & (i > 0)
        new = (x + move, new_value, new_grad, new_hessian)
        x, value, grad, hessian = (
            jnp.where(better, a, b) for a, b in zip(new, (x, value, grad, hessian), strict=True)
        )
        smaller = jnp.where(damping > 1e-3, damping / 10, 0.0)
        damping = jnp.where(better, smaller, jnp.maximum(10 * damping, 1e-3))
        factor = jnp.linalg.cholesky(hessian + damping * identity)
        return x, value, grad, hessian, -cho_solve((factor, True), grad), damping, done, i + 1

    zeros = jnp.zeros_like(start)
    zero = jnp.zeros((), dtype)
    # the first move is none: the function is evaluated at the start
    carry = (start, zero + jnp.inf, zeros, identity, zeros, zero, jnp.zeros((), bool), 0)
    x, _, _, hessian, _, _, done, i = jax.lax.while_loop(
        lambda carry: ~carry[6] & (carry[7] < MAX_MINIMISE), body, carry
    )
    return x, hessian, done, i


def _newton(move: Callable[[Array], Array], start: Array) -> tuple[Array, Array]:
    """Fixed point of u + move(u) from `start`, and the iterations."""
    tolerance = jnp.finfo(start.dtype).eps ** 0.6

    def body(carry: Any) -> Any:
        u, _, i = carry
        change = move(u)
        small = jnp.linalg.norm(change) <= tolerance * (1 + jnp.linalg.norm(u))
        return u + change, small | ~jnp.isfinite(change).all(), i + 1

    u, _, i = jax.lax.while_loop(
        lambda carry: ~carry[1] & (carry[2] < MAX_NEWTON),
        body,
        (start, jnp.zeros((), bool), jnp.zeros((), jnp.int32)),
    )
    return u, i


def _same(a: Array, b: Array) -> Array:
    tolerance = 100 * jnp.finfo(a.dtype).eps ** 0.5
    return jnp.linalg.norm(a - b) <= tolerance * (1 + jnp.linalg.norm(b))


def _potential(target: Target, z: Array) -> Array:
    return target.potential_energy(target.unravel(z))


def prediction(target: Target, z: Array) -> Array:
    """Means of the observed sites at the flat unconstrained `z`, shape (n,)."""
    assert target.observation is not None
    return target.observation(target.unravel(z))[0]


def _root(covariance: Array) -> Array:
    return jnp.sqrt(covariance) if covariance.ndim == 1 else jnp.linalg.cholesky(covariance)


def _inverse_root(precision: Array) -> Array:
    return _root(1 / precision if precision.ndim == 1 else jnp.linalg.inv(precision))


def _times(scale: Array, v: Array) -> Array:
    return scale * v if scale.ndim == 1 else scale @ v


def _solve(scale: Array, z: Array) -> Array:
    return z / scale if scale.ndim == 1 else solve_triangular(scale, z, lower=True)


def _log_det(scale: Array) -> Array:
    return jnp.log(scale if scale.ndim == 1 else jnp.diag(scale)).sum()
