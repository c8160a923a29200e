"""The tutorials: notebooks belong to their sources, and run without an error or a warning.

`make tutorials` runs this with `WRITE_TUTORIALS=1`, which stores the notebooks with their outputs.
"""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.tutorials

FOLDER = Path(__file__).parents[1] / "tutorials"
SOURCES = sorted(FOLDER.glob("*.py"))


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def faults(notebook):
    """What a reader should not see: errors, and anything on standard error."""
    return [
        output.get("text") or "\n".join(output.get("traceback", []))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_tutorial_runs_without_error_or_warning(source):
    jupytext = pytest.importorskip("jupytext")
    from nbclient import NotebookClient

    notebook = jupytext.read(source)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # the other tests compile without optimisation
    client.execute(env={name: x for name, x in os.environ.items() if name != "XLA_FLAGS"})
    assert not faults(notebook)
    stored = source.with_suffix(".ipynb")
    if os.environ.get("WRITE_TUTORIALS"):
        for cell in notebook.cells:
            # of every run anew, and no business of the reader
            cell.metadata.pop("execution", None)
        for i, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{i}"
        jupytext.write(notebook, stored)
    written = jupytext.read(stored)
    assert cells(written) == cells(jupytext.read(source)), "run `make tutorials`"
    assert not faults(written)
    assert any(cell.get("outputs") for cell in written.cells)


def test_the_index_lists_every_tutorial():
    index = (FOLDER / "README.md").read_text()
    assert SOURCES
    assert all(f"({source.stem}.ipynb)" in index for source in SOURCES)
    assert index.count(".ipynb)") == len(SOURCES)
