"""Kernels for `numpyro.infer.MCMC`."""

from ppl_ext.numpyro.uld import ULD

__all__ = ["ULD"]
