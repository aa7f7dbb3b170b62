"""What may be imported where: planning and inspecting without jax, importing without effects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autopar.cli import main
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


@pytest.mark.slow
def test_what_a_wheel_has(tmp_path: Path) -> None:
    """All modules (a wheel was empty once), what pages are made of, examples and scripts; and a text for a package
    index, where no file lies beside it."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'autopar[test]'")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        there = set(wheel.namelist())
        (about,) = (wheel.read(name).decode() for name in there if name.endswith("/METADATA"))
        wheel.extractall(tmp_path / "installed")
    sources = {f.relative_to(ROOT).as_posix() for f in (ROOT / "autopar").rglob("*") if f.is_file()}
    assert {f for f in sources if "__pycache__" not in f} - there == set()
    assert not re.search(r"\]\((?!https?://)|!\[|<!--", about) and "## Five minutes" in about
    code = "from autopar.cli import main; import sys; sys.exit(main(['examples', '--to', 'copied']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    for folder in ("examples", "cluster"):
        expected = {f.relative_to(ROOT) for f in (ROOT / folder).rglob("*") if "__pycache__" not in f.parts}
        assert {f.relative_to(tmp_path / "copied") for f in (tmp_path / "copied" / folder).rglob("*")} == expected
    assert os.access(tmp_path / "copied" / "cluster" / "ssh.sh", os.X_OK)


def test_examples_are_listed_and_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    assert re.search(r"examples/vit\.py +A vision transformer", capsys.readouterr().out)
    assert main(["examples", "--to", str(tmp_path / "here")]) == 0
    assert main(["examples", "--to", str(tmp_path / "here")]) == 2
    assert "has a folder 'examples' already; name another" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["examples", "--to", str(tmp_path / "file")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
