"""Kernels for `pyro.infer.MCMC`, which run in JAX, and what is needed to write models for them."""

from ppl_ext.numpyro.spins import Graph
from ppl_ext.pyro.black_box import BlackBox
from ppl_ext.pyro.dirichlet_process import DirichletProcess, PitmanYor
from ppl_ext.pyro.dp_slice import DPSlice
from ppl_ext.pyro.exchange_mh import ExchangeMH
from ppl_ext.pyro.hmc import HMC, NUTS
from ppl_ext.pyro.intractable import ERGM, ConwayMaxwellPoisson, Ising, Potts
from ppl_ext.pyro.mcmc import MCMC
from ppl_ext.pyro.poisson_mh import PoissonMH
from ppl_ext.pyro.proximal_imh import ProximalIMH
from ppl_ext.pyro.tuna_mh import TunaMH
from ppl_ext.pyro.uld import ULD

__all__ = [
    "ERGM",
    "HMC",
    "MCMC",
    "NUTS",
    "ULD",
    "BlackBox",
    "ConwayMaxwellPoisson",
    "DPSlice",
    "DirichletProcess",
    "ExchangeMH",
    "Graph",
    "Ising",
    "PitmanYor",
    "PoissonMH",
    "Potts",
    "ProximalIMH",
    "TunaMH",
]
