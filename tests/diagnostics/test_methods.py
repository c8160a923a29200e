"""The tests other than random signs on batches, each against its own definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ppl_ext.diagnostics import TooFewDrawsError, psd, psd_test
from ppl_ext.diagnostics.draws import ScoredDraws, read
from ppl_ext.diagnostics.goodness_of_fit import _gamma_test, _hotelling_test, _z_test
from ppl_ext.diagnostics.matrix_moments import matrix_moments, with_fitted_weights
from ppl_ext.diagnostics.moments import standardization

MakeChains = Callable[..., np.ndarray]


def scored_draws(x: np.ndarray, s: np.ndarray, weights: Any = None) -> ScoredDraws:
    return read(
        x, s, sample_dims=None, group="", var_names=None, filter_vars=None, coords=None,
        chain_axis=0, draw_axis=1, weights=weights,
    )[0]  # fmt: skip


def log_gamma(rng: np.random.Generator, n: int) -> np.ndarray:
    """Logarithms of Gamma(3, 1) draws, whose log density is 3 z - exp(z)."""
    return np.log(rng.gamma(3.0, size=(4, n)))


@pytest.mark.parametrize("method", ["batch", "iid", "gamma", "hotelling", "max", "lambda"])
def test_dropped_jacobian_is_rejected(method: str) -> None:
    """Without the Jacobian the score is 2 - exp(z): it belongs to a Gamma(2, 1)."""
    pvalues = []
    for seed in range(5):
        z = log_gamma(np.random.default_rng(seed), 500)
        pvalues.append(psd_test(z, 3 - np.exp(z), method=method).pvalue)  # type: ignore[arg-type]
        assert psd_test(z, 2 - np.exp(z), method=method).pvalue <= 0.001  # type: ignore[arg-type]
    # Of 20 seeds, at most three p-values of any method are below 0.1, and none below 0.02.
    assert min(pvalues) > 0.01 and np.mean(pvalues) > 0.2


@pytest.mark.parametrize("method", ["batch", "gamma", "hotelling", "lambda"])
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_level(ar1: MakeChains, method: str, rho: float) -> None:
    """With a rejection rate of 0.05, 7 or more of 40 have probability 0.003."""
    rejected = 0
    for seed in range(40):
        x = ar1(np.random.default_rng(seed), 4, 700, 2, rho)
        options: dict[str, Any] = {"n_boot": 199, "method": method}
        options["interactions"] = method != "hotelling"
        rejected += psd_test(x, -x, **options).pvalue <= 0.05
    assert rejected < 7


@pytest.mark.parametrize("options", [{}, {"order": 3}, {"method": "gamma"}])
def test_whitened_test_does_not_depend_on_the_coordinates(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    x = rng.gamma(3.0, size=(2, 400, 3))
    s = 2 / x - 1
    matrix = rng.normal(size=(3, 3))
    y, s_y = x @ matrix.T + 10, s @ np.linalg.inv(matrix)
    first, mapped = (psd_test(*pair, interactions=True, **options) for pair in ((x, s), (y, s_y)))
    assert mapped.statistic == pytest.approx(first.statistic, rel=1e-8)
    # the lugsail ratios, one per feature, do depend on them
    assert mapped.pvalue == pytest.approx(first.pvalue, abs=0.05)
    swapped = psd_test(x[..., ::-1], s[..., ::-1], interactions=True, **options)
    assert swapped.pvalue == pytest.approx(first.pvalue, rel=1e-9)
    np.testing.assert_allclose(
        psd(x[..., ::-1], s[..., ::-1], standardize="full")[::-1], psd(x, s, standardize="full")
    )


@pytest.mark.parametrize("quantile", [0.5, 0.05, 0.002])
def test_gamma_against_the_law_of_a_weighted_sum(quantile: float) -> None:
    rng = np.random.default_rng(2)
    eigenvalues = np.array([3.0, 1.0, 1.0, 0.4, 0.1])
    rows = np.linalg.qr(rng.normal(size=(4000, 5)))[0] * np.sqrt(eigenvalues)
    sums = rng.chisquare(1, size=(400_000, 5)) @ eigenvalues
    critical = np.quantile(sums, 1 - quantile)
    mean = np.sqrt(critical) * np.array([0.0, 1.0, 0.0, 0.0, 0.0])
    statistic, pvalue = _gamma_test(mean, rows)
    assert statistic == pytest.approx(np.sqrt(critical))
    assert pvalue == pytest.approx(quantile, rel=0.12)
    # more features than rows, by the other Gram matrix
    few = rows[:100] * np.sqrt(40)
    wide = np.concatenate([few, np.zeros((100, 200))], axis=1)
    narrow = _gamma_test(mean, few)
    assert _gamma_test(np.concatenate([mean, np.zeros(200)]), wide) == pytest.approx(narrow)


def test_traces_of_gamma_have_no_bias_where_features_outnumber_rows() -> None:
    """Plain traces of the square of the estimate are four times too large here."""
    rng = np.random.default_rng(3)
    pvalues = []
    for _ in range(400):
        rows = rng.normal(size=(60, 200)) / np.sqrt(60)
        pvalues.append(_gamma_test(rng.normal(size=200), rows)[1])
    assert np.mean(np.array(pvalues) < 0.1) == pytest.approx(0.1, abs=0.045)


def test_hotelling_against_its_law() -> None:
    rng = np.random.default_rng(4)
    mix = rng.normal(size=(5, 5))
    pvalues = []
    for _ in range(1000):
        rows = rng.normal(size=(30, 5)) @ mix / np.sqrt(30)
        mean = rows.sum(axis=0)
        statistic, pvalue = _hotelling_test(mean, rows)
        pvalues.append(pvalue)
    # the mean is a sum of 30 rows
    covariance = np.cov(rows.T) * 30
    assert statistic == pytest.approx(mean @ np.linalg.solve(covariance, mean))
    assert stats.kstest(pvalues, "uniform").pvalue > 0.001


def test_hotelling_is_refused_where_it_has_no_level(ar1: MakeChains) -> None:
    x = ar1(np.random.default_rng(5), 4, 250, 5, 0.0)
    with pytest.raises(ValueError, match=r"no valid level beyond order 2, got order=3"):
        psd_test(x, -x, method="hotelling", order=3)
    with pytest.raises(TooFewDrawsError, match="the test needs 1000"):
        psd_test(x, -x, method="hotelling", interactions=True)
    assert not psd_test(x, -x, method="hotelling").interactions


def test_z_against_students_law() -> None:
    rows = np.random.default_rng(6).normal(size=50) / 50
    mean = rows.sum()
    t, pvalue = stats.ttest_1samp(rows, 0.0)
    assert _z_test(mean, rows) == pytest.approx((t, pvalue))


def test_single_draws_as_batches_are_for_independent_draws_only(ar1: MakeChains) -> None:
    rejected = 0
    for seed in range(40):
        x = np.random.default_rng(seed).normal(size=(1, 500, 3))
        result = psd_test(x, -x, method="iid", n_boot=199)
        assert result.batch_length == 1 and result.n_batches == 500 and not result.warnings
        rejected += result.pvalue <= 0.05
    assert rejected < 7
    for seed in range(3):
        x = ar1(np.random.default_rng(seed), 4, 500, 5, 0.8)
        result = psd_test(x, -x, method="iid")
        assert result.pvalue <= 0.05
        assert any("takes draws with an autocorrelation time of" in w for w in result.warnings)
        assert psd_test(x, -x).pvalue > 0.01
    with pytest.raises(TooFewDrawsError, match="the test needs 80"):
        psd_test(x[:1, :70], -x[:1, :70], method="iid")


@pytest.mark.parametrize("weighted", [False, True])
def test_matrix_moments_against_their_definition(weighted: bool) -> None:
    rng = np.random.default_rng(7)
    x, s = rng.normal(size=(2, 2, 40, 3))
    w = rng.exponential(size=(2, 40)) if weighted else np.ones((2, 40))
    scored = scored_draws(x, s, w if weighted else None)
    moments = matrix_moments(scored, standardization(scored, None), order=4)
    flat_x, flat_s, p = x.reshape(-1, 3), s.reshape(-1, 3), w.reshape(-1) / w.sum()
    terms = [p @ flat_s]
    for k in (1, 2, 3):
        outer = np.einsum("n,ni,nj->ij", p, flat_s, flat_x**k)
        terms.append(outer + k * np.diag(p @ flat_x ** (k - 1)))
    norm = np.sqrt(sum(np.square(term).sum() for term in terms))
    np.testing.assert_allclose(moments.vector, terms[0] / norm)
    np.testing.assert_allclose(moments.matrices, np.array(terms[1:]) / norm)

    fitted = with_fitted_weights(moments, scored, standardization(scored, None))
    values = fitted(flat_x.T, flat_s.T)
    for point, score, found in zip(flat_x, flat_s, values.T, strict=True):
        expected = [score @ terms[0] / norm]
        for k in (1, 2, 3):
            trace = k * np.diag(terms[k]) @ point ** (k - 1)
            expected.append((score @ terms[k] @ point**k + trace) / norm)
        np.testing.assert_allclose(found[:-1], expected)
        assert found[-1] == pytest.approx(fitted.weights @ expected)
    if not weighted:
        g = values[:-1]
        direction = np.linalg.solve(np.cov(g), g.mean(axis=1))
        np.testing.assert_allclose(fitted.weights, direction / np.linalg.norm(direction))


def test_lambda_tests_on_other_draws_than_it_trains_on() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(4, 1000, 30))
    x[..., 3] *= 1.3
    result = psd_test(x, -x, method="lambda")
    assert result.pvalue < 0.001 and result.n_draws == 2800
    assert list(result.features.index) and set(result.features.index) == {
        "moment of degree 1", "moment of degree 2", "weighted sum",
    }  # fmt: skip
    assert "matrix moments, order 2" in repr(result)
    unit = psd_test(x, -x, method="lambda", lambda_weights="unit", train_fraction=0.5)
    assert unit.pvalue < 0.001 and unit.n_draws == 2000
    total = unit.features["zbar"].drop("weighted sum").sum()
    assert unit.features["zbar"]["weighted sum"] == pytest.approx(total)
    # A bias of the first draws alone gives a direction, but no evidence.
    late = x.copy()
    late[:, 300:, 3] /= 1.3
    assert psd_test(late, -late, method="lambda").pvalue > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_fraction": 1.0}, "train_fraction must be between 0 and 1, got 1.0"),
        ({"lambda_weights": "best"}, "lambda_weights must be one of .*'best'"),
    ],
)
def test_unknown_options_of_lambda_are_refused(options: dict[str, Any], message: str) -> None:
    x = np.random.default_rng(9).normal(size=(2, 100))
    with pytest.raises(ValueError, match=message):
        psd_test(x, -x, method="lambda", **options)
