"""Unconstrained draws with their scores: out of any container, and results back into one."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
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
    "ppl_ext.diagnostics.attach_scores(data, model, *args, **kwargs) computes them, and so does a "
    "log density of the unconstrained coordinates passed as score"
)

_DRAWS_AT_ONCE = 4096

_NAMED = 5
"""Most elements that a notice names."""


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
    proper
        Shape (elements of the template,): False for elements that are no coordinate, since their
        scores are zero at every draw. The density does not depend on them, so that they have no
        law to compare draws with (the cells that NumPyro's ``obs_mask`` marks as observed, say).
    weights
        Shape (chains, draws): importance weights, zero for draws that are left out, with mean one
        over the others; None if all are equal.
    """

    draws: npt.NDArray[Any]
    scores: npt.NDArray[Any]
    template: xr.Dataset
    chain_coordinate: xr.Variable | None
    finite: npt.NDArray[np.bool_]
    proper: npt.NDArray[np.bool_]
    weights: FloatArray | None = None

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
    def total_weight(self) -> float:
        """Sum of the weights; the number of draws that take part, if all are equal."""
        return float(self.n_draws if self.weights is None else self.weights.sum())

    @property
    def weight_efficiency(self) -> float:
        """Number of equal draws that one weighted draw is worth: (sum w)^2 / (n sum w^2)."""
        if self.weights is None:
            return 1.0
        return self.total_weight**2 / (self.n_draws * float(np.square(self.weights).sum()))

    @property
    def labels(self) -> list[str]:
        """The label of each coordinate, such as ``theta[Choate]``."""
        return list(itertools.compress(self._element_labels(), self.proper))

    def _element_labels(self) -> list[str]:
        variables = self.template.data_vars.items()
        return [label for name, array in variables for label in element_labels(name, array)]

    def proper_part(self) -> ScoredDraws:
        """Return the draws without the elements that the density does not depend on.

        Raises
        ------
        ValueError
            If that leaves nothing.
        """
        proper = np.asarray(self.scores[:, 0].any(axis=0))
        if proper.all():
            return self
        proper[~proper] = self.scores[..., ~proper].any(axis=(0, 1))
        if not proper.any():
            raise ValueError(
                "all scores are zero: a score is the gradient of the log density at the draw"
            )
        x, s = self.draws[..., proper], self.scores[..., proper]
        return replace(self, draws=x, scores=s, proper=proper)

    def chains(self) -> Iterator[ScoredDraws]:
        """Yield each chain by itself, with the weights that it has among all chains."""
        for i in range(len(self.finite)):
            yield self.part(slice(i, i + 1), slice(None))

    def part(self, chains: slice, draws: slice) -> ScoredDraws:
        """Return some of the chains and some of the draws of each, as views."""
        at = (chains, draws)
        return replace(
            self,
            draws=self.draws[at],
            scores=self.scores[at],
            finite=self.finite[at],
            weights=None if self.weights is None else self.weights[at],
        )

    def exclusion_notices(self) -> list[str]:
        """Return a sentence on the draws, and one on the elements, that are left out, if any."""
        notices = []
        if self.n_excluded:
            notices.append(
                f"{self.n_excluded} of {self.finite.size} draws are left out: a coordinate or a "
                "score is not finite there (a draw on the boundary of its support, or a sampler's "
                "overflow)"
            )
        if not self.proper.all():
            labels = list(itertools.compress(self._element_labels(), ~self.proper))
            names = ", ".join(labels[:_NAMED]) + (", ..." if len(labels) > _NAMED else "")
            notices.append(
                f"{len(labels)} scalars are left out ({names}): their scores are zero at every "
                "draw, so that the density does not depend on them and their draws mean nothing "
                "(values that obs_mask marks as observed, or a flat prior without data)"
            )
        return notices

    def to_dataset(self, values: FloatArray) -> xr.Dataset:
        """Return one value per coordinate, shape (d,) or (chains, d), in the draws' variables.

        The elements of the template that are no coordinate are NaN.
        """
        if not self.proper.all():
            coordinates, values = values, np.full((*values.shape[:-1], len(self.proper)), np.nan)
            values[..., self.proper] = coordinates
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

    def joint_dataset(self, name: str, values: FloatArray) -> xr.Dataset:
        """Return one value for all coordinates, shape () or (chains,), as the variable `name`."""
        chain = self.chain_coordinate
        if values.ndim == 0 or chain is None:
            return xr.Dataset({name: ((), values.squeeze())})
        return xr.Dataset({name: (chain.dims, values)}, {chain.dims[0]: chain})


def _matrix(dataset: xr.Dataset, sample_dims: Sequence[str]) -> npt.NDArray[Any]:
    """Return the variables side by side, shape (chains, draws, d)."""
    blocks = []
    for _, array in dataset.data_vars.items():
        block = array.transpose(*sample_dims, ...).values
        if len(sample_dims) == 1:
            block = block[None]
        blocks.append(block.reshape(*block.shape[:2], -1))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=2)


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
    draws: xr.Dataset,
    scores: xr.Dataset,
    sample_dims: str | Sequence[str] | None = None,
    weights: Any = None,
) -> ScoredDraws:
    """Return the draws of all variables as matrices, with the scores of the same variables.

    Raises
    ------
    ValueError
        If shapes or coordinates of draws and scores differ, values are no real numbers, a
        variable lacks a sample dimension, there is no draw that is finite, or a weight is
        negative or not finite.
    """
    dims = _sample_dims(sample_dims)
    _check_sample_dims(draws, dims, "draws")
    _check_sample_dims(scores, dims, "scores")
    for name, array in draws.data_vars.items():
        for values, what in ((array, "draws"), (scores[name], "scores")):
            if values.dtype.kind not in "biuf":
                raise ValueError(
                    f"the {what} of {name!r} are of type {values.dtype}: real numbers are needed"
                )
            if 0 in [values.sizes[dim] for dim in dims]:
                raise ValueError(f"there are no {what} of {name!r} (sizes {dict(values.sizes)})")
        if array.sizes != scores[name].sizes:
            raise ValueError(
                f"the draws of {name!r} have shape {dict(array.sizes)}, but their scores "
                f"{dict(scores[name].sizes)}: a score has the shape of its draw"
            )
    scores = xr.Dataset({name: scores[name].transpose(*v.dims) for name, v in draws.items()})
    if draws.coords or scores.coords:
        try:
            draws, scores = xr.align(draws, scores, join="exact", copy=False)
        except ValueError as error:
            raise ValueError(f"the coordinates of draws and scores differ: {error}") from error

    x = _matrix(draws, dims) if draws.data_vars else np.empty((0, 0, 0))
    s = _matrix(scores, dims) if draws.data_vars else x
    if x.shape[2] == 0:
        raise ValueError("there is no continuous coordinate among the selected variables")
    finite: npt.NDArray[np.bool_] = np.ones(x.shape[:2], dtype=bool)
    if not (np.isfinite(x).all() and np.isfinite(s).all()):  # slow over a short last axis
        finite = np.asarray(np.isfinite(x).all(axis=2) & np.isfinite(s).all(axis=2))
    if not finite.any():
        raise ValueError("there is no draw at which all coordinates and all scores are finite")
    template = draws.isel({dim: 0 for dim in dims}, drop=True)
    chain = draws[dims[0]].variable if len(dims) == 2 else None
    proper = np.ones(x.shape[2], dtype=bool)
    return ScoredDraws(x, s, template, chain, finite, proper, _normalised(weights, dims, finite))


def _sample_dims(sample_dims: str | Sequence[str] | None) -> tuple[str, ...]:
    if sample_dims is None:
        sample_dims = _arviz.default_sample_dims()
    return (sample_dims,) if isinstance(sample_dims, str) else tuple(sample_dims)


def _normalised(
    weights: Any, sample_dims: tuple[str, ...], finite: npt.NDArray[np.bool_]
) -> FloatArray | None:
    """Return the weights, shape (chains, draws), with mean one over the finite draws."""
    if weights is None:
        return None
    if isinstance(weights, xr.DataArray):
        if set(weights.dims) != set(sample_dims):
            raise ValueError(
                f"weights have dimensions {weights.dims}, but the draws have the sample "
                f"dimensions {sample_dims}: there is one weight per draw"
            )
        weights = weights.transpose(*sample_dims).values
    w = np.array(weights, dtype=np.float64)
    if w.ndim == 1:
        w = w[None]
    if w.shape != finite.shape:
        raise ValueError(
            f"weights have shape {w.shape}, but there are {finite.shape[0]} chains of "
            f"{finite.shape[1]} draws: there is one weight per draw"
        )
    if not np.isfinite(w).all() or (w < 0).any():
        raise ValueError(
            "weights must be finite and not negative, got values from "
            f"{w.min()} to {w.max()}: pass exp(log_weights - max(log_weights))"
        )
    w[~finite] = 0.0
    if not w.any():
        raise ValueError("all weights of the finite draws are zero")
    return w * (finite.sum() / w.sum())


def _jax_or_torch_scores(log_density: Callable[..., Any], points: Any) -> Any:
    """Return the gradients of `log_density` at `points`, arrays of shape (n, ...) in a pytree.

    Nothing is asked of the function but to run: one that JAX cannot trace is a torch function if
    torch has been imported, which it must have been for such a function to exist.
    """
    point = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), points)
    try:
        value = jax.eval_shape(log_density, point)
    except Exception as error:
        if "torch" not in sys.modules:
            raise
        return _torch_scores(log_density, points, error)
    if getattr(value, "shape", None) != ():
        raise ValueError(
            f"score is a function that returns {value} for one draw: it must return the log "
            "density there, a single number"
        )
    batch_size = min(_DRAWS_AT_ONCE, len(jax.tree.leaves(points)[0]))
    return jax.tree.map(np.asarray, _jax_scores(log_density, points, batch_size))


# compiled once for a function, however many statistics are asked of it
@functools.partial(jax.jit, static_argnums=(0, 2))
def _jax_scores(log_density: Callable[..., Any], points: Any, batch_size: int) -> Any:
    return jax.lax.map(jax.grad(log_density), points, batch_size=batch_size)


def _torch_scores(log_density: Callable[..., Any], points: Any, jax_error: Exception) -> Any:
    """Return the same by torch, draw by draw: its densities check values, which vmap cannot."""
    import torch

    leaves, structure = jax.tree.flatten(points)
    scores = [np.empty_like(leaf) for leaf in leaves]
    for i in range(len(leaves[0])):
        point = [torch.tensor(leaf[i], requires_grad=True) for leaf in leaves]
        try:
            value = log_density(jax.tree.unflatten(structure, point))
            gradients = torch.autograd.grad(value, point, allow_unused=True, materialize_grads=True)
        except Exception as error:
            raise TypeError(
                "score is a function that runs neither on JAX arrays nor on torch tensors. JAX: "
                f"{jax_error}. torch: {error}"
            ) from error
        for score, gradient in zip(scores, gradients, strict=True):
            score[i] = gradient.numpy()
    return jax.tree.unflatten(structure, scores)


def _scores_like(
    draws: xr.Dataset, log_density: Callable[..., Any], dims: tuple[str, ...], single: bool
) -> xr.Dataset:
    """Return the gradients of a log density of one draw of all variables.

    It takes a dict of variables, or the array of the only one if `single`.
    """
    _check_sample_dims(draws, dims, "draws")
    ordered = {name: array.transpose(*dims, ...) for name, array in draws.data_vars.items()}

    def flat(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        values = values.reshape(-1, *values.shape[len(dims) :])
        return values if np.issubdtype(values.dtype, np.floating) else values.astype(float)

    points = {str(name): flat(array.values) for name, array in ordered.items()}
    if single:
        (name,) = points
        scores = {name: _jax_or_torch_scores(log_density, points[name])}
    else:
        scores = _jax_or_torch_scores(log_density, points)
    return xr.Dataset(
        {
            name: array.copy(data=scores[str(name)].reshape(array.shape))
            for name, array in ordered.items()
        }
    )


def _from_groups(
    data: Any, score: Any, group: str, dims: tuple[str, ...]
) -> tuple[xr.Dataset, xr.Dataset]:
    if callable(score):
        points = _arviz.get_group(data, group)
        if points is None:
            raise ValueError(
                f"the data have no group {group!r} with the draws at which to evaluate the log "
                f"density (groups: {', '.join(_arviz.group_names(data)) or 'none'})"
            )
        return points, _scores_like(points, score, dims, single=False)
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
    weights: Any = None,
) -> tuple[ScoredDraws, Callable[[xr.Dataset], Any]]:
    """Return the draws in `data`, and a function that turns results into `data`'s kind.

    The arguments are those of `ppl_ext.diagnostics.psd`.
    """
    plain = not (_arviz.is_container(data) or isinstance(data, xr.Dataset | xr.DataArray))
    dims = ("chain", "draw") if plain else _sample_dims(sample_dims)
    if _arviz.is_container(data):
        draws, scores = _from_groups(data, score, group, dims)
    elif score is None:
        raise MissingScoresError(
            f"score is missing: with draws given as {type(data).__name__}, pass the gradients of "
            f"the log density at the draws, in the same form. {HOW_TO_GET_SCORES}"
        )
    elif isinstance(data, xr.Dataset):
        draws = data
        if callable(score):
            scores = _scores_like(draws, score, dims, single=False)
        else:
            scores = _of_same_type(data, score)
    elif isinstance(data, xr.DataArray):
        name = "x" if data.name is None else data.name
        draws = data.to_dataset(name=name)
        if callable(score):
            scores = _scores_like(draws, score, dims, single=True)
        else:
            scores = _of_same_type(data, score).to_dataset(name=name)
    else:
        x = _array_to_dataset(data, chain_axis, draw_axis)
        if callable(score):
            s = _scores_like(x, score, dims, single=True)
        else:
            s = _array_to_dataset(score, chain_axis, draw_axis)
        scored = scored_draws(x, s, dims, weights).proper_part()
        return scored, lambda values: next(iter(values.data_vars.values())).values[()]

    if set(draws.data_vars) != set(scores.data_vars):
        differing = sorted(map(str, set(draws.data_vars) ^ set(scores.data_vars)))
        raise ValueError(
            f"draws and scores must have the same variables, but only one of them has {differing}"
        )
    draws = _arviz.select(draws, var_names, filter_vars, coords)
    scores = _arviz.select(scores, [str(name) for name in draws.data_vars], None, coords)
    scored = scored_draws(draws, scores, dims, weights).proper_part()
    return scored, lambda values: _arviz.statistic_like(data, values, group)
