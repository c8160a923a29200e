"""What is installed: its contents, what importing it costs, and its use from another folder."""

import json
import os
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


def loaded_modules(module, folder):
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    return set(json.loads(output("-c", code, cwd=folder)))


def test_import_loads_nothing_that_numpyro_does_not(tmp_path):
    # so that the import stays cheap. What is loaded is compared rather than timed: a time depends
    # on the machine
    numpyro = loaded_modules("numpyro", tmp_path)
    for module in ("ppl_ext", "ppl_ext.numpyro"):
        added = loaded_modules(module, tmp_path) - numpyro
        assert module in added
        packages = {name.partition(".")[0] for name in added}
        assert packages - sys.stdlib_module_names == {"ppl_ext"}


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


@pytest.mark.slow
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
