"""What longer simulations change in a run of the exchange algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ppl_ext import _arviz

if TYPE_CHECKING:
    from numpyro.infer import MCMC

# acceptance of a run that has gone wrong
_LOW = 0.1


@dataclass(frozen=True)
class ExchangeReport:
    """The posterior by length of the simulations; printing it gives a text.

    Parameters
    ----------
    exact : bool
        Whether all simulators are exact: then there was nothing to repeat.
    accept_prob, sim_effort : float
        Means over the draws of the run.
    num_overflow : int
        Simulations that reached their limit, in all chains.
    table : pandas.DataFrame
        By scalar of the posterior (rows) and, as columns, for each length its `mean` and `sd`, the
        Monte Carlo error `mcse` of the mean, and `shift`: by how much the mean at the greatest
        length is larger, in posterior standard deviations, with its Monte Carlo error `shift_mcse`.
    """

    exact: bool
    accept_prob: float
    sim_effort: float
    num_overflow: int
    table: pd.DataFrame

    @property
    def worst_shift(self) -> float:
        """The shift from the run itself that is largest in absolute value."""
        return float(self.table[1]["shift"].abs().max())

    def __str__(self) -> str:
        lines = [
            f"ExchangeMH, {'exact' if self.exact else 'not exact'} simulations of effort "
            f"{self.sim_effort:.4g} a step, acceptance {self.accept_prob:.2f}, "
            f"{self.num_overflow} at their limit"
        ]
        if not self.exact:
            lines += [
                "by length of the simulations (shift: to the longest, in posterior sds):",
                self.table.to_string(float_format="{:.3g}".format),
            ]
        return "\n".join(lines)

    __repr__ = __str__


def exchange_report(run: MCMC, *, lengths: Sequence[int] = (1, 2, 4)) -> ExchangeReport:
    """Repeat a run of `ExchangeMH` with longer simulations, and compare the posteriors.

    Parameters
    ----------
    run : numpyro.infer.MCMC or ppl_ext.pyro.MCMC
        After `run`, with an `ExchangeMH` kernel.
    lengths : sequence of int
        Multiples of the length of the simulations; 1 is the run itself. Each other one is a new run
        with as many chains and draws.

    Raises
    ------
    TypeError
        When `run` is not such a run of ExchangeMH.
    ValueError
        When it has not been run, or `lengths` does not begin with 1 or does not grow.

    Warns
    -----
    UserWarning
        When the mean acceptance is below 0.1.

    Notes
    -----
    With exact simulators nothing is repeated.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ppl_ext.numpyro import ExchangeMH, Graph, Ising
    >>> from ppl_ext.diagnostics import exchange_report
    >>> graph = Graph.lattice(3, 3)
    >>> x = Ising(0.3, 0.0, graph).sample(jax.random.key(0))
    >>> def model(x):
    ...     coupling = numpyro.sample("coupling", dist.Uniform(0, 1))
    ...     numpyro.sample("x", Ising(coupling, 0.0, graph), obs=x)
    >>> mcmc = MCMC(ExchangeMH(model), num_warmup=100, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), x)
    >>> exchange_report(mcmc).exact
    True
    """
    kernel: Any = getattr(run, "kernel", getattr(run, "sampler", None))
    if not hasattr(kernel, "with_simulations") or not hasattr(run, "get_extra_fields"):
        raise TypeError(
            "exchange_report takes a run of ExchangeMH by numpyro.infer.MCMC or "
            "ppl_ext.pyro.MCMC, got "
            f"{type(run).__name__} with {type(kernel).__name__}."
        )
    lengths = [int(length) for length in lengths]
    if lengths[:1] != [1] or sorted(set(lengths)) != lengths:
        raise ValueError(f"`lengths` must begin with 1 and grow, got {lengths}.")
    from ppl_ext.convert import to_arviz

    data = to_arviz(run)
    stats = _arviz.get_group(data, "sample_stats")
    assert stats is not None
    exact = bool(stats.attrs["exact"])
    found = {1: _moments(data)}
    for length in lengths[1:] if not exact else ():
        again = _again(run, kernel.with_simulations(length))
        found[length] = _moments(to_arviz(again))
    last = found[max(found)]
    for length, moments in found.items():
        own = length == max(found)
        moments["shift"] = (last["mean"] - moments["mean"]) / last["sd"]
        moments["shift_mcse"] = 0.0 if own else np.hypot(last["mcse"], moments["mcse"]) / last["sd"]
    accepted = stats["acceptance_rate" if "acceptance_rate" in stats else "accept_prob"].mean()
    if accepted < _LOW:
        warnings.warn(
            f"The mean acceptance of the run is {float(accepted):.3f}: the chains hardly move, and "
            f"Monte Carlo errors are larger than they look. Above {_LOW} is usual, 0.23 best. Take "
            "more `num_warmup`, or start near the posterior by `init_strategy`.",
            stacklevel=2,
        )
    return ExchangeReport(
        exact=exact,
        accept_prob=float(accepted),
        sim_effort=float(stats["sim_effort"].mean()),
        num_overflow=int(stats["num_overflow"].isel(draw=-1).sum()),
        table=pd.concat(found, axis=1),
    )


def _again(run: Any, kernel: Any) -> Any:
    """A run of the same length with another kernel."""
    if hasattr(run, "again"):
        return run.again(kernel)
    again = type(run)(
        kernel,
        num_warmup=run.num_warmup,
        num_samples=run.num_samples,
        num_chains=run.num_chains,
        thinning=run.thinning,
        chain_method=run.chain_method,
        progress_bar=False,
    )
    again.run(run.last_state.rng_key, *run._args, **run._kwargs)
    return again


def _moments(data: Any) -> pd.DataFrame:
    """Mean, standard deviation and Monte Carlo error of each scalar of the posterior."""
    posterior = _arviz.get_group(data, "posterior")
    assert posterior is not None
    rows = {}
    for name, draws in posterior.data_vars.items():
        size = _arviz.ess(draws)
        mean, sd = draws.mean(("chain", "draw")), draws.std(("chain", "draw"))
        for index in np.ndindex(mean.shape):
            label = f"{name}[{', '.join(map(str, index))}]" if index else str(name)
            m, s, n = (float(np.asarray(v)[index]) for v in (mean, sd, size))
            rows[label] = {"mean": m, "sd": s, "mcse": s / np.sqrt(n)}
    return pd.DataFrame(rows).T
