"""Loading of the reference problems."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

_PROGRAMS = {
    "numpyro": "ppl_ext.models.numpyro_programs",
    "pyro": "ppl_ext.models.pyro_programs",
}


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A model with its data and what is known of its posterior.

    Attributes:
        name: the problem's name, that `load` takes.
        description: the problem in one sentence.
        notes: traps of the posterior and of the program; may be empty.
        model: the probabilistic program.
        args: positional arguments of `model`: what the model conditions on. NumPy arrays, or for
            a Pyro program tensors of torch's default dtype.
        kwargs: keyword arguments of `model`, of the same kind: what the model observes. Without
            them `model` draws its observations.
        shapes: shape of each site that `reference` describes.
        reference: for each scalar parameter, under posteriordb's name with indices from 1
            (`mu`, `beta[1]`), the posterior's `mean`, `sd`, `q5`, `q50`, `q95` and the Monte
            Carlo standard error of the mean, `mcse_mean`. All on the constrained scale.
        init_values: constrained starting values by site, of the same kind, for problems that
            must start near their mode (``init_to_value(values=problem.init_values)``); else None.
        source: origin of the program, the data and the reference.
        licence: licence of the data and of the reference, an SPDX identifier.

    Example:
        >>> from ppl_ext import models
        >>> problem = models.load("arK")
        >>> problem
        <Problem arK: 7 parameters, with draws>
        >>> round(problem.reference["beta[1]"]["mean"], 3)
        0.692
        >>> [array.shape for array in problem.args], problem.shapes
        ([(200,)], {'alpha': (), 'beta': (5,), 'sigma': ()})
    """

    name: str
    description: str
    notes: str
    model: Callable[..., None]
    args: tuple[NDArray[Any] | Tensor, ...]
    kwargs: dict[str, NDArray[Any] | Tensor]
    shapes: dict[str, tuple[int, ...]]
    reference: dict[str, dict[str, float]]
    init_values: dict[str, NDArray[Any] | Tensor] | None
    source: str
    licence: str
    _draws_file: str | None

    @cached_property
    def draws(self) -> dict[str, NDArray[np.float64]] | None:
        """Reference draws by parameter, independent of each other; None where none are stored.

        Each array has shape (draw,). The file is read at the first access. The draws of all
        problems but kilpisjarvi have the precision of float32.

        Example:
            >>> from ppl_ext import models
            >>> models.load("kilpisjarvi").draws["sigma"].shape
            (10000,)
        """
        if self._draws_file is None:
            return None
        with (_data() / self._draws_file).open("rb") as file, np.load(file) as stored:
            columns = stored["draws"].astype(np.float64).T
            return dict(zip(stored["names"].tolist(), columns, strict=True))

    def flat(self, samples: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
        """Return samples of the sites as one array for each scalar parameter of `reference`.

        Args:
            samples: constrained samples by site, as ``mcmc.get_samples()`` returns them: each of
                shape (draw, *site) or, grouped by chain, (chain, draw, *site), or any other
                leading shape. Sites that `reference` does not describe are left out. Pyro's
                `get_samples` lacks deterministic sites, here theta of eight_schools_noncentered
                and f of gp_pois_regr: add ``Predictive(problem.model, samples,
                return_sites=["theta"])(*problem.args)``.

        Returns:
            Arrays of the leading shape, in the order of `reference`.

        Raises:
            ValueError: a site is missing, or its trailing shape is not the site's.

        Example:
            >>> import numpy as np
            >>> from ppl_ext import models
            >>> schools = models.load("eight_schools_centered")
            >>> samples = {"mu": np.zeros(100), "tau": np.ones(100), "theta": np.zeros((100, 8))}
            >>> flat = schools.flat(samples)
            >>> list(flat)[:3], flat["theta[1]"].shape
            (['theta[1]', 'theta[2]', 'theta[3]'], (100,))
        """
        flat: dict[str, NDArray[Any]] = {}
        for site, shape in self.shapes.items():
            if site not in samples:
                raise ValueError(
                    f"samples of {self.name} lack the site {site!r}; they have {sorted(samples)}"
                )
            values = np.asarray(samples[site])
            leading = values.shape[: values.ndim - len(shape)]
            if values.shape != leading + shape:
                raise ValueError(
                    f"samples of site {site!r} of {self.name} have shape {values.shape}; "
                    f"the last dimensions must be {shape}"
                )
            for index in np.ndindex(shape):
                flat[_parameter_name(site, index)] = values[(..., *index)]
        return flat

    def __repr__(self) -> str:
        draws = "without" if self._draws_file is None else "with"
        return f"<Problem {self.name}: {len(self.reference)} parameters, {draws} draws>"


def load(name: str, ppl: str = "numpyro") -> Problem:
    """Return the reference problem `name`.

    Args:
        name: one of `list`'s names.
        ppl: language of the program, "numpyro" or "pyro". Both programs of a problem have the
            same sites, of the same shapes, and the same log density.

    Raises:
        ValueError: `name` is no problem, or `ppl` no language that programs are written in.
        ImportError: `ppl` is "pyro", and Pyro or torch is not installed.

    Source:
        posteriordb, https://github.com/stan-dev/posteriordb; each problem has its own `source`.

    Example:
        >>> import jax
        >>> from numpyro.infer import MCMC, NUTS
        >>> from ppl_ext import models
        >>> problem = models.load("gp_regr")
        >>> mcmc = MCMC(NUTS(problem.model), num_warmup=200, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), *problem.args, **problem.kwargs)
        >>> samples = problem.flat(mcmc.get_samples())
        >>> error = samples["rho"].mean() - problem.reference["rho"]["mean"]
        >>> bool(abs(error) < problem.reference["rho"]["sd"])
        True
    """
    if ppl not in _PROGRAMS:
        raise ValueError(f"ppl must be one of {tuple(_PROGRAMS)}, not {ppl!r}")
    names = list_problems()
    if name not in names:
        close = difflib.get_close_matches(str(name), names, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
        raise ValueError(
            f"there is no problem {name!r}{hint} ppl_ext.models.list() returns the names of all"
        )
    stored = json.loads((_data() / f"{name}.json").read_text(encoding="utf-8"))
    model = getattr(_programs(ppl), name)
    array = _tensor if ppl == "pyro" else np.array
    args, kwargs = _arguments(model, stored["data"], array)
    init_values = stored["init_values"]
    return Problem(
        name=name,
        description=stored["description"],
        notes=stored["notes"],
        model=model,
        args=args,
        kwargs=kwargs,
        shapes={site: tuple(shape) for site, shape in stored["parameters"].items()},
        reference=stored["reference"],
        init_values=init_values and {site: array(v) for site, v in init_values.items()},
        source=stored["source"],
        licence=stored["licence"],
        _draws_file=stored["draws"],
    )


def list_problems() -> list[str]:
    """Return the names of all reference problems, sorted.

    Example:
        >>> from ppl_ext import models
        >>> models.list()[:3]
        ['GLM_Poisson', 'arK', 'eight_schools_centered']
    """
    names = (entry.name for entry in _data().iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def _data() -> Traversable:
    return resources.files("ppl_ext.models") / "data"


def _parameter_name(site: str, index: tuple[int, ...]) -> str:
    """Return posteriordb's name of the element `index`, counted from 0, of `site`."""
    return f"{site}[{','.join(str(i + 1) for i in index)}]" if index else site


def _programs(ppl: str) -> ModuleType:
    """Return the module of the programs in the language `ppl`."""
    try:
        return importlib.import_module(_PROGRAMS[ppl])
    except ModuleNotFoundError as error:
        if ppl == "pyro" and error.name in ("pyro", "torch"):
            raise ImportError(
                f"ppl='pyro' needs {error.name}, which is not installed: "
                "pip install 'ppl-ext[pyro]'"
            ) from error
        raise


def _tensor(values: ArrayLike) -> Tensor:
    """Return `values` as a tensor of torch's default dtype."""
    import torch

    return torch.tensor(values, dtype=torch.get_default_dtype())


def _arguments(
    model: Callable[..., None],
    data: Mapping[str, ArrayLike],
    array: Callable[[ArrayLike], NDArray[Any] | Tensor],
) -> tuple[tuple[NDArray[Any] | Tensor, ...], dict[str, NDArray[Any] | Tensor]]:
    """Return `data` as the positional and, for parameters with a default, the keyword arguments."""
    args, kwargs = [], {}
    for name, parameter in inspect.signature(model).parameters.items():
        if parameter.default is parameter.empty:
            args.append(array(data[name]))
        else:
            kwargs[name] = array(data[name])
    return tuple(args), kwargs
