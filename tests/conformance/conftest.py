"""Which conformance tests run with which kernels."""

import pytest

# it uses all of the adaptor: a potential energy function, gradients among its fields
FIRST = "ULD"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Which tests are slow.

    Those marked `adaptor` try code that all kernels share: slow with all kernels but one. The
    programs of minibatch kernels take long to compile; their own tests have the fast part.
    """
    for item in items:
        entry = getattr(item, "callspec", None) and item.callspec.params.get("entry")
        if not entry:
            continue
        shared = item.get_closest_marker("adaptor") is not None and entry.name != FIRST
        if shared or entry.minibatch:
            item.add_marker(pytest.mark.slow)
