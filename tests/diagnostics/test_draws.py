"""Scores from a log density, and weighted draws."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics import TooFewDrawsError, psd, psd_test

GROUP = "unconstrained_posterior"


def log_density(z: Any) -> Any:
    return -jnp.sum(jnp.log(jnp.cosh(z))) - 0.1 * (z[0] - z[1]) ** 2


def score(z: np.ndarray) -> np.ndarray:
    pull = 0.2 * (z[..., 0] - z[..., 1])
    return -np.tanh(z) - np.stack([pull, -pull], axis=-1)


@pytest.fixture(scope="module")
def draws() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2, 300, 2))


def test_log_density_in_jax(draws: np.ndarray) -> None:
    expected = psd(draws, score(draws), interactions=True)
    np.testing.assert_allclose(psd(draws, log_density, interactions=True), expected, rtol=1e-5)
    swapped = np.moveaxis(draws, 1, 0)
    found = psd(swapped, log_density, interactions=True, chain_axis=1, draw_axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    one = psd(draws[..., 0], lambda z: -(z**2) / 2)
    assert one == pytest.approx(psd(draws[..., 0], -draws[..., 0]), rel=1e-5)
    assert psd_test(draws, log_density).pvalue == psd_test(draws, score(draws)).pvalue


@pytest.mark.arviz
def test_log_density_of_named_variables(draws: np.ndarray) -> None:
    data = xr.Dataset(
        {"b": (("draw", "chain", "k"), np.moveaxis(draws, 1, 0)), "a": (("chain", "draw"),
         draws[..., 0])}
    )  # fmt: skip
    scores = -data
    scores["b"] = scores["b"] + 1.0

    def named(sites: dict[str, Any]) -> Any:
        assert sites["b"].shape == (2,) and sites["a"].shape == ()
        return -jnp.sum(sites["b"] ** 2) / 2 + jnp.sum(sites["b"]) - sites["a"] ** 2 / 2

    xr.testing.assert_allclose(psd(data, named), psd(data, scores), rtol=1e-5)
    # the density needs all variables, whichever are looked at
    xr.testing.assert_allclose(psd(data, named, var_names="a"), psd(data[["a"]], scores[["a"]]))
    array = data["b"]
    single = psd(array, lambda b: -jnp.sum(b**2) / 2 + jnp.sum(b))
    xr.testing.assert_allclose(single, psd(array, scores["b"]), rtol=1e-5)
    run = _arviz.from_groups({"posterior": data, GROUP: data})
    with_group = _arviz.with_groups(run, {f"{GROUP}_score": scores})
    found, expected = psd(run, named), psd(with_group)
    np.testing.assert_allclose(found["a"], expected["a"], rtol=1e-5)
    with pytest.raises(ValueError, match="no group 'other' with the draws"):
        psd(run, named, group="other")


def test_log_density_in_torch(draws: np.ndarray) -> None:
    torch = pytest.importorskip("torch")

    def in_torch(z: Any) -> Any:
        pull = -0.1 * (z[0] - z[1]) ** 2
        # checks its value, which torch cannot do under vmap
        normal = torch.distributions.Normal(torch.zeros(()), 1.0)
        return -torch.log(torch.cosh(z)).sum() + pull + 0.0 * normal.log_prob(z[0])

    expected = psd(draws, score(draws), interactions=True)
    np.testing.assert_allclose(psd(draws, in_torch, interactions=True), expected, rtol=1e-10)
    data = xr.Dataset({"z": (("chain", "draw", "k"), draws), "u": (("chain", "draw"),
                       draws[..., 0])})  # fmt: skip
    found = psd(data, lambda sites: in_torch(sites["z"]), interactions=True, var_names="z")
    np.testing.assert_allclose(found["z"], expected, rtol=1e-10)
    with pytest.raises(TypeError, match="neither on JAX arrays nor on torch tensors"):
        psd(draws, lambda z: torch.nonsense(z))


def test_log_density_must_be_one_number(draws: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"score is a function that returns .* a single number"):
        psd(draws, lambda z: -(z**2) / 2)


@pytest.mark.parametrize("standardize", ["diag", "full", None])
def test_weights_are_repeated_draws(draws: np.ndarray, standardize: Any) -> None:
    times = np.random.default_rng(2).integers(0, 4, (2, 300))
    many = np.repeat(draws.reshape(-1, 2), times.reshape(-1), axis=0)[None]
    options: dict[str, Any] = {"standardize": standardize, "order": 3, "interactions": True}
    expected = psd(many, score(many), **options)
    for factor in (1.0, 1e-3):
        found = psd(draws, score(draws), weights=factor * times, **options)
        np.testing.assert_allclose(found, expected)
    for i in range(2):
        chain = np.repeat(draws[i], times[i], axis=0)
        one = psd(draws, score(draws), weights=times, per_chain=True, **options)[i]
        if standardize is None:
            np.testing.assert_allclose(one, psd(chain[None], score(chain)[None], **options))


def test_unbiased_square_with_weights(draws: np.ndarray) -> None:
    w = np.random.default_rng(3).exponential(size=600)
    x = draws.reshape(-1, 2)
    terms = w[:, None] * score(x)
    pairs = (terms.sum(0) ** 2 - (terms**2).sum(0)) / (w.sum() ** 2 - (w**2).sum())
    options: dict[str, Any] = {"order": 1, "basis": "monomial", "standardize": None}
    found = psd(draws, score(draws), weights=w.reshape(2, 300), unbiased=True, **options)
    np.testing.assert_allclose(found, pairs)


def test_importance_weights_make_wrong_draws_right() -> None:
    """Draws of N(0, 1.3^2) with weights for N(0, 1).

    Over 20 seeds, none of these p-values is below 0.01 with weights, and all are without.
    """
    for seed in range(3):
        x = 1.3 * np.random.default_rng(seed).normal(size=(4, 1000, 2))
        w = np.exp((-(x**2) / 2 + (x / 1.3) ** 2 / 2).sum(axis=2))
        assert psd_test(x, -x).pvalue == 0.001
        result = psd_test(x, -x, weights=w)
        assert result.pvalue > 0.01
        efficiency = w.sum() ** 2 / (4000 * (w**2).sum())
        assert result.weight_efficiency == pytest.approx(efficiency)
        assert result.ess == pytest.approx(4000 * efficiency / result.tau)


@pytest.mark.arviz
def test_forms_of_weights(draws: np.ndarray) -> None:
    w = np.random.default_rng(4).exponential(size=(2, 300))
    expected = psd(draws, score(draws), weights=w)
    dims = ("chain", "draw", "k")
    data = xr.Dataset({"x": (dims, draws)})
    scores = xr.Dataset({"x": (dims, score(draws))})
    for form in (w, xr.DataArray(w, dims=dims[:2]), xr.DataArray(w.T, dims=("draw", "chain"))):
        np.testing.assert_allclose(psd(data, scores, weights=form)["x"], expected)
    one = psd(draws[0], score(draws[0]), weights=w[0], chain_axis=None, draw_axis=0)
    np.testing.assert_allclose(one, psd(draws[:1], score(draws[:1]), weights=w[:1]))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 299)), r"weights have shape \(2, 299\), but there are 2 chains of 300"),
        (-np.ones((2, 300)), "weights must be finite and not negative"),
        (np.full((2, 300), np.nan), "weights must be finite and not negative"),
        (np.zeros((2, 300)), "all weights of the finite draws are zero"),
        (xr.DataArray(np.ones((2, 300)), dims=("chain", "k")), "weights have dimensions"),
    ],
)
def test_bad_weights_are_refused(draws: np.ndarray, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        psd(draws, score(draws), weights=weights)


def test_too_unequal_weights_are_refused(draws: np.ndarray) -> None:
    w = np.full((2, 300), 1e-3)
    w[:, ::30] = 1.0
    with pytest.raises(TooFewDrawsError, match=r"weights worth 0\.0\d+ each are \d+ effective"):
        psd_test(draws, score(draws), weights=w)
