"""Bias certificate of an underdamped Langevin run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics.draws import UNCONSTRAINED, score_group, scored_draws
from ppl_ext.diagnostics.goodness_of_fit import psd_test
from ppl_ext.errors import TooFewDrawsError
from ppl_ext.kernels.uld_integrators import INTEGRATORS, stationary_covariance

if TYPE_CHECKING:
    from numpyro.infer import MCMC


# of the bias of `obabo`, while the energy error of `baoab` stays below the bound
BAOAB_SHARE, BAOAB_ENERGY_ERROR = 0.25, 0.05


@dataclass(frozen=True)
class ULDReport:
    """How large the bias of an underdamped Langevin run can be; printing it gives a text.

    Parameters
    ----------
    integrator, adjust : str
        `adjust` is "none" for draws without an accept step.
    dimension : int
        Unconstrained coordinates.
    trace, curvature, condition_number : float
        In the preconditioned coordinates: trace of the mean Hessian of the potential energy
        (Bartlett identity), largest eigenvalue met (for `kbk` without the prior), and its product
        with the squared width of the posterior. Means over chains; `curvature` is the largest.
    step_size, friction : float
        Means over chains, in the preconditioned coordinates.
    energy_error_variance : float
        Variance of the energy error of one step, per dimension; NaN for `rmm` and `quicksort`.
    accept_prob : float
        Mean acceptance probability; without `adjust` the share of steps that were kept.
    variance_bias : pandas.Series
        By unconstrained coordinate, relative bias of the posterior variance: that of the
        integrator on a Gaussian with the coordinate's variance, from the exact stationary law of
        its step. `baoab` has none there; its entry is a quarter of the bias of `obabo` at the same
        step, below which that of `baoab` stayed on targets with light, exponential and skew
        tails, and all of it where the variance of the energy error per dimension exceeds 0.05,
        beyond which the step may be unstable. Zero with `adjust`. NaN where the step is unstable.
    worst_variance_bias : float
        The entry of `variance_bias` that is largest in absolute value.
    worst_direction_variance_bias : float
        The same in the stiffest direction of the preconditioned space, of curvature `curvature`.
    psd_pvalue : float
        p-value of `ppl_ext.diagnostics.psd_test` on the draws; NaN with too few draws.
    richardson : pandas.DataFrame or None
        On request, by unconstrained coordinate, the bias of mean and standard deviation in
        posterior standard deviations (`mean_bias`, `sd_bias`), estimated from a second run with
        half the step size, with their Monte Carlo errors (`mean_mcse`, `sd_mcse`).
    """

    integrator: str
    adjust: str
    dimension: int
    trace: float
    curvature: float
    condition_number: float
    step_size: float
    friction: float
    energy_error_variance: float
    accept_prob: float
    variance_bias: pd.Series
    worst_direction_variance_bias: float
    psd_pvalue: float
    richardson: pd.DataFrame | None = None

    @property
    def worst_variance_bias(self) -> float:
        """Predicted relative bias of a posterior variance, the largest in absolute value."""
        return float(self.variance_bias[self._worst])

    @property
    def _worst(self) -> Any:
        # an unstable coordinate is the worst
        return self.variance_bias.abs().fillna(np.inf).idxmax()

    def __str__(self) -> str:
        adjusted = "" if self.adjust == "none" else f", adjust={self.adjust}"
        lines = [
            f"ULD ({self.integrator}{adjusted}), {self.dimension} coordinates",
            f"step size {self.step_size:.3g}, friction {self.friction:.3g}, "
            f"{self.accept_prob:.1%} of steps kept",
            f"curvature: largest {self.curvature:.3g}, trace {self.trace:.4g}, "
            f"condition number {self.condition_number:.3g}",
        ]
        if np.isfinite(self.energy_error_variance):
            lines.append(f"energy error variance per dimension {self.energy_error_variance:.2g}")
        if self.adjust == "none":
            bound = "at most " if self.integrator == "baoab" else ""
            lines.append(
                f"bias of the variances: {bound}{self.worst_variance_bias:.1%} ({self._worst}); "
                f"{self.worst_direction_variance_bias:.1%} in the stiffest direction"
            )
        lines.append(f"Stein test p-value {self.psd_pvalue:.3f}")
        if self.richardson is not None:
            lines.append("bias from a second run at half the step, in posterior sds:")
            for kind in ("mean", "sd"):
                ratio = self.richardson[f"{kind}_bias"].abs() / self.richardson[f"{kind}_mcse"]
                row = self.richardson.iloc[int(ratio.argmax())]
                lines.append(
                    f"  {kind}s: {row[f'{kind}_bias']:+.3f} +- {row[f'{kind}_mcse']:.3f} "
                    f"({row.name}, the largest for its error)"
                )
        return "\n".join(lines)

    __repr__ = __str__


def uld_report(run: MCMC | Any, *, richardson: bool = False) -> ULDReport:
    """Bias certificate of a finished run of `ULD`, in NumPyro or Pyro.

    Parameters
    ----------
    run : numpyro.infer.MCMC, pyro.infer.MCMC, arviz.InferenceData or xarray.DataTree
        After `run`, with a `ULD` kernel; or the result of `ppl_ext.to_arviz` on it.
    richardson : bool
        Also continue the run at half the step size, for as many draws (twice as many gradients),
        and report the bias that the difference implies: with weak order p, the estimate
        (2^p m_(h/2) - m_h) / (2^p - 1) has the leading term of the bias removed. Needs the
        `MCMC` of NumPyro.

    Raises
    ------
    TypeError
        When the kernel is not ULD, or `richardson` is asked of a container or of Pyro's `MCMC`.
    ValueError
        When the run has not happened, or the container lacks what ULD's runs have.

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
    >>> abs(uld_report(mcmc).worst_variance_bias) < 0.2
    True
    """
    if _arviz.is_container(run):
        if richardson:
            raise TypeError(
                "`richardson` continues the run: give uld_report the MCMC object, not its ArviZ "
                "container."
            )
        return _report(run)
    from ppl_ext.convert import to_arviz

    # NumPyro's `MCMC` calls its kernel `sampler`, Pyro's `kernel`
    kernel = getattr(run, "kernel", None) or getattr(run, "sampler", None)
    if not hasattr(getattr(kernel, "settings", None), "integrator"):
        raise TypeError(
            "uld_report takes a run of ppl_ext.numpyro.ULD or ppl_ext.pyro.ULD, got "
            f"{type(run).__name__} of {type(kernel).__name__}."
        )
    if richardson and not hasattr(kernel, "at_half_step"):
        raise TypeError(
            "`richardson` continues runs of NumPyro's MCMC only. Run again with half the "
            "`step_size` that the report tells, and compare."
        )
    data = to_arviz(run)
    report = _report(data)
    if not richardson:
        return report
    return replace(report, richardson=_richardson(run, data, report.integrator))


def _report(data: Any) -> ULDReport:
    sample_stats = _arviz.get_group(data, "sample_stats")
    if sample_stats is None or "uld_integrator" not in sample_stats.attrs:
        raise ValueError(
            "The container has no ULD run: `sample_stats` lacks the attribute 'uld_integrator'. "
            "Convert the run with ppl_ext.to_arviz."
        )
    facts = sample_stats.attrs
    fact = lambda name: np.atleast_1d(np.asarray(facts[f"uld_{name}"], np.float64))  # noqa: E731
    draws, names = _coordinates(data)
    integrator, adjust = facts["uld_integrator"], facts["uld_adjust"]
    step_size, friction = fact("step_size").mean(), fact("friction").mean()
    curvature = fact("curvature").max()
    by_chain = (len(fact("step_size")), len(names))
    inverse_mass = fact("inverse_mass").reshape(by_chain).mean(0)
    precision = inverse_mass / draws.var(("chain", "draw")).values
    prior = np.zeros_like(precision)
    if integrator == "kbk":
        prior_precision = fact("prior_precision").reshape(by_chain)[0]
        prior = np.minimum(prior_precision * inverse_mass, precision)
    energy_error = float(sample_stats["mean_square_error"].mean())
    if adjust == "none":
        known = "obabo" if integrator == "baoab" else integrator
        bias = np.zeros_like(precision)
        # the draws have the biased variance: the curvature that leads to it is a fixed point
        for _ in range(1 if integrator == "baoab" else 4):
            bias = _relative_bias(known, step_size, friction, precision * (1 + bias), prior)
        # the curvature met in warm-up is that of the part without the prior
        (stiffest,) = _relative_bias(known, step_size, friction, np.array([curvature]))
        if integrator == "baoab" and energy_error < BAOAB_ENERGY_ERROR:
            bias, stiffest = BAOAB_SHARE * bias, BAOAB_SHARE * stiffest
    else:
        bias, stiffest = np.zeros_like(precision), 0.0
    try:
        pvalue = psd_test(data).pvalue
    except TooFewDrawsError:
        pvalue = float("nan")
    return ULDReport(
        integrator=integrator,
        adjust=adjust,
        dimension=len(names),
        trace=float(fact("trace").mean()),
        curvature=float(curvature),
        condition_number=float(curvature * fact("width").mean() ** 2),
        step_size=float(step_size),
        friction=float(friction),
        energy_error_variance=energy_error,
        accept_prob=float(sample_stats["acceptance_rate"].mean()),
        variance_bias=pd.Series(bias, names, name="variance_bias"),
        worst_direction_variance_bias=float(stiffest),
        psd_pvalue=float(pvalue),
    )


def _relative_bias(
    integrator: str,
    step_size: float,
    friction: float,
    curvature: np.ndarray,
    prior_precision: np.ndarray | None = None,
) -> np.ndarray:
    law = stationary_covariance(integrator, step_size, friction, curvature, prior_precision)
    return curvature * law[:, 0] - 1


def _richardson(mcmc: MCMC, data: Any, integrator: str) -> pd.DataFrame:
    """Bias of means and standard deviations, from a run at half the step size."""
    from ppl_ext.convert import to_arviz

    kernel, state = mcmc.sampler.at_half_step(mcmc.last_state)
    finer = type(mcmc)(
        kernel,
        num_warmup=mcmc.num_warmup,
        num_samples=mcmc.num_samples,
        num_chains=mcmc.num_chains,
        thinning=mcmc.thinning,
        chain_method=mcmc.chain_method,
        progress_bar=False,
    )
    finer.post_warmup_state = state
    finer.run(state.rng_key, *mcmc._args, **mcmc._kwargs)
    coarse, names = _coordinates(data)
    fine, _ = _coordinates(to_arviz(finer))
    factor = 1 / (1 - 2.0 ** -INTEGRATORS[integrator].weak_order)
    sd = np.asarray(fine.std(("chain", "draw")))
    columns = {}
    (m, m_error, s, s_error), (n, n_error, t, t_error) = map(_moments, (coarse, fine))
    columns["mean_bias"] = factor * (m - n) / sd
    columns["mean_mcse"] = factor * np.hypot(m_error, n_error) / sd
    columns["sd_bias"] = factor * (s - t) / sd
    columns["sd_mcse"] = factor * np.hypot(s_error, t_error) / sd
    return pd.DataFrame(columns, index=pd.Index(names, name="coordinate"))


def _moments(draws: xr.DataArray) -> tuple[np.ndarray, ...]:
    """Mean and standard deviation of each coordinate, each followed by its Monte Carlo error."""
    dims = ("chain", "draw")
    mean, sd = draws.mean(dims), draws.std(dims)
    square = (draws - mean) ** 2
    mean_error = sd / np.sqrt(_arviz.ess(draws))
    sd_error = square.std(dims) / np.sqrt(_arviz.ess(square)) / (2 * sd)
    return tuple(np.asarray(value) for value in (mean, mean_error, sd, sd_error))


def _coordinates(data: Any) -> tuple[xr.DataArray, list[str]]:
    """Draws (chain, draw, coordinate) in the order of the kernel's coordinates, and their names."""
    draws = _arviz.get_group(data, UNCONSTRAINED)
    scores = _arviz.get_group(data, score_group(UNCONSTRAINED))
    if draws is None or scores is None:
        raise ValueError(
            f"The container lacks the groups '{UNCONSTRAINED}' and '{score_group(UNCONSTRAINED)}'. "
            "Convert the run with ppl_ext.to_arviz."
        )
    found = scored_draws(draws, scores, ("chain", "draw"))
    dims = ("chain", "draw", "coordinate")
    return xr.DataArray(found.draws.astype(np.float64), dims=dims), found.labels
