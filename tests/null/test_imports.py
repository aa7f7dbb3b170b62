"""What may be imported where: planning and inspecting without jax, importing without effects."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autopar.ir.serde import save_plan
from tests.null.handmade import handmade_plan
from tests.null.pipeline_files import handmade_pipeline

ROOT = Path(__file__).parents[2]
WITHOUT = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"  # importing them raises ImportError


def run_python(code: str, *, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh interpreter where ``without`` cannot be imported."""
    text = WITHOUT.format(names=without) + code
    return subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["diff"]])
def test_plans_can_be_read_where_neither_jax_nor_numpy_can_be_imported(tmp_path: Path, command: list[str]) -> None:
    path = str(tmp_path / "plan.json")
    save_plan(handmade_plan(), path)
    files = [path, path] if command == ["diff"] else [path]
    code = f"from autopar.cli import main\nsys.exit(main({[*command, *files]!r}))"
    done = run_python(code, without=("jax", "jaxlib", "numpy", "scipy", "pulp", "highspy"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["diff"], ["simulate"]])
def test_pipeline_plans_can_be_read_and_simulated_without_jax_and_numpy(tmp_path: Path, command: list[str]) -> None:
    path = str(tmp_path / "plan.json")
    save_plan(handmade_pipeline(), path)
    files = [path, path] if command == ["diff"] else [path]
    code = f"from autopar.cli import main\nsys.exit(main({[*command, *files]!r}))"
    done = run_python(code, without=("jax", "jaxlib", "numpy", "scipy", "pulp", "highspy"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_tests_above_do_block_imports() -> None:
    assert "ModuleNotFoundError" in run_python("import jax", without=("jax",)).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "without"),
    [
        ("autopar.ir", ("jax", "jaxlib", "numpy", "scipy", "pulp", "highspy", "rich")),
        ("autopar.cost", ("jax", "jaxlib")),
        ("autopar.intra_op", ("jax", "jaxlib")),
        ("autopar.inter_op", ("jax", "jaxlib")),
        ("autopar.inter_op.schedules", ("jax", "jaxlib", "numpy", "scipy")),
        ("autopar.inter_op.program", ("jax", "jaxlib", "numpy", "scipy")),
    ],
)
def test_planning_packages_import_without_jax(package: str, without: tuple[str, ...]) -> None:
    code = (
        f"import importlib, pkgutil\npackage = importlib.import_module({package!r})\n"
        f"for m in pkgutil.walk_packages(package.__path__, {package!r} + '.'): importlib.import_module(m.name)\n"
    )
    done = run_python(code, without=without)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_autopar_imports_no_jax_and_starts_nothing() -> None:
    done = run_python("import os, autopar\nprint('jax' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.slow
def test_no_submodule_takes_a_public_name() -> None:
    code = (
        "import autopar, pkgutil\n"
        "taken = {m.name for m in pkgutil.iter_modules(autopar.__path__)} & set(autopar.__all__)\n"
        "import autopar.checking, autopar.frontend.user_rules\n"
        "print(taken, autopar.check.__name__, autopar.sharding_rule.__name__)"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("set() check sharding_rule\n", "")


def test_all_packages_are_shipped() -> None:
    """What `pip install` finds: a wheel was empty once."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    include = settings["packages"]["find"]["include"]
    packages = {".".join(f.parent.relative_to(ROOT).parts) for f in (ROOT / "autopar").rglob("__init__.py")}
    assert all(any(fnmatch.fnmatchcase(package, glob) for glob in include) for package in packages)
    assert (ROOT / "autopar" / settings["package-data"]["autopar"][0]).exists()
