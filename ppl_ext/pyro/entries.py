"""Registry entries of the Pyro kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from ppl_ext.pyro.hmc import HMC, NUTS
from ppl_ext.pyro.proximal_imh import ProximalIMH
from ppl_ext.pyro.uld import ULD
from ppl_ext.registry import Entry, Example


def normal_with_known_variances() -> Example:
    """Three independent conjugate normal means, the exact posterior of which is normal."""
    y = torch.tensor([[1.0, -2.0, 30.0], [2.0, -1.0, 20.0], [0.5, -1.5, 25.0], [1.5, 0.0, 28.0]])
    noise = torch.tensor([1.0, 0.5, 10.0])
    prior_sd = 5.0

    def model(y: Any, noise: Any) -> None:
        with pyro.plate("group", noise.shape[0], dim=-1):
            theta = pyro.sample("theta", dist.Normal(0.0, prior_sd))
            with pyro.plate("repeat", y.shape[0], dim=-2):
                pyro.sample("y", dist.Normal(theta, noise), obs=y)
        pyro.deterministic("total", theta.sum())

    precision = len(y) / noise.numpy() ** 2 + 1 / prior_sd**2
    mean, sd = y.numpy().sum(0) / noise.numpy() ** 2 / precision, precision**-0.5
    return Example(
        model,
        (y, noise),
        {},
        {"theta": mean, "total": mean.sum()},
        {"theta": sd, "total": np.sqrt((sd**2).sum())},
    )


def uld() -> Entry:
    """Underdamped Langevin dynamics."""
    return _entry("ULD", ULD, False, "arXiv 2603.02429")


def nuts() -> Entry:
    """The No-U-Turn sampler."""
    return _entry("NUTS", NUTS, True, "arXiv 1111.4246")


def hmc() -> Entry:
    """Hamiltonian Monte Carlo."""
    return _entry("HMC", HMC, True, "arXiv 1206.1901")


def proximal_imh() -> Entry:
    """Proximal independent Metropolis-Hastings."""
    return replace(
        _entry("ProximalIMH", ProximalIMH, True, "arXiv 2602.21426"),
        models="continuous sites, full data, an exact and a cheap operator",
        # the models of the conformance tests have no operator
        options={"approx": {}},
        potential_fn=False,
    )


def _entry(name: str, kernel: Any, exact: bool, source: str) -> Entry:
    return Entry(
        name=name,
        language="pyro",
        kernel=kernel,
        models="continuous sites, full data",
        exact=exact,
        source=source,
        refusal=lambda target: target.refusal_of_continuous_kernel(name),
        example=normal_with_known_variances,
        gibbs_block=False,
    )
