"""Registry entries of the Pyro kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from ppl_ext.numpyro import entries
from ppl_ext.numpyro.spins import Graph
from ppl_ext.pyro.dirichlet_process import DirichletProcess
from ppl_ext.pyro.dp_slice import DPSlice
from ppl_ext.pyro.exchange_mh import ExchangeMH
from ppl_ext.pyro.hmc import HMC, NUTS
from ppl_ext.pyro.intractable import Ising
from ppl_ext.pyro.poisson_mh import PoissonMH
from ppl_ext.pyro.proximal_imh import ProximalIMH
from ppl_ext.pyro.tuna_mh import TunaMH
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


def dp_slice() -> Entry:
    """Slice samplers for Dirichlet-process mixtures."""
    example = entries.three_points_of_a_process()

    def model(y: Any) -> None:
        process = DirichletProcess("G", 1.5, lambda: pyro.sample("mu", dist.Normal(0.0, 3.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(process.draw(), 1.0), obs=y)

    return _like(entries.dp_slice(), DPSlice, example, model)


def exchange_mh() -> Entry:
    """Exchange algorithm for likelihoods with an unknown normalising constant."""
    example = entries.ising_on_a_small_lattice()

    def model(x: Any) -> None:
        coupling = pyro.sample("coupling", dist.Uniform(0.0, 1.0))
        pyro.sample("x", Ising(coupling, 0.0, Graph.lattice(3, 3)), obs=x)

    return _like(entries.exchange_mh(), ExchangeMH, example, model)


def tuna_mh() -> Entry:
    """Exact minibatch Metropolis-Hastings on Taylor remainders."""
    return _of_minibatches(entries.tuna_mh(), TunaMH)


def poisson_mh() -> Entry:
    """Exact minibatch Metropolis-Hastings with a proposal from the minibatch."""
    return _of_minibatches(entries.poisson_mh(), PoissonMH)


def _of_minibatches(entry: Entry, kernel: Any) -> Entry:
    def model(y: Any) -> None:
        theta = pyro.sample("theta", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        pyro.deterministic("total", theta.sum())
        with pyro.plate("datum", len(y), subsample_size=10) as i:
            pyro.sample("y", dist.Normal(theta, 1.5).to_event(1), obs=y[i])

    return _like(entry, kernel, entries.normal_in_a_subsampled_plate(), model)


def _like(entry: Entry, kernel: Any, example: Example, model: Any) -> Entry:
    """The entry of a kernel that NumPyro has too, with the same example as a Pyro model."""
    args = tuple(torch.as_tensor(x, dtype=torch.float32) for x in example.args)
    return replace(
        entry,
        language="pyro",
        kernel=kernel,
        example=lambda: replace(example, model=model, args=args),
        gibbs_block=False,
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
