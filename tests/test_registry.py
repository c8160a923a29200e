"""The table of kernels, and the advice for one model."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_ext
from ppl_ext import registry


def schools(y, size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("school", y.shape[0], subsample_size=size) as i:
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(theta, 1), obs=y[i])


Y = jnp.arange(4.0)


def test_every_kernel_is_listed_with_language_models_draws_and_source():
    table = ppl_ext.available()
    assert list(table.columns) == ["models", "draws", "source"]
    assert ("ULD", "numpyro") in table.index
    assert set(table["draws"]) <= {"exact", "biased"}
    assert (table.map(len) > 0).all(axis=None)


def test_every_entry_is_the_class_of_its_name_and_takes_its_own_example():
    for entry in registry.entries():
        example = entry.example()
        assert entry.refusal(registry.target(example.model, *example.args)) is None
        assert set(example.mean) == set(example.sd)
        module = getattr(ppl_ext, entry.language)
        assert getattr(module, entry.name) is entry.kernel


def test_a_model_that_fits_is_shown_with_its_sites_and_plates():
    found = ppl_ext.explain(schools, Y)
    assert found.verdicts["ULD"] is None
    assert list(found.sites.index) == ["mu", "theta", "y"]
    assert found.sites.loc["theta", "plates"] == "school"
    assert found.sites.loc["y", "kind"] == "observed"
    text = str(found)
    assert "2 latent sites, 5 unconstrained coordinates" in text
    assert "plates: school (4)" in text
    assert text.endswith("ULD: fits")


def test_a_minibatch_is_shown_with_the_plate_and_a_kernel_that_takes_it():
    found = ppl_ext.explain(schools, Y, size=2)
    assert "school (2 of 4)" in str(found)
    assert "plate 'school' draws 2 of 4" in found.verdicts["ULD"]
    assert "HMCECS" in found.verdicts["ULD"]


def test_a_model_without_plates_says_so():
    text = str(ppl_ext.explain(lambda: numpyro.sample("x", dist.Normal(0, 1))))
    assert "plates: none" in text


def test_a_discrete_site_is_named():
    def model():
        numpyro.sample("k", dist.Poisson(2.0))

    found = ppl_ext.explain(model)
    assert found.sites.loc["k", "discrete"]
    assert "'k' is discrete (Poisson)" in found.verdicts["ULD"]


def test_a_model_must_be_callable():
    with pytest.raises(TypeError, match="`model` must be a callable NumPyro program, got list"):
        ppl_ext.explain([])


def test_a_foreign_object_in_the_entry_points_is_named(monkeypatch):
    class Point:
        name = "Broken"

        def load(self):
            return dict

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    registry.entries.cache_clear()
    try:
        with pytest.raises(TypeError, match=r"'Broken'.*must return.*Entry, got dict"):
            registry.entries()
    finally:
        registry.entries.cache_clear()
