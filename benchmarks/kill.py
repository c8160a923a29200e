"""Kill a run of ppl_ext.checkpoint at random moments, and count what is lost.

A process samples with NUTS and is killed (SIGKILL): half the time at a random moment before it
writes, half the time within two seconds after it has written a block. The next process makes the
same call. When a run is finished, its draws are compared with those of `mcmc.run`, bit for bit, and
another run begins, until there were `--kills` kills. After each kill the draws in the folder are
compared, too.

python benchmarks/kill.py [--kills 100] [--quick] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from ppl_ext import checkpoint

NUM_WARMUP, NUM_SAMPLES, EVERY = 1000, 10_000, 50


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 5).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(x @ slope, sigma), obs=y)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(x.sum(1) + rng.normal(size=50).astype(np.float32))


def mcmc():
    return MCMC(NUTS(model), num_warmup=NUM_WARMUP, num_samples=NUM_SAMPLES, progress_bar=False)


def child(path):
    checkpoint.run(mcmc(), jax.random.key(0), *data(), path=path, every=EVERY)


def kept(path, reference):
    """Draws in the folder after a kill, read without ppl_ext, and whether all are the right ones.

    Files that the manifest does not list count as lost.
    """
    names = [path / "manifest.json", path / "manifest.previous.json"]
    manifest = next((name for name in names if name.exists()), None)
    if manifest is None:
        return 0, True
    count, right = 0, True
    for block in json.loads(manifest.read_text())["content"]["blocks"]:
        if block["draws"]:
            with np.load(path / block["file"]) as arrays:
                for name, values in reference.items():
                    found = arrays[f"draws['z']['{name}']"][0]
                    right &= np.array_equal(found, values[count : count + block["draws"]])
            count += block["draws"]
    return count, right


def wait(process, seconds):
    """At most `seconds`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="four kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    wanted = 4 if options.quick else options.kills
    chance = random.Random(options.seed)
    whole = mcmc()
    whole.run(jax.random.key(0), *data())
    reference = {name: np.asarray(values) for name, values in whole.get_samples().items()}
    kills = runs = before = 0
    wrong = went_back = added = 0
    with tempfile.TemporaryDirectory() as folder:
        # a killed process compiles once only
        cache = dict(
            JAX_COMPILATION_CACHE_DIR=f"{folder}/cache",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        command = [sys.executable, __file__, "--child"]
        child_of = lambda path: subprocess.Popen(  # noqa: E731
            [*command, str(path)], env={**os.environ, **cache}
        )
        # the first run compiles; the second tells the time until a run writes a block
        for name in ("warm-up-0", "warm-up-1"):
            started, path = time.perf_counter(), Path(folder, name)
            process = child_of(path)
            while not any(path.glob("block-*.npz")):
                time.sleep(0.1)
            seconds = time.perf_counter() - started
            process.kill()
            process.wait()
        print(f"the first block is written after {seconds:.1f} s", flush=True)
        while True:
            path = Path(folder, f"run-{runs}")
            process = child_of(path)
            if kills < wanted:
                if chance.random() < 0.5:
                    wait(process, chance.uniform(0, seconds))
                else:
                    known = set(path.glob("block-*.npz"))
                    while process.poll() is None and set(path.glob("block-*.npz")) <= known:
                        time.sleep(0.005)
                    wait(process, chance.uniform(0, 2))
            else:
                process.wait()
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                count, right = kept(path, reference)
                wrong += not right
                went_back += count < before
                added += count > before
                before = count
                if kills % 10 == 0:
                    print(f"{kills} kills: {wrong} wrong, {went_back} with fewer draws", flush=True)
                continue
            if process.returncode != 0:
                raise SystemExit(f"the run failed with exit code {process.returncode}")
            count, right = kept(path, reference)
            wrong += not right or count != NUM_SAMPLES
            runs, before = runs + 1, 0
            print(f"run {runs} is finished: {wrong} wrong", flush=True)
            if kills >= wanted:
                break
    print(
        f"{kills} kills, {runs} runs of {NUM_WARMUP} + {NUM_SAMPLES:,} transitions in blocks of "
        f"{EVERY}\n"
        f"folders with a draw that is not that of `mcmc.run`, or without one: {wrong}\n"
        f"kills after which there were fewer draws than before: {went_back}\n"
        f"kills between which at least one block was added: {added}"
    )
    if wrong or went_back:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
