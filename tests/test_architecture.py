"""The rules of the package's layout: who may import whom, and what a public name must have."""

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ppl_ext"
LANGUAGES = ("numpyro", "pyro", "torch")
FRONT_ENDS = ("ppl_ext.numpyro", "ppl_ext.pyro")

# the results of functions, which have the example
RESULTS = {
    "Check",
    "Clusters",
    "ExchangeReport",
    "Finding",
    "IMHReport",
    "OverheadReport",
    "PSDTest",
    "Plan",
    "Result",
    "Tuning",
    "ULDReport",
}


def imports(path, *, at_import_only=False):
    """Absolute names of all modules that a file imports, those for type checkers left out.

    With `at_import_only`, without those inside functions too.
    """
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = set()

    def visit(node):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, *filter(None, [node.module])])
            found.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        elif at_import_only and isinstance(node, ast.FunctionDef | ast.Lambda):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def under(names, *packages):
    """The `names` that are one of `packages` or inside one."""
    return {n for n in names if any(n == p or n.startswith(f"{p}.") for p in packages)}


def relative(path):
    return str(path.relative_to(PACKAGE))


ALGORITHMS = [PACKAGE / "target.py", *sorted((PACKAGE / "kernels").glob("*.py"))]
READERS = [
    PACKAGE / "convert.py",
    PACKAGE / "registry.py",
    *sorted((PACKAGE / "diagnostics").glob("*.py")),
    # the programs are written in a language, and imported by `load`
    *sorted(p for p in (PACKAGE / "models").glob("*.py") if not p.stem.endswith("_programs")),
]


def test_reader_of_imports(tmp_path):
    path = ROOT / "ppl_ext" / "kernels" / "not_there.py"

    class Text(type(path)):
        def read_text(self, encoding):
            return (
                "import a.b, c\nfrom d import e\nfrom ..target import Target\nfrom . import uld\n"
                "if TYPE_CHECKING:\n    import hidden\nelse:\n    import shown\n"
                "def f():\n    import inside\n"
            )

    everything = {"a.b", "c", "d.e", "ppl_ext.target.Target", "ppl_ext.kernels.uld", "shown"}
    assert imports(Text(path), at_import_only=True) == everything
    assert imports(Text(path)) == everything | {"inside"}


@pytest.mark.parametrize("path", ALGORITHMS, ids=relative)
def test_algorithms_know_no_language_and_no_arviz(path):
    forbidden = (*LANGUAGES, *FRONT_ENDS, "arviz", "ppl_ext._arviz", "ppl_ext.convert")
    assert not under(imports(path), *forbidden)


@pytest.mark.parametrize("path", READERS, ids=relative)
def test_readers_reach_a_front_end_only_through_the_registry(path):
    assert not under(imports(path, at_import_only=True), *LANGUAGES, *FRONT_ENDS)
    if path.name != "registry.py":
        assert not under(imports(path), *FRONT_ENDS)


MODULES = [
    "ppl_ext",
    "ppl_ext.checkpoint",
    "ppl_ext.devices",
    "ppl_ext.diagnostics",
    "ppl_ext.models",
    "ppl_ext.numpyro",
]
if importlib.util.find_spec("pyro"):
    MODULES.append("ppl_ext.pyro")
PUBLIC = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=".".join)
def test_public_names_are_documented_by_an_example(module, name):
    thing = getattr(importlib.import_module(module), name)
    doc = thing.__doc__
    assert doc, f"{module}.{name} has no docstring"
    if name in RESULTS or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return
    assert ">>> " in doc, f"the docstring of {module}.{name} has no example"


@pytest.mark.parametrize("name", ["models", "diagnostics"])
def test_top_level_links_are_not_importable(name):
    link = ROOT / name
    if not link.is_dir():
        pytest.skip("this checkout has no symbolic links (Windows: git's core.symlinks)")
    assert link.resolve() == PACKAGE / name
    run = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert f"ImportError: import ppl_ext.{name}, not {name}" in run.stderr
