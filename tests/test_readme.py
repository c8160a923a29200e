"""README.md, CONTRIBUTING.md, pages of docs: what they show runs and agrees with the code."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ppl_ext

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md"]
DOCS = ["docs/check.md", "docs/dp_slice.md", "docs/exchange.md"]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page", [*PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in DOCS)]
)
def test_python_blocks_run_in_order(page, monkeypatch):
    found = blocks(page, "python")
    assert found
    namespace = {"__name__": "__main__"}
    for block in found:
        # a block that begins with a path stands for that file: later blocks may import it
        path = re.match(r"# (ppl_ext/\S+)\.py\n", block)
        if path is None:
            exec(compile(block, page, "exec"), namespace)
            continue
        name = path[1].replace("/", ".")
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
        exec(compile(block, page, "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES)
def test_shell_blocks_hold_only_make_targets(page):
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M)
    commands = "".join(blocks(page, "sh")).splitlines()
    assert commands
    for command in commands:
        program, target = command.split()
        assert program == "make"
        assert target in targets


def test_every_fence_has_a_known_language():
    for page in PAGES:
        opened = re.findall(r"^```(.*)$", (ROOT / page).read_text(), re.M)[::2]
        assert set(opened) <= {"python", "sh", "text", "toml"}


def test_links_lead_to_files():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), f"{page}: {link}"


def test_kernel_table_is_the_registry():
    rows = [
        [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell.strip()) for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("|")
    ]
    head, body = rows[0], rows[2:]
    table = ppl_ext.available().reset_index()
    assert head == list(table.columns)
    # kernels of other installed packages are not ours to describe
    ours = [e for e in table.to_numpy().tolist() if hasattr(getattr(ppl_ext, e[1]), e[0])]
    # Pyro need not be installed
    languages = {row[1] for row in ours}
    assert [row for row in body if row[1] in languages] == ours
