"""Sparse tensors are reduced as their dense equals are, by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, UnsupportedTensorError


def of_rank(rank: int, entries: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers in a 5 x 4 x 2 tensor with two sparse dimensions; some places occur more than once."""
    random = np.random.default_rng([rank, entries])
    indices = np.stack([random.integers(5, size=entries), random.integers(4, size=entries)])
    values = random.integers(-4, 5, size=(entries, 2))
    tensors = torch.from_numpy(indices), torch.from_numpy(values).to(dtype)
    return torch.sparse_coo_tensor(*tensors, (5, 4, 2), check_invariants=True)


def dense(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.coalesce()
    found = np.zeros(tensor.shape, np.complex128)
    np.add.at(found, tuple(tensor.indices().numpy()), tensor.values().to(torch.complex128).numpy())
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64]
)
def test_sums(ranks: Any, dtype: torch.dtype) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for numbers in ([6] * size, [3 * r for r in range(size)], [0] * size):
            each = [of_rank(r, numbers[r], dtype) for r in range(size)]
            total = sum(dense(x) for x in each)
            result = hvd.sparse_allreduce_async(each[rank], "sum", hvd.Sum)()
            assert result.layout is torch.sparse_coo and result.is_coalesced()
            assert result.dtype is dtype
            assert result.shape == (5, 4, 2)
            np.testing.assert_array_equal(dense(result), total)
            if dtype in (torch.float32, torch.float64, torch.complex64):
                averaged = hvd.synchronize(hvd.sparse_allreduce_async(each[rank], name="average", op=hvd.Average))
                np.testing.assert_allclose(dense(averaged), total / size, rtol=1e-6)

    ranks(check)


def test_the_gradient_of_an_embedding(ranks: Any) -> None:
    """Sparse, and from different rows on each rank: equal to the dense average."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        torch_rows = [torch.tensor([r, r, 3]) for r in range(size)]
        table = torch.nn.Embedding(10, 2, sparse=True, dtype=torch.float64)
        (table(torch_rows[rank]) * (rank + 1)).sum().backward()
        handle = hvd.sparse_allreduce_async(table.weight.grad, None, hvd.Average)
        while not hvd.poll(handle):
            pass
        expected = np.zeros((10, 2))
        for r in range(size):
            np.add.at(expected, torch_rows[r].numpy(), (r + 1) / size)
        np.testing.assert_allclose(handle().to_dense().numpy(), expected)
        assert hvd.synchronize(handle) is handle()  # once more

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_in_a_process_set(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        pair = hvd.add_process_set([0, size - 1])
        if pair.included():
            x = torch.eye(3).to_sparse() * (rank + 1)
            result = hvd.sparse_allreduce_async(x, "pair", hvd.Average, pair)()
            np.testing.assert_allclose(result.to_dense().numpy(), np.eye(3) * (size + 1) / 2)
        hvd.remove_process_set(pair)

    ranks(check)


def test_several_in_any_order(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        handles = {}
        for n in range(5) if rank % 2 else range(4, -1, -1):
            handles[n] = hvd.sparse_allreduce_async(torch.eye(2).to_sparse() * n, str(n), hvd.Sum)
        for n, handle in handles.items():
            assert handle().to_dense().tolist() == [[n * size, 0], [0, n * size]]

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_tensors_that_do_not_belong_together(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for mine in (
            torch.ones(3 + rank, 2).to_sparse(),  # shapes that an allgather of entries would not see
            torch.ones((3,) * (1 + min(rank, 1))).to_sparse(),
            torch.ones(3, 2).to_sparse(1 + min(rank, 1)),  # numbers of sparse dimensions
            torch.ones(3, dtype=torch.float64 if rank else torch.float32).to_sparse(),
        ):
            handle = hvd.sparse_allreduce_async(mine, "layouts", hvd.Sum)
            for _ in range(2):  # and once more
                with pytest.raises(hvd.MismatchError):
                    handle()
        good = hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "layouts", hvd.Sum)  # the name is free again
        assert good().to_dense().tolist() == [size] * 2

    ranks(check)


@pytest.mark.parametrize(
    ("tensor", "op", "error", "text"),
    [
        (torch.ones(2), hvd.Sum, UnsupportedTensorError, "to_sparse_coo"),
        (torch.ones(2).to_sparse(), hvd.Max, ArgumentError, "op=Max"),
        (torch.ones(2).to_sparse(), None, ArgumentError, "op=None"),
        (torch.ones(2, dtype=torch.int32).to_sparse(), hvd.Average, UnsupportedTensorError, "Average of sparse"),
        (torch.ones(2, dtype=torch.bool).to_sparse(), hvd.Sum, UnsupportedTensorError, "Sum of sparse"),
    ],
)
def test_what_is_refused(ranks: Any, tensor: torch.Tensor, op: Any, error: type, text: str) -> None:
    def check() -> None:
        with pytest.raises(error, match=text):
            hvd.sparse_allreduce_async(tensor, "refused", op)

    ranks(check)


def test_a_weight_of_zero_shields_from_what_a_rank_has(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        embedding = torch.nn.Embedding(6, 2, sparse=True)
        with torch.no_grad():
            embedding.weight.zero_()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
        nothing = rank == size - 1 > 0
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.set_batch_weight(0 if nothing else 2)
            (embedding(torch.tensor([1, 4])).sum() * (float("nan") if nothing else 1.0)).backward()
            optimizer.step()
        assert embedding.weight[:, 0].tolist() == [0, -2, 0, 0, -2, 0]

    ranks(check)
