"""Kernels for `pyro.infer.MCMC`, which run in JAX."""

from ppl_ext.pyro.black_box import BlackBox
from ppl_ext.pyro.hmc import HMC, NUTS
from ppl_ext.pyro.mcmc import MCMC
from ppl_ext.pyro.proximal_imh import ProximalIMH
from ppl_ext.pyro.uld import ULD

__all__ = ["HMC", "MCMC", "NUTS", "ULD", "BlackBox", "ProximalIMH"]
