"""assert_in_sync and rank_zero_only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, OutOfSyncError
from hvdlite_torch.training.in_sync import assert_in_sync, rank_zero_only


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.fill_(number)
    return layers


def error_of(what: Any, **options: Any) -> str:
    with pytest.raises(OutOfSyncError) as caught:
        assert_in_sync(what, **options)
    return str(caught.value)


def test_equal_weights_pass(ranks: Any) -> None:
    def check() -> None:
        same = model()
        same[1].running_mean.fill_(hvd.rank())  # buffers of a plain batch norm differ by nature
        for what in (same, same.named_parameters(), list(same.parameters()), same[0].weight, {}, same[0].state_dict()):
            assert_in_sync(what)
        odd = {
            "half": torch.ones(3, dtype=torch.bfloat16),
            "empty": torch.ones(0, 2),
            "scalar": torch.tensor(1),
            "strided": torch.arange(12).reshape(3, 4).t(),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "nan": torch.tensor([float("nan")]),
        }
        assert_in_sync(odd)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_the_first_tensor_and_the_ranks_are_named_on_all_ranks(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strange = model()
        with torch.no_grad():
            if rank == size - 1:
                strange[0].bias[2] += 1e-7 * torch.tensor(1.0)  # 1 + 1e-7 is the next float32
                strange[2].weight[0, 0] = -0.0 if strange[2].weight[0, 0] == 0 else 17.0
        text = error_of(strange)
        others = "rank 0" if size == 2 else f"ranks {', '.join(map(str, range(size - 1)))}"
        assert f"'0.bias' (float32, shape (4,)) differs between {others} | rank {size - 1}." in text
        assert "2 of 6 tensors differ" in text
        assert hvd.allgather_object(text) == [text] * size
        assert "'1.running_mean'" in error_of({"1.running_mean": torch.full((4,), float(rank))})
        assert "'tensor 1' (int64, shape ())" in error_of([torch.tensor(0), torch.tensor(rank)])

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_the_same_bytes_in_another_shape_or_order_are_not_the_same(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        last = rank == size - 1
        others = "rank 0" if size == 2 else f"ranks {', '.join(map(str, range(size - 1)))}"
        zeros = torch.zeros(4)
        text = error_of({"a": zeros, "b": zeros.reshape(2, 2) if last else zeros})
        if size > 2:
            assert (
                f"number 1 is on {others} 'b' (float32, shape (4,)); on rank {size - 1} 'b' (float32, shape (2, 2))"
                in text
            )
        assert "(int32, shape (4,))" in error_of([zeros.int() if last else zeros])
        assert f"on rank {size - 1} nothing" in error_of([zeros] if last else [zeros, zeros])
        assert "'b' (float32" in error_of({"b": zeros} if last else {"a": zeros})

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_on_a_process_set_the_ranks_are_those_of_the_job(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        others = hvd.add_process_set(range(1, size))
        if others.included():
            assert_in_sync(torch.tensor(int(rank == 0)), process_set=others)
            assert "rank 1" in error_of(torch.tensor(rank), process_set=others)
            assert "rank 0" not in error_of(torch.tensor(rank), process_set=others)
        hvd.barrier()
        hvd.remove_process_set(others)

    ranks(check)


def test_bad_arguments(ranks: Any) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match="'lr' is a float"):
            assert_in_sync({"lr": 0.1})
        with pytest.raises(ArgumentError, match="got int"):
            assert_in_sync(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected a dense tensor"):
            assert_in_sync(torch.eye(2).to_sparse())

    ranks(check)


def test_rank_zero_only(ranks: Any) -> None:
    @rank_zero_only
    def save(number: int, *, step: int) -> int:
        """Saves."""
        return number + step

    def check() -> None:
        assert save(1, step=2) == (3 if hvd.rank() == 0 else None)

    assert (save.__name__, save.__doc__) == ("save", "Saves.")
    ranks(check)
