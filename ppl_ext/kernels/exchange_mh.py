"""The exchange algorithm: exact posteriors of likelihoods with an unknown normalising constant.

For a likelihood f(x; t) / Z(t) a step from t proposes u, draws data y from f(.; u) / Z(u), and
accepts with

    min(1, r(t, u; y)),   r = p(u) f(x; u) f(y; t) q(u, t) / (p(t) f(x; t) f(y; u) q(t, u))

in which all Z cancel (Murray, Ghahramani & MacKay 2006). With m > 1 draws, averaging r over them
would be biased; what is exact is to toss a coin (Andrieu, Yildirim, Doucet & Chopin 2020):

    heads: y_1 ... y_m at u,                      accept with min(1, mean_k r(t, u; y_k))
    tails: y_1 at u, but y_2 ... y_m at t,        accept with min(1, 1 / mean_k r(u, t; y_k))

Proposals may use any deterministic drift. "mala" and "barker" take the gradient of

    log p(t) + log f(x; t) - log mean_k f(y_k; t) / f(y_k; t*)

with a pool of draws y_k at a point t*, which is fixed: Geyer's Monte Carlo likelihood. Where the
likelihood is a product with constants of their own (rows, sites), so is the mean.

The draws add noise of variance D' F D to the log ratio, D = u - t, F the Fisher information. On a
normal posterior with a weak prior this lowers the best scale of a random walk from 2.38 / sqrt(d)
standard deviations to 2.38 / sqrt(2 d), and makes that of gradient proposals, with D near any size
otherwise, 2.38 / sqrt(d); acceptance tends to 0.23 for all of them, and step sizes are tuned to it.

At the start t* is found by stochastic approximation, Newton's method with simulated scores and
Fisher information. Half-way through warm-up, centre and metric become those of the draws so far,
and a new pool is drawn there; then they are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ppl_ext.kernels.chain import run_if
from ppl_ext.kernels.metropolis import (
    Coordinates,
    Tuned,
    acceptance,
    log_proposal,
    mean_acceptance,
    proposed,
    truncated,
    tuned,
)
from ppl_ext.kernels.metropolis import adapted as adapted_setting
from ppl_ext.target import Array, PyTree

PROPOSALS = ("random_walk", "mala", "barker")

# standard deviations times sqrt(d)
_FIRST_STEP = {"random_walk": 2.38 / math.sqrt(2), "mala": 1.9, "barker": 1.9}

# stochastic approximation: rounds, and draws in each
_ROUNDS, _BATCH = 40, 32
# standard deviations that a round goes at most, at first
_REACH = 2.0

# draws of warm-up that weigh as much as the approximation at the start, for each coordinate
_PRIOR_DRAWS = 50


class Draw(NamedTuple):
    """Simulated data."""

    stats: PyTree  # what log_f reads of them
    effort: Array  # () work done, in the simulator's units
    overflow: Array  # () simulations that reached their limit


class Problem(NamedTuple):
    """A posterior: `log_tractable(x)` plus the sum of `log_f(x, observed)` less its constants.

    Positions are flat unconstrained vectors, shape (d,).
    """

    log_tractable: Callable[[Array], Array]  # () prior with its Jacobian, and other sites
    log_f: Callable[[Array, PyTree], PyTree]  # (x, stats) -> one number for each constant
    simulate: Callable[[Array, Array], Draw]  # (x, key) -> data like those observed
    observed: PyTree  # statistics of the data
    ravel: Callable[[PyTree], Array]
    unravel: Callable[[Array], PyTree]

    def total_log_f(self, x: Array, stats: PyTree) -> Array:
        """Sum of `log_f`."""
        leaves = jax.tree.leaves(self.log_f(x, stats))
        return sum((jnp.sum(leaf) for leaf in leaves), jnp.zeros((), x.dtype))

    def log_unnormalised(self, x: Array) -> Array:
        """Log density without the normalising constants."""
        return self.log_tractable(x) + self.total_log_f(x, self.observed)


@dataclass(frozen=True)
class Settings:
    """What the user fixes. `None` for `step_size`, `target_accept_prob`: found."""

    proposal: Literal["random_walk", "mala", "barker"] = "random_walk"
    pool: int = 200
    num_aux: int = 1
    step_size: float | None = None
    target_accept_prob: float | None = None


class _FitFields(NamedTuple):
    centre: Array  # (d,) unconstrained
    whiten: Array  # (d, d): w = whiten (x - centre) is about standard normal
    scale: Array  # (d, d): its inverse
    fisher: Array  # (d, d) Fisher information of the intractable likelihoods at the centre
    pool: PyTree  # statistics of draws at the centre, (pool, ...)
    pool_log_f: PyTree  # their `log_f` at the centre
    observed: PyTree  # statistics of the data it was found for


class Fit(Coordinates, _FitFields):
    """What is found at the start and half-way through warm-up."""

    __slots__ = ()


class Adaptation(NamedTuple):
    """What warm-up tunes, and moments of its draws."""

    step_size: Tuned  # posterior standard deviations
    num_draws: Array  # () in the moments
    mean: Array  # (d,)
    spread: Array  # (d, d) sum of squared deviations


class Noise(NamedTuple):
    """The random numbers of one transition, so that a test can feed them."""

    normal: Array  # (d,) of the proposal
    sign: Array  # (d,) uniform, of the Barker proposal
    coin: Array  # () uniform, which way several draws are taken
    last: Array  # () uniform, of the acceptance
    draw: Callable[[Array], Draw]  # positions (num_aux, d) -> data at each, (num_aux, ...)


class Info(NamedTuple):
    """What happened in one transition."""

    accept_prob: Array  # () of the proposal
    aux_log_ratio: Array  # () what the draws add to the log ratio, an estimate of log Z(t) / Z(u)
    sim_effort: Array  # () of all draws
    noise_variance: Array  # () of the log ratio, by the Fisher information at the centre
    num_overflow: Array  # () simulations that reached their limit
    diverging: Array  # () whether the proposal has no density (0 or NaN)


class State(NamedTuple):
    """Chain state. Field names are those that NumPyro and ArviZ know."""

    i: Array  # () transitions made
    z: PyTree  # unconstrained sites
    accept_prob: Array  # () of the last proposal
    mean_accept_prob: Array  # () since the last change of phase
    aux_log_ratio: Array  # () of the last transition
    sim_effort: Array  # () of the last transition
    noise_variance: Array  # () of the last log ratio
    num_overflow: Array  # () of all transitions after warm-up; 0, or the draws are not exact
    diverging: Array  # () whether the last proposal had no density
    adapt_state: Adaptation
    fit: Fit
    rng_key: Array

    @property
    def step_size(self) -> Array:
        """Of the proposal, in posterior standard deviations."""
        return self.adapt_state.step_size.value


def init(key: Array, x: Array, problem: Problem, settings: Settings, *, stay: bool = True) -> State:
    """State at `x`, shape (d,), or unless `stay` at a draw of the approximation found near."""
    dtype = jnp.result_type(x, jnp.float32)
    x, size = x.astype(dtype), x.size
    key, key_fit, key_start = jax.random.split(key, 3)
    identity = jnp.eye(size, dtype=dtype)
    fit = find_fit(key_fit, x, identity, jnp.asarray(_ROUNDS), problem, settings)
    if not stay:
        # from far away all of warm-up would go by on the way
        drawn = fit.from_standard(jax.random.normal(key_start, (size,), dtype))
        x = jnp.where(jnp.isfinite(problem.log_unnormalised(drawn)), drawn, x)
    step_size = settings.step_size or _FIRST_STEP[settings.proposal] / math.sqrt(size)
    zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    return State(
        i=none,
        z=problem.unravel(x),
        accept_prob=zero,
        mean_accept_prob=zero,
        aux_log_ratio=zero,
        sim_effort=none,
        noise_variance=zero,
        num_overflow=none,
        diverging=jnp.zeros((), bool),
        adapt_state=Adaptation(tuned(step_size, dtype), none, jnp.zeros_like(x), 0 * identity),
        fit=fit,
        rng_key=key,
    )


def step(state: State, problem: Problem, settings: Settings, num_warmup: int) -> State:
    """One transition, with adaptation while `state.i < num_warmup`."""
    key, key_fit, key_noise = jax.random.split(state.rng_key, 3)
    x, adapt = problem.ravel(state.z), state.adapt_state
    half = (state.i == num_warmup // 2) & (state.i > 1)
    # any fit is exact: for new data, which a continued run may bring, a new one is faster
    new_data = _differ(problem.observed, state.fit.observed)

    def again(at: Any) -> Any:
        key, x, adapt, fit, new_data = at
        centre, precision = moments(adapt, fit)
        start = jnp.where(new_data, x, centre)
        precision = jnp.where(new_data, jnp.eye(x.size, dtype=x.dtype), precision)
        rounds = jnp.where(new_data, _ROUNDS, 0)
        new = find_fit(key, start, precision, rounds, problem, settings)
        return key, x, adapt, jax.tree.map(lambda a, b: a.astype(b.dtype), new, fit), new_data

    fit = run_if(half | new_data, again, (key_fit, x, adapt, state.fit, new_data))[3]
    noise = draw_noise(key_noise, x, problem, settings)
    x, info = transition(noise, x, problem, settings, fit, state.step_size)
    i = state.i + 1
    return State(
        i=i,
        z=problem.unravel(x),
        accept_prob=info.accept_prob,
        mean_accept_prob=mean_acceptance(state.mean_accept_prob, info.accept_prob, i, num_warmup),
        aux_log_ratio=info.aux_log_ratio,
        sim_effort=info.sim_effort,
        noise_variance=info.noise_variance,
        num_overflow=jnp.where(i > num_warmup, state.num_overflow + info.num_overflow, 0),
        diverging=info.diverging,
        adapt_state=adapted(adapt, x, info, i, settings, num_warmup),
        fit=fit,
        rng_key=key,
    )


def draw_noise(key: Array, x: Array, problem: Problem, settings: Settings) -> Noise:
    """Random numbers of one transition."""
    key_normal, key_uniform, key_data = jax.random.split(key, 3)
    dtype, count = x.dtype, settings.num_aux
    uniform = jax.random.uniform(key_uniform, (x.size + 2,), dtype)

    def draw(positions: Array) -> Draw:
        if count == 1:
            return jax.tree.map(lambda leaf: leaf[None], problem.simulate(positions[0], key_data))
        return jax.vmap(problem.simulate)(positions, jax.random.split(key_data, count))

    return Noise(
        normal=jax.random.normal(key_normal, x.shape, dtype),
        sign=uniform[2:],
        coin=uniform[0],
        last=uniform[1],
        draw=draw,
    )


def transition(
    noise: Noise, x: Array, problem: Problem, settings: Settings, fit: Fit, step_size: Array
) -> tuple[Array, Info]:
    """Propose from `x`, shape (d,), and accept or stay."""
    proposal, count = settings.proposal, settings.num_aux
    gradient = _gradient(problem, settings, fit)
    w = fit.to_standard(x)
    gradient_w = gradient(w)
    v = proposed(noise.normal, noise.sign, w, gradient_w, step_size, proposal)
    y = fit.from_standard(v)
    back = log_proposal(v, w, gradient(v), step_size, proposal)
    forth = log_proposal(w, v, gradient_w, step_size, proposal)

    tails = (noise.coin >= 0.5) & (count > 1)
    here = (tails & (jnp.arange(count) > 0))[:, None]
    drawn = noise.draw(jnp.where(here, x, y))
    # log f(y_k; x) / f(y_k; y)
    each = jax.vmap(lambda s: problem.total_log_f(x, s) - problem.total_log_f(y, s))(drawn.stats)
    sign = jnp.where(tails, -1, 1)
    auxiliary = sign * (jax.nn.logsumexp(sign * each) - math.log(count))

    target = problem.log_unnormalised(y) - problem.log_unnormalised(x)
    log_ratio = target + auxiliary + back - forth
    overflow = jnp.sum(drawn.overflow, dtype=jnp.int32)
    prob = jnp.where(overflow > 0, 0.0, acceptance(log_ratio))
    move = y - x
    return jnp.where(noise.last < prob, y, x), Info(
        accept_prob=prob,
        aux_log_ratio=auxiliary,
        sim_effort=jnp.sum(drawn.effort, dtype=jnp.int32),
        noise_variance=move @ fit.fisher @ move / count,
        num_overflow=overflow,
        diverging=~(log_ratio > -jnp.inf),
    )


def _gradient(problem: Problem, settings: Settings, fit: Fit) -> Callable[[Array], Array]:
    """Of the Monte Carlo log posterior, in standard coordinates."""
    if settings.proposal == "random_walk":
        return jnp.zeros_like

    def log_density(w: Array) -> Array:
        x = fit.from_standard(w)
        log_f = jax.vmap(problem.log_f, in_axes=(None, 0))(x, fit.pool)
        ratios = jax.tree.map(jnp.subtract, log_f, fit.pool_log_f)
        constants = [jnp.sum(jax.nn.logsumexp(r, 0)) for r in jax.tree.leaves(ratios)]
        return problem.log_unnormalised(x) - sum(constants)

    def gradient(w: Array) -> Array:
        found = jax.grad(log_density)(w)
        # where there is none, a random walk
        found = jnp.where(jnp.isfinite(found).all(), found, 0)
        return truncated(found)

    return gradient


# --- adaptation ---------------------------------------------------------------------------------


def target_acceptance(settings: Settings, size: int) -> float:
    """Acceptance at the step size with the largest mean square jump.

    Measured on a normal posterior of `size` dimensions with a flat prior, in 1 to 20 dimensions
    with 1 and 4 draws, to 0.03.
    """
    if settings.target_accept_prob is not None:
        return settings.target_accept_prob
    small, many = (0.21, 0.08) if settings.proposal == "random_walk" else (0.27, 0.17)
    return 0.23 + small / size + many * (1 - 1 / settings.num_aux)


def adapted(
    state: Adaptation, x: Array, info: Info, i: Array, settings: Settings, num_warmup: int
) -> Adaptation:
    """Step size and moments after warm-up transition `i`."""
    step_size = state.step_size
    if settings.step_size is None:
        error = info.accept_prob - target_acceptance(settings, x.size)
        # the metric changes half-way
        step_size = adapted_setting(step_size, error, i, num_warmup, restart=True)
    # not the way from the start
    counted = (i > num_warmup // 8) & (i <= num_warmup)
    count = state.num_draws + counted
    deviation = jnp.where(counted, x - state.mean, 0)
    mean = state.mean + deviation / jnp.maximum(count, 1)
    return Adaptation(step_size, count, mean, state.spread + jnp.outer(deviation, x - mean))


def moments(adapt: Adaptation, fit: Fit) -> tuple[Array, Array]:
    """Mean and inverse covariance of the draws, shrunk towards the approximation."""
    count = adapt.num_draws.astype(adapt.mean.dtype)
    weight = count / (count + _PRIOR_DRAWS * adapt.mean.size)
    covariance = adapt.spread / jnp.maximum(count - 1, 1)
    covariance = weight * covariance + (1 - weight) * fit.scale @ fit.scale.T
    centre = weight * adapt.mean + (1 - weight) * fit.centre
    return centre, jnp.linalg.inv(covariance)


def find_fit(
    key: Array,
    start: Array,
    precision: Array,
    rounds: Array,
    problem: Problem,
    settings: Settings,
) -> Fit:
    """Centre and metric by `rounds` of stochastic approximation from a guess, and a pool there."""
    score = jax.grad(problem.total_log_f)
    # in batches: all at once would not fit into memory, one by one is slow
    batches = -(-settings.pool // _BATCH)

    def scores(x: Array, key: Array) -> tuple[PyTree, Array]:
        drawn = jax.vmap(problem.simulate, (None, 0))(x, jax.random.split(key, _BATCH))
        return drawn.stats, jax.vmap(score, (None, 0))(x, drawn.stats)

    def improved(guess: _Guess, found: Array, j: Array) -> _Guess:
        x = guess.x
        gain = 1 / jnp.maximum(j + 2 - rounds // 2, 1).astype(x.dtype)
        fisher = guess.fisher + jnp.maximum(gain, 0.2) * (covariance(found) - guess.fisher)
        slope = jax.grad(problem.log_unnormalised)(x) - found.mean(0)
        curvature = _positive(fisher - jax.hessian(problem.log_tractable)(x))
        move = gain * jnp.linalg.solve(curvature, slope)
        # at most `reach` standard deviations, and one unit
        length = jnp.sqrt(move @ curvature @ move) / guess.reach
        move = move / jnp.maximum(jnp.maximum(length, jnp.linalg.norm(move)), 1)
        # farther while the moves go one way: many data put a start a hundred of them away
        onward = move @ curvature @ guess.move > 0
        reach = jnp.where(onward, 2 * guess.reach, _REACH)
        new = _Guess(x + move, fisher, curvature, move, reach)
        good = (j < rounds) & jnp.isfinite(new.x).all() & jnp.isfinite(curvature).all()
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, guess)

    def turn(j: Array, carry: tuple[_Guess, Any]) -> tuple[_Guess, Any]:
        guess, pool = carry
        drawn = scores(guess.x, jax.random.fold_in(key, j))
        # what the rounds write is written over
        slot = jnp.maximum(j - rounds, 0)
        pool = jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), pool, drawn)
        return improved(guess, drawn[1], j), pool

    empty = jax.tree.map(
        lambda leaf: jnp.zeros((batches, *leaf.shape), leaf.dtype),
        jax.eval_shape(scores, start, key),
    )
    none = jnp.zeros_like(start)
    reach = jnp.asarray(_REACH, start.dtype)
    guess = _Guess(start, jnp.zeros_like(precision), precision, none, reach)
    guess, drawn = jax.lax.fori_loop(0, rounds + batches, turn, (guess, empty))
    centre = guess.x
    pool, found = jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: settings.pool], drawn
    )
    precision = _positive(guess.precision)
    whiten = jnp.linalg.cholesky(precision).T
    return Fit(
        centre=centre,
        whiten=whiten,
        scale=jnp.linalg.inv(whiten),
        fisher=covariance(found),
        pool=pool,
        pool_log_f=jax.vmap(problem.log_f, in_axes=(None, 0))(centre, pool),
        observed=problem.observed,
    )


class _Guess(NamedTuple):
    """What stochastic approximation improves."""

    x: Array  # (d,)
    fisher: Array  # (d, d) Fisher information
    precision: Array  # (d, d) of the posterior
    move: Array  # (d,) the last one
    reach: Array  # () standard deviations that the next may go


def covariance(rows: Array) -> Array:
    """Of the rows of a matrix, (n, d) -> (d, d)."""
    centred = rows - rows.mean(0)
    return centred.T @ centred / (rows.shape[0] - 1)


def _positive(matrix: Array) -> Array:
    """The symmetric matrix with its eigenvalues made positive."""
    values, vectors = jnp.linalg.eigh((matrix + matrix.T) / 2)
    values = jnp.abs(values)
    values = jnp.maximum(values, jnp.maximum(1e-5 * values.max(), 1e-6))
    return (vectors * values) @ vectors.T


def _differ(a: PyTree, b: PyTree) -> Array:
    """Whether statistics differ by more than rounding."""
    same = jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True), a, b)
    return ~jnp.stack(jax.tree.leaves(same)).all()
