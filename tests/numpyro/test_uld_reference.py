"""ULD against the reference posteriors, with the bias that its own certificate reports."""

import arviz as az
import jax
import numpy as np
import pytest
from numpyro.infer import MCMC, init_to_uniform, init_to_value

from ppl_ext import models
from ppl_ext.diagnostics import uld_report
from ppl_ext.numpyro import ULD

# eight_schools_centered is a funnel: a correct sampler with one step size does not come out of
# its wide part within a usable number of steps, ULD no more than NUTS
NAMES = [name for name in models.list() if name != "eight_schools_centered"]
# correlations above 0.99, which a diagonal metric cannot see
DENSE = {"kilpisjarvi", "kidscore_interaction"} & set(NAMES)


def run(problem, **options):
    strategy = init_to_value(values=problem.init_values) if problem.init_values else init_to_uniform
    mcmc = MCMC(
        ULD(problem.model, init_strategy=strategy, **options),
        num_warmup=1000,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *problem.args, **problem.kwargs)
    return mcmc


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", NAMES)
def test_uld_agrees_with_the_reference(name):
    """Means and sds lie within 4 Monte Carlo standard errors and the reported bias.

    The bias must stay below 0.1 sd and R-hat below 1.02. False alarms: 6.3e-5 for each mean and
    sd, about 1 % for all 87 parameters together.
    """
    problem = models.load(name)
    mcmc = run(problem, precondition="dense" if name in DENSE else "diag")
    # the report is of variances
    bias = abs(np.sqrt(1 + uld_report(mcmc).worst_variance_bias) - 1)
    assert bias < 0.1
    z = {}
    for parameter, draws in problem.flat(mcmc.get_samples(group_by_chain=True)).items():
        draws, expected = np.asarray(draws), problem.reference[parameter]
        sd = expected["sd"]
        # the reference has 10,000 draws, near to independent
        error_of_sd = float(az.mcse(draws, method="sd")) / sd
        error_of_reference_sd = np.sqrt((kurtosis(draws) - 1) / 4 / 1e4)
        mean, spread = draws.mean() - expected["mean"], draws.std() / sd - 1
        mcse = np.hypot(float(az.mcse(draws)), expected["mcse_mean"])
        z[f"mean {parameter}"] = max(abs(mean) - bias * sd, 0) / mcse
        z[f"sd {parameter}"] = max(abs(spread) - bias, 0) / np.hypot(
            error_of_sd, error_of_reference_sd
        )
        assert float(az.rhat(draws)) < 1.02, parameter
    print(f"{name}: bias {bias:.4f}, largest |z| {max(z.values()):.2f} ({max(z, key=z.get)})")
    assert max(z.values()) < 4, z


def kurtosis(draws):
    return ((draws - draws.mean()) ** 4).mean() / draws.var() ** 2
