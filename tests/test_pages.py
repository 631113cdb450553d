"""Pages that are whole programs do what they say: the same training on any number of ranks, resumed or not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import ROOT, Start
from tests.pages import program_of

LIMIT = 150.0
"""Seconds for one job. Each imports much more than others do, which takes a busy machine long."""


def test_pieces_keep_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nx = 1\n```\n\n```\nshell\n```\n\n```python\nif x:\n    y = 2\n```\n")
    assert program_of(page) == "\n\n\nx = 1\n\n\n\n\n\n\n\nif x:\n    y = 2\n\n"


def losses(out: str) -> list[tuple[int, float, float]]:
    found = re.findall(r"epoch (\d+): loss ([\d.]+), accuracy ([\d.]+) %", out)
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in found]


@pytest.mark.timeout(3 * LIMIT + 20)
def test_torch_training(start: Start, tmp_path: Path) -> None:
    """One rank; two that stop, each with a shard of the optimizer's state; and one that goes on from there."""
    text = program_of(ROOT / "docs/torch_training.md")
    program, sharded = tmp_path / "train.py", tmp_path / "train_sharded.py"
    program.write_text(text)
    sharded.write_text(text.replace("max_grad_norm=1.0)", "max_grad_norm=1.0, shard=True)"))
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
