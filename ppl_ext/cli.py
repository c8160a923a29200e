"""Command line: `python -m ppl_ext kernels` and `python -m ppl_ext demo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Examples
    --------
    >>> from ppl_ext.cli import main
    >>> main(["kernels"])  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
    models draws source
    kernel language
    ...ULD numpyro ...
    0
    """
    parser = argparse.ArgumentParser(prog="ppl_ext", description="Kernels for NumPyro and Pyro.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("kernels", help="print the table of kernels")
    demo = commands.add_parser(
        "demo", help="sample two real posteriors, compare with their references, draw a picture"
    )
    demo.add_argument("--output", default="demo.png", help="picture to write (default: demo.png)")
    options = parser.parse_args(arguments)
    if options.command == "kernels":
        from ppl_ext.registry import available

        print(available().to_string())
    else:
        from ppl_ext.demo import run

        run(options.output)
    return 0
