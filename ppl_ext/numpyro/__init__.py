"""Kernels for `numpyro.infer.MCMC`, and Dirichlet processes for NumPyro models."""

from ppl_ext.numpyro.dirichlet_process import DirichletProcess, PitmanYor
from ppl_ext.numpyro.dp_slice import DPSlice
from ppl_ext.numpyro.proximal_imh import ProximalIMH
from ppl_ext.numpyro.tuna_mh import TunaMH
from ppl_ext.numpyro.uld import ULD

__all__ = ["ULD", "DPSlice", "DirichletProcess", "PitmanYor", "ProximalIMH", "TunaMH"]
