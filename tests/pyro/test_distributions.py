"""Every distribution of pyro.distributions: its density is JAX's too, or it is refused by name.

Value and gradient, with respect to parameters and to the point on the real line, against PyTorch
in float64.
"""

import inspect

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pyro = pytest.importorskip("pyro")

import pyro.distributions as dist
from torch.distributions import biject_to, constraints, transforms

from ppl_ext.errors import TracingError
from ppl_ext.pyro.program import record, to_jax

# compiles a hundred programs
pytestmark = pytest.mark.slow

T = lambda *values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
EYE = torch.eye(2, dtype=torch.float64)
ROW = T(0.3, -0.2)


def tril(a):
    """A Cholesky factor that depends on the scalar `a`."""
    return torch.stack([torch.stack([a, 0 * a]), torch.stack([0.3 * a, a + 0.5])])


def hmm(kind):
    def make(a, b, c):
        arguments = (
            dist.MultivariateNormal(ROW, scale_tril=tril(a)),
            torch.stack([torch.stack([0.5 * b, 0 * b]), torch.stack([0 * b, 0.4 + 0 * b])]),
            dist.MultivariateNormal(torch.zeros(4, 2).double(), scale_tril=tril(b)),
            EYE,
            dist.MultivariateNormal(torch.zeros(4, 2).double(), scale_tril=tril(c)),
        )
        if kind == "gamma":
            return dist.GammaGaussianHMM(dist.Gamma(a, b), *arguments)
        return getattr(dist, kind)(*arguments)

    return make


# by class: the distribution at three positive scalars, and an observed value or None, in which
# case the value is a point of the support that varies too
RECIPES = {
    "AVFMultivariateNormal": (
        lambda a, b, c: dist.AVFMultivariateNormal(
            ROW * a, tril(b), torch.zeros(2, 1, 2).double() + c
        ),
        None,
    ),
    "AffineBeta": (lambda a, b, c: dist.AffineBeta(a, b, T(-1.0)[0], c + 1), T(-0.5)[0]),
    "AsymmetricLaplace": (dist.AsymmetricLaplace, None),
    "Bernoulli": (lambda a, b, c: dist.Bernoulli(logits=a - b), T(1.0)),
    "Beta": (lambda a, b, c: dist.Beta(a, b), None),
    "BetaBinomial": (lambda a, b, c: dist.BetaBinomial(a, b, 5), T(3.0)),
    "Binomial": (lambda a, b, c: dist.Binomial(5, probs=a / (a + b)), T(2.0)),
    "Categorical": (lambda a, b, c: dist.Categorical(torch.stack([a, b, c])), torch.tensor([2, 0])),
    "Cauchy": (lambda a, b, c: dist.Cauchy(a, b), None),
    "Chi2": (lambda a, b, c: dist.Chi2(a), None),
    "CoalescentTimes": (
        lambda a, b, c: dist.CoalescentTimes(T(0.0, 1.0, 2.0), a),
        T(-1.0, -0.3),
    ),
    "CoalescentTimesWithRate": (
        lambda a, b, c: dist.CoalescentTimesWithRate(T(0.0, 1.0, 2.0), torch.stack([a, b, c])),
        T(-1.0, -0.3),
    ),
    "ContinuousBernoulli": (lambda a, b, c: dist.ContinuousBernoulli(a / (a + b)), None),
    "Delta": (lambda a, b, c: dist.Delta(T(7.0)[0], log_density=b), T(7.0)[0]),
    "Dirichlet": (lambda a, b, c: dist.Dirichlet(torch.stack([a, b, c])), None),
    "DirichletMultinomial": (
        lambda a, b, c: dist.DirichletMultinomial(torch.stack([a, b, c]), 6),
        T(1.0, 2.0, 3.0),
    ),
    "DiscreteHMM": (
        lambda a, b, c: dist.DiscreteHMM(
            torch.stack([a, b]).log(),
            torch.stack([torch.stack([a, b]), torch.stack([b, c])]).log(),
            dist.Normal(torch.stack([a, -b]), c),
            duration=4,
        ),
        T(0.1, -0.3, 0.7, 2.0),
    ),
    "Exponential": (lambda a, b, c: dist.Exponential(a), None),
    "ExpandedDistribution": (lambda a, b, c: dist.Normal(a, b).expand([3]), None),
    "ExtendedBetaBinomial": (lambda a, b, c: dist.ExtendedBetaBinomial(a, b, 5), T(3.0, -1.0)),
    "ExtendedBinomial": (
        lambda a, b, c: dist.ExtendedBinomial(5, probs=a / (a + b)),
        T(2.0, 9.0),
    ),
    "FisherSnedecor": (lambda a, b, c: dist.FisherSnedecor(a, b), None),
    "FoldedDistribution": (lambda a, b, c: dist.FoldedDistribution(dist.Normal(a, b)), None),
    "Gamma": (lambda a, b, c: dist.Gamma(a, b), None),
    "GammaGaussianHMM": (hmm("gamma"), torch.arange(8.0).reshape(4, 2).double().sin()),
    "GammaPoisson": (lambda a, b, c: dist.GammaPoisson(a, b), T(3.0)),
    "GaussianHMM": (hmm("GaussianHMM"), torch.arange(8.0).reshape(4, 2).double().sin()),
    "GaussianMRF": (
        lambda a, b, c: dist.GaussianMRF(
            dist.MultivariateNormal(ROW, scale_tril=tril(a)),
            dist.MultivariateNormal(torch.zeros(4, 4).double(), torch.eye(4).double() * b),
            dist.MultivariateNormal(torch.zeros(4, 4).double(), torch.eye(4).double() * c),
        ),
        torch.arange(8.0).reshape(4, 2).double().sin(),
    ),
    "GaussianScaleMixture": (
        lambda a, b, c: dist.GaussianScaleMixture(
            torch.stack([a, b]), T(0.0, 0.5), torch.stack([b, c])
        ),
        ROW,
    ),
    "GeneralizedPareto": (lambda a, b, c: dist.GeneralizedPareto(a, b, c), T(9.0)),
    "Geometric": (lambda a, b, c: dist.Geometric(a / (a + b)), T(3.0)),
    "GroupedNormalNormal": (
        lambda a, b, c: dist.GroupedNormalNormal(
            torch.stack([a, a]), torch.stack([b, b]), c, torch.tensor([0, 1, 1])
        ),
        T(0.1, 0.7, -0.4),
    ),
    "Gumbel": (lambda a, b, c: dist.Gumbel(a, b), None),
    "HalfCauchy": (lambda a, b, c: dist.HalfCauchy(a), None),
    "HalfNormal": (lambda a, b, c: dist.HalfNormal(a), None),
    "ImproperUniform": (
        lambda a, b, c: dist.ImproperUniform(constraints.positive, (), (2,)).to_event(0),
        None,
    ),
    "Independent": (lambda a, b, c: dist.Normal(torch.stack([a, b]), c).to_event(1), None),
    "IndependentHMM": (
        lambda a, b, c: dist.IndependentHMM(
            dist.GaussianHMM(
                dist.Normal(a, b).expand([2, 1]).to_event(1),
                torch.ones(2, 1, 1, 1).double() * 0.5,
                dist.Normal(0 * a, b).expand([2, 4, 1]).to_event(1),
                torch.ones(2, 1, 1, 1).double(),
                dist.Normal(0 * a, c).expand([2, 4, 1]).to_event(1),
            )
        ),
        torch.arange(8.0).reshape(4, 2).double().sin(),
    ),
    "InverseGamma": (lambda a, b, c: dist.InverseGamma(a, b), None),
    "Kumaraswamy": (lambda a, b, c: dist.Kumaraswamy(a, b), None),
    "LKJ": (lambda a, b, c: dist.LKJ(3, a), None),
    "LKJCholesky": (lambda a, b, c: dist.LKJCholesky(3, a), None),
    "LKJCorrCholesky": (lambda a, b, c: dist.LKJCorrCholesky(3, a), None),
    "Laplace": (lambda a, b, c: dist.Laplace(a, b), None),
    "LogNormal": (lambda a, b, c: dist.LogNormal(a, b), None),
    "LogNormalNegativeBinomial": (
        lambda a, b, c: dist.LogNormalNegativeBinomial(a, b, c),
        T(3.0),
    ),
    "Logistic": (lambda a, b, c: dist.Logistic(a, b), None),
    "LogisticNormal": (lambda a, b, c: dist.LogisticNormal(torch.stack([a, b]), c), None),
    "LowRankMultivariateNormal": (
        lambda a, b, c: dist.LowRankMultivariateNormal(
            ROW * a, torch.stack([b, c])[:, None], torch.stack([a, c])
        ),
        None,
    ),
    "MaskedDistribution": (
        lambda a, b, c: dist.Normal(torch.stack([a, b]), c).mask(torch.tensor([True, False])),
        None,
    ),
    "MaskedMixture": (
        lambda a, b, c: dist.MaskedMixture(
            torch.tensor([True, False]),
            dist.Normal(a, b).expand([2]),
            dist.Cauchy(b, c).expand([2]),
        ),
        None,
    ),
    "MixtureOfDiagNormals": (
        lambda a, b, c: dist.MixtureOfDiagNormals(
            torch.stack([a, b])[:, None] * EYE, torch.stack([b, c])[:, None] + EYE, T(0.0, 0.5)
        ),
        ROW,
    ),
    "MixtureOfDiagNormalsSharedCovariance": (
        lambda a, b, c: dist.MixtureOfDiagNormalsSharedCovariance(
            torch.stack([a, b])[:, None] * EYE, torch.stack([b, c]), T(0.0, 0.5)
        ),
        ROW,
    ),
    "MixtureSameFamily": (
        lambda a, b, c: dist.MixtureSameFamily(
            dist.Categorical(torch.stack([a, b])), dist.Normal(torch.stack([b, -c]), a)
        ),
        T(0.3)[0],
    ),
    "Multinomial": (lambda a, b, c: dist.Multinomial(6, torch.stack([a, b, c])), T(1.0, 2.0, 3.0)),
    "MultivariateNormal": (
        lambda a, b, c: dist.MultivariateNormal(ROW * a, tril(b) @ tril(b).mT + EYE * c),
        None,
    ),
    "MultivariateStudentT": (lambda a, b, c: dist.MultivariateStudentT(a, ROW * b, tril(c)), None),
    "NanMaskedMultivariateNormal": (
        lambda a, b, c: dist.NanMaskedMultivariateNormal(ROW * a, tril(b) @ tril(b).mT),
        T(0.3, float("nan")),
    ),
    "NanMaskedNormal": (lambda a, b, c: dist.NanMaskedNormal(a, b), T(0.3, float("nan"))),
    "NegativeBinomial": (lambda a, b, c: dist.NegativeBinomial(a, logits=b - c), T(3.0)),
    "Normal": (lambda a, b, c: dist.Normal(a, b), None),
    "OMTMultivariateNormal": (lambda a, b, c: dist.OMTMultivariateNormal(ROW * a, tril(b)), None),
    "OneHotCategorical": (
        lambda a, b, c: dist.OneHotCategorical(torch.stack([a, b, c])),
        T(0.0, 1.0, 0.0),
    ),
    "OneHotCategoricalStraightThrough": (
        lambda a, b, c: dist.OneHotCategoricalStraightThrough(torch.stack([a, b, c])),
        T(0.0, 1.0, 0.0),
    ),
    "OneOneMatching": (
        lambda a, b, c: dist.OneOneMatching(tril(a)),
        torch.tensor([1, 0]),
    ),
    "OneTwoMatching": (
        lambda a, b, c: dist.OneTwoMatching(torch.cat([tril(a), tril(b)])),
        torch.tensor([1, 0, 0, 1]),
    ),
    "OrderedLogistic": (
        lambda a, b, c: dist.OrderedLogistic(a, torch.stack([-b, c])),
        torch.tensor(1),
    ),
    "Pareto": (lambda a, b, c: dist.Pareto(a, b), T(9.0)),
    "Poisson": (lambda a, b, c: dist.Poisson(a), T(0.0, 3.0)),
    "ProjectedNormal": (
        lambda a, b, c: dist.ProjectedNormal(torch.stack([a, b, c])),
        T(0.6, 0.0, 0.8),
    ),
    "RelaxedBernoulli": (lambda a, b, c: dist.RelaxedBernoulli(a, logits=b - c), None),
    "RelaxedBernoulliStraightThrough": (
        lambda a, b, c: dist.RelaxedBernoulliStraightThrough(a, logits=b - c),
        T(0.3)[0],
    ),
    "RelaxedOneHotCategorical": (
        lambda a, b, c: dist.RelaxedOneHotCategorical(a, torch.stack([a, b, c])),
        T(0.2, 0.3, 0.5),
    ),
    "RelaxedOneHotCategoricalStraightThrough": (
        lambda a, b, c: dist.RelaxedOneHotCategoricalStraightThrough(a, torch.stack([a, b, c])),
        T(0.2, 0.3, 0.5),
    ),
    "SineBivariateVonMises": (
        lambda a, b, c: dist.SineBivariateVonMises(a, b, 1 + a, 1 + b, correlation=0.1 * c),
        ROW,
    ),
    "SineSkewed": (
        lambda a, b, c: dist.SineSkewed(dist.VonMises(a, b).expand([1]).to_event(1), c[None] / 9),
        T(0.3),
    ),
    "SkewLogistic": (dist.SkewLogistic, None),
    "SoftAsymmetricLaplace": (dist.SoftAsymmetricLaplace, None),
    "SoftLaplace": (lambda a, b, c: dist.SoftLaplace(a, b), None),
    "SpanningTree": (
        lambda a, b, c: dist.SpanningTree(torch.stack([a, b, c])),
        torch.tensor([[0, 1], [0, 2]]),
    ),
    "StableWithLogProb": (
        lambda a, b, c: dist.StableWithLogProb(1 + a / 9, b / 9, c),
        T(0.3)[0],
    ),
    "StudentT": (dist.StudentT, None),
    "TransformedDistribution": (
        lambda a, b, c: dist.TransformedDistribution(
            dist.Normal(a, b), [transforms.AffineTransform(c, 2.0), transforms.ExpTransform()]
        ),
        None,
    ),
    "TruncatedPolyaGamma": (lambda a, b, c: dist.TruncatedPolyaGamma(a), T(0.3)[0]),
    "Uniform": (lambda a, b, c: dist.Uniform(-a, b), T(0.1)[0]),
    "Unit": (lambda a, b, c: dist.Unit(a * b), torch.empty(0)),
    "VonMises": (lambda a, b, c: dist.VonMises(a, b), None),
    "VonMises3D": (lambda a, b, c: dist.VonMises3D(torch.stack([a, b, c])), T(0.6, 0.0, 0.8)),
    "Weibull": (lambda a, b, c: dist.Weibull(a, b), None),
    "Wishart": (
        lambda a, b, c: dist.Wishart(T(4.0)[0], tril(b) @ tril(b).mT),
        EYE * 0.7 + 0.1,
    ),
    "ZeroInflatedDistribution": (
        lambda a, b, c: dist.ZeroInflatedDistribution(dist.Poisson(a), gate=b / (b + c)),
        T(0.0, 3.0),
    ),
    "ZeroInflatedNegativeBinomial": (
        lambda a, b, c: dist.ZeroInflatedNegativeBinomial(a, logits=b, gate_logits=c),
        T(0.0, 3.0),
    ),
    "ZeroInflatedPoisson": (
        lambda a, b, c: dist.ZeroInflatedPoisson(a, gate_logits=b - c),
        T(0.0, 3.0),
    ),
}

# refused, with these words, where a latent variable is an argument
REFUSED = {
    "CoalescentTimesWithRate": "autograd.Function '_SafeLog'",
    "DiscreteHMM": "autograd.Function '_SafeLog'",
    "NanMaskedMultivariateNormal": r"tolist\(\) shouldn't be called",
    "SineBivariateVonMises": "as a Python number",
}

# no density in Pyro itself: abstract classes, samplers, draws
WITHOUT_DENSITY = {
    "Distribution",
    "Empirical",
    "ExponentialFamily",
    "LinearHMM",
    "Rejector",
    "Stable",
    "TorchDistribution",
}

# PyTorch raises in the backward pass of Pyro's density
WITHOUT_GRADIENT = {"GaussianScaleMixture"}

EVERY = {
    name
    for name in dist.__all__
    if inspect.isclass(getattr(dist, name)) and hasattr(getattr(dist, name), "log_prob")
}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_distribution_is_here():
    assert set(RECIPES) | WITHOUT_DENSITY == EVERY


@pytest.mark.filterwarnings("ignore:.*LKJCorrCholesky:FutureWarning")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_density_and_gradient_are_pytorchs(name, x64, float64):
    make, observed = RECIPES[name]
    start = {"parameters": T(0.2, -0.3, 0.4)}
    if observed is None:
        d = make(*start["parameters"].exp())
        to_support = biject_to(d.support)
        shape = to_support.inverse_shape(torch.Size(d.batch_shape + d.event_shape))
        start["z"] = torch.linspace(-0.7, 0.9, shape.numel()).double().reshape(shape)

    def log_density(inputs):
        d = make(*inputs["parameters"].exp())
        if observed is not None:
            return {"log_density": d.log_prob(observed).sum()}
        to_support = biject_to(d.support)
        value = to_support(inputs["z"])
        jacobian = to_support.log_abs_det_jacobian(inputs["z"], value)
        return {"log_density": d.log_prob(value).sum() + jacobian.sum()}

    if name in REFUSED:
        with pytest.raises(TracingError, match=REFUSED[name]):
            record(log_density, start)
        return
    with pyro.validation_enabled(False):
        recording = record(log_density, start)
        constants = [to_jax(c) for c in recording.constants]
        f = jax.jit(
            jax.value_and_grad(lambda z: recording.program.evaluate(z, constants)["log_density"])
        )
        for shift in (0.0, 0.3):
            inputs = {k: (v + shift).detach().requires_grad_() for k, v in start.items()}
            expected = log_density(inputs)["log_density"]
            gradients = [None] * len(inputs)
            if expected.requires_grad and name not in WITHOUT_GRADIENT:
                gradients = torch.autograd.grad(expected, list(inputs.values()), allow_unused=True)
            value, gradient = f({k: to_jax(v) for k, v in inputs.items()})
            assert not np.isnan(value)
            np.testing.assert_allclose(value, expected.item(), rtol=1e-9)
            if name in WITHOUT_GRADIENT:
                continue
            for key, g in zip(inputs, gradients, strict=True):
                g = torch.zeros_like(inputs[key]) if g is None else g
                np.testing.assert_allclose(gradient[key], g.numpy(), rtol=1e-7, atol=1e-9)
