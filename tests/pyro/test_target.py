"""A Pyro model as a `Target`: what it contains, its functions, and what is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pyro = pytest.importorskip("pyro")

import pyro.distributions as dist
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import LocScaleReparam, ProjectedNormalReparam
from pyro.nn import PyroModule, PyroSample
from torch import nn

import ppl_ext
from ppl_ext.errors import MismatchError, TracingError, UnsupportedModelError
from ppl_ext.pyro import operations
from ppl_ext.pyro.potential import build_potential
from ppl_ext.pyro.target import Posterior, target

Y = torch.tensor([0.3, -1.2, 0.7, 2.0])
DOUBLE = Y.double()
PAIRS = torch.tensor([[0.1, 0.5], [1.0, -0.3]])


def location(y=Y, *, scale=1.0):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    pyro.deterministic("twice", 2 * mu)
    with pyro.plate("datum", len(y)):
        pyro.sample("y", dist.Normal(mu, scale), obs=y)


def potential_of(model, *args, **kwargs):
    """Potential energy by JAX, its data, PyTorch's own and a start; checked on the way."""
    posterior = Posterior(model, args, kwargs)
    start = {n: x[0] for n, x in posterior.initial_params(1).items()}
    potential, data = build_potential(posterior.potential_fn, start, engine="xla")
    return potential, data, posterior, start


def test_sites_plates_and_sizes():
    t = target(location, Y)
    assert [(s.name, s.kind) for s in t.sites] == [
        ("mu", "latent"),
        ("twice", "deterministic"),
        ("y", "observed"),
    ]
    assert [(p.name, p.size, p.subsampled) for p in t.plates] == [("datum", 4, False)]
    assert t.language == "pyro" and t.size == 1
    np.testing.assert_array_equal(t.observed_values["y"], Y)


def test_functions_of_the_target_take_data_as_arguments():
    t = target(location, Y)
    z = jnp.array([0.4])
    exact = lambda y: float(  # noqa: E731
        torch.distributions.Normal(0.4, 1.0).log_prob(y).sum()
        + torch.distributions.Normal(0.0, 10.0).log_prob(torch.tensor(0.4))
    )
    assert float(t.log_density(z, Y)) == pytest.approx(exact(Y), rel=1e-6)
    other = Y + 1
    assert float(t.log_density(z, other)) == pytest.approx(exact(other), rel=1e-6)
    # changed in place
    other += 1
    assert float(t.log_density(z, other)) == pytest.approx(exact(other), rel=1e-6)
    assert t.constrain(z, Y) == {"mu": pytest.approx(0.4), "twice": pytest.approx(0.8)}
    assert t.unconstrain({"mu": jnp.array(0.4)}, Y) == pytest.approx([0.4])
    terms = jax.jit(lambda z: t.log_likelihood_sites(t.unravel(z), Y)["y"])(z)
    expected = torch.distributions.Normal(0.4, 1.0).log_prob(Y)
    np.testing.assert_allclose(terms, expected, rtol=1e-6)


def simplex_and_lkj(y=PAIRS):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    factor = pyro.sample("factor", dist.LKJCholesky(2, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    with pyro.plate("datum", 2):
        pyro.sample("y", dist.MultivariateNormal(p[:2], scale_tril=scale[:, None] * factor), obs=y)


def ordered_and_interval():
    u = pyro.sample("u", dist.Uniform(-1.0, 3.0))
    base = dist.Normal(u, torch.ones(3)).to_event(1)
    ordered = dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()])
    pyro.sample("cuts", ordered)


def masked_and_scaled(y=Y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    mask = torch.tensor([True, False, True, True])
    with poutine.scale(scale=0.3), poutine.mask(mask=mask), pyro.plate("datum", 4):
        pyro.sample("y", dist.StudentT(3.0, mu, 1.0), obs=y)


def sequential_plate():
    total = pyro.sample("a", dist.Normal(0.0, 1.0))
    for i in pyro.plate("step", 3):
        total = total + pyro.sample(f"e{i}", dist.Normal(total, 1.0))


@poutine.reparam(config={"on_circle": ProjectedNormalReparam(), "theta": LocScaleReparam(0.0)})
def reparametrised():
    angle = pyro.sample("angle", dist.VonMises(0.3, 2.0))
    on_circle = pyro.sample("on_circle", dist.ProjectedNormal(torch.tensor([1.0, 0.5])))
    pyro.sample("theta", dist.Normal(angle + on_circle[0], 0.5))


def in_place(y=Y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    means = torch.zeros(4)
    means[1:] += mu
    means[0] = mu**2
    means.clamp_(max=0.5)
    pyro.sample("y", dist.Normal(means, 1.0).to_event(1), obs=y)


class Network(PyroModule):
    def __init__(self):
        super().__init__()
        self.first = PyroModule[nn.Linear](1, 3)
        self.first.weight = PyroSample(dist.Normal(0.0, 1.0).expand([3, 1]).to_event(2))
        self.second = nn.Linear(3, 1)

    def forward(self, x, y=None):
        mean = self.second(torch.relu(self.first(x))).squeeze(-1)
        sigma = pyro.sample("sigma", dist.Exponential(1.0))
        with pyro.plate("datum", len(x)):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def double_precision(y=DOUBLE):
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0).double(), 1.0))
    pyro.sample("y", dist.Normal(mu, 1.0).expand([4]).to_event(1), obs=y)


MODELS = {
    "location": (location, (Y,), {"scale": 2.0}),
    "no data": (location, (), {}),
    "simplex and LKJ": (simplex_and_lkj, (), {}),
    "ordered and interval": (ordered_and_interval, (), {}),
    "mask and scale": (masked_and_scaled, (), {}),
    "sequential plate": (sequential_plate, (), {}),
    "reparam": (reparametrised, (), {}),
    "in place": (in_place, (), {}),
    "module": (Network(), (Y[:, None], Y), {}),
    "float64": (double_precision, (), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_potential_is_pyros(name):
    model, args, kwargs = MODELS[name]
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(False):
        potential, data, posterior, start = potential_of(model, *args, **kwargs)
        expected = posterior.potential_fn(start)
    with jax.enable_x64(potential.double):
        found = potential({n: x.numpy() for n, x in start.items()}, data)
        assert str(found.dtype) == ("float64" if potential.double else "float32")
        assert potential.double == (name == "float64")
        rtol = 1e-12 if potential.double else 1e-5
        np.testing.assert_allclose(found, expected.item(), rtol=rtol)
    # Pyro's own initialize_model, asked anew, has the same potential
    _, own, _, _ = initialize_model(model, args, kwargs)
    assert own(start).item() == pytest.approx(expected.item(), rel=1e-6)


def test_new_data_of_the_same_shape_give_an_equal_program():
    one, *_ = potential_of(location, Y)
    other, *_ = potential_of(location, 2 * Y)
    longer, *_ = potential_of(location, torch.cat([Y, Y]))
    assert one == other and hash(one) == hash(other)
    assert one != longer


# --- what JAX cannot evaluate -----------------------------------------------------------------


def branching():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    if x > 0:
        pyro.factor("f", -x)


def escaping():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", x * torch.as_tensor(np.sin(x.detach().numpy())))


def escaping_number():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", x * float(np.sin(x.detach().numpy())))


def drawing():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", x * torch.randn(()))


def unknown():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", torch.special.bessel_j0(x) + torch.special.airy_ai(x))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x**3

    @staticmethod
    def backward(ctx, g):
        return g


def custom_gradient():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", Cube.apply(x))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (branching, r"Python number or as a shape at test_target.py:\d+"),
        (escaping, r"outside of PyTorch; it is used at test_target.py:\d+"),
        (escaping_number, r"does not do the same at all values.*at test_target.py:\d+"),
        (drawing, r"random numbers at test_target.py:\d+"),
        (unknown, r"'special_bessel_j0' \(at test_target.py:\d+\), 'special_airy_ai' \(at"),
        (custom_gradient, r"autograd.Function 'Cube', at test_target.py:\d+"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_jax_cannot_evaluate_is_named_with_its_line(model, words):
    with pytest.raises(TracingError, match=words):
        potential_of(model)


def test_a_wrong_entry_of_the_table_is_caught_and_named(monkeypatch):
    monkeypatch.setitem(operations.OPERATIONS, "exp", lambda out, x: jnp.exp(x) * 1.01)

    def model():
        s = pyro.sample("s", dist.LogNormal(torch.zeros(7), 1.0).to_event(1))
        pyro.factor("f", -torch.exp(s / 3).sum())

    with pytest.raises(MismatchError, match=r"Operation 'exp' at .*give another value"):
        potential_of(model)


def test_a_wrong_gradient_in_the_table_is_caught_and_named(monkeypatch):
    def wrong(out, x):
        return jax.lax.stop_gradient(jnp.tanh(x))

    monkeypatch.setitem(operations.OPERATIONS, "tanh", wrong)

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        pyro.factor("f", 5 * torch.tanh(x).sum())

    with pytest.raises(MismatchError, match=r"Operation 'tanh' at .*give another gradient"):
        potential_of(model)


# --- what no kernel takes ---------------------------------------------------------------------


def test_a_support_that_depends_on_another_site_is_refused():
    def model():
        top = pyro.sample("top", dist.HalfNormal(1.0))
        pyro.sample("x", dist.Uniform(0.0, top))

    with pytest.raises(UnsupportedModelError, match=r"site 'x' \(Uniform\) depends on the value"):
        target(model)


def test_a_support_without_bijection_is_refused():
    def model():
        pyro.sample("x", dist.VonMises3D(torch.tensor([0.0, 0.0, 1.0])))

    with pytest.raises(UnsupportedModelError, match=r"spherical sample site 'x'.*ProjectedNormal"):
        target(model)


def test_explain_names_discrete_sites_and_minibatches():
    def discrete():
        pyro.sample("k", dist.Poisson(2.0))

    def minibatch():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("datum", 4, subsample_size=2) as i:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=Y[i])

    found = ppl_ext.explain(discrete)
    assert found.target.language == "pyro"
    assert "'k' is discrete (Poisson)" in found.verdicts["NUTS"]
    assert "plate 'datum' draws 2 of 4" in ppl_ext.explain(minibatch).verdicts["ULD"]
    verdicts = ppl_ext.explain(location, Y).verdicts
    fits = {name for name, reason in verdicts.items() if reason is None}
    assert fits == {"HMC", "NUTS", "PoissonMH", "ProximalIMH", "TunaMH", "ULD"}
    assert {"DPSlice", "ExchangeMH"} <= set(verdicts)
    with pytest.raises(TypeError, match="must be a callable"):
        target([])


def test_a_reparametrised_site_is_deterministic():
    @poutine.reparam(config={"theta": LocScaleReparam(0.0)})
    def model():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        theta = pyro.sample("theta", dist.Normal(0.0, tau))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=torch.tensor(1.0))

    t = target(model)
    assert [(s.name, s.kind) for s in t.sites] == [
        ("tau", "latent"),
        ("theta_decentered", "latent"),
        ("theta", "deterministic"),
        ("y", "observed"),
    ]
    values = t.constrain(jnp.array([0.0, 3.0]))
    # the scale tau = exp(0)
    assert float(values["theta"]) == pytest.approx(3.0)


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_random_numbers_in_the_model_are_refused(engine):
    posterior = Posterior(lambda: pyro.sample("mu", dist.Normal(torch.randn(()), 1.0)), (), {})
    with pytest.raises(UnsupportedModelError, match="draws random numbers outside of"):
        build_potential(posterior.potential_fn, posterior.start, engine)
