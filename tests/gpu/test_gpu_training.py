"""Training on a real GPU: `pytest -m gpu`. The same logic is tested without one in tests/spmd/test_device_training.py.

There is one rank, for which hvdlite does nothing by itself; so it is told not to spare it, and to use NCCL nevertheless.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvdlite_torch as hvd
from benchmarks.gpu import unspared, waits_in
from hvdlite.config import Config
from hvdlite.errors import HvdliteError
from hvdlite.gradients.device import make
from hvdlite.testing import on_ranks
from tests.gpu.card import CARD, NO_CARD, STAND_IN
from tests.support.fake_device import fake_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_CARD is not None, reason=str(NO_CARD)),
    pytest.mark.filterwarnings("default"),  # of profilers and compilers, which differ from torch to torch
]

only_on_a_card = pytest.mark.skipif(STAND_IN, reason="the stand-in has no kernels, streams and graphs of CUDA")


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    if STAND_IN:
        return
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """``one_rank(check)`` calls `check` on a rank that exchanges with itself, by NCCL, in buckets of 64 KiB."""
    monkeypatch.setattr(make, "FIRST_BYTES", 2**16)

    def with_exchange(check: Callable[[], Any]) -> Any:
        with fake_gpu(index=0) if STAND_IN else contextlib.nullcontext(), unspared() as made:
            try:
                return check()
            finally:
                if not STAND_IN:
                    torch.cuda.synchronize()
                for each in made:
                    each.close()

    def run(check: Callable[[], Any]) -> Any:
        return on_ranks(1, with_exchange, check, config=Config(bucket_bytes=2**16, advice=False), timeout=200)[0]

    return run


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(128, 128) if n % 2 == 0 else torch.nn.Tanh() for n in range(12)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 10)).to(CARD)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(64, 128, generator=generator).to(CARD), torch.randint(0, 10, (64,), generator=generator).to(CARD)


def train(model: Any, optimizer: Any, steps: int, clip: float | None = None) -> None:
    for number in range(steps):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def distance(model: torch.nn.Module, other: torch.nn.Module) -> float:
    mine, theirs = (torch.cat([p.detach().double().flatten() for p in each.parameters()]) for each in (model, other))
    return float((mine - theirs).abs().max() / theirs.abs().max())


def adam(model: torch.nn.Module, **options: Any) -> Any:
    return torch.optim.Adam(model.parameters(), 1e-3, **options)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"shard": True}, {"max_grad_norm": 0.1}], ids=str)
def test_equals_plain_training(one_rank: Any, options: Any) -> None:
    def check() -> None:
        plain, model = make_model(), make_model()
        train(plain, adam(plain), 8, options.get("max_grad_norm"))
        optimizer = hvd.DistributedOptimizer(adam(model), **options)
        train(model, optimizer, 8)
        assert distance(model, plain) <= 1e-5
        exchange = optimizer._hvdlite_driver.sync
        assert len(exchange._reducer.buckets) > 4
        assert exchange._backward.launches == options.get("overlap", True)

    one_rank(check)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(one_rank: Any, compression: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(1000, device=CARD))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), compression=compression)
        gradient = torch.randn(1000, device=CARD)
        parameter.grad = gradient.clone()
        optimizer.step()
        dtype = getattr(torch, compression.DTYPE)
        assert torch.equal(parameter.grad, gradient.to(dtype).float())

    one_rank(check)


@only_on_a_card
@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
def test_loss_scaling(one_rank: Any, options: Any) -> None:
    def scaled(model: torch.nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for number in range(6):
            x, y = batch(number)
            optimizer.zero_grad()
            loss = scaler.scale(F.cross_entropy(model(x), y))
            (loss * torch.inf if number in (1, 4) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**8

    def check() -> None:
        plain, model = make_model(), make_model()
        scaled(plain, adam(plain))
        scaled(model, hvd.DistributedOptimizer(adam(model), **options))
        assert distance(model, plain) <= 1e-5

    one_rank(check)


def profile(step: Callable[[], None], steps: int, file: Path) -> list[dict[str, Any]]:
    """The events of one step more than these, which are each within an annotation "a step"."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()  # the first kernels that a profiler sees may be missing
        torch.cuda.synchronize()
        for _ in range(steps):
            with torch.profiler.record_function("a step"):
                step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


@only_on_a_card
def test_the_host_never_waits_and_buckets_overlap_with_backward(one_rank: Any, tmp_path: Path) -> None:
    def check() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(adam(model, foreach=True))
        train(model, optimizer, 5)
        x, y = batch(0)

        def step() -> None:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            with torch.profiler.record_function("backward"):
                loss.backward()
            optimizer.step()

        step()
        torch.cuda.set_sync_debug_mode("error")  # torch itself says if the host waits for the GPU
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        events = profile(step, 4, tmp_path / "trace.json")
        annotations = [event for event in events if event["cat"] == "user_annotation"]
        assert [event["name"] for event in annotations].count("a step") == 4
        assert waits_in("a step", events) == []
        kernels = [event for event in events if event["cat"] == "kernel"]
        assert kernels
        launches = {
            event["args"]["correlation"]: event["ts"]
            for event in events
            if event["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
        }
        streams = [kernel["args"]["stream"] for kernel in kernels]
        compute = max(streams, key=streams.count)
        assert len(set(streams)) == 2
        assert len(streams) - streams.count(compute) >= 4 * len(optimizer._hvdlite_driver.sync._reducer.buckets)
        # In each step, something of the exchange begins while backward still has kernels to begin.
        compared = 0  # CUPTI before 13.1 loses some kernels
        for backward in (event for event in annotations if event["name"] == "backward"):
            begun: dict[bool, list[float]] = {False: [], True: []}
            for kernel in kernels:
                at = launches.get(kernel["args"]["correlation"], 0.0)
                if backward["ts"] <= at <= backward["ts"] + backward["dur"]:
                    begun[kernel["args"]["stream"] == compute].append(kernel["ts"])
            if begun[False] and begun[True]:
                assert min(begun[False]) < max(begun[True])
                compared += 1
        assert compared >= 2

    one_rank(check)


@only_on_a_card
def test_one_rank_costs_nothing(tmp_path: Path) -> None:
    """Without being told otherwise, hvdlite adds no kernel and no copy."""

    def check() -> list[int]:
        counts = []
        for distributed in (False, True):
            model = make_model()
            optimizer = adam(model)
            if distributed:
                optimizer = hvd.DistributedOptimizer(optimizer)
            train(model, optimizer, 4)
            x, y = batch(0)

            def step(model: Any = model, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> None:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

            events = profile(step, 2, tmp_path / f"{distributed}.json")
            calls = [event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
            counts.append(sum("Launch" in name or "Memcpy" in name or "Memset" in name for name in calls))
        return counts

    without, with_hvdlite = on_ranks(1, check, config=Config(advice=False))[0]
    assert without == with_hvdlite > 0


@only_on_a_card
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_a_whole_step_in_a_cuda_graph(one_rank: Any, options: Any) -> None:
    def check() -> None:
        plain, model = make_model(), make_model()
        one = adam(plain)
        train(plain, one, 9, options.get("max_grad_norm"))
        optimizer = hvd.DistributedOptimizer(adam(model, capturable=True), **options)
        x, y = batch(0)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for number in range(5):
                for static, new in zip((x, y), batch(number), strict=True):
                    static.copy_(new)
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for number in range(5, 9):
            for static, new in zip((x, y), batch(number), strict=True):
                static.copy_(new)
            graph.replay()
        assert distance(model, plain) <= 1e-5
        del graph

    one_rank(check)


@only_on_a_card
def test_a_compiled_model(one_rank: Any) -> None:
    def check() -> None:
        plain, model = make_model(), make_model()
        train(plain, adam(plain), 6)
        train(torch.compile(model), hvd.DistributedOptimizer(adam(model)), 6)
        assert distance(model, plain) <= 1e-3  # fused kernels round otherwise, and Adam makes much of it

    one_rank(check)


@only_on_a_card
def test_no_room(one_rank: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(2**26, device=CARD))
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total + 2**20 / total)
        try:
            with pytest.raises(HvdliteError, match="rank 0: no room for 268435456 bytes of gradients on cuda:0"):
                hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    one_rank(check)
