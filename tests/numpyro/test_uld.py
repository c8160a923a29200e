"""ULD: what its arguments accept, and how it refuses models and starts, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import reparam
from numpyro.infer import MCMC
from numpyro.infer.reparam import CircularReparam
from scipy import stats

from ppl_ext.errors import InitializationError, UnsupportedModelError
from ppl_ext.numpyro import ULD
from ppl_ext.numpyro.target import target

Y = np.linspace(-1.0, 1.0, 8)


def regression(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(x @ slope, sigma), obs=y)


X = np.stack([np.ones(8), Y], 1)
NOISY = X @ np.array([1.0, -2.0]) + 0.5 * np.sin(37 * Y)


def start(model, *args, init_params=None, **kwargs):
    return ULD(model, **kwargs).init(jax.random.key(0), 10, init_params, args, {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"integrator": "leapfrog"}, "`integrator` must be one of 'baoab', .*'kbk', got 'leapfrog"),
        ({"adjust": "mala"}, "`adjust` must be one of 'ghmc', 'malt', None, got 'mala'"),
        ({"integrator": "rmm", "adjust": "ghmc"}, '"rmm"` has no acceptance ratio.*"obabo"'),
        ({"integrator": "quicksort", "adjust": "malt"}, "no acceptance ratio"),
        (
            {"integrator": "kbk", "precondition": "dense"},
            "keeps the coordinates of the prior apart",
        ),
        ({"prior_precision": 1.0}, "`prior_precision` must be None with integrator 'baoab', got 1"),
        ({"integrator": "kbk", "prior_precision": -1.0}, "finite numbers >= 0, got -1.0"),
        ({"integrator": "kbk", "prior_precision": [1.0]}, "a number or a dict by site"),
        ({"integrator": "kbk", "prior_precision": {"slope": "1"}}, r"prior_precision\['slope'\]"),
        ({"precondition": "full"}, "`precondition` must be one of 'diag', 'dense', None, got 'fu"),
        ({"step_size": -0.1}, "`step_size` must be a positive finite number, got -0.1"),
        ({"step_size": 0.0}, "`step_size`"),
        ({"step_size": float("nan")}, "`step_size`"),
        ({"step_size": float("inf")}, "`step_size`"),
        ({"step_size": "0.1"}, "`step_size` must be a positive number, got '0.1'"),
        ({"step_size": True}, "`step_size`"),
        ({"friction": -1.0}, "`friction`"),
        ({"num_steps": 0}, "`num_steps`"),
        ({"num_steps": 2**31}, "`num_steps` must be an integer from 1 to 2147483647, got 21474"),
        ({"bias_tolerance": None}, "`bias_tolerance` must be a positive number, got None"),
        ({"precondition": np.eye(2)}, "`precondition` must be one of 'diag', 'dense', None, got "),
        ({"num_steps": 2.5}, "`num_steps` must be an integer from 1 to 2147483647, got 2.5"),
        ({"bias_tolerance": 0.0}, "`bias_tolerance`"),
        ({"potential_fn": lambda z: 0.0}, "exactly one of `model` and `potential_fn`"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(arguments, words):
    with pytest.raises(ValueError, match=words):
        ULD(regression, **arguments)


def test_numbers_of_numpy_are_numbers():
    settings = ULD(regression, step_size=np.float32(0.5), num_steps=np.int64(3)).settings
    assert (settings.step_size, settings.num_steps) == (0.5, 3)


def test_a_model_must_be_given_and_callable():
    with pytest.raises(TypeError, match="`init_strategy` must be callable, got int"):
        ULD(regression, init_strategy=3)
    with pytest.raises(ValueError, match="exactly one of `model` and `potential_fn`"):
        ULD()
    with pytest.raises(TypeError, match="`model` must be callable, got str"):
        ULD("model")
    with pytest.raises(TypeError, match="`potential_fn` must be callable, got float"):
        ULD(potential_fn=1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"integrator": "kbk"}, marks=pytest.mark.slow),
        pytest.param({"integrator": "rmm", "precondition": "dense"}, marks=pytest.mark.slow),
        pytest.param({"integrator": "obabo", "adjust": "malt"}, marks=pytest.mark.slow),
        {"precondition": None},
        {"step_size": 0.3, "friction": 1.5, "num_steps": 4},
    ],
    ids=str,
)
def test_every_choice_finds_the_regression_slope(arguments):
    """Five standard errors at an effective size of 300: the sampler has 500 or more.

    Given sigma the slope is normal; sigma is integrated out on a grid.
    """
    mcmc = MCMC(ULD(regression, **arguments), num_warmup=500, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), X, NOISY)
    slope = mcmc.get_samples()["slope"]
    mean, sd = exact_slope(NOISY)
    np.testing.assert_array_less(abs(slope.mean(0) - mean), 5 / np.sqrt(300) * sd)
    np.testing.assert_array_less(abs(slope.std(0) / sd - 1), 0.25)
    fields = mcmc.get_extra_fields()
    if "num_steps" in arguments:
        assert (fields["num_steps"] == 4).all()
        np.testing.assert_allclose(fields["adapt_state.step_size"], 0.3, rtol=1e-6)


def exact_slope(y):
    sigmas = np.linspace(0.01, 3, 3000)
    means, squares, weights = [], [], []
    for sigma in sigmas:
        covariance = np.linalg.inv(X.T @ X / sigma**2 + np.eye(2))
        mean = covariance @ X.T @ y / sigma**2
        means.append(mean)
        squares.append(np.diag(covariance) + mean**2)
        marginal = stats.multivariate_normal(np.zeros(8), X @ X.T + sigma**2 * np.eye(8))
        weights.append(marginal.logpdf(y) - sigma**2 / 2)
    weight = np.exp(weights - np.max(weights))
    weight /= weight.sum()
    mean = weight @ np.array(means)
    return mean, np.sqrt(weight @ np.array(squares) - mean**2)


def test_tighter_bias_tolerance_makes_smaller_steps():
    sizes = []
    for tolerance in (0.05, 0.002):
        mcmc = MCMC(
            ULD(regression, bias_tolerance=tolerance),
            num_warmup=500,
            num_samples=10,
            progress_bar=False,
        )
        mcmc.run(jax.random.key(0), X, NOISY)
        sizes.append(float(mcmc.last_state.adapt_state.step_size))
    assert sizes[1] < 0.7 * sizes[0]


def test_the_progress_bar_tells_step_size_steps_and_undone_steps():
    state = start(regression, X, Y)
    text = ULD(regression).get_diagnostics_str(state)
    assert text.startswith("step size ") and text.endswith("0 steps/draw, 0 undone")


@pytest.mark.slow
def test_vectorised_chains_are_the_sequential_ones():
    """With a random time; float32 rounding grows over the steps."""
    draws = []
    for method in ("sequential", "vectorized"):
        mcmc = MCMC(
            ULD(regression, integrator="rmm", step_size=0.05, friction=1.0, num_steps=2),
            num_warmup=0,
            num_samples=5,
            num_chains=2,
            chain_method=method,
            progress_bar=False,
        )
        mcmc.run(jax.random.key(0), X, NOISY)
        draws.append(mcmc.get_samples(group_by_chain=True)["slope"])
    np.testing.assert_allclose(*draws, rtol=1e-4, atol=1e-5)
    assert (draws[0][0] != draws[0][1]).all()


# --- the prior of kbk -------------------------------------------------------------------------


def mixed_priors(prior_sd):
    numpyro.sample("plain", dist.Normal(2.0, prior_sd))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    numpyro.sample("hierarchical", dist.Normal(0, tau).expand([2]).to_event(1))
    numpyro.sample("tails", dist.StudentT(3))
    with numpyro.plate("groups", 3):
        numpyro.sample("vector", dist.Normal(jnp.arange(3.0), 0.5))


def test_gaussian_priors_with_constant_parameters_are_read_from_the_model():
    mean, precision = target(mixed_priors, 1.0).gaussian_prior(4.0)
    np.testing.assert_allclose(mean["plain"], 2.0)
    np.testing.assert_allclose(precision["plain"], 1 / 16)
    np.testing.assert_allclose(mean["vector"], [0, 1, 2])
    np.testing.assert_allclose(precision["vector"], [4, 4, 4])
    for name in ("tau", "hierarchical", "tails"):
        assert not np.any(precision[name]) and not np.any(mean[name])


def test_gaussian_prior_ignores_the_likelihood_and_validation():
    """It is not run: here it would fail on the unknown values."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        numpyro.sample("y", dist.Normal(mu, 1, validate_args=True), obs=y)

    with numpyro.validation_enabled():
        _, precision = target(model, 1.0).gaussian_prior(1.0)
    np.testing.assert_allclose(precision["mu"], 0.25)


def test_prior_precision_may_be_given_by_site():
    kernel = ULD(regression, integrator="kbk", prior_precision={"slope": [1.0, 3.0]})
    state = kernel.init(jax.random.key(0), 10, None, (X, Y), {})
    state = kernel.sample(state, (X, Y), {})
    np.testing.assert_array_equal(state.adapt_state.prior_precision, [0.0, 1.0, 3.0])
    with pytest.raises(ValueError, match=r"unknown sites \['slop'\]; the model has.*'slope'"):
        start(regression, X, Y, integrator="kbk", prior_precision={"slop": 1.0})
    with pytest.raises(ValueError, match="given for `potential_fn`"):
        ULD(potential_fn=lambda z: 0.0, integrator="kbk")


@pytest.mark.parametrize("integrator", ["rmm", "quicksort", "ee", "kbk"])
def test_a_normal_truncated_by_a_factor_yields_no_nan(integrator):
    """Half-normal: five standard errors and the bias at the wall."""

    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.factor("wall", jnp.where(x > 0, 0.0, -jnp.inf))

    kernel = ULD(model, integrator=integrator, step_size=0.1)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params={"x": jnp.array(0.5)})
    x = mcmc.get_samples()["x"]
    assert (x > 0).all()
    assert np.isfinite(mcmc.get_extra_fields()["z_grad"]["x"]).all()
    assert abs(x.mean() - np.sqrt(2 / np.pi)) < 0.09


# --- models it does not take ------------------------------------------------------------------


def test_a_discrete_site_is_named_with_a_way_out():
    def model():
        numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("cluster", dist.Categorical(jnp.ones(3) / 3))

    with pytest.raises(UnsupportedModelError, match=r"'cluster' is discrete.*DiscreteGibbs"):
        start(model)


def test_a_delta_site_is_named_with_a_way_out():
    def model():
        numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("fixed", dist.Delta(1.0))

    with pytest.raises(UnsupportedModelError, match=r"'fixed' has a Delta.*deterministic site"):
        start(model)


def test_a_minibatch_is_refused_and_the_full_plate_taken():
    def model(y, size):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("customers", len(y), subsample_size=size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.asarray(y)[i])

    assert jnp.isfinite(start(model, Y, len(Y)).potential_energy)
    with pytest.raises(UnsupportedModelError, match=r"'customers' draws 7 of 8.*numpyro.*HMCECS"):
        start(model, Y, 7)


def test_a_circular_site_is_refused_and_taken_once_reparametrised():
    def model():
        numpyro.sample("angle", dist.VonMises(0.5, 4.0))

    with pytest.raises(UnsupportedModelError, match=r"'angle'.*CircularReparam"):
        start(model)
    circular = reparam(model, config={"angle": CircularReparam()})
    mcmc = MCMC(ULD(circular), num_warmup=300, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0))
    angle = mcmc.get_samples()["angle"]
    # E cos(angle - 0.5) = I1(4) / I0(4), five standard errors at an effective size of 300
    assert abs(jnp.cos(angle - 0.5).mean() - 0.8635) < 0.04


def test_empty_data_are_named():
    with pytest.raises(UnsupportedModelError, match=r"'y' is empty \(shape \(0,\)\).*data"):
        start(regression, X[:0], Y[:0])


def test_a_model_without_latent_sites_is_refused():
    def model(y):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)

    with pytest.raises(UnsupportedModelError, match="no continuous latent site"):
        start(model, Y)


def test_shapes_that_do_not_match_show_both_shapes():
    with pytest.raises(ValueError, match=r"(?s)\(7,\).*\(8,\)|\(8,\).*\(7,\)"):
        start(regression, X, Y[:7])


# --- starts it does not take ------------------------------------------------------------------

GOOD = {"slope": jnp.zeros(2), "sigma": jnp.zeros(())}


def test_a_start_may_be_given_for_every_latent_site():
    state = start(regression, X, Y, init_params=GOOD)
    np.testing.assert_array_equal(state.z["slope"], GOOD["slope"])


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (jnp.zeros(3), TypeError, "`init_params` must be a dict of unconstrained values"),
        ({"slope": jnp.zeros(2)}, ValueError, r"lacks the latent sites \['sigma'\]"),
        ({**GOOD, "tau": jnp.zeros(())}, ValueError, r"unknown sites \['tau'\]"),
        ({**GOOD, "slope": jnp.zeros(3)}, ValueError, r"'slope'\]` has shape \(3,\).*\(2,\)"),
    ],
    ids=["no dict", "missing", "unknown", "shape"],
)
def test_a_start_that_does_not_match_the_sites_is_refused_by_name(params, error, words):
    with pytest.raises(error, match=words):
        start(regression, X, Y, init_params=params)


@pytest.mark.parametrize("chains", [1, 2])
def test_a_start_without_density_is_refused_and_names_the_site(chains):
    def model():
        numpyro.sample("tame", dist.Normal(0, 1))
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("wall", dist.Normal(0, jnp.where(x > 0, 1.0, jnp.nan)), obs=0.0)

    mcmc = MCMC(
        ULD(model),
        num_warmup=1,
        num_samples=1,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    shape = () if chains == 1 else (2,)
    params = {"tame": jnp.zeros(shape), "x": jnp.full(shape, -1.0)}
    with (
        numpyro.validation_enabled(False),
        pytest.raises(InitializationError, match="observed site 'wall'"),
    ):
        mcmc.run(jax.random.key(0), init_params=params)


def test_a_potential_function_without_density_at_the_start_is_refused():
    kernel = ULD(potential_fn=lambda z: jnp.log(z["x"]))
    with pytest.raises(InitializationError, match="not finite at `init_params`"):
        kernel.init(jax.random.key(0), 1, {"x": jnp.array(-1.0)}, (), {})


def test_sampling_needs_a_start():
    state = start(regression, X, Y)
    with pytest.raises(RuntimeError, match="`init` must be called before `sample`"):
        ULD(regression).sample(state, (X, Y), {})


def test_a_kernel_without_model_has_no_model_to_wrap():
    with pytest.raises(ValueError, match="no model to wrap"):
        ULD(potential_fn=lambda z: 0.0).wrap_model(lambda model: model)


@pytest.mark.parametrize("data", [[1.0, 2.0], "ab", np.array(["a"]), np.array([1, 2], object)])
def test_data_that_are_no_array_of_numbers_are_refused_by_site(data):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    with pytest.raises(InitializationError, match=r"Observed site 'y' .* numpy.asarray"):
        start(model, data)


@pytest.mark.filterwarnings("error")
def test_cells_masked_inside_to_event_may_hold_anything():
    def model(y, mask):
        mu = numpyro.sample("mu", dist.Gamma(2.0, 1.0))
        poisson = dist.Poisson(mu).expand([4]).mask(mask).to_event(1)
        numpyro.sample("y", poisson, obs=y)

    state = start(model, np.array([1, 2, -1, 0]), np.array([True, True, False, True]))
    assert np.isfinite(state.potential_energy)
