"""Proximal independent Metropolis-Hastings as a Pyro kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.poutine.subsample_messenger import _Subsample

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.kernels import proximal_imh as imh
from ppl_ext.pyro import hmc
from ppl_ext.pyro.kernel import DensityKernel, Tensors
from ppl_ext.pyro.potential import (
    CallbackFunction,
    CallbackPotential,
    Engine,
    TracedFunction,
    TracedPotential,
    build_function,
    build_potential,
    precision_and_device,
)
from ppl_ext.pyro.program import to_jax
from ppl_ext.pyro.runner import Algorithm, Transition
from ppl_ext.pyro.target import Posterior
from ppl_ext.target import Array, PyTree, Site, Target


class _Value(CallbackFunction):
    """`potential(z, data)` by a call to PyTorch, without derivatives."""

    def __init__(self, potential_fn: Callable[[Tensors], torch.Tensor], start: Tensors) -> None:
        super().__init__(lambda z: {"potential_energy": potential_fn(z)}, start)

    def __call__(self, z: Mapping[str, Array], data: PyTree) -> Any:
        return super().__call__(z, data)["potential_energy"]


@dataclass(frozen=True)
class _Model:
    """One of the two models: `potential(z, data)`, and functions of the sites by name."""

    potential: Any
    functions: tuple[tuple[str, Any], ...]
    sites: tuple[Site, ...]

    def target(self, structure: dict[str, tuple[int, ...]], prior_draw: Any) -> Target:
        functions = dict(self.functions)

        def observation(z: PyTree, data: PyTree) -> tuple[Array, Array]:
            found = functions["observation"](z, data["observation"])
            return found["mean"], found["covariance"]

        return Target(
            language="pyro",
            sites=self.sites,
            plates=(),
            structure=structure,
            potential_energy=lambda z, data: self.potential(z, data["potential"]),
            constrain_sites=lambda z, data: functions["constrain"](z, data["constrain"]),
            unconstrain_sites=lambda z, data: z,
            observation=observation,
            prior_covariance=lambda data: data["prior_covariance"],
            prior_draw=lambda key, data: prior_draw(key),
            log_prior=lambda z, data: functions["log_prior"](z, data["log_prior"])["log_prior"],
        )


@dataclass(frozen=True)
class _Pair:
    """Both models, and the settings with what they hold of this run."""

    exact: _Model
    cheap: _Model
    settings: imh.Settings
    prior_draw: Any
    reusable: bool

    def target(self, structure: dict[str, tuple[int, ...]]) -> tuple[Target, Target, imh.Settings]:
        return (
            self.exact.target(structure, self.prior_draw),
            self.cheap.target(structure, self.prior_draw),
            self.settings,
        )


@dataclass(frozen=True)
class _Algorithm:
    inner: Algorithm | None
    local: Algorithm | None

    def transition(
        self, target: tuple[Target, Target, imh.Settings], num_warmup: int
    ) -> Transition:
        exact, cheap, fixed = target
        warmup = max(num_warmup, imh.INNER_WARMUP)
        # once: HMC keeps what its `init` is told for its steps
        inner = None if self.inner is None else self.inner.transition(cheap, warmup)
        local = None if self.local is None else self.local.transition(exact, num_warmup)

        def bind(data: PyTree) -> tuple[imh.Problem, imh.Settings]:
            problem = imh.Problem(exact.bind(data["exact"]), cheap.bind(data["cheap"]))
            settings = fixed
            if inner is not None:
                chain = _chain(inner, cheap, data["cheap"], warmup_at_start=warmup)
                settings = replace(settings, base=chain)
            if local is not None:
                settings = replace(settings, local=_chain(local, exact, data["exact"]))
            return problem, settings

        def init(key: Array, z: PyTree, data: PyTree) -> imh.State:
            problem, settings = bind(data)
            # from the same start in all chains of a program, and so found once
            fit = imh.find_fit(problem.exact.ravel(data["start"]), problem, settings)
            return imh.init(key, z, problem, settings, fit)

        def fields(state: imh.State, data: Any) -> dict[str, Any]:
            return {
                "accept_prob": state.accept_prob,
                "candidate": state.candidate,
                "diverging": state.diverging,
                "log_weight": state.log_weight,
                "potential_energy": state.potential_energy,
            }

        return Transition(init, lambda state, data: imh.step(state, *bind(data)), fields)


class ProximalIMH(DensityKernel):
    """Independence sampler from a cheap operator, corrected to the exact one: exact draws.

    `ppl_ext.numpyro.ProximalIMH` for Pyro: the same algorithm, the same options.

    Parameters
    ----------
    model : callable
        Pyro model with continuous latent sites only, which takes its operator as an argument.
        Predictions are read from the means of its observed sites.
    approx : dict
        Keyword arguments that make the model cheap.
    exact : dict, optional
        Keyword arguments that make it exact, where the model has no such defaults.
    proposal : "laplace", torch Distribution, guide, tuple or ppl_ext.pyro.HMC or NUTS
        Draws before the correction. A distribution of the flat unconstrained vector, shape (d,),
        sites in the order of their names. A fitted guide: AutoContinuous, or your own with the
        model's sites only; its parameters are those of the parameter store. Draws with their log
        density, `(z, log_prob)`, shapes (N, d) and (N,). A kernel on the same model, which then
        samples the cheap posterior.
    local_kernel : ppl_ext.pyro.HMC or NUTS, optional
        On the same model; makes a transition on the exact posterior after each proposal.
    correction, beta, metric, weight, steps, defensive, inner_steps, batch_size
        As for `ppl_ext.numpyro.ProximalIMH`.
    init_strategy : callable
        As for `pyro.infer.NUTS`.
    engine : {"auto", "xla", "torch"}
        As for `ppl_ext.pyro.ULD`, for the exact model; the cheap one must be one that JAX
        evaluates. An exact operator that JAX cannot evaluate is best given as a
        `ppl_ext.pyro.BlackBox`, which is called for whole batches; else PyTorch evaluates the model
        for each proposal, one after the other.

    Raises
    ------
    ValueError
        For a bad argument, named.
    TypeError
        When `approx` or `exact` is no dict, or `proposal` of an unknown type.
    ppl_ext.errors.UnsupportedModelError
        At `run`: discrete or Delta sites, subsampled plates, no latent site, empty data; sites that
        differ between the models; no observed site with a mean.
    ppl_ext.errors.TracingError
        At `run`: the cheap model is one that JAX cannot evaluate.
    ppl_ext.errors.MismatchError
        At `run`: JAX and PyTorch disagree on the model.

    Notes
    -----
    To record the model and compare it with PyTorch takes about ten evaluations of each operator.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from ppl_ext.pyro import MCMC, ProximalIMH
    >>> def model(y, forward=torch.sinh):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(forward(x), 0.3), obs=y)
    >>> kernel = ProximalIMH(model, approx=dict(forward=lambda x: 1.1 * x))
    >>> mcmc = MCMC(kernel, 500, warmup_steps=0, disable_progbar=True)
    >>> mcmc.run(torch.tensor(0.8))
    >>> bool(mcmc.get_extra_fields()["accept_prob"].mean() > 0.7)
    True
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        approx: Mapping[str, Any],
        exact: Mapping[str, Any] | None = None,
        proposal: Any = "laplace",
        correction: imh.Correction | Literal["auto"] | None = "auto",
        beta: float = 1.0,
        metric: Any = "likelihood",
        weight: Any = "prior",
        steps: int = 2,
        defensive: float = 0.0,
        inner_steps: int | None = None,
        local_kernel: hmc.HMC | hmc.NUTS | None = None,
        batch_size: int = 256,
        init_strategy: Callable[..., Any] = init_to_uniform,
        engine: Engine = "auto",
    ) -> None:
        self._approx = imh.checked_operators("approx", approx)
        # the model of the kernel and of ArviZ is the exact one
        whole = partial(model, **imh.checked_operators("exact", exact)) if exact else model
        super().__init__(whole, init_strategy=init_strategy, engine=engine)
        for name, kernel in (("proposal", proposal), ("local_kernel", local_kernel)):
            if isinstance(kernel, DensityKernel) or (name == "local_kernel" and kernel is not None):
                _check_reversible(name, kernel, model)
        self._local_kernel = local_kernel
        self._proposal = _checked_proposal(proposal)
        self._correction = correction
        self.settings = imh.checked_settings(
            proposal=self._proposal,
            proposal_is_kernel=isinstance(proposal, DensityKernel),
            correction=correction,
            beta=beta,
            metric=metric,
            weight=weight,
            steps=steps,
            defensive=defensive,
            inner_steps=inner_steps,
            batch_size=batch_size,
            has_local_kernel=local_kernel is not None,
        )

    @property
    def algorithm(self) -> _Algorithm:
        proposal = self._proposal
        return _Algorithm(
            proposal.algorithm if isinstance(proposal, DensityKernel) else None,
            None if self._local_kernel is None else self._local_kernel.algorithm,
        )

    def searched(self, posterior: Posterior) -> Posterior:
        # the search for a start needs gradients, which the exact operator may not have
        return self._cheap(posterior)

    def _cheap(self, posterior: Posterior) -> Posterior:
        kwargs = {**posterior.kwargs, **self._approx}
        return Posterior(posterior.model, posterior.args, kwargs, None, self.init_strategy)

    def functions(self, posterior: Posterior | None, start: Tensors) -> tuple[_Pair, bool, PyTree]:
        assert posterior is not None
        cheap = self._cheap(posterior)
        _check_sites(posterior, cheap)
        # what `auto` may choose decides what is recorded
        mapped = self._correction in ("gn", "affine", "frozen", "argmin")
        if mapped or (self._correction == "auto" and self._approx):
            names = ["observation"]
        else:
            names = ["constrain"] if self._correction == "latent" else []
        if self.settings.defensive:
            names.append("log_prior")
        exact_model, exact_double, exact_data = self._recorded(posterior, start, names, self.engine)
        # its derivatives are needed
        engine = "xla" if self._approx else self.engine
        cheap_model, cheap_double, cheap_data = self._recorded(cheap, start, names, engine)
        double = exact_double or cheap_double
        with precision_and_device(double, start):
            data = {
                "exact": exact_data,
                "cheap": cheap_data,
                "start": {name: to_jax(x) for name, x in start.items()},
            }
            if self.settings.weight is None:
                covariance = cheap.prior_covariance()
                data["cheap"]["prior_covariance"] = jnp.asarray(covariance, float)
            models = exact_model, cheap_model
            self.settings, base = self._chosen(models, data, cheap, start)
        draw = _prior_draw(cheap, start) if self.settings.defensive else None
        arrays = self.settings.metric is not None or self.settings.weight is not None
        traced = all(
            isinstance(model.potential, TracedPotential)
            and all(isinstance(function, TracedFunction) for _, function in model.functions)
            for model in models
        )
        reusable = traced and draw is None and base is imh.LAPLACE and not arrays
        pair = _Pair(*models, replace(self.settings, base=base), draw, reusable)
        return pair, double, data

    def _recorded(
        self, posterior: Posterior, start: Tensors, names: list[str], engine: Engine
    ) -> tuple[_Model, bool, dict[str, Any]]:
        potential_fn = posterior.potential_fn
        potential, constants = build_potential(potential_fn, start, engine, self.checked)
        double = potential.double
        if self._approx and isinstance(potential, CallbackPotential) and not self._local_kernel:
            # no derivative is needed, and PyTorch may have none
            model: Any = _Value(potential_fn, start)
        else:
            model = potential
        functions, data = [], {"potential": constants}
        for name in names:
            function, data[name] = build_function(getattr(posterior, name), start, engine)
            functions.append((name, function))
        return _Model(model, tuple(functions), posterior.sites), double, data

    def _chosen(
        self, models: tuple[_Model, _Model], data: PyTree, cheap: Posterior, start: Tensors
    ) -> tuple[imh.Settings, Any]:
        """The settings with the correction that the operators allow, and the base."""
        structure = {name: tuple(x.shape) for name, x in start.items()}
        exact, approx = (
            model.target(structure, None).bind(data[which])
            for model, which in zip(models, ("exact", "cheap"), strict=True)
        )
        if self._approx:
            imh.check_cheap(approx)
        correction = imh.chosen_correction(self._correction, cheap_is_exact=not self._approx)
        site = imh.latent_site(exact) if correction == "latent" else None
        settings = replace(self.settings, correction=correction, latent_site=site)
        return settings, self._base(exact, cheap, start)

    def _base(self, target: Target, cheap: Posterior, start: Tensors) -> imh.Base | imh.Draws:
        proposal = self._proposal
        if isinstance(proposal, imh.Draws):
            imh.check_draws(proposal, target)
            return proposal
        if isinstance(proposal, torch.distributions.Distribution):
            imh.check_width(proposal.event_shape, proposal.batch_shape, target)
            return _host_base(proposal.sample, proposal.log_prob, start, self.engine)
        if isinstance(proposal, AutoContinuous):
            return _host_base(*_auto_guide(proposal, cheap), start, self.engine)
        if not isinstance(proposal, str | DensityKernel):
            return _host_base(*_guide(proposal, target, cheap), start, self.engine)
        # for a kernel `_Algorithm` puts its chain in place of this
        return imh.LAPLACE

    def run_facts(self, state: imh.State) -> dict[str, Any]:
        return imh.facts(state, self.settings)

    def progress(self, fields: dict[str, np.ndarray]) -> dict[str, str]:
        return {
            "correction": str(self.settings.correction),
            "acc. prob": f"{np.mean(fields['accept_prob']):.3f}",
        }


def _chain(
    transition: Transition, target: Target, data: PyTree, warmup_at_start: int = 0
) -> imh.Chain:
    """HMC or NUTS on one of the models, warmed up at the start or as it runs."""
    potential = target.bind(data).potential_energy

    def start(key: Array, z: Array) -> PyTree:
        state = transition.init(key, target.unravel(z), data)
        return jax.lax.fori_loop(
            0, warmup_at_start, lambda _, state: transition.step(state, data), state
        )

    def move(state: PyTree, z: Array) -> PyTree:
        there = target.unravel(z)
        energy, grad = jax.value_and_grad(potential)(there)
        state = state._replace(z=there, potential_energy=energy, z_grad=grad)
        return transition.step(state, data)

    return imh.Chain(start, move, lambda state: target.ravel(state.z))


def _check_sites(exact: Posterior, cheap: Posterior) -> None:
    shapes = [
        {site.name: site.shape for site in posterior.sites if site.kind == "latent"}
        for posterior in (exact, cheap)
    ]
    different = {n for n in {*shapes[0], *shapes[1]} if shapes[0].get(n) != shapes[1].get(n)}
    if different:
        raise UnsupportedModelError(
            f"ProximalIMH: the latent sites {sorted(different)} have other shapes with `approx`. "
            "Both models must have the same unknowns."
        )


def _check_reversible(name: str, kernel: Any, model: Callable[..., Any]) -> None:
    if not isinstance(kernel, hmc.HMC | hmc.NUTS):
        raise TypeError(
            f"ProximalIMH: `{name}` must be ppl_ext.pyro.HMC or NUTS, which are reversible, got "
            f"{type(kernel).__name__}."
        )
    if kernel.model is not model:
        raise ValueError(f"ProximalIMH: `{name}` must be a kernel on the same model.")


def _checked_proposal(proposal: Any) -> Any:
    known = isinstance(proposal, torch.distributions.Distribution | DensityKernel)
    if known or (isinstance(proposal, str) and proposal == "laplace"):
        return proposal
    if isinstance(proposal, tuple) and len(proposal) == 2 and not callable(proposal[0]):
        return imh.checked_draws(*(np.asarray(torch.as_tensor(x).cpu()) for x in proposal))
    if callable(proposal) and not isinstance(proposal, type):
        return proposal
    raise TypeError(
        'ProximalIMH: `proposal` must be "laplace", a torch Distribution of the unconstrained '
        "vector, a fitted guide, draws with their log density (z, log_prob), or a kernel, got "
        f"{proposal if isinstance(proposal, str) else type(proposal).__name__!r}."
    )


# --- proposals that PyTorch draws ----------------------------------------------------------------


def _flat(z: Tensors) -> torch.Tensor:
    """The vector that algorithms see: sites in the order of their names."""
    return torch.cat([z[name].reshape(-1) for name in sorted(z)])


def _sites(flat: torch.Tensor, like: Tensors) -> Tensors:
    names = sorted(like)
    parts = flat.split([like[name].numel() for name in names])
    return {n: part.reshape(like[n].shape) for n, part in zip(names, parts, strict=True)}


def _seeded(draw: Callable[[], torch.Tensor], like: torch.Tensor) -> Callable[[Array], Array]:
    """`draw` as a function of a JAX key, by calls to PyTorch."""

    def call(words: Any) -> np.ndarray:
        high, low = (int(word) for word in np.asarray(words))
        with torch.random.fork_rng(devices=[]), torch.no_grad(), poutine.block():
            torch.manual_seed(high << 32 | low)
            return draw().detach().cpu().numpy()

    def seeded(key: Array) -> Array:
        dtype = jnp.dtype(np.asarray(like.cpu()).dtype)
        result = jax.ShapeDtypeStruct(tuple(like.shape), dtype)
        words = jax.random.bits(key, (2,), "uint32")
        return jax.pure_callback(call, result, words, vmap_method="sequential")

    return seeded


def _prior_draw(posterior: Posterior, start: Tensors) -> Callable[[Array], PyTree]:
    draw = _seeded(lambda: _flat(posterior.prior_draw()), _flat(start))
    names = sorted(start)
    ends = np.cumsum([start[name].numel() for name in names])[:-1]

    def sites(key: Array) -> PyTree:
        parts = jnp.split(draw(key), ends)
        return {
            n: part.reshape(tuple(start[n].shape)) for n, part in zip(names, parts, strict=True)
        }

    return sites


def _host_base(
    draw: Callable[[], torch.Tensor],
    log_prob: Callable[[torch.Tensor], torch.Tensor],
    start: Tensors,
    engine: Engine,
) -> imh.Base:
    """A base that PyTorch draws from, with a recorded density."""
    flat = {"z": _flat(start)}
    density, data = build_function(lambda z: {"log_prob": log_prob(z["z"])}, flat, engine)
    sample = _seeded(draw, flat["z"])
    return imh.Base(lambda key, _: sample(key), lambda z, _: density({"z": z}, data)["log_prob"])


def _auto_guide(guide: AutoContinuous, posterior: Posterior) -> tuple[Callable, Callable]:
    """Draw and log density of the flat vector; the guide has the sites in the model's order."""
    distribution = guide.get_posterior(*posterior.args, **posterior.kwargs)
    count = sum(int(x.numel()) for x in posterior.start.values())
    numbers = {site["name"]: x for site, x in guide._unpack_latent(torch.arange(count))}
    order = _flat(numbers)
    inverse = order.argsort()
    return lambda: distribution.sample()[order], lambda z: distribution.log_prob(z[inverse])


def _guide(
    guide: Callable[..., Any], target: Target, posterior: Posterior
) -> tuple[Callable, Callable]:
    """Draw and log density of the flat vector by a guide of the user's own."""
    args, kwargs, transforms = posterior.args, posterior.kwargs, posterior.transforms

    def draw() -> torch.Tensor:
        nodes = poutine.trace(guide).get_trace(*args, **kwargs).nodes
        samples = {n: node for n, node in nodes.items() if node["type"] == "sample"}
        sites = {n for n, node in samples.items() if not isinstance(node["fn"], _Subsample)}
        imh.check_guide(sites, target)
        return _flat(posterior.unconstrain({n: nodes[n]["value"] for n in transforms}))

    def log_prob(flat: torch.Tensor) -> torch.Tensor:
        z = _sites(flat, posterior.start)
        values = {name: t.inv(z[name]) for name, t in transforms.items()}
        trace = poutine.trace(poutine.condition(guide, values)).get_trace(*args, **kwargs)
        jacobian = sum(
            t.log_abs_det_jacobian(values[name], z[name]).sum() for name, t in transforms.items()
        )
        return trace.log_prob_sum() - jacobian

    with poutine.block(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        draw()
    return draw, log_prob
