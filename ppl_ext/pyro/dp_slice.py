"""Dirichlet-process slice samplers as a Pyro kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpyro.infer import init_to_uniform

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.kernels import dp_slice as dp
from ppl_ext.numpyro import dp_slice
from ppl_ext.numpyro.kernel import Kernel as NumPyroKernel
from ppl_ext.pyro.mcmc import MCMC
from ppl_ext.pyro.translated import TranslatedKernel
from ppl_ext.target import Target


class DPSlice(TranslatedKernel):
    """Slice sampler for models with a `DirichletProcess` or `PitmanYor`: no truncation level.

    `ppl_ext.numpyro.DPSlice` for Pyro: the same algorithm, the same options.

    Parameters
    ----------
    model : callable
        Pyro model that calls `draw` of one process in the plate of its data.
    method, atoms, split_merge, capacity, chunk
        As for `ppl_ext.numpyro.DPSlice`.
    init_strategy : callable, optional
        For the sites beside the process, as for `pyro.infer.NUTS`.

    Raises
    ------
    ValueError
        For a bad argument, named.
    ppl_ext.errors.UnsupportedModelError
        At `run`: as for `ppl_ext.numpyro.DPSlice`; a distribution that NumPyro does not have.
    ppl_ext.errors.TracingError
        At `run`: JAX cannot evaluate the model.
    ppl_ext.errors.InitializationError
        At `run`: no observations, or observations that are NaN and not masked.

    Notes
    -----
    Exact. Names and shapes of the draws, and what they mean, are those of
    `ppl_ext.numpyro.DPSlice`. Labels of each draw are kept by
    `ppl_ext.pyro.MCMC(..., extra_fields=["labels"])`.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from ppl_ext.pyro import MCMC, DirichletProcess, DPSlice
    >>> def base():
    ...     return pyro.sample("mu", dist.Normal(0.0, 10.0))
    >>> def model(y):
    ...     G = DirichletProcess("G", 1.0, base)
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(G.draw(), 1.0), obs=y)
    >>> y = torch.tensor([-10.0, 10.0]).repeat(20)
    >>> mcmc = MCMC(DPSlice(model), 100, warmup_steps=50, disable_progbar=True)
    >>> mcmc.run(y)
    >>> mcmc.get_samples()["G_num_clusters"].shape
    torch.Size([100])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        method: dp.Method = "posterior",
        atoms: Literal["auto", "conjugate", "gradient"] = "auto",
        split_merge: int | Literal["auto"] = "auto",
        capacity: int | Literal["auto"] = "auto",
        chunk: int | Literal["auto"] = "auto",
        init_strategy: Callable[..., Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = dict(
            method=method, atoms=atoms, split_merge=split_merge, capacity=capacity, chunk=chunk
        )
        super().__init__(model, init_strategy)

    def kernel(
        self, model: Callable[..., Any], init_strategy: Callable[..., Any] | None
    ) -> NumPyroKernel:
        return dp_slice.DPSlice(
            model, init_strategy=init_strategy or init_to_uniform, **self._options
        )

    def check_target(self, target: Target) -> None:
        reason = dp_slice.refusal(target)
        if reason is not None:
            raise UnsupportedModelError(reason)

    @property
    def settings(self) -> dp.Settings:
        """Slots, chunk and moves of the run; known after the start of it."""
        if self._compiled is None:
            raise RuntimeError("The settings are chosen at the start of a run.")
        kernel = self._compiled[2]
        assert isinstance(kernel, dp_slice.DPSlice)
        return kernel.settings

    def rerun(self, mcmc: MCMC, capacity: int | None = None) -> MCMC:
        """Repeat a finished run of `ppl_ext.pyro.MCMC` with the same keys and more slots.

        Up to the overflow the draws are the same; after it they are those that should have been.

        Parameters
        ----------
        mcmc : ppl_ext.pyro.MCMC
            A finished run of this kernel.
        capacity : int, optional
            Slots, a multiple of 16. `None`: twice as many.

        Raises
        ------
        ValueError
            For a bad capacity, or an `mcmc` without draws.
        """
        if not isinstance(mcmc, MCMC) or mcmc.kernel is not self or mcmc.random_state is None:
            raise ValueError(
                "`rerun` takes a finished run of this kernel by ppl_ext.pyro.MCMC: call `mcmc.run` "
                "first."
            )
        capacity = 2 * self.settings.capacity if capacity is None else capacity
        options = {**self._options, "capacity": capacity}
        assert self.model is not None
        kernel = DPSlice(self.model, init_strategy=self.init_strategy, **options)
        return mcmc.again(kernel)

    def progress(self, fields: dict[str, np.ndarray]) -> dict[str, str]:
        shown = {
            "clusters": f"{np.mean(fields['num_clusters']):.1f}",
            "components": f"{np.mean(fields['num_instantiated']):.1f}",
        }
        return shown | ({"OVERFLOW": "yes"} if np.any(fields["overflow"]) else {})

    def predictive_density(self, samples: dict[str, Any], *args: Any, **kwargs: Any) -> jax.Array:
        """Density of new observations, see `ppl_ext.diagnostics.predictive_density`."""
        translation = self.translated(*args, **kwargs)
        draws = {
            name: jnp.asarray(value.cpu().numpy() if isinstance(value, torch.Tensor) else value)
            for name, value in samples.items()
        }
        with jax.enable_x64(translation.double):
            kernel = self.kernel(translation.model, None)
            assert isinstance(kernel, dp_slice.DPSlice)
            return kernel.predictive_density(draws, translation.constants)

    refuse_log_likelihood = staticmethod(dp_slice.DPSlice.refuse_log_likelihood)
