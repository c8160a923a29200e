"""Kernels for `pyro.infer.MCMC`, which run in JAX."""

from ppl_ext.pyro.hmc import HMC, NUTS
from ppl_ext.pyro.uld import ULD

__all__ = ["HMC", "NUTS", "ULD"]
