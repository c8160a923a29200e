"""How many components a slice sampler looked at beyond the clusters, beside the law."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from ppl_ext import _arviz

# a |z| that chance exceeds once in 15,000 runs
MAX_Z = 4.0


@dataclass(frozen=True)
class OverheadReport:
    """Overhead of a run; printing it gives a text.

    Parameters
    ----------
    overhead, predicted : float
        Mean number of components beyond the clusters in a sweep, and the mean that the law gives
        for the same sweeps: P(0) = 1 if L <= 0, else 1 + Poisson(alpha L), with L the log of the
        leftover mass over the least slice. NaN for a Pitman-Yor process.
    z : float
        Standardised difference of their sums: a self-test of the sampler.
    num_clusters, num_instantiated : float
        Mean in a sweep.
    largest : int
        Most components in a sweep.
    overflowed : float
        Share of draws after an overflow of the slots.
    """

    overhead: float
    predicted: float
    z: float
    num_clusters: float
    num_instantiated: float
    largest: int
    overflowed: float

    def __str__(self) -> str:
        return (
            f"{self.num_instantiated:.1f} components for {self.num_clusters:.1f} clusters (at most "
            f"{self.largest}): overhead {self.overhead:.2f}, by the law {self.predicted:.2f} "
            f"(z = {self.z:.1f}); {self.overflowed:.1%} of draws after an overflow"
        )

    __repr__ = __str__


def overhead_report(data: Any) -> OverheadReport:
    """Compare the components that a run of `DPSlice` instantiated with the law of the overhead.

    Given the leftover mass and the least slice the overhead of a Dirichlet process is 0 or
    1 + Poisson(alpha L), so that it is O(log n) whatever the data (arXiv 2602.00878). Given the
    past, differences from the law's mean have mean zero, so that a large sum of them is an error
    of the program.

    Parameters
    ----------
    data : arviz.InferenceData or xarray.DataTree
        Of `ppl_ext.to_arviz(mcmc)`.

    Raises
    ------
    ValueError
        When the run holds no overhead, or nothing but draws after an overflow.

    Warns
    -----
    UserWarning
        When the run has overflowed, or z is beyond 4 or -4.

    Examples
    --------
    Of three sweeps as `ppl_ext.to_arviz` gives them:

    >>> import xarray as xr
    >>> from ppl_ext import _arviz
    >>> from ppl_ext.diagnostics import overhead_report
    >>> sweeps = xr.Dataset({
    ...     "overhead": (("chain", "draw"), [[0, 3, 1]]),
    ...     "overhead_predicted": (("chain", "draw"), [[0.0, 2.0, 1.5]]),
    ...     "num_clusters": (("chain", "draw"), [[5, 5, 6]]),
    ...     "num_instantiated": (("chain", "draw"), [[5, 8, 7]]),
    ...     "overflow": (("chain", "draw"), [[False, False, False]]),
    ... })
    >>> report = overhead_report(_arviz.from_groups({"posterior": sweeps, "sample_stats": sweeps}))
    >>> round(report.overhead, 2), round(report.predicted, 2), report.largest
    (1.33, 1.17, 8)
    """
    group = _arviz.get_group(data, "sample_stats") if _arviz.is_container(data) else None
    if group is None or "overhead" not in group:
        raise ValueError(
            "overhead_report takes `ppl_ext.to_arviz(mcmc)` of a run of DPSlice: there is no "
            "'overhead' in the group sample_stats."
        )
    values = {
        name: np.asarray(group[name]).ravel()
        for name in (
            "overhead",
            "overhead_predicted",
            "num_clusters",
            "num_instantiated",
            "overflow",
        )
    }
    fine = ~values["overflow"].astype(bool)
    if not fine.any():
        raise ValueError(
            "overhead_report: every draw follows an overflow of the slots. Repeat the run with "
            "more: `kernel.rerun(mcmc)`."
        )
    overflowed = 1 - float(fine.mean())
    if overflowed:
        warnings.warn(
            f"{overflowed:.1%} of the draws follow an overflow of the slots. Repeat the run with "
            "more: `kernel.rerun(mcmc)`.",
            stacklevel=2,
        )
    overhead = values["overhead"][fine].astype(float)
    predicted = values["overhead_predicted"][fine].astype(float)
    # the variance of 1 + Poisson(m) is m
    variance = np.maximum(predicted - 1, 0.0).sum()
    difference = (overhead - predicted).sum()
    z = float(difference / np.sqrt(variance)) if variance > 0 else float("nan")
    if abs(z) > MAX_Z:
        warnings.warn(
            f"The overhead is off its law by {z:.1f} standard deviations, which chance does with "
            f"probability {2 * stats.norm.sf(abs(z)):.1e}: please report this run.",
            stacklevel=2,
        )
    return OverheadReport(
        overhead=float(overhead.mean()),
        predicted=float(predicted.mean()),
        z=z,
        num_clusters=float(values["num_clusters"][fine].mean()),
        num_instantiated=float(values["num_instantiated"][fine].mean()),
        largest=int(values["num_instantiated"][fine].max()),
        overflowed=overflowed,
    )
