"""Where a run computes: chains over devices, chunks of chains, compiled programs kept on disk.

Importing this module changes nothing; only `cache` and `set_host_devices` change settings of JAX.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ppl_ext.arguments import check_count

if TYPE_CHECKING:
    from numpyro.infer import MCMC

__all__ = ["Plan", "apply", "cache", "plan", "set_host_devices"]

_AXIS = "chains"


def cache(path: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk, for later processes that compile the same ones.

    Turns on JAX's persistent compilation cache, for programs of any size. Programs that call back
    into Python (`ppl_ext.BlackBox`, Pyro models that cannot be recorded, progress bars of parallel
    chains) are not kept: JAX compiles them anew.

    Parameters
    ----------
    path : str or os.PathLike, optional
        Folder; by default ``ppl_ext/jax`` in the user's cache (``$XDG_CACHE_HOME`` or
        ``~/.cache``). Made if it is not there. Delete it to free the space.

    Returns
    -------
    pathlib.Path
        The folder.

    Raises
    ------
    OSError
        When the folder cannot be made.

    Examples
    --------
    >>> from ppl_ext import devices
    >>> folder = devices.cache()  # doctest: +SKIP
    """
    from jax.experimental.compilation_cache import compilation_cache

    if path is None:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "ppl_ext", "jax")
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX decides once, at its first program, whether there is a cache
    compilation_cache.reset_cache()
    return folder


def set_host_devices(count: int) -> None:
    """Make JAX see the CPU as `count` devices, one for each core, say.

    Call it at the start of a program, before anything is computed.

    Raises
    ------
    RuntimeError
        When JAX has started already: it is too late.
    ValueError
        When `count` is no positive integer, or the environment variable ``XLA_FLAGS`` has the
        number.

    Examples
    --------
    >>> from ppl_ext import devices
    >>> devices.set_host_devices(8)  # doctest: +SKIP
    """
    check_count("set_host_devices", count=count)
    flag = "--xla_force_host_platform_device_count"
    if flag in os.environ.get("XLA_FLAGS", ""):
        raise ValueError(
            f"set_host_devices: the environment variable XLA_FLAGS has {flag} already. Change it "
            "there, or take it out."
        )
    try:
        jax.config.update("jax_num_cpu_devices", int(count))
    except RuntimeError as error:
        raise RuntimeError(
            "set_host_devices: too late, JAX has started with "
            f"{jax.local_device_count()} devices. Call it at the start of the program, before the "
            "first array is made."
        ) from error


@dataclass(frozen=True)
class Plan:
    """How the chains of a run are laid out; printing it gives a text.

    Parameters
    ----------
    platform : str
        "cpu", "gpu" or "tpu".
    dtype : str
        Of the draws: "float32" or "float64".
    num_chains, num_devices : int
        Chains in all, and devices that they are split over, as many on each.
    chunk : int
        Chains that a device advances at the same time; the next ones follow.
    """

    platform: str
    dtype: str
    num_chains: int
    num_devices: int
    chunk: int

    @property
    def chain_method(self) -> str | Callable[..., Any]:
        """For `numpyro.infer.MCMC`: "vectorized", or a function that splits the chains."""
        if self.num_devices == 1 and self.chunk == self.num_chains:
            return "vectorized"
        return self._split

    def _split(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of one chain as one of all chains."""
        here = self.num_chains // self.num_devices

        def on_a_device(chains: Any) -> Any:
            if self.chunk == here:
                return jax.vmap(function)(chains)
            return jax.lax.map(function, chains, batch_size=self.chunk)

        if self.num_devices == 1:
            return jax.jit(on_a_device)
        mesh = Mesh(jax.local_devices()[: self.num_devices], (_AXIS,))
        spec = PartitionSpec(_AXIS)
        return jax.jit(
            # chains know nothing of each other: there is nothing to check
            jax.shard_map(on_a_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    def __str__(self) -> str:
        here = self.num_chains // self.num_devices
        devices = "one device" if self.num_devices == 1 else f"{self.num_devices} devices"
        each = "" if self.num_devices == 1 else f", {here} on each"
        at_once = "all at once" if self.chunk == here else f"{self.chunk} at a time"
        method = self.chain_method if isinstance(self.chain_method, str) else "a function"
        return (
            f"{self.num_chains} chains on {devices} ({self.platform}, {self.dtype}){each}, "
            f"{at_once}; chain_method: {method}"
        )

    __repr__ = __str__


def plan(
    kernel: Any = None,
    *,
    num_chains: int,
    num_devices: int | None = None,
    chunk: int | None = None,
    dtype: str | None = None,
) -> Plan:
    """Lay out the chains of a run over the devices that JAX sees.

    Draws do not depend on the layout but for rounding: chains have the same random keys however
    they are split.

    Parameters
    ----------
    kernel : numpyro.infer.mcmc.MCMCKernel, optional
        Asked whether its chains can be split.
    num_chains : int
    num_devices : int, optional
        By default the largest number, of those there are, that divides `num_chains`.
    chunk : int, optional
        Chains that a device advances at the same time: less memory, more time. By default all.
    dtype : {"float32", "float64"}, optional
        By default what JAX computes in.

    Raises
    ------
    ValueError
        When there are fewer devices, the chains do not divide among them, the precision is not
        enabled, or the kernel's chains depend on each other.

    Examples
    --------
    >>> from ppl_ext import devices
    >>> devices.plan(num_chains=6, num_devices=1, chunk=2, dtype="float32")
    6 chains on one device (cpu, float32), 2 at a time; chain_method: a function
    """
    check_count("plan", num_chains=num_chains)
    there = jax.local_device_count()
    if num_devices is None:
        num_devices = max(n for n in range(1, there + 1) if num_chains % n == 0)
    check_count("plan", num_devices=num_devices)
    platform = jax.default_backend()
    if num_devices > there:
        help = "take fewer"
        if platform == "cpu":
            help += f", or call ppl_ext.devices.set_host_devices({num_devices}) at the start"
        raise ValueError(f"plan: `num_devices` is {num_devices}, but JAX sees {there}: {help}.")
    if num_chains % num_devices:
        raise ValueError(
            f"plan: {num_chains} chains cannot be split evenly over {num_devices} devices: take "
            f"`num_chains` = {num_chains + -num_chains % num_devices}."
        )
    here = num_chains // num_devices
    if chunk is None:
        chunk = here
    check_count("plan", chunk=chunk)
    chunk = min(chunk, here)
    current = str(jnp.result_type(float))
    if dtype is not None and dtype != current:
        if dtype not in ("float32", "float64"):
            raise ValueError(f'plan: `dtype` must be "float32" or "float64", got {dtype!r}.')
        enabled = dtype == "float64"
        raise ValueError(
            f"plan: `dtype` is {dtype}, but JAX computes in {current}: call "
            f"numpyro.enable_x64({'' if enabled else 'False'}) at the start of the program."
        )
    found = Plan(platform, current, num_chains, num_devices, chunk)
    if getattr(kernel, "is_ensemble_kernel", False) and found.chain_method != "vectorized":
        raise ValueError(
            f"plan: the chains of {type(kernel).__name__} depend on each other and cannot be "
            "split: take `num_devices=1` and no `chunk`."
        )
    return found


def apply(plan: Plan, kernel: Any, **options: Any) -> MCMC:
    """Return ``numpyro.infer.MCMC(kernel, **options)`` whose chains are laid out as planned.

    Parameters
    ----------
    plan : Plan
    kernel : numpyro.infer.mcmc.MCMCKernel
    **options
        Of `MCMC`, but for `num_chains` and `chain_method`. Split chains have no progress bar.

    Raises
    ------
    TypeError
        For `num_chains` or `chain_method`, which the plan has.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import NUTS
    >>> from ppl_ext import devices
    >>> def model():
    ...     numpyro.sample("mu", dist.Normal(0, 1))
    >>> plan = devices.plan(num_chains=4, num_devices=1, chunk=2)
    >>> mcmc = devices.apply(plan, NUTS(model), num_warmup=50, num_samples=50)
    >>> mcmc.run(jax.random.key(0))
    >>> mcmc.get_samples(group_by_chain=True)["mu"].shape
    (4, 50)
    """
    from numpyro.infer import MCMC

    for name in ("num_chains", "chain_method"):
        if name in options:
            raise TypeError(f"apply: `{name}` belongs to the plan; make another plan.")
    method = plan.chain_method
    if not isinstance(method, str):
        options = {"progress_bar": False, **options}
    return MCMC(kernel, num_chains=plan.num_chains, chain_method=method, **options)
