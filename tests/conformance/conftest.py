"""Which conformance tests run with which kernels."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from numpyro.distributions import Unit
from numpyro.primitives import Messenger

from ppl_ext.numpyro import Intractable
from ppl_ext.numpyro.intractable import Simulation
from ppl_ext.numpyro.target import bare

# it uses all of the adaptor: a potential energy function, gradients among its fields
FIRST = "ULD"
ANSWER = "test_every_chain_method_finds_the_exact_answer"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Which tests are slow.

    With all kernels but one only the exact answer is fast, and not with every chain method (the
    mark `adaptor`). The programs of minibatch, exchange and mixture kernels take long to compile;
    their own tests have the fast part.
    """
    for item in items:
        entry = getattr(item, "callspec", None) and item.callspec.params.get("entry")
        if not entry:
            continue
        shared = item.get_closest_marker("adaptor") is not None or item.originalname != ANSWER
        long = entry.minibatch or entry.intractable or entry.own_models
        if (shared and entry.name != FIRST) or long:
            item.add_marker(pytest.mark.slow)


# --- kernels for intractable likelihoods ----------------------------------------------------------


class Simulated(Intractable):
    """A distribution of scalars as if its normalising constant were unknown."""

    pytree_data_fields = ("base_dist",)

    def __init__(self, base_dist):
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape)

    @property
    def support(self):
        return self.base_dist.support

    def stats(self, value):
        return jnp.asarray(value, float)[..., None]

    def log_f_stats(self, stats):
        return self.base_dist.log_prob(stats[..., 0])

    def simulate(self, key, shape=None, length=1):
        shape = self.batch_shape if shape is None else shape
        value = self.base_dist.expand(shape).sample(key)
        return Simulation(value, jnp.ones(shape, jnp.int32), jnp.zeros(shape, bool))


class simulated(Messenger):
    """Handler that makes the observed sites of a model intractable."""

    def process_message(self, msg):
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        if not isinstance(msg["fn"], Unit) and not isinstance(bare(msg["fn"]), Intractable):
            msg["fn"] = Simulated(msg["fn"])


@pytest.fixture(scope="session")
def adapted():
    """What gives the kernels of an entry the models of these tests in a form that they take."""

    def adapt(entry):
        if not entry.intractable:
            return entry
        kernel = lambda model, **options: entry.kernel(simulated(model), **options)  # noqa: E731
        return replace(entry, kernel=kernel)

    return adapt
