"""Long runs on disk: draws and state are written as they come, and a killed run goes on.

A run is cut into blocks of `every` draws. Each block is one file: the draws, and the state of the
kernel after them. A manifest in JSON lists the blocks with their SHA-256. Files are written beside
their place, flushed to disk and renamed, block first, manifest second, so that at any moment the
manifest names whole blocks only. Nothing is pickled: files hold plain arrays, and what they are is
taken from the run that reads them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import MCMC
from numpyro.util import is_prng_key, nested_attrgetter
from tqdm.auto import tqdm

import ppl_ext
from ppl_ext.arguments import check_count
from ppl_ext.errors import CheckpointError

if TYPE_CHECKING:
    from ppl_ext.target import PyTree

__all__ = ["Result", "run"]

FORMAT = 1

# one call of the program: draws it can return, and how long it should take
MAX_DRAWS, BUFFER_BYTES = 1000, 2**25
SECONDS_PER_CALL = 0.5

_MANIFEST, _PREVIOUS, _LOCK, _PARTIAL = "manifest.json", "manifest.previous.json", "lock", ".part"


def run(
    mcmc: MCMC,
    rng_key: jax.Array,
    *args: Any,
    path: str | os.PathLike[str],
    every: int = 1000,
    extra_fields: tuple[str, ...] = (),
    init_params: PyTree | None = None,
    **kwargs: Any,
) -> Result:
    """Do what ``mcmc.run(rng_key, *args, **kwargs)`` does, and keep the draws in a folder.

    A run that was interrupted, by whatever, goes on where it was when the same call is made again,
    in the same or another process, and ends with the draws of a run without interruption. Memory
    does not grow with the number of draws.

    Parameters
    ----------
    mcmc : numpyro.infer.MCMC
        With any kernel and any `chain_method`, before its run. A larger `num_samples` than that of
        a finished run adds draws to it.
    rng_key : jax.Array
    *args, **kwargs
        Of the model.
    path : str or os.PathLike
        Folder of the run. Made if it is not there.
    every : int
        Draws of each chain in a block, or transitions of warm-up: what a kill can cost.
    extra_fields, init_params
        As for ``mcmc.run``.

    Returns
    -------
    Result
        The draws, still on disk.

    Raises
    ------
    CheckpointError
        When `path` holds another run (the message tells what differs), is in use, or cannot be
        read or written. What is on disk stays.
    TypeError
        When `mcmc` is not a `numpyro.infer.MCMC`.
    ValueError
        For a bad argument, named.

    Warns
    -----
    UserWarning
        When files were damaged. Their draws are made again.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist, tempfile
    >>> from numpyro.infer import MCMC, NUTS
    >>> from ppl_ext import checkpoint
    >>> def model():
    ...     numpyro.sample("mu", dist.Normal(0, 1))
    >>> mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=100, progress_bar=False)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     result = checkpoint.run(mcmc, jax.random.key(0), path=path, every=40)
    ...     sizes = [chunk["z"]["mu"].shape for chunk in result.chunks()]
    ...     draws = result.load().get_samples()["mu"]
    >>> sizes, draws.shape
    ([(1, 40), (1, 40), (1, 20)], (100,))
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"checkpoint.run takes a numpyro.infer.MCMC, got {type(mcmc).__module__}."
            f"{type(mcmc).__name__}. Runs of Pyro's MCMC cannot be continued: write the model for "
            "NumPyro, or make several shorter runs with `initial_params` and save each."
        )
    check_count("checkpoint.run", every=every)
    if mcmc.post_warmup_state is not None:
        raise ValueError(
            "checkpoint.run does the warm-up itself: give it an MCMC on which neither `warmup` was "
            "called nor `post_warmup_state` set."
        )
    folder = _Folder(Path(path))
    with folder.locked():
        chains = _Chains(mcmc, rng_key, args, kwargs, tuple(extra_fields), init_params)
        state = chains.start()
        folder.open(chains.fingerprint(state))
        state = _complete(folder, chains, state, every)
    mcmc._args, mcmc._kwargs = args, kwargs
    mcmc._last_state = chains.joined(state)
    return Result(folder.path, mcmc, folder, chains)


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run on disk.

    Parameters
    ----------
    path : pathlib.Path
        Its folder.
    mcmc : numpyro.infer.MCMC
        It has `last_state`, and after `load` the draws.
    """

    path: Path
    mcmc: MCMC
    _folder: _Folder
    _chains: _Chains

    @property
    def num_draws(self) -> int:
        """Draws of each chain."""
        return sum(block["draws"] for block in self._folder.blocks)

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The draws of one block after the other: fields by name, (chain, draw) in front.

        The field of the sites is the kernel's `sample_field`, "z" for most.

        Raises
        ------
        CheckpointError
            When a file has been damaged since: make the call of `run` again.
        """
        for block in self._folder.blocks:
            if block["draws"]:
                yield self._folder.read(block, self._chains.collected, "draws")

    def load(self) -> MCMC:
        """Put all draws into `mcmc`, as its `run` would have, and return it."""
        chunks = list(self.chunks())
        self.mcmc._states = jax.tree.map(lambda *parts: np.concatenate(parts, 1), *chunks)
        self.mcmc._states_flat = None
        return self.mcmc

    def to_arviz(self, **kwargs: Any) -> Any:
        """All draws as `ppl_ext.to_arviz` gives them; takes what that takes."""
        return ppl_ext.to_arviz(self.load(), **kwargs)

    def __repr__(self) -> str:
        chains = "one chain" if self.mcmc.num_chains == 1 else f"{self.mcmc.num_chains} chains"
        return f"<{chains} of {self.num_draws} draws in {self.path}>"


def _complete(folder: _Folder, chains: _Chains, start: PyTree, every: int) -> PyTree:
    """Make all blocks that are not there, and return the last state."""
    mcmc = chains.mcmc
    lead, end = chains.lead, mcmc.num_warmup + mcmc.num_samples
    if folder.end > end:
        raise CheckpointError(
            f"The run in '{folder.path}' has {folder.end - lead} transitions after warm-up, more "
            f"than `num_samples` = {mcmc.num_samples}: raise `num_samples`, or take another path."
        )
    bar = tqdm(total=end, initial=folder.end, disable=not mcmc.progress_bar, unit="it")
    with bar:
        previous = None
        for block in folder.blocks:
            if block["file"] in folder.damaged:
                state = start if previous is None else folder.read(previous, start, "state")
                state, draws = chains.advance(state, block["last"] - block["first"], block["draws"])
                folder.replace(block, state, draws)
            previous = block
        state = start if previous is None else folder.read(previous, start, "state")
        while folder.end < end:
            first = folder.end
            if first < lead:
                bar.set_description("warmup", refresh=False)
                count, kept = min(every, lead - first), 0
            else:
                bar.set_description("sample", refresh=False)
                kept = min(every, (end - first) // mcmc.thinning)
                count = kept * mcmc.thinning
            state, draws = chains.advance(state, count, kept, bar)
            folder.append(first, first + count, kept, state, draws)
    return state


class _Chains:
    """The kernel's chains as `MCMC` runs them, advanced by a given number of transitions."""

    def __init__(
        self,
        mcmc: MCMC,
        rng_key: jax.Array,
        args: tuple,
        kwargs: dict[str, Any],
        extra_fields: tuple[str, ...],
        init_params: PyTree | None,
    ) -> None:
        self.mcmc, self.kernel = mcmc, mcmc.sampler
        self.args, self.kwargs = args, kwargs
        self.lead = mcmc.num_warmup + mcmc.num_samples % mcmc.thinning
        several = mcmc.num_chains > 1
        self.method = mcmc.chain_method if several else "single"
        self.key = rng_key
        if several and is_prng_key(rng_key):
            self.key = jax.random.split(rng_key, mcmc.num_chains)
        self.init_params = jax.tree.map(
            lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), init_params
        )
        sample_field = self.kernel.sample_field
        names = (sample_field, *self.kernel.default_fields, *extra_fields)
        removed = f"~{sample_field}."
        self.fields = tuple(dict.fromkeys(n for n in names if not n.startswith(removed)))
        self.removed = {n.removeprefix(removed) for n in names if n.startswith(removed)}
        # arguments of the program, or constants in it
        self.data = (args, kwargs) if mcmc._jit_model_args else None
        self.size = 1

    def start(self) -> PyTree:
        """First states: of all chains together, or a tuple with that of each."""

        def init(start: tuple[jax.Array, PyTree | None]) -> PyTree:
            key, params = start
            return self.kernel.init(
                key, self.mcmc.num_warmup, params, model_args=self.args, model_kwargs=self.kwargs
            )

        starts = (self.key, self.init_params)
        if self.method == "sequential":
            every = [jax.tree.map(lambda x, i=i: x[i], starts) for i in range(self.mcmc.num_chains)]
            state = tuple(map(init, every))
        elif self.method == "parallel":
            state = jax.pmap(init)(starts)
        else:
            state = (self.method(init) if callable(self.method) else init)(starts)
        # Python's numbers in a state would be of another type after the first transition
        state = jax.tree.map(
            lambda x: x if _is_typed(x) else jnp.array(x, jnp.result_type(x)), state
        )
        one = state[0] if self.method == "sequential" else state
        if callable(self.method) or self.method == "parallel":
            one = jax.eval_shape(lambda state: jax.tree.map(lambda x: x[0], state), state)
        self.collected = jax.eval_shape(lambda state: self._collect(state, *self._model(None)), one)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.collected))
        self.capacity = int(np.clip(BUFFER_BYTES // max(size, 1), 1, MAX_DRAWS))
        self.program = self._compiled()
        return state

    def _model(self, data: Any) -> tuple[tuple, dict[str, Any]]:
        return (self.args, self.kwargs) if data is None else data

    def _collect(self, state: PyTree, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        values = nested_attrgetter(*self.fields)(state)
        found = dict(zip(self.fields, (values,) if len(self.fields) == 1 else values, strict=True))
        constrain = self.mcmc.postprocess_fn or self.kernel.postprocess_fn(args, kwargs)
        sites = found[self.fields[0]]
        if self.method == "vectorized" and jax.tree.leaves(sites):
            constrain = jax.vmap(constrain)
        sites = constrain(sites)
        if self.removed:
            sites = {name: x for name, x in sites.items() if name not in self.removed}
        return {**found, self.fields[0]: sites}

    def _compiled(self) -> Any:
        """`count` draws, each after `thinning` transitions: one program for the whole run."""

        def block(state: PyTree, count: jax.Array, thinning: jax.Array, data: Any) -> Any:
            args, kwargs = self._model(data)

            def step(_: Any, state: PyTree) -> PyTree:
                return self.kernel.sample(state, args, kwargs)

            def draw(i: jax.Array, carry: Any) -> Any:
                state = jax.lax.fori_loop(0, thinning, step, carry[0])
                kept = self._collect(state, args, kwargs)
                return state, jax.tree.map(lambda b, x: b.at[i].set(x), carry[1], kept)

            buffers = jax.tree.map(
                lambda x: jnp.zeros((self.capacity, *x.shape), x.dtype), self.collected
            )
            return jax.lax.fori_loop(0, count, draw, (state, buffers))

        if self.method == "parallel":
            return jax.pmap(block, in_axes=(0, None, None, None))
        if callable(self.method):
            over: Callable[..., Any] = self.method
            return jax.jit(lambda state, *rest: over(lambda state: block(state, *rest))(state))
        return jax.jit(block)

    def advance(
        self, state: PyTree, count: int, kept: int, bar: Any = None
    ) -> tuple[PyTree, dict[str, Any] | None]:
        """The state after `count` transitions, and the `kept` draws, (chain, draw) in front."""
        thinning, left = (count // kept, kept) if kept else (1, count)
        parts = []
        while left:
            size = min(self.size, self.capacity, left)
            started = time.perf_counter()
            state, draws = self._call(state, size, thinning)
            seconds = max(time.perf_counter() - started, 1e-6)
            # the first call contains the compilation: its time says nothing
            wanted = int(size * SECONDS_PER_CALL / seconds)
            self.size = int(np.clip(wanted, 1, 4 * size if size > 1 else 16))
            left -= size
            if kept:
                parts.append(draws)
            if bar is not None:
                if self.mcmc.num_chains == 1:
                    bar.set_postfix_str(self.kernel.get_diagnostics_str(state), refresh=False)
                bar.update(size * thinning)
        if not kept:
            return state, None
        return state, jax.tree.map(lambda *arrays: np.concatenate(arrays, 1), *parts)

    def _call(self, state: PyTree, size: int, thinning: int) -> tuple[PyTree, dict[str, Any]]:
        rest = (np.int32(size), np.int32(thinning), self.data)
        if self.method == "sequential":
            states, every = zip(*[self.program(one, *rest) for one in state], strict=True)
            return states, jax.tree.map(
                lambda *x: np.stack([np.asarray(b)[:size] for b in x]), *every
            )
        state, draws = self.program(state, *rest)
        if self.method == "single":
            return state, jax.tree.map(lambda x: np.asarray(x)[None, :size], draws)
        if self.method == "vectorized":
            return state, jax.tree.map(lambda x: np.asarray(x)[:size].swapaxes(0, 1), draws)
        return state, jax.tree.map(lambda x: np.asarray(x)[:, :size], draws)

    def joined(self, state: PyTree) -> PyTree:
        """The state as `MCMC` has it in `last_state`."""
        if self.method != "sequential":
            return state
        return jax.tree.map(lambda *parts: jnp.stack(parts), *state)

    def fingerprint(self, state: PyTree) -> dict[str, Any]:
        """What makes a run this run: equal for equal draws, and readable."""
        mcmc, kernel = self.mcmc, self.kernel
        one = state[0] if self.method == "sequential" else state
        # by shapes: where the start lies is no part of the program
        one = jax.eval_shape(lambda state: state, one)
        program = self.program.lower(one, np.int32(1), np.int32(1), self.data).as_text()
        plain = (bool, int, float, str, type(None))
        own = vars(kernel)
        # where the kernels of ppl_ext have them
        of_algorithm = own.get("_settings")
        if is_dataclass(of_algorithm):
            own = {**own, **vars(of_algorithm)}
        settings = {n.lstrip("_"): v for n, v in own.items() if isinstance(v, plain)}
        return {
            "versions": {
                "checkpoint": FORMAT,
                "ppl_ext": ppl_ext.__version__,
                "numpyro": numpyro.__version__,
                "jax": jax.__version__,
            },
            "platform": jax.default_backend(),
            "float64": bool(jnp.result_type(float) == np.float64),
            "kernel": f"{type(kernel).__module__}.{type(kernel).__qualname__}",
            "num_warmup": mcmc.num_warmup,
            "thinning": mcmc.thinning,
            "skipped draws": mcmc.num_samples % mcmc.thinning,
            "num_chains": mcmc.num_chains,
            "chain_method": getattr(self.method, "__qualname__", str(self.method)),
            "fields": [*self.fields, *sorted(f"~{name}" for name in self.removed)],
            "rng_key": _digest(self.key),
            "init_params": _digest(self.init_params),
            "model arguments": _digest((self.args, self.kwargs)),
            "settings": settings,
            "program": hashlib.sha256(program.encode()).hexdigest(),
            "start": _digest(state),
        }


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two fingerprints, the cause and not its consequences."""
    computed = ("settings", "program", "start")
    told = [
        f"{name} ({_short(old.get(name))} there, {_short(new[name])} here)"
        for name in new
        if name not in computed and old.get(name) != new[name]
    ]
    if told or all(old.get(name) == new[name] for name in ("program", "start")):
        return told
    before, now = old.get("settings", {}), new["settings"]
    told = [
        f"{name} of the kernel ({before.get(name)} there, {now.get(name)} here)"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if told:
        return told
    if old.get("program") != new["program"]:
        return ["the model, or a setting of the kernel"]
    return ["the starting point (`init_strategy` of the kernel, or the machine)"]


def _short(value: Any) -> str:
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else str(value)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _is_typed(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x: Any) -> np.ndarray:
    """The numbers of an array or of random keys."""
    return np.asarray(jax.random.key_data(x) if _is_typed(x) else x)


def _digest(tree: PyTree) -> str:
    """SHA-256 of the arrays of `tree`, and of what else it holds by its text."""
    found = hashlib.sha256(str(jax.tree.structure(tree)).encode())
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ndarray | np.generic | jax.Array):
            array = _plain(leaf)
            found.update(f"{array.dtype.str}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        else:
            found.update(_ADDRESS.sub("", repr(leaf)).encode())
    return found.hexdigest()


def _named(tree: PyTree, prefix: str) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


class _Folder:
    """A run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[dict[str, Any]] = []
        self.damaged: set[str] = set()
        self._fingerprint: dict[str, Any] = {}

    @property
    def end(self) -> int:
        """Transitions made so far, warm-up included."""
        return self.blocks[-1]["last"] if self.blocks else 0

    # --- for one process at a time -----------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out."""
        import fcntl  # which Windows lacks

        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("a+")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                raise CheckpointError(
                    f"'{self.path}' is in use by {owner}: wait for it, or take another path."
                ) from None
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {os.uname().nodename}")
            lock.flush()
            yield

    def open(self, fingerprint: dict[str, Any]) -> None:
        """Take up the run that is there, or begin one."""
        # as JSON would give it back
        self._fingerprint = json.loads(json.dumps(fingerprint))
        with self._explained():
            present = {entry.name for entry in self.path.iterdir()}
            for name in present:
                if name.endswith(_PARTIAL):
                    (self.path / name).unlink()
            manifest = self._manifest(present)
            if manifest is None:
                self._write_manifest()
                return
            different = _differences(manifest["fingerprint"], self._fingerprint)
            if different:
                raise CheckpointError(
                    f"'{self.path}' holds another run. What differs: {'; '.join(different)}. Take "
                    "another path, or restore what differs."
                )
            self.blocks = manifest["blocks"]
            known = {block["file"] for block in self.blocks}
            for name in present:
                # written, but not yet in the manifest
                if name.startswith("block-") and not name.endswith(_PARTIAL) and name not in known:
                    (self.path / name).unlink()
            self.damaged = {b["file"] for b in self.blocks if self._bytes(b) is None}
        if self.damaged:
            warnings.warn(
                f"'{self.path}': {', '.join(sorted(self.damaged))} is damaged or missing. Its "
                "draws are made again.",
                stacklevel=3,
            )

    def _manifest(self, present: set[str]) -> dict[str, Any] | None:
        for name in (_MANIFEST, _PREVIOUS):
            if name in present:
                try:
                    found = json.loads((self.path / name).read_bytes())
                    content = found["content"]
                    if found["sha256"] == _json_digest(content):
                        return content
                except (ValueError, KeyError, TypeError):
                    pass
                warnings.warn(
                    f"'{self.path / name}' is damaged; the one before it is used.", stacklevel=4
                )
        foreign = present - {_LOCK}
        foreign = {name for name in foreign if not name.endswith(_PARTIAL)}
        if foreign:
            raise CheckpointError(
                f"'{self.path}' holds files ({', '.join(sorted(foreign)[:3])}) but no manifest "
                "of a run that can be read. Take another path, or restore the manifest."
            )
        return None

    # --- blocks ------------------------------------------------------------------------------

    def append(
        self, first: int, last: int, draws: int, state: PyTree, fields: dict[str, Any] | None
    ) -> None:
        """Write the block of the transitions from `first` to `last`."""
        block = {"file": f"block-{last:012d}.npz", "first": first, "last": last, "draws": draws}
        superseded = None
        if self.blocks and not draws:
            # of warm-up only the last state is of use
            superseded = self.blocks[-1]["file"]
            block["first"] = 0
        self._write_block(block, state, fields)
        self.blocks = [*self.blocks[: -1 if superseded else None], block]
        self._write_manifest()
        if superseded:
            with self._explained():
                (self.path / superseded).unlink(missing_ok=True)

    def replace(self, block: dict[str, Any], state: PyTree, fields: dict[str, Any] | None) -> None:
        """Write a damaged block again."""
        self._write_block(block, state, fields)
        self._write_manifest()
        self.damaged.discard(block["file"])

    def read(self, block: dict[str, Any], like: PyTree, prefix: str) -> Any:
        """The part `prefix` of a block, a tree like `like`."""
        with self._explained():
            content = self._bytes(block)
        if content is None:
            raise CheckpointError(
                f"'{self.path / block['file']}' is damaged or missing. Make the call of "
                "checkpoint.run again, which makes its draws again."
            )
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                leaves = [_like(arrays[name], leaf) for name, leaf in _named(like, prefix).items()]
        except (ValueError, KeyError, BadZipFile) as error:
            raise CheckpointError(
                f"'{self.path / block['file']}' holds other arrays than this run writes ({error}). "
                "Delete it, and make the call of checkpoint.run again."
            ) from error
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _bytes(self, block: dict[str, Any]) -> bytes | None:
        """Content of a block's file if it is whole."""
        try:
            content = (self.path / block["file"]).read_bytes()
        except FileNotFoundError:
            return None
        return content if hashlib.sha256(content).hexdigest() == block["sha256"] else None

    def _write_block(
        self, block: dict[str, Any], state: PyTree, fields: dict[str, Any] | None
    ) -> None:
        arrays = {**_named(state, "state"), **_named(fields or {}, "draws")}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **{n: _plain(x) for n, x in arrays.items()})
        content = buffer.getvalue()
        block["sha256"] = hashlib.sha256(content).hexdigest()
        self._write(block["file"], content)

    def _write_manifest(self) -> None:
        content = {"fingerprint": self._fingerprint, "blocks": self.blocks}
        text = json.dumps({"content": content, "sha256": _json_digest(content)}, indent=1)
        with self._explained():
            if (self.path / _MANIFEST).exists():
                os.replace(self.path / _MANIFEST, self.path / _PREVIOUS)
        self._write(_MANIFEST, text.encode())

    def _write(self, name: str, content: bytes) -> None:
        """All of the file, or the file as it was."""
        target, partial = self.path / name, self.path / f"{name}{_PARTIAL}"
        with self._explained():
            try:
                with open(partial, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
            directory = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the system as ours, which say what to do."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            safe = sum(block["draws"] for block in self.blocks)
            reason = f"{error.strerror or error} ({error.filename or self.path})"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what = f"free some space: {safe} draws of each chain are safe in '{self.path}'"
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                what = f"make '{self.path}' writable, or take another path"
            else:
                what = f"see that '{self.path}' is a folder that can be read and written"
            raise CheckpointError(
                f"{reason}: {what}. The same call then goes on with the run."
            ) from error


def _like(array: np.ndarray, leaf: Any) -> Any:
    """An array of a file as `leaf` is: random keys, and on the same devices."""
    if _is_typed(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if array.dtype.kind == "V":
        # of JAX's own types, which NumPy's files do not know
        array = array.view(leaf.dtype)
    return jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array


def _json_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
