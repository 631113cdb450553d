"""Elastic jobs of torch and Keras in which a rank is killed, or hosts change: they end as an undisturbed training does."""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests.support.jobs import PROGRAMS, ROOT, Ended, Start

LIMIT = 150.0
"""Seconds for one job, which imports its framework twice."""


def run(start: Start, program: str, folder: Path) -> Ended:
    options = ("-np", "2", "--min-np", "2", "--no-tag-output")
    ended = start(*options, str(PROGRAMS / program), str(folder)).end(LIMIT)
    assert ended.code == 0, ended.out + ended.err
    assert (folder / "killed").exists(), "the fault has not happened"
    return ended


def said(ended: Ended, word: str) -> object:
    (found,) = re.findall(rf"^{word} (.*)$", ended.out, re.MULTILINE)
    return ast.literal_eval(found)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_torch(start: Start, tmp_path: Path) -> None:
    from tests.programs.elastic_torch import ROWS, main

    ended = run(start, "elastic_torch.py", tmp_path)
    rows, weights = on_ranks(2, main, config=Config(advice=False))[0]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in rows)
    assert said(ended, "rows") == rows
    assert said(ended, "weights") == pytest.approx(weights.tolist(), rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_keras(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed, on which Keras trains here")
    from tests.programs.elastic_keras import EPOCHS, main

    ended = run(start, "elastic_keras.py", tmp_path)
    epochs, weights = on_ranks(1, main, config=Config(advice=False))[0]  # one process, with the batches of both ranks
    assert said(ended, "epochs") == epochs == EPOCHS
    assert said(ended, "weights") == pytest.approx(weights, rel=1e-4, abs=1e-6)


@pytest.mark.weekly
@pytest.mark.timeout(LIMIT + 60)
def test_growing_and_shrinking(start: Start, tmp_path: Path) -> None:
    """From 2 ranks to 4 and back, amid epochs: each sample once, and the losses of one process with the same batches."""
    import torch
    from torch.nn import functional as F

    from examples import torch_elastic as example

    hosts, log = tmp_path / "hosts", tmp_path / "steps.json"
    hosts.write_text("localhost:2\n")
    words = ("--min-np", "2", "--host-discovery-script", f"cat {hosts}", str(ROOT / "examples" / "torch_elastic.py"))
    ended = start(*words, "--epochs", "7", "--hosts", str(hosts), "--log", str(log)).end(LIMIT)
    assert ended.code == 0, ended.out + ended.err
    steps = [example.Step(**step) for step in json.loads(log.read_text())]

    everything = list(range(example.SAMPLES))
    assert [part[0].ranks for part in example.parts(steps)] == [2, 4, 2]
    changes = [step for step, other in pairwise(steps) if step.ranks != other.ranks]
    assert [step.epoch for step in changes] == [2, 5]
    for epoch in range(7):
        seen = [sample for step in steps if step.epoch == epoch for sample in step.samples]
        assert sorted(seen) == everything
    rates = {2: example.RATE * 32, 4: example.RATE * 48}
    assert all(step.rate == pytest.approx(rates[step.ranks]) for step in steps)

    data, _ = example.load()
    model = example.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for step in steps:
        optimizer.param_groups[0]["lr"] = step.rate
        x, y, _ = data[step.samples]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        assert step.loss == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
