"""benchmarks.gpu without a GPU: its code runs on a pretended one, and it says so where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.checks import WrongResult
from benchmarks.models import ResNet
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests.support.fake_device import fake_gpu


def test_all_that_one_rank_measures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"

    kept: list[str] = []
    parts = gpu.Parts(lambda results: kept.append(json.dumps(results)))

    def run() -> None:
        with fake_gpu():
            gpu.measure(torch.device("cpu"), 2, 1, True, trace, parts)

    on_ranks(1, run, config=Config(advice=False))
    results = parts.results
    assert results["failures"] == {}
    assert results == json.loads(kept[-1])
    assert {each["task"] for each in results["figures"]} == set(gpu.TASKS)
    found = {each["variant"]: each for each in results["figures"] if each["task"] == "GPT, 124 M"}
    assert tuple(found) == gpu.VARIANTS
    for each in found.values():
        assert each["samples"] == 2 and 0 < each["minimum"] <= each["median"]
        assert each["to_ddp"] == pytest.approx(each["median"] / found[gpu.DDP]["median"])
    assert all(0 < speed < math.inf for speed in results["memory"].values())
    assert results["trace"]["waits"] == [] and trace.stat().st_size > 0
    assert set(results["weights"]) == set(gpu.VARIANTS) and max(results["weights"].values()) < 1e-3
    text = gpu.report(results)
    assert all(variant in text for variant in gpu.VARIANTS)


def test_the_gpt_has_124_million_parameters() -> None:
    with torch.device("meta"):
        assert gpu.parameters_of(gpu.gpt(False).model()) == pytest.approx(124.4e6, rel=0.001)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "sees no GPU" in capsys.readouterr().err


def test_a_part_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> Any:
        raise WrongResult("not this time")

    seen = {"waits": [], "launches": 3.5, "overlapped": 1, "beside": 2, "file": "there"}
    for part in ("check_results", "measure_steps", "measure_memory"):
        monkeypatch.setattr(gpu, part, fail)
    monkeypatch.setattr(gpu, "trace_buckets", lambda *_: dict(seen))
    parts = gpu.Parts(lambda _: None)
    gpu.measure(torch.device("cpu"), 1, 1, True, Path("there"), parts)
    assert set(parts.results["failures"]) == {"weights", *gpu.TASKS, "memory"}
    text = gpu.report(parts.results)
    assert (
        text.count("FAILED: WrongResult: not this time") == 4 and "1 of 2 µs" in text and "launched 3.5 kernels" in text
    )
    assert "not this time" in capsys.readouterr().err


def test_losses_are_compared() -> None:
    figures = [{"task": "GPT", "variant": variant, "loss": 5.0} for variant in gpu.VARIANTS]
    gpu.check_losses(figures)
    figures[-1]["loss"] = math.nan
    with pytest.raises(WrongResult, match="hvdlite, buckets's loss is nan, and 5.0000 without"):
        gpu.check_losses(figures)


def event(cat: str, name: str, start: float, stop: float, stream: int = 0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": start, "dur": stop - start, "args": {"stream": stream}}


def test_waits_are_found_within_steps_only() -> None:
    events = [
        event("user_annotation", "steps", 10, 20),
        event("gpu_user_annotation", "steps", 10, 90),
        event("cuda_runtime", "cudaStreamSynchronize", 5, 6),
        event("cuda_runtime", "cudaLaunchKernel", 12, 13),
        event("cuda_runtime", "cudaEventSynchronize", 15, 16),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 17, 18),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 17, 18),
        event("cuda_runtime", "cudaDeviceSynchronize", 30, 31),
    ]
    assert gpu.waits_in("steps", events) == ["cudaEventSynchronize", "Memcpy DtoH (Device -> Pageable)"]
    calls = [event("cuda_runtime", name, 11, 12) for name in ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord")]
    assert gpu.launches_in("steps", [*events, *calls, event("cuda_runtime", "cudaLaunchKernel", 40, 41)]) == 3


def test_overlap_of_streams() -> None:
    events = [
        event("kernel", "gemm", 0, 10, 7),
        event("kernel", "gemm", 12, 20, 7),
        event("kernel", "mul", 8, 13, 21),
        event("gpu_memcpy", "Memcpy DtoD", 30, 31, 21),
        event("cpu_op", "mul", 0, 100),
    ]
    assert gpu.overlap(events) == {"kernels_by_stream": {"7": 2, "21": 2}, "beside": 6, "overlapped": 3}
    assert gpu.overlap([]) == {"kernels_by_stream": {}, "beside": 0, "overlapped": 0}


def test_our_resnet_50_has_as_many_parameters_as_torchvisions() -> None:
    with torch.device("meta"):
        assert gpu.parameters_of(ResNet()) == 25_557_032
