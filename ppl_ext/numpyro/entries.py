"""Registry entries of the NumPyro kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import logsumexp

from ppl_ext.numpyro import dp_slice as process
from ppl_ext.numpyro import exchange_mh as exchange
from ppl_ext.numpyro.dirichlet_process import DirichletProcess
from ppl_ext.numpyro.dp_slice import DPSlice
from ppl_ext.numpyro.exchange_mh import ExchangeMH
from ppl_ext.numpyro.minibatch import refusal
from ppl_ext.numpyro.poisson_mh import PoissonMH
from ppl_ext.numpyro.proximal_imh import ProximalIMH
from ppl_ext.numpyro.spins import Graph, Ising
from ppl_ext.numpyro.tuna_mh import TunaMH
from ppl_ext.numpyro.uld import ULD
from ppl_ext.registry import Entry, Example


def normal_with_known_variances() -> Example:
    """Three independent conjugate normal means, the exact posterior of which is normal."""
    y = np.array([[1.0, -2.0, 30.0], [2.0, -1.0, 20.0], [0.5, -1.5, 25.0], [1.5, 0.0, 28.0]])
    noise = np.array([1.0, 0.5, 10.0])
    prior_sd = 5.0

    def model(y: Any, noise: Any) -> None:
        with numpyro.plate("group", noise.shape[0], dim=-1):
            theta = numpyro.sample("theta", dist.Normal(0.0, prior_sd))
            with numpyro.plate("repeat", y.shape[0], dim=-2):
                numpyro.sample("y", dist.Normal(theta, noise), obs=y)
        numpyro.deterministic("total", theta.sum())

    precision = len(y) / noise**2 + 1 / prior_sd**2
    mean, sd = y.sum(0) / noise**2 / precision, precision**-0.5
    return Example(
        model,
        (y, noise),
        {},
        {"theta": mean, "total": mean.sum()},
        {"theta": sd, "total": np.sqrt((sd**2).sum())},
    )


def normal_in_a_subsampled_plate() -> Example:
    """Conjugate normal means, of which a plate draws ten of forty observations."""
    y = np.random.default_rng(0).normal([1.0, -2.0], 1.5, size=(40, 2))
    noise, prior_sd = 1.5, 3.0

    def model(y: Any) -> None:
        theta = numpyro.sample("theta", dist.Normal(0.0, prior_sd).expand([2]).to_event(1))
        numpyro.deterministic("total", theta.sum())
        with numpyro.plate("datum", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(theta, noise).to_event(1), obs=y[i])

    precision = len(y) / noise**2 + 1 / prior_sd**2
    mean, sd = y.sum(0) / noise**2 / precision, np.full(2, precision**-0.5)
    return Example(
        model,
        (y,),
        {},
        {"theta": mean, "total": mean.sum()},
        {"theta": sd, "total": np.sqrt((sd**2).sum())},
    )


def ising_on_a_small_lattice() -> Example:
    """Coupling of an Ising model with nine spins, whose states can be summed over."""
    graph = Graph.lattice(3, 3)
    x = np.array([[1, 1, -1], [1, 1, -1], [1, -1, -1]])

    def model(x: Any) -> None:
        coupling = numpyro.sample("coupling", dist.Uniform(0.0, 1.0))
        numpyro.sample("x", Ising(coupling, 0.0, graph), obs=x)

    states = np.array(list(itertools.product((-1, 1), repeat=9)))
    a, b = graph.edges.T
    energy = lambda x: (x[..., a] * x[..., b]).sum(-1)  # noqa: E731
    grid = np.linspace(0.0, 1.0, 2001)[:, None]
    log_density = grid[:, 0] * energy(x.ravel()) - logsumexp(grid * energy(states), axis=1)
    weight = np.exp(log_density)
    mean = float(weight @ grid[:, 0] / weight.sum())
    variance = float(weight @ (grid[:, 0] - mean) ** 2 / weight.sum())
    return Example(model, (x,), {}, {"coupling": mean}, {"coupling": variance**0.5})


def uld() -> Entry:
    """Underdamped Langevin dynamics."""
    return Entry(
        name="ULD",
        language="numpyro",
        kernel=ULD,
        models="continuous sites, full data",
        exact=False,
        source="arXiv 2603.02429",
        refusal=lambda target: target.refusal_of_continuous_kernel("ULD"),
        example=normal_with_known_variances,
    )


def proximal_imh() -> Entry:
    """Proximal independent Metropolis-Hastings."""
    return Entry(
        name="ProximalIMH",
        language="numpyro",
        kernel=ProximalIMH,
        models="continuous sites, full data, an exact and a cheap operator",
        exact=True,
        source="arXiv 2602.21426",
        refusal=lambda target: target.refusal_of_continuous_kernel("ProximalIMH"),
        example=normal_with_known_variances,
        # the models of the conformance tests have no operator
        options={"approx": {}},
        potential_fn=False,
    )


def three_points_of_a_process() -> Example:
    """Three points of a normal Dirichlet-process mixture, all five partitions summed."""
    y, alpha, prior_sd, sd = np.array([-1.0, 0.0, 2.5]), 1.5, 3.0, 1.0

    def model(y: Any) -> None:
        def base() -> Any:
            return numpyro.sample("mu", dist.Normal(0.0, prior_sd))

        process = DirichletProcess("G", alpha, base)
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Normal(process.draw(), sd), obs=y)

    clusters, weights = [], []
    for labels in ([0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 1, 2]):
        same = np.equal.outer(labels, labels)
        covariance = prior_sd**2 * same + sd**2 * np.eye(3)
        log_density = -(y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(covariance)[1]) / 2
        sizes = np.bincount(labels)
        # the factorials of cluster sizes up to 3, less one: 0! = 1! = 1, 2! = 2
        prior = alpha ** len(sizes) * np.prod(np.maximum(sizes - 1, 1))
        clusters.append(len(sizes))
        weights.append(prior * np.exp(log_density))
    mean = np.average(clusters, weights=weights)
    variance = np.average((np.array(clusters) - mean) ** 2, weights=weights)
    name = "G_num_clusters"
    return Example(model, (y,), {}, {name: mean}, {name: np.sqrt(variance)})


def dp_slice() -> Entry:
    """Slice samplers for Dirichlet-process mixtures."""
    return Entry(
        name="DPSlice",
        language="numpyro",
        kernel=DPSlice,
        models="mixtures over a Dirichlet or Pitman-Yor process",
        exact=True,
        source="arXiv 2602.00878",
        refusal=process.refusal,
        example=three_points_of_a_process,
        gibbs_block=False,
        potential_fn=False,
        own_models=True,
        remark=lambda target: target.process,
    )


def tuna_mh() -> Entry:
    """Exact minibatch Metropolis-Hastings on Taylor remainders."""
    return Entry(
        name="TunaMH",
        language="numpyro",
        kernel=TunaMH,
        models="continuous sites, a plate of data with bounded likelihoods",
        exact=True,
        source="arXiv 2406.05242, 2407.19602",
        refusal=lambda target: refusal("TunaMH", target),
        example=normal_in_a_subsampled_plate,
        gibbs_block=False,
        potential_fn=False,
        minibatch=True,
    )


def poisson_mh() -> Entry:
    """Exact minibatch Metropolis-Hastings with a proposal from the minibatch."""
    return Entry(
        name="PoissonMH",
        language="numpyro",
        kernel=PoissonMH,
        models="continuous sites, a plate of data with bounded likelihoods, tempered",
        exact=True,
        source="arXiv 1911.09771, 2406.05242",
        refusal=lambda target: refusal("PoissonMH", target),
        example=normal_in_a_subsampled_plate,
        gibbs_block=False,
        potential_fn=False,
        minibatch=True,
    )


def exchange_mh() -> Entry:
    """Exchange algorithm for likelihoods with an unknown normalising constant."""
    return Entry(
        name="ExchangeMH",
        language="numpyro",
        kernel=ExchangeMH,
        models="continuous sites, likelihoods with an unknown normalising constant",
        exact=True,
        source="arXiv 1206.6848, 2406.05242",
        refusal=exchange.refusal,
        example=ising_on_a_small_lattice,
        potential_fn=False,
        intractable=True,
    )
