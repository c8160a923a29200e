"""What the pictures show, and that nothing but a picture needs matplotlib."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ppl_ext.diagnostics import plot_psd, plot_psd_order, psd, summary

pytestmark = pytest.mark.arviz


@pytest.fixture
def pictures() -> Iterator[None]:
    plt = pytest.importorskip("matplotlib.pyplot")
    yield
    plt.close("all")


def test_rows_are_the_scalars_with_their_discrepancies(run: Any, pictures: None) -> None:
    ax = plot_psd(run)
    table = summary(run, round_to="none")
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[-3:] == ["mu", "p[0]", "p[1]"] and labels[0] == "theta[Choate, 10]"
    shown = {labels[int(y)]: x for line in ax.lines for x, y in line.get_xydata()}
    assert len(shown) == len(labels)
    for name in labels[:-2]:
        assert shown[name] == pytest.approx(table.loc[name, "psd"])
    biased = ax.lines[1]
    assert {labels[int(y)] for y in biased.get_ydata()} == set(table.index[table["psd_t"] > 4])
    # independent draws: two features of variance one each
    noise = ax.patches[labels.index("mu")].get_width()
    assert noise == pytest.approx(np.sqrt(2 / 1200), rel=0.2)


def test_options_are_those_of_psd(run: Any, pictures: None) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    given = plt.subplots()[1]
    ax = plot_psd(run, var_names=["theta"], coords={"school": ["Choate"]}, order=3, ax=given)
    assert ax is given
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"theta[Choate, {k}]" for k in (10, 20, 30)
    ]
    assert ax.get_xlabel() == "PSD of order 3"


@pytest.mark.parametrize("interactions", [True, False])
def test_curve_of_orders(interactions: bool, pictures: None) -> None:
    x = np.random.default_rng(0).normal(size=(4, 500, 2)) * [1.0, 1.1]
    ax = plot_psd_order(x, -x, max_order=3, interactions=interactions)
    expected = [
        psd(x, -x, order=order, joint=True, interactions=interactions) for order in (1, 2, 3)
    ]
    np.testing.assert_allclose(ax.lines[0].get_xydata().T, [[1, 2, 3], expected])
    sizes = [2, 5, 9] if interactions else [2, 4, 6]
    np.testing.assert_allclose(ax.lines[1].get_ydata(), np.sqrt(np.divide(sizes, 2000)), rtol=0.2)


def test_interactions_are_left_out_where_there_are_too_many(pictures: None) -> None:
    x = np.random.default_rng(0).normal(size=(4, 20, 5))
    assert plot_psd_order(x, -x).get_ylabel() == "joint PSD, without interactions"
    assert plot_psd_order(x, -x, max_order=1).get_ylabel() == "joint PSD, with interactions"


def test_draws_that_are_not_finite_are_reported(pictures: None) -> None:
    x = np.random.default_rng(0).normal(size=(4, 100, 2))
    x[0, 0] = np.inf
    with pytest.warns(UserWarning, match="plot_psd: 1 of 400 draws are left out"):
        plot_psd(x, -x)
    with pytest.warns(UserWarning, match="plot_psd_order: 1 of 400 draws are left out"):
        plot_psd_order(x, -x)


@pytest.mark.parametrize("plot", [plot_psd, plot_psd_order])
def test_without_matplotlib(plot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    x = np.zeros((4, 100, 2))
    with pytest.raises(ImportError, match=rf"{plot.__name__} needs .*pip install 'ppl-ext\[plots"):
        plot(x, -x)


def test_matplotlib_is_not_imported_before_a_picture() -> None:
    code = "import sys, ppl_ext.diagnostics; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
