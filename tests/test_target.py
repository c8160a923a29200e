"""A target of a potential energy function, without a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_ext.target import Plate, potential_target

Z = {"b": jnp.arange(6.0).reshape(2, 3), "a": jnp.array(7.0)}


def potential(z):
    return jnp.sum(z["b"] ** 2) / 2 + z["a"] ** 4


def test_a_potential_function_gives_sites_size_and_density():
    target = potential_target(potential, Z)
    assert target.language == "potential_fn"
    assert target.size == 7
    assert [site.shape for site in target.latent] == [(), (2, 3)]
    np.testing.assert_allclose(target.log_density(target.ravel(Z)), -potential(Z))
    assert target.log_density(target.ravel(Z), "data", are="ignored") == -potential(Z)


def test_ravel_and_unravel_are_inverse_for_any_structure():
    for z in (Z, (jnp.ones(2), [jnp.zeros(()), jnp.ones((1, 2))]), jnp.arange(3.0)):
        target = potential_target(lambda z: 0.0, z)
        flat = target.ravel(z)
        assert flat.shape == (target.size,)
        back = target.unravel(flat)
        assert jax.tree.structure(back) == jax.tree.structure(z)
        jax.tree.map(np.testing.assert_array_equal, back, z)


def test_constraining_changes_nothing():
    target = potential_target(potential, Z)
    values = target.constrain(target.ravel(Z))
    jax.tree.map(np.testing.assert_array_equal, values, Z)


@pytest.mark.parametrize(("taken", "subsampled"), [(10, False), (9, True)])
def test_only_a_plate_with_fewer_members_is_subsampled(taken, subsampled):
    assert Plate("customers", 10, taken).subsampled is subsampled
