"""Distributions with an unknown normalising constant, for Pyro models.

Each holds PyTorch's parameters and does its work by the distribution of the same name in
`ppl_ext.numpyro`. `ExchangeMH` samples the posteriors of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.distributions.torch_distribution import ExpandedDistribution

from ppl_ext import numpyro as front
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro.intractable import Simulation
from ppl_ext.pyro.kernel import random_keys


class Intractable(TorchDistribution):
    """Base class of the distributions of this module.

    `log_prob` raises, so that no sampler takes the density without its constant for the density.

    Raises
    ------
    ppl_ext.errors.UnsupportedModelError
        By `log_prob`.

    Examples
    --------
    >>> from ppl_ext.pyro import Graph, Ising
    >>> Ising(0.3, 0.0, Graph.lattice(20, 20)).sample().shape
    torch.Size([20, 20])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False
    has_normalizer = False

    def __init__(self, make: Callable[..., Any], **parameters: Any) -> None:
        self._make = make
        self.parameters = {name: torch.as_tensor(value) for name, value in parameters.items()}
        found: list[Any] = []
        # shapes, and what does not depend on the values
        shapes = {
            name: jax.ShapeDtypeStruct(tuple(x.shape), float) for name, x in self.parameters.items()
        }
        jax.eval_shape(lambda arrays: found.append(make(**arrays)), shapes)
        other = found[0]
        self.exact = other.exact
        super().__init__(
            torch.Size(other.batch_shape), torch.Size(other.event_shape), validate_args=False
        )

    def numpyro_form(self) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
        """NumPyro's class, and the parameters as tensors."""
        return self._make, self.parameters

    @property
    def numpyro(self) -> Any:
        """The distribution of NumPyro at the values of the parameters."""
        return self._make(**{n: x.detach().cpu().numpy() for n, x in self.parameters.items()})

    @constraints.dependent_property
    def support(self) -> Any:
        """Whole numbers, in the shape of one value."""
        return constraints.independent(constraints.integer, len(self.event_shape))

    def simulate(self, shape: tuple[int, ...] = (), length: int = 1) -> Simulation:
        """Independent values with what they cost, as `ppl_ext.numpyro` has them."""
        other = self.numpyro
        return other.simulate(random_keys(None), (*shape, *other.batch_shape), length)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        value = np.array(self.simulate(tuple(sample_shape)).value)
        return torch.from_numpy(value).to(torch.get_default_dtype())

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        raise UnsupportedModelError(
            f"The normalising constant of {type(self).__name__} depends on its parameters and is "
            "not part of the Pyro model, so that there is no log density: no NUTS, no "
            "log_likelihood, no loo. Sample the parameters with ppl_ext.pyro.ExchangeMH."
        )

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        if tuple(batch_shape) == tuple(self.batch_shape):
            return self
        return ExpandedDistribution(self, batch_shape)


class Ising(Intractable):
    """Ising model on a graph: spins of -1 and 1; see `ppl_ext.numpyro.Ising`.

    Parameters
    ----------
    coupling, field : float or Tensor
        As for `ppl_ext.numpyro.Ising`.
    graph : Graph
        Nodes and edges.
    **options
        `sampler`, `max_sweeps`, `num_sweeps`, as for `ppl_ext.numpyro.Ising`.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Examples
    --------
    >>> from ppl_ext.pyro import Graph, Ising
    >>> Ising(0.3, 0.0, Graph.lattice(4, 5)).sample().shape
    torch.Size([4, 5])
    """

    def __init__(self, coupling: Any, field: Any, graph: front.Graph, **options: Any) -> None:
        make = partial(front.Ising, graph=graph, **options)
        super().__init__(make, coupling=coupling, field=field)


class Potts(Intractable):
    """Potts model on a graph: states 0 ... q - 1; see `ppl_ext.numpyro.Potts`.

    Parameters
    ----------
    coupling : float or Tensor
        As for `ppl_ext.numpyro.Potts`.
    field : Tensor
        (q,), one number for each state.
    graph : Graph
        Nodes and edges.
    **options
        `sampler`, `max_sweeps`, `num_sweeps`, as for `ppl_ext.numpyro.Potts`.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Examples
    --------
    >>> import torch
    >>> from ppl_ext.pyro import Graph, Potts
    >>> Potts(0.3, torch.zeros(3), Graph.lattice(4, 5)).sample().shape
    torch.Size([4, 5])
    """

    def __init__(self, coupling: Any, field: Any, graph: front.Graph, **options: Any) -> None:
        make = partial(front.Potts, graph=graph, **options)
        super().__init__(make, coupling=coupling, field=field)


class ERGM(Intractable):
    """Exponential random graph: adjacency matrices; see `ppl_ext.numpyro.ERGM`.

    Parameters
    ----------
    coef : Tensor
        Coefficients of the terms.
    terms : sequence of str or ppl_ext.numpyro.ergm.Term
        As for `ppl_ext.numpyro.ERGM`.
    num_nodes : int
        Nodes of a graph.
    **options
        `num_toggles`, as for `ppl_ext.numpyro.ERGM`.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Examples
    --------
    >>> import torch
    >>> from ppl_ext.pyro import ERGM
    >>> ERGM(torch.tensor([-1.0]), ["edges"], 5).sample().shape
    torch.Size([5, 5])
    """

    def __init__(self, coef: Any, terms: Any, num_nodes: int, **options: Any) -> None:
        make = partial(front.ERGM, terms=terms, num_nodes=num_nodes, **options)
        super().__init__(make, coef=coef)


class ConwayMaxwellPoisson(Intractable):
    """Conway-Maxwell-Poisson counts; see `ppl_ext.numpyro.ConwayMaxwellPoisson`.

    Parameters
    ----------
    location, dispersion : float or Tensor
        As for `ppl_ext.numpyro.ConwayMaxwellPoisson`.
    **options
        `max_trials`, as for `ppl_ext.numpyro.ConwayMaxwellPoisson`.

    Raises
    ------
    ValueError
        For a bad argument, named.

    Examples
    --------
    >>> import torch
    >>> from ppl_ext.pyro import ConwayMaxwellPoisson
    >>> ConwayMaxwellPoisson(torch.tensor([2.0, 3.0]), 1.5).sample((4,)).shape
    torch.Size([4, 2])
    """

    def __init__(self, location: Any, dispersion: Any, **options: Any) -> None:
        make = partial(front.ConwayMaxwellPoisson, **options)
        super().__init__(make, location=location, dispersion=dispersion)
