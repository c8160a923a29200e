"""Unconstrained draws with their scores: out of any container, and results back into one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics.features import FloatArray
from ppl_ext.errors import MissingScoresError

XarrayT = TypeVar("XarrayT", xr.Dataset, xr.DataArray)

UNCONSTRAINED = "unconstrained_posterior"

HOW_TO_GET_SCORES = (
    "Scores are kept by ppl_ext's ULD; NumPyro's NUTS and HMC keep them when run with "
    'extra_fields=("z_grad",), and ppl_ext.to_arviz(mcmc) then stores them; for other draws, '
    "ppl_ext.diagnostics.attach_scores(data, model, *args, **kwargs) computes them"
)


def score_group(group: str) -> str:
    """Return the name of the group with the scores of the draws in `group`."""
    return f"{group}_score"


def element_labels(name: Hashable, array: xr.DataArray) -> list[str]:
    """Return a label such as ``theta[Choate]`` for each element of a variable, in C order."""
    if not array.dims:
        return [str(name)]
    indices = [array[dim].values for dim in array.dims]
    return [f"{name}[{', '.join(map(str, index))}]" for index in itertools.product(*indices)]


@dataclass(frozen=True)
class ScoredDraws:
    """Draws of d unconstrained coordinates and their scores, chain by chain.

    Attributes
    ----------
    draws, scores
        Shape (chains, draws, d): points, and gradients of the log density there with respect to
        the same coordinates. They keep their floating-point type.
    template
        Dataset with the variables, dimensions and coordinates of one draw.
    chain_coordinate
        The chain dimension and its coordinates, or None if the draws have no such dimension.
    finite
        Shape (chains, draws): False where a coordinate of a draw or of its score is not finite.
        Such draws are left out of every statistic.
    """

    draws: npt.NDArray[Any]
    scores: npt.NDArray[Any]
    template: xr.Dataset
    chain_coordinate: xr.Variable | None
    finite: npt.NDArray[np.bool_]

    @property
    def dimension(self) -> int:
        """Number of coordinates, d."""
        return int(self.draws.shape[2])

    @property
    def n_draws(self) -> int:
        """Number of draws that take part, over all chains."""
        return int(self.finite.sum())

    @property
    def n_excluded(self) -> int:
        """Number of draws left out since something in them is not finite."""
        return int(self.finite.size) - self.n_draws

    @property
    def labels(self) -> list[str]:
        """The label of each coordinate, such as ``theta[Choate]``."""
        variables = self.template.data_vars.items()
        return [label for name, array in variables for label in element_labels(name, array)]

    def chains(self) -> Iterator[ScoredDraws]:
        """Yield each chain by itself."""
        for i in range(len(self.finite)):
            one = slice(i, i + 1)
            yield replace(
                self, draws=self.draws[one], scores=self.scores[one], finite=self.finite[one]
            )

    def exclusion_notice(self) -> str | None:
        """Return a sentence on the draws that are left out, or None if there are none."""
        if not self.n_excluded:
            return None
        return (
            f"{self.n_excluded} of {self.finite.size} draws are left out: a coordinate or a score "
            "is not finite there (a draw on the boundary of its support, or a sampler's overflow)"
        )

    def to_dataset(self, values: FloatArray) -> xr.Dataset:
        """Return one value per coordinate, shape (d,) or (chains, d), in the draws' variables."""
        per_chain = values.ndim == 2
        chain = self.chain_coordinate if per_chain else None
        arrays, stop = {}, 0
        for name, like in self.template.data_vars.items():
            start, stop = stop, stop + like.size
            block = values[..., start:stop]
            if chain is None:
                arrays[name] = like.copy(data=block.reshape(like.shape))
            else:
                arrays[name] = like.expand_dims({chain.dims[0]: chain.values}).copy(
                    data=block.reshape(len(chain), *like.shape)
                )
        return xr.Dataset(arrays)


def _matrix(dataset: xr.Dataset, sample_dims: Sequence[str]) -> npt.NDArray[Any]:
    """Return the variables side by side, shape (chains, draws, d)."""
    blocks = []
    for _, array in dataset.data_vars.items():
        block = array.transpose(*sample_dims, ...).values
        if len(sample_dims) == 1:
            block = block[None]
        blocks.append(block.reshape(*block.shape[:2], -1))
    return np.concatenate(blocks, axis=2)


def _check_sample_dims(dataset: xr.Dataset, sample_dims: Sequence[str], what: str) -> None:
    if len(sample_dims) not in (1, 2):
        raise ValueError(
            "sample_dims must name the draw dimension, or the chain and the draw dimension, got "
            f"{tuple(sample_dims)}"
        )
    for name, array in dataset.data_vars.items():
        missing = [dim for dim in sample_dims if dim not in array.dims]
        if missing:
            raise ValueError(
                f"the {what} of {name!r} have dimensions {array.dims}, without {missing[0]!r}: "
                "name the dimensions of chains and draws in sample_dims"
            )


def scored_draws(
    draws: xr.Dataset, scores: xr.Dataset, sample_dims: str | Sequence[str] | None = None
) -> ScoredDraws:
    """Return the draws of all variables as matrices, with the scores of the same variables.

    Raises
    ------
    ValueError
        If shapes or coordinates of draws and scores differ, a variable lacks a sample
        dimension, or there is no draw that is finite.
    """
    if sample_dims is None:
        sample_dims = _arviz.default_sample_dims()
    dims = (sample_dims,) if isinstance(sample_dims, str) else tuple(sample_dims)
    _check_sample_dims(draws, dims, "draws")
    _check_sample_dims(scores, dims, "scores")
    for name, array in draws.data_vars.items():
        if array.sizes != scores[name].sizes:
            raise ValueError(
                f"the draws of {name!r} have shape {dict(array.sizes)}, but their scores "
                f"{dict(scores[name].sizes)}: a score has the shape of its draw"
            )
    scores = xr.Dataset({name: scores[name].transpose(*v.dims) for name, v in draws.items()})
    try:
        draws, scores = xr.align(draws, scores, join="exact", copy=False)
    except ValueError as error:
        raise ValueError(f"the coordinates of draws and scores differ: {error}") from error

    x = _matrix(draws, dims) if draws.data_vars else np.empty((0, 0, 0))
    s = _matrix(scores, dims) if draws.data_vars else x
    if x.shape[2] == 0:
        raise ValueError("there is no continuous coordinate among the selected variables")
    finite = np.asarray(np.isfinite(x).all(axis=2) & np.isfinite(s).all(axis=2))
    if not finite.any():
        raise ValueError("there is no draw at which all coordinates and all scores are finite")
    template = draws.isel({dim: 0 for dim in dims}, drop=True)
    chain = draws[dims[0]].variable if len(dims) == 2 else None
    return ScoredDraws(x, s, template, chain, finite)


def _from_groups(data: Any, score: xr.Dataset | None, group: str) -> tuple[xr.Dataset, xr.Dataset]:
    if score is None:
        score = _arviz.get_group(data, score_group(group))
    if score is None:
        raise MissingScoresError(
            f"the data have no group {score_group(group)!r} (groups: "
            f"{', '.join(_arviz.group_names(data)) or 'none'}). {HOW_TO_GET_SCORES}"
        )
    draws = _arviz.get_group(data, group)
    posterior = _arviz.get_group(data, "posterior")
    # ArviZ's schema lets an unconstrained group leave out the variables that need no
    # transformation: they are then those of the posterior.
    found = {} if draws is None else dict(draws.data_vars)
    for name in score.data_vars:
        if name not in found and posterior is not None and name in posterior.data_vars:
            found[name] = posterior[name]
    return xr.Dataset(found), score


def _of_same_type(data: XarrayT, score: Any) -> XarrayT:
    if not isinstance(score, type(data)):
        raise TypeError(
            f"score must be a {type(data).__name__} like the draws, got {type(score).__name__}"
        )
    return score


def _array_to_dataset(values: Any, chain_axis: int | None, draw_axis: int) -> xr.Dataset:
    array = np.asarray(values)
    if array.ndim == 1:
        chain_axis, draw_axis = None, 0
    if chain_axis is None:
        array = np.moveaxis(array, draw_axis, 0)[None]
    else:
        array = np.moveaxis(array, (chain_axis, draw_axis), (0, 1))
    dims = ("chain", "draw", *(f"x_dim_{i}" for i in range(array.ndim - 2)))
    return xr.Dataset({"x": (dims, array)})


def read(
    data: Any,
    score: Any,
    *,
    sample_dims: str | Sequence[str] | None,
    group: str,
    var_names: str | Sequence[str] | None,
    filter_vars: _arviz.FilterVars,
    coords: Mapping[Hashable, Any] | None,
    chain_axis: int | None,
    draw_axis: int,
) -> tuple[ScoredDraws, Callable[[xr.Dataset], Any]]:
    """Return the draws in `data`, and a function that turns results into `data`'s kind.

    The arguments are those of `ppl_ext.diagnostics.psd`.
    """
    if _arviz.is_container(data):
        draws, scores = _from_groups(data, score, group)
    elif score is None:
        raise MissingScoresError(
            f"score is missing: with draws given as {type(data).__name__}, pass the gradients of "
            f"the log density at the draws, in the same form. {HOW_TO_GET_SCORES}"
        )
    elif isinstance(data, xr.Dataset):
        draws, scores = data, _of_same_type(data, score)
    elif isinstance(data, xr.DataArray):
        name = "x" if data.name is None else data.name
        draws = data.to_dataset(name=name)
        scores = _of_same_type(data, score).to_dataset(name=name)
    else:
        x = _array_to_dataset(data, chain_axis, draw_axis)
        s = _array_to_dataset(score, chain_axis, draw_axis)
        return scored_draws(x, s, ("chain", "draw")), lambda values: next(
            iter(values.data_vars.values())
        ).values[()]

    if set(draws.data_vars) != set(scores.data_vars):
        differing = sorted(map(str, set(draws.data_vars) ^ set(scores.data_vars)))
        raise ValueError(
            f"draws and scores must have the same variables, but only one of them has {differing}"
        )
    draws = _arviz.select(draws, var_names, filter_vars, coords)
    scores = _arviz.select(scores, [str(name) for name in draws.data_vars], None, coords)
    result = scored_draws(draws, scores, sample_dims)
    return result, lambda values: _arviz.statistic_like(data, values, group)
