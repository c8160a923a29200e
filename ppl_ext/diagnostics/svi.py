"""Draws and scores of a fitted variational guide, and the order that sees its error.

Let s be the score of the target. Where the ELBO of a Gaussian family q = N(m, V) in unconstrained
space is stationary in m and in V,

    E_q[s(x)] = 0    and    E_q[grad s(x)] = -V^{-1},

and by Stein's lemma E_q[s(x) (x - m)^T] = E_q[grad s(x)] V = -I. These are the Stein features of
degree 1 and 2: at the optimum they have mean zero however bad the fit is. For a mean-field family
those of single coordinates do. Orders 1 and 2 then say whether the optimiser has converged; only an
order of 3 or more says whether the guide fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ppl_ext import _arviz
from ppl_ext.diagnostics.draws import UNCONSTRAINED, score_group
from ppl_ext.diagnostics.scores import boundary_notice, scorer

if TYPE_CHECKING:
    from numpyro.infer import SVI

ORDER = 2
"""Order of the discrepancy unless the draws say otherwise."""

SVI_ORDER = 3
"""Least order that sees the error of a Gaussian guide at its optimum."""

_ATTRIBUTE = "stein_order"


def from_svi(
    svi: SVI,
    svi_result: Any,
    *args: Any,
    num_samples: int = 4000,
    random_seed: int = 0,
    coords: Mapping[Hashable, Any] | None = None,
    dims: Mapping[str, Sequence[Hashable]] | None = None,
    **kwargs: Any,
) -> Any:
    """Return draws from a fitted NumPyro guide, with the scores of its model.

    The diagnostics then say how far the guide is from the posterior. They take an order of 3
    for these draws unless told another, and warn of a lower one: wherever the ELBO of a Gaussian
    guide is stationary, the Stein features of degree 1 and 2 have mean zero under the guide,
    however bad its fit (arXiv 2412.05135 has the features; the rest is Stein's lemma). They then
    only say whether the optimiser has converged.

    Parameters
    ----------
    svi
        NumPyro's ``SVI``, with any automatic or hand-written guide.
    svi_result
        What ``svi.run`` returned, or the parameters alone.
    *args, **kwargs
        Arguments of the model, with its data. A subsampled plate needs its full size.
    num_samples
        Number of draws from the guide. They are independent; the result has them as one chain.
    random_seed
        Seed of the draws.
    coords, dims
        Coordinates and dimensions of the variables, as for ``arviz.from_numpyro``.

    Returns
    -------
    InferenceData (ArviZ 0.2x) or DataTree (ArviZ 1.x) with the groups ``posterior``,
    ``unconstrained_posterior`` and ``unconstrained_posterior_score``. Parameters of the model
    itself are at their fitted values in the scores.

    Raises
    ------
    TypeError
        If `svi` is no ``SVI``, or `svi_result` has no parameters.
    ValueError
        As for `attach_scores`; and if `num_samples` is not positive.

    Warns
    -----
    UserWarning
        If draws lie on the boundary of their support.

    Examples
    --------
    A normal guide for the logarithm of a Gamma(2, 2) variable. Order 2 sees nothing of the
    skewness that it misses:

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> from ppl_ext.diagnostics import from_svi, summary
    >>> def model():
    ...     numpyro.sample("rate", dist.Gamma(2.0, 2.0))
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.03), Trace_ELBO(50))
    >>> data = from_svi(svi, svi.run(jax.random.key(0), 500, progress_bar=False))
    >>> bool(summary(data, kind="stats").loc["rate", "psd_t"] > 4)  # of order 3
    True
    """
    from numpyro.handlers import substitute
    from numpyro.infer import SVI, Predictive

    if not isinstance(svi, SVI):
        raise TypeError(f"svi must be a numpyro.infer.SVI, got {type(svi).__name__}")
    params = getattr(svi_result, "params", svi_result)
    if not isinstance(params, Mapping):
        raise TypeError(
            "svi_result must be what svi.run returned, or a dict of parameters, got "
            f"{type(svi_result).__name__}"
        )
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    kwargs = {**svi.static_kwargs, **kwargs}
    key = jax.random.key(random_seed)
    if hasattr(svi.guide, "sample_posterior"):
        draws = svi.guide.sample_posterior(
            key, params, *args, sample_shape=(num_samples,), **kwargs
        )
    else:
        draws = Predictive(svi.guide, params=params, num_samples=num_samples)(key, *args, **kwargs)
    posterior = _arviz.arviz().convert_to_dataset(
        {name: np.asarray(value)[None] for name, value in draws.items()}, coords=coords, dims=dims
    )
    groups = scorer(substitute(svi.model, data=params), args, kwargs)(posterior)
    if notice := boundary_notice(groups):
        warnings.warn(f"from_svi: {notice}", stacklevel=2)
    groups[score_group(UNCONSTRAINED)].attrs[_ATTRIBUTE] = SVI_ORDER
    return _arviz.from_groups({"posterior": posterior, **groups})


def order_for(data: Any, order: int | None, caller: str, *, group: str = UNCONSTRAINED) -> int:
    """Return the order with which to look at `data`: by default 2, but 3 if they are of a guide.

    A lower `order` than the draws ask for is taken, with a warning on behalf of `caller`.
    """
    scores = _arviz.get_group(data, score_group(group)) if _arviz.is_container(data) else None
    least = 1 if scores is None else int(scores.attrs.get(_ATTRIBUTE, 1))
    if order is None:
        return max(ORDER, least)
    if least > 1 and order < least:
        warnings.warn(
            f"{caller}: order={order} cannot see how far a Gaussian guide is from the posterior: "
            f"at its optimum the Stein features of degree 1 and 2 vanish whatever the fit. Take "
            f"order={least} or more",
            stacklevel=3,
        )
    return order
