"""Exchanging while the backward pass goes on: it happens, changes no bit, and loses its bets gracefully."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.gradients.overlap import Overlap
from tests.spmd.test_torch_training import MODEL, X, Y, assert_equal_everywhere, distance, flat, split


@pytest.fixture(autouse=True)
def all_gradients_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 0)


def distributed(model: torch.nn.Module, overlap: bool) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), overlap=overlap)


def overlap_of(optimizer: Any) -> Overlap | None:
    return optimizer._hvdlite_driver.lease.overlap


def backward(model: torch.nn.Module, optimizer: Any) -> None:
    rows = split(48, "uneven")
    optimizer.zero_grad()
    optimizer.set_batch_weight(len(X[rows]))
    F.cross_entropy(model(X[rows]), Y[rows]).backward()


def one_process(steps: int) -> torch.nn.Module:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


def test_a_bucket_is_under_way_before_the_step_and_no_bit_is_another(ranks: Any) -> None:
    single = one_process(10)

    def check() -> None:
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        early, late = (distributed(model, overlap) for model, overlap in zip(models, (True, False), strict=True))
        for step in range(10):
            for model, optimizer in zip(models, (early, late), strict=True):
                backward(model, optimizer)
                if optimizer is early and step >= 2 and hvd.size() > 1:
                    overlap = overlap_of(early)
                    assert overlap is not None
                    assert overlap.under_way > 0
                optimizer.step()
        if hvd.size() > 1:
            overlap = overlap_of(early)
            assert overlap is not None
            assert overlap.failed == 0
        assert overlap_of(late) is None
        assert torch.equal(flat(models[0]), flat(models[1]))
        assert distance(flat(models[0]), flat(single)) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("what", ["scaled in place", "replaced", "two passes", "late weight", "dropped"])
def test_a_lost_bet_on_one_rank_is_made_good_on_all(ranks: Any, what: str) -> None:
    def check() -> None:
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        early, late = (distributed(model, overlap) for model, overlap in zip(models, (True, False), strict=True))
        for step in range(8):
            if hvd.size() > 1 and step in (2, 3):
                assert overlap_of(early) is not None
            for model, optimizer in zip(models, (early, late), strict=True):
                backward(model, optimizer)
                if hvd.rank() == 0:
                    if what == "scaled in place":
                        torch._foreach_mul_([p.grad for p in model.parameters()], 3.0)
                    elif what == "replaced":
                        for parameter in model.parameters():
                            parameter.grad = parameter.grad * 3.0
                    elif what == "two passes":
                        F.cross_entropy(model(X), Y).backward()
                    elif what == "late weight":
                        optimizer.set_batch_weight(100)
                    else:
                        model[2].weight.grad = None
                optimizer.step()
        assert overlap_of(early) is None, "given up, on all ranks"
        assert torch.equal(flat(models[0]), flat(models[1]))
        assert_equal_everywhere(flat(models[0]))

    ranks(check)


def test_a_rank_without_samples_and_a_step_without_any(ranks: Any) -> None:
    def check() -> None:
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        early, late = (distributed(model, overlap) for model, overlap in zip(models, (True, False), strict=True))
        for step in range(8):
            for model, optimizer in zip(models, (early, late), strict=True):
                optimizer.zero_grad()
                nothing = step == 5 or hvd.rank() == step % hvd.size() < hvd.size() - 1
                optimizer.set_batch_weight(0 if nothing else 3)
                if not nothing:
                    F.cross_entropy(model(X[:3]), Y[:3]).backward()
                if step == 5:
                    optimizer.step()  # no gradient anywhere: nothing to average
                else:
                    optimizer.step()
        assert torch.equal(flat(models[0]), flat(models[1]))

    ranks(check)


def test_weights_that_add_up_to_nothing(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, overlap=True)
        for step in range(5):
            backward(model, optimizer)
            if step == 3:
                optimizer.zero_grad()
                optimizer.set_batch_weight(0)
                F.cross_entropy(model(X), Y).backward()
                with pytest.raises(HvdliteError, match="add up to 0"):
                    optimizer.step()
            else:
                optimizer.step()
        assert_equal_everywhere(flat(model))

    ranks(check)


def test_parameters_that_are_frozen_while_a_bucket_is_under_way(ranks: Any) -> None:
    def check() -> None:
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        early, late = (distributed(model, overlap) for model, overlap in zip(models, (True, False), strict=True))
        for step in range(8):
            for model, optimizer in zip(models, (early, late), strict=True):
                backward(model, optimizer)
                if step == 4:
                    model[2].bias.requires_grad_(False)
                optimizer.step()
        assert torch.equal(flat(models[0]), flat(models[1]))

    ranks(check)


def test_what_it_refuses(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        with pytest.raises(ArgumentError, match="no meaning with shard=True"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shard=True, overlap=True)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="overlap"):
                distributed(model, overlap=hvd.rank() == 0)

    ranks(check)
