"""Metropolis-Hastings on minibatches, exact, with a minibatch that also shapes the proposal.

With constants low_i <= l_i(x) <= low_i + M_i on a set K of points, L = sum_i M_i, and a constant
lam, a step from x draws a minibatch before it proposes: B ~ Poisson(lam + L) data, i with
probability M_i / L, each kept with probability rate_i(x) / (lam M_i / L + M_i). The kept counts are

    s_i ~ Poisson(rate_i(x)),   rate_i(x) = lam M_i / L + l_i(x) - low_i

Given s, the density of x is h_s(x) = p(x) prod_i rate_i(x)^s_i, p all that is no datum: the
likelihood of all the data cancels. On h_s a Metropolis-Hastings step is made, with its gradient

    g_s(x) = grad log p(x) + sum_i s_i grad l_i(x) / rate_i(x)

    min(1, h_s(y) q_s(y, x) / (h_s(x) q_s(x, y)))

Random walk: PoissonMH. MALA and Barker proposals with g_s: Poisson-MALA and Poisson-Barker.

Two ways to the constants, both in the coordinates w of the Laplace approximation:

    ball    K = {|w| <= radius},   low_i = l_i(centre) - c_i radius,   M_i = 2 c_i radius
    local   z ~ N(w, tau^2), the step is rejected unless |w - z|, |v - z| <= rho, v the proposal,
            low_i = l_i(z) - c_i rho,   M_i = 2 c_i rho

with |l_i(x) - l_i(y)| <= c_i |w - v|; or low_i and high_i themselves. In the local form the law of
z adds (|w - z|^2 - |v - z|^2) / (2 tau^2) to the log ratio, and needs no constant: whether the step
is rejected is symmetric in w and v.

Where bounds hold on a ball alone, each step inside takes all the data with a small probability, and
each step outside does; the probabilities enter the ratio. Where B would be N and more on average,
all steps take all data. lam, L and these probabilities do not depend on the chain.

Sources: Zhang & De Sa 2019, arXiv 1911.09771 (PoissonMH); Yuan & Wang 2024, arXiv 2406.05242,
algorithms 3 and 4 (locally balanced proposals). The local form is derived: z is one more auxiliary
variable.
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
    Tuned,
    acceptance,
    adapted,
    first_step_size,
    log_proposal,
    mean_acceptance,
    proposed,
    truncated,
    tuned,
)
from ppl_ext.kernels.minibatch import Problem, Table, current, make_table
from ppl_ext.kernels.proximal_imh import minimise
from ppl_ext.target import Array, PyTree

PROPOSALS = ("random_walk", "barker", "mala")

# noise variance of the log ratio that `lam` is tuned to
_NOISE_VARIANCE = 1.0

# of the steps inside a ball of bounds, those that take all data
_FULL_SHARE = 0.01

# standard deviations tau of the local centre: rho / (sqrt(d) + this)
_LOCAL_MARGIN = 3.0


@dataclass(frozen=True)
class Settings:
    """What the user fixes. `None` for `lam`, `step_size`, `target_accept_prob`: found."""

    proposal: Literal["random_walk", "barker", "mala"] = "barker"
    local: float | None = None
    lam: float | None = None
    fallback: bool = True
    step_size: float | None = None
    target_accept_prob: float | None = None
    chunk_size: int = 256


class _FitFields(NamedTuple):
    centre: Array  # (d,) the mode, unconstrained
    whiten: Array  # (d, d) upper: w = whiten (x - centre) is about standard normal
    scale: Array  # (d, d) upper: its inverse
    radius: Array  # () of the ball K; infinite where the bounds hold everywhere
    low: Array  # (N,) lower bounds; (0,) in the local form, where they move with its centre
    table: Table  # of the M_i
    fingerprint: Array  # () of the data it was found for


class Fit(Coordinates, _FitFields):
    """What is found once for each data set, and then kept."""

    __slots__ = ()


class Adaptation(NamedTuple):
    """What warm-up tunes."""

    step_size: Tuned  # posterior standard deviations
    lam: Tuned


class Noise(NamedTuple):
    """The random numbers of one transition, so that a test can feed them."""

    normal: Array  # (d,) of the proposal
    sign: Array  # (d,) uniform, of the Barker proposal
    centre: Array  # (d,) normal, of the local centre
    choice: Array  # () uniform, whether to take all data
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
    num_violations: Array  # () drawn data whose term was outside its bounds
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
    def lam(self) -> Array:
        """Data kept on average beyond those that the bounds ask for."""
        return self.adapt_state.lam.value


def init(key: Array, x: Array | None, problem: Problem, settings: Settings, fit: Fit) -> State:
    """State at `x`, shape (d,), or at a draw of the Laplace approximation."""
    dtype, size = fit.centre.dtype, fit.centre.size
    key, key_start = jax.random.split(key)
    if x is None:
        x = fit.from_standard(jax.random.normal(key_start, (size,), dtype))
    step_size = settings.step_size
    if step_size is None:
        step_size = first_step_size(settings.proposal, size)
        if settings.local is not None:
            # given its centre, the density has the precision 1 + 1 / tau^2
            step_size /= math.sqrt(1 + _local_sd(settings.local, size) ** -2)
    most = jnp.minimum(fit.table.total, _most(fit, problem))
    lam = most if settings.lam is None else settings.lam
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
        adapt_state=Adaptation(tuned(step_size, dtype), tuned(lam, dtype)),
        fit=fit,
        stale=jnp.zeros((), bool),
        rng_key=key,
    )


def step(state: State, problem: Problem, settings: Settings, num_warmup: int) -> State:
    """One transition, with adaptation while `state.i < num_warmup`."""
    key, key_noise = jax.random.split(state.rng_key)
    x = problem.ravel(state.z)
    fit = current_fit(state, state.stale, problem, settings)
    noise = draw_noise(key_noise, fit, settings)
    x, info = transition(noise, x, problem, settings, fit, state.step_size, state.lam)
    i = state.i + 1
    step_size, lam = state.adapt_state
    if settings.step_size is None:
        target = settings.target_accept_prob or ACCEPTANCE[settings.proposal]
        step_size = adapted(step_size, info.accept_prob - target, i, num_warmup)
    if settings.lam is None:
        excess = jnp.clip(info.noise_variance / _NOISE_VARIANCE - 1, -1, 1)
        # where all data were taken there is no noise to learn from
        excess = jnp.where(info.fallback, 0.0, excess)
        most = jnp.log(_most(fit, problem))
        lam = adapted(lam, excess, i, num_warmup, span=(most - 20, most))
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
        adapt_state=Adaptation(step_size, lam),
        fit=fit,
        stale=jnp.zeros_like(state.stale),
        rng_key=key,
    )


def draw_noise(key: Array, fit: Fit, settings: Settings) -> Noise:
    """Random numbers of one transition."""
    keys = jax.random.split(key, 7)
    dtype, size = fit.centre.dtype, fit.centre.size
    chunk_size = settings.chunk_size
    top = jnp.maximum(fit.table.cumulative[-1], 1)

    def chunk(k: Array) -> tuple[Array, Array]:
        # the same each time: the minibatch is looked at once for x and once for y
        key_position, key_keep = jax.random.split(jax.random.fold_in(keys[6], k))
        position = jax.random.randint(key_position, (chunk_size,), 0, top)
        return position, jax.random.uniform(key_keep, (chunk_size,), dtype)

    return Noise(
        normal=jax.random.normal(keys[0], (size,), dtype),
        sign=jax.random.uniform(keys[1], (size,), dtype),
        centre=jax.random.normal(keys[2], (size,), dtype),
        choice=jax.random.uniform(keys[3], dtype=dtype),
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
    lam: Array,
) -> tuple[Array, Info]:
    """Draw a minibatch at `x`, shape (d,), propose, and accept or stay."""
    proposal, rho = settings.proposal, settings.local
    w = fit.to_standard(x)
    expected = lam + fit.table.total
    # written so that bounds of NaN take all data
    always = ~(expected < problem.size) if settings.fallback else jnp.zeros((), bool)
    share = _full_share(settings, fit, always)
    full = noise.choice < share(w)

    tau = 1.0 if rho is None else _local_sd(rho, w.size)
    middle = jnp.zeros_like(w) if rho is None else w + tau * noise.centre
    # the others have no bounds
    within = lambda v: jnp.linalg.norm(v - middle) <= (fit.radius if rho is None else rho)  # noqa: E731
    batch = Minibatch(
        noise=noise,
        number=noise.number(jnp.where(full | ~within(w), 0.0, expected)),
        centre=fit.from_standard(middle),
        lam=lam,
    )

    def gradient(v: Array, y: Array, log_rates: Array) -> Array:
        """What stands for the gradient at `v`, `y` with that of the log rates."""
        if proposal == "random_walk":
            return jnp.zeros_like(v)
        found = truncated(fit.scale.T @ (jax.grad(problem.log_base)(y) + log_rates))
        if rho is not None:
            found = found - (v - middle) / tau**2
        # with all data that of the Laplace approximation, which costs none
        return jnp.where(full, truncated(-v), found)

    log_rates_x = jnp.zeros_like(x)
    if proposal != "random_walk":
        log_rates_x = _gradient_of_log_rates(batch, x, problem, settings, fit)
    gradient_w = gradient(w, x, log_rates_x)
    v = proposed(noise.normal, noise.sign, w, gradient_w, step_size, proposal)
    y = fit.from_standard(v)
    usable = within(w) & within(v)
    found = minibatch_log_ratio(batch, x, y, usable, problem, settings, fit)
    gradient_v = gradient(v, y, found.gradient)
    back = log_proposal(v, w, gradient_v, step_size, proposal)
    forth = log_proposal(w, v, gradient_w, step_size, proposal)

    def everything(at: Any) -> Any:
        x, y, first, _ = at
        data, all_of_them = problem.after(first), jnp.arange(problem.size)
        difference = data.log_terms(y, all_of_them) - data.log_terms(x, all_of_them)
        return x, y, first, jnp.sum(difference)

    start = (x, y, jnp.zeros((), jnp.int32), jnp.zeros((), x.dtype))
    *_, full_ratio = run_if(full, everything, start)
    chosen = jnp.log(share(v)) - jnp.log(share(w))
    mini_ratio = found.log_ratio + jnp.log1p(-share(v)) - jnp.log1p(-share(w))
    if rho is not None:
        mini_ratio = mini_ratio + (jnp.sum((w - middle) ** 2) - jnp.sum((v - middle) ** 2)) / (
            2 * tau**2
        )
    mini_ratio = jnp.where(usable, mini_ratio, -jnp.inf)
    log_ratio = problem.log_base(y) - problem.log_base(x) + back - forth
    log_ratio = log_ratio + jnp.where(full, full_ratio + chosen, mini_ratio)
    prob = acceptance(log_ratio)
    return jnp.where(noise.last < prob, y, x), Info(
        accept_prob=prob,
        num_drawn=jnp.where(full, problem.size, batch.number),
        num_kept=jnp.where(full, problem.size, found.num_kept),
        noise_variance=found.variance,
        fallback=full,
        num_violations=found.num_violations,
        diverging=~(log_ratio > -jnp.inf),
    )


class Minibatch(NamedTuple):
    """Data drawn at a point, and what their bounds are relative to."""

    noise: Noise
    number: Array  # () data drawn
    centre: Array  # (d,) of the bounds in the local form
    lam: Array  # ()


class Found(NamedTuple):
    """Sums over the kept data."""

    log_ratio: Array  # () of log(rate_i(y) / rate_i(x))
    gradient: Array  # (d,) of the gradients of log rate_i(y)
    num_kept: Array  # ()
    variance: Array  # () of the squares of the terms of `log_ratio`
    num_violations: Array  # ()


class _Chunk(NamedTuple):
    drawn: Array  # (chunk_size,) whether the number of data reaches this far
    data: Array  # (chunk_size,)
    uniform: Array  # (chunk_size,) of the thinning
    bound: Array  # (chunk_size,) M_i
    least: Array  # (chunk_size,) lam M_i / L, the smallest rate
    low: Array  # (chunk_size,) lower bound of the term


def minibatch_log_ratio(
    batch: Minibatch,
    x: Array,
    y: Array,
    usable: Array,
    problem: Problem,
    settings: Settings,
    fit: Fit,
) -> Found:
    """Sums over the kept data of a minibatch; terms of `y` mean nothing unless `usable`.

    Any number of data, `chunk_size` at a time: a limit on the number drawn would be a bias.
    """
    size = settings.chunk_size
    with_gradient = settings.proposal != "random_walk"

    def body(carry: tuple[Array, Found]) -> tuple[Array, Found]:
        k, sums = carry
        part = _chunk(k, batch, problem, settings, fit)
        rate_x, broken_x = _rate(problem.log_terms(x, part.data), part)
        keep = _kept(rate_x, part)
        terms, pullback = jax.vjp(lambda y: problem.log_terms(y, part.data), y)
        rate_y, broken_y = _rate(terms, part)
        t = jnp.where(keep, jnp.log(rate_y) - jnp.log(rate_x), 0.0)
        gradient = sums.gradient
        if with_gradient:
            gradient = gradient + pullback(jnp.where(keep, 1 / rate_y, 0.0))[0]
        broken = (part.drawn & broken_x) | (keep & broken_y & usable)
        return k + 1, Found(
            log_ratio=sums.log_ratio + t.sum(),
            gradient=gradient,
            num_kept=sums.num_kept + keep.sum(dtype=jnp.int32),
            variance=sums.variance + (t**2).sum(),
            num_violations=sums.num_violations + broken.sum(dtype=jnp.int32),
        )

    zero, none = jnp.zeros((), x.dtype), jnp.zeros((), jnp.int32)
    start = (none, Found(zero, jnp.zeros_like(x), none, zero, none))
    return jax.lax.while_loop(lambda carry: carry[0] * size < batch.number, body, start)[1]


def _gradient_of_log_rates(
    batch: Minibatch, x: Array, problem: Problem, settings: Settings, fit: Fit
) -> Array:
    """Sum over the kept data of the gradients of log rate_i at `x`, where they were drawn."""

    def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        k, total = carry
        part = _chunk(k, batch, problem, settings, fit)
        terms, pullback = jax.vjp(lambda x: problem.log_terms(x, part.data), x)
        rate, _ = _rate(terms, part)
        return k + 1, total + pullback(jnp.where(_kept(rate, part), 1 / rate, 0.0))[0]

    start = (jnp.zeros((), jnp.int32), jnp.zeros_like(x))
    size = settings.chunk_size
    return jax.lax.while_loop(lambda carry: carry[0] * size < batch.number, body, start)[1]


def _chunk(k: Array, batch: Minibatch, problem: Problem, settings: Settings, fit: Fit) -> _Chunk:
    size, total = settings.chunk_size, fit.table.total
    position, uniform = batch.noise.chunk(k)
    index = fit.table.find(position)
    bound = fit.table.bound(index)
    if settings.local is None:
        low = fit.low[index]
    else:
        low = problem.log_terms(batch.centre, index) - bound / 2
    return _Chunk(
        drawn=k * size + jnp.arange(size) < batch.number,
        data=index,
        uniform=uniform,
        bound=bound,
        least=batch.lam * bound / jnp.where(total > 0, total, 1),
        low=low,
    )


def _rate(terms: Array, part: _Chunk) -> tuple[Array, Array]:
    """rate_i of the data of a chunk with these log likelihoods, and whether a bound is broken."""
    phi = terms - part.low
    error = 16 * jnp.finfo(terms.dtype).eps * (jnp.abs(terms) + jnp.abs(part.low))
    broken = (phi < -error) | (phi > part.bound + error)
    return part.least + jnp.clip(phi, 0, part.bound), broken


def _kept(rate: Array, part: _Chunk) -> Array:
    # written so that a term of NaN is kept, and rejects
    return part.drawn & ~(part.uniform * (part.least + part.bound) >= rate)


def _local_sd(rho: float, size: int) -> float:
    """Standard deviation tau of the local centre in `size` dimensions."""
    return rho / (math.sqrt(size) + _LOCAL_MARGIN)


def _full_share(settings: Settings, fit: Fit, always: Array) -> Callable[[Array], Array]:
    """Probability to take all data, by the point in standard coordinates."""

    def share(w: Array) -> Array:
        if not settings.fallback:
            return jnp.zeros((), w.dtype)
        inside = jnp.where(jnp.isfinite(fit.radius), _FULL_SHARE, 0.0)
        return jnp.where(always | ~(jnp.linalg.norm(w) <= fit.radius), 1.0, inside)

    return share


def _most(fit: Fit, problem: Problem) -> Array:
    """Largest `lam` that warm-up tries: with a little more all data would be taken."""
    return jnp.maximum(0.9 * (problem.size - fit.table.total), 1e-3)


# --- mode, metric and bounds --------------------------------------------------------------------


def find_fit(start: Array, problem: Problem, settings: Settings) -> Fit:
    """Mode of the posterior near `start`, shape (d,), and bounds around it."""
    dtype = jnp.result_type(start, jnp.float32)
    mode, hessian, _, _ = minimise(lambda x: -problem.log_density(x), start.astype(dtype))
    return fit_at(mode, hessian, problem, settings)


def fit_at(centre: Array, precision: Array, problem: Problem, settings: Settings) -> Fit:
    """`Fit` for any centre, shape (d,), and metric, shape (d, d): all of them are exact."""
    size, dtype = centre.size, centre.dtype
    whiten = jnp.linalg.cholesky(precision).T
    scale = jax.scipy.linalg.solve_triangular(whiten, jnp.eye(size, dtype=dtype))
    radius = jnp.asarray(math.sqrt(size) + MARGIN, dtype)
    # the local centre may lie outside
    reach = radius + (settings.local or 0.0)
    # bounds that hold everywhere, or else on a ball; what does not depend on it is computed once
    both = jnp.stack([jnp.full_like(reach, jnp.inf), reach])
    found = jax.vmap(lambda radius: problem.bounds(centre, scale, radius))(both)
    everywhere = jnp.stack([jnp.isfinite(leaf[0]).all() for leaf in jax.tree.leaves(found)]).all()
    found = jax.tree.map(lambda leaf: jnp.where(everywhere, leaf[0], leaf[1]).astype(dtype), found)
    low = jnp.zeros(0, dtype)
    infinite = jnp.where(everywhere, jnp.inf, radius)
    if isinstance(found, tuple):
        low = found[0]
        table = make_table(found[1] - low)
    elif settings.local is None:
        table = make_table(2 * found * radius)
        everything = jnp.arange(problem.size)
        low = problem.log_terms(centre, everything) - table.bound(everything) / 2
        infinite = radius
    else:
        table = make_table(2 * found * settings.local)
    return Fit(
        centre=centre,
        whiten=whiten,
        scale=scale,
        radius=infinite.astype(dtype),
        low=low.astype(dtype),
        table=table,
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
