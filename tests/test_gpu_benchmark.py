"""benchmarks.gpu without a GPU: its code runs on a pretended one, and it says so where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests.fake_device import fake_gpu


def test_all_that_one_rank_measures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"

    def run() -> Any:
        with fake_gpu():
            return gpu.measure(torch.device("cpu"), 2, 1, True, trace)

    results = on_ranks(1, run, config=Config(advice=False))[0]
    tasks = {each["task"] for each in results["figures"]} | set(results["skipped"])
    assert tasks == set(gpu.TASKS)
    found = {each["variant"]: each for each in results["figures"] if each["task"] == "GPT, 124 M"}
    assert tuple(found) == gpu.VARIANTS
    for each in found.values():
        assert each["samples"] == 2 and 0 < each["minimum"] <= each["median"]
        assert each["to_ddp"] == pytest.approx(each["median"] / found[gpu.DDP]["median"])
    assert all(0 < speed < math.inf for speed in results["memory"].values())
    assert results["trace"]["waits"] == [] and trace.stat().st_size > 0
    json.dumps(results)
    text = gpu.report(results)
    assert all(variant in text for variant in gpu.VARIANTS)


def test_the_gpt_has_124_million_parameters() -> None:
    with torch.device("meta"):
        assert gpu.parameters_of(gpu.gpt(False).model()) == pytest.approx(124.4e6, rel=0.001)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "sees no GPU" in capsys.readouterr().err
