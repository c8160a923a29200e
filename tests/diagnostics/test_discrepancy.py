"""Values of the discrepancy, its standardisation, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from ppl_ext.diagnostics import MissingScoresError, TooFewDrawsError, psd
from ppl_ext.diagnostics import moments as moments_module
from ppl_ext.diagnostics.draws import read
from ppl_ext.diagnostics.features import SteinBasis
from ppl_ext.diagnostics.moments import feature_sums, standardization

ANALYTIC = json.loads((Path(__file__).parent / "data" / "psd_analytic.json").read_text())
PAPER = {"basis": "monomial", "standardize": None, "joint": True, "interactions": True}

# The Gauss-Hermite rule with nodes 0 and +-sqrt(3) has weights 2/3 and 1/6, so these six draws of
# equal weight have the moments of N(0, 1) up to degree 5: all that features of order 4 contain
# when the score is linear.
NORMAL = np.sqrt(3.0) * np.array([-1.0, 0.0, 0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize("case", ANALYTIC["cases"], ids=lambda case: f"{case['Q']}-r{case['r']}")
def test_population_values_of_the_paper_statistic(case: dict) -> None:
    mean, variance = map(float, re.fullmatch(r"N\((.+),(.+)\)", case["Q"]).groups())
    x = (mean + np.sqrt(variance) * NORMAL)[None]
    assert psd(x, -x, order=case["r"], **PAPER) == pytest.approx(case["PSD"], abs=1e-9)


def test_population_value_of_a_wrong_correlation() -> None:
    rho, expected = ANALYTIC["two_d"]["example"].values()
    z = np.array(list(itertools.product(NORMAL, repeat=2)))
    x = (z @ np.linalg.cholesky([[1, rho], [rho, 1]]).T)[None]
    assert psd(x, -x, order=2, **PAPER) == pytest.approx(expected, abs=1e-9)
    assert psd(x, -x, order=1, **PAPER) == pytest.approx(0, abs=1e-9)
    without = PAPER | {"interactions": False}
    assert psd(x, -x, order=2, **without) == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(psd(x, -x, interactions=True), rho, rtol=1e-9)


def test_unbiased_square_is_the_mean_over_pairs_of_draws() -> None:
    rng = np.random.default_rng(1)
    x = 1 + rng.normal(size=(2, 30, 2))
    z = SteinBasis(2, 3, True, "monomial")(x.reshape(-1, 2).T, -x.reshape(-1, 2).T)
    products = z.T @ z
    pairs = (products.sum() - products.trace()) / (60 * 59)
    options = PAPER | {"order": 3, "unbiased": True}
    assert psd(x, -x, **options) == pytest.approx(pairs)
    first = products[:30, :30]
    expected = (first.sum() - first.trace()) / (30 * 29)
    assert psd(x, -x, **options, per_chain=True)[0] == pytest.approx(expected)
    marginal = psd(x, -x, order=3, unbiased=True, **{k: PAPER[k] for k in ("basis", "standardize")})
    powers = z[[0, 2, 5]].T @ z[[0, 2, 5]]
    assert marginal[0] == pytest.approx((powers.sum() - powers.trace()) / (60 * 59))


def test_expected_square_for_exact_draws() -> None:
    """V: the mean of Var(A x) + Var(A x^2) = 1 + 8, over n; U: zero."""
    x = np.random.default_rng(2).normal(size=(400, 50))
    options = {"basis": "monomial", "standardize": None, "per_chain": True}
    assert np.mean(psd(x, -x, **options) ** 2) == pytest.approx(9 / 50, rel=0.2)
    assert np.mean(psd(x, -x, unbiased=True, **options)) == pytest.approx(0, abs=0.04)


@pytest.mark.parametrize("standardize", ["diag", "full"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_standardised_value_does_not_depend_on_units(standardize: str, order: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.gamma(3.0, size=(2, 200, 3))
    s = -np.tanh(x) + 0.1 * x[..., ::-1]
    scale, offset = np.array([1e-3, 1.0, 1e4]), np.array([5.0, -300.0, 1e5])
    options = {"standardize": standardize, "order": order, "interactions": True}
    expected = psd(x, s, **options)
    np.testing.assert_allclose(psd(offset + scale * x, s / scale, **options), expected, rtol=1e-7)


def test_whitened_joint_value_against_direct_computation() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3, 100, 2)) @ [[1.0, 0.5], [0.0, 2.0]] + 3.0
    s = 3.0 - x
    flat = x.reshape(-1, 2)
    factor = np.linalg.cholesky(np.cov(flat.T, bias=True))
    y = np.linalg.solve(factor, (flat - flat.mean(0)).T)
    features = SteinBasis(2, 3, True)(y, factor.T @ s.reshape(-1, 2).T)
    expected = np.linalg.norm(features.mean(axis=1))
    options = {"order": 3, "interactions": True, "joint": True}
    assert psd(x, s, standardize="full", **options) == pytest.approx(expected, rel=1e-9)


def test_every_chain_is_standardised_by_the_moments_of_all() -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(3, 400)) * [[1.0], [1.0], [1.4]] + [[0.0], [0.8], [0.0]]
    y, s = (x - x.mean()) / x.std(), -x * x.std()
    expected = np.hypot(s.mean(axis=1), (1 + y * s).mean(axis=1) / np.sqrt(2))
    np.testing.assert_allclose(psd(x, -x, per_chain=True), expected, rtol=1e-10)
    pooled = np.hypot(s.mean(), (1 + y * s).mean() / np.sqrt(2))
    assert psd(x, -x) == pytest.approx(pooled, rel=1e-10)
    assert psd(x, -x, per_chain=True, joint=True) == pytest.approx(expected)


@pytest.mark.parametrize("standardize", ["diag", "full"])
def test_float32_draws_with_a_large_offset(standardize: str) -> None:
    """float32 has a resolution of 1e-3 at 1e4: squares and plain sums there lose everything."""
    rng = np.random.default_rng(5)
    x = (1e4 + rng.normal(size=(4, 25_000, 2))).astype(np.float32)
    s = (1e4 - x.astype(np.float64)).astype(np.float32)
    exact = x.astype(np.float64) - 1e4
    options = {"order": 3, "standardize": standardize, "interactions": True}
    expected = psd(exact, s.astype(np.float64), **options)
    np.testing.assert_allclose(psd(x, s, **options), expected, rtol=1e-6)
    y = (exact - exact.mean((0, 1))) / exact.std((0, 1))
    first = np.abs((s * exact.std((0, 1))).mean((0, 1), dtype=np.float64))
    np.testing.assert_allclose(psd(x, s, order=1), first, rtol=1e-6)
    second = (1 + y * s * exact.std((0, 1))).mean((0, 1), dtype=np.float64) / np.sqrt(2)
    np.testing.assert_allclose(psd(x, s, order=2), np.hypot(first, second), rtol=1e-6)


def test_sums_over_segments_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=(3, 700, 4))
    scored, _ = read(
        x, -x, sample_dims=None, group="", var_names=None, filter_vars=None, coords=None,
        chain_axis=0, draw_axis=1,
    )  # fmt: skip
    basis, transform = SteinBasis(4, 2, True), standardization(scored, "diag")
    starts = np.array([0, 1, 5, 300, 700, 701, 1400, 1999, 2099])
    features = basis(*transform(x.reshape(-1, 4), -x.reshape(-1, 4)))
    expected = [part.sum(axis=1) for part in np.split(features, starts[1:], axis=1)]
    for size in (1, 2**22):
        monkeypatch.setattr(moments_module, "_CHUNK_BYTES", size)
        found = feature_sums(scored, transform, basis, starts)
        np.testing.assert_allclose(found.sums, expected, atol=1e-9)
        np.testing.assert_allclose(found.squares, (features**2).sum(axis=1))


def test_draws_that_are_not_finite_are_left_out_with_a_warning() -> None:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(2, 300, 2))
    s = -x
    keep = np.ones((2, 300), dtype=bool)
    x[0, 3, 1], s[1, 10, 0], keep[0, 3], keep[1, 10] = np.inf, np.nan, False, False
    with pytest.warns(UserWarning, match="psd: 2 of 600 draws are left out"):
        found = psd(x, s, interactions=True)
    np.testing.assert_allclose(found, psd(x[keep], -x[keep], interactions=True, chain_axis=None,
                                          draw_axis=0))  # fmt: skip
    x[0] = np.nan
    with pytest.warns(UserWarning, match="left out"):
        per_chain = psd(x, s, per_chain=True)
    assert np.isnan(per_chain[0]).all() and np.isfinite(per_chain[1]).all()


def test_axes_of_plain_arrays() -> None:
    x = np.random.default_rng(8).normal(size=(2, 50, 3)) + 0.3
    expected = psd(x, -x)
    assert expected.shape == (3,)
    swapped = np.moveaxis(x, (0, 1), (2, 0))
    np.testing.assert_array_equal(psd(swapped, -swapped, chain_axis=2, draw_axis=0), expected)
    one = psd(x[0, :, 0].tolist(), (-x[0, :, 0]).tolist())
    assert one == pytest.approx(psd(x[0], -x[0], chain_axis=None, draw_axis=0)[0])
    assert psd(x, -x, per_chain=True).shape == (2, 3)


def test_bad_input_is_refused_with_the_reason() -> None:
    x = np.random.default_rng(9).normal(size=(2, 50))
    with pytest.raises(MissingScoresError, match=r"score is missing.*attach_scores"):
        psd(x)
    with pytest.raises(ValueError, match=r"shape .*'draw': 50.* but their scores .*'draw': 49"):
        psd(x, -x[:, 1:])
    with pytest.raises(ValueError, match='standardize must be "diag", "full" or None'):
        psd(x, -x, standardize="robust")
    with pytest.raises(TooFewDrawsError, match="draws of 'x' are all the same"):
        psd(np.full((2, 50), 0.1), -x)
    with pytest.raises(TooFewDrawsError, match='"full" needs the covariance of 2 coordinates'):
        psd(np.stack([x, x], axis=2), np.stack([x, x], axis=2), standardize="full")
    with pytest.raises(ValueError, match="no draw at which all"):
        psd(np.full((2, 50), np.nan), -x)
    with pytest.raises(ValueError, match="all scores are zero"):
        psd(x, 0 * x)
    with pytest.raises(ValueError, match="draws of 'x' are of type complex128: real numbers"):
        psd(x + 0j, -x)
    with pytest.raises(ValueError, match="there are no draws of 'x'"):
        psd(x[:, :0], -x[:, :0])
    with pytest.raises(ValueError, match="interactions must be True or False, got 'yes'"):
        psd(x, -x, interactions="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["hermite", "monomial"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_on_a_device_are_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch, family: str, weighted: bool
) -> None:
    """JAX's device is the CPU here, in float32; the draws are float32 with an offset of 1e4."""
    rng = np.random.default_rng(10)
    x = (1e4 + rng.normal(size=(3, 700, 4))).astype(np.float32)
    s = (1e4 - x).astype(np.float32)
    s[1, 5:9, 2] = np.nan
    scored, _ = read(
        x, s, sample_dims=None, group="", var_names=None, filter_vars=None, coords=None,
        chain_axis=0, draw_axis=1, weights=rng.exponential(size=(3, 700)) if weighted else None,
    )  # fmt: skip
    basis, transform = SteinBasis(4, 4, True, family), standardization(scored, "full")  # type: ignore[arg-type]
    starts = np.array([0, 1, 5, 300, 700, 701, 1400, 1999, 2099])
    expected = feature_sums(scored, transform, basis, starts)
    used = []
    monkeypatch.setattr(moments_module, "_worth_a_device", lambda _: used.append(1) or True)
    for size in (2**12, 2**27):
        monkeypatch.setattr(moments_module, "_DEVICE_BYTES", size)
        found = feature_sums(scored, transform, basis, starts)
        sd = np.sqrt(expected.squares / 2100)
        lengths = np.diff([*starts, 2100])
        error = np.abs(found.sums - expected.sums) / sd / np.sqrt(lengths)[:, None]
        assert error.max() < 1e-5  # the Monte Carlo error is 1
        np.testing.assert_allclose(found.squares, expected.squares, rtol=1e-5)
    assert len(used) == 2
