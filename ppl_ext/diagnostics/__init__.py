"""Diagnostics that ask whether draws come from the posterior; those of ArviZ ask for mixing."""

if __name__ != "ppl_ext.diagnostics":
    raise ImportError("import ppl_ext.diagnostics, not diagnostics")

from ppl_ext.diagnostics.check import Check, Finding, check
from ppl_ext.diagnostics.discrepancy import psd
from ppl_ext.diagnostics.exchange_report import ExchangeReport, exchange_report
from ppl_ext.diagnostics.goodness_of_fit import PSDTest, psd_test
from ppl_ext.diagnostics.imh_report import IMHReport, imh_report
from ppl_ext.diagnostics.ksd import ksd
from ppl_ext.diagnostics.overhead_report import OverheadReport, overhead_report
from ppl_ext.diagnostics.partition_plots import (
    plot_coclustering,
    plot_num_clusters,
    plot_predictive_density,
)
from ppl_ext.diagnostics.partitions import Clusters, clusters, predictive_density
from ppl_ext.diagnostics.plots import plot_psd, plot_psd_order
from ppl_ext.diagnostics.scores import attach_scores
from ppl_ext.diagnostics.summary import summary
from ppl_ext.diagnostics.svi import from_svi
from ppl_ext.diagnostics.tune import Tuning, tune
from ppl_ext.diagnostics.uld_report import ULDReport, uld_report
from ppl_ext.errors import MissingScoresError, TooFewDrawsError

__all__ = [
    "Check",
    "Clusters",
    "ExchangeReport",
    "Finding",
    "IMHReport",
    "MissingScoresError",
    "OverheadReport",
    "PSDTest",
    "TooFewDrawsError",
    "Tuning",
    "ULDReport",
    "attach_scores",
    "check",
    "clusters",
    "exchange_report",
    "from_svi",
    "imh_report",
    "ksd",
    "overhead_report",
    "plot_coclustering",
    "plot_num_clusters",
    "plot_predictive_density",
    "plot_psd",
    "plot_psd_order",
    "predictive_density",
    "psd",
    "psd_test",
    "summary",
    "tune",
    "uld_report",
]
