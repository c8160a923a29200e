"""What `target` reads off a NumPyro model, and its density against formulas written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from numpyro.infer.reparam import CircularReparam
from scipy import stats

import ppl_ext
from ppl_ext.errors import UnsupportedModelError
from ppl_ext.numpyro.target import target


def everything(y, *, scale=1.0):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("school", 3):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        with numpyro.plate("test", y.shape[0]):
            numpyro.sample("y", dist.Normal(theta, scale), obs=y)
    numpyro.sample("weights", dist.Dirichlet(jnp.ones(4)))
    numpyro.sample("upper", dist.Uniform(0.0, tau))
    numpyro.deterministic("ratio", mu / tau)
    numpyro.factor("penalty", -(mu**2))


Y = np.arange(6.0).reshape(2, 3)


def test_sites_and_plates_are_those_of_the_model():
    found = target(everything, Y)
    assert [(site.name, site.kind) for site in found.sites] == [
        ("mu", "latent"),
        ("tau", "latent"),
        ("theta", "latent"),
        ("y", "observed"),
        ("weights", "latent"),
        ("upper", "latent"),
        ("ratio", "deterministic"),
    ]
    assert [site.name for site in found.latent] == ["mu", "tau", "theta", "weights", "upper"]
    assert found.structure == {"mu": (), "tau": (), "theta": (3,), "weights": (3,), "upper": ()}
    assert found.size == 9
    assert [(p.name, p.size, p.subsampled) for p in found.plates] == [
        ("school", 3, False),
        ("test", 2, False),
    ]
    sites = {site.name: site for site in found.sites}
    assert sites["y"].plates == ("school", "test")
    assert (sites["weights"].shape, sites["weights"].event_dim) == ((4,), 1)
    assert sites["tau"].distribution == "HalfNormal"
    assert sites["weights"].support == "Simplex"
    assert [name for name, site in sites.items() if site.dynamic_support] == ["upper"]


def test_log_density_is_the_joint_density_with_the_jacobian(x64):
    """Each site by its textbook transform: exp, stick breaking, scaled logistic."""
    found = target(everything, Y)
    z = jax.random.normal(jax.random.key(0), (2, 9))

    def by_hand(z):
        # coordinates are ordered by site name
        mu, log_tau, theta, logit, sticks = z[0], z[1], z[2:5], z[5], z[6:9]
        tau = np.exp(log_tau)
        total = stats.norm(0, 2).logpdf(mu) - mu**2
        total += stats.halfnorm.logpdf(tau) + log_tau
        total += stats.norm(mu, tau).logpdf(theta).sum()
        total += stats.norm(theta, 0.5).logpdf(Y).sum()
        # a Dirichlet(1, 1, 1, 1) is a product of betas of the fractions broken off the stick
        fractions = 1 / (1 + np.exp(-(sticks - np.log([3, 2, 1]))))
        total += stats.beta(1, [3, 2, 1]).logpdf(fractions).sum()
        total += np.log(fractions * (1 - fractions)).sum()
        # uniform on (0, tau): -log tau, and tau p (1 - p) for the transform
        p = 1 / (1 + np.exp(-logit))
        return total + np.log(p * (1 - p))

    values = [float(found.log_density(each, Y, scale=0.5)) for each in z]
    np.testing.assert_allclose(values, [by_hand(each) for each in np.asarray(z)], rtol=1e-9)


def test_constrain_and_unconstrain_are_inverse(x64):
    found = target(everything, Y)
    z = jax.random.normal(jax.random.key(1), (9,))
    values = found.constrain(z, Y)
    assert set(values) == {"mu", "tau", "theta", "weights", "upper", "ratio"}
    assert 0 < values["upper"] < values["tau"]
    np.testing.assert_allclose(values["weights"].sum(), 1)
    np.testing.assert_allclose(values["ratio"], values["mu"] / values["tau"])
    np.testing.assert_allclose(found.unconstrain(values, Y), z, rtol=1e-6)
    with pytest.raises(ValueError, match=r"lacks latent sites \['tau'\]"):
        found.unconstrain({k: v for k, v in values.items() if k != "tau"}, Y)


def test_one_target_serves_other_data():
    found = target(everything, Y)
    z, data = jnp.zeros(9), Y + 1
    bound = found.bind(data, scale=2.0)
    np.testing.assert_allclose(bound.log_density(z), found.log_density(z, data, scale=2.0))
    difference = found.log_density(z, data, scale=2.0) - found.log_density(z, Y, scale=2.0)
    expected = stats.norm(0, 2).logpdf(data).sum() - stats.norm(0, 2).logpdf(Y).sum()
    np.testing.assert_allclose(difference, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("distribution", "shape", "size"),
    [
        (lambda: dist.LKJCholesky(3, 2.0), (3, 3), 3),
        (lambda: dist.LKJ(3, 2.0), (3, 3), 3),
        (lambda: dist.Dirichlet(jnp.ones((2, 3))).to_event(1), (2, 3), 4),
        (
            lambda: dist.TransformedDistribution(
                dist.Normal(0, 1).expand([4]).to_event(1),
                dist.transforms.OrderedTransform(),
            ),
            (4,),
            4,
        ),
        (lambda: dist.Wishart(5.0, jnp.eye(2)), (2, 2), 3),
        (lambda: dist.TruncatedNormal(0.0, 1.0, low=-1.0, high=2.0), (), 1),
    ],
    ids=["LKJCholesky", "LKJ", "Dirichlet", "ordered", "Wishart", "TruncatedNormal"],
)
def test_supports_with_fewer_or_bounded_coordinates(x64, distribution, shape, size):
    """The log density is log p(x) + log |det dx/dz|, the determinant by automatic derivatives."""
    found = target(lambda: numpyro.sample("x", distribution()))
    (site,) = found.sites
    assert (site.shape, found.size) == (shape, size)
    z = 0.5 * jax.random.normal(jax.random.key(2), (size,))
    x = jax.jit(found.constrain)(z)["x"]
    assert bool(jnp.all(distribution().support(x)))
    np.testing.assert_allclose(jax.jit(found.unconstrain)({"x": x}), z, rtol=1e-6)

    def free_coordinates(z):
        """Coordinates in which the density is stated."""
        x = found.constrain(z)["x"]
        if shape in ((3, 3), (2, 2)):
            below = -1 if shape == (3, 3) else 0
            return x[jnp.tril_indices(shape[0], below)]
        return jnp.ravel(x[..., :-1] if shape == (2, 3) else x)

    jacobian = jax.jit(jax.jacfwd(free_coordinates))(z)
    expected = distribution().log_prob(x).sum() + jnp.linalg.slogdet(jacobian)[1]
    np.testing.assert_allclose(jax.jit(found.log_density)(z), expected, rtol=1e-8)


def test_improper_sites_have_the_density_of_their_factors():
    def model():
        rate = numpyro.sample("rate", dist.ImproperUniform(constraints.positive, (), ()))
        numpyro.factor("prior", 2 * jnp.log(rate) - rate)

    found = target(model)
    assert [site.name for site in found.sites] == ["rate"], "a factor is no site"
    np.testing.assert_allclose(found.log_density(jnp.array([0.3])), 0.9 - np.exp(0.3), rtol=1e-6)


def test_parameters_stay_at_their_initial_value():
    def model():
        location = numpyro.param("location", 3.0)
        numpyro.sample("x", dist.Normal(location, 1.0))

    found = target(model)
    assert (found.size, [site.name for site in found.sites]) == (1, ["x"])
    assert jax.grad(found.log_density)(jnp.array([3.0])) == 0


def test_masked_and_scaled_data_count_as_in_numpyro():
    def model(y, mask):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.handlers.scale(scale=2.0), numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(mu, 1).expand([3]), obs=y)

    y, mask = np.array([1.0, np.inf, 2.0]), np.array([True, False, True])
    found = target(model, y, mask)
    expected = stats.norm.logpdf(0) + 2 * stats.norm.logpdf([1, 2]).sum()
    np.testing.assert_allclose(found.log_density(jnp.zeros(1), y, mask), expected, rtol=1e-6)


def test_discrete_and_subsampled_models_are_described():
    def model(y):
        k = numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3))
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("customers", 10, subsample_size=4) as i:
            numpyro.sample("y", dist.Normal(mu + k, 1), obs=y[i])

    found = target(model, jnp.zeros(10))
    assert [(site.name, site.discrete) for site in found.latent] == [("k", True), ("mu", False)]
    assert found.structure == {"mu": ()}
    (plate,) = found.plates
    assert (plate.size, plate.subsample_size, plate.subsampled) == (10, 4, True)


def test_a_program_that_asks_for_values_is_looked_at_all_the_same():
    """Rows of NumPy data cannot be taken by what is only a shape; nor can Python branch on it."""

    def model(y):
        with numpyro.plate("customers", 10, subsample_size=4) as i:
            mean = numpyro.sample("mean", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])
        if numpyro.sample("switch", dist.Bernoulli(1.0)):
            numpyro.sample("on", dist.Uniform(0.0, mean.max() ** 2))

    found = target(model, np.zeros(10))
    assert [site.name for site in found.latent] == ["mean", "switch", "on"]
    assert found.structure == {"mean": (4,), "on": ()}


def test_operations_of_the_model_are_not_run():
    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        jax.debug.callback(lambda x: ran.append(x), x)

    ran = []
    target(model)
    jax.effects_barrier()
    assert not ran


def test_a_circular_support_is_refused_by_name_and_can_be_reparametrised():
    def model():
        numpyro.sample("angle", dist.VonMises(0.0, 1.0))

    with pytest.raises(UnsupportedModelError, match=r"'angle' \(VonMises\).*CircularReparam"):
        target(model).check_continuous("ULD")
    assert "'angle' (VonMises)" in ppl_ext.explain(model).verdicts["ULD"]
    found = target(numpyro.handlers.reparam(model, config={"angle": CircularReparam()}))
    assert found.size == 1
    assert "angle" in found.constrain(jnp.zeros(1))


def test_a_model_must_be_callable():
    with pytest.raises(TypeError, match="`model` must be a callable NumPyro program, got str"):
        target("model")
