"""Pictures of Dirichlet-process mixtures: number of clusters, pairs of points, density.

They are drawn on matplotlib's axes, in the style that is in force (``arviz.style.use``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ppl_ext.diagnostics.partitions import Clusters
from ppl_ext.diagnostics.plots import pyplot


def plot_num_clusters(found: Clusters, *, ax: Any = None) -> Any:
    """Draw the probability of each number of clusters as bars.

    Parameters
    ----------
    found : Clusters
        Of `clusters`.
    ax
        Matplotlib axes to draw on; by default, new ones.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is missing.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from ppl_ext import _arviz
    >>> from ppl_ext.diagnostics import clusters, plot_num_clusters
    >>> number = xr.Dataset({"G_num_clusters": (("chain", "draw"), [[2, 2, 3, 2]] * 2)})
    >>> ax = plot_num_clusters(clusters(_arviz.from_groups({"posterior": number})))
    >>> [float(bar.get_height()) for bar in ax.patches]
    [0.75, 0.25]
    """
    plt = pyplot("plot_num_clusters")
    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    number = found.num_clusters
    ax.bar(number.index, number.to_numpy(), color="0.6", edgecolor="black")
    ax.set_xticks(number.index)
    ax.set(xlabel="number of clusters", ylabel="posterior probability")
    return ax


def plot_coclustering(found: Clusters, *, ax: Any = None) -> Any:
    """Draw the probability that two points are in one cluster as a heat map.

    Points are put in the order of the point partition, clusters by size, so that clusters show as
    blocks; within a cluster, those that are surest to belong come first.

    Parameters
    ----------
    found : Clusters
        Of `clusters`, from a run with ``extra_fields=("labels",)``.
    ax
        Matplotlib axes to draw on; by default, new ones.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is missing.
    ValueError
        When the run kept no labels.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from ppl_ext import _arviz
    >>> from ppl_ext.diagnostics import clusters, plot_coclustering
    >>> number = xr.Dataset({"G_num_clusters": (("chain", "draw"), np.full((1, 10), 2))})
    >>> labels = (("chain", "draw", "point"), np.tile([0, 1, 0], (1, 10, 1)))
    >>> stats = xr.Dataset({"labels": labels})
    >>> data = _arviz.from_groups({"posterior": number, "sample_stats": stats})
    >>> plot_coclustering(clusters(data)).images[0].get_array().tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    plt = pyplot("plot_coclustering")
    if found.coclustering is None or found.partition is None:
        raise ValueError(
            "plot_coclustering: the run kept no labels. Run it with "
            '`mcmc.run(..., extra_fields=("labels",))`.'
        )
    labels, together = found.partition, found.coclustering
    sizes = np.bincount(labels)
    own = (together * (labels[:, None] == labels)).sum(1)
    order = np.lexsort((-own, labels, -sizes[labels]))
    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    image = ax.imshow(together[np.ix_(order, order)], cmap="gray_r", vmin=0, vmax=1)
    ax.figure.colorbar(image, ax=ax, label="probability of one cluster")
    ax.set(xlabel="points, by cluster", ylabel="points, by cluster")
    return ax


def plot_predictive_density(
    density: xr.DataArray, grid: Any, *, prob: float = 0.9, ax: Any = None
) -> Any:
    """Draw the density of a new observation: its mean over the draws, and a band of draws.

    Parameters
    ----------
    density : xarray.DataArray
        Of `predictive_density` at the points of `grid`.
    grid : array
        Numbers, shape (points,), in the unit of the observations.
    prob : float
        Probability of the band at each point.
    ax
        Matplotlib axes to draw on; by default, new ones.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is missing.
    ValueError
        When `grid` does not have one number for each point of `density`, or for a bad `prob`.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from ppl_ext.diagnostics import plot_predictive_density
    >>> density = xr.DataArray(np.ones((1, 5, 3)) / 2, dims=("chain", "draw", "point"))
    >>> plot_predictive_density(density, [0.0, 1.0, 2.0]).lines[0].get_ydata().tolist()
    [0.5, 0.5, 0.5]
    """
    plt = pyplot("plot_predictive_density")
    grid = np.asarray(grid, float)
    if grid.shape != (density.sizes["point"],):
        raise ValueError(
            f"plot_predictive_density: `grid` has the shape {grid.shape}, the density "
            f"{density.sizes['point']} points. Give the numbers at which it was computed."
        )
    if not 0 < prob < 1:
        raise ValueError(f"plot_predictive_density: `prob` must be between 0 and 1, got {prob!r}.")
    tails = density.quantile([(1 - prob) / 2, (1 + prob) / 2], ("chain", "draw")).to_numpy()
    mean = density.mean(("chain", "draw")).to_numpy()
    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    ax.plot(grid, mean, color="black", label="predictive density")
    ax.fill_between(grid, *tails, color="0.8", label=f"{prob:.0%} of the draws")
    ax.set_ylim(bottom=0)
    ax.set(xlabel="observation", ylabel="density")
    ax.legend()
    return ax
