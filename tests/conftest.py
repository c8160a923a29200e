"""Two host devices, fast compilation and a cache for it, and float64 on request."""

import os
from pathlib import Path

# the tests compile much and run little
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest

# each of pytest-xdist's workers has its own: JAX does not lock the files
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
CACHE = Path(__file__).parents[1] / ".cache" / "jax" / WORKER


def pytest_configure():
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
    # what was traced for the same functions and data must not serve float32 tests
    jax.clear_caches()


@pytest.fixture
def progress_bar_possible(monkeypatch):
    """NumPyro switches its progress bar off where these are set."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
