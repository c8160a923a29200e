"""Draws of the shared reference problems, written in Pyro, against their reference posteriors."""

import numpy as np
import pytest

pyro = pytest.importorskip("pyro")
torch = pytest.importorskip("torch")

from numpyro.diagnostics import effective_sample_size
from pyro.infer.autoguide.initialization import init_to_uniform, init_to_value

from ppl_ext import models
from ppl_ext.pyro import MCMC, NUTS, ULD

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kernel", [NUTS, ULD], ids=["NUTS", "ULD"])
@pytest.mark.parametrize("name", models.list())
def test_means_are_those_of_the_reference(name, kernel):
    """Six standard errors, of draws and reference together; ULD may be biased by a tenth sd.

    A false alarm has a probability below 1e-8 per number.
    """
    problem = models.load(name, ppl="pyro")
    start = init_to_uniform
    if problem.init_values is not None:
        values = {site: torch.as_tensor(v) for site, v in problem.init_values.items()}
        start = init_to_value(values=values)
    pyro.set_rng_seed(0)
    mcmc = MCMC(kernel(problem.model, init_strategy=start), 2000, 2000, num_chains=2,
                disable_progbar=True)  # fmt: skip
    mcmc.run(*problem.args, **problem.kwargs)
    draws = problem.flat({k: v.numpy() for k, v in _all_sites(mcmc, problem).items()})
    bias = 0.1 if kernel is ULD else 0.0
    for parameter, reference in problem.reference.items():
        found = draws[parameter]
        error = reference["sd"] / np.sqrt(effective_sample_size(found))
        allowed = 6 * np.hypot(error, reference["mcse_mean"]) + bias * reference["sd"]
        assert abs(found.mean() - reference["mean"]) < allowed, parameter


def _all_sites(mcmc, problem):
    """Draws of the latent sites, and of deterministic ones that the reference describes."""
    samples = mcmc.get_samples(group_by_chain=True)
    missing = [site for site in problem.shapes if site not in samples]
    if not missing:
        return samples
    import ppl_ext
    from ppl_ext import _arviz

    posterior = _arviz.get_group(ppl_ext.to_arviz(mcmc), "posterior")
    return {**samples, **{s: torch.tensor(posterior[s].values) for s in missing}}
