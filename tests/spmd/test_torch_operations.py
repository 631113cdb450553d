"""Horovod's operations on torch tensors, in all their spellings, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, DuplicateNameError, MismatchError, UnsupportedTensorError

EVERY_DTYPE = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


def values_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def of_rank(rank: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """What a rank brings: small whole numbers, whose sums, and products over four ranks, are exact in every dtype."""
    return np.arange(int(np.prod(shape))).reshape(shape) % 2 + rank


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
    "strided": lambda x: torch.stack([x, x + 1], -1)[..., 0],
}


VARIANTS = [
    # dtype and layout: every dtype, and every layout
    *((dtype, "contiguous") for dtype in EVERY_DTYPE),
    *((torch.float32, layout) for layout in LAYOUTS if layout != "contiguous"),
    (torch.bfloat16, "strided"),
]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    return LAYOUTS[layout](torch.from_numpy(np.asarray(of_rank(rank, shape))).to(dtype))


def same_object(result: Any, given: Any) -> Any:
    assert result is given
    return result


def same_objects(results: Any, given: Any) -> Any:
    assert all(result is each for result, each in zip(results, given, strict=True))
    return results


ALLREDUCE: dict[str, Callable[..., Any]] = {
    "allreduce": lambda x, **o: hvd.allreduce(x, **o),
    "allreduce_async": lambda x, **o: hvd.synchronize(hvd.allreduce_async(x, **o)),
    "allreduce_": lambda x, **o: same_object(hvd.allreduce_(x, **o), x),
    "allreduce_async_": lambda x, **o: same_object(hvd.synchronize(hvd.allreduce_async_(x, **o)), x),
    "grouped_allreduce": lambda x, **o: hvd.grouped_allreduce([x, x[:0]] if x.dim() else [x], **o)[0],
    "grouped_allreduce_async": lambda x, **o: hvd.synchronize(hvd.grouped_allreduce_async((x,), **o))[0],
    "grouped_allreduce_": lambda x, **o: same_objects(hvd.grouped_allreduce_([x], **o), [x])[0],
    "grouped_allreduce_async_": lambda x, **o: same_objects(
        hvd.synchronize(hvd.grouped_allreduce_async_([x], **o)), [x]
    )[0],
}
NEW = [name for name in ALLREDUCE if not name.endswith("_")]


def assert_is(result: Any, like: torch.Tensor, expected: Any) -> None:
    """Of the dtype of `like`, with the expected values and shape."""
    assert isinstance(result, torch.Tensor)
    assert result.dtype is like.dtype
    np.testing.assert_array_equal(values_of(result), expected)


@pytest.mark.parametrize("form", ALLREDUCE)
def test_allreduce(ranks: Any, form: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for dtype, layout in VARIANTS:
            for shape in ((3, 4), (), (0,)) if dtype is torch.float32 else ((3, 4),):
                each = np.stack([of_rank(r, shape) for r in range(size)])
                x = tensor_of(rank, shape, dtype, layout)
                given = x.clone()
                truths = {hvd.Sum: each.sum(0), hvd.Product: each.prod(0)}
                if not dtype.is_complex:
                    truths |= {hvd.Min: each.min(0), hvd.Max: each.max(0)}
                for op, truth in truths.items():
                    mine = x if form in NEW else tensor_of(rank, shape, dtype, layout)
                    assert_is(ALLREDUCE[form](mine, op=op), x, truth)
                assert torch.equal(x, given)

    ranks(check)


@pytest.mark.parametrize("form", ALLREDUCE)
def test_average_and_factors(ranks: Any, form: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        call = ALLREDUCE[form]
        mean = (size - 1) / 2
        x = torch.full((2, 2), float(rank), dtype=torch.float64)
        np.testing.assert_allclose(call(x.clone()), np.full((2, 2), mean))
        np.testing.assert_allclose(call(x.clone(), op=hvd.Average, prescale_factor=3.0), np.full((2, 2), 3 * mean))
        scaled = call(x.clone(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        np.testing.assert_allclose(scaled, np.full((2, 2), 2 * mean * size))
        whole = call(torch.tensor([7, -7, 4]) if rank == 0 else torch.tensor([0, 0, 4]))
        assert whole.tolist() == [7 // size, -(7 // size), 4]
        named = call(x.clone(), name="a name", op=hvd.Sum)
        np.testing.assert_allclose(named, np.full((2, 2), mean * size))
        if size > 1:
            pair = hvd.add_process_set([size - 1])
            if pair.included():
                assert call(x.clone(), process_set=pair).tolist() == x.tolist()
            hvd.remove_process_set(pair)

    ranks(check)


@pytest.mark.parametrize("form", ALLREDUCE)
def test_the_old_spelling_of_op(ranks: Any, form: str) -> None:
    call = ALLREDUCE[form]

    def summed() -> None:
        assert call(torch.ones(2), average=False).tolist() == [hvd.size()] * 2

    def averaged() -> None:
        assert call(torch.ones(2), average=True).tolist() == [1.0] * 2

    def refused() -> None:
        with pytest.raises(ValueError, match="give `op` alone"):
            call(torch.ones(2), average=True, op=hvd.Average)
        with pytest.raises(ArgumentError, match="expected one of"):
            call(torch.ones(2), op="sum")
        with pytest.raises(ArgumentError, match=r"write op=hvd\.Sum"):
            call(torch.ones(2), average=hvd.Sum)
        assert call(torch.ones(1), op=hvd.Sum).tolist() == [hvd.size()]  # and the job goes on

    with pytest.warns(DeprecationWarning, match=r"hvd\.Sum") as seen:
        ranks(summed)
    assert seen[0].filename == __file__  # the line that made the call
    with pytest.warns(DeprecationWarning, match=r"hvd\.Average"):
        ranks(averaged)
    ranks(refused)


def test_positional_arguments_are_horovods(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        x = torch.ones(size, dtype=torch.float64)
        everybody = hvd.global_process_set
        none = hvd.Compression.none
        results = [
            hvd.allreduce(x, None, "a", none, hvd.Sum, 1.0, 2.0, everybody),
            hvd.synchronize(hvd.allreduce_async(x, None, "b", hvd.Sum, 1.0, 2.0, everybody)),
            hvd.allreduce_(x.clone(), None, "c", hvd.Sum, 1.0, 2.0, everybody),
            hvd.synchronize(hvd.allreduce_async_(x.clone(), None, "d", hvd.Sum, 1.0, 2.0, everybody)),
            *hvd.grouped_allreduce([x], None, "e", none, hvd.Sum, 1.0, 2.0, everybody),
            *hvd.synchronize(hvd.grouped_allreduce_async([x], None, "f", hvd.Sum, 1.0, 2.0, everybody)),
            *hvd.grouped_allreduce_([x.clone()], None, "g", hvd.Sum, 1.0, 2.0, everybody),
            *hvd.synchronize(hvd.grouped_allreduce_async_([x.clone()], None, "h", hvd.Sum, 1.0, 2.0, everybody)),
        ]
        assert [result.tolist() for result in results] == [[2.0 * size] * size] * 8
        scattered = [
            hvd.reducescatter(x, "i", none, hvd.Sum, everybody, 1.0, 2.0),
            hvd.synchronize(hvd.reducescatter_async(x, "j", hvd.Sum, everybody, 1.0, 2.0)),
            *hvd.grouped_reducescatter([x], "k", none, hvd.Sum, everybody, 1.0, 2.0),
            *hvd.synchronize(hvd.grouped_reducescatter_async([x], "l", hvd.Sum, everybody, 1.0, 2.0)),
        ]
        assert [result.tolist() for result in scattered] == [[2.0 * size]] * 4
        assert hvd.broadcast(x, 0, "m", everybody).tolist() == x.tolist()
        assert hvd.allgather(x, "n", everybody).tolist() == [1.0] * size**2
        assert hvd.alltoall(x, [1] * size, "o", everybody)[1].tolist() == [1] * size
        assert hvd.broadcast_object("word", 0, "p", everybody) == "word"
        assert hvd.allgather_object("word", "q") == ["word"] * size
        hvd.barrier(everybody)

    ranks(check)


GATHER: dict[str, Callable[..., Any]] = {
    "allgather": lambda x, **o: hvd.allgather(x, **o),
    "allgather_async": lambda x, **o: hvd.synchronize(hvd.allgather_async(x, **o)),
    "grouped_allgather": lambda x, **o: hvd.grouped_allgather([x, x[:0]] if x.dim() else [x], **o)[0],
    "grouped_allgather_async": lambda x, **o: hvd.synchronize(hvd.grouped_allgather_async([x], **o))[0],
}


@pytest.mark.parametrize("form", GATHER)
def test_allgather(ranks: Any, form: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for dtype, layout in (*VARIANTS, (torch.bool, "contiguous")):
            for rows in ([2] * size, [(r + 1) % 3 for r in range(size)], [0] * size):
                each = [of_rank(r, (rows[r], 3)) for r in range(size)]
                truth = np.concatenate(each) if dtype is not torch.bool else np.concatenate(each) != 0
                x = tensor_of(rank, (rows[rank], 3), dtype, layout)
                assert_is(GATHER[form](x), x, truth)
            scalar = torch.tensor(rank).to(dtype)
            assert_is(GATHER[form](scalar), scalar, np.arange(size).astype(bool if dtype is torch.bool else int))
        if size > 2:
            pair = hvd.add_process_set([size - 1, 1])
            if pair.included():
                assert GATHER[form](torch.full((rank,), rank), process_set=pair).tolist() == [1] + [size - 1] * (
                    size - 1
                )
            hvd.remove_process_set(pair)

    ranks(check)


BROADCAST: dict[str, Callable[..., Any]] = {
    "broadcast": lambda x, root, **o: hvd.broadcast(x, root, **o),
    "broadcast_async": lambda x, root, **o: hvd.synchronize(hvd.broadcast_async(x, root, **o)),
    "broadcast_": lambda x, root, **o: same_object(hvd.broadcast_(x, root, **o), x),
    "broadcast_async_": lambda x, root, **o: same_object(hvd.synchronize(hvd.broadcast_async_(x, root, **o)), x),
}


@pytest.mark.parametrize("form", BROADCAST)
def test_broadcast(ranks: Any, form: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for dtype, layout in VARIANTS:
            for shape in ((3, 4), (), (0, 2)) if dtype is torch.float32 else ((3, 4),):
                for root in range(size) if dtype is torch.float32 else [size - 1]:
                    x = tensor_of(rank, shape, dtype, layout)
                    assert_is(BROADCAST[form](x, root), x, of_rank(root, shape))
                    inplace = form.endswith("_")
                    np.testing.assert_array_equal(values_of(x), of_rank(root if inplace else rank, shape))
        with pytest.raises(ArgumentError, match="root_rank=99"):
            BROADCAST[form](torch.ones(1), 99)

    ranks(check)


def test_memory_can_be_resized_afterwards(ranks: Any) -> None:
    """torch takes memory that ``tensor.numpy()`` has shown for NumPy's, and FSDP1 could not free it."""

    def program() -> bool:
        tensor = torch.ones(4)
        hvd.allreduce_(tensor)
        hvd.allgather(tensor)
        hvd.broadcast_(tensor, 0)
        return tensor.untyped_storage().resizable()

    assert all(ranks(program))


@pytest.mark.ranks(at_least=3)
def test_a_root_is_a_rank_of_the_job(ranks: Any) -> None:
    """In a process set too, as in Horovod; the core counts within the set."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        upper = hvd.add_process_set([1, size - 1])
        if upper.included():
            for root in upper.ranks:
                for call in BROADCAST.values():
                    assert call(torch.tensor([rank]), root, process_set=upper).tolist() == [root]
                assert hvd.broadcast_object(rank, root, process_set=upper) == root
                x = torch.tensor([float(rank)])
                hvd.broadcast_parameters({"x": x}, root, process_set=upper)
                assert x.item() == root
                optimizer = torch.optim.SGD([torch.nn.Parameter(x)], lr=rank + 1.0)
                hvd.broadcast_optimizer_state(optimizer, root, process_set=upper)
                assert optimizer.param_groups[0]["lr"] == root + 1.0
            with pytest.raises(ArgumentError, match=f"one of 1, {size - 1}"):
                hvd.broadcast(torch.ones(1), 0, process_set=upper)
            assert hvd.allgather_object(rank, process_set=upper) == [1, size - 1]
            hvd.barrier(process_set=upper)
        hvd.remove_process_set(upper)

    ranks(check)


def test_parameters_without_names(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        tensors = [torch.full((n,), float(rank)) for n in range(12)]
        hvd.broadcast_parameters(tensors, root_rank=size - 1)
        assert all((tensor == size - 1).all() for tensor in tensors)

    ranks(check)


def test_alltoall(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for dtype, layout in (*VARIANTS, (torch.bool, "contiguous")):
            # Even: two rows for each.
            x = tensor_of(rank, (2 * size, 3), dtype, layout)
            each = [values_of(tensor_of(r, (2 * size, 3), dtype, layout)) for r in range(size)]
            truth = np.concatenate([rows[2 * rank : 2 * rank + 2] for rows in each])
            assert_is(hvd.alltoall(x), x, truth)
            rows, received = hvd.synchronize(hvd.alltoall_async(x))
            assert_is(rows, x, truth)
            assert received.tolist() == [2] * size
            # Ragged: rank r has r + d rows, modulo 3, for rank d.
            counts = [[(r + d) % 3 for d in range(size)] for r in range(size)]
            x = tensor_of(rank, (sum(counts[rank]), 2), dtype, layout)
            truth = np.concatenate(
                [
                    np.split(values_of(tensor_of(r, (sum(counts[r]), 2), dtype, layout)), np.cumsum(counts[r])[:-1])[
                        rank
                    ]
                    for r in range(size)
                ]
            )
            for splits in (
                counts[rank],
                torch.tensor(counts[rank]),
                torch.tensor(counts[rank], dtype=torch.int32),
                np.array(counts[rank]),
            ):
                rows, received = hvd.alltoall(x, splits)
                assert_is(rows, x, truth)
                assert received.dtype is torch.int32
                assert received.tolist() == [counts[r][rank] for r in range(size)]
            rows, received = hvd.synchronize(hvd.alltoall_async(x, splits=counts[rank], name="ragged"))
            assert_is(rows, x, truth)
            assert received.tolist() == [counts[r][rank] for r in range(size)]
        empty = torch.ones(0, 2)
        assert hvd.alltoall(empty).shape == (0, 2)
        assert hvd.alltoall(empty, [0] * size)[1].tolist() == [0] * size

    ranks(check)


def test_alltoall_without_splits_may_have_different_lengths(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        x = torch.full(((rank + 1) * size,), rank)
        rows, received = hvd.synchronize(hvd.alltoall_async(x))
        assert rows.tolist() == [r for r in range(size) for _ in range(r + 1)]
        assert received.tolist() == list(range(1, size + 1))
        assert hvd.alltoall(x).tolist() == rows.tolist()

    ranks(check)


SCATTER: dict[str, Callable[..., Any]] = {
    "reducescatter": lambda x, **o: hvd.reducescatter(x, **o),
    "reducescatter_async": lambda x, **o: hvd.synchronize(hvd.reducescatter_async(x, **o)),
    "grouped_reducescatter": lambda x, **o: hvd.grouped_reducescatter([x, x[:0]], **o)[0],
    "grouped_reducescatter_async": lambda x, **o: hvd.synchronize(hvd.grouped_reducescatter_async([x], **o))[0],
}


@pytest.mark.parametrize("form", SCATTER)
def test_reducescatter(ranks: Any, form: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for dtype, layout in VARIANTS:
            every = ((size + 1, 2), (2 * size, 3), (1, 2), (0, 2), (5,))
            for shape in every if dtype is torch.float32 else every[:1]:
                each = np.stack([of_rank(r, shape) for r in range(size)])
                x = tensor_of(rank, shape, dtype, layout)
                for op, truth in ((hvd.Sum, each.sum(0)), (hvd.Product, each.prod(0))):
                    assert_is(SCATTER[form](x, op=op), x, np.array_split(truth, size)[rank])
        x = torch.full((size,), float(rank), dtype=torch.float64)
        assert SCATTER[form](x).tolist() == [(size - 1) / 2]
        assert SCATTER[form](x, op=hvd.Max).tolist() == [size - 1]
        assert SCATTER[form](x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5).tolist() == [
            x.size(0) * (size - 1) / 2
        ]
        if size > 2:
            pair = hvd.add_process_set([0, size - 1])
            if pair.included():
                assert SCATTER[form](x[:2], process_set=pair).tolist() == [(size - 1) / 2]
            hvd.remove_process_set(pair)

    ranks(check)


def test_poll_and_synchronize(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        handles = [hvd.allreduce_async(torch.full((3,), float(n)), name=f"n{n}", op=hvd.Sum) for n in range(10)]
        order = range(10) if hvd.rank() % 2 else range(9, -1, -1)
        for n in order:
            while not hvd.poll(handles[n]):
                pass
            assert hvd.synchronize(handles[n]).tolist() == [n * size] * 3
            assert hvd.synchronize(handles[n]).tolist() == [n * size] * 3  # once more
        for call in (hvd.poll, hvd.synchronize):
            with pytest.raises(ArgumentError, match="int 7"):
                call(7)

    ranks(check)


def test_a_name_in_flight(ranks: Any) -> None:
    def check() -> None:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
        with pytest.raises(ValueError, match="still in flight"):
            hvd.allreduce_async(torch.ones(3), name="twice")
        assert issubclass(DuplicateNameError, ValueError)
        hvd.synchronize(handle)

    ranks(check)


def test_communication_errors_have_horovods_name(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        assert issubclass(hvd.HorovodInternalError, RuntimeError)
        assert issubclass(hvd.PeerLeftError, hvd.HorovodInternalError)
        assert not issubclass(ArgumentError, hvd.HorovodInternalError)
        if size > 1:
            with pytest.raises(hvd.HorovodInternalError, match="float32"):
                hvd.allreduce(torch.ones(2 + rank), name="wrong")
            handle = hvd.allreduce_async(torch.ones(2 + rank))
            with pytest.raises(MismatchError):
                hvd.synchronize(handle)

    ranks(check)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hvd.grouped_allreduce(torch.ones(2)), ArgumentError, "a list of tensors"),
        (lambda: hvd.grouped_allgather(3), ArgumentError, "a list of tensors"),
        (lambda: hvd.allreduce(1.0), UnsupportedTensorError, "builtins.float"),
        (lambda: hvd.allreduce(torch.ones(2), compression="fp16"), ArgumentError, "Compression.none"),
        (lambda: hvd.allreduce(torch.ones(2).to_sparse()), UnsupportedTensorError, "dense"),
        (lambda: hvd.allreduce_(torch.ones(1).expand(3)), UnsupportedTensorError, "expanded"),
        (lambda: hvd.alltoall(torch.tensor(1.0)), UnsupportedTensorError, "0-d"),
        (lambda: hvd.alltoall([torch.ones(1)]), ArgumentError, "one tensor"),
        (lambda: hvd.alltoall(torch.ones(1), [7]), ArgumentError, "add up to"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), UnsupportedTensorError, "0-d"),
        (lambda: hvd.broadcast_parameters({"x": 1}), ArgumentError, "'x' is a int"),
    ],
)
def test_bad_arguments_raise_before_anything_is_sent(ranks: Any, call: Any, error: type, text: str) -> None:
    def check() -> None:
        with pytest.raises(error, match=text):
            call()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()  # and the job goes on

    ranks(check)


def test_alltoall_that_cannot_be_divided(ranks: Any) -> None:
    def check() -> None:
        if hvd.size() > 1:
            with pytest.raises(ArgumentError, match="Pass splits"):
                hvd.alltoall(torch.ones(hvd.size() + 1))

    ranks(check)


def test_lists_and_other_tensors_pass_through(ranks: Any) -> None:
    """What the core takes, these take: lists where Horovod has a name of its own for them, and NumPy arrays."""

    def check() -> None:
        size = hvd.size()
        assert [t.tolist() for t in hvd.allreduce([torch.ones(1), torch.ones(2)], op=hvd.Sum)] == [[size], [size] * 2]
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [size] * 2
        assert hvd.alltoall(np.arange(size)).tolist() == [hvd.rank()] * size
        assert hvd.allreduce(torch.ones(5), op=hvd.Sum, algorithm="ring").tolist() == [size] * 5

    ranks(check)


def test_groups_of_everything(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        tensors = [tensor_of(rank, (size, n), dtype, "strided") for n, dtype in enumerate(EVERY_DTYPE)]
        each = [
            [values_of(tensor_of(r, (size, n), dtype, "strided")) for r in range(size)]
            for n, dtype in enumerate(EVERY_DTYPE)
        ]
        for n, result in enumerate(hvd.grouped_allreduce(iter(tensors), op=hvd.Sum, name="group")):
            assert_is(result, tensors[n], sum(each[n]))
        for n, result in enumerate(hvd.grouped_allgather(tensors)):
            assert_is(result, tensors[n], np.concatenate(each[n]))
        for n, result in enumerate(hvd.grouped_reducescatter(tensors, op=hvd.Sum)):
            assert_is(result, tensors[n], sum(each[n])[rank : rank + 1])
        assert hvd.grouped_allreduce([]) == []

    ranks(check)


def test_objects_and_barrier(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        assert hvd.broadcast_object({"lr": rank}, root_rank=size - 1, name="state") == {"lr": size - 1}
        assert hvd.allgather_object("x" * rank, name="all") == ["x" * r for r in range(size)]
        assert hvd.barrier() is None

    ranks(check)


def test_what_is_built(ranks: Any) -> None:
    def check() -> None:
        assert hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported()
        for name in ("gloo_built", "gloo_enabled", "ddl_built", "ccl_built"):
            assert not getattr(hvd, name)(), name
        for built, version in ((hvd.cuda_built, torch.version.cuda), (hvd.rocm_built, torch.version.hip)):
            if version is not None or find_spec("cupy") is None:
                assert built() == (version is not None)
        sizes = hvd.allgather_object(hvd.local_size())
        assert hvd.is_homogeneous() == (len(set(sizes)) == 1)
        if hvd.is_homogeneous():
            assert hvd.cross_size() * hvd.local_size() == hvd.size()
            assert hvd.cross_rank() * hvd.local_size() + hvd.local_rank() == hvd.rank()

    ranks(check)
    if not hvdlite.is_initialized():
        with pytest.raises(ValueError, match="init"):
            hvd.mpi_threads_supported()
