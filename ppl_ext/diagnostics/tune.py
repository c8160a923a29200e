"""Choose a setting of a sampler by the discrepancy of short runs from the posterior.

The discrepancy of a run grows both with its bias and with its Monte Carlo error, so that the value
with the smallest one trades the two: a large step of SGLD is biased, a small one hardly moves. All
runs are measured in the same units, since each run's own moments would flatter the worst: one that
hardly moves, say, has a small spread. Coordinate j is taken as (x_j - m_j) / sd_j, where m_j and
sd_j are medians over the runs of their means and standard deviations: a run that has diverged, or
one that has not moved, does not change them much.
"""

from __future__ import annotations

import contextlib
import html
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import pandas as pd
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics.batches import feature_series
from ppl_ext.diagnostics.draws import UNCONSTRAINED, ScoredDraws, score_group, scored_draws
from ppl_ext.diagnostics.features import Basis, FloatArray, SteinBasis, n_features
from ppl_ext.diagnostics.goodness_of_fit import most_features
from ppl_ext.diagnostics.moments import standardization
from ppl_ext.diagnostics.plots import pyplot
from ppl_ext.diagnostics.scores import Groups, finite_sites, scorer
from ppl_ext.diagnostics.svi import order_for
from ppl_ext.errors import TooFewDrawsError


@dataclass(frozen=True, eq=False, repr=False)
class Tuning:
    """Result of `tune`; printing it gives a table.

    Attributes
    ----------
    table
        A row for each value, in the order of the grid. ``psd``: the joint discrepancy, in common
        units; infinite where a draw is not finite, or where the run did not move. ``noise``: what
        it would be on average without bias, from the Monte Carlo errors; a `psd` near it says that
        a longer run, not another value, would be better. ``draws``: those that were looked at.
        ``not_finite``: those without a finite score. ``seconds``: of sampling, compilation
        included.
    values
        The values of the grid, as they were given.
    order, n_features, interactions
        What the discrepancy was made of.
    """

    table: pd.DataFrame
    values: tuple[Any, ...]
    order: int
    n_features: int
    interactions: bool

    @property
    def best(self) -> Any:
        """The value with the smallest discrepancy."""
        return self.values[int(np.argmin(self.table["psd"].to_numpy()))]

    def plot(self, ax: Any = None) -> Any:
        """Draw the discrepancy against the values and return matplotlib's axes.

        The axis is logarithmic where the values are positive numbers. A dashed line shows the
        discrepancy that Monte Carlo error alone would make; the best value is marked.

        Raises
        ------
        ImportError
            If matplotlib is missing.
        """
        if ax is None:
            ax = pyplot("Tuning.plot").subplots()[1]
        places: Any = np.arange(len(self.values))
        if all(isinstance(v, int | float | np.number | jax.Array) for v in self.values):
            places = np.asarray(self.values, dtype=float)
            ax.set_xscale("log" if (places > 0).all() else "linear")
        else:
            ax.set_xticks(places, [str(label) for label in self.table.index])
        shown = self.table.replace(np.inf, np.nan).assign(place=places).sort_values("place")
        at = shown["place"].to_numpy()
        ax.plot(at, shown["psd"].to_numpy(), "o-", color="C0", label="discrepancy")
        ax.plot(at, shown["noise"].to_numpy(), "--", color="gray", label="from Monte Carlo error")
        best = int(np.argmin(self.table["psd"].to_numpy()))
        ax.plot(places[best], self.table["psd"].iloc[best], "o", color="C1", markersize=10)
        ax.set_yscale("log")
        ax.set(xlabel=self.table.index.name, ylabel=f"PSD of order {self.order}")
        ax.legend()
        return ax

    def _heading(self) -> str:
        kind = "with" if self.interactions else "without"
        label = self.table.index[int(np.argmin(self.table["psd"].to_numpy()))]
        return (
            f"Best of {len(self.values)} values: {label} (PSD of order {self.order}, "
            f"{self.n_features} features {kind} interactions)"
        )

    def __repr__(self) -> str:
        return f"{self._heading()}\n{self.table.to_string(float_format='{:.3g}'.format)}"

    def _repr_html_(self) -> str:
        table = self.table.to_html(float_format="{:.3g}".format)
        return f"<div><b>{html.escape(self._heading())}</b>{table}</div>"


def tune(
    kernel_factory: Callable[[Any], Any],
    grid: Iterable[Any],
    model: Callable[..., Any],
    *args: Any,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 4,
    chain_method: str | Callable[..., Any] = jax.vmap,
    random_seed: int = 0,
    max_draws: int = 2000,
    order: int | None = None,
    interactions: bool | Literal["auto"] = "auto",
    basis: Basis = "hermite",
    **kwargs: Any,
) -> Tuning:
    """Run a sampler for a short while at each value, and find the one nearest to the posterior.

    The measure is the joint polynomial Stein discrepancy of each run (see `psd`), with scores of
    the model's full data whatever the sampler used, in units common to all runs: coordinates are
    centred and scaled by the medians over the runs of their means and standard deviations.

    Parameters
    ----------
    kernel_factory
        ``kernel_factory(value)`` returns a NumPyro ``MCMCKernel`` on `model`, such as
        ``ULD(model, step_size=value)``, which is then run; or draws that it has made by itself: a
        dict from each latent site to an array (chain, draw, ...) of constrained values, or an
        InferenceData (ArviZ 0.2x) or DataTree (ArviZ 1.x), such as that of `from_svi`. Scores in
        such a container are used; others are computed.
    grid
        The values, at least two.
    model, *args, **kwargs
        The model and its arguments, with its data.
    num_warmup, num_samples, num_chains, chain_method
        Budget of each run of a kernel, as for NumPyro's ``MCMC``. Where a kernel takes several
        steps a draw, fix their number if the runs shall cost the same.
    random_seed
        Every kernel runs with the same seed, so that differences come from the value.
    max_draws
        Most draws of a run that are looked at, evenly spaced.
    order
        Highest degree of the features: by default 2, or 3 if the draws are those of `from_svi`.
        Order 1 sees the means alone, and a step size that doubles the variance may look good.
    interactions
        Whether to take products of several coordinates. ``"auto"``: if there are at most 2,000
        features then, and five draws for each.
    basis
        As for `psd`.

    Returns
    -------
    Tuning

    Raises
    ------
    TypeError
        If the factory returns something else.
    TooFewDrawsError
        If no run has moved and stayed finite, or runs have fewer than four draws a chain.
    ValueError
        If the grid has fewer than two values, or the model has no score (see `attach_scores`).

    Examples
    --------
    >>> import numpyro, numpyro.distributions as dist
    >>> from ppl_ext.diagnostics import tune
    >>> from ppl_ext.numpyro import ULD
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(0.0, 2.0).expand([3]))
    >>> def kernel(step_size):
    ...     return ULD(model, step_size=step_size, num_steps=1)
    >>> found = tune(kernel, [0.01, 0.5], model, num_warmup=100, num_samples=500)
    >>> found.best
    0.5
    """
    values = tuple(grid)
    if len(values) < 2:
        raise ValueError(f"grid must have at least two values to choose from, got {len(values)}")
    if interactions not in (True, False, "auto"):
        raise ValueError(f'interactions must be True, False or "auto", got {interactions!r}')
    labels = [_label(value) for value in values]
    score = scorer(model, args, kwargs)

    runs, seconds, orders = [], [], []
    for value, label in zip(values, labels, strict=True):
        start = time.perf_counter()
        made = kernel_factory(value)
        if _is_kernel(made):
            options = dict(
                num_warmup=num_warmup,
                num_samples=num_samples,
                num_chains=num_chains,
                chain_method=chain_method,
            )
            made = _sample(made, options, random_seed, args, kwargs)
        seconds.append(time.perf_counter() - start)
        orders.append(order_for(made, order, "tune"))
        runs.append(_run(_groups(made, label, score, max_draws)))

    usable = [run for run in runs if run.scored is not None]
    if not usable:
        raise TooFewDrawsError(
            "no value of the grid gives a run in which every coordinate moves and stays finite"
        )
    mean = np.median([run.mean for run in usable], axis=0)
    sd = np.median([run.sd for run in usable], axis=0)
    order, d = max(orders), len(mean)
    if interactions == "auto":
        least = min(run.n_draws for run in usable)
        count = n_features(d, order, interactions=True)
        interactions = count <= most_features(least)
    features = SteinBasis(d, order, interactions, basis)
    rows = []
    for run, took in zip(runs, seconds, strict=True):
        psd = noise = np.inf
        if run.scored is not None:
            scored = replace(
                run.scored,
                draws=(run.scored.draws - mean) / sd,
                scores=run.scored.scores * sd,
            )
            series = feature_series(scored, standardization(scored, None), features)
            psd = float(np.linalg.norm(series.mean))
            noise = float(np.linalg.norm(series.mcse))
        rows.append((psd, noise, run.n_draws, run.not_finite, took))
    columns = ["psd", "noise", "draws", "not_finite", "seconds"]
    table = pd.DataFrame(rows, pd.Index(labels, name="value"), columns)
    return Tuning(table, values, order, len(features), bool(interactions))


class _Run(NamedTuple):
    """The draws of one value, None if they are not all finite or have not moved."""

    scored: ScoredDraws | None
    mean: FloatArray
    sd: FloatArray
    n_draws: int
    not_finite: int


def _label(value: Any) -> Any:
    """Return what stands for a value in the table: itself, or the name of a class or function."""
    return getattr(value, "__name__", value)


def _is_kernel(made: Any) -> bool:
    from numpyro.infer.mcmc import MCMCKernel

    return isinstance(made, MCMCKernel)


def _sample(
    kernel: Any, options: dict[str, Any], seed: int, args: tuple, kwargs: dict[str, Any]
) -> dict[str, jax.Array]:
    """Return the constrained draws of a run, by site, in shape (chains, draws, *site)."""
    from numpyro.infer import MCMC

    mcmc = MCMC(kernel, progress_bar=False, **options)
    with warnings.catch_warnings():
        # NumPyro's loop under jax.vmap offers XLA buffers that it cannot use
        warnings.filterwarnings("ignore", "Some donated buffers were not usable", UserWarning)
        mcmc.run(jax.random.key(seed), *args, **kwargs)
    draws: dict[str, jax.Array] = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    return draws


def _groups(made: Any, label: Any, score: Callable[[xr.Dataset], Groups], max_draws: int) -> Groups:
    """Return at most `max_draws` of the unconstrained draws, and their scores."""
    groups: Groups = {}
    if _arviz.is_container(made):
        for name in ("posterior", UNCONSTRAINED, score_group(UNCONSTRAINED)):
            group = _arviz.get_group(made, name)
            if group is not None:
                groups[name] = group
    elif isinstance(made, Mapping):
        arrays = {}
        for name, value in made.items():
            if np.ndim(value) < 2:
                raise ValueError(
                    f"kernel_factory({label}) returned draws of {name!r} with shape "
                    f"{np.shape(value)}; they must have shape (chain, draw, ...)"
                )
            dims = (f"{name}_dim_{i}" for i in range(np.ndim(value) - 2))
            arrays[name] = xr.DataArray(np.asarray(value), dims=("chain", "draw", *dims))
        groups["posterior"] = xr.Dataset(arrays)
    else:
        raise TypeError(
            f"kernel_factory({label}) must return a NumPyro MCMCKernel, a dict of draws or an "
            f"arviz {_arviz.container_type().__name__}, got {type(made).__name__}"
        )
    if not {UNCONSTRAINED, score_group(UNCONSTRAINED)} <= set(groups):
        if "posterior" not in groups:
            raise ValueError(f"kernel_factory({label}) returned data without a posterior")
        groups = score(_thinned(groups["posterior"], max_draws))
    wanted = (UNCONSTRAINED, score_group(UNCONSTRAINED))
    return {name: _thinned(groups[name], max_draws) for name in wanted}


def _thinned(draws: xr.Dataset, max_draws: int) -> xr.Dataset:
    """Return evenly spaced draws of each chain, the last one included."""
    chain, draw = _arviz.default_sample_dims()
    n = draws.sizes[draw]
    step = -(-n * draws.sizes[chain] // max_draws)
    return draws.isel({draw: slice((n - 1) % step, None, step)})


def _run(groups: Groups) -> _Run:
    finite = finite_sites(groups).to_dataarray().all("variable")
    scored, mean, sd = None, np.zeros(0), np.zeros(0)
    if finite.all():
        # the same order of coordinates in every run
        points, scores = groups[UNCONSTRAINED], groups[score_group(UNCONSTRAINED)]
        names = sorted(map(str, points.data_vars))
        draws = scored_draws(points[names], scores[names]).proper_part()
        with contextlib.suppress(TooFewDrawsError):
            own = standardization(draws, "diag")
            scored, mean, sd = draws, own.mean, own.scale
    return _Run(scored, mean, sd, finite.size, int((~finite).sum()))
