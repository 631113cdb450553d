"""Ranks that run out of data: the others train on, and all end alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.api import world
from hvdlite.errors import HvdliteError
from hvdlite_torch.sync import catch_up
from tests.spmd.test_torch_training import MODEL, OPTIMIZERS, X, Y, assert_equal_everywhere, distance, every_way, flat


@pytest.fixture(autouse=True)
def all_gradients_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 0)


def batches(rank: int, size: int, step: int) -> slice:
    """Rank r has 3 + 2r batches, of 2 + r rows."""
    if step >= 3 + 2 * rank:
        return slice(0, 0)
    start = (7 * step + 11 * rank) % 40
    return slice(start, start + 2 + rank)


def alone(size: int, more: int = 0) -> torch.nn.Module:
    """All ranks' batches of a step as one batch."""
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for step in range(3 + 2 * (size - 1)):
        rows = [batches(rank, size, step) for rank in range(size)]
        x, y = torch.cat([X[each] for each in rows]), torch.cat([Y[each] for each in rows])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for _ in range(more):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


def train_on_my_batches(model: torch.nn.Module, optimizer: Any) -> None:
    for step in range(3 + 2 * hvd.rank()):
        rows = batches(hvd.rank(), hvd.size(), step)
        optimizer.zero_grad()
        optimizer.set_batch_weight(len(X[rows]))
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()


@every_way
@pytest.mark.parametrize("metrics", [False, True])
def test_uneven_data_equals_one_process(ranks: Any, options: Any, metrics: bool) -> None:
    def check() -> tuple[int, torch.Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), **options)
        for step in range(3 + 2 * hvd.rank()):
            rows = batches(hvd.rank(), hvd.size(), step)
            optimizer.zero_grad()
            optimizer.set_batch_weight(len(X[rows]))
            loss = F.cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            optimizer.step()
            if metrics:  # named operations in between, in which those who have joined take part
                count = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, name="count")
                assert count == sum(step < 3 + 2 * rank for rank in range(hvd.size()))
        assert hvd.join() == hvd.size() - 1
        assert_equal_everywhere(flat(model))
        # And again, in step: optimizer state is the same, too.
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
        assert_equal_everywhere(flat(model))
        return hvd.size(), flat(model)

    # From where all have joined, one process goes on alike; its optimizer's state is the joined one's, too.
    size, got = ranks(check)[0]
    assert distance(got, flat(alone(size, more=3))) <= 1e-5


@every_way
def test_what_all_ranks_hold_after_the_last(ranks: Any, options: Any) -> None:
    def check() -> tuple[int, torch.Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), max_grad_norm=1e6, **options)
        with hvd.uneven():
            train_on_my_batches(model, optimizer)
        assert_equal_everywhere(flat(model))
        return hvd.size(), flat(model)

    for size, weights in ranks(check):
        assert distance(weights, flat(alone(size))) <= 1e-5


def test_two_optimizers_in_turns(ranks: Any) -> None:
    def check() -> None:
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
        for epoch in range(2):
            with hvd.uneven():
                for step in range(2 + (hvd.rank() + epoch) % hvd.size()):
                    for number in (0, 1) if step % 2 else (1, 0):
                        optimizers[number].zero_grad()
                        F.cross_entropy(models[number](X[: 4 + hvd.rank()]), Y[: 4 + hvd.rank()]).backward()
                        optimizers[number].step()
        for model in models:
            assert_equal_everywhere(flat(model))

    ranks(check)


def test_adasum_and_process_sets(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        with hvd.uneven():
            for _ in range(1 + hvd.rank()):
                optimizer.zero_grad()
                F.cross_entropy(model(X), Y).backward()
                optimizer.step()
        assert_equal_everywhere(flat(model))
        if hvd.size() > 2:
            pair = hvd.add_process_set([0, 2])
            if pair.included():
                inner = copy.deepcopy(MODEL)
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(inner.parameters(), lr=0.1), process_set=pair)
                with hvd.uneven(pair):
                    for _ in range(1 + hvd.rank()):
                        optimizer.zero_grad()
                        F.cross_entropy(inner(X), Y).backward()
                        optimizer.step()
                weights = hvd.allgather_object(flat(inner), process_set=pair)
                assert torch.equal(weights[0], weights[1])
            hvd.remove_process_set(pair)

    ranks(check)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"op": hvd.Adasum}], ids=["plain", "overlapped", "Adasum"])
def test_a_join_sends_the_model_only_if_a_step_was_missed(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Programs use join() as a barrier, too."""
    sent: dict[int, int] = {}

    def count(parameters: Any, root: int, **options: Any) -> None:
        sent[hvd.rank()] += 1
        broadcast_(parameters, root, **options)

    broadcast_ = catch_up.broadcast_
    monkeypatch.setattr(catch_up, "broadcast_", count)

    def check() -> None:
        sent[hvd.rank()] = 0
        world().group().exchanges.clear()  # under mpirun, those of earlier tests
        model = copy.deepcopy(MODEL)
        optimizer: Any = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), **options)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(X[hvd.rank() :: hvd.size()]), Y[hvd.rank() :: hvd.size()]).backward()
            optimizer.step()

        for _ in range(2):
            step()
            hvd.join()
        assert sent[hvd.rank()] == 0
        for more in range(3):
            if hvd.rank() >= hvd.size() - 1 - more:  # in each round another rank misses steps
                step()
            hvd.join()
            expected = more + 1 - max(0, more - hvd.size() + 2)
            assert sent[hvd.rank()] == expected
            assert_equal_everywhere(flat(model))
        for _ in range(2):
            step()
            hvd.join()
        assert sent[hvd.rank()] == expected
        assert_equal_everywhere(flat(model))

    ranks(check)


@pytest.mark.parametrize("shard", [False, True])
def test_what_needs_all_ranks_after_one_has_joined(ranks: Any, shard: bool) -> None:
    """It raises which rank has joined, and the ranks can go on."""

    def check() -> None:
        weight = torch.zeros(2, requires_grad=True)
        if hvd.rank() == 0 < hvd.size() - 1:
            hvd.join()
        elif hvd.size() > 1:
            with pytest.raises(
                HvdliteError, match=r"rank 0 called join\(\) before .* what DistributedOptimizer is given"
            ):
                hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), shard=shard)
            with pytest.raises(HvdliteError, match=r"rank 0 called join\(\) before .* broadcast_parameters is given"):
                hvd.broadcast_parameters({"weight": weight.detach()})
            hvd.join()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), shard=shard)
        weight.sum().backward()
        optimizer.step()
        assert weight.tolist() == [-1.0, -1.0]

    ranks(check)
