"""Chains over devices: the same draws however they are laid out; errors; the cache."""

import os
import subprocess
import sys

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import AIES, HMC, MCMC

from ppl_ext import devices
from ppl_ext.numpyro import DirichletProcess, DPSlice


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


Y = np.arange(4.0, dtype=np.float32) / 4


def draws(mcmc):
    mcmc.run(jax.random.key(0), Y)
    assert mcmc.get_samples(group_by_chain=True)["mu"].shape == (mcmc.num_chains, 10)
    return mcmc.get_samples(group_by_chain=True)


def compare(layouts, num_chains):
    """A fixed step size, so that rounding cannot grow much in ten draws."""
    kernel = lambda: HMC(  # noqa: E731
        model, num_steps=3, trajectory_length=None, step_size=0.1, adapt_step_size=False,
        adapt_mass_matrix=False,
    )  # fmt: skip
    options = dict(num_warmup=2, num_samples=10)
    one_by_one = MCMC(
        kernel(), num_chains=num_chains, chain_method="sequential", progress_bar=False, **options
    )
    expected = draws(one_by_one)
    assert len(np.unique(expected["mu"])) > 5 * num_chains
    for layout in layouts:
        plan = devices.plan(kernel(), num_chains=num_chains, **layout)
        mcmc = devices.apply(plan, kernel(), **{"progress_bar": False, **options})
        found = draws(mcmc)
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=1e-5)
        if plan.num_devices > 1:
            # each device has made its own
            assert len(mcmc.last_state.z["mu"].sharding.device_set) == plan.num_devices


def test_layouts_agree():
    """The devices of tests/conftest.py."""
    compare([dict(num_devices=2, chunk=1)], num_chains=4)


@pytest.mark.slow
def test_layouts_agree_on_eight_devices():
    layouts = [{}, dict(num_devices=4), dict(num_devices=2, chunk=2), dict(num_devices=1, chunk=3)]
    script = f"from tests.test_devices import compare; compare({layouts!r}, 8)"
    flags = "--xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "XLA_FLAGS": flags}
    )


def test_a_plan_is_printed():
    assert str(devices.plan(num_chains=4)) == (
        "4 chains on 2 devices (cpu, float32), 2 on each, all at once; chain_method: a function"
    )
    assert str(devices.plan(num_chains=3)) == (
        "3 chains on one device (cpu, float32), all at once; chain_method: vectorized"
    )
    assert devices.plan(num_chains=4, chunk=7).chunk == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(num_chains=4, num_devices=3), r"is 3, but JAX sees 2: .*set_host_devices\(3\)"),
        (dict(num_chains=3, num_devices=2), r"3 chains .* over 2 devices: take `num_chains` = 4"),
        (dict(num_chains=4, dtype="float64"), r"computes in float32: call numpyro.enable_x64\(\)"),
        (dict(num_chains=4, dtype="int8"), "`dtype` must be"),
        (dict(num_chains=0), "`num_chains` must be"),
        (dict(num_chains=4, chunk=0), "`chunk` must be"),
        (dict(num_chains=4, kernel=AIES(model)), "chains of AIES depend on each other"),
    ],
    ids=["devices", "uneven", "float64", "dtype", "no chain", "no chunk", "ensemble"],
)
def test_bad_plans_are_refused(options, words):
    kernel = options.pop("kernel", None)
    with pytest.raises(ValueError, match=words):
        devices.plan(kernel, **options)


def test_bad_arguments_of_apply_are_named():
    with pytest.raises(TypeError, match="`num_chains` belongs to the plan"):
        devices.apply(devices.plan(num_chains=4), HMC(model), num_chains=4)


def test_float64_where_it_is_enabled(x64):
    assert devices.plan(num_chains=2, dtype="float64").dtype == "float64"
    with pytest.raises(ValueError, match=r"enable_x64\(False\)"):
        devices.plan(num_chains=2, dtype="float32")


SCRIPT = """
import os, sys
import jax
import ppl_ext.devices as devices
assert jax.config.jax_compilation_cache_dir is None and "XLA_FLAGS" not in os.environ
devices.set_host_devices(3)
assert jax.local_device_count() == 3
jax.jit(lambda x: x + 1)(1.0)
try:
    devices.set_host_devices(4)
except RuntimeError as error:
    assert "too late" in str(error)
else:
    raise SystemExit("not refused")
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
)
assert devices.cache(sys.argv[1]).is_dir()
jax.jit(lambda x: x * 3 + 2)(1.0)
print(len(hits))
"""


def test_programs_are_kept_and_host_devices_set_in_time(tmp_path):
    clean = {n: v for n, v in os.environ.items() if n != "XLA_FLAGS" and not n.startswith("JAX_")}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache")]
    hits = []
    for _ in range(2):
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=clean)
        hits.append(int(done.stdout))
    assert hits[0] == 0 and hits[1] > 0
    assert list((tmp_path / "cache").iterdir())


def test_the_environment_goes_first(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    with pytest.raises(ValueError, match="XLA_FLAGS has"):
        devices.set_host_devices(3)
    with pytest.raises(ValueError, match="`count` must be"):
        devices.set_host_devices(0)


# --- data over devices ---------------------------------------------------------------------------


def mixture(y):
    concentration = numpyro.sample("concentration", dist.Gamma(1.0, 1.0))

    def base():
        tau = numpyro.sample("tau", dist.Gamma(2, 2))
        return numpyro.sample("mu", dist.Normal(0, (0.1 * tau) ** -0.5)), tau

    process = DirichletProcess("G", concentration, base)
    with numpyro.plate("data", y.shape[0]):
        mu, tau = process.draw()
        numpyro.sample("y", dist.Normal(mu, tau**-0.5), obs=y)


def compare_data_over_devices():
    """Sweeps of points that are split over four devices, and of the same points on one."""
    y = np.random.default_rng(0).normal(np.repeat([-4.0, 4.0], 32)).astype(np.float32)
    mesh = jax.sharding.Mesh(jax.devices(), ("points",))
    over = jax.device_put(y, jax.NamedSharding(mesh, jax.P("points")))
    runs = []
    for data in (y, over):
        mcmc = MCMC(
            DPSlice(mixture, capacity=32),
            num_warmup=10,
            num_samples=20,
            progress_bar=False,
            jit_model_args=True,
        )
        mcmc.run(jax.random.key(0), data, extra_fields=("labels",))
        runs.append(mcmc)
    one, many = runs
    # each device holds its part
    assert len(many.last_state.labels.sharding.device_set) == 4
    np.testing.assert_array_equal(
        one.get_extra_fields()["labels"], many.get_extra_fields()["labels"]
    )
    for name, values in one.get_samples().items():
        np.testing.assert_allclose(many.get_samples()[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_dp_slice_takes_data_over_devices():
    script = "from tests.test_devices import compare_data_over_devices as run; run()"
    flags = "--xla_force_host_platform_device_count=4"
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "XLA_FLAGS": flags}
    )
