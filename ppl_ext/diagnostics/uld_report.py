"""Bias certificate of an underdamped Langevin run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ppl_ext.diagnostics.goodness_of_fit import psd_test
from ppl_ext.errors import TooFewDrawsError

if TYPE_CHECKING:
    from numpyro.infer import MCMC


@dataclass(frozen=True)
class ULDReport:
    """How large the bias of an underdamped Langevin run can be; printing it gives a text.

    Parameters
    ----------
    integrator : str
    dimension : int
        Unconstrained coordinates.
    trace, curvature, condition_number : float
        In the preconditioned coordinates: trace of the mean Hessian of the potential energy
        (Bartlett identity), largest eigenvalue met, and its product with the squared width of
        the posterior. Means over chains; `curvature` is the largest.
    step_size, friction : float
        Means over chains, in the preconditioned coordinates.
    energy_error_variance : float
        Variance of the energy error of one step, per dimension.
    sd_bias : pandas.Series
        By unconstrained coordinate, relative bias of the posterior standard deviation
        h^2 (L L^T)_ii / (8 Var x_i): exact for `obabo` on a Gaussian; `baoab` has none there,
        and its bias from the rest of the posterior stayed below this on quartic targets.
    worst_sd_bias : float
        The largest of `sd_bias`.
    worst_direction_sd_bias : float
        h^2 curvature / 8, the same in the stiffest direction of the preconditioned space.
    psd_pvalue : float
        p-value of `ppl_ext.diagnostics.psd_test` on the draws; NaN with too few draws.
    """

    integrator: str
    dimension: int
    trace: float
    curvature: float
    condition_number: float
    step_size: float
    friction: float
    energy_error_variance: float
    sd_bias: pd.Series
    psd_pvalue: float

    @property
    def worst_sd_bias(self) -> float:
        """Largest predicted relative bias of a posterior standard deviation."""
        return float(self.sd_bias.max())

    @property
    def worst_direction_sd_bias(self) -> float:
        """The same in the stiffest direction of the preconditioned space."""
        return self.step_size**2 * self.curvature / 8

    def __str__(self) -> str:
        worst = self.sd_bias.idxmax()
        return "\n".join(
            [
                f"ULD ({self.integrator}), {self.dimension} coordinates",
                f"step size {self.step_size:.3g}, friction {self.friction:.3g}",
                f"curvature: largest {self.curvature:.3g}, trace {self.trace:.4g}, "
                f"condition number {self.condition_number:.3g}",
                f"energy error variance per dimension {self.energy_error_variance:.2g}",
                f"bias of the standard deviations: at most {self.worst_sd_bias:.1%} ({worst}); "
                f"{self.worst_direction_sd_bias:.1%} in the stiffest direction",
                f"Stein test p-value {self.psd_pvalue:.3f}",
            ]
        )

    __repr__ = __str__


def uld_report(mcmc: MCMC) -> ULDReport:
    """Bias certificate of a finished run of `ppl_ext.numpyro.ULD`.

    Parameters
    ----------
    mcmc : numpyro.infer.MCMC
        After `run`, with a `ULD` kernel.

    Raises
    ------
    TypeError
        When the kernel is not ULD.
    ValueError
        When the run has not happened.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import ULD
    >>> from ppl_ext.diagnostics import uld_report
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(0, 1).expand([3]))
    >>> mcmc = MCMC(ULD(model), num_warmup=200, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0))
    >>> uld_report(mcmc).worst_sd_bias < 0.1
    True
    """
    state, kernel = mcmc.last_state, mcmc.sampler
    settings = getattr(kernel, "settings", None)
    if settings is None or not hasattr(settings, "integrator"):
        raise TypeError(
            f"uld_report takes a run of ppl_ext.numpyro.ULD, got one of {type(kernel).__name__}."
        )
    if state is None:
        raise ValueError("`mcmc` holds no draws: call `mcmc.run` first.")
    adapt = state.adapt_state
    fields = mcmc.get_extra_fields(group_by_chain=True)
    scale = np.asarray(adapt.scale, np.float64)
    if mcmc.num_chains == 1:
        scale = scale[None]
    dense = settings.precondition == "dense"
    inverse_mass = (scale**2).sum(-1) if dense else scale**2
    draws, names = _flat(fields["unconstrained_z"])
    variance = draws.reshape(-1, draws.shape[-1]).var(0)
    steps = np.atleast_1d(np.asarray(adapt.step_size, np.float64))
    bias = (steps[:, None] ** 2 * inverse_mass).mean(0) / (8 * variance)
    scores = -_flat(fields["z_grad"])[0]
    width, curvature = np.mean(adapt.width), np.max(adapt.curvature)
    try:
        pvalue = psd_test(draws, scores).pvalue
    except TooFewDrawsError:
        pvalue = float("nan")
    return ULDReport(
        integrator=settings.integrator,
        dimension=draws.shape[-1],
        trace=float(np.mean(adapt.trace)),
        curvature=float(curvature),
        condition_number=float(curvature * width**2),
        step_size=float(steps.mean()),
        friction=float(np.mean(adapt.friction)),
        energy_error_variance=float(np.mean(fields["mean_square_error"])),
        sd_bias=pd.Series(bias, names, name="sd_bias"),
        psd_pvalue=float(pvalue),
    )


def _flat(sites: Any) -> tuple[np.ndarray, list[str]]:
    """Draws of all coordinates, shape (chain, draw, d), and the coordinates' names."""
    if not isinstance(sites, dict):
        sites = {"z": sites}
    columns, names = [], []
    for name in sorted(sites):
        value = np.asarray(sites[name], np.float64)
        columns.append(value.reshape(*value.shape[:2], -1))
        names += [
            name + (str(list(map(int, index))) if index else "")
            for index in np.ndindex(value.shape[2:])
        ]
    return np.concatenate(columns, -1), names
