"""Summaries of mixtures against counts by hand, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from ppl_ext import _arviz
from ppl_ext.diagnostics import (
    clusters,
    overhead_report,
    plot_coclustering,
    plot_num_clusters,
    plot_predictive_density,
    predictive_density,
)

pytestmark = pytest.mark.arviz

RNG = np.random.default_rng(0)
# two chains of 50 draws: points 0-3 mostly together, 4-5 mostly together
LABELS = np.tile([0, 0, 0, 0, 1, 1], (2, 50, 1))
LABELS[:, ::5, 3] = 2
LABELS[:, 1::5, 5] = 0
LABELS[1] = np.choose(LABELS[1], [1, 0, 2])


def run(labels: Any = LABELS, **stats: Any) -> Any:
    dims = ("chain", "draw")
    number = np.array([[len(set(draw)) for draw in chain] for chain in LABELS])
    groups: dict[str, Any] = {"posterior": xr.Dataset({"G_num_clusters": (dims, number)})}
    variables = {name: (dims, value) for name, value in stats.items()}
    if labels is not None:
        variables["labels"] = ((*dims, "point"), labels)
    if variables:
        groups["sample_stats"] = xr.Dataset(variables)
    return _arviz.from_groups(groups)


def expected_vi(partition: np.ndarray, draws: np.ndarray) -> float:
    """Wade & Ghahramani 2018, equation 13, from its definition."""
    total = 0.0
    for i in range(len(partition)):
        same = partition == partition[i]
        together = [(draw == draw[i])[same].sum() for draw in draws]
        total += np.log2(same.sum()) - 2 * np.log2(np.mean(together))
    return total


def test_pairs_and_numbers_are_counted() -> None:
    found = clusters(run())
    assert found.coclustering is not None and found.partition is not None
    assert found.coclustering[0, 3] == pytest.approx(0.8)
    assert found.coclustering[4, 5] == pytest.approx(0.8)
    assert found.coclustering[0, 5] == pytest.approx(0.2)
    assert found.coclustering[3, 5] == pytest.approx(0.2)
    assert found.num_clusters.to_dict() == pytest.approx({2: 0.8, 3: 0.2})
    assert found.partition.tolist() == [0, 0, 0, 0, 1, 1]
    table = found.summary
    assert table.loc["G_num_clusters", "mean"] == pytest.approx(2.2)
    assert table.loc["pairs together", "mean"] == pytest.approx(
        0.6 * 20 / 36 + 0.2 * 14 / 36 + 0.2 * 26 / 36
    )
    assert {"ess_bulk", "ess_tail", "r_hat"} <= set(table.columns)
    assert "concentration" not in table.index


def test_labels_may_be_swapped_in_any_draw() -> None:
    swapped = RNG.permuted(np.tile(np.arange(3), (2, 50, 1)), axis=-1)
    renamed = np.take_along_axis(swapped, LABELS, -1)
    ours, theirs = clusters(run()), clusters(run(renamed))
    np.testing.assert_array_equal(ours.coclustering, theirs.coclustering)
    np.testing.assert_array_equal(ours.partition, theirs.partition)


@pytest.mark.parametrize("loss", ["binder", "vi"])
def test_the_partition_has_the_least_loss_of_those_drawn(loss: Any) -> None:
    labels = RNG.integers(0, 3, (1, 60, 7))
    number = np.array([[len(set(draw)) for draw in labels[0]]])
    groups = {
        "posterior": xr.Dataset({"G_num_clusters": (("chain", "draw"), number)}),
        "sample_stats": xr.Dataset({"labels": (("chain", "draw", "point"), labels)}),
    }
    found = clusters(_arviz.from_groups(groups), loss=loss)
    assert found.partition is not None and found.coclustering is not None
    draws = labels[0]
    if loss == "vi":
        losses = [expected_vi(draw, draws) for draw in draws]
        chosen = expected_vi(found.partition, draws)
    else:
        losses = [
            np.mean([((d[:, None] == d) != (e[:, None] == e)).sum() for e in draws]) for d in draws
        ]
        same = found.partition[:, None] == found.partition
        chosen = np.mean([(same != (e[:, None] == e)).sum() for e in draws])
    assert chosen == pytest.approx(min(losses))


def test_points_can_be_chosen_and_many_are_thinned() -> None:
    found = clusters(run(), points=[5, 4])
    assert found.points.tolist() == [5, 4]
    assert found.coclustering is not None and found.coclustering.shape == (2, 2)
    wide = np.tile(LABELS, (1, 1, 200))
    assert len(clusters(run(wide)).points) == 500
    for bad, words in (([6], "between 0 and 5"), ([0.5], "indices"), ([], "indices")):
        with pytest.raises(ValueError, match=f"`points`.*{words}"):
            clusters(run(), points=bad)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"hold no 'H_num_clusters'.*G_num_clusters"):
        clusters(run(), name="H")
    with pytest.raises(ValueError, match="`loss`"):
        clusters(run(), loss="none")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="to_arviz"):
        clusters(3)
    lost = np.zeros((2, 50), bool)
    lost[1, 25:] = True
    with pytest.raises(ValueError, match=r"25% of the draws follow an overflow.*rerun"):
        clusters(run(overflow=lost))
    with pytest.raises(TypeError, match="DPSlice"):
        predictive_density(3)


def test_overhead_that_is_not_of_the_law_is_seen() -> None:
    """1 + Poisson(alpha L): 3e-5 false alarms each by the level of |z| < 4."""
    shape = (2, 500)
    room = RNG.normal(0.5, 1, shape)
    predicted = np.where(room > 0, 1 + 2 * room, 0.0)
    overhead = np.where(room > 0, 1 + RNG.poisson(2 * np.maximum(room, 0)), 0)
    stats = {
        "overhead_predicted": predicted,
        "num_clusters": np.full(shape, 5),
        "num_instantiated": 5 + overhead,
        "overflow": np.zeros(shape, bool),
    }

    def report(overhead: np.ndarray) -> Any:
        variables = {"overhead": overhead, **stats}
        group = xr.Dataset({k: (("chain", "draw"), v) for k, v in variables.items()})
        return overhead_report(_arviz.from_groups({"posterior": group, "sample_stats": group}))

    found = report(overhead)
    assert abs(found.z) < 4 and found.overhead == pytest.approx(overhead.mean())
    assert found.predicted == pytest.approx(predicted.mean()) and "by the law" in str(found)
    # one component too few wherever there is one
    with pytest.warns(UserWarning, match="law"):
        assert abs(report(np.maximum(overhead - 1, 0)).z) > 4
    stats["overflow"] = np.ones(shape, bool)
    with pytest.raises(ValueError, match="rerun"):
        report(overhead)


def test_pictures() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    found = clusters(run())
    ax = plot_num_clusters(found)
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([0.8, 0.2])
    ax = plot_coclustering(found)
    shown = np.asarray(ax.images[0].get_array())
    # blocks of four and two, the point that leaves its block now and then last
    assert (shown[:3, :3] == 1).all() and shown[0, 3] == pytest.approx(0.8)
    assert shown[0, 4] == pytest.approx(0.0, abs=0.21) and shown.shape == (6, 6)
    with pytest.raises(ValueError, match="labels"):
        plot_coclustering(clusters(run(None)))
    density = xr.DataArray(RNG.uniform(size=(2, 50, 4)), dims=("chain", "draw", "point"))
    given = plt.subplots()[1]
    ax = plot_predictive_density(density, np.arange(4.0), prob=0.5, ax=given)
    assert ax is given
    np.testing.assert_allclose(ax.lines[0].get_ydata(), density.mean(("chain", "draw")))
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(float(density.quantile(0.75, ("chain", "draw")).max()))
    with pytest.raises(ValueError, match="`grid`"):
        plot_predictive_density(density, np.arange(3.0))
    with pytest.raises(ValueError, match="`prob`"):
        plot_predictive_density(density, np.arange(4.0), prob=1.5)
    plt.close("all")
