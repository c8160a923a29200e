"""What is installed: its contents, what importing it costs, and its use from another folder."""

import json
import os
import statistics
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def output(*arguments, cwd, **environment):
    result = run(*arguments, cwd=cwd, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("module", ["ppl_ext", "ppl_ext.numpyro"])
def test_import_pulls_in_nothing_heavy(module, tmp_path):
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(output("-c", code, cwd=tmp_path)))
    assert module in loaded
    assert not loaded & {"torch", "matplotlib", "arviz", "arviz_base", "pandas"}


def test_import_time(tmp_path):
    # processor time, which other processes disturb less than the clock; both in turn, so that a
    # slow minute hits both; medians. `ppl_ext.numpyro` is what a user imports
    code = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"
    modules = ("numpyro", "ppl_ext", "ppl_ext.numpyro")
    for module in modules:
        output("-c", code.format(module), cwd=tmp_path)  # writes and caches the bytecode
    times = {module: [] for module in modules}
    for _ in range(3):
        for module in modules:
            times[module].append(float(output("-c", code.format(module), cwd=tmp_path)))
    median = {module: statistics.median(seconds) for module, seconds in times.items()}
    assert median["ppl_ext"] < 1.5 * median["numpyro"]
    assert median["ppl_ext.numpyro"] < 1.5 * median["numpyro"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Source distribution, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    output("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def package_files():
    """Files of the package in the work tree, as paths from the root."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ppl_ext").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_distributions_hold_the_whole_package(built):
    sdist, wheel = built
    files = package_files()
    assert {"ppl_ext/py.typed", "ppl_ext/models/data/nes2000.json"} <= files
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    in_wheel = {name for name in names if ".dist-info/" not in name}
    assert in_wheel == files
    assert sum(name.endswith(("/LICENSE", "/LICENSE-posteriordb")) for name in names) >= 2
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert in_sdist >= files | {"pyproject.toml", "README.md", "LICENSE"}


def test_installed_wheel_works_elsewhere(built, tmp_path):
    _, wheel = built
    site = tmp_path / "site"
    # quoted requirements would be looked up; --no-deps and --no-index ask nobody
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(site)]
    output("-m", "pip", "install", *options, str(wheel), cwd=tmp_path)
    code = (
        "import ppl_ext; from ppl_ext import models; print(ppl_ext.__file__);"
        "print(len(models.list()), models.load('nes2000').reference['sigma']['mean'] > 0)"
    )
    file, loaded = output("-c", code, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert Path(file) == site / "ppl_ext" / "__init__.py"
    stored = (ROOT / "ppl_ext" / "models" / "data").glob("*.json")
    assert loaded == f"{len(list(stored))} True"
    table = output("-m", "ppl_ext", "kernels", cwd=tmp_path, PYTHONPATH=str(site))
    assert "ULD" in table


def test_type_checker_resolves_the_package_elsewhere(tmp_path):
    (tmp_path / "check.py").write_text(
        "from ppl_ext import models\nfrom ppl_ext.models import load\n"
        "models.load(1)\nload(2)\nload('arK').reference.nothing\n"
    )
    options = ["--config-file=", "--follow-imports=silent", "--no-error-summary"]
    result = run("-m", "mypy", *options, "check.py", cwd=tmp_path)
    errors = [line.split(" error: ")[1] for line in result.stdout.splitlines() if "error" in line]
    assert [error.rpartition("[")[2] for error in errors] == [
        "arg-type]",
        "arg-type]",
        "attr-defined]",
    ], result.stdout + result.stderr
