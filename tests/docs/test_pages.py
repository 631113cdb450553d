"""The pages do what they say: their programs train the same on any number of ranks, and their parts and commands work."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdlite.launch.parser import make_parser
from hvdlite.tools import cli
from tests.support import page_blocks
from tests.support.jobs import ROOT, Start, run_each
from tests.support.pages import program_of

LIMIT = 150.0
"""Seconds for one job. Each imports much more than others do, which takes a busy machine long."""


def test_pieces_keep_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nx = 1\n```\n\n```\nshell\n```\n\n```python\nif x:\n    y = 2\n```\n")
    assert program_of(page) == "\n\n\nx = 1\n\n\n\n\n\n\n\nif x:\n    y = 2\n\n"


def losses(out: str) -> list[tuple[int, float, float]]:
    found = re.findall(r"epoch (\d+): loss ([\d.]+), accuracy ([\d.]+) %", out)
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in found]


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT + 20)
def test_torch_training(start: Start, tmp_path: Path) -> None:
    """One rank; two that stop, each with a shard of the optimizer's state; and one that goes on from there."""
    text = program_of(ROOT / "docs/torch_training.md")
    program, sharded = tmp_path / "train.py", tmp_path / "train_sharded.py"
    program.write_text(text)
    sharded.write_text(text.replace("max_grad_norm=1.0", "max_grad_norm=1.0, shard=True"))
    assert "shard=True" in sharded.read_text()
    seen = {}
    for name, size, epochs in (("alone", 1, 4), ("stopped", 2, 2), ("resumed", 1, 4)):
        folder = tmp_path / ("alone" if name == "alone" else "together")
        folder.mkdir(exist_ok=True)
        chosen = sharded if name == "stopped" else program
        ended = start("-np", str(size), "--no-tag-output", str(chosen), str(epochs), cwd=folder).end(LIMIT)
        assert ended.code == 0, ended.out + ended.err
        assert re.match(rf"{size} ranks? on 1 host \(.*MPI.*\)\n", ended.out), ended.out
        assert "Warning" not in ended.err
        seen[name] = losses(ended.out)
    assert [epoch for epoch, _, _ in seen["alone"]] == [1, 2, 3, 4]
    together = seen["stopped"] + seen["resumed"]
    assert [epoch for epoch, _, _ in together] == [1, 2, 3, 4]
    for one, several in zip(seen["alone"], together, strict=True):
        assert abs(one[1] - several[1]) < 2e-3 * max(1, one[1])
        assert abs(one[2] - several[2]) < 0.6  # two of 360 images
    assert seen["alone"][-1][2] > 85


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT + 20)
def test_keras_training(start: Start, tmp_path: Path) -> None:
    """One rank and two train alike; and one goes on from where two stopped."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed, which docs/keras_training.md is about")
    program = tmp_path / "train.py"
    program.write_text(program_of(ROOT / "docs/keras_training.md"))
    seen = {}
    for name, size, epochs in (("alone", 1, 2), ("together", 2, 2), ("resumed", 1, 3)):
        folder = tmp_path / ("alone" if name == "alone" else "together")
        folder.mkdir(exist_ok=True)
        ended = start("-np", str(size), "--no-tag-output", str(program), str(epochs), cwd=folder).end(LIMIT)
        assert ended.code == 0, ended.out + ended.err
        assert re.match(rf"{size} ranks? on 1 host \(.*MPI.*\)\n", ended.out), ended.out
        assert "Warning" not in ended.err, ended.err
        seen[name] = losses(ended.out)
        assert re.search(r"^\d+ of 360 test images are right$", ended.out, re.MULTILINE), ended.out
    assert [epoch for epoch, _, _ in seen["alone"]] == [1, 2]
    for one, two in zip(seen["alone"], seen["together"], strict=True):
        assert one == pytest.approx(two, rel=2e-3, abs=0.3)  # one of 360 images
    ((epoch, loss, _),) = seen["resumed"]
    assert epoch == 3
    assert loss < seen["together"][-1][1]


@pytest.mark.slow
def test_jax(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="JAX is not installed, which docs/jax.md is about")
    program = tmp_path / "train.py"
    program.write_text(program_of(ROOT / "docs/jax.md"))
    ended = start("-np", "2", "--no-tag-output", str(program)).end(LIMIT)
    assert ended.code == 0, ended.out + ended.err
    rows = np.random.default_rng(0).normal(size=(64, 3))
    inputs = np.column_stack([rows, np.ones(64)])
    wanted = inputs @ [1.0, -2.0, 3.0, 0.5]
    weights = np.zeros(4)
    for _ in range(20):  # the whole batch in one process
        weights -= 0.1 * 2 * inputs.T @ (inputs @ weights - wanted) / 64
    for name in ("outside", "inside"):
        found = re.search(rf"^{name} (.*)$", ended.out, re.MULTILINE)
        assert found, ended.out
        np.testing.assert_allclose([float(word) for word in found[1].split()], weights, atol=2e-4)


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
JOBS = {"torch": 3, "tf": 2, "accelerate": 2, "mlflow": 2, "optuna": 2, "wandb": 2}
"""The jobs that run the pieces of pages, with the number of ranks. Python, torch and TensorFlow start once in each."""
NEEDS = {"tf": "tensorflow", **{name: name for name in ("accelerate", "mlflow", "optuna", "wandb")}}
"""What is not installed everywhere, and jobs need."""


def pages_of(job: str) -> list[str]:
    """The pages that have pieces for a job."""
    own = [page for page in PAGES if page_blocks.PROGRAMS.get(page) == job]
    others = [page for page in PAGES if page not in page_blocks.PROGRAMS]
    return own + [
        page
        for page in others
        if any(page_blocks.part_of(page, block)[0] == job for _, block in page_blocks.blocks(page))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_piece_is_run(page: str) -> None:
    """Each piece of Python compiles, and is part of a program that runs, or has a reason."""
    for line, block in page_blocks.blocks(page):
        compile("\n" * (line - 1) + block, page, "exec")
        if page not in page_blocks.PROGRAMS:
            kind = page_blocks.part_of(page, block)[0]
            assert kind in JOBS or re.match(r"sketch: \w+", kind), f"{page}, line {line}: {kind}"


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("job", JOBS)
def test_pieces(job: str, tmp_path: Path) -> None:
    if job in NEEDS and importlib.util.find_spec(NEEDS[job]) is None:
        pytest.skip(f"{NEEDS[job]} is not installed, which these pieces are about: {pages_of(job)}")
    commands = [f"tests/support/page_blocks.py {page} {job}" for page in pages_of(job)]
    assert commands
    found = run_each(commands, tmp_path, ("-m", "hvdlite.launch", "-np", str(JOBS[job]), "python"))
    assert len(found) == JOBS[job]
    for ends in found:
        for command, (code, out, err) in ends.items():
            assert code == 0, f"{command}:\n{out}{err}"
            assert re.search(r"^[1-9]\d* pieces$", out, re.MULTILINE), f"{command}: {out}"
    said = "".join(out for _, out, _ in found[0].values())
    for right in re.findall(r"^(\d+) of 360 test images are right$", said, re.MULTILINE):
        assert int(right) > 300
    for percent in re.findall(r"([\d.]+) % of the test images are right", said):
        assert float(percent) > 80


def command_lines(page: str) -> Iterator[str]:
    """The command lines of ours in the blocks of a page, and in its text; without those that leave words out."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^ *```(?:bash|yaml|)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(
        r"(?<!\*)`((?:hvdlite|hvdliterun) [^`]+ [^`]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    )
    for line in lines:
        for command in line.split("&&"):
            command = re.split(r" {4,}|  #| # | \||>", command.strip())[0].strip()
            if re.match(r"(?:hvdlite|hvdliterun) ", command) and "…" not in command and "..." not in command:
                yield command


@pytest.mark.parametrize("page", PAGES)
def test_command_lines(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command line of ours is one that the real parsers take."""
    for command in command_lines(page):
        program, *words = shlex.split(command)
        parser: argparse.ArgumentParser = make_parser() if program == "hvdliterun" else cli._parser()
        if program == "hvdlite" and "--" in words:
            words = words[: words.index("--")]
        with contextlib.suppress(SystemExit):
            parser.parse_args(words)
        assert not (said := capsys.readouterr().err), f"{page}: {command}\n{said}"


def test_command_lines_are_found() -> None:
    assert "hvdliterun -np 4 python train.py" in set(command_lines("docs/running.md"))
    assert "hvdlite timeline summarize trace.json" in set(command_lines("docs/timeline.md"))


def test_settings() -> None:
    """docs/settings.md is what scripts/settings_page.py makes of the docstring of the settings."""
    page = runpy.run_path(str(ROOT / "scripts/settings_page.py"))["page"]
    assert (ROOT / "docs/settings.md").read_text() == page(), "run: python scripts/settings_page.py"


FIGURES = {
    r"negotiation|agree(?:ment)?\b|gloo|takes? about": r"\d µs",
    r"(?:no|without) exchange|as long as|times as long|of a step\b": r"\b[01]\.\d\d\b|\d %",
    r"DDP|`shard=True`|MultiWorkerMirroredStrategy": r"\b[0-3]\.\d\d\b(?! (?:to [\d.]+ )?GB)|\d %",
}
"""How sentences read that say how fast steps and calls are: what they are about, and their numbers."""
MEASURED = ("docs/performance.md", "docs/gpu.md", "docs/serving.md", "docs/CHANGELOG.md")
"""Pages that have runs themselves, or what was so once."""
OTHER_FIGURES = (
    ("docs/model_parallel.md", "| a step of "),  # of torch's own DDP and FSDP, over hvdlite and over gloo
    ("docs/asynchronous.md", "stalls"),
)
"""Sentences with other figures than those of docs/figures.json, by words in them."""


def sentences(text: str) -> Iterator[str]:
    """The sentences and the rows of tables of a page, without its programs."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(
        r"\]\([^)]*\)|(?:torch|TensorFlow|Horovod|Accelerate) [\d.]+|\d+\.\d+\.\d+", "", text
    )  # links and versions
    for paragraph in re.split(r"\n\s*\n|\n(?=\||- )", text):
        yield from re.split(r"(?<=[.:;])\s", " ".join(paragraph.split()))


def test_figures() -> None:
    """Figures on pages that say how fast hvdlite is come from docs/figures.json, so no page differs from another."""
    figures = runpy.run_path(str(ROOT / "scripts/figures.py"))
    wrong = []
    for page in figures["PAGES"]:
        text = (ROOT / page).read_text()
        assert text == figures["placed"](page), "run: python scripts/figures.py"
        for said in sentences(figures["PLACE"].sub("", text)):
            if page in MEASURED or any(page == where and words in said for where, words in OTHER_FIGURES):
                continue
            wrong += [
                f"{page}: {said}"
                for about, number in FIGURES.items()
                if re.search(about, said) and re.search(number, said)
            ]
    assert wrong == [], "put them into docs/figures.json, and a place for them onto the page (scripts/figures.py)"


@pytest.mark.parametrize("site", ["", "https://example.org/hvdlite/"])
def test_links_of_the_registry(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's page of the project has links to the site, or none if there is no site."""
    for name in ("setup.py", "README.md", "hvdlite/__init__.py", "docs/site/mkdocs.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(re.sub(r'^site_url: ".*"', f'site_url: "{site}"', text, flags=re.MULTILINE))
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(tmp_path / "setup.py"))
    links = re.findall(r"\]\(([^)]*)\)", given["long_description"])
    assert all(link.startswith("https://") for link in links)
    assert ("https://example.org/hvdlite/slow_networks.html#which-one" in links) == bool(site)


def test_the_site_without_its_extra(tmp_path: Path) -> None:
    """scripts/docs says what to install where the extra is missing."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # sees no installed package
    python.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run([ROOT / "scripts/docs"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "scripts/docs: mkdocs, mkdocs-material, mkdocstrings-python, ruff: not installed here. "
        "Run: pip install -c constraints.txt -e '.[docs]'\n"
    )


def test_every_page_is_on_the_site() -> None:
    settings = (ROOT / "docs/site/mkdocs.yml").read_text()
    missing = [page for page in PAGES[1:] if not re.search(rf" {page.removeprefix('docs/')}$", settings, re.MULTILINE)]
    assert not missing, f"docs/site/mkdocs.yml: nav lacks {missing}"
