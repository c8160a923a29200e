"""What a Dirichlet-process mixture says without labels of components: clusters, pairs, density."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from ppl_ext import _arviz

# points whose pairs are counted, if none are named
_MAX_POINTS = 500


@dataclass(frozen=True)
class Clusters:
    """Clusters of a run; printing it gives a text.

    Parameters
    ----------
    summary : pandas.DataFrame
        Mean, standard deviation, R-hat and effective sample sizes of the number of clusters, of the
        concentration and, with labels, of the share of the largest cluster and of the probability
        that two points are together.
    num_clusters : pandas.Series
        Probability of each number of clusters.
    points : numpy.ndarray
        Indices of the points below, shape (m,).
    coclustering : numpy.ndarray or None
        Probability that two points are in one cluster, shape (m, m); needs labels.
    partition : numpy.ndarray or None
        Point estimate of the partition of `points`, labels 0, 1, ..., shape (m,).
    loss : str
        The loss that `partition` minimises among the partitions that were drawn.
    """

    summary: pd.DataFrame
    num_clusters: pd.Series
    points: np.ndarray
    coclustering: np.ndarray | None
    partition: np.ndarray | None
    loss: str

    def __str__(self) -> str:
        lines = [self.summary.to_string(), "", self.num_clusters.round(4).to_string()]
        if self.partition is not None:
            sizes = np.bincount(self.partition).tolist()
            lines.append(f"partition ({self.loss}) of {len(self.points)} points: sizes {sizes}")
        return "\n".join(lines)

    __repr__ = __str__


def clusters(
    data: Any,
    *,
    name: str = "G",
    points: Any = None,
    loss: Literal["binder", "vi"] = "vi",
) -> Clusters:
    """Summarise a run of `DPSlice` by what does not depend on the numbering of components.

    Parameters
    ----------
    data : arviz.InferenceData or xarray.DataTree
        Of `ppl_ext.to_arviz(mcmc)`. Pairs and the partition need a run with
        `extra_fields=("labels",)`.
    name : str
        Name of the process in the model.
    points : array of int, optional
        Points whose pairs are counted. `None`: all, or 500 spread evenly.
    loss : {"vi", "binder"}
        Loss of the point partition: variation of information (Meila 2007; Wade & Ghahramani 2018)
        or Binder's, whose expectation is least among the drawn partitions.

    Raises
    ------
    ValueError
        When the run holds no `<name>_num_clusters`, when it has overflowed, or for a bad `loss`.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, ppl_ext
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.diagnostics import clusters
    >>> from ppl_ext.numpyro import DirichletProcess, DPSlice
    >>> def model(y):
    ...     G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(0, 10)))
    ...     with numpyro.plate("data", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(G.draw(), 1), obs=y)
    >>> y = np.repeat([-10.0, 10.0], 20)
    >>> mcmc = MCMC(DPSlice(model), num_warmup=50, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), y, extra_fields=("labels",))
    >>> found = clusters(ppl_ext.to_arviz(mcmc))
    >>> bool(found.partition[0] != found.partition[-1])
    True
    """
    if loss not in ("binder", "vi"):
        raise ValueError(f'clusters: `loss` must be "binder" or "vi", got {loss!r}.')
    posterior, stats = _groups(data)
    number = f"{name}_num_clusters"
    if number not in posterior:
        raise ValueError(
            f"clusters: the draws hold no '{number}', but {sorted(map(str, posterior))}. Give the "
            "process's name by `name`, and a run of DPSlice."
        )
    overflow = np.asarray(stats["overflow"]) if "overflow" in stats else np.zeros(1, bool)
    if overflow.any():
        raise ValueError(
            f"clusters: {overflow.mean():.0%} of the draws follow an overflow of the slots. Repeat "
            "the run with more: `kernel.rerun(mcmc)`."
        )
    numbers = np.asarray(posterior[number])
    rows = {number: numbers.astype(float)}
    if "concentration" in stats:
        concentration = np.asarray(stats["concentration"], float)
        if np.ptp(concentration) > 0:
            rows["concentration"] = concentration
    coclustering = partition = None
    chosen = np.zeros(0, int)
    if "labels" in stats:
        labels = np.asarray(stats["labels"])
        chosen = _chosen(points, labels.shape[-1])
        subset = labels[..., chosen]
        drawn = subset.reshape(-1, len(chosen))
        coclustering = _coclustering(drawn)
        partition = _partition(drawn, coclustering, loss)
        rows["largest cluster"] = _largest(labels)
        rows["pairs together"] = _pairs(subset)
    frame = xr.Dataset({key: (("chain", "draw"), value) for key, value in rows.items()})
    kind = {"kind": "all", "round_to": "none"}
    # what is the same in all draws has no R-hat
    with np.errstate(invalid="ignore", divide="ignore"):
        table = _arviz.arviz().summary(_arviz.from_groups({"posterior": frame}), **kind)
    columns = [c for c in ("mean", "sd", "ess_bulk", "ess_tail", "r_hat") if c in table]
    values, counts = np.unique(numbers, return_counts=True)
    return Clusters(
        summary=table[columns].astype(float),
        num_clusters=pd.Series(counts / counts.sum(), index=values, name="probability"),
        points=chosen,
        coclustering=coclustering,
        partition=partition,
        loss=loss,
    )


def predictive_density(mcmc: Any, *args: Any, **kwargs: Any) -> xr.DataArray:
    """Density of new observations in each draw of a run: it integrates to one.

    The weights of the slots times the likelihood at their atoms, and the mass beyond the slots
    times the likelihood at a new atom of the base.

    Parameters
    ----------
    mcmc : numpyro.infer.MCMC or ppl_ext.pyro.MCMC
        A finished run of `DPSlice`.
    *args, **kwargs
        Arguments of the model, with the new observations (a grid, say) in the place of the data.

    Returns
    -------
    xarray.DataArray
        Dimensions chain, draw, point; one density for each point of the model's data plate, in
        1 / (unit of the observation).

    Raises
    ------
    TypeError
        When `mcmc` is no run of `DPSlice`.
    ValueError
        When the run has no draws, or has overflowed.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.diagnostics import predictive_density
    >>> from ppl_ext.numpyro import DirichletProcess, DPSlice
    >>> def model(y):
    ...     G = DirichletProcess("G", 1.0, lambda: numpyro.sample("mu", dist.Normal(0, 10)))
    ...     with numpyro.plate("data", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(G.draw(), 1), obs=y)
    >>> mcmc = MCMC(DPSlice(model), num_warmup=50, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), np.repeat([-10.0, 10.0], 20), extra_fields=("labels",))
    >>> grid = np.linspace(-60.0, 60.0, 601)
    >>> density = predictive_density(mcmc, grid).mean(("chain", "draw"))
    >>> bool(abs(float(density.sum()) * 0.2 - 1) < 0.01)
    True
    """
    kernel: Any = getattr(mcmc, "kernel", getattr(mcmc, "sampler", None))
    if not hasattr(kernel, "predictive_density") or not hasattr(mcmc, "get_extra_fields"):
        raise TypeError(
            "predictive_density takes a finished run of DPSlice, by numpyro.infer.MCMC or "
            f"ppl_ext.pyro.MCMC, got {type(mcmc).__name__}."
        )
    if getattr(mcmc, "last_state", getattr(mcmc, "_samples", None)) is None:
        raise ValueError("predictive_density: the run has no draws yet. Call `mcmc.run` first.")
    if np.asarray(mcmc.get_extra_fields()["overflow"]).any():
        raise ValueError(
            "predictive_density: draws follow an overflow of the slots. Repeat the run with more: "
            "`kernel.rerun(mcmc)`."
        )
    density = kernel.predictive_density(mcmc.get_samples(group_by_chain=True), *args, **kwargs)
    return xr.DataArray(np.asarray(density), dims=("chain", "draw", "point"))


def _groups(data: Any) -> tuple[xr.Dataset, xr.Dataset]:
    if not _arviz.is_container(data):
        raise TypeError(f"Expected the result of ppl_ext.to_arviz, got {type(data).__name__}.")
    posterior = _arviz.get_group(data, "posterior")
    stats = _arviz.get_group(data, "sample_stats")
    if posterior is None:
        raise ValueError("The result has no group 'posterior'.")
    return posterior, xr.Dataset() if stats is None else stats


def _chosen(points: Any, n: int) -> np.ndarray:
    if points is None:
        return np.unique(np.linspace(0, n - 1, min(n, _MAX_POINTS)).astype(int))
    chosen = np.asarray(points)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or not len(chosen):
        raise ValueError("clusters: `points` must be a list of indices of points.")
    if chosen.min() < 0 or chosen.max() >= n:
        raise ValueError(f"clusters: `points` must lie between 0 and {n - 1}.")
    return chosen


def _coclustering(labels: np.ndarray) -> np.ndarray:
    together = np.zeros((labels.shape[1],) * 2)
    for draw in labels:
        together += draw[:, None] == draw
    return together / len(labels)


def _partition(labels: np.ndarray, coclustering: np.ndarray, loss: str) -> np.ndarray:
    """The drawn partition of least expected loss, with labels in the order of appearance."""
    best, least = labels[0], np.inf
    for draw in np.unique([_in_order(draw) for draw in labels], axis=0):
        same = draw[:, None] == draw
        if loss == "binder":
            value = np.abs(same - coclustering).sum()
        else:
            # the lower bound of Wade & Ghahramani 2018, equation 13
            size = same.sum(1)
            value = (np.log2(size) - 2 * np.log2((same * coclustering).sum(1))).sum()
        if value < least:
            best, least = draw, value
    return best


def _in_order(labels: np.ndarray) -> np.ndarray:
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _largest(labels: np.ndarray) -> np.ndarray:
    flat = labels.reshape(-1, labels.shape[-1])
    share = [np.bincount(draw).max() / len(draw) for draw in flat]
    return np.array(share).reshape(labels.shape[:-1])


def _pairs(labels: np.ndarray) -> np.ndarray:
    flat = labels.reshape(-1, labels.shape[-1])
    n = labels.shape[-1]
    pairs = [(np.bincount(draw) ** 2.0).sum() / n**2 for draw in flat]
    return np.array(pairs).reshape(labels.shape[:-1])
