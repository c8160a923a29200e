"""NumPyro model with a Dirichlet process -> `Mixture`: what `DPSlice` knows of a model.

The model is run with `draw` answered by given atoms, which shows the sites of the data plate at
those atoms. At three random atoms, the other sites held, the parameters of the distributions are
compared: those that equal an atom's site, or a multiple of it, make a conjugate pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro import validation_enabled
from numpyro.distributions import ExpandedDistribution, Independent, MaskedDistribution, Unit
from numpyro.distributions.transforms import biject_to
from numpyro.handlers import block, condition, seed, substitute, trace
from numpyro.infer.initialization import init_to_sample
from numpyro.util import not_jax_tracer

from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.kernels import conjugate as cj
from ppl_ext.kernels.dp_slice import Gradient, Mixture, log_partition, log_sticks
from ppl_ext.numpyro.dirichlet_process import DirichletProcess, WithoutPlate, answering
from ppl_ext.numpyro.target import bare
from ppl_ext.target import Array, PyTree

# draws of the base for the scales of its sites
_SCALE_DRAWS = 200

Sites = dict[str, Array]


# keyword of `Facts.given`
GIVEN = "_dp_given"


class Given(NamedTuple):
    """What NUTS holds fixed while it moves the sites beside the process."""

    sites: Sites  # the concentration, where it is moved in closed form
    atoms: Sites  # the base's sites, (capacity, ...)
    labels: Array  # (n,)
    counts: Array  # (capacity,)
    sticks: tuple[Array, Array] | None  # log weights and log leftover, in prior order


@dataclass(frozen=True)
class Link:
    """A conjugate pair found: observed site, pair, and the atom's sites by their role in it."""

    observed: str
    pair: Any
    sites: dict[str, str]


@dataclass(frozen=True)
class Facts:
    """Static facts of a model: names, sizes, conjugate pairs.

    Parameters
    ----------
    model : callable
        The model, whose data every method takes again.
    process, plate : str
        Names of the process and of the data plate.
    num_points : int
        Size of the data plate.
    base_sites : tuple of str
        Sites of an atom.
    global_sites : tuple of str
        Latent sites that NUTS moves; the concentration is none of them when it has a Gamma prior.
    concentration : str, optional
        The site that is the concentration, where it is moved in closed form.
    links : tuple of Link, optional
        Conjugate pairs that cover the atom; `None`: gradient moves.
    reason : str
        Why there are none.
    """

    model: Callable[..., Any]
    process: str
    plate: str
    num_points: int
    base_sites: tuple[str, ...]
    global_sites: tuple[str, ...]
    concentration: str | None
    discount: bool
    links: tuple[Link, ...] | None
    reason: str = ""

    @property
    def path(self) -> str:
        """How the atoms are moved, in words."""
        if self.links is None:
            return f"atoms {', '.join(self.base_sites)} by gradient moves ({self.reason})"
        parts = [
            f"{', '.join(link.sites.values())} of '{link.observed}' ({type(link.pair).__name__})"
            for link in self.links
        ]
        return "atoms in closed form: " + "; ".join(parts)

    # --- one run of the model --------------------------------------------------------------------

    def run(self, args: tuple, kwargs: dict, values: Sites, atoms: Sites | None = None) -> Run:
        """The model's messages at given sites, with atoms for each point (leaves (n, ...))."""
        return run_model(self.model, args, kwargs, values, atoms)

    # --- what the kernel asks --------------------------------------------------------------------

    def mixture(self, args: tuple, kwargs: dict, values: Sites) -> Mixture:
        """The mixture at these values of the sites outside of the process."""
        run = self.run(args, kwargs, values)
        process = run.process
        prior = None
        if self.concentration is not None:
            gamma = bare(run.messages[self.concentration]["fn"])
            prior = (jnp.asarray(gamma.concentration, float), jnp.asarray(gamma.rate, float))
        atoms: cj.Product | Gradient
        if self.links is not None:
            members = tuple(member for member, _ in self._members(run))
            atoms = cj.Product(members, self.num_points)
        else:
            transforms = self._transforms(process)
            draws = jax.vmap(lambda k: self._unconstrained_draw(k, process, transforms))(
                random.split(random.key(0), _SCALE_DRAWS)
            )
            atoms = Gradient(
                draw=lambda key: self._unconstrained_draw(key, process, transforms),
                log_base=lambda z: self._log_base(z, process, transforms),
                log_likelihood=lambda z: self._log_likelihood(z, transforms, args, kwargs, values),
                center=jax.tree.map(lambda x: jnp.mean(x, 0), draws),
                scale=jax.tree.map(lambda x: jnp.maximum(jnp.std(x, 0), 1e-6), draws),
            )
        return Mixture(
            self.num_points,
            atoms,
            concentration=None if prior is not None else jnp.asarray(process.concentration, float),
            prior=prior,
            discount=None if not self.discount else jnp.asarray(process.discount, float),
        )

    def sites_of_atoms(self, atoms: PyTree, args: tuple, kwargs: dict, values: Sites) -> Sites:
        """Values of the base's sites, with the atoms' leading axes, from the kernel's atoms."""
        run = self.run(args, kwargs, values)
        if self.links is None:
            transforms = self._transforms(run.process)
            return {name: t(atoms[name]) for name, t in transforms.items()}
        found = {}
        for (_, back), link, atom in zip(self._members(run), self.links, atoms, strict=True):
            for role, name in link.sites.items():
                found[name] = back(role, atom[role])
        return found

    def given(self, *args: Any, **kwargs: Any) -> None:
        """The model for NUTS: its own sites, given atoms and labels in the keyword `GIVEN`."""
        known: Given = kwargs.pop(GIVEN)

        def answer(process: DirichletProcess, plate: str, n: int) -> PyTree:
            log_base = jax.vmap(lambda v: self._log_prob_of_base(v, process))(known.atoms)
            alpha = jnp.asarray(process.concentration, float)
            if known.sticks is None:
                log_labels = log_partition(known.counts, alpha, process.discount)
            else:
                log_labels = log_sticks(*known.sticks, known.counts, alpha, process.discount)
            log_base = jnp.sum(jnp.where(known.counts > 0, log_base, 0.0))
            with WithoutPlate(plate):
                numpyro.factor(f"{process.name}_process", log_base + log_labels)
            each = {name: values[known.labels] for name, values in known.atoms.items()}
            return jax.vmap(process.atom_value)(each)

        with answering(answer), condition(data=known.sites):
            self.model(*args, **kwargs)

    # --- parts -----------------------------------------------------------------------------------

    def _log_likelihood(
        self, z: Sites, transforms: dict, args: tuple, kwargs: dict, values: Sites
    ) -> Array:
        atoms = {name: t(z[name]) for name, t in transforms.items()}
        return _log_likelihood(self.run(args, kwargs, values, atoms), self.plate, self.num_points)

    def _transforms(self, process: DirichletProcess) -> dict[str, Any]:
        return {
            name: biject_to(message["fn"].support)
            for name, message in process.atom_sites(random.key(0)).items()
        }

    def _unconstrained_draw(self, key: Array, process: DirichletProcess, transforms: dict) -> Sites:
        return {
            name: transforms[name]._inverse(message["value"])
            for name, message in process.atom_sites(key).items()
        }

    def _log_base(self, z: Sites, process: DirichletProcess, transforms: dict) -> Array:
        values = {name: t(z[name]) for name, t in transforms.items()}
        jacobian = sum(
            jnp.sum(t.log_abs_det_jacobian(z[name], values[name])) for name, t in transforms.items()
        )
        return self._log_prob_of_base(values, process) + jacobian

    def _log_prob_of_base(self, values: Sites, process: DirichletProcess) -> Array:
        sites = process.atom_sites(random.key(0), values)
        return sum(
            (jnp.sum(m["fn"].log_prob(values[name])) for name, m in sites.items()), jnp.zeros(())
        )

    def _members(self, run: Run) -> list[tuple[cj.Member, Callable[[str, Array], Array]]]:
        """Conjugate pairs bound to data, with the map from each one's atom to the base's sites."""
        assert self.links is not None
        return [_member(link, run) for link in self.links]


@dataclass(frozen=True)
class Run:
    """Messages of a model at given atoms; `atom` holds the sites of one atom, with messages."""

    messages: dict[str, Any]
    process: DirichletProcess
    plate: str
    num_points: int
    atom: dict[str, Any]


def run_model(
    model: Callable,
    args: tuple,
    kwargs: dict,
    values: Sites | None = None,
    atoms: Sites | None = None,
    key: Any = None,
) -> Run:
    """The messages of a model at given sites, the others drawn.

    `atoms` are those of each point, leaves (n, ...); `None`: one draw of the base for all.

    Raises
    ------
    UnsupportedModelError
        When the model draws from no process, or more than once.
    """
    key = random.key(0) if key is None else key
    calls: list[tuple[DirichletProcess, str, int, dict]] = []

    def answer(process: DirichletProcess, plate: str, n: int) -> PyTree:
        sites = process.atom_sites(random.fold_in(key, 1))
        calls.append((process, plate, n, sites))
        if atoms is None:
            one = {name: m["value"] for name, m in sites.items()}
            each = {name: jnp.broadcast_to(v, (n, *jnp.shape(v))) for name, v in one.items()}
        else:
            each = atoms
        return jax.vmap(process.atom_value)(each)

    with answering(answer), block():
        seeded = substitute(seed(model, key), substitute_fn=init_to_sample)
        messages = trace(substitute(seeded, data=values or {})).get_trace(*args, **kwargs)
    if not calls:
        raise UnsupportedModelError(
            "DPSlice samples models with a ppl_ext.numpyro.DirichletProcess or PitmanYor; this one "
            "draws from none. Use numpyro.infer.NUTS or another kernel."
        )
    if len(calls) > 1:
        raise UnsupportedModelError(
            f"DPSlice takes one call of `draw` in a model; found {len(calls)} "
            f"({[c[0].name for c in calls]}). Draw once, and return all that an atom has from "
            "`base`."
        )
    return Run(messages, *calls[0])


def predictive_density(
    model: Callable, args: tuple, kwargs: dict, draw: Sites, key: Array
) -> Array:
    """Density of the model's observations, (n,), in a draw of `DPSlice`.

    Of the mass beyond the slots one atom is drawn, which makes the density right on average.
    """
    run = run_model(model, args, kwargs, key=key)
    latent = [n for n, m in run.messages.items() if m["type"] == "sample" and n in draw]
    values = {name: draw[name] for name in latent}
    weights = draw[f"{run.process.name}_weights"]
    process = run_model(model, args, kwargs, values, key=key).process
    new = {name: m["value"] for name, m in process.atom_sites(key).items()}
    atoms = {name: jnp.concatenate([draw[name], value[None]]) for name, value in new.items()}

    def one(atom: Sites) -> Array:
        each = {k: jnp.broadcast_to(v, (run.num_points, *v.shape)) for k, v in atom.items()}
        found = run_model(model, args, kwargs, values, each, key)
        return _log_likelihood(found, run.plate, run.num_points)

    mass = jnp.append(weights, jnp.maximum(1 - jnp.sum(weights), 0.0))
    return mass @ jnp.exp(lax.map(one, atoms))


def num_points(model: Callable, args: tuple, kwargs: dict) -> int:
    """Size of the data plate, without running the model's operations."""
    found: list[int] = []
    jax.eval_shape(lambda: found.append(run_model(model, args, kwargs).num_points))
    return found[0]


def process_draws(model: Callable, args: tuple, kwargs: dict, number: int) -> tuple[Array, Array]:
    """Concentration and discount in draws of the prior, shapes (number,)."""

    def one(key: Array) -> tuple[Array, Array]:
        process = run_model(model, args, kwargs, key=key).process
        discount = 0.0 if process.discount is None else process.discount
        return jnp.asarray(process.concentration, float), jnp.asarray(discount, float)

    with jax.ensure_compile_time_eval():
        return jax.jit(jax.vmap(one))(random.split(random.key(0), number))


def look(model: Callable, args: tuple, kwargs: dict, atoms: str = "auto") -> Facts:
    """Static facts of a model.

    Raises
    ------
    UnsupportedModelError
        When the model draws from no process or twice, has a discrete site beside it, or uses the
        atoms outside of the data plate; with `atoms="conjugate"`, when no pairs cover the atom.
    """
    # MCMC starts several chains inside a trace, where the numbers would not be there to compare
    with jax.ensure_compile_time_eval(), validation_enabled(False):
        first = run_model(model, args, kwargs, {}, None, random.key(0))
        held = {n: m["value"] for n, m in first.messages.items() if m["type"] == "sample"}
        runs = [first]
        runs += [run_model(model, args, kwargs, held, None, random.key(i)) for i in (1, 2)]
        latent = {
            name: m
            for name, m in first.messages.items()
            if m["type"] == "sample" and not m["is_observed"]
        }
        for name, message in latent.items():
            if message["fn"].support is not None and message["fn"].support.is_discrete:
                raise UnsupportedModelError(
                    f"DPSlice moves the sites beside the process by NUTS, but site '{name}' is "
                    f"discrete ({type(bare(message['fn'])).__name__}). Sum it out of the model."
                )
        _check_plates(model, args, kwargs, first)
        alpha = _gamma_concentration(model, args, kwargs, runs)
        links: tuple[Link, ...] | None = None
        reason = 'atoms="gradient"'
        if atoms != "gradient":
            found = _links(runs)
            links, reason = (None, found) if isinstance(found, str) else (found, "")
        if atoms == "conjugate" and links is None:
            raise UnsupportedModelError(
                f'DPSlice: `atoms="conjugate"`, but {reason}. Use atoms="auto".'
            )
    return Facts(
        model=model,
        process=first.process.name,
        plate=first.plate,
        num_points=first.num_points,
        base_sites=tuple(first.atom),
        global_sites=tuple(name for name in latent if name != alpha),
        concentration=alpha,
        discount=first.process.discount is not None,
        links=links,
        reason=reason,
    )


# --- checks --------------------------------------------------------------------------------------


def _in_plate(message: Any, plate: str) -> bool:
    return any(frame.name == plate for frame in message["cond_indep_stack"])


def check_observations(model: Callable, args: tuple, kwargs: dict) -> None:
    """Raise `InitializationError` when the plate holds no data, or NaN that is not masked."""
    with jax.ensure_compile_time_eval(), validation_enabled(False):
        run = run_model(model, args, kwargs)
        observed = {
            name: message
            for name, message in run.messages.items()
            if message["type"] == "sample"
            and message["is_observed"]
            and _in_plate(message, run.plate)
        }
        if not observed:
            raise InitializationError(
                f"The plate '{run.plate}' of '{run.process.name}' has no observed site. Give the "
                "data: DPSlice samples posteriors, and numpyro.infer.Predictive the prior."
            )
        for name, message in observed.items():
            log_prob = message["fn"].log_prob(message["value"])
            missing = jnp.isnan(message["value"]).any() & jnp.isnan(log_prob).any()
            if not_jax_tracer(missing) and missing:
                raise InitializationError(
                    f"Observed site '{name}' has NaN values. Mask what is missing: "
                    f"{type(bare(message['fn'])).__name__}(...).mask(...)."
                )


def _check_plates(model: Callable, args: tuple, kwargs: dict, run: Run) -> None:
    """The atoms must show in the data plate only, where points are independent."""
    shown = {n: m["value"] for n, m in run.messages.items() if m["type"] == "sample"}
    other = run_model(model, args, kwargs, shown, None, random.key(3))
    for name, message in run.messages.items():
        if message["type"] != "sample" or _in_plate(message, run.plate):
            continue
        here = message["fn"].log_prob(message["value"])
        there = other.messages[name]["fn"].log_prob(message["value"])
        if not_jax_tracer(here) and not np.allclose(here, there, equal_nan=True):
            raise UnsupportedModelError(
                f"Site '{name}' depends on the atoms of '{run.process.name}' but is not in the "
                f"plate '{run.plate}' of its points. Move it into the plate."
            )


def _gamma_concentration(model: Callable, args: tuple, kwargs: dict, runs: list[Run]) -> str | None:
    """The site that is the concentration, if it is Gamma and does nothing else."""
    run = runs[0]
    if run.process.discount is not None:
        return None
    name = next(
        (
            name
            for name, m in run.messages.items()
            if m["type"] == "sample" and m["value"] is run.process.concentration
        ),
        None,
    )
    if name is None or run.messages[name]["is_observed"]:
        return None
    if not isinstance(bare(run.messages[name]["fn"]), dist.Gamma):
        return None
    shown = {n: m["value"] for n, m in run.messages.items() if m["type"] == "sample"}
    atoms = {n: m["value"] for n, m in run.atom.items()}
    shown[name] = shown[name] + 1.0
    n = run.num_points
    each = {k: jnp.broadcast_to(v, (n, *jnp.shape(v))) for k, v in atoms.items()}
    other = run_model(model, args, kwargs, shown, each)
    for site, message in run.messages.items():
        if message["type"] != "sample" or site == name:
            continue
        here = message["fn"].log_prob(message["value"])
        there = other.messages[site]["fn"].log_prob(message["value"])
        if not not_jax_tracer(here) or not np.allclose(here, there, equal_nan=True):
            return None
    moved = other.process.atom_sites(random.key(0), atoms)
    for site, message in run.process.atom_sites(random.key(0), atoms).items():
        here, there = (m["fn"].log_prob(atoms[site]) for m in (message, moved[site]))
        if not not_jax_tracer(here) or not np.allclose(here, there, equal_nan=True):
            return None
    return name


# --- likelihood ----------------------------------------------------------------------------------


def _log_likelihood(run: Run, plate: str, n: int) -> Array:
    """Log density of each point's sites, (n,): all sites of the plate, its latent ones included."""
    total = jnp.zeros(n)
    for message in run.messages.values():
        if message["type"] != "sample" or not _in_plate(message, plate):
            continue
        log_prob = message["fn"].log_prob(message["value"])
        if message.get("scale") is not None:
            log_prob = log_prob * message["scale"]
        log_prob = jnp.broadcast_to(log_prob, jnp.broadcast_shapes(jnp.shape(log_prob), (n,)))
        total = total + jnp.sum(log_prob, tuple(range(log_prob.ndim - 1)))
    return total


# --- conjugate pairs -----------------------------------------------------------------------------


def _mask(distribution: Any, size: int) -> Array:
    """Mask of each number of each point, ones where there is none: (n or 1, size or 1)."""
    mask = jnp.ones((1, 1), bool)
    while isinstance(distribution, (Independent, ExpandedDistribution, MaskedDistribution)):
        if isinstance(distribution, MaskedDistribution):
            whole = jnp.broadcast_to(distribution._mask, distribution.batch_shape)
            # one axis is that of the points
            mask = mask & _flat(whole, 1 if whole.ndim < 2 else size)
        distribution = distribution.base_dist
    return mask


def _flat(values: Any, size: int) -> Array:
    """Parameters of points as (n, size), with 1 in place of what does not vary.

    NumPyro gives parameters of a distribution equally many axes, the points' first.
    """
    values = jnp.asarray(values)
    if values.ndim == 0:
        return values.reshape(1, 1)
    if values.ndim == 1:
        return values.reshape(-1, 1) if size == 1 else values.reshape(1, -1)
    return values.reshape(values.shape[0], -1)


def _same(values: list[Any]) -> bool:
    """Whether parameters agree at all probes."""
    if not all(not_jax_tracer(v) for v in values):
        return False
    first = np.asarray(values[0], np.float64)
    return bool(np.isfinite(first).all()) and all(
        np.shape(v) == first.shape and np.allclose(v, first, rtol=1e-3, atol=1e-4) for v in values
    )


def _links(runs: list[Run]) -> tuple[Link, ...] | str:
    """Pairs that cover all sites of the atom, or the reason why there are none."""
    run = runs[0]
    free = set(run.atom)
    links = []
    for name, message in run.messages.items():
        if message["type"] != "sample" or not _in_plate(message, run.plate):
            continue
        value = message["value"]
        log_probs = [r.messages[name]["fn"].log_prob(value) for r in runs]
        if message["is_observed"] and isinstance(message["fn"], Unit):
            return f"'{name}' is a factor in the data plate"
        if _same(log_probs) and not message["is_observed"]:
            continue
        if not message["is_observed"]:
            return f"the latent site '{name}' of the data plate depends on the atoms"
        if message.get("scale") is not None:
            return f"'{name}' is scaled"
        if [f.name for f in message["cond_indep_stack"]] != [run.plate]:
            return f"'{name}' is in more plates than '{run.plate}'"
        link = _link(name, runs, free)
        if link is None:
            kind = type(bare(message["fn"])).__name__
            bases = {type(bare(m["fn"])).__name__ for m in run.atom.values()}
            return f"'{name}' ({kind}) makes no conjugate pair with a base of {sorted(bases)}"
        links.append(link)
        free -= set(link.sites.values())
    if free:
        return f"the atom's sites {sorted(free)} have no likelihood of their own"
    return tuple(links)


def _link(name: str, runs: list[Run], free: set[str]) -> Link | None:
    for sites, pair in _candidates(name, runs[0], sorted(free)):
        link = Link(name, pair, sites)
        try:
            members = [_member(link, r) for r in runs]
        except (AttributeError, TypeError, ValueError):
            continue
        # what is known beside the atom must not move with it
        parts = [
            (*m.prior.values(), *(v for k, v in m.rows.items() if k != "y")) for m, _ in members
        ]
        if all(_same(list(values)) for values in zip(*parts, strict=True)):
            return link
    return None


def _candidates(name: str, run: Run, free: list[str]) -> list[tuple[dict[str, str], Any]]:
    """Pairs that the families of the distributions allow, with the roles of the atom's sites."""
    core = bare(run.messages[name]["fn"])
    kinds = {site: type(bare(run.atom[site]["fn"])) for site in free}
    of = lambda *types: [site for site in free if issubclass(kinds[site], types)]  # noqa: E731
    if isinstance(core, dist.Normal):
        means = of(dist.Normal)
        found: list[tuple[dict[str, str], Any]] = [
            ({"mean": mean}, cj.NormalMean()) for mean in means
        ]
        for spread in of(dist.Gamma, dist.InverseGamma):
            variance = issubclass(kinds[spread], dist.InverseGamma)
            pair = cj.NormalInverseGamma(variance)
            found += [({"mean": mean, "spread": spread}, pair) for mean in means]
        return found
    if isinstance(core, dist.MultivariateNormal):
        dim = core.event_shape[0]
        found = []
        for spread in of(dist.Wishart, dist.InverseWishart):
            joint = cj.NormalInverseWishart(dim, issubclass(kinds[spread], dist.InverseWishart))
            found += [
                ({"mean": mean, "spread": spread}, joint) for mean in of(dist.MultivariateNormal)
            ]
        return found
    if isinstance(core, dist.Poisson):
        return [({"rate": site}, cj.GammaPoisson()) for site in of(dist.Gamma)]
    if isinstance(core, dist.Exponential):
        return [({"rate": site}, cj.GammaExponential()) for site in of(dist.Gamma)]
    if hasattr(core, "probs") and type(core).__name__.startswith(("Bernoulli", "Binomial")):
        return [({"probs": site}, cj.BetaBinomial()) for site in of(dist.Beta)]
    if hasattr(core, "probs") and type(core).__name__.startswith(("Categorical", "Multinomial")):
        return [({"probs": site}, cj.Dirichlet()) for site in of(dist.Dirichlet)]
    return []


def _member(link: Link, run: Run) -> tuple[cj.Member, Callable[[str, Array], Array]]:
    """A pair bound to its data, from the distributions at the atom of `run`.

    Raises
    ------
    ValueError
        When numbers that have to be equal are known and differ: it is no such pair.
    """
    message = run.messages[link.observed]
    core = bare(message["fn"])
    atom = {role: jnp.asarray(run.atom[site]["value"]) for role, site in link.sites.items()}
    base = {role: bare(run.atom[site]["fn"]) for role, site in link.sites.items()}
    size = next(iter(atom.values())).size
    rows, prior = _BINDINGS[type(link.pair)](link.pair, core, atom, base)
    y = message["value"]
    if isinstance(link.pair, cj.Dirichlet) and not core.event_shape:
        y = jax.nn.one_hot(y, size)
    mask = _mask(message["fn"], size)
    # missing values may be NaN
    y = jnp.where(mask, jnp.asarray(y, float).reshape(run.num_points, size), 0.0)
    rows = {"y": y, "mask": mask.astype(float), **rows}
    shift = jnp.zeros(size)
    if "offset" in rows:
        # float32 sums of squares are of numbers about zero
        weight = jnp.broadcast_to(rows["mask"], y.shape)
        shift = jnp.sum(weight * (y - rows["offset"]), 0) / jnp.maximum(jnp.sum(weight, 0), 1.0)
        rows["offset"] = rows["offset"] + shift
        prior["loc"] = prior["loc"] - shift
    shapes = {role: value.shape for role, value in atom.items()}

    def back(role: str, value: Array) -> Array:
        if role == "mean":
            value = value + shift
        flat = value.ndim - (
            2 if isinstance(link.pair, cj.NormalInverseWishart) and role == "spread" else 1
        )
        return value.reshape(value.shape[:flat] + shapes[role])

    return cj.Member(link.pair, rows, prior), back


def _normal_mean(pair: Any, core: Any, atom: Sites, base: dict) -> tuple[cj.Rows, cj.Prior]:
    mean, prior = atom["mean"].ravel(), base["mean"]
    size = mean.size
    rows = {"offset": _flat(core.loc, size) - mean, "scale": _flat(core.scale, size)}
    return rows, {"loc": _wide(prior.loc, size), "precision": _wide(prior.scale, size) ** -2}


def _normal_inverse_gamma(
    pair: Any, core: Any, atom: Sites, base: dict
) -> tuple[cj.Rows, cj.Prior]:
    mean, spread = atom["mean"].ravel(), atom["spread"].ravel()
    size = mean.size
    if spread.size != size:
        raise ValueError("one precision belongs to several means")
    precision = 1 / spread if pair.variance else spread
    rows = {
        "offset": _flat(core.loc, size) - mean,
        "scale": _flat(core.scale, size) * jnp.sqrt(precision),
    }
    prior = {
        "loc": _wide(base["mean"].loc, size),
        "kappa": _wide(base["mean"].scale, size) ** -2 / precision,
        "shape": _wide(base["spread"].concentration, size),
        "rate": _wide(base["spread"].rate, size),
    }
    return rows, prior


def _normal_inverse_wishart(
    pair: Any, core: Any, atom: Sites, base: dict
) -> tuple[cj.Rows, cj.Prior]:
    name = "covariance_matrix" if pair.covariance else "precision_matrix"
    _check_equal(getattr(core, name), atom["spread"])
    matrix = getattr(base["mean"], name)
    ratio = jnp.trace(matrix) / jnp.trace(atom["spread"])
    _check_equal(matrix, ratio * atom["spread"])
    scale = base["spread"].scale_matrix
    rows = {"offset": _flat(core.loc, pair.dim) - atom["mean"], "scale": jnp.ones((1, 1))}
    prior = {
        "loc": _wide(base["mean"].loc, pair.dim),
        "kappa": 1 / ratio if pair.covariance else ratio,
        "df": jnp.asarray(base["spread"].concentration, float),
        "scale": scale if pair.covariance else jnp.linalg.inv(scale),
    }
    return rows, prior


def _gamma(pair: Any, core: Any, atom: Sites, base: dict) -> tuple[cj.Rows, cj.Prior]:
    rate, prior = atom["rate"].ravel(), base["rate"]
    rows = {"scale": _flat(core.rate, rate.size) / rate}
    return rows, {
        "shape": _wide(prior.concentration, rate.size),
        "rate": _wide(prior.rate, rate.size),
    }


def _beta(pair: Any, core: Any, atom: Sites, base: dict) -> tuple[cj.Rows, cj.Prior]:
    probs, prior = atom["probs"].ravel(), base["probs"]
    _check_equal(_flat(core.probs, probs.size), probs)
    rows = {"scale": _flat(jnp.asarray(getattr(core, "total_count", 1), float), probs.size)}
    return rows, {
        "a": _wide(prior.concentration1, probs.size),
        "b": _wide(prior.concentration0, probs.size),
    }


def _dirichlet(pair: Any, core: Any, atom: Sites, base: dict) -> tuple[cj.Rows, cj.Prior]:
    _check_equal(core.probs, atom["probs"])
    return {}, {"a": _wide(base["probs"].concentration, atom["probs"].size)}


def _wide(values: Any, size: int) -> Array:
    return jnp.broadcast_to(jnp.ravel(jnp.asarray(values, float)), (size,))


def _check_equal(here: Array, there: Array) -> None:
    if not_jax_tracer(here) and not_jax_tracer(there):
        there = jnp.broadcast_to(there, jnp.broadcast_shapes(jnp.shape(here), jnp.shape(there)))
        if not np.allclose(here, there, rtol=1e-3, atol=1e-5):
            raise ValueError("a parameter is not the atom")


_BINDINGS: dict[type, Callable[..., tuple[cj.Rows, cj.Prior]]] = {
    cj.NormalMean: _normal_mean,
    cj.NormalInverseGamma: _normal_inverse_gamma,
    cj.NormalInverseWishart: _normal_inverse_wishart,
    cj.GammaPoisson: _gamma,
    cj.GammaExponential: _gamma,
    cj.BetaBinomial: _beta,
    cj.Dirichlet: _dirichlet,
}
