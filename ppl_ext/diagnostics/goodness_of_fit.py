"""Does a run's polynomial Stein discrepancy exceed what Monte Carlo error explains?"""

from __future__ import annotations

import html
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from scipy import stats

from ppl_ext._arviz import FilterVars
from ppl_ext.diagnostics.batches import BATCH_TAUS, MIN_BATCHES, FeatureSeries, feature_series
from ppl_ext.diagnostics.draws import UNCONSTRAINED, read
from ppl_ext.diagnostics.features import Basis, FloatArray, SteinBasis
from ppl_ext.diagnostics.moments import Standardize, standardization

Method = Literal["auto", "batch", "max"]

MAX_FEATURES = 2000
"""Most features with which ``interactions="auto"`` takes the interactions."""

DRAWS_PER_FEATURE = 5
"""Fewest effective draws for each feature with which it does so."""

_SHOWN = 5
_BOOT_BLOCK = 1024


@dataclass(frozen=True, eq=False, repr=False)
class PSDTest:
    """Result of `psd_test`.

    Attributes
    ----------
    statistic
        For ``method="batch"`` the joint discrepancy, that is the norm of the features' means; for
        ``"max"`` the largest absolute t, with standard errors from the batch means.
    pvalue
        Probability, under the target, of a statistic at least as large.
    method, order, basis, standardize, interactions
        What was computed.
    n_coordinates, n_features, n_chains, n_draws
        Sizes; only finite draws count.
    n_batches, batch_length
        Number of batches, and draws in each.
    tau
        Integrated autocorrelation time, in draws: the largest of any feature.
    features
        A row for each feature, largest absolute t first, with the mean over the draws (``zbar``),
        its Monte Carlo standard error (``mcse``) and their ratio (``t``).
    warnings
        What to know before trusting the result.
    """

    statistic: float
    pvalue: float
    method: Method
    order: int
    basis: Basis
    standardize: Standardize
    interactions: bool
    n_coordinates: int
    n_features: int
    n_chains: int
    n_draws: int
    n_batches: int
    batch_length: int
    tau: float
    features: pd.DataFrame
    warnings: tuple[str, ...]

    @property
    def ess(self) -> float:
        """Effective number of draws for the slowest feature."""
        return self.n_draws / self.tau

    @property
    def worst(self) -> pd.DataFrame:
        """The rows of `features` with the largest absolute t."""
        return self.features.head(_SHOWN)

    def _facts(self) -> dict[str, str]:
        name = "largest |t|" if self.method == "max" else "PSD"
        kind = "with" if self.interactions else "without"
        return {
            "p-value": f"{self.pvalue:.3g}",
            name: f"{self.statistic:.3g}",
            "features": f"{self.n_features} ({self.basis}, order {self.order}, {kind} "
            f"interactions) of {self.n_coordinates} coordinates",
            "draws": f"{self.n_draws} in {self.n_chains} chains, autocorrelation time "
            f"{self.tau:.1f}, {self.ess:.0f} effective",
            "batches": f"{self.n_batches} of {self.batch_length} draws",
        }

    def __repr__(self) -> str:
        facts = [f"  {name:<12}{value}" for name, value in self._facts().items()]
        table = self.worst.to_string(float_format="{:.3g}".format).splitlines()
        lines = ["Polynomial Stein discrepancy test", *facts, "Features with the largest |t|"]
        lines += [f"  {line}" for line in table]
        lines += [f"Warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        facts = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts().items()
        )
        notes = "".join(f"<p>Warning: {html.escape(text)}</p>" for text in self.warnings)
        table = self.worst.to_html(float_format="{:.3g}".format)
        return (
            f"<div><b>Polynomial Stein discrepancy test</b><table>{facts}</table>{table}{notes}"
            "</div>"
        )


def psd_test(
    data: Any,
    score: Any = None,
    *,
    sample_dims: str | Sequence[str] | None = None,
    group: str = UNCONSTRAINED,
    var_names: str | Sequence[str] | None = None,
    filter_vars: FilterVars = None,
    coords: Mapping[Hashable, Any] | None = None,
    order: int = 2,
    interactions: bool | Literal["auto"] = "auto",
    basis: Basis = "hermite",
    standardize: Standardize = "diag",
    method: Method = "auto",
    n_boot: int = 999,
    random_seed: int | np.random.Generator | None = 0,
    chain_axis: int | None = 0,
    draw_axis: int = 1,
) -> PSDTest:
    r"""Test whether draws come from their target, allowing for autocorrelation.

    Chains are cut into batches of about four autocorrelation times of the slowest Stein feature
    (and at least 40 batches in all). Under the target the batch means are nearly independent with
    mean zero, so random signs :math:`W_k` on them imitate the error of the overall mean: this is
    the Rademacher bootstrap of arXiv 2412.05135 with batches instead of draws,
    which keeps its level for chains, where single draws reject every correct sampler. Batch means
    are scaled by a lugsail estimate of each feature's long-run variance.

    A small p-value says that the draws are biased by more than their Monte Carlo error. A large
    one says that this run cannot tell: it is no proof, and chains that have not mixed can pass.

    Parameters
    ----------
    data, score, sample_dims, group, var_names, filter_vars, coords, chain_axis, draw_axis
        As for `psd`.
    order, basis, standardize
        As for `psd`. Order 2 sees wrong means, scales and correlations, order 4 wrong tails, too.
    interactions
        Whether to take products of several coordinates. ``"auto"``: if there are at most 2,000
        features then, and five effective draws for each.
    method
        ``"batch"``: the sum of the squared means of all features; where coordinates are strongly
        correlated, it has more power with ``standardize="full"``. ``"max"``: the largest |t|,
        which is better at finding one wrong coordinate among many. ``"auto"``: ``"max"`` where
        ``interactions="auto"`` leaves the interactions out, else ``"batch"``.
    n_boot
        Number of random sign vectors.
    random_seed
        Seed or generator for the signs. The default gives equal results for equal data.

    Returns
    -------
    PSDTest

    Raises
    ------
    TooFewDrawsError
        If there are fewer than 80 effective draws (40 batches of two autocorrelation times).
    MissingScoresError, ValueError
        As for `psd`.

    Examples
    --------
    >>> import numpy as np
    >>> from ppl_ext.diagnostics import psd_test
    >>> x = np.random.default_rng(1).normal(size=(4, 1000, 2)) * [1.0, 1.1]
    >>> result = psd_test(x, -x)
    >>> result.pvalue
    0.001
    >>> result.worst.index[0]
    'x[1]^2'
    """
    if interactions not in (True, False, "auto"):
        raise ValueError(f'interactions must be True, False or "auto", got {interactions!r}')
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)}, got {method!r}")
    if n_boot < 1:
        raise ValueError(f"n_boot must be at least 1, got {n_boot}")
    scored, _ = read(
        data,
        score,
        sample_dims=sample_dims,
        group=group,
        var_names=var_names,
        filter_vars=filter_vars,
        coords=coords,
        chain_axis=chain_axis,
        draw_axis=draw_axis,
    )
    notices = [notice] if (notice := scored.exclusion_notice()) else []
    transform = standardization(scored, standardize)
    features = SteinBasis(scored.dimension, order, interactions is True, basis)
    series = feature_series(scored, transform, features)
    mcse = series.mcse
    if interactions == "auto" and order > 1 and scored.dimension > 1:
        effective = series.n_draws / series.autocorrelation_time(mcse)
        full = SteinBasis(scored.dimension, order, True, basis)
        if len(full) <= min(MAX_FEATURES, effective / DRAWS_PER_FEATURE):
            features, series = full, feature_series(scored, transform, full)
            mcse = series.mcse
        else:
            notices.append(
                f"interactions are left out: they would make {len(full)} features, for which "
                f"{effective:.0f} effective draws are too few (or {MAX_FEATURES} features too "
                "many), so that wrong correlations cannot be seen"
            )
            method = "max" if method == "auto" else method
    method = "batch" if method == "auto" else method

    tau = series.autocorrelation_time(mcse)
    pieces = series.pieces_per_batch(tau)
    length = pieces * series.piece_length
    if length < BATCH_TAUS * tau:
        wanted = BATCH_TAUS * MIN_BATCHES * tau
        notices.append(
            f"the batches of {length} draws are shorter than {BATCH_TAUS} autocorrelation times of "
            f"{tau:.1f}; about {wanted:.0f} draws would allow that"
        )
    statistic, pvalue = _sign_flip_test(series, pieces, method, n_boot, random_seed)

    t = series.t(mcse)
    worst = float(np.abs(t).max())
    if method == "batch" and pvalue > 0.01 and worst > stats.norm.isf(0.0005 / len(features)):
        notices.append(
            f"a single feature has |t| = {worst:.1f}, which the sum over all features hides: "
            "coordinates are strongly correlated, and their features vary far more than others. "
            'Use standardize="full" or method="max"'
        )
    table = pd.DataFrame(
        {"zbar": series.mean, "mcse": mcse, "t": t},
        index=pd.Index(features.labels(scored.labels), name="feature"),
    ).sort_values("t", key=abs, ascending=False)
    return PSDTest(
        statistic=statistic,
        pvalue=pvalue,
        method=method,
        order=order,
        basis=basis,
        standardize=standardize,
        interactions=features.interactions,
        n_coordinates=scored.dimension,
        n_features=len(features),
        n_chains=len(scored.finite),
        n_draws=scored.n_draws,
        n_batches=series.n_batches(pieces),
        batch_length=length,
        tau=tau,
        features=table,
        warnings=tuple(notices),
    )


def _sign_flip_test(
    series: FeatureSeries,
    pieces: int,
    method: Method,
    n_boot: int,
    random_seed: int | np.random.Generator | None,
) -> tuple[float, float]:
    """Return the statistic and its p-value among those of batch means with random signs.

    The batch means are not centred: with their own signs they are then one of the equally likely
    sign vectors, which makes the test exact for independent symmetric batches, however few.
    """
    mean, batches, ratio = series.mean, series.batch_means(pieces), series.lugsail_ratio(pieces)
    # A batch mean has the variance of the overall mean times n_draws / (draws in the batch).
    scale = math.sqrt(pieces * series.piece_length / (series.n_draws * len(batches)))
    if method == "max":
        # These standard errors do not change with the signs, so that their noise is the same in
        # the statistic and under the null. That of the ratios is not: the largest |t| would be
        # that of the feature with the smallest of them.
        error = scale * np.linalg.norm(batches, axis=0)
        moving = error > 0
        mean, batches = mean[moving] / error[moving], batches[:, moving] / error[moving]
        ratio = np.maximum(ratio[moving], 1.0)
    batches *= scale * np.sqrt(ratio)

    def size(means: FloatArray) -> FloatArray:
        norm = np.inf if method == "max" else 2
        return np.asarray(np.linalg.norm(means, ord=norm, axis=-1))

    rng = np.random.default_rng(random_seed)
    observed = size(mean)
    exceeding = 0
    for start in range(0, n_boot, _BOOT_BLOCK):
        shape = (min(_BOOT_BLOCK, n_boot - start), len(batches))
        signs = rng.integers(0, 2, shape, dtype=np.int8) * 2.0 - 1.0
        exceeding += int((size(signs @ batches) >= observed).sum())
    return float(observed), (1 + exceeding) / (1 + n_boot)
