"""Processes run forward in Pyro: exact laws of the partition, and Predictive."""

import itertools

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch")
pyro = pytest.importorskip("pyro")

import pyro.distributions as dist
from pyro.infer import Predictive

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.pyro import MCMC, DirichletProcess, DPSlice, PitmanYor
from ppl_ext.pyro.dirichlet_process import Partition, restaurant


def set_partitions(n):
    """Labels in the order of appearance."""
    return [
        labels
        for labels in itertools.product(range(n), repeat=n)
        if all(label <= max(labels[:i], default=-1) + 1 for i, label in enumerate(labels))
    ]


@pytest.mark.parametrize(("alpha", "d"), [(1.5, None), (0.7, 0.4), (0.0, 0.5)])
def test_the_restaurant_draws_every_partition_with_its_probability(alpha, d):
    """Chi-squared test at 1e-4; the probabilities of all 15 partitions sum to one."""
    every = set_partitions(4)
    prior = Partition(4, alpha or 1e-12, d)
    probs = np.array([float(prior.log_prob(torch.tensor(labels)).exp()) for labels in every])
    assert probs.sum() == pytest.approx(1.0, abs=1e-5)
    torch.manual_seed(0)
    drawn = [tuple(restaurant(4, alpha, d).tolist()) for _ in range(4000)]
    counts = np.array([drawn.count(labels) for labels in every])
    assert counts.sum() == 4000
    seen = probs > 1e-3
    expected = counts[seen].sum() * probs[seen] / probs[seen].sum()
    assert counts[~seen].sum() <= 4 and stats.chisquare(counts[seen], expected).pvalue > 1e-4


def mixture(n, y=None):
    alpha = pyro.sample("alpha", dist.Gamma(2.0, 1.0))

    def base():
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        return mu, pyro.sample("tau", dist.Gamma(2.0, 1.0))

    process = DirichletProcess("G", alpha, base)
    with pyro.plate("data", n):
        mu, tau = process.draw()
        pyro.sample("y", dist.Normal(mu, tau**-0.5), obs=y)


def test_the_model_runs_forward_without_a_level_of_truncation():
    pyro.set_rng_seed(0)
    draws = Predictive(mixture, num_samples=20)(50)
    # Pyro keeps an axis for the plate at sites outside of it
    labels, clusters = draws["G_labels"][:, 0], draws["G_num_clusters"][:, 0]
    assert draws["y"].shape == labels.shape == (20, 50)
    assert torch.equal(labels.amax(1) + 1, clusters)
    used = torch.arange(50) < clusters[:, None]
    assert torch.equal(draws["mu"][:, 0].isnan(), ~used)


def test_draws_of_the_posterior_predict_from_its_atoms_and_new_ones():
    """Half of the mass at one atom of 100, the rest new atoms of the base."""
    pyro.set_rng_seed(0)
    samples = {
        "alpha": torch.full((200,), 1.0),
        "G_weights": torch.tensor([0.5, 0.0]).expand(200, 2),
        "mu": torch.tensor([100.0, -100.0]).expand(200, 2),
        "tau": torch.full((200, 2), 1e4),
        "G_num_clusters": torch.ones(200),
    }
    y = Predictive(mixture, samples)(30)["y"]
    at_the_atom = (y - 100).abs() < 0.1
    assert abs(float(at_the_atom.float().mean()) - 0.5) < 4 * np.sqrt(0.25 / 6000)
    assert not ((y + 100).abs() < 0.1).any()
    samples["G_weights"] = samples["G_weights"] * torch.nan
    with pytest.raises(ValueError, match="follow an overflow"):
        Predictive(mixture, samples)(3)


def test_misuse_is_refused_by_name():
    def outside():
        return DirichletProcess("G", 1.0, lambda: pyro.sample("mu", dist.Normal(0.0, 1.0))).draw()

    with pytest.raises(UnsupportedModelError, match=r"`G.draw\(\)` must be called inside one"):
        outside()

    def subsampled():
        with pyro.plate("data", 10, subsample_size=2):
            outside()

    with pytest.raises(UnsupportedModelError, match="draws 2 of 10"):
        subsampled()

    def batched():
        process = DirichletProcess(
            "G", 1.0, lambda: pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0))
        )
        with pyro.plate("data", 3):
            process.draw()

    with pytest.raises(UnsupportedModelError, match="Site 'mu' of the base of 'G' has the batch"):
        batched()
    with pytest.raises(ValueError, match="`discount` of 'G' must lie"):
        PitmanYor("G", 1.0, 1.0, outside)
    with pytest.raises(ValueError, match="`concentration` of 'G' must be positive"):
        DirichletProcess("G", -1.0, outside)


@pytest.mark.slow
def test_a_run_that_overflows_is_repeated_with_more_slots_and_predicts():
    """The repeat starts with the same random numbers: equal draws before the overflow."""

    def model(y):
        process = DirichletProcess("G", 2.5, lambda: pyro.sample("mu", dist.Normal(0.0, 3.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(process.draw(), 1.0), obs=y)

    pyro.set_rng_seed(0)
    y = torch.tensor([0.1, -0.1, 0.6, -0.5, 1.3, 0.4])
    mcmc = MCMC(DPSlice(model, capacity=16), 50, warmup_steps=0, disable_progbar=True)
    mcmc.run(y)
    lost = mcmc.get_extra_fields()["overflow"]
    assert lost.any() and not lost.all()
    again = mcmc.kernel.rerun(mcmc, 64)
    assert not again.get_extra_fields()["overflow"].any()
    name = "G_num_clusters"
    assert torch.equal(mcmc.get_samples()[name][~lost], again.get_samples()[name][~lost])

    from ppl_ext.diagnostics import predictive_density

    grid = torch.linspace(-30.0, 30.0, 601)
    density = predictive_density(again, grid).mean(("chain", "draw"))
    assert float(density.sum()) * 0.1 == pytest.approx(1.0, abs=0.02)
