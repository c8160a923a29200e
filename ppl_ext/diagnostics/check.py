"""All that can be seen to be wrong with a run, in one report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics.draws import UNCONSTRAINED, score_group
from ppl_ext.diagnostics.goodness_of_fit import psd_test
from ppl_ext.diagnostics.imh_report import MAX_PARETO_K, MIN_ACCEPTANCE, pareto_k
from ppl_ext.diagnostics.overhead_report import MAX_Z, overhead_report
from ppl_ext.diagnostics.uld_report import ULDReport, uld_report
from ppl_ext.errors import TooFewDrawsError

# Vehtari et al. 2021, section 4: R-hat below 1.01, and 100 effective draws for each chain
MAX_RHAT, MIN_ESS_PER_CHAIN = 1.01, 100

# kernels with gradients aim at 0.57 and more, random walks at 0.234 and more
MIN_ACCEPTANCE_WITH_GRADIENTS, MIN_ACCEPTANCE_WITHOUT = 0.4, 0.05

# shorter chains may stand still by chance
MIN_DRAWS_TO_MOVE = 20

# of the proposals of a kernel that rejects those without density, which is harmless in itself
MAX_WITHOUT_DENSITY = 0.01

# rate of false alarms of the Stein test, and relative bias of a variance
MIN_PVALUE, MAX_VARIANCE_BIAS = 0.01, 0.1

_DIMS = ("chain", "draw")
_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run.

    Parameters
    ----------
    flag : str
        Which of the flags that `check` lists.
    found, advice : str
        What was found, and what to do next.
    """

    flag: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found} {self.advice}"


@dataclass(frozen=True)
class Check:
    """What `check` found; printing it gives a text.

    Parameters
    ----------
    num_chains, num_draws : int
        Size of the run; draws of each chain.
    findings : tuple of Finding
        What is wrong, the worst first. Empty for a clean run.
    passed : tuple of str
        The flags that were looked at and are fine.
    not_checked : dict
        By flag, why it could not be looked at.
    """

    num_chains: int
    num_draws: int
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_checked: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        chains = "one chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        size = f"{chains} of {self.num_draws} draws"
        count = len(self.findings)
        lines = [f"{size}: {f'{count} findings' if count > 1 else 'one finding'}"]
        if self.ok:
            lines = [f"{size}: nothing found"]
        for finding in self.findings:
            lines += [f"- {finding.flag}: {finding.found}", f"  {finding.advice}"]
        if self.passed:
            lines.append(f"fine: {', '.join(self.passed)}")
        lines += [f"not checked: {flag} ({why})" for flag, why in self.not_checked.items()]
        return "\n".join(lines)

    __repr__ = __str__


def check(data: Any) -> Check:
    """Look at all that may be wrong with a run, and say what to do about it.

    The flags, each where the run has what it needs:

    - `overflow`: draws after an overflow of the slots of DPSlice;
    - `bounds`: a bound of TunaMH was violated;
    - `simulations`: simulations of ExchangeMH reached their limit; `exactness`: they are not exact;
    - `overhead`: the self-test of DPSlice (`overhead_report`);
    - `finite`: draws that are NaN or infinite;
    - `moving`: chains that stand still;
    - `divergences`: divergent draws; for kernels with proposals, more than 1 % without density;
    - `acceptance`: mean acceptance probability of a chain below 0.4 with gradients, 0.05 for
      random walks and minibatches, 0.01 for independent proposals;
    - `R-hat`: above 1.01; `ESS`: bulk or tail, below 100 for each chain;
    - `Stein test`: p-value of `psd_test` below 0.01;
    - `weights`: Pareto k of ProximalIMH's weights above 0.7;
    - `bias`: bias of a variance that `uld_report` predicts for ULD above 10 %.

    Parameters
    ----------
    data : arviz.InferenceData or xarray.DataTree
        Of `ppl_ext.to_arviz(mcmc)`, or of another sampler under ArviZ's names.

    Returns
    -------
    Check

    Raises
    ------
    TypeError
        When `data` is no such container.
    ValueError
        When it has no posterior with the dimensions `chain` and `draw`.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from ppl_ext import _arviz
    >>> from ppl_ext.diagnostics import check
    >>> mu = np.random.default_rng(0).normal(size=(4, 500))
    >>> diverging = np.zeros((4, 500), bool)
    >>> diverging[0, :5] = True
    >>> data = _arviz.from_groups({
    ...     "posterior": xr.Dataset({"mu": (("chain", "draw"), mu)}),
    ...     "sample_stats": xr.Dataset({"diverging": (("chain", "draw"), diverging)}),
    ... })
    >>> print(check(data))
    4 chains of 500 draws: one finding
    - divergences: 5 of 2000 draws (0.2%) diverged.
      Raise `target_accept_prob`, or write the model non-centred (numpyro.infer.reparam).
    fine: finite, moving, R-hat, ESS
    not checked: Stein test (no scores: use ppl_ext.diagnostics.attach_scores)
    """
    return _look(data, FLAGS)


def wrong(data: Any) -> tuple[Finding, ...]:
    """The findings that make draws useless or biased and cost no time to see."""
    return _look(data, [flag for flag in FLAGS if flag.always]).findings


class _NotCheckedError(Exception):
    """A flag could not be looked at. The message says why; without one it is of other kernels."""


class _Run:
    """The groups of a container, and what several flags read."""

    def __init__(self, data: Any) -> None:
        if not _arviz.is_container(data):
            raise TypeError(
                f"check takes an arviz {_arviz.container_type().__name__}, got "
                f"{type(data).__name__}. Convert a run with ppl_ext.to_arviz(mcmc)."
            )
        posterior = _arviz.get_group(data, "posterior")
        if posterior is None or not set(_DIMS) <= set(posterior.sizes):
            raise ValueError(
                "check needs the group 'posterior' with the dimensions 'chain' and 'draw' (groups: "
                f"{', '.join(_arviz.group_names(data))})."
            )
        stats = _arviz.get_group(data, "sample_stats")
        self.data, self.posterior = data, posterior
        self.stats = xr.Dataset() if stats is None else stats
        self.shape = (posterior.sizes["chain"], posterior.sizes["draw"])

    def stat(self, name: str) -> np.ndarray:
        """A statistic of shape (chain, draw)."""
        if name not in self.stats:
            raise _NotCheckedError
        return self.stats[name].transpose(*_DIMS).values

    @cached_property
    def kind(self) -> str:
        """What the statistics tell of the kernel."""
        for kind, names in (
            ("mixture", {"overhead"}),
            ("independent", {"log_weight"}),
            ("minibatch", {"num_violations"}),
            ("exchange", {"num_overflow"}),
            ("gradient", {"n_steps", "tree_depth", "energy"}),
        ):
            if names & set(self.stats.data_vars):
                return kind
        return "unknown"

    @cached_property
    def overflowed(self) -> np.ndarray:
        none = np.zeros(self.shape, bool)
        return self.stat("overflow").astype(bool) if "overflow" in self.stats else none

    @cached_property
    def scalars(self) -> xr.Dataset:
        """The variables of which R-hat and effective sample sizes make sense."""
        draws = self.posterior
        if self.kind == "mixture":
            # a slot holds another cluster from draw to draw
            flat = [name for name, values in draws.items() if values.ndim == len(_DIMS)]
            draws = draws[flat].assign(num_clusters=self.stats["num_clusters"])
        if self.shape[1] < 4:
            raise _NotCheckedError("chains of fewer than 4 draws")
        kept = {
            name: values
            for name, values in draws.items()
            if values.dtype.kind in "fiu" and np.isfinite(values.values).all()
        }
        if not kept or self.overflowed.any():
            raise _NotCheckedError("no variable with finite draws")
        return xr.Dataset(kept)

    @cached_property
    def any_finite(self) -> bool:
        """Whether there is a draw whose unconstrained coordinates and scores are all finite."""
        finite = np.ones(self.shape, bool)
        for group in (UNCONSTRAINED, score_group(UNCONSTRAINED)):
            values = _arviz.get_group(self.data, group)
            for array in () if values is None else values.values():
                flat = array.transpose(*_DIMS, ...).values.reshape(*self.shape, -1)
                finite &= np.isfinite(flat).all(-1)
        return bool(finite.any())

    @cached_property
    def uld(self) -> ULDReport:
        if "uld_integrator" not in self.stats.attrs:
            raise _NotCheckedError
        if UNCONSTRAINED not in _arviz.group_names(self.data):
            raise _NotCheckedError("no unconstrained draws: convert with ppl_ext.to_arviz")
        if not self.any_finite:
            raise _NotCheckedError("no finite draw")
        return uld_report(self.data)


Answer = tuple[str, str] | None


def _overflow(run: _Run) -> Answer:
    lost = run.stat("overflow")
    if not lost.any():
        return None
    return (
        f"{lost.mean():.1%} of the draws follow an overflow of the slots, and are NaN.",
        "Repeat the run with more: `kernel.rerun(mcmc)`.",
    )


def _bounds(run: _Run) -> Answer:
    # counted since the start of each chain
    violations = int(run.stat("num_violations").max())
    if not violations:
        return None
    return (
        f"A bound was violated {violations} times in the worst chain, so that the draws are not "
        "exact.",
        "Correct `bounds` or the rule (ppl_ext.numpyro.bounds.check; `num_violations` in "
        "`sample_stats`).",
    )


def _simulations(run: _Run) -> Answer:
    overflow = int(run.stat("num_overflow").max())
    if not overflow:
        return None
    return (
        f"Simulations reached their limit {overflow} times in the worst chain, and their proposals "
        "were rejected, which is a bias.",
        "Take another `sampler`, or a larger `max_sweeps` or `max_trials` (`num_overflow` in "
        "`sample_stats`).",
    )


def _exact_simulations(run: _Run) -> Answer:
    if "inexact_sites" not in run.stats.attrs:
        raise _NotCheckedError
    if run.stats.attrs["exact"]:
        return None
    return (
        f"The simulations of {run.stats.attrs['inexact_sites']} are not exact, so that the draws "
        "are biased.",
        "See by how much with ppl_ext.diagnostics.exchange_report(mcmc).",
    )


def _estimated_bounds(run: _Run) -> Answer:
    if "estimated_bounds" not in run.stats.attrs:
        raise _NotCheckedError
    if not run.stats.attrs["estimated_bounds"]:
        return None
    return (
        "The bounds are estimates (`exact=False`), so that the draws may be off.",
        "Give `bounds`, or a rule (ppl_ext.numpyro.bounds.register_bounds).",
    )


def _overhead(run: _Run) -> Answer:
    if run.kind != "mixture":
        raise _NotCheckedError
    if run.overflowed.all():
        raise _NotCheckedError("every draw follows an overflow")
    with warnings.catch_warnings():
        # of what this and other flags tell
        warnings.simplefilter("ignore", UserWarning)
        z = overhead_report(run.data).z
    if not abs(z) > MAX_Z:
        return None
    return (
        f"The number of components is off its law by {z:.1f} standard deviations.",
        "Please report this run; see ppl_ext.diagnostics.overhead_report.",
    )


def _finite(run: _Run) -> Answer:
    bad = {}
    for name, values in run.posterior.items():
        if values.dtype.kind == "f":
            array = values.transpose(*_DIMS, ...).values.reshape(*run.shape, -1)
            finite = np.isfinite(array).all(-1)
            if not (finite | run.overflowed).all():
                bad[name] = ~finite & ~run.overflowed
    if not bad:
        return None
    share = np.any(list(bad.values()), axis=0).mean()
    return (
        f"{share:.1%} of the draws are NaN or infinite: {_list(bad)}.",
        "A kernel accepts no point without a density: look at how the model computes these sites.",
    )


def _moving(run: _Run) -> Answer:
    diverging = run.stats.get("diverging")
    if diverging is not None:
        stuck = np.flatnonzero(diverging.transpose(*_DIMS).values.all(1))
        if stuck.size:
            return (
                f"Every draw of chains {stuck.tolist()} diverged, so that they stand still.",
                "Call `mcmc.warmup` again after a change of data, or look at the model there.",
            )
    if run.shape[1] < MIN_DRAWS_TO_MOVE:
        raise _NotCheckedError(f"chains of fewer than {MIN_DRAWS_TO_MOVE} draws")
    still = np.ones(run.shape[0], bool)
    for values in run.posterior.values():
        array = values.transpose(*_DIMS, ...).values
        same = (array == array[:, :1]) | ((array != array) & (array[:, :1] != array[:, :1]))
        still &= same.reshape(run.shape[0], -1).all(1)
    # draws that were lost are not draws that stand still
    stuck = np.flatnonzero(still & ~run.overflowed.all(1))
    if not stuck.size:
        return None
    return (
        f"All draws of chains {stuck.tolist()} are equal.",
        "No proposal was accepted: start elsewhere, or take a smaller step or a longer warm-up.",
    )


def _divergences(run: _Run) -> Answer:
    diverging = run.stat("diverging").astype(bool)
    count, share = int(diverging.sum()), diverging.mean()
    found = f"{count} of {diverging.size} draws ({share:.1%}) diverged."
    if run.kind in ("independent", "minibatch", "exchange"):
        if share <= MAX_WITHOUT_DENSITY:
            return None
        return (
            f"{count} of {diverging.size} proposals ({share:.1%}) had a log density of minus "
            "infinity or NaN, and were rejected.",
            "See that the model is finite on all of its support: a NaN there hides part of it.",
        )
    if not count:
        return None
    if "uld_integrator" in run.stats.attrs:
        return (
            f"{found[:-1]}, and steps of theirs were undone.",
            "Write the model non-centred (numpyro.infer.reparam), or take a smaller `step_size` or "
            "`bias_tolerance`.",
        )
    return (
        found,
        "Raise `target_accept_prob`, or write the model non-centred (numpyro.infer.reparam).",
    )


def _acceptance(run: _Run) -> Answer:
    name = "acceptance_rate" if "acceptance_rate" in run.stats else "accept_prob"
    by_chain = run.stat(name).mean(1)
    least, advice = {
        "gradient": (
            MIN_ACCEPTANCE_WITH_GRADIENTS,
            "Take a smaller `step_size`, or a longer warm-up to adapt it.",
        ),
        "independent": (
            MIN_ACCEPTANCE,
            "Use a better approximate operator or another correction.",
        ),
    }.get(
        run.kind,
        (MIN_ACCEPTANCE_WITHOUT, "Take a smaller `step_size`, or a longer warm-up to adapt it."),
    )
    low = np.flatnonzero(~(by_chain >= least))
    if not low.size:
        return None
    return (
        f"The mean acceptance probability of chains {low.tolist()} is below {least:g} (least "
        f"{by_chain[low].min():.2g}).",
        advice,
    )


def _rhat(run: _Run) -> Answer:
    if run.shape[0] < 2:
        raise _NotCheckedError("one chain: run four")
    rhat = _by_scalar(_arviz.arviz().rhat(run.scalars))
    high = _sorted({name: -value for name, value in rhat.items() if value > MAX_RHAT})
    if not high:
        return None
    return (
        f"R-hat is above {MAX_RHAT}: {_list([f'{name} {-high[name]:.3g}' for name in high])}.",
        "The chains have not mixed: run longer, and plot them; they may sit in different modes.",
    )


def _ess(run: _Run) -> Answer:
    found = {}
    for method in ("bulk", "tail"):
        sizes = _by_scalar(_arviz.arviz().ess(run.scalars, method=method))
        found.update({f"{name} ({method})": size for name, size in sizes.items()})
    least = MIN_ESS_PER_CHAIN * run.shape[0]
    low = _sorted({name: size for name, size in found.items() if size < least})
    if not low:
        return None
    return (
        f"Effective sample sizes are below {least} ({MIN_ESS_PER_CHAIN} for each chain): "
        f"{_list([f'{name} {low[name]:.0f}' for name in low])}.",
        "Draw more, or trust no more digits than ArviZ's mcse allows.",
    )


def _stein(run: _Run) -> Answer:
    if score_group(UNCONSTRAINED) not in _arviz.group_names(run.data):
        if run.kind in ("mixture", "minibatch", "exchange"):
            raise _NotCheckedError
        raise _NotCheckedError("no scores: use ppl_ext.diagnostics.attach_scores")
    if not run.any_finite:
        raise _NotCheckedError("no finite draw")
    if "uld_integrator" in run.stats.attrs:
        pvalue = run.uld.psd_pvalue
        if np.isnan(pvalue):
            raise _NotCheckedError("too few effective draws")
    else:
        pvalue = psd_test(run.data).pvalue
    if pvalue >= MIN_PVALUE:
        return None
    return (
        f"The draws do not fit the scores of the posterior (p = {pvalue:.2g}).",
        "See which coordinates in ppl_ext.diagnostics.psd_test and summary; with a biased kernel "
        "take a smaller step.",
    )


def _weights(run: _Run) -> Answer:
    k = pareto_k(run.stat("log_weight").ravel().astype(np.float64))
    if k <= MAX_PARETO_K:
        return None
    return (
        f"The weights have a heavy tail (Pareto k {k:.2f} > {MAX_PARETO_K}): the proposal misses "
        "part of the posterior.",
        "Take a better approximate operator; see ppl_ext.diagnostics.imh_report(mcmc).",
    )


def _bias(run: _Run) -> Answer:
    bias = run.uld.worst_variance_bias
    if abs(bias) <= MAX_VARIANCE_BIAS:
        return None
    size = "unbounded (the step is unstable)" if np.isnan(bias) else f"{bias:.0%}"
    return (
        f"The bias of a posterior variance by the step of ULD may be {size}.",
        "Take a smaller `step_size` or `bias_tolerance`; see ppl_ext.diagnostics.uld_report.",
    )


class _Flag(NamedTuple):
    name: str
    look: Callable[[_Run], Answer]
    # whether `to_arviz` warns of it
    always: bool = False


FLAGS = (
    _Flag("overflow", _overflow, always=True),
    _Flag("bounds", _bounds, always=True),
    _Flag("simulations", _simulations, always=True),
    _Flag("exactness", _exact_simulations),
    _Flag("estimated bounds", _estimated_bounds),
    _Flag("overhead", _overhead),
    _Flag("finite", _finite),
    _Flag("moving", _moving, always=True),
    _Flag("divergences", _divergences),
    _Flag("acceptance", _acceptance),
    _Flag("R-hat", _rhat),
    _Flag("ESS", _ess),
    _Flag("Stein test", _stein),
    _Flag("weights", _weights),
    _Flag("bias", _bias),
)


def _look(data: Any, flags: Any) -> Check:
    run = _Run(data)
    findings, passed, not_checked = [], [], {}
    for flag in flags:
        try:
            answer = flag.look(run)
        except _NotCheckedError as reason:
            if str(reason):
                not_checked[flag.name] = str(reason)
        except TooFewDrawsError:
            not_checked[flag.name] = "too few effective draws"
        else:
            if answer is None:
                passed.append(flag.name)
            else:
                findings.append(Finding(flag.name, *answer))
    return Check(*run.shape, tuple(findings), tuple(passed), not_checked)


def _by_scalar(values: xr.Dataset) -> dict[str, float]:
    """Each number under the name that ArviZ gives it; NaN for constants are left out."""
    found = {}
    for name, array in values.items():
        for index in np.ndindex(array.shape):
            label = f"{name}[{', '.join(map(str, index))}]" if index else str(name)
            value = float(array.values[index])
            if not np.isnan(value):
                found[label] = value
    return found


def _sorted(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: item[1]))


def _list(names: Any) -> str:
    names = list(map(str, names))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
