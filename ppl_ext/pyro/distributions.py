"""Distributions of Pyro -> those of NumPyro, parameter by parameter.

`take_apart` splits a distribution into tensors, which a recording can follow, and a `Form` that
says how NumPyro puts them together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpyro.distributions as np_dist
import torch
from numpyro.distributions import constraints as np_constraints
from numpyro.distributions import transforms as np_transforms
from pyro.distributions import (
    Delta,
    MaskedDistribution,
    MixtureSameFamily,
    ZeroInflatedDistribution,
)
from pyro.distributions.torch_distribution import ExpandedDistribution

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.target import Array


@dataclass(frozen=True)
class Form:
    """How a distribution is made of arrays by name, and of other forms."""

    make: Callable[..., Any]
    tensors: tuple[tuple[str, str], ...] = ()  # argument of `make`, name of the tensor
    forms: tuple[tuple[str, Form], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors in it."""
        inner = (name for _, form in self.forms for name in form.names)
        return (*(name for _, name in self.tensors), *inner)

    def build(self, arrays: Mapping[str, Array]) -> Any:
        """The NumPyro distribution."""
        parts = {argument: arrays[name] for argument, name in self.tensors}
        parts |= {argument: form.build(arrays) for argument, form in self.forms}
        return self.make(**parts)


# NumPyro's class and the names of the parameters, which both have
_SAME: dict[str, tuple[Any, tuple[str, ...]]] = {
    "AsymmetricLaplace": (np_dist.AsymmetricLaplace, ("loc", "scale", "asymmetry")),
    "Beta": (np_dist.Beta, ("concentration1", "concentration0")),
    "BetaBinomial": (np_dist.BetaBinomial, ("concentration1", "concentration0", "total_count")),
    "Cauchy": (np_dist.Cauchy, ("loc", "scale")),
    "Chi2": (np_dist.Chi2, ("df",)),
    "Dirichlet": (np_dist.Dirichlet, ("concentration",)),
    "Exponential": (np_dist.Exponential, ("rate",)),
    "Gamma": (np_dist.Gamma, ("concentration", "rate")),
    "GammaPoisson": (np_dist.GammaPoisson, ("concentration", "rate")),
    "Gumbel": (np_dist.Gumbel, ("loc", "scale")),
    "HalfCauchy": (np_dist.HalfCauchy, ("scale",)),
    "HalfNormal": (np_dist.HalfNormal, ("scale",)),
    "InverseGamma": (np_dist.InverseGamma, ("concentration", "rate")),
    "Kumaraswamy": (np_dist.Kumaraswamy, ("concentration1", "concentration0")),
    "Laplace": (np_dist.Laplace, ("loc", "scale")),
    "LogNormal": (np_dist.LogNormal, ("loc", "scale")),
    "Logistic": (np_dist.Logistic, ("loc", "scale")),
    "LowRankMultivariateNormal": (
        np_dist.LowRankMultivariateNormal,
        ("loc", "cov_factor", "cov_diag"),
    ),
    "MultivariateNormal": (np_dist.MultivariateNormal, ("loc", "scale_tril")),
    "MultivariateStudentT": (np_dist.MultivariateStudentT, ("df", "loc", "scale_tril")),
    "Normal": (np_dist.Normal, ("loc", "scale")),
    "OrderedLogistic": (np_dist.OrderedLogistic, ("predictor", "cutpoints")),
    "Pareto": (np_dist.Pareto, ("scale", "alpha")),
    "Poisson": (np_dist.Poisson, ("rate",)),
    "ProjectedNormal": (np_dist.ProjectedNormal, ("concentration",)),
    "SoftLaplace": (np_dist.SoftLaplace, ("loc", "scale")),
    "StudentT": (np_dist.StudentT, ("df", "loc", "scale")),
    "Uniform": (np_dist.Uniform, ("low", "high")),
    "VonMises": (np_dist.VonMises, ("loc", "concentration")),
    "Weibull": (np_dist.Weibull, ("scale", "concentration")),
}

# by probabilities or by logits, whichever the model gave; and what else they have
_PROBS_OR_LOGITS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Bernoulli": (np_dist.Bernoulli, ()),
    "Binomial": (np_dist.Binomial, ("total_count",)),
    "Categorical": (np_dist.Categorical, ()),
    "Geometric": (np_dist.Geometric, ()),
    "NegativeBinomial": (np_dist.NegativeBinomial, ("total_count",)),
}

_TRANSFORMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "AffineTransform": (np_transforms.AffineTransform, ("loc", "scale")),
    "ExpTransform": (np_transforms.ExpTransform, ()),
    "SigmoidTransform": (np_transforms.SigmoidTransform, ()),
}

# NumPyro's densities want whole numbers as integers here
INTEGER_VALUES = ("Categorical", "OrderedLogistic")


def take_apart(distribution: Any, path: str, tensors: dict[str, torch.Tensor]) -> Form:
    """The `Form` of a distribution; its parameters are added to `tensors` as `<path>/<name>`.

    Raises
    ------
    UnsupportedModelError
        For a distribution without a counterpart in NumPyro; names the site, which is the start of
        the path.
    """
    inner = lambda part, name: take_apart(part, f"{path}/{name}", tensors)  # noqa: E731

    def form(make: Callable[..., Any], **parts: Any) -> Form:
        found = []
        for argument, value in parts.items():
            name = f"{path}/{argument}"
            tensors[name] = torch.as_tensor(value)
            found.append((argument, name))
        return Form(make, tuple(found))

    if isinstance(distribution, torch.distributions.Independent):
        base = inner(distribution.base_dist, "base")
        return Form(
            partial(_to_event, number=distribution.reinterpreted_batch_ndims),
            forms=(("base", base),),
        )
    if isinstance(distribution, ExpandedDistribution):
        base = inner(distribution.base_dist, "base")
        shape = tuple(distribution.batch_shape)
        return Form(partial(_expanded, shape=shape), forms=(("base", base),))
    if isinstance(distribution, MaskedDistribution):
        base = inner(distribution.base_dist, "base")
        masked = form(np_dist.MaskedDistribution, mask=distribution._mask)
        return Form(_masked, masked.tensors, (("base", base),))
    if isinstance(distribution, MixtureSameFamily):
        return Form(
            np_dist.MixtureSameFamily,
            forms=(
                ("mixing_distribution", inner(distribution.mixture_distribution, "mixing")),
                ("component_distribution", inner(distribution.component_distribution, "parts")),
            ),
        )
    if hasattr(distribution, "numpyro_form"):
        make, parameters = distribution.numpyro_form()
        return form(make, **parameters)
    if isinstance(distribution, ZeroInflatedDistribution):
        gate = form(np_dist.ZeroInflatedDistribution, gate=distribution.gate)
        return Form(
            gate.make, gate.tensors, (("base_dist", inner(distribution.base_dist, "base")),)
        )
    if isinstance(distribution, Delta):
        event_dim = distribution.event_dim
        return form(
            partial(np_dist.Delta, event_dim=event_dim),
            v=distribution.v,
            log_density=distribution.log_density,
        )
    name = _library_class(distribution)
    if name in _SAME:
        make, arguments = _SAME[name]
        return form(make, **{a: getattr(distribution, a) for a in arguments})
    if name in _PROBS_OR_LOGITS:
        make, arguments = _PROBS_OR_LOGITS[name]
        given = "probs" if "probs" in vars(distribution) else "logits"
        return form(make, **{a: getattr(distribution, a) for a in (given, *arguments)})
    if name == "Multinomial":
        given = "probs" if "probs" in vars(distribution._categorical) else "logits"
        make = partial(np_dist.Multinomial, total_count=distribution.total_count)
        return form(make, **{given: getattr(distribution, given)})
    if name == "DirichletMultinomial":
        return form(
            np_dist.DirichletMultinomial,
            concentration=distribution.concentration,
            total_count=distribution.total_count,
        )
    if name == "Wishart":
        return form(
            np_dist.Wishart, concentration=distribution.df, scale_tril=distribution.scale_tril
        )
    if name == "LKJCholesky":
        make = partial(np_dist.LKJCholesky, distribution.dim)
        return form(make, concentration=distribution.concentration)
    if name == "LKJ":
        make = partial(np_dist.LKJ, distribution.base_dist.dim)
        return form(make, concentration=distribution.base_dist.concentration)
    if name == "ImproperUniform":
        make = partial(
            np_dist.ImproperUniform,
            _support(distribution.support, path.split("/")[0]),
            tuple(distribution.batch_shape),
            tuple(distribution.event_shape),
        )
        return Form(make)
    if name == "TransformedDistribution":
        kinds = [type(t).__name__ for t in distribution.transforms]
        unknown = [kind for kind in kinds if kind not in _TRANSFORMS]
        if not unknown:
            made = []
            for i, (kind, transform) in enumerate(zip(kinds, distribution.transforms, strict=True)):
                make, arguments = _TRANSFORMS[kind]
                values = {a: getattr(transform, a) for a in arguments}
                tensors_of = tuple((a, f"{path}/{i}.{a}") for a in values)
                tensors.update({f"{path}/{i}.{a}": torch.as_tensor(v) for a, v in values.items()})
                made.append((f"transform_{i}", Form(make, tensors_of)))
            return Form(
                _transformed, forms=(("base", inner(distribution.base_dist, "base")), *made)
            )
        name = f"TransformedDistribution with {', '.join(unknown)}"
    site = path.split("/")[0]
    raise UnsupportedModelError(
        f"Site '{site}' has the distribution {name or type(distribution).__name__}, of which "
        "NumPyro has no counterpart that this kernel could use. Write it by another distribution, "
        "or its log density by pyro.factor."
    )


def _support(support: Any, site: str) -> Any:
    """NumPyro's constraint."""
    if isinstance(support, torch.distributions.constraints.independent):
        base = _support(support.base_constraint, site)
        return np_constraints.independent(base, support.reinterpreted_batch_ndims)
    name = type(support).__name__
    bounds = {k: float(v) for k, v in vars(support).items() if k.endswith("_bound")}
    if name in ("_Real", "_RealVector"):
        return np_constraints.real if name == "_Real" else np_constraints.real_vector
    if name in ("_GreaterThan", "_GreaterThanEq"):
        return np_constraints.greater_than(bounds["lower_bound"])
    if name == "_LessThan":
        return np_constraints.less_than(bounds["upper_bound"])
    if name == "_Interval":
        return np_constraints.interval(**bounds)
    if name == "_Simplex":
        return np_constraints.simplex
    raise UnsupportedModelError(
        f"Site '{site}' (ImproperUniform) has the support {name}, which this kernel cannot use. "
        "Give the site a proper prior."
    )


def _library_class(distribution: Any) -> str:
    """Name of the first class of PyTorch or Pyro that the distribution is made of.

    A subclass with a density of its own shows in the comparison of densities.
    """
    for kind in type(distribution).__mro__:
        if kind.__module__.startswith(("pyro.distributions", "torch.distributions")):
            return kind.__name__
    return ""


def _to_event(base: Any, number: int) -> Any:
    return base.to_event(number)


def _expanded(base: Any, shape: tuple[int, ...]) -> Any:
    # of the plate of a minibatch, 1 in `shape`, there may be more points
    return base.expand(np.broadcast_shapes(shape, base.batch_shape))


def _masked(base: Any, mask: Array) -> Any:
    return np_dist.MaskedDistribution(base, mask)


def _transformed(base: Any, **transforms: Any) -> Any:
    return np_dist.TransformedDistribution(base, list(transforms.values()))
