"""The table of kernels, and what each of them says to a model.

A package adds a kernel by an entry point of the group `ppl_ext.kernels` that names a function
returning an `Entry`. `available`, `explain`, the command line and the conformance tests read
this table, nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from ppl_ext.target import Target

if TYPE_CHECKING:
    import pandas as pd

GROUP = "ppl_ext.kernels"


@dataclass(frozen=True)
class Example:
    """A small model with an exactly known posterior.

    `mean` and `sd` give the exact posterior mean and standard deviation by site.
    """

    model: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    mean: dict[str, Any]
    sd: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """What the registry knows of one kernel in one language.

    Parameters
    ----------
    name, language : str
        `ppl_ext.<language>.<name>` is the kernel class.
    kernel : callable
        The class; called with the model first.
    models : str
        The models it takes, in a few words.
    exact : bool
        Whether its draws converge to the posterior itself.
    source : str
        The paper.
    refusal : callable
        `refusal(target)`: why the kernel cannot take this model, or `None`.
    example : callable
        `example()`: a model with an exact answer, for the conformance tests.
    options : dict
        Keyword arguments for the kernel in the conformance tests.
    gibbs_block, potential_fn : bool
        Whether the kernel works as a block of `numpyro.infer.Gibbs`, and without a model.
    own_models : bool
        Whether it takes only models of a kind of its own, such as `example`: the conformance tests
        then leave out those with a model of theirs.
    remark : callable, optional
        `remark(target)`: how the kernel would sample a model that it takes, for `explain`.
    minibatch : bool
        Whether the kernel draws data from a plate, which its models must have.
    intractable : bool
        Whether the kernel needs a likelihood with an unknown normalising constant.
    """

    name: str
    language: str
    kernel: Callable[..., Any]
    models: str
    exact: bool
    source: str
    refusal: Callable[[Target], str | None]
    example: Callable[[], Example]
    options: dict[str, Any] = field(default_factory=dict)
    gibbs_block: bool = True
    potential_fn: bool = True
    own_models: bool = False
    remark: Callable[[Target], str | None] | None = None
    minibatch: bool = False
    intractable: bool = False


@cache
def entries() -> tuple[Entry, ...]:
    """All registered kernels of the languages that are installed, by language and name."""
    loaded: list[Entry] = []
    for point in entry_points(group=GROUP):
        try:
            entry = point.load()()
        except ModuleNotFoundError as error:
            # Pyro is an optional dependency
            if error.name in ("pyro", "torch"):
                continue
            raise
        if not isinstance(entry, Entry):
            raise TypeError(
                f"Entry point '{point.name}' of group '{GROUP}' must return a "
                f"ppl_ext.registry.Entry, got {type(entry).__name__}."
            )
        loaded.append(entry)
    return tuple(sorted(loaded, key=lambda entry: (entry.language, entry.name)))


def target(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Target:
    """`Target` of a model, by the front end of its language.

    Raises
    ------
    TypeError
        When `model` is not callable.
    """
    # a model is Pyro's when running it declares Pyro sites; without Pyro there are none
    if "pyro" in sys.modules and callable(model):
        from ppl_ext.pyro.target import declares_sites
        from ppl_ext.pyro.target import target as pyro_target

        if declares_sites(model, args, kwargs):
            return pyro_target(model, *args, **kwargs)

    from ppl_ext.numpyro.target import target as numpyro_target

    return numpyro_target(model, *args, **kwargs)


def converter(mcmc: Any) -> Callable[..., Any] | None:
    """What turns a run into ArviZ's container, for a language that ArviZ itself does not read."""
    if not any(c.__module__.startswith("pyro.infer.mcmc") for c in type(mcmc).__mro__):
        return None
    from ppl_ext.pyro.convert import to_arviz

    return to_arviz


def available() -> pd.DataFrame:
    """Table of the kernels by name and language: models they take, exact or biased, source.

    Examples
    --------
    >>> import ppl_ext
    >>> ppl_ext.available().loc[("ULD", "numpyro"), "draws"]
    'biased'
    """
    import pandas as pd

    rows = [
        {
            "kernel": entry.name,
            "language": entry.language,
            "models": entry.models,
            "draws": "exact" if entry.exact else "biased",
            "source": entry.source,
        }
        for entry in entries()
    ]
    columns = ["kernel", "language", "models", "draws", "source"]
    return pd.DataFrame(rows, columns=columns).set_index(["kernel", "language"])


@dataclass(frozen=True)
class Explanation:
    """What a model contains and which kernels take it. Printing it gives a text.

    Parameters
    ----------
    target : Target
        Sites, supports, plates and sizes of the model.
    verdicts : dict
        By kernel name: `None` where the kernel fits, else the reason why not.
    remarks : dict
        By kernel name: how a kernel that fits would sample, where there is a choice.
    """

    target: Target
    verdicts: dict[str, str | None]
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def sites(self) -> pd.DataFrame:
        """Table of the sites: kind, distribution, support, shape, plates."""
        import pandas as pd

        rows = [
            {
                "site": site.name,
                "kind": site.kind,
                "distribution": site.distribution,
                "support": site.support,
                "shape": site.shape,
                "discrete": site.discrete,
                "plates": ", ".join(site.plates),
            }
            for site in self.target.sites
        ]
        columns = ["site", "kind", "distribution", "support", "shape", "discrete", "plates"]
        return pd.DataFrame(rows, columns=columns).set_index("site")

    def __str__(self) -> str:
        plates = ", ".join(
            f"{p.name} ({p.subsample_size} of {p.size})" if p.subsampled else f"{p.name} ({p.size})"
            for p in self.target.plates
        )
        lines = [
            f"{len(self.target.latent)} latent sites, {self.target.size} unconstrained coordinates",
            self.sites.to_string(),
            f"plates: {plates or 'none'}",
            "",
        ]
        for name, reason in self.verdicts.items():
            fits = f"fits, {self.remarks[name]}" if name in self.remarks else "fits"
            lines.append(f"{name}: {fits if reason is None else 'no. ' + reason}")
        return "\n".join(lines)

    __repr__ = __str__


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Look at a model once and say for each kernel whether it fits, or why not.

    Parameters
    ----------
    model : callable
        NumPyro or Pyro model; `args` and `kwargs` are its data.

    Raises
    ------
    TypeError
        When `model` is not callable.
    UnsupportedModelError
        When a plate of the model is empty, so that there is nothing to look at.

    Examples
    --------
    >>> import numpyro, numpyro.distributions as dist, ppl_ext
    >>> def model():
    ...     numpyro.sample("k", dist.Poisson(3.0))
    >>> ppl_ext.explain(model).verdicts["ULD"].split(". ")[0]
    "ULD moves continuous sites only, but site 'k' is discrete (Poisson)"
    """
    facts = target(model, *args, **kwargs)
    here = [entry for entry in entries() if entry.language == facts.language]
    verdicts = {entry.name: entry.refusal(facts) for entry in here}
    remarks = {e.name: e.remark(facts) for e in here if e.remark and verdicts[e.name] is None}
    return Explanation(facts, verdicts, {name: text for name, text in remarks.items() if text})
