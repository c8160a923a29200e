"""Monte Carlo errors of the means of Stein features, from means over batches of draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ppl_ext.diagnostics.draws import ScoredDraws
from ppl_ext.diagnostics.features import FloatArray
from ppl_ext.diagnostics.moments import Features, Standardization, feature_sums
from ppl_ext.errors import TooFewDrawsError

MIN_BATCHES = 40
"""Fewest batches of a test: with fewer, their covariance is too noisy for the nominal level."""

BATCH_TAUS, MIN_BATCH_TAUS = 4, 2
"""Length of a batch in autocorrelation times: the one aimed at, and the least."""

MIN_EFFECTIVE_DRAWS = MIN_BATCHES * MIN_BATCH_TAUS

_MAX_PIECES, _MAX_NUMBERS = 2**13, 2**25
"""Bounds on the pieces of all chains together, and on pieces times features."""

_MAX_TRANSFORMED = 2**20
"""Bound on the numbers that are transformed at once for effective sample sizes."""


@dataclass(frozen=True)
class FeatureSeries:
    """Means of J features over all draws, and over short consecutive pieces of each chain.

    Attributes
    ----------
    mean
        Shape (J,): mean over all finite draws.
    variance
        Shape (J,): variance from draw to draw; zero for a constant feature.
    pieces
        Shape (chains, pieces, J): mean over each piece. The pieces end where the chain ends; the
        first draws of a chain belong to none if the length does not divide the chain's.
    piece_length
        Number of draws in a piece.
    n_draws
        Number of finite draws.
    efficiency
        Number of equal draws that a weighted draw is worth; 1 without weights.
    """

    mean: FloatArray
    variance: FloatArray
    pieces: FloatArray
    piece_length: int
    n_draws: int
    efficiency: float = 1.0

    def effective_draws(self, tau: float) -> float:
        """Return the number of independent draws of equal weight that these are worth."""
        return self.n_draws * self.efficiency / tau

    @property
    def mcse(self) -> FloatArray:
        """Monte Carlo standard error of `mean`, shape (J,), from the effective sample size.

        The pieces have the same long-run variance as the draws, so the error of their mean is
        that of the draws' mean.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # features that do not move
            squared = self.pieces.var(axis=(0, 1)) / effective_sample_size(self.pieces)
        mcse: FloatArray = np.sqrt(np.where(self.variance > 0, squared, 0.0))
        return mcse

    def autocorrelation_times(self, mcse: FloatArray) -> FloatArray:
        """Return each moving feature's integrated autocorrelation time, in draws."""
        moving = self.variance > 0
        return mcse[moving] ** 2 * self.n_draws / self.variance[moving]

    def autocorrelation_time(self, mcse: FloatArray) -> float:
        """Return the largest integrated autocorrelation time of a feature, in draws; 1 or more."""
        return float(max(1.0, self.autocorrelation_times(mcse).max(initial=1.0)))

    def t(self, mcse: FloatArray) -> FloatArray:
        """Return mean / mcse; infinite for a constant feature that is not zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.mean == 0.0, 0.0, self.mean / mcse)

    def n_batches(self, pieces: int) -> int:
        """Return the number of batches of so many pieces."""
        n_chains, n_pieces, _ = self.pieces.shape
        return int(n_chains * (n_pieces // pieces))

    def batch_means(self, pieces: int) -> FloatArray:
        """Return means over batches of so many pieces, shape (batches, J), chain after chain."""
        _, n_pieces, n_features = self.pieces.shape
        used = self.pieces[:, n_pieces % pieces :]
        batches = used.reshape(self.n_batches(pieces), pieces, n_features)
        return np.asarray(batches.mean(axis=1))

    def pieces_per_batch(self, tau: float) -> int:
        """Return the length of a batch in pieces: even, four autocorrelation times if it can be.

        Raises
        ------
        TooFewDrawsError
            If not even batches of two autocorrelation times leave `MIN_BATCHES` of them.
        """
        pieces = 2 * math.ceil(BATCH_TAUS * tau / (2 * self.piece_length))
        while pieces > 2 and self.n_batches(pieces) < MIN_BATCHES:
            pieces -= 2
        enough = self.n_batches(pieces) >= MIN_BATCHES
        if not enough or pieces * self.piece_length < MIN_BATCH_TAUS * tau:
            raise self.too_few(MIN_EFFECTIVE_DRAWS, tau)
        self.require(MIN_EFFECTIVE_DRAWS, tau)
        return pieces

    def require(self, effective_draws: int, tau: float) -> None:
        """Raise a `TooFewDrawsError` if there are fewer effective draws."""
        if self.effective_draws(tau) < effective_draws:
            raise self.too_few(effective_draws, tau)

    def too_few(self, effective_draws: int, tau: float) -> TooFewDrawsError:
        """Return the refusal that says how many draws a test would need."""
        weighted = "" if self.efficiency == 1 else f" and weights worth {self.efficiency:.2g} each"
        needed = math.ceil(1.1 * effective_draws * tau / self.efficiency)
        return TooFewDrawsError(
            f"{self.n_draws} draws with an autocorrelation time of {tau:.1f}{weighted} are "
            f"{self.effective_draws(tau):.0f} effective draws; the test needs {effective_draws}, "
            f"that is about {needed} draws"
        )

    def lugsail_ratio(self, pieces: int) -> FloatArray:
        r"""Return how much larger the long-run variance is than that of batch means, shape (J,).

        Batch means of length b underestimate the long-run variance of a positively correlated
        series by a term in 1/b, which the lugsail combination :math:`2 V_b - V_{b/2}` of the
        estimates at two lengths removes (Vats and Flegal, arXiv 1809.04541). This is the ratio of
        that to :math:`V_b`; 1 for a constant feature.
        """
        long = self.batch_means(pieces).var(axis=0, ddof=1)
        short = self.batch_means(pieces // 2).var(axis=0, ddof=1) / 2
        # The combination may come out small or negative by chance, but hardly for a true ratio
        # below one half: that would be a strongly antithetic feature.
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(long > 0, np.maximum(2 - short / long, 0.5), 1.0)


def effective_sample_size(series: FloatArray) -> FloatArray:
    """Return the effective sample size of the mean of each of J series, chains split in halves.

    NumPyro's estimator, which takes all series at once where ArviZ goes through them one by one,
    with ArviZ's bound: an antithetic series is worth at most log10(n) times its n draws.

    Parameters
    ----------
    series
        Shape (chains, draws, J), at least four draws.

    Returns
    -------
    Shape (J,).
    """
    # imported here: ArviZ alone should not load NumPyro
    from numpyro.diagnostics import effective_sample_size

    half = series.shape[1] // 2
    halves = np.concatenate([series[:, :half], series[:, -half:]])
    n_draws = halves.shape[0] * half
    at_once = max(1, _MAX_TRANSFORMED // n_draws)
    blocks = [
        effective_sample_size(halves[..., start : start + at_once])
        for start in range(0, series.shape[2], at_once)
    ]
    tau = n_draws / np.concatenate(blocks)
    return np.asarray(n_draws / np.maximum(tau, 1 / np.log10(n_draws)))


def feature_series(
    scored: ScoredDraws, transform: Standardization, features: Features
) -> FeatureSeries:
    """Return the features' means over all draws and over pieces of the chains.

    With weights, a feature is that times the weight of the draw, relative to the mean weight: under
    the target its mean is zero too, and its error is that of the weighted mean (delta method).

    Raises
    ------
    TooFewDrawsError
        If the chains are shorter than four draws.
    """
    n_chains, n = scored.finite.shape
    if n < 4:
        raise TooFewDrawsError(f"the chains have {n} draws each; at least 4 are needed")
    budget = min(_MAX_PIECES, _MAX_NUMBERS // len(features))
    wanted = max(budget // n_chains, 16, math.ceil(4 * MIN_BATCHES / n_chains))
    length = math.ceil(n / wanted)
    n_pieces, rest = divmod(n, length)
    # One segment for each piece, and before them one for the draws that fill no piece.
    inside = rest + length * np.arange(n_pieces)
    inside = np.concatenate([[0], inside]) if rest else inside
    starts = (n * np.arange(n_chains)[:, None] + inside).reshape(-1)
    totals = feature_sums(scored, transform, features, starts)
    # Weights with mean one, so that products with them have the mean of the features.
    factor = scored.n_draws / scored.total_weight
    mean = factor * totals.sums.sum(axis=0) / scored.n_draws
    square = factor**2 * totals.squares / scored.n_draws
    variance = square - mean**2
    # What rounding leaves of the variance of a constant feature is no variance.
    variance[variance <= 1e-12 * square] = 0.0
    segments = totals.sums.reshape(n_chains, len(inside), len(features))
    return FeatureSeries(
        mean=mean,
        variance=variance,
        pieces=segments[:, len(inside) - n_pieces :] * (factor / length),
        piece_length=length,
        n_draws=scored.n_draws,
        efficiency=scored.weight_efficiency,
    )
