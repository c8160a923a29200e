"""Which conformance tests run with which kernels."""

import pytest

# it uses all of the adaptor: a potential energy function, gradients among its fields
FIRST = "ULD"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests marked `adaptor` try code that all kernels share: with the others they are slow."""
    for item in items:
        marked = item.get_closest_marker("adaptor") is not None
        if marked and item.callspec.params["entry"].name != FIRST:
            item.add_marker(pytest.mark.slow)
