"""Draws and scores of guides, at optima known in closed form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.svi import SVIRunResult

from ppl_ext import _arviz
from ppl_ext.diagnostics import from_svi, psd, psd_test, summary

pytestmark = pytest.mark.arviz
SHAPE = 4.0


def gamma() -> None:
    numpyro.sample("rate", dist.Gamma(SHAPE, SHAPE))


def svi_of(model: Any, guide: Any) -> SVI:
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    svi.init(jax.random.key(0))
    return svi


@pytest.fixture(scope="module")
def optimum() -> Any:
    """With z = log(rate), s(z) = a - a e^z: E_q[s] = 0 and E_q[s'] = -1/v give v = 1/a = -2m."""
    params = {"rate_auto_loc": jnp.array(-0.5 / SHAPE), "rate_auto_scale": jnp.array(SHAPE**-0.5)}
    return from_svi(svi_of(gamma, AutoNormal(gamma)), params, num_samples=20_000)


def test_draws_and_scores_are_those_of_the_guide_and_the_model(optimum: Any) -> None:
    assert _arviz.group_names(optimum) == (
        "posterior",
        "unconstrained_posterior",
        "unconstrained_posterior_score",
    )
    z, score = optimum["unconstrained_posterior"]["rate"], optimum["unconstrained_posterior_score"]
    assert z.dims == ("chain", "draw") and z.shape == (1, 20_000)
    np.testing.assert_allclose(z, np.log(optimum["posterior"]["rate"]), atol=1e-5)
    # the last term of (a - 1) log(rate) - a rate + log(rate) is the Jacobian
    np.testing.assert_allclose(score["rate"], SHAPE - SHAPE * np.exp(z), rtol=1e-4, atol=1e-4)
    assert abs(float(z.mean()) + 0.5 / SHAPE) < 5 * (SHAPE * 20_000) ** -0.5


def test_orders_1_and_2_are_blind_at_the_optimum(optimum: Any) -> None:
    """The third feature has the mean -3 sqrt(v); those before it zero (|t| > 4: 1 in 10,000)."""
    features = psd_test(optimum, order=3, basis="monomial", n_boot=9).features
    assert features.loc[["rate", "rate^2"], "t"].abs().max() < 4
    third = features.loc["rate^3"]
    assert third["t"] < -10
    assert abs(third["zbar"] + 3 * SHAPE**-0.5) < 4 * third["mcse"]


def test_order_3_is_the_default_and_a_lower_one_is_warned_of(optimum: Any) -> None:
    default, third = (summary(optimum, kind="stats", order=order) for order in (None, 3))
    assert default.loc["rate", "psd_t"] == third.loc["rate", "psd_t"] > 10
    with pytest.warns(UserWarning, match=r"summary: order=2 cannot see .* Take order=3 or more"):
        blind = summary(optimum, kind="stats", order=2)
    assert blind.loc["rate", "psd_t"] < 4


def test_hand_written_guides_and_parameters_of_the_model() -> None:
    """The score has the fitted parameter, the guide the static argument."""

    def model(y: np.ndarray, width: float = 1.0) -> None:
        centre = numpyro.param("centre", 0.0)
        x = numpyro.sample("x", dist.Normal(centre, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x, width), obs=y)

    def guide(y: np.ndarray, width: float = 1.0) -> None:
        at = numpyro.param("at", jnp.zeros(2))
        numpyro.sample("x", dist.Normal(at, width).to_event(1))

    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO(), width=2.0)
    y = np.array([1.0, 3.0], np.float32)
    params = {"centre": jnp.array(5.0), "at": jnp.array([10.0, 20.0])}
    result = SVIRunResult(params, None, None)
    names = {"coords": {"side": ["left", "right"]}, "dims": {"x": ["side"]}}
    data = from_svi(svi, result, y, num_samples=1000, **names)
    x, score = data["posterior"]["x"], data["unconstrained_posterior_score"]["x"]
    assert x.dims == ("chain", "draw", "side")
    np.testing.assert_allclose(score, (5.0 - x) + (y - x) / 4, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(x.mean(("chain", "draw")), [10, 20], atol=0.4)
    np.testing.assert_allclose(x.std(("chain", "draw")), 2.0, rtol=0.15)
    again, other = (from_svi(svi, params, y, num_samples=5, random_seed=seed) for seed in (0, 1))
    assert not np.allclose(again["posterior"]["x"], other["posterior"]["x"])


def test_what_is_refused() -> None:
    guide = AutoNormal(gamma)
    svi = svi_of(gamma, guide)
    with pytest.raises(TypeError, match=r"svi must be a .*SVI, got AutoNormal"):
        from_svi(guide, {})
    with pytest.raises(TypeError, match="svi_result must be what"):
        from_svi(svi, 3.0)
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        from_svi(svi, {}, num_samples=0)
    params = {"rate_auto_loc": jnp.array(-200.0), "rate_auto_scale": jnp.array(0.1)}
    with pytest.warns(UserWarning, match="from_svi: 10 of 10 draws have no finite score"):
        from_svi(svi, params, num_samples=10)


def test_psd_and_psd_test_take_order_3_by_default(optimum: Any) -> None:
    assert psd_test(optimum).order == 3
    with pytest.warns(UserWarning, match="psd_test: order=2 cannot see"):
        assert psd_test(optimum, order=2).pvalue > 0.01
    assert psd_test(optimum).pvalue < 0.01
    with pytest.warns(UserWarning, match="psd: order=2 cannot see"):
        blind = psd(optimum, order=2, joint=True)
    assert float(psd(optimum, joint=True)["psd"]) > 5 * float(blind["psd"])
