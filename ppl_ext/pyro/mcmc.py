"""`pyro.infer.MCMC` with all chains in one XLA program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import pyro.infer
import torch
from pyro import poutine
from pyro.infer.mcmc.logger import ProgressBar

from ppl_ext.arguments import check_choice
from ppl_ext.pyro.kernel import Kernel, Prepared, summarise
from ppl_ext.pyro.runner import Chain

Tensors = dict[str, torch.Tensor]


class MCMC(pyro.infer.MCMC):
    """Run a kernel of `ppl_ext.pyro` without a Python loop over draws.

    All that `pyro.infer.MCMC` offers, besides: chains at once in one program, statistics of
    each draw, thinning. Integer sites keep their values and dtypes.

    Parameters
    ----------
    kernel : a kernel of ppl_ext.pyro
    num_samples : int
        Transitions per chain after warm-up; `num_samples // thinning` are kept.
    warmup_steps : int, optional
        Transitions before; `num_samples` when not given.
    num_chains : int
    chain_method : {"vectorized", "sequential"}
        All chains at once, or one after the other in the same compiled program.
    thinning : int
        Keep every so many-th draw.
    extra_fields : sequence of str
        What else to keep of each draw: attributes of the kernel's state such as `"z_grad"`
        (minus the scores) or `"adapt_state.inverse_mass_matrix"`.
    initial_params, hook_fn, disable_progbar, disable_validation, transforms, save_params
        As for `pyro.infer.MCMC`. `hook_fn` is called after each block of draws, for each draw
        of the first chain.

    Raises
    ------
    TypeError
        When the kernel is not one of `ppl_ext.pyro`.
    ValueError
        For a bad argument, named.

    Notes
    -----
    Random keys derive from PyTorch's random state: `pyro.set_rng_seed` makes runs repeatable.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from ppl_ext.pyro import MCMC, NUTS
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    ...     pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> mcmc = MCMC(NUTS(model), 500, num_chains=4, thinning=5, disable_progbar=True)
    >>> mcmc.run(torch.tensor(3.0))
    >>> mcmc.get_samples(group_by_chain=True)["mu"].shape
    torch.Size([4, 100])
    >>> sorted(mcmc.get_extra_fields())[:3]
    ['accept_prob', 'diverging', 'energy']
    """

    def __init__(
        self,
        kernel: Kernel,
        num_samples: int,
        warmup_steps: int | None = None,
        initial_params: Tensors | None = None,
        num_chains: int = 1,
        hook_fn: Callable[..., Any] | None = None,
        disable_progbar: bool = False,
        disable_validation: bool | None = True,
        transforms: dict[str, Any] | None = None,
        save_params: Sequence[str] | None = None,
        *,
        chain_method: Literal["vectorized", "sequential"] = "vectorized",
        thinning: int = 1,
        extra_fields: Sequence[str] = (),
    ) -> None:
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"`kernel` must be one of ppl_ext.pyro, such as ULD or NUTS, got "
                f"{type(kernel).__module__}.{type(kernel).__name__}; for others use "
                "pyro.infer.MCMC."
            )
        check_choice("MCMC", "chain_method", chain_method, ("vectorized", "sequential"))
        if not isinstance(thinning, int) or thinning < 1:
            raise ValueError(f"MCMC: `thinning` must be a positive integer, got {thinning!r}.")
        # one chain: the base class would look for processors and add an axis to initial_params
        super().__init__(
            kernel,
            num_samples,
            warmup_steps,
            disable_progbar=disable_progbar,
            disable_validation=disable_validation,
            transforms=transforms,
            save_params=list(save_params) if save_params is not None else None,
        )
        self.num_chains = num_chains
        self._diagnostics: list[Any] = [None] * num_chains
        self.transforms: dict[str, Any] | None
        if initial_params is not None:
            if num_chains > 1:
                self._validate_initial_params(initial_params)
            else:
                initial_params = {name: x[None] for name, x in initial_params.items()}
        self._initial_params = initial_params
        self._hook_fn, self._disable_progbar = hook_fn, disable_progbar
        self.chain_method, self.thinning = chain_method, thinning
        self._extra_names = tuple(extra_fields)
        self._fields: dict[str, Any] = {}
        # PyTorch's, before the last run
        self.random_state: torch.Tensor | None = None

    def again(self, kernel: Kernel) -> MCMC:
        """The last run, random numbers included, with another kernel."""
        assert self.random_state is not None
        other = copy.copy(self)
        other.kernel = kernel
        # the draws of this kernel say how they are to be read
        other.transforms = None
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            other.run(*self._args, **self._kwargs)
        return other

    @poutine.block
    def run(self, *args: Any, **kwargs: Any) -> None:
        """Draw all chains; the arguments are the model's."""
        self._args, self._kwargs = args, kwargs
        self.random_state = torch.get_rng_state()
        args = tuple(a.detach() if torch.is_tensor(a) else a for a in args)
        validate = not self.disable_validation
        if self.disable_validation is None:
            validate = pyro.distributions.torch_distribution.Distribution._validate_args
        with pyro.validation_enabled(validate):
            prepared = self.kernel.prepare(args, kwargs)
            starts = prepared.starts(self._initial_params, self.num_chains)
            if self.chain_method == "vectorized" and self.num_chains > 1:
                draws, fields, states = self._run(prepared, starts, batched=True)
                last = [jax.tree.map(lambda x, i=i: x[i], states) for i in range(self.num_chains)]
            else:
                runs = [
                    self._run(prepared, {name: x[i] for name, x in starts.items()}, batched=False)
                    for i in range(self.num_chains)
                ]
                draws = {name: torch.stack([run[0][name] for run in runs]) for name in runs[0][0]}
                fields = jax.tree.map(lambda *parts: np.stack(parts), *[run[1] for run in runs])
                last = [run[2] for run in runs]
        kept = getattr(self.kernel, "save_params", sorted(draws))
        transforms = self.transforms if self.transforms is not None else prepared.transforms
        self.transforms = transforms
        self._samples = {
            name: transforms[name].inv(draws[name]) if name in transforms else draws[name]
            for name in kept
        }
        self._fields = fields
        self._diagnostics = [
            summarise(jax.tree.map(lambda x, i=i: x[i], fields), self.kernel.run_facts(last[i]))
            for i in range(self.num_chains)
        ]

    def _run(
        self, prepared: Prepared, starts: Tensors, batched: bool
    ) -> tuple[Tensors, dict[str, Any], Any]:
        """Draws, statistics and last state of one chain, or with a leading axis of several."""
        number = self.num_chains if batched else None
        chain = prepared.chain(starts, self.warmup_steps, number, self._extra_names)
        bar = ProgressBar(self.warmup_steps, self.num_samples, disable=self._disable_progbar)
        try:
            self._advance(prepared, chain, "Warmup", bar, batched)
            blocks = self._advance(prepared, chain, "Sample", bar, batched)
        finally:
            bar.close()
        # the draws of a block are axis 0, the chains axis 1
        axes = (lambda x: x.swapaxes(0, 1)) if batched else (lambda x: x)
        draws = {
            name: axes(torch.cat([block[0][name] for block in blocks])) for name in blocks[0][0]
        }
        fields = jax.tree.map(
            lambda *parts: axes(np.concatenate(parts)), *[block[1] for block in blocks]
        )
        return draws, fields, chain.state

    def _advance(
        self, prepared: Prepared, chain: Chain, stage: str, bar: ProgressBar, batched: bool
    ) -> list[tuple[Tensors, dict[str, Any]]]:
        """Make the draws of one stage; returns those of the second one."""
        sampling = stage == "Sample"
        count = self.num_samples // self.thinning if sampling else self.warmup_steps
        every = self.thinning if sampling else 1
        thinning = None if self.thinning == 1 else every
        blocks = []
        done = 0
        bar.set_description(stage, refresh=False)
        while done < count:
            draws, fields = prepared.draw(chain, limit=count - done, thinning=thinning)
            size = len(fields["accept_prob"])
            if self._hook_fn is not None:
                for i in range(size):
                    params = {n: x[i, 0] if batched else x[i] for n, x in draws.items()}
                    self._hook_fn(self.kernel, params, stage, done + i)
            done += size
            if sampling:
                blocks.append((draws, fields))
            last = jax.tree.map(lambda values: values[-1], fields)
            bar.set_postfix(self.kernel.progress(last), refresh=False)
            bar.update(size * every)
        return blocks

    def get_extra_fields(self, group_by_chain: bool = False) -> dict[str, Any]:
        """Statistics of each draw, arrays with leading axes as in `get_samples`."""
        if group_by_chain:
            return self._fields
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self._fields)
