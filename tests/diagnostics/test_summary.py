"""ArviZ's table with the Stein columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from ppl_ext import _arviz
from ppl_ext.diagnostics import MissingScoresError, psd, psd_test, summary

pytestmark = pytest.mark.arviz
GROUP = "unconstrained_posterior"


def values_of(run: Any, name: str) -> Any:
    found = psd(run)
    return found[name] if _arviz.has_inference_data() else found.to_dataset()[name]


def test_table_is_that_of_arviz_with_two_columns(run: Any) -> None:
    table = summary(run, round_to="none")
    plain = _arviz.arviz().summary(run, round_to="none")
    assert list(table.columns) == [*plain.columns, "psd", "psd_t"]
    pd.testing.assert_frame_equal(pd.DataFrame(table[plain.columns]), pd.DataFrame(plain))


def test_rows_show_their_own_coordinate(run: Any) -> None:
    table = summary(run, round_to="none")
    theta = values_of(run, "theta")
    for school in ("Choate", "Deerfield"):
        for k in (10, 20, 30):
            expected = float(theta.sel(school=school, k=k))
            assert table.loc[f"theta[{school}, {k}]", "psd"] == pytest.approx(expected)
    assert table.loc["mu", "psd"] == pytest.approx(float(values_of(run, "mu")))
    assert (table.loc[["mu", "theta[Choate, 20]"], "psd_t"] < 4).all()
    assert (table.loc[[f"theta[Deerfield, {k}]" for k in (10, 20, 30)], "psd_t"] > 4).all()


def test_t_is_the_worst_of_the_coordinate_in_the_test(run: Any) -> None:
    features = psd_test(run, standardize="diag", interactions=False, n_boot=9).features
    table = summary(run, round_to="none")
    worst = features["t"].abs().loc[["mu", "mu^2"]].max()
    assert table.loc["mu", "psd_t"] == pytest.approx(worst)
    third = summary(run, order=3, round_to="none")
    assert (third["psd"].dropna() > table["psd"].dropna()).all()


def test_simplex_rows_show_the_worst_coordinate_and_others_are_blank(run: Any) -> None:
    table = summary(run, round_to="none")
    simplex = [f"p[{i}]" for i in range(3)]
    np.testing.assert_allclose(table.loc[simplex, "psd"], float(values_of(run, "p").max()))
    assert table.loc[["count", "twice"], ["psd", "psd_t"]].isna().all(axis=None)
    assert table.drop(index=["count", "twice"])[["psd", "psd_t"]].notna().all(axis=None)


def test_selection_is_that_of_arviz(run: Any) -> None:
    whole = summary(run)
    for arguments in (
        {"var_names": ["theta", "mu"], "coords": {"school": ["Deerfield"], "k": [30, 10]}},
        {"var_names": ["^t"], "filter_vars": "regex"},
        {"var_names": ["~theta"], "kind": "stats"},
    ):
        table = summary(run, **arguments)
        assert list(table.index) == list(_arviz.arviz().summary(run, **arguments).index)
        pd.testing.assert_frame_equal(
            pd.DataFrame(table[["psd", "psd_t"]]),
            pd.DataFrame(whole.loc[table.index, ["psd", "psd_t"]]),
        )


def test_rounding(run: Any) -> None:
    exact, default, two = (summary(run, round_to=r)["psd"] for r in ("none", None, 2))
    np.testing.assert_array_equal(default, exact.round(3))
    np.testing.assert_array_equal(two, exact.round(2))


def test_draws_that_are_not_finite_are_reported(run: Any) -> None:
    scores = _arviz.get_group(run, f"{GROUP}_score")
    assert scores is not None
    scores["mu"] = scores["mu"].where(scores["mu"] < 2.0)
    spoiled = _arviz.with_groups(run, {f"{GROUP}_score": scores})
    with pytest.warns(UserWarning, match=r"summary: \d+ of 1200 draws are left out"):
        assert np.isfinite(summary(spoiled).loc["mu", "psd"])


def test_what_is_refused(run: Any) -> None:
    posterior = _arviz.get_group(run, "posterior")
    assert posterior is not None
    with pytest.raises(MissingScoresError, match="attach_scores"):
        summary(_arviz.from_groups({"posterior": posterior}))
    with pytest.raises(TypeError, match="data must be an arviz"):
        summary(posterior)
    with pytest.raises(TypeError, match="fmt='long'"):
        summary(run, fmt="long")
    with pytest.raises(ValueError, match="no group 'posterior'"):
        summary(_arviz.from_groups({"prior": posterior}))
