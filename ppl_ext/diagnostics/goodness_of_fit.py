"""Does a run's polynomial Stein discrepancy exceed what Monte Carlo error explains?"""

from __future__ import annotations

import html
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from scipy import stats

from ppl_ext._arviz import FilterVars
from ppl_ext.diagnostics.batches import (
    BATCH_TAUS,
    MIN_BATCHES,
    MIN_EFFECTIVE_DRAWS,
    FeatureSeries,
    feature_series,
)
from ppl_ext.diagnostics.draws import UNCONSTRAINED, ScoredDraws, read
from ppl_ext.diagnostics.features import Basis, FloatArray, SteinBasis
from ppl_ext.diagnostics.matrix_moments import (
    MatrixMoments,
    matrix_moments,
    with_fitted_weights,
)
from ppl_ext.diagnostics.moments import Standardization, Standardize, standardization
from ppl_ext.diagnostics.svi import order_for
from ppl_ext.errors import TooFewDrawsError

Method = Literal["auto", "batch", "iid", "gamma", "hotelling", "max", "lambda"]
LambdaWeights = Literal["fitted", "unit"]

MAX_FEATURES = 2000
"""Most features with which ``interactions="auto"`` takes the interactions."""

DRAWS_PER_FEATURE = 5
"""Fewest effective draws for each feature with which it does so."""

HOTELLING_DRAWS_PER_FEATURE, HOTELLING_ORDER = 50, 2
"""Fewest effective draws for each feature of Hotelling's test, and its highest order: with fewer,
or with the heavier tails of features of higher degree, it rejects up to all exact draws."""

SKEWED_ORDER = 4
"""Lowest order with features so skewed that random signs are no null for their largest |t|."""

_STATISTICS = {"max": "largest |t|", "hotelling": "T^2", "lambda": "z"}
_SHOWN = 5
_BOOT_BLOCK = 1024


@dataclass(frozen=True, eq=False, repr=False)
class PSDTest:
    """Result of `psd_test`.

    Attributes
    ----------
    statistic
        For ``method="batch"``, ``"iid"`` and ``"gamma"`` the joint discrepancy, that is the norm
        of the features' means; for ``"max"`` the largest absolute t, with standard errors from
        the batch means; for ``"hotelling"`` T^2; for ``"lambda"`` z.
    pvalue
        Probability, under the target, of a statistic at least as large.
    method, order, basis, standardize, interactions
        What was computed.
    n_coordinates, n_features, n_chains, n_draws
        Sizes. Only finite draws count, and for ``"lambda"`` only those not trained on.
    weight_efficiency
        Number of equal draws that a weighted draw is worth; 1 without weights.
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
    weight_efficiency: float
    n_batches: int
    batch_length: int
    tau: float
    features: pd.DataFrame
    warnings: tuple[str, ...]

    @property
    def ess(self) -> float:
        """Effective number of draws for the slowest feature."""
        return self.n_draws * self.weight_efficiency / self.tau

    @property
    def worst(self) -> pd.DataFrame:
        """The rows of `features` with the largest absolute t."""
        return self.features.head(_SHOWN)

    def _facts(self) -> dict[str, str]:
        kind = f"{self.basis}, order {self.order}, "
        kind += f"{'with' if self.interactions else 'without'} interactions"
        if self.method == "lambda":
            kind = f"matrix moments, order {self.order}"
        return {
            "method": self.method,
            "p-value": f"{self.pvalue:.3g}",
            _STATISTICS.get(self.method, "PSD"): f"{self.statistic:.3g}",
            "features": f"{self.n_features} ({kind}) of {self.n_coordinates} coordinates",
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
    order: int | None = None,
    interactions: bool | Literal["auto"] = "auto",
    basis: Basis = "hermite",
    standardize: Standardize = "full",
    method: Method = "auto",
    n_boot: int = 999,
    random_seed: int | np.random.Generator | None = 0,
    train_fraction: float = 0.3,
    lambda_weights: LambdaWeights = "fitted",
    weights: Any = None,
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
    data, score, sample_dims, group, var_names, filter_vars, coords, weights, chain_axis, draw_axis
        As for `psd`.
    order, basis
        As for `psd`. Order 2 sees wrong means, scales and correlations, order 4 wrong tails, too.
    standardize
        As for `psd`, but ``"full"`` by default: the means of all features then have about the same
        error, and with the Hermite basis and interactions the result does not depend on the
        coordinates (it is the same after an affine map). With ``"diag"``, features of strongly
        correlated coordinates have a far larger error than others, and hide a bias of those. The
        table of features then is about the whitened coordinates, each named after the one closest
        to it. ``"diag"`` is for more coordinates than draws, where ``"full"`` is refused.
    interactions
        Whether to take products of several coordinates. ``"auto"``: if there are at most 2,000
        features then, and five effective draws for each.
    method
        ``"batch"``: the norm of the means of all features, with random signs on batch means.
        ``"iid"``: the same with every draw a batch of its own, the test of arXiv 2412.05135, for
        independent draws only (runs of more than about 8,000 draws are taken in short pieces,
        which makes no difference for those).
        ``"gamma"``: the norm against a gamma law with the first three moments of its null, from
        the covariance of the batch means; no random numbers, and for small p-values.
        ``"hotelling"``: T^2 of the features' means, which weights them by the inverse of their
        covariance; to order 2, with 50 effective draws for each feature.
        ``"max"``: the largest |t|, which is better at finding one wrong coordinate among many. From
        order 4 on, skewed features make it liberal, and the result has a warning: at a level of
        0.05 it rejected 0.07 to 0.08 of exact draws of five coordinates, and 0.14 of a hundred.
        ``"lambda"``: lambda-PSD (arXiv 2606.26621), the mean of one weighted sum of `order` matrix
        moments over the last draws of each chain, in directions found from the first; `basis` and
        `interactions` play no part. Its cost does not grow with the number of features: for many
        coordinates.
        ``"auto"``: ``"max"`` where ``interactions="auto"`` leaves the interactions out, else
        ``"batch"``.
    n_boot
        Number of random sign vectors.
    random_seed
        Seed or generator for the signs. The default gives equal results for equal data.
    train_fraction
        For ``"lambda"``: the part of each chain from which the directions are found.
    lambda_weights
        For ``"lambda"``: ``"fitted"`` to the second half of that part, or ``"unit"``: all one.

    Returns
    -------
    PSDTest

    Raises
    ------
    TooFewDrawsError
        If there are fewer than 80 effective draws (40 batches of two autocorrelation times), or
        fewer than 50 for each feature of ``"hotelling"``. The message says how many it needs.
    MissingScoresError, ValueError
        As for `psd`; ValueError also for ``"hotelling"`` beyond order 2.

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
    if lambda_weights not in get_args(LambdaWeights):
        raise ValueError(
            f"lambda_weights must be one of {get_args(LambdaWeights)}, got {lambda_weights!r}"
        )
    if not 0 < train_fraction < 1:
        raise ValueError(f"train_fraction must be between 0 and 1, got {train_fraction}")
    if not isinstance(n_boot, Integral) or n_boot < 1:
        raise ValueError(f"n_boot must be an integer of at least 1, got {n_boot!r}")
    order = order_for(data, order, "psd_test", group=group)
    if method == "hotelling" and order > HOTELLING_ORDER:
        raise ValueError(
            f'method="hotelling" has no valid level beyond order {HOTELLING_ORDER}, got '
            f'order={order}: use method="batch"'
        )
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
        weights=weights,
    )
    notices = scored.exclusion_notices()
    transform = standardization(scored, standardize)
    basis_ = SteinBasis(scored.dimension, order, interactions is True, basis)
    features: SteinBasis | MatrixMoments = basis_
    if method == "lambda":
        features, scored = _split(scored, transform, order, train_fraction, lambda_weights)
    series = feature_series(scored, transform, features)
    mcse = series.mcse
    tau = series.autocorrelation_time(mcse)
    if method != "lambda" and interactions == "auto" and order > 1 and scored.dimension > 1:
        per_feature = HOTELLING_DRAWS_PER_FEATURE if method == "hotelling" else DRAWS_PER_FEATURE
        effective = series.effective_draws(tau)
        full = SteinBasis(scored.dimension, order, True, basis)
        if len(full) <= most_features(effective, per_feature):
            features, series = full, feature_series(scored, transform, full)
            mcse = series.mcse
            tau = series.autocorrelation_time(mcse)
        else:
            notices.append(
                f"interactions are left out: they would make {len(full)} features, for which "
                f"{effective:.0f} effective draws are too few (or {MAX_FEATURES} features too "
                "many), so that wrong correlations cannot be seen"
            )
            method = "max" if method == "auto" else method
    method = "batch" if method == "auto" else method

    if method == "iid":
        series.require(MIN_EFFECTIVE_DRAWS, 1.0)
        pieces = 1
        # The largest of many estimated times is well above one for independent draws, too.
        times = series.autocorrelation_times(mcse)
        if times.size and np.quantile(times, 0.75) > 2:
            notices.append(
                f'method="iid" takes draws with an autocorrelation time of {tau:.1f} for '
                'independent ones, and rejects exact draws far too often: use method="batch"'
            )
    else:
        pieces = series.pieces_per_batch(tau)
        if method == "hotelling":
            series.require(HOTELLING_DRAWS_PER_FEATURE * len(features), tau)
        if pieces * series.piece_length < BATCH_TAUS * tau:
            notices.append(
                f"the batches of {pieces * series.piece_length} draws are shorter than "
                f"{BATCH_TAUS} autocorrelation times of {tau:.1f}; about "
                f"{BATCH_TAUS * MIN_BATCHES * tau:.0f} draws would allow that"
            )
    if method == "max" and order >= SKEWED_ORDER:
        notices.append(
            f"features of degree {SKEWED_ORDER} and more are skewed, and the largest |t| finds "
            "that: at a level of 0.05 and order 4, it rejects 0.07 to 0.08 of exact draws of five "
            'coordinates, and 0.14 of a hundred. Compare method="batch"'
        )
    mean, rows = series.mean, _error_rows(series, pieces)
    ratio = np.ones(len(features)) if method == "iid" else series.lugsail_ratio(pieces)
    if method == "max":
        mean, rows = _studentised(mean, rows, ratio)
    else:
        rows = rows * np.sqrt(ratio)
    if method == "gamma":
        statistic, pvalue = _gamma_test(mean, rows)
    elif method == "hotelling":
        statistic, pvalue = _hotelling_test(mean, rows)
    elif method == "lambda":
        statistic, pvalue = _z_test(mean[-1], rows[:, -1])
    else:
        size = _largest if method == "max" else _euclidean
        statistic, pvalue = _sign_flip_test(size, mean, rows, n_boot, random_seed)

    t = series.t(mcse)
    worst = float(np.abs(t).max())
    if (
        method in ("batch", "iid", "gamma")
        and pvalue > 0.01
        and worst > stats.norm.isf(0.0005 / len(features))
    ):
        notices.append(
            f"a single feature has |t| = {worst:.1f}, which the sum over all features hides: "
            'its features vary far less than others. Use standardize="full" or method="max"'
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
        interactions=getattr(features, "interactions", True),
        n_coordinates=scored.dimension,
        n_features=len(features),
        n_chains=len(scored.finite),
        n_draws=scored.n_draws,
        weight_efficiency=series.efficiency,
        n_batches=series.n_batches(pieces),
        batch_length=pieces * series.piece_length,
        tau=tau,
        features=table,
        warnings=tuple(notices),
    )


def most_features(draws: float, per_feature: float = DRAWS_PER_FEATURE) -> float:
    """Number of features beyond which `interactions="auto"` leaves out the interactions."""
    return min(MAX_FEATURES, draws / per_feature)


def _split(
    scored: ScoredDraws,
    transform: Standardization,
    order: int,
    train_fraction: float,
    lambda_weights: LambdaWeights,
) -> tuple[MatrixMoments, ScoredDraws]:
    """Return matrix moments of the first draws of every chain, and the other draws."""
    n = scored.finite.shape[1]
    end = int(train_fraction * n)
    middle = end // 2 if lambda_weights == "fitted" else end
    everything = slice(None)
    train, rest, test = (
        scored.part(everything, slice(start, stop))
        for start, stop in ((0, middle), (middle, end), (end, n))
    )
    if not (train.finite.any() and test.finite.any()):
        raise TooFewDrawsError(
            f"train_fraction={train_fraction} leaves no finite draw of {n} per chain on one side"
        )
    moments = matrix_moments(train, transform, order)
    if lambda_weights == "fitted":
        moments = with_fitted_weights(moments, rest, transform)
    return moments, test


def _error_rows(series: FeatureSeries, pieces: int) -> FloatArray:
    """Return rows, shape (batches, J), that sum up to the error of the mean.

    They are the batch means in the scale of the overall mean: under the target they are nearly
    independent with mean zero, and the sum of their squares estimates its variance.
    """
    batches = series.batch_means(pieces)
    # A batch mean has the variance of the overall mean times n_draws / (draws in the batch).
    return batches * np.sqrt(pieces * series.piece_length / (series.n_draws * len(batches)))


def _sign_flip_test(
    size: Callable[[FloatArray], FloatArray],
    mean: FloatArray,
    rows: FloatArray,
    n_boot: int,
    random_seed: int | np.random.Generator | None,
) -> tuple[float, float]:
    """Return size(mean) and its p-value among the sizes of sums of the rows with random signs.

    The rows are not centred: with their own signs they are then one of the equally likely sign
    vectors, which makes the test exact for independent symmetric batches, however few.
    """
    rng = np.random.default_rng(random_seed)
    observed = size(mean)
    exceeding = 0
    for start in range(0, n_boot, _BOOT_BLOCK):
        shape = (min(_BOOT_BLOCK, n_boot - start), len(rows))
        signs = rng.integers(0, 2, shape, dtype=np.int8) * 2.0 - 1.0
        exceeding += int((size(signs @ rows) >= observed).sum())
    return float(observed), (1 + exceeding) / (1 + n_boot)


def _euclidean(means: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.norm(means, axis=-1))


def _largest(means: FloatArray) -> FloatArray:
    return np.asarray(np.abs(means).max(axis=-1, initial=0.0))


def _studentised(
    mean: FloatArray, rows: FloatArray, ratio: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return mean and rows in standard errors, the latter times the root of the lugsail ratio.

    The errors do not change with the signs of the rows, so that their noise is the same in the
    statistic and under the null. That of the ratios is not: in the statistic, they would make the
    largest |t| that of the feature with the smallest of them.
    """
    error = np.linalg.norm(rows, axis=0)
    # A feature without spread is infinitely far from zero unless it is zero.
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0.0, 0.0, mean / error)
        null = np.where(error > 0, rows * np.sqrt(np.maximum(ratio, 1.0)) / error, 0.0)
    return t, null


def _gamma_test(mean: FloatArray, rows: FloatArray) -> tuple[float, float]:
    r"""Return the norm of the mean and its p-value under a gamma law with three right moments.

    Under the target the square is a sum of :math:`\lambda_k\chi^2_1` over the eigenvalues of the
    covariance C of the mean, whose cumulants are multiples of :math:`\mathrm{tr}\,C^i`, i = 1, 2, 3
    (Liu, Tang and Zhang, Computational Statistics & Data Analysis 53, 2009). Sums over pairs and
    triples of different rows estimate these without bias, however many features there are.
    """
    m = len(rows)
    # tr C^i is the same for the Gram matrix of the features and for that of the rows.
    by_feature = rows.shape[1] <= m
    gram = rows.T @ rows if by_feature else rows @ rows.T
    squares = np.square(rows).sum(axis=1)  # r_i . r_i
    to_all = (  # sum over j of (r_i . r_j)^2
        np.einsum("ij,ij->i", rows @ gram, rows) if by_feature else np.square(gram).sum(axis=1)
    )
    first = squares.sum()
    second = (to_all - squares**2).sum() * m / (m - 1)
    triples = (
        np.einsum("ij,ij->", gram @ gram, gram) - 3 * squares @ to_all + 2 * (squares**3).sum()
    )
    third = triples * m**2 / ((m - 1) * (m - 2))
    # What traces of powers of a covariance matrix must satisfy, and estimates may not.
    second = np.clip(second, first**2 / rows.shape[1], first**2)
    third = np.clip(third, second**2 / first, second**1.5)
    observed = float(np.linalg.norm(mean))
    freedom = second**3 / third**2
    standardised = (observed**2 - first) / np.sqrt(2 * second)
    return observed, float(stats.chi2.sf(freedom + np.sqrt(2 * freedom) * standardised, freedom))


def _hotelling_test(mean: FloatArray, rows: FloatArray) -> tuple[float, float]:
    """Return T^2 and its p-value; T^2 (m - J) / (J (m - 1)) has an F law for m normal rows."""
    m, n_features = rows.shape
    centred = rows - rows.mean(axis=0)
    covariance = centred.T @ centred * m / (m - 1)
    statistic = float(mean @ np.linalg.solve(covariance, mean))
    ratio = statistic * (m - n_features) / (n_features * (m - 1))
    return statistic, float(stats.f.sf(ratio, n_features, m - n_features))


def _z_test(mean: float, rows: FloatArray) -> tuple[float, float]:
    """Return mean / error for a single function and its two-sided p-value."""
    m = len(rows)
    z = mean / float(np.sqrt(np.square(rows - rows.mean()).sum() * m / (m - 1)))
    return z, float(2 * stats.t.sf(abs(z), m - 1))
