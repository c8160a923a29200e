"""Level and power of the test, its Monte Carlo errors, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics import TooFewDrawsError, batches, psd, psd_test
from ppl_ext.diagnostics.batches import FeatureSeries, effective_sample_size, feature_series
from ppl_ext.diagnostics.draws import read
from ppl_ext.diagnostics.features import SteinBasis
from ppl_ext.diagnostics.moments import standardization

MakeChains = Callable[..., np.ndarray]


def series_of(x: np.ndarray, order: int = 1) -> FeatureSeries:
    scored, _ = read(
        x, -x, sample_dims=None, group="", var_names=None, filter_vars=None, coords=None,
        chain_axis=0, draw_axis=1,
    )  # fmt: skip
    basis = SteinBasis(scored.dimension, order, False)
    return feature_series(scored, standardization(scored, None), basis)


def test_exact_draws_of_a_slow_chain_are_not_rejected(ar1: MakeChains) -> None:
    """Single draws as batches reject every one of these chains."""
    pvalues = []
    for seed in range(25):
        x = ar1(np.random.default_rng(seed), 4, 2000, 5, 0.9)
        result = psd_test(x, -x, n_boot=199)
        assert result.batch_length >= 2 * result.tau
        pvalues.append(result.pvalue)
    # Under a level of 0.05, 5 or more of 25 have probability 0.007.
    assert np.sum(np.array(pvalues) <= 0.05) < 5
    assert np.mean(pvalues) > 0.3


def test_exact_draws_of_a_long_run_are_not_rejected(ar1: MakeChains) -> None:
    """Such a run is kept in pieces of several draws."""
    pvalues = []
    for seed in range(5):
        x = ar1(np.random.default_rng(seed), 4, 20_000, 3, 0.5)
        pvalues.append([psd_test(x, -x, n_boot=199, method=m).pvalue for m in ("batch", "max")])
    assert np.mean(np.array(pvalues) <= 0.05) < 0.3
    assert 0.2 < np.mean(pvalues) < 0.8


@pytest.mark.parametrize("method", ["batch", "max"])
def test_biased_draws_are_rejected(ar1: MakeChains, method: str) -> None:
    for seed in range(3):
        x = ar1(np.random.default_rng(seed), 4, 4000, 3, 0.5)
        x[..., 1] *= 1.1
        result = psd_test(x, -x, method=method)
        assert result.pvalue == 0.001
        assert result.worst.index[0] == "x[1]^2"
        assert result.worst["zbar"].iloc[0] == pytest.approx((1 - 1.1**2) / np.sqrt(2), abs=0.05)


def test_wrong_correlation_needs_interactions(ar1: MakeChains) -> None:
    x = ar1(np.random.default_rng(0), 4, 4000, 2, 0.0)
    x[..., 1] = 0.1 * x[..., 0] + np.sqrt(0.99) * x[..., 1]
    result = psd_test(x, -x)
    assert result.interactions and result.pvalue == 0.001
    assert result.worst.index[0] == "x[0]*x[1]"
    assert psd_test(x, -x, interactions=False).pvalue > 0.1


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.3])
@pytest.mark.parametrize("draws", [4000, 50_000])
def test_monte_carlo_error_of_the_mean(ar1: MakeChains, rho: float, draws: int) -> None:
    """Long chains are kept in pieces of several draws; the error must not depend on that."""
    series = series_of(ar1(np.random.default_rng(1), 4, draws, 40, rho))
    tau = (1 + rho) / (1 - rho)
    assert series.piece_length == (2 if draws == 4000 else 25)
    mcse = series.mcse
    assert np.mean(mcse**2) == pytest.approx(tau / (4 * draws), rel=0.1)
    assert np.mean(series.t(mcse) ** 2) == pytest.approx(1, abs=0.6)
    found = series.autocorrelation_time(mcse)
    assert max(1.0, 0.95 * tau) <= found < max(1.6, 1.8 * tau)


def test_lugsail_removes_the_bias_of_short_batches(ar1: MakeChains) -> None:
    series = series_of(ar1(np.random.default_rng(2), 4, 8000, 200, 0.9))
    pieces = 2 * round(2 * 19 / series.piece_length / 2)  # two autocorrelation times
    length = pieces * series.piece_length
    variance = length * series.batch_means(pieces).var(axis=0, ddof=1)
    plain, corrected = np.mean(variance), np.mean(variance * series.lugsail_ratio(pieces))
    assert plain < 0.82 * 19
    assert corrected == pytest.approx(19, rel=0.09)


def test_batches_follow_the_autocorrelation_time(ar1: MakeChains) -> None:
    rng = np.random.default_rng(3)
    for rho, draws in ((0.0, 1000), (0.8, 4000), (0.95, 8000)):
        x = ar1(rng, 4, draws, 3, rho)
        result = psd_test(x, -x, n_boot=9)
        assert result.n_batches >= 40 and result.n_batches * result.batch_length <= 4 * draws
        assert result.batch_length >= 4 * result.tau
        assert result.ess == pytest.approx(4 * draws / result.tau)
        assert not result.warnings


def test_too_few_effective_draws_are_refused_with_the_number_needed(ar1: MakeChains) -> None:
    x = ar1(np.random.default_rng(4), 4, 300, 3, 0.95)
    with pytest.raises(TooFewDrawsError, match=r"effective draws; the test needs 80, .* \d+ draws"):
        psd_test(x, -x)
    with pytest.raises(TooFewDrawsError, match="3 draws each"):
        psd_test(x[:, :3], -x[:, :3])
    assert issubclass(TooFewDrawsError, ValueError)


def test_short_batches_are_reported(ar1: MakeChains) -> None:
    x = ar1(np.random.default_rng(5), 4, 500, 3, 0.88)
    result = psd_test(x, -x, n_boot=9)
    assert 40 <= result.n_batches < 50
    assert any("shorter than 4 autocorrelation times" in text for text in result.warnings)


def test_many_coordinates_leave_the_interactions_out_and_say_so() -> None:
    x = np.random.default_rng(6).normal(size=(4, 500, 100))
    x[..., 42] *= 1.2
    result = psd_test(x, -x)
    assert not result.interactions and result.method == "max" and result.n_features == 200
    assert result.pvalue <= 0.01 and result.worst.index[0] == "x[42]^2"
    assert result.statistic == pytest.approx(result.worst["t"].abs().iloc[0], rel=0.3)
    assert any("interactions are left out: they would make 5150" in w for w in result.warnings)
    assert psd_test(x, -x, method="batch", n_boot=9).method == "batch"


def test_bias_beside_strongly_correlated_coordinates_is_pointed_out() -> None:
    covariance = np.array([[1.0, 0.999, 0.0], [0.999, 1.0, 0.0], [0.0, 0.0, 1.0]])
    rng = np.random.default_rng(14)
    x = rng.normal(size=(4, 1000, 3)) @ np.linalg.cholesky(covariance).T
    x[..., 2] *= 1.1
    s = -x @ np.linalg.inv(covariance)
    result = psd_test(x, s, standardize="diag")
    assert result.pvalue > 0.01
    assert any("single feature has |t|" in text for text in result.warnings)
    for options in ({}, {"standardize": "diag", "method": "max"}):
        better = psd_test(x, s, **options)
        assert better.pvalue <= 0.005 and not better.warnings


def test_statistic_is_the_joint_discrepancy(ar1: MakeChains) -> None:
    x = ar1(np.random.default_rng(7), 2, 500, 3, 0.3)
    for options in (
        {"order": 3, "standardize": "full"},
        {"basis": "monomial", "standardize": None},
    ):
        joint = psd(x, -x, joint=True, interactions=True, **options)
        assert psd_test(x, -x, n_boot=9, **options).statistic == pytest.approx(joint)


def test_same_seed_same_pvalue(ar1: MakeChains) -> None:
    x = ar1(np.random.default_rng(8), 4, 500, 2, 0.3)
    first, again = psd_test(x, -x), psd_test(x, -x)
    assert first.pvalue == again.pvalue
    other = psd_test(x, -x, random_seed=np.random.default_rng(1), n_boot=1999)
    assert other.pvalue != first.pvalue
    assert other.pvalue == pytest.approx(first.pvalue, abs=0.08)


def test_draws_that_are_not_finite_are_counted(ar1: MakeChains) -> None:
    x = ar1(np.random.default_rng(9), 4, 500, 2, 0.0)
    s = -x
    s[0, :7, 1] = np.inf
    result = psd_test(x, s)
    assert result.n_draws == 1993
    assert result.warnings[0].startswith("7 of 2000 draws are left out")
    assert np.isfinite(result.features.values).all() and result.pvalue > 0.01


def test_largest_t_of_skewed_features_has_a_warning() -> None:
    x = np.random.default_rng(17).normal(size=(4, 500, 2))
    for order in (3, 4):
        result = psd_test(x, -x, method="max", order=order, n_boot=9)
        assert any("are skewed" in text for text in result.warnings) == (order == 4)
    assert not psd_test(x, -x, order=4, n_boot=9).warnings


def test_constant_feature_is_infinitely_significant() -> None:
    """With the score 1 / x, the feature of degree two is 2 + 2 x / x."""
    x = np.random.default_rng(10).normal(size=(4, 500))
    result = psd_test(x, 1 / x, standardize=None)
    assert result.worst.index[0] == "x^2" and np.isinf(result.worst["t"].iloc[0])
    assert psd_test(x, 1 / x, standardize=None, method="max").pvalue == 0.001


@pytest.mark.arviz
@pytest.mark.parametrize(("rho", "rtol"), [(0.0, 0.1), (0.9, 0.03), (-0.9, 1e-9)])
def test_effective_sample_size_is_near_to_that_of_arviz(
    ar1: MakeChains, rho: float, rtol: float
) -> None:
    """The last term of the sum over lags differs, up to 6% here; the antithetic bound does not."""
    series = ar1(np.random.default_rng(15), 2, 501, 40, rho)
    expected = _arviz.ess(xr.DataArray(series, dims=("chain", "draw", "series"))).values
    np.testing.assert_allclose(effective_sample_size(series), expected, rtol=rtol)


@pytest.mark.parametrize("shape", [(1, 4, 3), (3, 10, 300)])
def test_effective_sample_size_of_short_chains(ar1: MakeChains, shape: tuple[int, ...]) -> None:
    found = effective_sample_size(ar1(np.random.default_rng(15), *shape, 0.0))
    assert found.shape == shape[2:] and (found > 0).all()


def test_effective_sample_size_in_blocks(ar1: MakeChains, monkeypatch: pytest.MonkeyPatch) -> None:
    series = ar1(np.random.default_rng(16), 2, 100, 7, 0.5)
    expected = effective_sample_size(series)
    monkeypatch.setattr(batches, "_MAX_TRANSFORMED", 400)
    np.testing.assert_allclose(effective_sample_size(series), expected, rtol=1e-12)


@pytest.mark.arviz
def test_result_reads_well(run: Any) -> None:
    result = psd_test(run)
    text = repr(result)
    assert "theta[Deerfield, 10]^2" in text and "p-value" in text and "effective" in text
    assert str(result) == text
    page = result._repr_html_()
    assert "theta[Deerfield, 10]^2" in page and page.count("<table") == 2
    assert {"mu*p[0]", "theta[Choate, 10]*theta[Deerfield, 30]", "mu^2"} <= set(
        result.features.index
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.pvalue = 0.5  # type: ignore[misc]


@pytest.mark.arviz
def test_one_sample_dimension(run: Any) -> None:
    draws = xr.Dataset({"z": ("sample", np.random.default_rng(11).normal(size=400))})
    result = psd_test(draws, -draws, sample_dims="sample")
    assert (result.n_chains, result.n_draws) == (1, 400)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interactions": "some"}, 'interactions must be True, False or "auto"'),
        ({"method": "bootstrap"}, "method must be one of .*'bootstrap'"),
        ({"n_boot": 0}, "n_boot must be an integer of at least 1, got 0"),
        ({"n_boot": "a"}, "n_boot must be an integer of at least 1, got 'a'"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    x = np.random.default_rng(12).normal(size=(2, 100))
    with pytest.raises(ValueError, match=message):
        psd_test(x, -x, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["batch", "max"])
@pytest.mark.parametrize(
    ("rho", "draws"), [(0.0, 500), (0.5, 500), (0.8, 500), (0.9, 2000), (0.95, 2000)]
)
def test_type_one_error(ar1: MakeChains, rho: float, draws: int, method: str) -> None:
    """Level 0.05, d = 5, order 2, four chains with autocorrelation times of 1 to 39."""
    rng = np.random.default_rng(13)
    rejected = refused = 0
    for _ in range(1000):
        x = ar1(rng, 4, draws, 5, rho)
        try:
            rejected += psd_test(x, -x, n_boot=399, method=method).pvalue <= 0.05  # type: ignore[arg-type]
        except TooFewDrawsError:
            refused += 1
    assert refused < 100
    assert 0.025 <= rejected / (1000 - refused) <= 0.08
