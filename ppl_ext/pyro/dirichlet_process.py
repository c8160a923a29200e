"""Dirichlet and Pitman-Yor processes as parts of a Pyro model.

The same as `ppl_ext.numpyro.DirichletProcess`: exact when run forward, with no truncation level,
and answered by `DPSlice` in its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.messenger import block_messengers
from pyro.poutine.plate_messenger import PlateMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.substitute_messenger import SubstituteMessenger
from torch.utils._pytree import tree_map

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.target import PyTree

Tensors = dict[str, torch.Tensor]

# what a kernel puts in the place of `draw`
_answer: ContextVar[Callable[[Any, str, int], PyTree] | None] = ContextVar("answer", default=None)


@contextmanager
def answering(answer: Callable[[Any, str, int], PyTree]) -> Iterator[None]:
    """Within, `process.draw()` returns `answer(process, plate_name, num_points)`."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


class DirichletProcess:
    """A random discrete distribution over atoms: G ~ DP(concentration, base).

    Parameters
    ----------
    name : str
        Name of the process; its sites are `<name>_labels`, `<name>_weights`,
        `<name>_num_clusters`.
    concentration : float or Tensor
        Positive number, or a site. n points have about concentration * log(n) clusters.
    base : callable
        `base()`: the sites of one atom, returning their values in any structure. Sites that are
        vectors need `to_event`. It may use sites of the model outside of the data plate.

    Raises
    ------
    ppl_ext.errors.UnsupportedModelError
        By `draw`: not inside one plate of dimension -1; a site of `base` with a batch shape.

    Notes
    -----
    `draw()` inside the data plate gives each point's atom, each leaf with the leading size n. Run
    forward, the model draws labels, and the values of the atoms' sites with n slots, NaN beyond
    the clusters. With draws of `DPSlice` in `pyro.infer.Predictive`, points come from the
    posterior of G, and where its mass is not instantiated, from new atoms.

    Examples
    --------
    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer import Predictive
    >>> from ppl_ext.pyro import DirichletProcess
    >>> def base():
    ...     return pyro.sample("mu", dist.Normal(0.0, 10.0))
    >>> def model(n, y=None):
    ...     G = DirichletProcess("G", 1.0, base)
    ...     with pyro.plate("data", n):
    ...         mu = G.draw()
    ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> Predictive(model, num_samples=5)(100)["G_labels"].shape
    torch.Size([5, 1, 100])
    """

    def __init__(self, name: str, concentration: Any, base: Callable[[], PyTree]) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{type(self).__name__}: `name` must be a text, got {name!r}.")
        if isinstance(base, torch.distributions.Distribution) or not callable(base):
            raise TypeError(
                f"{type(self).__name__}: `base` must be a function that samples one atom, such as "
                f'`lambda: pyro.sample("mu", dist.Normal(0.0, 1.0))`, got {type(base).__name__}.'
            )
        self.name = name
        self.concentration = concentration
        self.base = base
        self.discount: Any = None
        self._check("concentration", concentration, lambda x: x > 0, "be positive")

    def draw(self) -> PyTree:
        """The atom of each point of the plate around."""
        plates = [m for m in _PYRO_STACK if isinstance(m, PlateMessenger)]
        if len(plates) != 1 or plates[0].dim != -1:
            raise UnsupportedModelError(
                f"`{self.name}.draw()` must be called inside one plate, that of the data, with dim "
                f"-1; found the plates {[(p.name, p.dim) for p in plates]}."
            )
        (data,) = plates
        if data.subsample_size < data.size:
            raise UnsupportedModelError(
                f"`{self.name}.draw()` needs all points of plate '{data.name}', which draws "
                f"{data.subsample_size} of {data.size}. Drop `subsample_size`."
            )
        # the process itself is not in the plate
        with block_messengers(lambda m: m is data):
            answer = _answer.get()
            if answer is not None:
                return answer(self, data.name, data.size)
            return self._draw_forward(data.size)

    # --- one atom --------------------------------------------------------------------------------

    def atom(self, values: Tensors | None = None) -> tuple[dict[str, Any], PyTree]:
        """Nodes of the base's sites for one atom, drawn or at `values`, and what it returns."""
        with poutine.block():
            base = poutine.condition(self.base, values) if values else self.base
            trace = poutine.trace(base).get_trace()
        sites = {n: node for n, node in trace.nodes.items() if node["type"] == "sample"}
        for name, node in sites.items():
            if node["fn"].batch_shape:
                raise UnsupportedModelError(
                    f"Site '{name}' of the base of '{self.name}' has the batch shape "
                    f"{tuple(node['fn'].batch_shape)}. Make it part of the event with `.to_event`."
                )
            if node["fn"].support.is_discrete:
                raise UnsupportedModelError(
                    f"Site '{name}' of the base of '{self.name}' is discrete "
                    f"({type(node['fn']).__name__}). Atoms have continuous sites only."
                )
            if node["is_observed"] and name not in (values or {}):
                raise UnsupportedModelError(
                    f"Site '{name}' of the base of '{self.name}' is observed; the base holds the "
                    "unknowns of one atom."
                )
        if not sites:
            raise UnsupportedModelError(f"The base of '{self.name}' has no sample site.")
        return sites, trace.nodes["_RETURN"]["value"]

    # --- forward ---------------------------------------------------------------------------------

    def _draw_forward(self, n: int) -> PyTree:
        weights = _conditioned(f"{self.name}_weights")
        if weights is None:
            labels = pyro.sample(f"{self.name}_labels", self._partition(n))
            known: Tensors = {}
            first = 0
        else:
            labels, known = self._posterior_labels(n, torch.as_tensor(weights))
            first = len(weights)
        used, position = torch.unique(labels.long(), return_inverse=True)
        atoms, returned = [], []
        for label in used.tolist():
            values = {name: x[label] for name, x in known.items()} if label < first else None
            sites, value = self.atom(values)
            atoms.append({name: node["value"] for name, node in sites.items()})
            returned.append(value)
        if weights is None:
            for name, value in atoms[0].items():
                # of a fixed size, so that several draws can be stacked
                slots = value.new_full((n, *value.shape), torch.nan)
                slots[: len(atoms)] = torch.stack([atom[name] for atom in atoms])
                pyro.deterministic(name, slots)
        pyro.deterministic(f"{self.name}_num_clusters", torch.tensor(len(atoms)))
        return tree_map(lambda *leaves: torch.stack(leaves)[position], *returned)

    def _posterior_labels(self, n: int, weights: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Labels given the instantiated part of G, those of new atoms from the slots on."""
        names = list(self.atom()[0])
        found = {name: _conditioned(name) for name in names}
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise ValueError(
                f"The draws hold '{self.name}_weights' but not the atoms' sites {missing}. Pass "
                "all of `mcmc.get_samples()`."
            )
        if weights.isnan().any():
            raise ValueError(
                f"The draws of '{self.name}' follow an overflow of the slots: they are NaN. Repeat "
                "the run with more: `kernel.rerun(mcmc)`."
            )
        rest = (1 - weights.sum()).clamp(min=0.0)
        labels = torch.multinomial(torch.cat([weights, rest[None]]), n, replacement=True)
        slots = len(weights)
        discount = 0.0 if self.discount is None else torch.as_tensor(self.discount)
        mass = torch.as_tensor(self.concentration) + slots * discount
        beyond = slots + restaurant(n, mass, self.discount)
        labels = torch.where(labels == slots, beyond, labels)
        pyro.deterministic(f"{self.name}_labels", labels)
        return labels, {name: torch.as_tensor(value) for name, value in found.items()}

    def _partition(self, n: int) -> Partition:
        return Partition(n, self.concentration, self.discount)

    def _check(self, argument: str, value: Any, fits: Callable[[float], bool], law: str) -> None:
        if torch.as_tensor(value).ndim:
            raise ValueError(
                f"{type(self).__name__}: `{argument}` of '{self.name}' must be a number, got shape "
                f"{tuple(torch.as_tensor(value).shape)}."
            )
        if isinstance(value, (int, float)) and not fits(value):
            raise ValueError(
                f"{type(self).__name__}: `{argument}` of '{self.name}' must {law}, got {value!r}."
            )


class PitmanYor(DirichletProcess):
    """The Pitman-Yor process: as `DirichletProcess`, with about n^discount clusters.

    Parameters
    ----------
    name : str
        As for `DirichletProcess`.
    concentration : float or Tensor
        As for `DirichletProcess`.
    discount : float or Tensor
        Number in [0, 1), or a site; 0 is the Dirichlet process.
    base : callable
        As for `DirichletProcess`.

    Examples
    --------
    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer import Predictive
    >>> from ppl_ext.pyro import PitmanYor
    >>> def model(n):
    ...     G = PitmanYor("G", 1.0, 0.5, lambda: pyro.sample("mu", dist.Normal(0.0, 10.0)))
    ...     with pyro.plate("data", n):
    ...         pyro.deterministic("theta", G.draw())
    >>> Predictive(model, num_samples=5)(100)["theta"].shape
    torch.Size([5, 100])
    """

    def __init__(
        self, name: str, concentration: Any, discount: Any, base: Callable[[], PyTree]
    ) -> None:
        super().__init__(name, concentration, base)
        self._check("discount", discount, lambda x: 0 <= x < 1, "lie in [0, 1)")
        self.discount = discount

    def _partition(self, n: int) -> Partition:
        return PitmanYorPartition(n, self.concentration, self.discount)


class Partition(dist.TorchDistribution):
    """Labels of n points under a process: 0, 1, ... in the order of appearance."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.independent(constraints.nonnegative_integer, 1)

    def __init__(self, num_points: int, concentration: Any, discount: Any = None) -> None:
        self.num_points, self.concentration, self.discount = num_points, concentration, discount
        super().__init__((), torch.Size((num_points,)), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return dist.torch_distribution.ExpandedDistribution(self, batch_shape)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        count = torch.Size(sample_shape).numel()
        one = lambda: restaurant(self.num_points, self.concentration, self.discount)  # noqa: E731
        return torch.stack([one() for _ in range(count)]).reshape(*sample_shape, self.num_points)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Exchangeable partition probability, Pitman 1995, proposition 9."""
        counts = torch.bincount(value.long())
        sizes = counts[counts > 0]
        alpha = torch.as_tensor(self.concentration, dtype=torch.get_default_dtype())
        d = torch.as_tensor(0.0 if self.discount is None else self.discount)
        new = torch.log(alpha + d * torch.arange(1, len(sizes))).sum()
        within = (torch.lgamma(sizes - d) - torch.lgamma(1 - d)).sum()
        return new + within - torch.lgamma(alpha + self.num_points) + torch.lgamma(alpha + 1)


class PitmanYorPartition(Partition):
    """As `Partition`, under a name of its own in tables."""


def restaurant(n: int, concentration: Any, discount: Any = None) -> torch.Tensor:
    """Labels of n points, one after the other: a point follows a random earlier one or is new.

    Of the mass i + alpha at point i, alpha + H d belongs to a new cluster. The d of each cluster
    is taken from its founder: a point that would follow a founder is new with probability d. All
    points are moved at once, until none changes: chains of followers have about log n members.
    """
    i = torch.arange(n)
    earlier = torch.minimum((torch.rand(n) * i).long(), (i - 1).clamp(min=0))
    new = (i == 0) | (torch.rand(n) * (i + concentration) >= i)
    if discount is not None:
        leaves = torch.rand(n) < discount
        founders = new
        while not torch.equal(founders, settled := new | (founders[earlier] & leaves)):
            founders = settled
        new = founders
    leader = torch.where(new, i, earlier)
    while not torch.equal(leader, leader[leader]):
        leader = leader[leader]
    return (torch.cumsum(new.long(), 0) - 1)[leader]


def _conditioned(name: str) -> Any:
    """The value that a `condition` or `substitute` around gives to a site, or None."""
    for messenger in reversed(_PYRO_STACK):
        if isinstance(messenger, (ConditionMessenger, SubstituteMessenger)):
            data = messenger.data
            if isinstance(data, poutine.Trace):
                data = {n: node["value"] for n, node in data.nodes.items() if "value" in node}
            if name in data:
                return data[name]
    return None
