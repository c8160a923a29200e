"""How good the proposals of a Proximal-IMH run were, and what the correction changed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pandas as pd
import xarray as xr
from scipy.special import logsumexp

from ppl_ext import _arviz, registry

# a run of proposals with lower acceptance, or with weights of a heavier tail, is warned of
MIN_ACCEPTANCE, MAX_PARETO_K = 0.01, 0.7

# share of proposals whose map may fold, or whose round trip may fail, without a warning
MAX_FAILURES = 0.001


@dataclass(frozen=True)
class IMHReport:
    """Proposals of a Proximal-IMH run; printing it gives a text.

    Parameters
    ----------
    correction : str
        The map; "none" without one.
    num_proposals, num_solves : int
        Proposals of the draws that were collected, and solves of the exact operator: for them, for
        their determinants, and for finding the map, where each forward evaluation and each
        derivative product is one.
    accept_prob : float
        Mean acceptance probability.
    ess : float
        Least effective sample size for the mean of a latent number.
    ess_per_solve : float
        `ess` over `num_solves`.
    pareto_k : float
        Tail shape of the weights pi / q by Pareto smoothing. Above 0.7 they are too heavy-tailed
        for the importance estimates, and chains stand still for long.
    largest_weight : float
        Share of the sum of the weights that the largest has.
    longest_stay : int
        Most draws in a row at one point.
    round_trip : float
        Share of proposals that the inverse of the map led back from. The others were rejected.
    negative_determinants : float
        Share of proposals at which the map reverses orientation: more than none, and less than
        all, means that it folds.
    log_evidence, log_evidence_error : float
        Log of the mean weight, with its standard error: the log evidence of the exact model where
        the proposal's density is normalised.
    comparison : pandas.DataFrame
        By latent number: mean and standard deviation under the exact model (the chains) and under
        the approximate one (its draws before the map, weighted), and the shift of the mean in
        standard deviations.
    """

    correction: str
    num_proposals: int
    num_solves: int
    accept_prob: float
    ess: float
    ess_per_solve: float
    pareto_k: float
    largest_weight: float
    longest_stay: int
    round_trip: float
    negative_determinants: float
    log_evidence: float
    log_evidence_error: float
    comparison: pd.DataFrame
    _sites: dict[str, np.ndarray] = field(repr=False)
    _log_weight: np.ndarray = field(repr=False)

    def importance_estimates(self) -> pd.DataFrame:
        """Posterior mean and standard deviation by latent number, from all proposals, weighted.

        With the standard error of the mean. They use rejected proposals too, and are independent
        of the order in which proposals came.
        """
        return _weighted(self._sites, self._log_weight)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What stands in the way of trusting the run, with what to do."""
        found = []
        if self.accept_prob < MIN_ACCEPTANCE:
            found.append(
                f"Only {self.accept_prob:.2%} of the proposals were accepted: use a better "
                "approximate operator or another correction."
            )
        if not self.pareto_k <= MAX_PARETO_K:
            found.append(
                f"The weights have a heavy tail (Pareto k {self.pareto_k:.2f} > {MAX_PARETO_K}): "
                "the proposal misses part of the posterior."
            )
        folds = min(self.negative_determinants, 1 - self.negative_determinants)
        if folds > MAX_FAILURES:
            found.append(
                f"The map folds: its determinant changes sign, at {folds:.1%} of the proposals. "
                'Points beyond the fold are not reached; try correction="affine" or a larger beta.'
            )
        if 1 - self.round_trip > MAX_FAILURES:
            found.append(
                f"The map could not be inverted at {1 - self.round_trip:.1%} of the proposals, "
                'which were rejected; try correction="affine" or a larger beta.'
            )
        return tuple(found)

    def __str__(self) -> str:
        lines = [
            f"Proximal-IMH, correction {self.correction}: {self.num_proposals} proposals, "
            f"{self.accept_prob:.1%} accepted, {self.num_solves} exact solves",
            f"effective sample size {self.ess:.0f}, {self.ess_per_solve:.3g} per exact solve; "
            f"longest stay {self.longest_stay} draws",
            f"weights: Pareto k {self.pareto_k:.2f}, largest share {self.largest_weight:.2%}",
            f"log evidence {self.log_evidence:.3f} +- {self.log_evidence_error:.3f}",
            f"map: {self.round_trip:.2%} of round trips, "
            f"{self.negative_determinants:.2%} of determinants negative",
            *(f"warning: {text}" for text in self.warnings),
            self.comparison.to_string(float_format="{:.4g}".format),
        ]
        return "\n".join(lines)

    __repr__ = __str__


def imh_report(mcmc: Any) -> IMHReport:
    """Report on a finished run of `ProximalIMH`.

    Parameters
    ----------
    mcmc : numpyro.infer.MCMC, pyro.infer.MCMC or ppl_ext.pyro.MCMC
        After `run`.

    Raises
    ------
    TypeError
        When the kernel is another one.
    ValueError
        When the run has not happened.

    Warns
    -----
    UserWarning
        For each of `IMHReport.warnings`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import ProximalIMH
    >>> from ppl_ext.diagnostics import imh_report
    >>> def model(y, forward=jnp.sinh):
    ...     x = numpyro.sample("x", dist.Normal(0, 1))
    ...     numpyro.sample("y", dist.Normal(forward(x), 0.3), obs=y)
    >>> kernel = ProximalIMH(model, approx=dict(forward=lambda x: 1.1 * x))
    >>> mcmc = MCMC(kernel, num_warmup=0, num_samples=500, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), 0.8)
    >>> report = imh_report(mcmc)
    >>> report.warnings
    ()
    >>> bool(abs(report.importance_estimates()["mean"] - report.comparison["mean"]).max() < 0.1)
    True
    """
    numpyro = not hasattr(mcmc, "kernel")
    kernel: Any = getattr(mcmc, "sampler", None) if numpyro else mcmc.kernel
    if not hasattr(getattr(kernel, "settings", None), "correction"):
        raise TypeError(
            "imh_report takes a run of ppl_ext.numpyro.ProximalIMH or ppl_ext.pyro.ProximalIMH, "
            f"got one of {type(kernel).__name__}."
        )
    fields, facts = _numpyro_run(mcmc) if numpyro else _pyro_run(mcmc)
    candidate = fields["candidate"]
    target = registry.target(kernel.model, *mcmc._args, **mcmc._kwargs)
    names = [site.name for site in target.latent]

    @jax.jit  # so that the operator, on which no latent site depends, is not run
    @jax.vmap
    def constrain(z: jax.Array) -> dict[str, jax.Array]:
        values = target.constrain(z, *mcmc._args, **mcmc._kwargs)
        return {name: values[name] for name in names}

    flat = lambda x: np.asarray(x).reshape(-1, *np.shape(x)[2:])  # noqa: E731
    wide = lambda x: flat(x).astype(np.float64)  # noqa: E731
    log_weight = wide(fields["log_weight"])
    weight = np.exp(log_weight - np.max(log_weight))
    count = weight.size
    samples = mcmc.get_samples(group_by_chain=True)
    # Pyro's are tensors, perhaps on a GPU
    host = lambda x: x if numpyro else x.cpu().numpy()  # noqa: E731
    draws = _numbers({name: flat(host(samples[name])) for name in names})
    num_chains = np.shape(fields["log_weight"])[0]
    stacked = np.stack(list(draws.values()), -1).reshape(num_chains, -1, len(draws))
    ess = float(_arviz.ess(xr.DataArray(stacked, dims=("chain", "draw", "number"))).min())
    num_solves = int(flat(candidate.num_solves).sum()) + int(np.sum(facts["imh_fit_solves"]))
    # Pyro's models may be in another precision than JAX
    double = flat(candidate.base).dtype == np.float64
    with jax.enable_x64(bool(double)):
        before = _numbers(constrain(flat(candidate.base)))
        proposed = _numbers(constrain(flat(candidate.z)))
    approx = _weighted(before, wide(candidate.approx_log_weight))
    comparison = pd.DataFrame(
        {
            "mean": {name: values.mean() for name, values in draws.items()},
            "sd": {name: values.std() for name, values in draws.items()},
            "approx_mean": approx["mean"],
            "approx_sd": approx["sd"],
        }
    )
    comparison["shift"] = (comparison["mean"] - comparison["approx_mean"]) / comparison["sd"]
    energy = np.asarray(fields["potential_energy"])
    report = IMHReport(
        correction=facts["imh_correction"],
        num_proposals=count,
        num_solves=num_solves,
        accept_prob=float(np.mean(fields["accept_prob"])),
        ess=ess,
        ess_per_solve=ess / num_solves,
        pareto_k=pareto_k(log_weight),
        largest_weight=float(weight.max() / weight.sum()),
        longest_stay=max(_longest_run(chain) for chain in energy),
        round_trip=float(np.mean(candidate.round_trip)),
        negative_determinants=float(np.mean(np.asarray(candidate.sign) < 0)),
        log_evidence=float(logsumexp(log_weight) - np.log(count)),
        log_evidence_error=float(weight.std() / weight.mean() / np.sqrt(count)),
        comparison=comparison,
        _sites=proposed,
        _log_weight=log_weight,
    )
    for text in report.warnings:
        warnings.warn(f"imh_report: {text}", stacklevel=2)
    return report


def pareto_k(log_weight: np.ndarray) -> float:
    """Shape of the generalised Pareto distribution of the largest weights, by ArviZ."""
    with warnings.catch_warnings():
        # of tails that are constant
        warnings.simplefilter("ignore")
        finite = log_weight[np.isfinite(log_weight)]
        if finite.size < log_weight.size:
            # proposals without weight count as very small ones
            finite = np.concatenate([finite, np.full(log_weight.size - finite.size, finite.min())])
        if np.ptp(finite) < 1e-6:
            return -np.inf
        return _arviz.pareto_k(finite)


def _weighted(sites: dict[str, np.ndarray], log_weight: np.ndarray) -> pd.DataFrame:
    weight = np.exp(log_weight - np.max(log_weight))
    weight = weight / weight.sum()
    rows = {}
    for name, values in sites.items():
        mean = weight @ np.where(weight > 0, values, 0.0)
        away = np.where(weight > 0, values - mean, 0.0)
        rows[name] = (mean, np.sqrt(weight @ away**2), np.sqrt(np.sum((weight * away) ** 2)))
    return pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "sd", "mean_mcse"])


def _numbers(sites: dict[str, Any]) -> dict[str, np.ndarray]:
    """Each number of each site: name[i, j] -> (draws,)."""
    found = {}
    for name, values in sites.items():
        values = np.asarray(values, np.float64)
        for index in np.ndindex(values.shape[1:]):
            label = f"{name}[{', '.join(map(str, index))}]" if index else name
            found[label] = values[(slice(None), *index)]
    return found


def _longest_run(chain: np.ndarray) -> int:
    changes = np.flatnonzero(np.diff(chain) != 0)
    ends = np.concatenate([[-1], changes, [len(chain) - 1]])
    return int(np.diff(ends).max())


def _numpyro_run(mcmc: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Statistics of the draws, (chain, draw) in front, and the facts of the run."""
    if mcmc.last_state is None or mcmc.last_state is mcmc.post_warmup_state:
        raise ValueError("`mcmc` holds no draws: call `mcmc.run` first.")
    facts = mcmc.sampler.run_facts(mcmc.last_state)
    return mcmc.get_extra_fields(group_by_chain=True), _once(facts, mcmc.chain_method)


def _pyro_run(mcmc: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if getattr(mcmc, "_samples", None) is None:
        raise ValueError("`mcmc` holds no draws: call `mcmc.run` first.")
    chains = [diagnostics["sample_stats"] for diagnostics in mcmc._diagnostics]
    every = [diagnostics["run_facts"] for diagnostics in mcmc._diagnostics]
    solves = np.concatenate([facts["imh_fit_solves"] for facts in every])
    facts = {**every[0], "imh_fit_solves": solves}
    fields = jax.tree.map(lambda *parts: np.stack(parts), *chains)
    return fields, _once(facts, getattr(mcmc, "chain_method", None))


def _once(facts: dict[str, Any], chain_method: Any) -> dict[str, Any]:
    """The map of vectorised chains was found once for all."""
    if chain_method != "vectorized":
        return facts
    return {**facts, "imh_fit_solves": facts["imh_fit_solves"][:1]}
