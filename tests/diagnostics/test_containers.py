"""Both ArviZ generations: containers in, the same kind out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics import MissingScoresError, psd

pytestmark = pytest.mark.arviz
GROUP = "unconstrained_posterior"


def draws_and_scores(run: Any) -> tuple[xr.Dataset, xr.Dataset]:
    draws, scores = _arviz.get_group(run, GROUP), _arviz.get_group(run, f"{GROUP}_score")
    assert draws is not None and scores is not None
    return draws, scores


def as_dataset(values: Any) -> xr.Dataset:
    return values.to_dataset() if isinstance(values, xr.DataTree) else values


def test_groups_round_trip(run: Any) -> None:
    assert _arviz.is_container(run) and not _arviz.is_container(xr.Dataset())
    assert _arviz.group_names(run) == ("posterior", GROUP, f"{GROUP}_score")
    assert _arviz.get_group(run, "prior") is None
    new = xr.Dataset({"mu": (("chain", "draw"), np.zeros((1, 2)))})
    more = _arviz.with_groups(run, {"prior": new, "posterior": new})
    assert _arviz.group_names(run) == ("posterior", GROUP, f"{GROUP}_score")
    assert "prior" in _arviz.group_names(more)
    for name in ("prior", "posterior"):
        xr.testing.assert_identical(_arviz.get_group(more, name), new)
    xr.testing.assert_identical(_arviz.get_group(more, GROUP), _arviz.get_group(run, GROUP))
    assert "theta" in _arviz.get_group(run, "posterior")


def test_container_type_of_the_installed_generation(run: Any) -> None:
    version = int(_arviz.arviz().__version__.split(".")[0])
    assert type(run).__name__ == ("DataTree" if version else "InferenceData")
    assert _arviz.has_inference_data() == (version == 0)


def test_types_are_those_of_ess(run: Any) -> None:
    az = _arviz.arviz()
    draws, scores = draws_and_scores(run)
    ess = az.ess(draws) if _arviz.has_inference_data() else az.ess(run, group=GROUP)
    assert type(psd(run)) is type(ess)
    assert type(psd(draws, scores)) is type(az.ess(draws))
    theta = draws["theta"]
    assert type(psd(theta, scores["theta"])) is type(az.ess(theta))
    mu = draws["mu"].values
    assert np.ndim(psd(mu, -mu)) == np.ndim(az.ess(mu)) == 0
    for name, expected in az.ess(draws).data_vars.items():
        assert psd(draws, scores)[name].dims == expected.dims


def test_values_keep_names_dimensions_and_coordinates(run: Any) -> None:
    draws, scores = draws_and_scores(run)
    found = as_dataset(psd(run))
    assert list(found) == ["theta", "mu", "p"]
    assert found["theta"].dims == ("school", "k")
    assert found["theta"].school.values.tolist() == ["Choate", "Deerfield"]
    for school in ("Choate", "Deerfield"):
        at = {"school": school, "k": 20}
        expected = psd(draws["theta"].sel(at).values, scores["theta"].sel(at).values)
        assert float(found["theta"].sel(at)) == pytest.approx(float(expected))
    np.testing.assert_allclose(found["p"], psd(draws["p"].values, scores["p"].values))

    per_chain = as_dataset(psd(run, per_chain=True))
    assert per_chain["theta"].dims == ("chain", "school", "k")
    np.testing.assert_array_equal(per_chain["chain"], draws["chain"])
    joint = as_dataset(psd(run, joint=True))
    assert float(joint["psd"]) ** 2 == pytest.approx(
        sum(float((values**2).sum()) for values in found.data_vars.values())
    )
    assert as_dataset(psd(run, joint=True, per_chain=True))["psd"].dims == ("chain",)


def test_selection_of_variables_and_coordinates(run: Any) -> None:
    everything = as_dataset(psd(run))
    assert list(as_dataset(psd(run, var_names="mu"))) == ["mu"]
    assert list(as_dataset(psd(run, var_names=["~mu"]))) == ["theta", "p"]
    assert list(as_dataset(psd(run, var_names="^t", filter_vars="regex"))) == ["theta"]
    part = as_dataset(psd(run, var_names=["theta"], coords={"school": ["Choate"]}))
    xr.testing.assert_allclose(part["theta"], everything["theta"].sel(school=["Choate"]))


def test_order_of_dimensions_and_of_variables_does_not_matter(run: Any) -> None:
    draws, scores = draws_and_scores(run)
    shuffled = scores[["p", "theta", "mu"]].transpose("draw", "k", ...)
    xr.testing.assert_identical(psd(draws, shuffled), psd(draws, scores))


def test_variables_without_transformation_may_be_in_the_posterior_alone(run: Any) -> None:
    draws, scores = draws_and_scores(run)
    sparse = _arviz.from_groups(
        {
            "posterior": _arviz.get_group(run, "posterior"),
            GROUP: draws[["p"]],
            f"{GROUP}_score": scores,
        }
    )
    xr.testing.assert_allclose(as_dataset(psd(sparse))[["theta", "mu", "p"]], as_dataset(psd(run)))


def test_scores_given_beside_a_container_replace_its_own(run: Any) -> None:
    _, scores = draws_and_scores(run)
    doubled = as_dataset(psd(run, 2 * scores, order=1))
    xr.testing.assert_allclose(doubled, 2 * as_dataset(psd(run, order=1)))


def test_missing_or_mismatching_scores_are_refused(run: Any) -> None:
    draws, scores = draws_and_scores(run)
    without = _arviz.from_groups({"posterior": _arviz.get_group(run, "posterior")})
    with pytest.raises(MissingScoresError, match=r"no group .*_score.*z_grad.*attach_scores"):
        psd(without)
    with pytest.raises(MissingScoresError, match="score is missing"):
        psd(draws)
    with pytest.raises(ValueError, match=r"same variables, but only one .*\['mu'\]"):
        _ = psd(_arviz.with_groups(run, {f"{GROUP}_score": scores[["theta", "p"]],
                                         GROUP: draws}))  # fmt: skip
    with pytest.raises(TypeError, match="score must be a Dataset like the draws"):
        psd(draws, scores["mu"])
    shifted = scores.assign_coords(school=["Choate", "Exeter"])
    with pytest.raises(ValueError, match="coordinates of draws and scores differ"):
        psd(draws, shifted)
    with pytest.raises(ValueError, match="without 'chain'"):
        psd(draws.isel(chain=0), scores.isel(chain=0))
    with pytest.raises(ValueError, match="sample_dims must name"):
        psd(draws, scores, sample_dims=["chain", "draw", "k"])


def test_diagnostics_do_not_import_arviz_before_they_are_used() -> None:
    code = """import sys, ppl_ext.diagnostics
print(*(name in sys.modules for name in ("arviz", "matplotlib")))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
