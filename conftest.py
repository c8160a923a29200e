"""Which doctests are collected, and which of them are slow."""

from importlib.util import find_spec

import pytest

# what is written in Pyro, only where Pyro is installed
collect_ignore_glob = (
    [] if find_spec("pyro") else ["ppl_ext/pyro/*.py", "ppl_ext/models/pyro_programs.py"]
)

# they compile for ten seconds and more
SLOW_DOCTESTS = (
    "ppl_ext.devices.apply",
    "ppl_ext.diagnostics.exchange_report",
    "ppl_ext.diagnostics.partitions",
    "ppl_ext.diagnostics.tune",
    "ppl_ext.models.problem.load",
    "ppl_ext.numpyro.bounds.check",
    "ppl_ext.numpyro.poisson_mh",
    "ppl_ext.numpyro.proximal_imh",
    "ppl_ext.numpyro.tuna_mh",
    "ppl_ext.pyro.dp_slice",
    "ppl_ext.pyro.exchange_mh",
    "ppl_ext.pyro.poisson_mh",
    "ppl_ext.pyro.tuna_mh",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.startswith(SLOW_DOCTESTS):
            item.add_marker(pytest.mark.slow)
