"""Runs on disk: the draws of a run without interruption, whatever happens to it."""

import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections import namedtuple
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import HMC, MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel

from ppl_ext import checkpoint
from ppl_ext.errors import CheckpointError
from ppl_ext.numpyro import ULD

State = namedtuple("State", ["i", "z", "moved", "rng_key"])


class Walk(MCMCKernel):
    """A random walk whose step shrinks in warm-up: it compiles in no time."""

    sample_field = "z"
    default_fields = ("z", "moved")
    model = None

    def __init__(self, step=1.0):
        self.step = step
        self.drift = lambda: 0.0

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        self.num_warmup = num_warmup
        many = np.shape(rng_key)
        # Python's numbers, as kernels may have them
        return State(jnp.zeros(many, int) if many else 0, {"x": jnp.zeros(many)}, 0.0, rng_key)

    def sample(self, state, model_args, model_kwargs):
        shift = model_args[0].sum() + self.drift()

        def one(i, x, key):
            key, draw = jax.random.split(key)
            step = jnp.where(i < self.num_warmup, self.step / (1 + i), self.step)
            return i + 1, x + step * jax.random.normal(draw) + shift, key

        one = jax.vmap(one) if np.shape(state.rng_key) else one
        i, x, key = one(state.i, state.z["x"], state.rng_key)
        return State(i, {"x": x}, jnp.mean(jnp.abs(x - state.z["x"])), key)


Y = np.array([0.25, -0.125], np.float32)


def walk(num_samples=20, kernel=None, num_warmup=7, **options):
    return MCMC(
        kernel or Walk(), num_warmup=num_warmup, num_samples=num_samples,
        **{"progress_bar": False, **options},
    )  # fmt: skip


def go(path, mcmc=None, key=0, y=Y, every=4, **options):
    return checkpoint.run(mcmc or walk(), jax.random.key(key), y, path=path, every=every, **options)


def draws(result):
    return np.asarray(result.load().get_samples(group_by_chain=True)["x"])


@pytest.fixture(scope="module")
def whole():
    mcmc = walk()
    mcmc.run(jax.random.key(0), Y)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["x"])


def trees_equal(a, b):
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(plain(x), plain(y)), a, b)


# --- the draws of `mcmc.run` ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thinning": 3},
        {"jit_model_args": True},
        {"num_chains": 2, "chain_method": "sequential"},
        {"num_chains": 2, "chain_method": "parallel"},
        {"num_chains": 2, "chain_method": jax.vmap},
    ],
    ids=["one chain", "thinning", "data as arguments", "sequential", "parallel", "a function"],
)
def test_draws_are_those_of_mcmc_run(tmp_path, options):
    mcmc = walk(**options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers")
        mcmc.run(jax.random.key(0), Y, extra_fields=("i",))
    result = go(tmp_path, walk(**options), extra_fields=("i",))
    np.testing.assert_array_equal(
        draws(result), np.asarray(mcmc.get_samples(group_by_chain=True)["x"])
    )
    trees_equal(result.mcmc.get_extra_fields(), mcmc.get_extra_fields())
    trees_equal(result.mcmc.last_state, mcmc.last_state)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.deterministic("twice", 2 * mu)
    numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


@pytest.mark.arviz
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(partial(HMC, num_steps=3, trajectory_length=None), marks=pytest.mark.slow),
        pytest.param(NUTS, marks=pytest.mark.slow),
        pytest.param(ULD, marks=pytest.mark.slow),
    ],
    ids=["HMC", "NUTS", "ULD"],
)
def test_draws_of_adapting_kernels_too(tmp_path, kernel):
    options = dict(num_warmup=30, num_chains=2, chain_method="vectorized")
    fields = ("potential_energy", "~z.sigma")
    mcmc = walk(kernel=kernel(model), **options)
    mcmc.run(jax.random.key(0), Y, extra_fields=fields)
    result = go(tmp_path, walk(kernel=kernel(model), **options), every=8, extra_fields=fields)
    trees_equal(result.load()._states, mcmc._states)
    trees_equal(result.mcmc.last_state, mcmc.last_state)
    data = result.to_arviz()
    assert data["posterior"]["twice"].shape == (2, 20) and "sigma" not in data["posterior"]


def test_chunks_are_read_one_by_one(tmp_path, whole):
    result = go(tmp_path)
    assert result.num_draws == 20 and "one chain of 20 draws" in repr(result)
    assert result.mcmc._states is None
    chunks = list(result.chunks())
    assert [chunk["z"]["x"].shape for chunk in chunks] == [(1, 4)] * 5
    np.testing.assert_array_equal(np.concatenate([c["z"]["x"] for c in chunks], 1), whole)
    assert len(list(tmp_path.glob("block-*"))) == 6  # with the state after warm-up


def test_a_finished_run_can_be_made_longer(tmp_path):
    mcmc = walk(31)
    mcmc.run(jax.random.key(0), Y)
    go(tmp_path, walk(17))
    np.testing.assert_array_equal(
        draws(go(tmp_path, walk(31), every=5))[0], np.asarray(mcmc.get_samples()["x"])
    )
    with pytest.raises(CheckpointError, match="more than `num_samples` = 20"):
        go(tmp_path, walk(20))


def test_the_progress_bar_tells_rate_and_time_left(tmp_path, capsys, progress_bar_possible):
    go(tmp_path, walk(progress_bar=True))
    shown = capsys.readouterr().err
    assert "sample: 100%" in shown and "27/27" in shown and "it/s" in shown and "<" in shown


# --- killed --------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no handler of errors catches."""


def test_killed_at_changes_of_the_folder(tmp_path, monkeypatch, whole):
    """Each run dies before or after its n-th change, and the next one goes on."""
    path = tmp_path / "run"
    left = changes = 0
    before = True

    def watched(name):
        real = getattr(os, name)

        def change(*args, **kwargs):
            nonlocal left, changes
            if name != "fsync" and path not in Path(args[0]).parents:
                return real(*args, **kwargs)
            left, changes = left - 1, changes + 1
            if left == 0 and before:
                raise Killed
            try:
                return real(*args, **kwargs)
            finally:
                if left == 0:
                    raise Killed

        return change

    for name in ("replace", "fsync", "unlink"):
        monkeypatch.setattr(os, name, watched(name))
    ends = [7, 3, 1, 2, 5, 8, 6, 9, 11, 10, 12]
    for i, left in enumerate(ends):  # noqa: B007
        before = i % 2 == 0
        with pytest.raises(Killed):
            go(path)
    left = 10_000
    np.testing.assert_array_equal(draws(go(path)), whole)
    assert changes > sum(ends)


SCRIPT = """
import sys
import jax, numpy as np
sys.path.insert(0, {folder!r})
from tests.test_checkpoint import Y, go, walk
print("running", flush=True)
go(sys.argv[1], walk({num_samples}), every=20)
"""


def test_killed_by_the_system(tmp_path):
    num_samples = 20_000
    path = tmp_path / "run"
    folder = str(Path(__file__).parents[1])
    script = SCRIPT.format(folder=folder, num_samples=num_samples)
    process = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
    process.stdout.readline()
    while process.poll() is None and blocks_of(path) < 2:
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it finished too soon"
    process.stdout.close()
    assert 1 < blocks_of(path) < 1001
    mcmc = walk(num_samples)
    mcmc.run(jax.random.key(0), Y)
    result = go(path, walk(num_samples), every=1000)
    np.testing.assert_array_equal(draws(result)[0], np.asarray(mcmc.get_samples()["x"]))


def blocks_of(path):
    for name in ("manifest.json", "manifest.previous.json"):
        if (path / name).exists():
            return len(json.loads((path / name).read_text())["content"]["blocks"])
    return 0


# --- another run ---------------------------------------------------------------------------------


class Run(Walk):
    pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(y=Y + 1), "model arguments"),
        (dict(key=1), "rng_key"),
        (dict(mcmc=lambda: walk(num_warmup=8)), r"num_warmup \(7 there, 8 here\)"),
        (dict(mcmc=lambda: walk(thinning=2)), r"thinning \(1 there, 2 here\)"),
        (dict(mcmc=lambda: walk(num_chains=2, chain_method="sequential")), "num_chains"),
        (dict(mcmc=lambda: walk(kernel=Run())), r"kernel \(.*Walk there, .*Run here\)"),
        (dict(mcmc=lambda: walk(kernel=Walk(2.0))), r"step of the kernel \(1.0 there, 2.0 here\)"),
        (dict(extra_fields=("i",)), "fields"),
        (dict(init_params=jnp.ones(())), "init_params"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_of_another_run_is_refused_with_what_differs(tmp_path, whole, change, words):
    go(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*[nz]")}
    change = {**change, "mcmc": change["mcmc"]()} if "mcmc" in change else change
    with pytest.raises(CheckpointError, match=f"another run. What differs: [^;]*{words}"):
        go(tmp_path, **change)
    assert {path: path.read_bytes() for path in tmp_path.glob("*[nz]")} == before
    np.testing.assert_array_equal(draws(go(tmp_path)), whole)


def test_another_model_or_version_is_refused(tmp_path, monkeypatch):
    def at(drift):
        kernel = Walk()
        kernel.drift = lambda: drift
        return walk(kernel=kernel)

    go(tmp_path, at(0.0))
    with pytest.raises(CheckpointError, match="What differs: the model, or a setting"):
        go(tmp_path, at(1.0))
    monkeypatch.setattr("numpyro.__version__", "0.0")
    with pytest.raises(CheckpointError, match=r"What differs: versions .*'numpyro': '0.0'"):
        go(tmp_path, at(0.0))


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"holds files \(thesis.tex\)"):
        go(tmp_path)
    file = tmp_path / "thesis.tex"
    with pytest.raises(CheckpointError, match="is a folder that can be read and written"):
        go(file)


# --- damage --------------------------------------------------------------------------------------


def blocks(path):
    return sorted(path.glob("block-*"))


@pytest.mark.parametrize(
    ("damage", "place"),
    [("truncated", 0), ("truncated", -1), ("changed", 1), ("deleted", 0), ("deleted", 3)],
)
def test_damaged_blocks_are_made_again_and_the_others_stay(tmp_path, whole, place, damage):
    result = go(tmp_path)
    every = blocks(tmp_path)
    file = every[place]
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        half = len(content) // 2
        file.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    else:
        file.unlink()
    if place:
        with pytest.raises(CheckpointError, match=f"{file.name}' is damaged or missing"):
            result.load()
    stamps = {other: other.stat().st_mtime_ns for other in every if other != file}
    with pytest.warns(UserWarning, match=f"{file.name} is damaged or missing"):
        again = go(tmp_path)
    np.testing.assert_array_equal(draws(again), whole)
    assert {other: other.stat().st_mtime_ns for other in stamps} == stamps
    assert file.read_bytes() == content


def test_a_damaged_manifest_costs_the_last_block(tmp_path, whole):
    go(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"first": 7', '"first": 8'))
    with pytest.warns(UserWarning, match=r"manifest\.json' is damaged; the one before"):
        again = go(tmp_path)
    np.testing.assert_array_equal(draws(again), whole)
    manifest.write_text("{")
    (tmp_path / "manifest.previous.json").unlink()
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(CheckpointError, match="but no manifest"),
    ):
        go(tmp_path)
    assert len(blocks(tmp_path)) == 6


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_files_cannot_run_code(tmp_path, monkeypatch):
    """A file of pickles, even with the right checksum in a manifest with the right checksum."""
    monkeypatch.chdir(tmp_path)
    result = go(tmp_path / "run")
    block = result._folder.blocks[-1]
    with np.load(tmp_path / "run" / block["file"]) as arrays:
        bombs = {name: np.array([Bomb()], object) for name in arrays}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, **bombs)
    assert b"mkdir" in buffer.getvalue()
    (tmp_path / "run" / block["file"]).write_bytes(buffer.getvalue())
    block["sha256"] = hashlib.sha256(buffer.getvalue()).hexdigest()
    result._folder._write_manifest()
    with pytest.raises(CheckpointError, match="holds other arrays than this run"):
        go(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds other arrays than this run"):
        result.load()
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "exploded").exists()


# --- the system ----------------------------------------------------------------------------------


def test_two_processes_on_one_path(tmp_path, whole):
    with open(tmp_path / "lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 1 on host")
        lock.flush()
        with pytest.raises(CheckpointError, match="in use by process 1 on host"):
            go(tmp_path)
    np.testing.assert_array_equal(draws(go(tmp_path)), whole)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            errno.ENOSPC,
            "No space left on device .*: free some space: 8 draws of each chain are safe",
        ),
        (errno.EROFS, "Read-only file system .*: make '.*' writable, or take another path"),
        (errno.EIO, "can be read and written"),
    ],
    ids=errno.errorcode.get,
)
def test_a_disk_that_fails_costs_nothing(tmp_path, monkeypatch, whole, number, words):
    real, count = os.fsync, 0

    def fsync(file):
        nonlocal count
        count += 1
        if count == 19:
            raise OSError(number, os.strerror(number))
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError, match=words):
            go(tmp_path)
    assert not list(tmp_path.glob("*.part"))
    np.testing.assert_array_equal(draws(go(tmp_path)), whole)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(CheckpointError, match=r"make '.*' writable"):
        go(tmp_path / "run")
    tmp_path.chmod(0o755)


# --- arguments -----------------------------------------------------------------------------------


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"takes a numpyro.infer.MCMC, got .*Walk"):
        go(tmp_path, Walk())
    with pytest.raises(ValueError, match="`every` must be an integer from 1"):
        go(tmp_path, every=0)
    mcmc = walk()
    mcmc.warmup(jax.random.key(0), Y)
    with pytest.raises(ValueError, match="neither `warmup` was called nor"):
        go(tmp_path, mcmc)
    assert not list(tmp_path.iterdir())
