"""Kernels for `numpyro.infer.MCMC`, and what NumPyro models for them are written with."""

from ppl_ext.numpyro.conway_maxwell_poisson import ConwayMaxwellPoisson
from ppl_ext.numpyro.dirichlet_process import DirichletProcess, PitmanYor
from ppl_ext.numpyro.dp_slice import DPSlice
from ppl_ext.numpyro.ergm import ERGM
from ppl_ext.numpyro.exchange_mh import ExchangeMH
from ppl_ext.numpyro.intractable import Intractable
from ppl_ext.numpyro.poisson_mh import PoissonMH
from ppl_ext.numpyro.proximal_imh import ProximalIMH
from ppl_ext.numpyro.spins import Graph, Ising, Potts
from ppl_ext.numpyro.tuna_mh import TunaMH
from ppl_ext.numpyro.uld import ULD

__all__ = [
    "ERGM",
    "ULD",
    "ConwayMaxwellPoisson",
    "DPSlice",
    "DirichletProcess",
    "ExchangeMH",
    "Graph",
    "Intractable",
    "Ising",
    "PitmanYor",
    "PoissonMH",
    "Potts",
    "ProximalIMH",
    "TunaMH",
]
