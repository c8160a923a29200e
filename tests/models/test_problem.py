"""What a caller sees of the reference problems."""

import functools
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import numpyro
import pytest
from numpyro import handlers
from numpyro.infer import init_to_uniform, init_to_value
from numpyro.infer.util import constrain_fn, initialize_model

from ppl_ext import models
from ppl_ext.models import Problem

NAMES = models.list()
# Sites of the numpyro programs that are observed without being an argument of that name.
OBSERVED = {"arK": {"y"}, "hmm_example": set(), "logmesquite": {"log_weight"}}


@functools.cache
def initial(name: str, precision: int = 32) -> Any:
    """Return what NumPyro's kernels start from: unconstrained values, their potential, gradient.

    Compiled as a whole, the data being traced as with MCMC's `jit_model_args`.
    """
    problem = models.load(name)
    strategy = (
        init_to_uniform
        if problem.init_values is None
        else init_to_value(values=problem.init_values)
    )

    @jax.jit
    def start(key: Any, args: Any, kwargs: Any) -> Any:
        return initialize_model(
            key, problem.model, init_strategy=strategy, model_args=args, model_kwargs=kwargs
        ).param_info

    with jax.enable_x64(precision == 64):
        return start(jax.random.key(0), problem.args, problem.kwargs)


def initial_sites(problem: Problem, **options: bool) -> dict[str, Any]:
    """Return the constrained values of `initial`."""

    @jax.jit
    def constrain(z: Any) -> Any:
        return constrain_fn(problem.model, problem.args, problem.kwargs, z, **options)

    return constrain(initial(problem.name).z)


def test_list_is_sorted() -> None:
    assert sorted(NAMES) == NAMES
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_metadata(name: str) -> None:
    problem = models.load(name)
    assert problem.name == problem.model.__name__ == name
    assert problem.description and problem.source and problem.licence == "BSD-3-Clause"
    assert repr(problem).startswith(f"<Problem {name}: {len(problem.reference)} parameters")
    for summary in problem.reference.values():
        assert set(summary) == {"mean", "sd", "q5", "q50", "q95", "mcse_mean"}
        assert summary["q5"] < summary["q50"] < summary["q95"]
        assert 0 < summary["mcse_mean"] < summary["sd"] / 50


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("name", NAMES)
def test_initial_density_and_gradient_are_finite(name: str, precision: int) -> None:
    for leaf in jax.tree.leaves(initial(name, precision)):
        assert leaf.dtype == f"float{precision}"
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("name", NAMES)
def test_flat_has_the_parameters_of_the_reference(name: str) -> None:
    problem = models.load(name)
    sites = initial_sites(problem, return_deterministic=True)
    flat = problem.flat(sites)
    assert list(flat) == list(problem.reference)
    assert {value.shape for value in flat.values()} == {()}
    repeated = {site: np.stack([[value] * 3] * 2) for site, value in sites.items()}
    grouped = problem.flat(repeated)
    assert {value.shape for value in grouped.values()} == {(2, 3)}
    assert all((grouped[parameter] == flat[parameter]).all() for parameter in flat)


@pytest.mark.parametrize("name", NAMES)
def test_observed_sites(name: str) -> None:
    """With its data a model observes them; without the keyword arguments it draws alike ones."""
    problem = models.load(name)
    sites = initial_sites(problem)
    fixed = handlers.seed(handlers.substitute(problem.model, data=sites), 0)

    def observed(trace: dict[str, Any]) -> dict[str, Any]:
        return {
            name: site
            for name, site in trace.items()
            if site["type"] == "sample"
            and name not in sites
            and not isinstance(site["fn"], numpyro.distributions.Unit)
        }

    data = observed(handlers.trace(fixed).get_trace(*problem.args, **problem.kwargs))
    assert set(data) == OBSERVED.get(name, set(problem.kwargs))
    assert all(site["is_observed"] for site in data.values())
    if problem.kwargs:
        drawn = observed(handlers.trace(fixed).get_trace(*problem.args))
        assert {k: s["value"].shape for k, s in drawn.items()} == {
            k: s["value"].shape for k, s in data.items()
        }
        assert not any(site["is_observed"] for site in drawn.values())


@pytest.mark.parametrize("name", NAMES)
def test_draws_give_the_reference(name: str) -> None:
    problem = models.load(name)
    if problem.draws is None:
        return
    assert list(problem.draws) == list(problem.reference)
    for parameter, draws in problem.draws.items():
        expected = problem.reference[parameter]
        assert draws.dtype == np.float64 and draws.ndim == 1
        np.testing.assert_allclose(draws.mean(), expected["mean"], atol=1e-4 * expected["sd"])
        np.testing.assert_allclose(draws.std(ddof=1), expected["sd"], rtol=1e-5)
        np.testing.assert_allclose(np.quantile(draws, 0.05), expected["q5"], rtol=1e-4)


def test_draws_are_stored_for_six_problems() -> None:
    assert [name for name in NAMES if models.load(name).draws is not None] == [
        "arK",
        "eight_schools_centered",
        "eight_schools_noncentered",
        "hmm_example",
        "kilpisjarvi",
        "lotka_volterra",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eight_schools", r"no problem 'eight_schools'; did you mean 'eight_schools_centered'.*"),
        ("zzz", r"no problem 'zzz'; ppl_ext\.models\.list\(\)"),
    ],
)
def test_unknown_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load(name)


def test_unknown_language() -> None:
    with pytest.raises(ValueError, match=r"ppl must be one of \('numpyro', 'pyro'\), not 'stan'"):
        models.load("arK", ppl="stan")


@pytest.mark.parametrize("package", ["pyro", "torch"])
def test_pyro_without_its_packages(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from ppl_ext import models;"
        "models.load('arK', ppl='pyro')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    # where Pyro is not installed, it is what is missing first
    assert re.match(
        rf"ImportError: ppl='pyro' needs ({package}|pyro), which is not installed: "
        r"pip install 'ppl-ext\[pyro\]'$",
        last,
    )


def test_flat_names_what_is_wrong() -> None:
    problem = models.load("arK")
    samples = {"alpha": np.zeros(4), "beta": np.zeros((4, 5)), "sigma": np.ones(4)}
    with pytest.raises(ValueError, match=r"lack the site 'sigma'; they have \['alpha', 'beta'\]"):
        problem.flat({site: samples[site] for site in ("alpha", "beta")})
    with pytest.raises(ValueError, match=r"site 'beta' of arK have shape \(5, 4\)"):
        problem.flat(samples | {"beta": np.zeros((5, 4))})


def test_import_is_light_and_bare_name_is_refused() -> None:
    code = (
        "import sys, ppl_ext.models;"
        "print({'torch', 'pyro', 'matplotlib', 'numpyro', 'ppl_ext.models.numpyro_programs'}"
        " & set(sys.modules));"
        "ppl_ext.models.load('arK');"
        "print({'torch', 'pyro', 'ppl_ext.models.pyro_programs'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\n"
