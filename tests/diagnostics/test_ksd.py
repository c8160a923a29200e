"""The kernel Stein discrepancy against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from ppl_ext.diagnostics import ksd


def pairs(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """k_p of all pairs, with the kernel's derivatives by finite differences."""
    n, d = x.shape
    h = 1e-3

    def k(a: np.ndarray, b: np.ndarray) -> float:
        return float((1 + ((a - b) ** 2).sum()) ** -0.5)

    found = np.empty((n, n))
    for i in range(n):
        for j in range(n):
            a, b = x[i], x[j]
            value = s[i] @ s[j] * k(a, b)
            for e in h * np.eye(d):
                at = np.argmax(e)
                value += s[i, at] * (k(a, b + e) - k(a, b - e)) / (2 * h)
                value += s[j, at] * (k(a + e, b) - k(a - e, b)) / (2 * h)
                corners = k(a + e, b + e) - k(a + e, b - e) - k(a - e, b + e) + k(a - e, b - e)
                value += corners / (4 * h**2)
            found[i, j] = value
    return found


@pytest.fixture(scope="module")
def draws() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(2, 7, 3)), rng.normal(size=(2, 7, 3))


@pytest.mark.parametrize("block", [1, 4, 256])
def test_mean_over_all_pairs(draws: tuple[np.ndarray, np.ndarray], block: int) -> None:
    x, s = draws
    options = {"standardize": None, "block": block}
    expected = pairs(x.reshape(-1, 3), s.reshape(-1, 3))
    found = ksd(x, s, joint=True, **options)
    assert found**2 == pytest.approx(expected.mean(), rel=1e-4)
    different = (expected.sum() - expected.trace()) / (14 * 13)
    assert ksd(x, s, joint=True, unbiased=True, **options) == pytest.approx(different, abs=1e-4)
    for i, value in enumerate(ksd(x, s, joint=True, per_chain=True, **options)):
        assert value**2 == pytest.approx(pairs(x[i], s[i]).mean(), rel=1e-4)
    marginal = ksd(x, s, **options)
    assert marginal.shape == (3,)
    one = pairs(x[..., 1].reshape(-1, 1), s[..., 1].reshape(-1, 1))
    assert marginal[1] ** 2 == pytest.approx(one.mean(), rel=1e-4)


def test_weights_are_repeated_draws(draws: tuple[np.ndarray, np.ndarray]) -> None:
    x, s = draws
    times = np.array([[1, 3, 0, 2, 1, 1, 5], [2, 0, 1, 1, 4, 1, 1]])
    many = [np.repeat(a.reshape(-1, 3), times.reshape(-1), axis=0)[None] for a in (x, s)]
    for standardize in ("diag", "full"):
        options = {"joint": True, "standardize": standardize}
        assert ksd(x, s, weights=times / 7, **options) == pytest.approx(ksd(*many, **options))


def test_value_does_not_depend_on_units_and_sees_a_wrong_scale() -> None:
    x = np.random.default_rng(2).normal(size=(2, 300, 2))
    scale = np.array([1e-3, 1e3])
    for options in ({"joint": True}, {"standardize": "full"}):
        np.testing.assert_allclose(
            ksd(5 + scale * x, -x / scale, **options), ksd(x, -x, **options), rtol=1e-6
        )
    exact, wrong = (ksd(y, -y, joint=True, unbiased=True) for y in (x, 1.3 * x))
    assert abs(exact) < 0.01 < 0.05 < wrong


@pytest.mark.arviz
def test_containers_and_bad_input(draws: tuple[np.ndarray, np.ndarray]) -> None:
    x, s = draws
    dims = ("chain", "draw", "k")
    data = xr.Dataset({"a": (dims, x), "b": (dims[:2], x[..., 0])})
    scores = xr.Dataset({"a": (dims, s), "b": (dims[:2], s[..., 0])})
    values = ksd(data, scores, standardize=None)
    np.testing.assert_allclose(values["a"], ksd(x, s, standardize=None))
    assert values["b"].shape == ()
    joint = ksd(data, scores, joint=True, per_chain=True)
    assert joint["ksd"].dims == ("chain",)
    with pytest.raises(ValueError, match="block must be at least 1"):
        ksd(x, s, block=0)
    bad = s.copy()
    bad[0, 0] = np.nan
    with pytest.warns(UserWarning, match="ksd: 1 of 14 draws are left out"):
        assert np.isfinite(ksd(x, bad)).all()
