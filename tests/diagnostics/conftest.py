"""Draws with known laws for the diagnostics' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.signal
import xarray as xr

from ppl_ext import _arviz


@pytest.fixture
def ar1() -> Callable[..., np.ndarray]:
    """Return a maker of stationary standard normal AR(1) chains, shape (chains, draws, d)."""

    def make(rng: np.random.Generator, chains: int, draws: int, d: int, rho: float) -> np.ndarray:
        noise = rng.normal(size=(chains, draws, d))
        noise[:, 1:] *= np.sqrt(1 - rho**2)
        return scipy.signal.lfilter([1.0], [1.0, -rho], noise, axis=1)

    return make


@pytest.fixture
def run() -> Any:
    """Return a container with every kind of site, all from N(0, 1) in unconstrained space.

    The scores claim a smaller scale for ``theta`` of Deerfield than its draws have.
    """
    rng = np.random.default_rng(0)
    shape = {"chain": 4, "draw": 300}

    def normal(*dims: str) -> xr.DataArray:
        sizes = shape | {"school": 2, "k": 3, "p_unc_dim_0": 2}
        dims = ("chain", "draw", *dims)
        return xr.DataArray(rng.normal(size=[sizes[dim] for dim in dims]), dims=dims)

    names = {"school": ["Choate", "Deerfield"], "k": [10, 20, 30]}
    mu, theta, z = normal(), normal("school", "k").assign_coords(names), normal("p_unc_dim_0")
    weights = np.exp(np.concatenate([z.values, np.zeros((4, 300, 1))], axis=2))
    counts = ("chain", "draw"), rng.poisson(3, (4, 300))
    posterior = xr.Dataset(
        {
            "count": counts,
            "mu": mu,
            "p": (("chain", "draw", "outcome"), weights / weights.sum(2, keepdims=True)),
            "theta": theta,
            "twice": 2 * mu,
        }
    )
    draws = xr.Dataset({"theta": theta, "mu": mu, "p": z})
    scores = -draws
    scores["theta"] = -theta * xr.DataArray([1.0, 1.5], dims="school")
    return _arviz.from_groups(
        {
            "posterior": posterior,
            "unconstrained_posterior": draws,
            "unconstrained_posterior_score": scores,
        }
    )
