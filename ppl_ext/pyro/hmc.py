"""NumPyro's NUTS and HMC as Pyro kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import torch
from numpyro.infer.hmc import HMCState, hmc
from pyro.infer.autoguide.initialization import init_to_uniform

from ppl_ext.pyro.kernel import DensityKernel, Tensors
from ppl_ext.pyro.potential import Engine
from ppl_ext.pyro.runner import Transition
from ppl_ext.target import Array, PyTree, Target

Blocks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Algorithm:
    name: Literal["NUTS", "HMC"]
    step_size: float
    trajectory_length: float | None
    adapt_step_size: bool
    adapt_mass_matrix: bool
    dense_mass: bool | Blocks
    target_accept_prob: float
    max_tree_depth: int | tuple[int, int]

    def transition(self, target: Target, num_warmup: int) -> Transition:
        init_kernel, sample_kernel = hmc(
            potential_fn_gen=lambda data: target.bind(data).potential_energy, algo=self.name
        )

        def init(key: Array, z: PyTree, data: PyTree) -> HMCState:
            dense = self.dense_mass
            return init_kernel(
                z,
                num_warmup,
                self.step_size,
                adapt_step_size=self.adapt_step_size,
                adapt_mass_matrix=self.adapt_mass_matrix,
                dense_mass=list(dense) if isinstance(dense, tuple) else dense,
                target_accept_prob=self.target_accept_prob,
                trajectory_length=self.trajectory_length,
                max_tree_depth=self.max_tree_depth,
                model_args=(data,),
                rng_key=key,
            )

        def fields(state: HMCState, data: Any) -> dict[str, Array]:
            return {
                "accept_prob": state.accept_prob,
                "diverging": state.diverging,
                "energy": state.energy,
                "mean_accept_prob": state.mean_accept_prob,
                "num_steps": jnp.asarray(state.num_steps),
                "potential_energy": state.potential_energy,
                "step_size": state.adapt_state.step_size,
            }

        return Transition(init, lambda state, data: sample_kernel(state, (data,)), fields)


class HMC(DensityKernel):
    """Hamiltonian Monte Carlo: NumPyro's algorithm on a Pyro model, with Pyro's arguments.

    Parameters
    ----------
    model : callable, optional
        Pyro model with continuous latent sites only.
    potential_fn : callable, optional
        Potential energy of a dict of real tensors, instead of `model`; `MCMC` then needs
        `initial_params`.
    step_size : float
        First step size.
    trajectory_length : float, optional
        Time per draw; 2 pi when `num_steps` is not given either.
    num_steps : int, optional
        Instead of `trajectory_length`: that is then `step_size` times this.
    adapt_step_size, adapt_mass_matrix : bool
        What warm-up adapts.
    full_mass : bool or list of tuple of str
        Dense mass matrix of all sites, or of each tuple of sites.
    target_accept_prob : float
        Acceptance probability that the step size is adapted to.
    transforms, init_strategy, engine
        As for `ppl_ext.pyro.ULD`.
    max_plate_nesting, jit_compile, jit_options, ignore_jit_warnings
        Accepted for the sake of `pyro.infer.HMC`, without effect: all is compiled.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: discrete or Delta sites, subsampled plates, no latent site, empty data.
    ppl_ext.errors.MismatchError
        At `run`: JAX and PyTorch disagree on the model.

    Notes
    -----
    Exact. Adaptation is NumPyro's (Stan's windows), not Pyro's.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from pyro.infer import MCMC
    >>> from ppl_ext.pyro import HMC
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    ...     pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> mcmc = MCMC(HMC(model), num_samples=300, warmup_steps=300, disable_progbar=True)
    >>> mcmc.run(torch.tensor(3.0))
    >>> mcmc.get_samples()["mu"].shape
    torch.Size([300])
    """

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Callable[[Tensors], torch.Tensor] | None = None,
        step_size: float = 1.0,
        trajectory_length: float | None = None,
        num_steps: int | None = None,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        full_mass: bool | list[tuple[str, ...]] = False,
        transforms: Mapping[str, Any] | None = None,
        max_plate_nesting: int | None = None,
        jit_compile: bool = False,
        jit_options: dict[str, Any] | None = None,
        ignore_jit_warnings: bool = False,
        target_accept_prob: float = 0.8,
        init_strategy: Callable[..., Any] = init_to_uniform,
        *,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            model, potential_fn, transforms=transforms, init_strategy=init_strategy, engine=engine
        )
        if num_steps is not None and num_steps < 1:
            raise ValueError(f"HMC: `num_steps` must be a positive integer, got {num_steps!r}.")
        if trajectory_length is None:
            # as in Pyro: the time that these steps take at the first step size
            trajectory_length = 2 * math.pi if num_steps is None else step_size * num_steps
        self._algorithm = _algorithm(
            "HMC",
            step_size,
            trajectory_length,
            adapt_step_size,
            adapt_mass_matrix,
            full_mass,
            target_accept_prob,
            10,
        )

    @property
    def algorithm(self) -> _Algorithm:
        return self._algorithm


class NUTS(DensityKernel):
    """The No-U-Turn sampler: NumPyro's algorithm on a Pyro model, with Pyro's arguments.

    Parameters
    ----------
    model, potential_fn, step_size, adapt_step_size, adapt_mass_matrix, full_mass, \
    target_accept_prob, transforms, init_strategy, engine
        As for `ppl_ext.pyro.HMC`.
    use_multinomial_sampling : bool
        Only True, the better choice, is there.
    max_tree_depth : int or tuple of int
        At most this many doublings per draw; two numbers are for warm-up and after.
    max_plate_nesting, jit_compile, jit_options, ignore_jit_warnings
        Accepted for the sake of `pyro.infer.NUTS`, without effect: all is compiled.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: discrete or Delta sites, subsampled plates, no latent site, empty data.
    ppl_ext.errors.MismatchError
        At `run`: JAX and PyTorch disagree on the model.

    Notes
    -----
    Exact. Adaptation is NumPyro's (Stan's windows), not Pyro's.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from pyro.infer import MCMC
    >>> from ppl_ext.pyro import NUTS
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    ...     pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> mcmc = MCMC(NUTS(model), num_samples=300, warmup_steps=300, disable_progbar=True)
    >>> mcmc.run(torch.tensor(3.0))
    >>> mcmc.get_samples()["mu"].shape
    torch.Size([300])
    """

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        potential_fn: Callable[[Tensors], torch.Tensor] | None = None,
        step_size: float = 1.0,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        full_mass: bool | list[tuple[str, ...]] = False,
        use_multinomial_sampling: bool = True,
        transforms: Mapping[str, Any] | None = None,
        max_plate_nesting: int | None = None,
        jit_compile: bool = False,
        jit_options: dict[str, Any] | None = None,
        ignore_jit_warnings: bool = False,
        target_accept_prob: float = 0.8,
        max_tree_depth: int | tuple[int, int] = 10,
        init_strategy: Callable[..., Any] = init_to_uniform,
        *,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            model, potential_fn, transforms=transforms, init_strategy=init_strategy, engine=engine
        )
        if not use_multinomial_sampling:
            raise ValueError(
                "NUTS: `use_multinomial_sampling` must be True, got False; slice sampling is in "
                "pyro.infer.NUTS only."
            )
        self._algorithm = _algorithm(
            "NUTS",
            step_size,
            None,
            adapt_step_size,
            adapt_mass_matrix,
            full_mass,
            target_accept_prob,
            max_tree_depth,
        )

    @property
    def algorithm(self) -> _Algorithm:
        return self._algorithm


def _algorithm(
    name: Literal["NUTS", "HMC"],
    step_size: float,
    trajectory_length: float | None,
    adapt_step_size: bool,
    adapt_mass_matrix: bool,
    full_mass: bool | list[tuple[str, ...]],
    target_accept_prob: float,
    max_tree_depth: int | tuple[int, int],
) -> _Algorithm:
    if not step_size > 0:
        raise ValueError(f"{name}: `step_size` must be positive, got {step_size!r}.")
    if trajectory_length is not None and not trajectory_length > 0:
        raise ValueError(
            f"{name}: `trajectory_length` must be positive, got {trajectory_length!r}."
        )
    if not 0 < target_accept_prob < 1:
        raise ValueError(
            f"{name}: `target_accept_prob` must be between 0 and 1, got {target_accept_prob!r}."
        )
    dense = full_mass if isinstance(full_mass, bool) else tuple(tuple(b) for b in full_mass)
    return _Algorithm(
        name,
        float(step_size),
        trajectory_length,
        adapt_step_size,
        adapt_mass_matrix,
        dense,
        target_accept_prob,
        max_tree_depth,
    )
