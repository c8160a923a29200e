"""Metropolis-Hastings on minibatches, exact: TunaMH on Taylor remainders.

The log likelihoods l_i of the data are split at a mode x0 of the posterior,

    l_i(x) = T_i(x) + R_i(x),   T_i the Taylor polynomial of order m at x0 (none for order 0),

the sum of all T_i costs no data, and with bounds

    |R_i(x) - R_i(y)| <= c_i M(x, y),   C = sum_i c_i

a step from x proposes y, draws B ~ Poisson(lam + C M) data, i with probability c_i / C, with
lam = chi (C M)^2, keeps a drawn one with probability a_i / D_i and accepts with

    min(1, p(y) q(y, x) / (p(x) q(x, y)) prod_kept b_i / a_i),   p = prior * exp(sum_i T_i)

    D_i = c_i (lam / C + M),   r_i = R_i(x) - R_i(y)
    "max"  rates:   a_i = D_i - max(-r_i, 0),   b_i = D_i - max(r_i, 0)
    "tuna" rates:   a_i = lam c_i / C + (c_i M + r_i) / 2,   b_i with -r_i

Kept counts are Poisson(a_i) and would be Poisson(b_i) on the way back; since a_i - b_i = r_i, the
ratio of the two laws is exp(-sum_i r_i) prod (b_i / a_i): the likelihood of all the data cancels.
Where x or y lies outside the ball |x - x0| <= radius on which the c_i are bounds, or where B would
be N and more, the ratio of all the data is taken. This choice is symmetric in (x, y).

In the norm of the Laplace approximation, D = y - x, u = x - x0, v = y - x0, n_i = |dl_i| for a
linear predictor, k_m = sup |m-th derivative|:

    order 0   c_i = k_1 n_i     M = |D|
    order 1   c_i = k_2 n_i^2   M = (h(u) + h(v)) / 2,  h(u) = (|D| |u| + |<D, u>|) / 2
    order 2   c_i = k_3 n_i^3   M = |D| (|u|^2 + |u| |v| + |v|^2) / 6

The data drawn per step do not grow with N at order 1 and fall at order 2; at order 0 they buy what
a full-data step buys.

Sources: Zhang, Cooper & De Sa 2020, arXiv 2006.11677 (TunaMH); Yuan & Wang 2024, arXiv 2406.05242
(Tuna-SGLD: a proposal from a second minibatch, which is the same both ways); Prado, Nemeth &
Sherlock 2024, arXiv 2407.19602 ("max" rates, Taylor remainders, delayed acceptance). The bounds M
are derived: |<D, a>| |<D, b>| and the integral of |R_i'| along the segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ppl_ext.kernels.chain import Resumable, run_if
from ppl_ext.kernels.metropolis import (
    ACCEPTANCE,
    MARGIN,
    Coordinates,
    Proposal,
    Tuned,
    acceptance,
    first_step_size,
    log_proposal,
    mean_acceptance,
    proposed,
    truncated,
    tuned,
)
from ppl_ext.kernels.metropolis import adapted as adapted_setting
from ppl_ext.kernels.minibatch import Problem, Table, current, make_table
from ppl_ext.kernels.proximal_imh import minimise
from ppl_ext.target import Array, PyTree

PROPOSALS = ("taylor-mala", "sgld", "barker", "random_walk")

# Noise variance of the log ratio that `chi` is tuned to. Where data drawn are the cost, that is
# where variance * P(accept | variance) is largest; a factor of 0.37 in the acceptance, relative
# to variance 1. At orders 1 and 2 few data are drawn, and noise is avoided.
_NOISE_VARIANCE = {0: 2.38**2, 1: 1.0, 2: 1.0}
_NOISE_FACTOR = {0: 0.37, 1: 1.0, 2: 1.0}
_FIRST_CHI, _LOG_CHI_RANGE = 1e-4, (-25.0, 7.0)


@dataclass(frozen=True)
class Settings:
    """What the user fixes. `None` for `chi`, `step_size`, `target_accept_prob`: found."""

    order: Literal[0, 1, 2] = 1
    proposal: Proposal = "taylor-mala"
    rates: Literal["max", "tuna"] = "max"
    fallback: bool = True
    delayed: bool = False
    chi: float | None = None
    step_size: float | None = None
    target_accept_prob: float | None = None
    grad_size: int = 20
    chunk_size: int = 256


class _FitFields(NamedTuple):
    centre: Array  # (d,) the mode, unconstrained
    whiten: Array  # (d, d) upper: w = whiten (x - centre) is about standard normal
    scale: Array  # (d, d) upper: its inverse
    gradient: Array  # (d,) of the sum of all terms at the centre
    hessian: Array  # (d, d) the same
    radius: Array  # () of the ball on which the bounds hold
    table: Table
    fingerprint: Array  # () of the data it was found for


class Fit(Coordinates, _FitFields):
    """What is found once for each data set, and then kept."""

    __slots__ = ()


class Adaptation(NamedTuple):
    """What warm-up tunes."""

    step_size: Tuned  # posterior standard deviations
    chi: Tuned


class Noise(NamedTuple):
    """The random numbers of one transition, so that a test can feed them."""

    normal: Array  # (d,) of the proposal
    sign: Array  # (d,) uniform, of the Barker proposal
    batch: Array  # (grad_size,) data of the `sgld` proposal
    first: Array  # () uniform, of the first stage of delayed acceptance
    last: Array  # () uniform, of the acceptance
    number: Callable[[Array], Array]  # Poisson rate -> number of data to draw
    chunk: Callable[[Array], tuple[Array, Array]]  # number -> (positions, uniforms), (chunk_size,)


class Info(NamedTuple):
    """What happened in one transition."""

    accept_prob: Array  # () of the proposal
    num_drawn: Array  # () data drawn, repeats counted; N when all were taken
    num_kept: Array  # () of them
    noise_variance: Array  # () estimate of the variance of the log ratio
    fallback: Array  # () whether all data were taken
    num_violations: Array  # () drawn data whose term moved more than its bound
    diverging: Array  # () whether the proposal has no density (0 or NaN)


class _Fields(NamedTuple):
    i: Array  # () transitions made
    z: PyTree  # unconstrained sites
    accept_prob: Array  # () of the last proposal
    mean_accept_prob: Array  # () since the last change of phase
    num_drawn: Array  # () data drawn by the last transition
    num_kept: Array  # () of them
    noise_variance: Array  # () of the last log ratio
    fallback: Array  # () whether the last transition took all data
    num_violations: Array  # () of all transitions so far; 0, or the draws are not exact
    diverging: Array  # () whether the last proposal had no density
    adapt_state: Adaptation
    fit: Fit
    stale: Array  # () whether `fit` may belong to other data
    rng_key: Array


class State(Resumable, _Fields):
    """Chain state. Field names are those that NumPyro and ArviZ know."""

    __slots__ = ()

    @property
    def step_size(self) -> Array:
        """Of the proposal, in posterior standard deviations."""
        return self.adapt_state.step_size.value

    @property
    def chi(self) -> Array:
        """lam / (C M)^2."""
        return self.adapt_state.chi.value


def init(key: Array, x: Array | None, problem: Problem, settings: Settings, fit: Fit) -> State:
    """State at `x`, shape (d,), or at a draw of the Laplace approximation."""
    dtype, size = fit.centre.dtype, fit.centre.size
    key, key_start = jax.random.split(key)
    if x is None:
        x = fit.from_standard(jax.random.normal(key_start, (size,), dtype))
    step_size = settings.step_size or first_step_size(settings.proposal, size)
    chi = _FIRST_CHI if settings.chi is None else settings.chi
    zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    return State(
        i=none,
        z=problem.unravel(x.astype(dtype)),
        accept_prob=zero,
        mean_accept_prob=zero,
        num_drawn=none,
        num_kept=none,
        noise_variance=zero,
        fallback=jnp.zeros((), bool),
        num_violations=none,
        diverging=jnp.zeros((), bool),
        adapt_state=Adaptation(tuned(step_size, dtype), tuned(chi, dtype)),
        fit=fit,
        stale=jnp.zeros((), bool),
        rng_key=key,
    )


def step(state: State, problem: Problem, settings: Settings, num_warmup: int) -> State:
    """One transition, with adaptation while `state.i < num_warmup`."""
    key, key_noise = jax.random.split(state.rng_key)
    x = problem.ravel(state.z)
    fit = current_fit(state, state.stale, problem, settings)
    noise = draw_noise(key_noise, fit, problem, settings)
    x, info = transition(noise, x, problem, settings, fit, state.step_size, state.chi)
    i = state.i + 1
    adapt = adapted(state.adapt_state, info, i, settings, num_warmup)
    return State(
        i=i,
        z=problem.unravel(x),
        accept_prob=info.accept_prob,
        mean_accept_prob=mean_acceptance(state.mean_accept_prob, info.accept_prob, i, num_warmup),
        num_drawn=info.num_drawn,
        num_kept=info.num_kept,
        noise_variance=info.noise_variance,
        fallback=info.fallback,
        num_violations=state.num_violations + info.num_violations,
        diverging=info.diverging,
        adapt_state=adapt,
        fit=fit,
        stale=jnp.zeros_like(state.stale),
        rng_key=key,
    )


def draw_noise(key: Array, fit: Fit, problem: Problem, settings: Settings) -> Noise:
    """Random numbers of one transition."""
    keys = jax.random.split(key, 7)
    dtype, size = fit.centre.dtype, fit.centre.size
    chunk_size = settings.chunk_size
    top = jnp.maximum(fit.table.cumulative[-1], 1)

    def chunk(k: Array) -> tuple[Array, Array]:
        key_position, key_keep = jax.random.split(jax.random.fold_in(keys[6], k))
        position = jax.random.randint(key_position, (chunk_size,), 0, top)
        return position, jax.random.uniform(key_keep, (chunk_size,), dtype)

    return Noise(
        normal=jax.random.normal(keys[0], (size,), dtype),
        sign=jax.random.uniform(keys[1], (size,), dtype),
        batch=jax.random.randint(keys[2], (settings.grad_size,), 0, problem.size),
        first=jax.random.uniform(keys[3], dtype=dtype),
        last=jax.random.uniform(keys[4], dtype=dtype),
        number=lambda rate: jax.random.poisson(keys[5], rate, dtype=jnp.int32),
        chunk=chunk,
    )


def transition(
    noise: Noise,
    x: Array,
    problem: Problem,
    settings: Settings,
    fit: Fit,
    step_size: Array,
    chi: Array,
) -> tuple[Array, Info]:
    """Propose from `x`, shape (d,), and accept or stay."""
    proposal = settings.proposal
    gradient = _gradient(noise.batch, problem, settings, fit)
    w = fit.to_standard(x)
    gradient_w = gradient(w)
    v = proposed(noise.normal, noise.sign, w, gradient_w, step_size, proposal)
    y = fit.from_standard(v)
    back = log_proposal(v, w, gradient(v), step_size, proposal)
    forth = log_proposal(w, v, gradient_w, step_size, proposal)
    base = jax.vmap(_base(problem, settings, fit))(jnp.stack([x, y]))
    cheap = base[1] - base[0] + back - forth

    gap = distance(w, v, settings.order)
    bound = fit.table.total * gap
    rate = bound * (1 + chi * bound)
    inside = jnp.maximum(jnp.linalg.norm(w), jnp.linalg.norm(v)) <= fit.radius
    if settings.fallback:
        # written so that a rate of NaN takes all data
        full = ~(inside & (rate < problem.size))
    else:
        full = jnp.zeros((), bool)
        cheap = jnp.where(inside, cheap, -jnp.inf)
    first = acceptance(cheap)
    go = (noise.first < first) if settings.delayed else jnp.ones((), bool)

    rate = jnp.where(go & ~full, rate, 0.0)
    kept_ratio, num_drawn, num_kept, variance, violations = minibatch_log_ratio(
        noise, x, y, gap, chi, rate, problem, settings, fit
    )

    def everything(at: Any) -> Any:
        x, y, first, _ = at
        data = problem.after(first)
        all_of_them = jnp.arange(problem.size)
        difference, _ = remainder_difference(y, x, all_of_them, data, settings, fit)
        return x, y, first, jnp.sum(difference)

    start = (x, y, jnp.zeros((), jnp.int32), jnp.zeros((), w.dtype))
    *_, full_ratio = run_if(full & go, everything, start)
    log_ratio = kept_ratio + full_ratio
    if settings.delayed:
        prob = acceptance(log_ratio)
        accepted, prob = go & (noise.last < prob), first * prob
    else:
        prob = acceptance(cheap + log_ratio)
        accepted = noise.last < prob
    return jnp.where(accepted, y, x), Info(
        accept_prob=prob,
        num_drawn=jnp.where(full & go, problem.size, num_drawn),
        num_kept=jnp.where(full & go, problem.size, num_kept),
        noise_variance=variance,
        fallback=full,
        num_violations=violations,
        diverging=~(cheap + log_ratio > -jnp.inf),
    )


def minibatch_log_ratio(
    noise: Noise,
    x: Array,
    y: Array,
    gap: Array,
    chi: Array,
    rate: Array,
    problem: Problem,
    settings: Settings,
    fit: Fit,
) -> tuple[Array, Array, Array, Array, Array]:
    """Sum of log(b_i / a_i) over the kept data; data drawn, kept, variance, violations.

    Any number of data, `chunk_size` at a time: a limit on the number drawn would be a bias.
    """
    size = settings.chunk_size
    count = noise.number(rate)
    spread = 1 + chi * fit.table.total * gap

    def body(carry: Any) -> Any:
        k, total, kept, variance, violations = carry
        position, uniform = noise.chunk(k)
        drawn = k * size + jnp.arange(size) < count
        index = fit.table.find(position)
        r, error = remainder_difference(x, y, index, problem, settings, fit)
        bound = fit.table.bound(index) * gap
        broken = drawn & (jnp.abs(r) > bound + error)
        r = jnp.clip(r, -bound, bound)
        dominating = bound * spread
        if settings.rates == "max":
            a, b = dominating - jnp.maximum(-r, 0), dominating - jnp.maximum(r, 0)
        else:
            a, b = dominating - (bound - r) / 2, dominating - (bound + r) / 2
        # written so that a term of NaN is kept, and rejects
        keep = drawn & ~(uniform * dominating >= a)
        t = jnp.where(keep, jnp.log(b) - jnp.log(a), 0.0)
        sums = (total + t.sum(), kept + keep.sum(dtype=jnp.int32), variance + (t**2).sum())
        return k + 1, *sums, violations + broken.sum(dtype=jnp.int32)

    zero, none = jnp.zeros((), x.dtype), jnp.zeros((), jnp.int32)
    _, total, kept, variance, violations = jax.lax.while_loop(
        lambda carry: carry[0] * size < count, body, (none, zero, none, zero, none)
    )
    return total, count, kept, variance, violations


def distance(w: Array, v: Array, order: int) -> Array:
    """M of the module's docstring, in standard coordinates; symmetric."""
    move = jnp.linalg.norm(v - w)
    if order == 0:
        return move
    far = jnp.linalg.norm(w), jnp.linalg.norm(v)
    if order == 1:
        along = jnp.abs((v - w) @ w) + jnp.abs((v - w) @ v)
        return (move * (far[0] + far[1]) + along) / 4
    return move * (far[0] ** 2 + far[0] * far[1] + far[1] ** 2) / 6


def remainder_difference(
    x: Array, y: Array, index: Array, problem: Problem, settings: Settings, fit: Fit
) -> tuple[Array, Array]:
    """R_i(x) - R_i(y) of the data `index`, and its rounding error."""
    terms = lambda z: problem.log_terms(z, index)  # noqa: E731
    at_x, at_y = jax.vmap(terms)(jnp.stack([x, y]))
    size = jnp.abs(at_x) + jnp.abs(at_y)
    taylor = jnp.zeros_like(at_x)
    if settings.order > 0:
        # of the difference of the two polynomials: the terms at the mode cancel before rounding
        slope = lambda z: jax.jvp(terms, (z,), (x - y,))[1]  # noqa: E731
        if settings.order == 1:
            taylor = slope(fit.centre)
        else:
            middle = (x + y) / 2 - fit.centre
            linear, quadratic = jax.jvp(slope, (fit.centre,), (middle,))
            taylor = linear + quadratic
            size = size + jnp.abs(linear)
    return at_x - at_y - taylor, 16 * jnp.finfo(x.dtype).eps * (size + jnp.abs(taylor))


def adapted(
    state: Adaptation, info: Info, i: Array, settings: Settings, num_warmup: int
) -> Adaptation:
    """Step size and `chi` after warm-up transition `i`."""
    step_size, chi = state
    if settings.step_size is None:
        target = settings.target_accept_prob
        if target is None:
            target = ACCEPTANCE[settings.proposal] * _NOISE_FACTOR[settings.order]
        step_size = adapted_setting(step_size, info.accept_prob - target, i, num_warmup)
    if settings.chi is None:
        excess = jnp.clip(info.noise_variance / _NOISE_VARIANCE[settings.order] - 1, -1, 1)
        # where all data were taken there is no noise to learn from
        excess = jnp.where(info.fallback, 0.0, excess)
        chi = adapted_setting(chi, excess, i, num_warmup, span=_LOG_CHI_RANGE)
    return Adaptation(step_size, chi)


# --- mode, metric and bounds --------------------------------------------------------------------


def find_fit(start: Array, problem: Problem, settings: Settings) -> Fit:
    """Mode of the posterior near `start`, shape (d,), and what is computed there, once."""
    dtype = jnp.result_type(start, jnp.float32)
    mode, hessian, _, _ = minimise(lambda x: -problem.log_density(x), start.astype(dtype))
    return fit_at(mode, hessian, problem, settings)


def fit_at(mode: Array, precision: Array, problem: Problem, settings: Settings) -> Fit:
    """`Fit` for any centre, shape (d,), and metric, shape (d, d): all of them are exact."""
    size = mode.size
    whiten = jnp.linalg.cholesky(precision).T
    scale = jax.scipy.linalg.solve_triangular(whiten, jnp.eye(size, dtype=mode.dtype))
    everything = jnp.arange(problem.size)
    terms = lambda x: jnp.sum(problem.log_terms(x, everything))  # noqa: E731
    gradient = jax.grad(terms)(mode) if settings.order > 0 else jnp.zeros_like(mode)
    hessian = jax.hessian(terms)(mode) if settings.order > 1 else jnp.zeros_like(precision)
    # bounds that hold everywhere, or else on a ball
    radius = jnp.asarray(math.sqrt(size) + MARGIN, mode.dtype)
    # what does not depend on the radius is computed once
    both = jnp.stack([jnp.full_like(radius, jnp.inf), radius])
    forever, local = jax.vmap(lambda radius: problem.bounds(mode, scale, radius))(both)
    everywhere = jnp.isfinite(forever).all()
    return Fit(
        centre=mode,
        whiten=whiten,
        scale=scale,
        gradient=gradient,
        hessian=hessian,
        radius=jnp.where(everywhere, jnp.inf, radius),
        table=make_table(jnp.where(everywhere, forever, local).astype(mode.dtype)),
        fingerprint=problem.fingerprint(),
    )


def refresh(state: State, problem: Problem, settings: Settings) -> State:
    """The same point, with everything found again if the problem's data are others."""
    fit = current_fit(state, jnp.ones_like(state.stale), problem, settings)
    return state._replace(fit=fit, stale=jnp.zeros_like(state.stale))


def current_fit(state: State, stale: Array, problem: Problem, settings: Settings) -> Fit:
    """The state's fit, or where `stale` and for other data a new one."""
    find = lambda x, problem: find_fit(x, problem, settings)  # noqa: E731
    return current(stale, problem.ravel(state.z), state.fit, problem, find)


# --- small parts --------------------------------------------------------------------------------


def _gradient(
    batch: Array, problem: Problem, settings: Settings, fit: Fit
) -> Callable[[Array], Array]:
    """What stands for the gradient of the log density, in standard coordinates."""
    if settings.proposal == "random_walk":
        return jnp.zeros_like
    if settings.proposal != "sgld":
        # of the Laplace approximation
        return lambda w: truncated(-w)
    base = _base(problem, settings, fit)

    def log_density(w: Array) -> Array:
        x = fit.from_standard(w)
        remainder, _ = remainder_difference(x, fit.centre, batch, problem, settings, fit)
        return base(x) + problem.size / settings.grad_size * jnp.sum(remainder)

    return lambda w: truncated(jax.grad(log_density)(w))


def _base(problem: Problem, settings: Settings, fit: Fit) -> Callable[[Array], Array]:
    """Log density outside the plate plus the sum of the Taylor polynomials."""

    def base(x: Array) -> Array:
        value = problem.log_base(x)
        if settings.order > 0:
            value = value + fit.gradient @ (x - fit.centre)
        if settings.order > 1:
            value = value + (x - fit.centre) @ fit.hessian @ (x - fit.centre) / 2
        return value

    return base
