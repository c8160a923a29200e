"""Kernels for `numpyro.infer.MCMC`."""

from ppl_ext.numpyro.proximal_imh import ProximalIMH
from ppl_ext.numpyro.tuna_mh import TunaMH
from ppl_ext.numpyro.uld import ULD

__all__ = ["ULD", "ProximalIMH", "TunaMH"]
