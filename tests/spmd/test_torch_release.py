"""An optimizer that is dropped is released: memory, mappings, threads, hooks on parameters."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite.gradients.bucket
import hvdlite_torch as hvd

COLLECTING = threading.Lock()


@pytest.fixture(autouse=True)
def most_gradients_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 300)


WAYS: dict[str, dict[str, Any]] = {"plain": {}, "sharded": {"shard": True}, "overlapped": {"overlap": True}}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.ones(2, 100)) ** 2).mean().backward()
        optimizer.step()


def collect_all() -> None:
    """A full garbage collection. While another thread collects, `gc.collect` does nothing."""
    me, begun = threading.get_ident(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and threading.get_ident() == me:
            begun.append(phase)

    with COLLECTING:
        gc.callbacks.append(note)
        while not begun:
            gc.collect()
        gc.callbacks.remove(note)


def collect(gone: weakref.ref[Any]) -> None:
    """Have Python notice that this is gone. Every rank calls this."""
    hvd.barrier()
    collect_all()
    assert gone() is None, f"still there: {gc.get_referrers(gone())}"


def held() -> tuple[int, int]:
    """The mappings and threads of this process, which may be several ranks. Every rank calls this."""
    hvd.barrier()
    collect_all()  # memory of earlier tests, and of layouts that are given up, may wait for that
    hvd.barrier()
    mappings = Path("/proc/self/maps").read_text().count("memfd:hvdlite")
    threads = sum(thread.name == "hvdlite-overlap" for thread in threading.enumerate())
    hvd.barrier()
    return mappings, threads


@pytest.mark.parametrize("way", WAYS)
def test_optimizers_in_turn(ranks: Any, way: str) -> None:
    def check() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(100, 60), torch.nn.Linear(60, 60), torch.nn.Linear(60, 5))
        counts = []
        for _ in range(4):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), **WAYS[way])
            train(model, optimizer)
            counts.append((*held(), len(model[0].weight._post_accumulate_grad_hooks)))
            gone = weakref.ref(optimizer)
            del optimizer
            collect(gone)
        for before, after in zip(map(max, zip(*counts[:2], strict=True)), counts[-1], strict=True):
            assert after <= before, counts
        assert [hooks for *_, hooks in counts] == [1] * 4

    ranks(check)


def test_layouts_in_turn(ranks: Any) -> None:
    def check() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(100, 60), torch.nn.Linear(60, 60), torch.nn.Linear(60, 5))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), overlap=False)
        counts = []
        for turn in range(6):
            for number in (0, 1):
                for parameter in model[number].parameters():
                    parameter.requires_grad_(turn % 2 == number)
            train(model, optimizer, 1)
            counts.append(held())
        assert counts[-1] <= max(counts[:3]), counts

    ranks(check)


def test_parameters_of_a_dropped_sharded_optimizer_are_each_ranks_own(ranks: Any) -> None:
    def check() -> None:
        model = torch.nn.Linear(100, 60)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), shard=True)
        train(model, optimizer, 1)
        gone = weakref.ref(optimizer)
        del optimizer
        collect(gone)
        hvd.barrier()
        plain = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.bias.detach().clone()
        hvd.barrier()
        plain.zero_grad()
        model.bias.sum().backward()
        plain.step()
        assert torch.allclose(model.bias, before - 1)

    ranks(check)


def test_a_rank_that_has_dropped_an_optimizer_joins(ranks: Any) -> None:
    def check() -> None:
        model = torch.nn.Linear(100, 60)
        hvd.broadcast_parameters(model.state_dict())
        kept = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3)) for _ in range(2)]
        for optimizer in kept:
            train(model, optimizer, 1)
        del optimizer
        gone = weakref.ref(kept.pop() if hvd.rank() == 0 else torch.nn.Linear(1, 1))
        collect(gone)
        with hvd.uneven():
            train(model, kept[0], 1 + hvd.rank())
        hvd.assert_in_sync(model)

    ranks(check)
