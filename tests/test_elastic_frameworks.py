"""Elastic jobs of torch and Keras in which a rank is killed: they end as an undisturbed training does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests.jobs import PROGRAMS, Ended, Start

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


@pytest.mark.timeout(LIMIT + 60)
def test_torch(start: Start, tmp_path: Path) -> None:
    from tests.programs.elastic_torch import ROWS, main

    ended = run(start, "elastic_torch.py", tmp_path)
    rows, weights = on_ranks(2, main, config=Config(advice=False))[0]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in rows)
    assert said(ended, "rows") == rows
    assert said(ended, "weights") == pytest.approx(weights.tolist(), rel=1e-5, abs=1e-7)


@pytest.mark.timeout(LIMIT + 60)
def test_keras(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed, on which Keras trains here")
    from tests.programs.elastic_keras import EPOCHS, main

    ended = run(start, "elastic_keras.py", tmp_path)
    epochs, weights = on_ranks(1, main, config=Config(advice=False))[0]  # one process, with the batches of both ranks
    assert said(ended, "epochs") == epochs == EPOCHS
    assert said(ended, "weights") == pytest.approx(weights, rel=1e-4, abs=1e-6)
