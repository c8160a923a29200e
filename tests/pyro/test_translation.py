"""Pyro models as NumPyro models: families, masks, scales, plates, minibatches, refusals.

`Translation` itself compares the log density of each site with Pyro's at two points, so that a
translation that comes out is one that agrees there; `test_a_planted_mistake_is_caught` shows that
the comparison sees mistakes. Totals over a model are compared here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro.infer.util import log_density

torch = pytest.importorskip("torch")
pyro = pytest.importorskip("pyro")

import pyro.distributions as dist
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger, init_to_uniform

from ppl_ext import models
from ppl_ext.errors import MismatchError, UnsupportedModelError
from ppl_ext.pyro import distributions
from ppl_ext.pyro.translation import Translation, indices_of

T = torch.tensor
TRIL = T([[1.0, 0.0], [0.5, 0.8]])

FAMILIES = {
    "AsymmetricLaplace": dist.AsymmetricLaplace(T(0.3), T(1.2), T(0.7)),
    "Bernoulli logits": dist.Bernoulli(logits=T([0.3, -1.0])),
    "Bernoulli probs": dist.Bernoulli(probs=T([0.3, 0.6])),
    "Beta": dist.Beta(T(2.0), T(3.0)),
    "BetaBinomial": dist.BetaBinomial(T(2.0), T(3.0), total_count=7),
    "Binomial logits": dist.Binomial(total_count=T([5.0, 9.0]), logits=T([0.3, -1.0])),
    "Binomial probs": dist.Binomial(total_count=5, probs=T(0.3)),
    "Categorical logits": dist.Categorical(logits=T([0.3, -1.0, 0.2])),
    "Categorical probs": dist.Categorical(probs=T([[0.3, 0.7], [0.5, 0.5]])),
    "Cauchy": dist.Cauchy(T(1.0), T(2.0)),
    "Chi2": dist.Chi2(T(3.0)),
    "Delta": dist.Delta(T([1.0, 2.0]), event_dim=1),
    "Dirichlet": dist.Dirichlet(T([1.0, 2.0, 3.0])),
    "DirichletMultinomial": dist.DirichletMultinomial(T([1.0, 2.0]), total_count=4),
    "Exponential": dist.Exponential(T(2.0)),
    "Gamma": dist.Gamma(T(2.0), T(3.0)),
    "GammaPoisson": dist.GammaPoisson(T(2.0), T(3.0)),
    "Geometric logits": dist.Geometric(logits=T(0.3)),
    "Geometric probs": dist.Geometric(probs=T(0.3)),
    "Gumbel": dist.Gumbel(T(1.0), T(2.0)),
    "HalfCauchy": dist.HalfCauchy(T(2.0)),
    "HalfNormal": dist.HalfNormal(T(2.0)),
    "InverseGamma": dist.InverseGamma(T(2.0), T(3.0)),
    "Kumaraswamy": dist.Kumaraswamy(T(2.0), T(3.0)),
    "LKJ": dist.LKJ(3, T(2.0)),
    "LKJCholesky": dist.LKJCholesky(3, T(2.0)),
    "Laplace": dist.Laplace(T(1.0), T(2.0)),
    "LogNormal": dist.LogNormal(T(1.0), T(0.5)),
    "Logistic": dist.Logistic(T(1.0), T(0.5)),
    "LowRankMultivariateNormal": dist.LowRankMultivariateNormal(
        T([0.0, 1.0]), T([[1.0], [2.0]]), T([0.5, 0.7])
    ),
    "MixtureSameFamily": dist.MixtureSameFamily(
        dist.Categorical(T([0.3, 0.7])), dist.Normal(T([-1.0, 2.0]), T(1.0))
    ),
    "Multinomial": dist.Multinomial(5, probs=T([0.3, 0.7])),
    "MultivariateNormal cov": dist.MultivariateNormal(T([0.0, 1.0]), TRIL @ TRIL.T),
    "MultivariateNormal tril": dist.MultivariateNormal(T([0.0, 1.0]), scale_tril=TRIL),
    "MultivariateStudentT": dist.MultivariateStudentT(T(4.0), T([0.0, 1.0]), TRIL),
    "NegativeBinomial logits": dist.NegativeBinomial(T(3.0), logits=T(0.3)),
    "NegativeBinomial probs": dist.NegativeBinomial(T(3.0), probs=T(0.3)),
    "Normal": dist.Normal(T(1.0), T([2.0, 3.0])),
    "OrderedLogistic": dist.OrderedLogistic(T(0.3), T([-1.0, 1.0])),
    "Pareto": dist.Pareto(T(1.0), T(3.0)),
    "Poisson": dist.Poisson(T(3.0)),
    "ProjectedNormal": dist.ProjectedNormal(T([1.0, 2.0])),
    "SoftLaplace": dist.SoftLaplace(T(1.0), T(2.0)),
    "StudentT": dist.StudentT(T(4.0), T(1.0), T(2.0)),
    "TransformedDistribution": dist.TransformedDistribution(
        dist.Normal(T(0.0), T(1.0)),
        [
            dist.transforms.AffineTransform(1.0, 2.0),
            dist.transforms.SigmoidTransform(),
            dist.transforms.ExpTransform(),
        ],
    ),
    "Uniform": dist.Uniform(T(-1.0), T(3.0)),
    "VonMises": dist.VonMises(T(1.0), T(3.0)),
    "Weibull": dist.Weibull(T(1.0), T(3.0)),
    "Wishart": dist.Wishart(df=T(4.0), scale_tril=TRIL),
    "ZeroInflatedDistribution": dist.ZeroInflatedDistribution(dist.Poisson(T(3.0)), gate=T(0.3)),
    "ZeroInflatedPoisson": dist.ZeroInflatedPoisson(T(3.0), gate=T(0.3)),
    "to_event": dist.Normal(torch.zeros(3, 2), T(1.0)).to_event(1),
    "expand": dist.Gamma(T(2.0), T(3.0)).expand([4]),
    "mask": dist.Normal(torch.zeros(3), T(1.0)).mask(T([True, False, True])),
}


def agree(model, *args, **kwargs):
    """Log densities of the constrained values at a random point, summed by each language."""
    translation = Translation(model, args, kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        trace = poutine.trace(InitMessenger(init_to_uniform)(model)).get_trace(*args, **kwargs)
    expected = float(trace.log_prob_sum())
    values = {
        name: jnp.asarray(node["value"].numpy())
        for name, node in trace.nodes.items()
        if node["type"] == "sample" and not node["is_observed"]
    }
    with jax.enable_x64(translation.double):
        found, _ = log_density(translation.model, (translation.constants,), {}, values)
    assert float(found) == pytest.approx(expected, rel=2e-5, abs=2e-4)
    return translation


@pytest.mark.parametrize("name", FAMILIES)
def test_the_log_density_of_every_family_is_that_of_pyro(name):
    """Observed at a draw of its own."""

    def model(y):
        pyro.sample("y", FAMILIES[name], obs=y)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        # PyTorch warns of its own draws of a Wishart matrix
        y = 3 * torch.eye(2) if name == "Wishart" else FAMILIES[name].sample()
    agree(model, y)


@pytest.mark.parametrize("name", ["eight_schools_centered", "arK", "GLM_Poisson", "nes_logit"])
def test_shipped_programs_have_the_same_log_density(name):
    problem = models.load(name, "pyro")
    agree(problem.model, *problem.args, **problem.kwargs)


def everything(x, y):
    """Masks, scales, factors, loops, nested plates, deterministic sites, a random observation."""
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("groups", 3, dim=-2):
        theta = pyro.sample("theta", dist.Normal(0.0, scale))
        with pyro.plate("items", 4, dim=-1):
            noise = pyro.sample("noise", dist.Gamma(2.0, 1.0))
            with poutine.mask(mask=y > 0):
                pyro.sample("y", dist.Normal(theta, noise), obs=y)
    pyro.deterministic("total", theta.sum())
    for i in pyro.plate("loop", 2):
        with poutine.scale(scale=0.5 + i):
            pyro.sample(f"u_{i}", dist.StudentT(4.0, theta[i, 0], 1.0))
    pyro.factor("soft", -(theta**2).sum() / 2)
    pyro.sample("shifted", dist.Normal(0.0, 1.0), obs=x - theta[0, 0])


def test_masks_scales_factors_and_loops_keep_the_log_density():
    torch.manual_seed(0)
    agree(everything, T(0.7), torch.randn(3, 4))


def test_a_model_in_double_precision_is_translated_in_double_precision():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(T(0.0, dtype=torch.float64), 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    assert agree(model, torch.ones(3, dtype=torch.float64)).double


def test_a_planted_mistake_is_caught(monkeypatch):
    """Half the scale: the comparison of densities names the site."""
    make = lambda loc, scale: numpyro.distributions.Normal(loc, scale / 2)  # noqa: E731
    monkeypatch.setitem(distributions._SAME, "Normal", (make, ("loc", "scale")))

    def model():
        pyro.sample("mu", dist.Normal(0.0, 1.0))

    with pytest.raises(MismatchError, match="site 'mu'"):
        Translation(model, (), {})


def test_a_distribution_without_counterpart_is_refused_by_its_site():
    def model():
        pyro.sample("jump", dist.Stable(1.5, 0.0))

    with pytest.raises(UnsupportedModelError, match="Site 'jump' has the distribution Stable"):
        Translation(model, (), {})


def test_an_equal_model_with_other_data_is_an_equal_program():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    one, other = (Translation(model, (torch.full((3,), c),), {}) for c in (0.0, 1.0))
    assert one.key == other.key
    assert one.key != Translation(model, (torch.zeros(4),), {}).key


# --- minibatches -----------------------------------------------------------------------------


def regression(x, y, weight):
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("N", len(y), subsample_size=3) as i, poutine.scale(scale=weight[i]):
        pyro.sample("y", dist.Normal(x[i] @ beta, sigma), obs=y[i])
        pyro.sample("z", dist.Normal(x[i] * beta, sigma).to_event(1), obs=x[i])


@pytest.fixture(scope="module")
def of_minibatches():
    torch.manual_seed(0)
    args = torch.randn(7, 2), torch.randn(7), torch.rand(7)
    return Translation(regression, args, {}, "N"), args


@pytest.mark.parametrize("indices", [[4], [5, 0], [6, 1, 1, 2, 0]])
def test_terms_of_a_minibatch_are_those_of_pyro_at_any_indices(of_minibatches, indices):
    translation, args = of_minibatches
    values = {"beta": T([0.3, -0.5]), "sigma": T(0.7)}
    with indices_of("N", T(indices)), poutine.block():
        conditioned = poutine.condition(regression, values)
        trace = poutine.trace(conditioned).get_trace(*args)
    trace.compute_log_prob()
    # without the scale of the minibatch
    expected = sum(trace.nodes[name]["log_prob"] for name in ("y", "z")) * len(indices) / 7

    from ppl_ext.numpyro.target import target

    found = target(translation.model, translation.constants)
    z = found.unconstrain_sites(
        {name: jnp.asarray(x.numpy()) for name, x in values.items()}, translation.constants
    )
    assert found.log_likelihood_terms is not None
    terms = found.log_likelihood_terms(z, "N", jnp.array(indices), translation.constants)
    np.testing.assert_allclose(terms, expected.numpy(), rtol=1e-4)


def test_data_that_depend_on_the_whole_minibatch_are_refused():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("N", len(y), subsample_size=2) as i:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[i] - y[i].mean())

    with pytest.raises(UnsupportedModelError, match="is not that of each datum"):
        Translation(model, (torch.randn(5),), {}, "N")
