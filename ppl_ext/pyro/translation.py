"""Pyro model -> NumPyro model, for the kernels that read a model's distributions.

The model is recorded (`ppl_ext.pyro.program`) with the parameters of all its distributions as
outputs, at given values of its sites. The NumPyro model evaluates site after site the part of the
recording that the next distribution needs. At two points the log densities of all sites are
compared with Pyro's.

A minibatch is recorded with one datum, and its parameters are mapped over any number of indices;
a recording with two data tells which axes belong to the plate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Unit
from pyro.infer.autoguide.initialization import InitMessenger, init_to_uniform
from pyro.poutine.subsample_messenger import SubsampleMessenger, _Subsample
from torch.utils._pytree import tree_flatten, tree_unflatten

from ppl_ext.errors import MismatchError, UnsupportedModelError
from ppl_ext.numpyro import dirichlet_process as np_process
from ppl_ext.numpyro.target import bare
from ppl_ext.pyro import dirichlet_process as process
from ppl_ext.pyro.check import compare_values, same_program
from ppl_ext.pyro.distributions import INTEGER_VALUES, Form, take_apart
from ppl_ext.pyro.program import Program, Value, record, to_jax
from ppl_ext.target import Array

Tensors = dict[str, torch.Tensor]
Arrays = dict[str, Array]

# inputs of a recording beside the sites
INDICES = "/indices"
ATOM = "/atom"

# of the log densities of a site, relative to the largest
TOLERANCE = {"float32": 2e-3, "float64": 1e-7}
LARGE = 1e8


@dataclass(frozen=True)
class Frame:
    """A plate with an axis."""

    name: str
    size: int
    dim: int


@dataclass(frozen=True)
class Step:
    """What the NumPyro model does for one site."""

    name: str
    kind: str  # latent, observed, factor, deterministic
    form: Form | None
    frames: tuple[Frame, ...]
    masked: bool
    scaled: bool
    integer: bool = False


@dataclass(frozen=True)
class Process:
    """A process, and the sites of its base as steps; the steps before `position` precede it."""

    name: str
    plate: str
    num_points: int
    base: tuple[Step, ...]
    returned: tuple[str, ...]
    discount: bool
    position: int


@contextmanager
def indices_of(plate: str, indices: torch.Tensor | None = None) -> Iterator[list[int]]:
    """Within, the Pyro plate of this name has these indices, whatever their number; or all.

    Yields a list that gets the size of the plate.
    """
    sizes: list[int] = []
    original = SubsampleMessenger._subsample

    def subsample(name: str, size: Any = None, *rest: Any, **options: Any) -> Any:
        if name != plate:
            return original(name, size, *rest, **options)
        sizes.append(size)
        chosen = torch.arange(size) if indices is None else indices
        return size, len(chosen), chosen

    with patch.object(SubsampleMessenger, "_subsample", staticmethod(subsample)):
        yield sizes


def whole(model: Callable[..., Any], plate: str) -> Callable[..., Any]:
    """The model with all data of a plate in place of a minibatch."""

    def with_all(*args: Any, **kwargs: Any) -> Any:
        with indices_of(plate):
            return model(*args, **kwargs)

    return with_all


class Translation:
    """A Pyro model with its data as a NumPyro model of `constants`.

    Parameters
    ----------
    model, args, kwargs
        Pyro model and its arguments.
    plate : str, optional
        Plate of which the NumPyro model can be asked for any data.

    Raises
    ------
    UnsupportedModelError
        For a distribution that NumPyro does not have; names the site.
    TracingError
        When JAX cannot evaluate the model.
    MismatchError
        When a log density differs from Pyro's; names the site.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        plate: str | None = None,
    ) -> None:
        self._pyro_model, self._args, self._kwargs, self.plate = model, args, kwargs, plate
        self._size = 0
        self._base_names: tuple[str, ...] = ()
        self._batch_axes: dict[str, int] = {}
        points, traces = zip(*(self._point(seed) for seed in range(2)), strict=True)
        self._describe(points[0])
        recording = record(self._outputs, points[0])
        same_program(recording, record(self._outputs, points[1]))
        self.double = not recording.program.float_dtypes().isdisjoint({"float64", "complex128"})
        self.program: Program = recording.program
        self.like = {name: x for name, x in points[0].items() if x.is_floating_point()}
        with jax.enable_x64(self.double):
            self.constants: tuple[Array, ...] = tuple(map(to_jax, recording.constants))
            compare_values(recording, self.constants, self._outputs, points)
        self._dependent = set() if plate is None else self.program.depend_on(INDICES)
        self._part = cache(self.program.part)
        if plate is not None:
            self._find_batch_axes(points[0])
        with jax.enable_x64(self.double):
            for point, trace in zip(points, traces, strict=True):
                self._compare_densities(point, trace)

    @property
    def key(self) -> str:
        """Equal for models that compute the same from their constants."""
        return self.program.key

    # --- Pyro --------------------------------------------------------------------------------

    def _point(self, seed: int) -> tuple[Tensors, Any]:
        """Values of all inputs at a random point, and Pyro's trace there."""
        found: Tensors = {}

        def answer(process: Any, plate: str, n: int) -> Any:
            sites, value = process.atom()
            found.update({name: node["value"] for name, node in sites.items()})
            leaves, structure = tree_flatten(value)
            each = [x.expand(n, *x.shape).clone() for x in leaves]
            found.update({f"{ATOM}{i}": x for i, x in enumerate(each)})
            return tree_unflatten(each, structure)

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            indices = torch.tensor([seed])
            trace = self._trace(InitMessenger(_start)(self._pyro_model), answer, indices)
        for name, node in _samples(trace):
            if not node["is_observed"]:
                found[name] = node["value"]
        if self.plate is not None:
            found[INDICES] = indices
        # in the order of the model, so that the record does not depend on the point
        return {name: found[name].detach() for name in sorted(found)}, trace

    def _trace(self, model: Callable[..., Any], answer: Any, indices: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(process.answering(answer))
            stack.enter_context(poutine.block())
            sizes = []
            if self.plate is not None:
                sizes = stack.enter_context(indices_of(self.plate, indices))
            trace = poutine.trace(model).get_trace(*self._args, **self._kwargs)
        self._size = sizes[0] if sizes else 0
        return trace

    def _describe(self, point: Tensors) -> None:
        """Steps of the NumPyro model, from a first run of `_outputs`."""
        self._steps: tuple[Step, ...] = ()
        self._process: Process | None = None
        with torch.no_grad():
            self._outputs(point, describe=True)

    def _outputs(self, inputs: Mapping[str, torch.Tensor], describe: bool = False) -> Tensors:
        """Parameters of all distributions at given values of all sites; this is recorded."""
        found: Tensors = {}
        inner: list[Any] = []
        seen: list[str] = []

        def answer(process: Any, plate: str, n: int) -> Any:
            names = self._base_names or tuple(process.atom()[0])
            self._base_names = names
            sites, value = process.atom({name: inputs[name] for name in names})
            steps = tuple(self._step(name, node, found, True) for name, node in sites.items())
            leaves, structure = tree_flatten(value)
            found[f"{process.name}/concentration"] = _tensor(process.concentration)
            if process.discount is not None:
                found[f"{process.name}/discount"] = _tensor(process.discount)
            returned = []
            for i, leaf in enumerate(leaves):
                found[f"{process.name}/{i}"] = leaf
                returned.append(f"{process.name}/{i}")
            inner.append((process, plate, n, steps, tuple(returned), len(seen)))
            return tree_unflatten([inputs[f"{ATOM}{i}"] for i in range(len(leaves))], structure)

        values = {n: x for n, x in inputs.items() if not n.startswith("/")}
        model = _Watch(seen)(poutine.condition(self._pyro_model, values))
        trace = self._trace(model, answer, inputs.get(INDICES))
        steps = [self._step(name, node, found, name in values) for name, node in _samples(trace)]
        if describe:
            self._steps = tuple(steps)
            if len(inner) > 1:
                raise UnsupportedModelError(
                    f"A kernel takes one call of `draw` in a model; found {len(inner)} "
                    f"({[p[0].name for p in inner]}). Draw once, and return all that an atom has "
                    "from `base`."
                )
            for p, plate, n, base, returned, position in inner:
                discount = p.discount is not None
                self._process = Process(p.name, plate, n, base, returned, discount, position)
        return found

    def _step(self, name: str, node: Any, found: Tensors, given: bool) -> Step:
        """Adds what the site needs to `found`; what is no parameter has a dot in its name."""
        frames = []
        for frame in node["cond_indep_stack"]:
            # a plate that is a loop has no axis
            if frame.dim is not None:
                size = self._size if frame.name == self.plate else frame.size
                frames.append(Frame(frame.name, int(size), frame.dim))
        frames.sort(key=lambda frame: frame.dim)
        scale = node["scale"]
        for frame in frames:
            if frame.name == self.plate:
                indices = next(f.size for f in node["cond_indep_stack"] if f.name == self.plate)
                scale = scale * indices / self._size
        mask = node["mask"]
        masked = mask is not None and mask is not True
        scaled = isinstance(scale, torch.Tensor) or abs(scale - 1.0) > 1e-12
        if masked:
            found[f"{name}/.mask"] = _tensor(mask)
        if scaled:
            found[f"{name}/.scale"] = _tensor(scale)
        distribution = node["fn"]
        common: dict[str, Any] = dict(frames=tuple(frames), masked=masked, scaled=scaled)
        if isinstance(distribution, Unit):
            found[f"{name}/.value"] = distribution.log_factor
            return Step(name, "factor", None, **common)
        if node["infer"].get("_deterministic"):
            found[f"{name}/.value"] = node["value"]
            return Step(name, "deterministic", None, **common)
        form = take_apart(distribution, name, found)
        if given:
            return Step(name, "latent", form, **common)
        found[f"{name}/.value"] = node["value"]
        leaf = distribution
        while hasattr(leaf, "base_dist") and not hasattr(leaf, "numpyro_form"):
            leaf = leaf.base_dist
        integer = type(leaf).__name__ in INTEGER_VALUES or hasattr(leaf, "numpyro_form")
        return Step(name, "observed", form, **common, integer=integer)

    # --- NumPyro -----------------------------------------------------------------------------

    def model(self, constants: tuple[Array, ...]) -> None:
        """The NumPyro model; `constants` are those of this translation, or of an equal one."""
        values: Arrays = {}
        plates: dict[str, Any] = {}
        if self.plate is not None:
            # of all the data, unless a kernel asks for some
            frame = next(f for s in self._steps for f in s.frames if f.name == self.plate)
            plates[self.plate] = numpyro.plate(self.plate, self._size, dim=frame.dim)
            with plates[self.plate] as indices:
                values[INDICES] = indices
        for i, step in enumerate(self._steps):
            if self._process is not None and self._process.position == i:
                self._draw(self._process, plates, values, constants)
            with ExitStack() as stack:
                for frame in step.frames:
                    if frame.name not in plates:
                        plates[frame.name] = numpyro.plate(frame.name, frame.size, dim=frame.dim)
                    stack.enter_context(plates[frame.name])
                self._sample(step, values, constants)

    def _sample(self, step: Step, values: Arrays, constants: tuple[Array, ...]) -> None:
        names = [] if step.form is None else list(step.form.names)
        names += [f"{step.name}/.mask"] * step.masked + [f"{step.name}/.scale"] * step.scaled
        names += [f"{step.name}/.value"] * (step.kind != "latent")
        found = self._evaluate(names, values, constants)
        if step.kind == "deterministic":
            numpyro.deterministic(step.name, found[f"{step.name}/.value"])
            return
        with ExitStack() as stack:
            if step.masked:
                stack.enter_context(numpyro.handlers.mask(mask=found[f"{step.name}/.mask"]))
            if step.scaled:
                stack.enter_context(numpyro.handlers.scale(scale=found[f"{step.name}/.scale"]))
            if step.form is None:
                numpyro.factor(step.name, found[f"{step.name}/.value"])
                return
            observed = None
            if step.kind == "observed":
                observed = found[f"{step.name}/.value"]
                observed = observed.astype(int) if step.integer else observed
            distribution = step.form.build(found)
            values[step.name] = numpyro.sample(step.name, distribution, obs=observed)

    def _draw(
        self,
        p: Process,
        plates: dict[str, Any],
        values: Arrays,
        constants: tuple[Array, ...],
    ) -> None:
        before = dict(values)

        def base() -> Any:
            known = dict(before)
            for step in p.base:
                self._sample(step, known, constants)
            found = self._evaluate(p.returned, known, constants)
            return tuple(found[name] for name in p.returned)

        numbers = [f"{p.name}/concentration"] + [f"{p.name}/discount"] * p.discount
        found = self._evaluate(numbers, values, constants)
        if p.discount:
            g: Any = np_process.PitmanYor(p.name, found[numbers[0]], found[numbers[1]], base)
        else:
            g = np_process.DirichletProcess(p.name, found[numbers[0]], base)
        plates.setdefault(p.plate, numpyro.plate(p.plate, p.num_points, dim=-1))
        with plates[p.plate]:
            leaves = g.draw()
        values.update({f"{ATOM}{i}": leaf for i, leaf in enumerate(leaves)})

    def _evaluate(
        self, names: Any, values: Mapping[str, Array], constants: tuple[Array, ...]
    ) -> Arrays:
        """Outputs of the recording by name, with the data at the plate's indices."""
        here = [name for name in names if name not in self._dependent]
        there = tuple(name for name in names if name in self._dependent)
        found = self._run(tuple(here), values, constants)
        if there:
            each = jax.vmap(
                lambda i: self._run(there, {**values, INDICES: i[None]}, constants), out_axes=0
            )(values[INDICES])
            for name, value in each.items():
                axis = self._batch_axes[name]
                found[name] = jnp.moveaxis(jnp.squeeze(value, 1 + axis), 0, axis)
        return found

    def _run(
        self, names: tuple[str, ...], values: Mapping[str, Array], constants: tuple[Array, ...]
    ) -> Arrays:
        program, used = self._part(names)
        inputs = {}
        for name, result in program.inputs.items():
            # the model's order is such that what is not known yet is not used
            inputs[name] = values[name] if name in values else jnp.zeros(result.shape, result.dtype)
        found = program.evaluate(inputs, [constants[i] for i in used])
        for name, ref in program.outputs.items():
            # the very object, by which kernels know a parameter that is a site
            for i, given in enumerate(program.inputs):
                if ref == Value(i) and given in values:
                    found[name] = values[given]
        return found

    # --- checks ------------------------------------------------------------------------------

    def _find_batch_axes(self, point: Tensors) -> None:
        """Axis of the plate in each output that depends on its indices."""
        two = {**point, INDICES: torch.tensor([0, min(1, self._size - 1)])}
        with torch.no_grad():
            one, both = self._outputs(point), self._outputs(two)
        for name in self._dependent:
            shapes = tuple(one[name].shape), tuple(both[name].shape)
            differ = [i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b]
            if len(shapes[0]) != len(shapes[1]) or len(differ) != 1:
                site, what = name.split("/", 1)
                raise UnsupportedModelError(
                    f"The {what} of site '{site}' depends on the data of plate '{self.plate}' as a "
                    f"whole: with 1 datum its shape is {shapes[0]}, with 2 {shapes[1]}. A "
                    "minibatch needs terms that belong to one datum each."
                )
            self._batch_axes[name] = differ[0]
        with jax.enable_x64(self.double):
            known = {name: to_jax(x) for name, x in two.items()}
            found = self._evaluate(list(self.program.outputs), known, self.constants)
        for name in self._dependent:
            expected = both[name].detach().cpu().numpy()
            if not _close(np.asarray(found[name]), expected, self.double):
                site, what = name.split("/", 1)
                raise UnsupportedModelError(
                    f"The {what} of site '{site}' is not that of each datum of plate "
                    f"'{self.plate}' alone: two data together give other numbers."
                )

    def _compare_densities(self, point: Tensors, trace: Any) -> None:
        """Raise `MismatchError` unless the log density of each site is Pyro's."""
        values = {name: to_jax(x) for name, x in point.items()}
        with numpyro.validation_enabled(False):
            for step in self._steps:
                if step.form is None:
                    continue
                names = [*step.form.names] + [f"{step.name}/.value"] * (step.kind == "observed")
                found = self._run(tuple(names), values, self.constants)
                distribution = step.form.build(found)
                node = trace.nodes[step.name]
                value = (
                    found[f"{step.name}/.value"] if step.kind == "observed" else values[step.name]
                )
                if hasattr(bare(distribution), "has_normalizer"):
                    # without its constant there is no density to compare
                    continue
                if step.integer:
                    value = value.astype(int)
                ours = np.asarray(distribution.log_prob(value))
                with torch.no_grad():
                    theirs = node["fn"].log_prob(node["value"]).cpu().numpy()
                if ours.shape != theirs.shape or not _close(ours, theirs, self.double):
                    raise MismatchError(
                        f"The log density of site '{step.name}' ({type(node['fn']).__name__}) is "
                        f"{ours.ravel()[:3]} in NumPyro and {theirs.ravel()[:3]} in Pyro (shapes "
                        f"{ours.shape} and {theirs.shape}). Write the site by another distribution."
                    )


class _Watch(poutine.messenger.Messenger):
    """Keeps the names of the sites in the order in which they are reached."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def _pyro_post_sample(self, msg: Any) -> None:
        if not isinstance(msg["fn"], _Subsample):
            self._seen.append(msg["name"])


def _start(site: Any) -> torch.Tensor:
    discrete = site["fn"].support.is_discrete or isinstance(site["fn"], Delta)
    return site["fn"].sample() if discrete else init_to_uniform(site)


def _samples(trace: Any) -> Iterator[tuple[str, Any]]:
    for name, node in trace.nodes.items():
        if node["type"] == "sample" and not isinstance(node["fn"], _Subsample):
            yield name, node


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool):
        return torch.tensor(value)
    return torch.tensor(float(value))


def _close(ours: np.ndarray, theirs: np.ndarray, double: bool) -> bool:
    tolerance = TOLERANCE["float64" if double else "float32"]
    # beyond this, one of the two may have overflowed on its way
    seen = ~(np.abs(theirs) > LARGE)
    ours, theirs = ours[seen], theirs[seen]
    size = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
    return bool(np.allclose(ours, theirs, rtol=tolerance, atol=tolerance * size, equal_nan=True))
