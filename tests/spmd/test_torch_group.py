"""Each collective of a torch process group against NumPy, for all dtypes; the options that torch passes; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch._C._distributed_c10d import Store

import hvdlite_torch as hvd
from hvdlite.api import world
from hvdlite.errors import ArgumentError, DeviceError, MismatchError, NotYetError, UnsupportedTensorError
from hvdlite_torch.distributed.process_group import HvdliteProcessGroup

Ranks = Callable[..., list[Any]]
Op = dist.ReduceOp
SIZES = (0, 1, 7, 3000)
REDUCIBLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
MOVABLE = (*REDUCIBLE, torch.bool, torch.complex64, torch.float8_e4m3fn)


class Group:
    """A process group of all ranks, without ``init_process_group``, of which a process has only one."""

    def __init__(self) -> None:
        self.pg = HvdliteProcessGroup(Store(), "test", world().communicators.new(range(hvd.size()), "a test"))
        self.rank, self.size = hvd.rank(), hvd.size()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        hvd.barrier()
        self.pg.shutdown()


class Options(SimpleNamespace):
    """What torch has a class for with each operation."""


def options(op: Any = None, root: int = 0, asynchronous: bool = False) -> Any:
    return Options(reduceOp=op, rootRank=root, asyncOp=asynchronous)


def values(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(n) + rank) % 5).to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    assert got.dtype == expected.dtype
    if got.numel() == expected.numel() == 0:
        return True
    return bool(torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8)))


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_reductions(ranks: Ranks, dtype: torch.dtype) -> None:
    def check() -> None:
        with Group() as group:
            rank, size, pg = group.rank, group.size, group.pg
            numpy = {Op.SUM: np.sum, Op.PRODUCT: np.prod, Op.MIN: np.min, Op.MAX: np.max}
            for n, (op, reduce) in ((n, each) for n in SIZES for each in numpy.items()):
                all_values = np.stack([values(r, n, torch.int64).numpy() for r in range(size)])
                expected = torch.from_numpy(np.asarray(reduce(all_values, axis=0))).to(dtype)
                given = values(rank, n, dtype)
                tensor = given.clone()
                pg.allreduce([tensor], options(op)).wait()
                assert same(tensor, expected)
                tensor = given.clone()
                pg.reduce([tensor], options(op, root=size - 1)).wait()
                assert same(tensor, expected if rank == size - 1 else given)
                part = torch.empty(n, dtype=dtype)
                pg._reduce_scatter_base(part, given.repeat(size), options(op)).wait()
                assert same(part, expected)
                pg.reduce_scatter([part], [[given] * size], options(op)).wait()
                assert same(part, expected)
                pairs = [given.clone(), given.clone()]
                pg.allreduce_coalesced(pairs, options(op)).wait()
                assert all(same(each, expected) for each in pairs)
                outs = [torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)]
                pg.reduce_scatter_tensor_coalesced(outs, [given.repeat(size)] * 2, options(op)).wait()
                assert all(same(each, expected) for each in outs)

    ranks(check)


@pytest.mark.parametrize("dtype", MOVABLE)
def test_moves(ranks: Ranks, dtype: torch.dtype) -> None:
    def check() -> None:
        with Group() as group:
            rank, size, pg = group.rank, group.size, group.pg
            for n in SIZES:
                everyone = [values(r, n, dtype) for r in range(size)]
                mine, joined = everyone[rank], torch.cat([each.view(torch.uint8) for each in everyone]).view(dtype)
                tensor = mine.clone()
                pg.broadcast([tensor], options(root=size - 1)).wait()
                assert same(tensor, everyone[-1])
                outs = [torch.empty(n, dtype=dtype) for _ in everyone]
                pg.allgather([outs], [mine], options()).wait()
                assert all(map(same, outs, everyone))
                one = torch.empty(n * size, dtype=dtype)
                pg._allgather_base(one, mine, options()).wait()
                assert same(one, joined)
                pg.allgather_into_tensor_coalesced([one], [mine], options()).wait()
                assert same(one, joined)
                outs = [torch.empty(n, dtype=dtype) for _ in everyone]
                pg.gather([outs] if rank == 0 else [], [mine], options(root=0)).wait()
                assert rank or all(map(same, outs, everyone))
                tensor = torch.empty(n, dtype=dtype)
                pg.scatter([tensor], [everyone] if rank == size - 1 else [], options(root=size - 1)).wait()
                assert same(tensor, mine)
                outs = [torch.empty(n, dtype=dtype) for _ in everyone]
                pg.alltoall(outs, [mine] * size, options()).wait()
                assert all(map(same, outs, everyone))
                pg.alltoall_base(one, mine.repeat(size) if n else one, [], [], options()).wait()
                assert same(one, joined)
                sent = pg.send([mine], (rank + 1) % size, 4)
                pg.recv([tensor], (rank - 1) % size, 4).wait()
                assert same(tensor, everyone[(rank - 1) % size])
                sent.wait()

    ranks(check)


def test_uneven_allgather_of_lists(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            outs = [torch.empty(r) for r in range(group.size)]
            group.pg.allgather([outs], [torch.full((group.rank,), float(group.rank))], options()).wait()
            assert all((out == r).all() for r, out in enumerate(outs))
            lists = [[torch.empty(2), torch.empty(3)] for _ in range(group.size)]  # by rank, then by tensor
            group.pg.allgather_coalesced(lists, [torch.full((k,), float(group.rank)) for k in (2, 3)], options()).wait()
            assert all((out == r).all() for r, each in enumerate(lists) for out in each)

    ranks(check)


@hypothesis.settings(max_examples=20, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.data())
def test_any_splits(ranks: Ranks, data: st.DataObject) -> None:
    size = 4
    table = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=size, max_size=size), min_size=size, max_size=size))

    def check() -> None:
        with Group() as group:
            rank, n = group.rank, group.size
            sends, receives = table[rank][:n], [table[r][rank] for r in range(n)]
            source = torch.cat([torch.full((count, 2), float(10 * rank + r)) for r, count in enumerate(sends)])
            out = torch.empty(sum(receives), 2)
            group.pg.alltoall_base(out, source, receives, sends, options()).wait()
            assert torch.equal(
                out, torch.cat([torch.full((k, 2), float(10 * r + rank)) for r, k in enumerate(receives)])
            )

    ranks(check)


def test_splits_that_do_not_fit_raise_on_all_ranks(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            sends = [1] * group.size
            receives = [2 if group.rank == 0 else 1] * group.size
            out, source = torch.empty(sum(receives)), torch.empty(group.size)
            with pytest.raises(MismatchError, match="rank 0 of the group sends 1 elements to rank 0, which expects 2"):
                group.pg.alltoall_base(out, source, receives, sends, options()).wait()

    ranks(check)


def test_averages_and_bits(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            n = group.size
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
                tensor = torch.full((9,), 2 * group.rank).to(dtype)
                group.pg.allreduce([tensor], options(Op.AVG)).wait()
                assert same(tensor, torch.full((9,), n - 1).to(dtype))
            numbers = np.arange(1, n + 1)
            for op, reduce in ((Op.BAND, np.bitwise_and), (Op.BOR, np.bitwise_or), (Op.BXOR, np.bitwise_xor)):
                tensor = torch.full((5,), group.rank + 1)
                group.pg.allreduce([tensor], options(op)).wait()
                assert (tensor == int(reduce.reduce(numbers))).all()
                part = torch.empty(2, dtype=torch.int64)
                group.pg._reduce_scatter_base(part, torch.full((2 * n,), group.rank + 1), options(op)).wait()
                assert (part == int(reduce.reduce(numbers))).all()
            truth = [torch.tensor([True, False, r == 0]) for r in range(n)]
            for op, expected in ((Op.SUM, [True, False, True]), (Op.PRODUCT, [True, False, n == 1])):
                tensor = truth[group.rank].clone()
                group.pg.allreduce([tensor], options(op)).wait()
                assert tensor.tolist() == expected

    ranks(check)


def test_tensors_that_are_not_contiguous(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            whole = torch.zeros(4, 6)
            whole[:, 1::2] = group.rank + 1
            group.pg.allreduce([whole[:, 1::2]], options(Op.SUM)).wait()
            expected = torch.zeros(4, 6)
            expected[:, 1::2] = sum(range(1, group.size + 1))
            assert torch.equal(whole, expected)
            received = torch.zeros(3, 2)
            sent = group.pg.send([torch.arange(6.0).view(2, 3).t()], (group.rank + 1) % group.size)
            group.pg.recv([received.t()], (group.rank - 1) % group.size).wait()
            assert torch.equal(received.t(), torch.arange(6.0).view(2, 3).t().reshape(2, 3))
            sent.wait()
            overlapping = torch.full((2 * group.size,), float(group.rank))
            group.pg._reduce_scatter_base(
                overlapping[2 * group.rank : 2 * group.rank + 2], overlapping, options(Op.SUM)
            ).wait()
            assert (overlapping[2 * group.rank : 2 * group.rank + 2] == sum(range(group.size))).all()

    ranks(check)


def test_memory_can_be_resized_afterwards(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            tensor = torch.ones(100)
            group.pg.allreduce([tensor], options(Op.SUM)).wait()
            tensor.untyped_storage().resize_(0)  # FSDP frees its parameters in this way

    ranks(check)


def test_work_and_futures(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            tensor = torch.ones(3)
            work = group.pg.allreduce([tensor], options(Op.SUM, asynchronous=True))
            then = work.get_future().then(lambda future: future.value()[0] * 2)
            assert torch.equal(then.wait(), torch.full((3,), 2.0 * group.size))
            assert work.is_completed()
            assert work.is_success()
            assert work.result()[0] is tensor
            group.pg._start_coalescing(torch.device("cpu"))
            tensors = [torch.ones(n) for n in (1, 2)]
            for each in tensors:
                group.pg.allreduce([each], options(Op.SUM, asynchronous=True))
            both = group.pg._end_coalescing(torch.device("cpu"))
            both.wait()
            assert both.is_completed()
            assert [each.tolist() for each in tensors] == [[group.size], [group.size] * 2]
            failing = group.pg.allreduce(
                [torch.ones(2 + (group.rank == 0 and group.size > 1))], options(Op.SUM, asynchronous=True)
            )
            if group.size > 1:
                with pytest.raises(RuntimeError, match="call different things"):
                    failing.get_future().wait()
                assert isinstance(failing.exception(), MismatchError)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_receive_from_any_rank_says_from_which(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            if group.rank:
                group.pg.send([torch.tensor([group.rank])], 0).wait()
                return
            for _ in range(group.size - 1):
                got = torch.zeros(1, dtype=torch.int64)
                work = group.pg.recv_anysource([got], 0)
                work.wait()
                assert got.item() == work._source_rank() != 0

    ranks(check)


class OnGpu:
    """Stands for torch's process group with NCCL: it notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *_: self.asked.append(name) or f"work of {name}"  # type: ignore[func-returns-value]


def test_tensors_on_a_gpu_go_to_torchs_nccl(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            pg, there = group.pg, OnGpu()
            vars(pg)["on_gpu"] = there
            tensor, given = SimpleNamespace(is_cuda=True), options(Op.SUM)
            calls: list[tuple[str, tuple[Any, ...]]] = [
                *((name, ([tensor], given)) for name in ("allreduce", "allreduce_coalesced", "reduce", "broadcast")),
                *((name, ([[tensor]], [tensor], given)) for name in ("allgather", "allgather_coalesced")),
                *((name, (tensor, tensor, given)) for name in ("all_gather_single", "reduce_scatter_single")),
                *((name, ([tensor], [[tensor]], given)) for name in ("reduce_scatter", "scatter")),
                *((name, ([], [tensor], given)) for name in ("gather",)),  # this rank is not the root
                *((name, ([tensor], [tensor], given)) for name in ("alltoall", "all_gather_single_coalesced")),
                ("reduce_scatter_single_coalesced", ([tensor], [tensor], given)),
                ("all_to_all_single", (tensor, tensor, [], [], given)),
                *(("send", ([tensor], 0, 1)), ("recv", ([tensor], 0, 1)), ("recv_anysource", ([tensor], 1))),
            ]
            assert [getattr(pg, name)(*arguments) for name, arguments in calls] == [
                f"work of {name}" for name, _ in calls
            ]
            pg._start_coalescing(torch.device("cuda", 0))
            assert pg._end_coalescing(torch.device("cuda", 0)) == "work of _end_coalescing"
            assert pg._get_backend(torch.device("cuda")) == "work of _get_backend"
            assert there.asked == [*(name for name, _ in calls), "_start_coalescing", "_end_coalescing", "_get_backend"]
            host = torch.ones(2)
            pg.allreduce([host], given).wait()
            assert host.tolist() == [group.size] * 2

    ranks(check)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_torch_without_nccl_says_so(ranks: Ranks) -> None:
    def check() -> None:
        with Group() as group:
            assert group.pg._device_types == [torch.device("cpu")]
            with pytest.raises(DeviceError, match="this torch has no NCCL"):
                group.pg._get_backend(torch.device("cuda"))
            with pytest.raises(RuntimeError, match="no way for tensors on meta"):
                group.pg._get_backend(torch.device("meta"))

    ranks(check)


def refusals() -> Iterator[tuple[str, type[Exception], Callable[[HvdliteProcessGroup], Any], str]]:
    three = torch.ones(3)
    yield (
        "AVG of int",
        UnsupportedTensorError,
        lambda pg: pg.allreduce([three.long()], options(Op.AVG)),
        "have no average",
    )
    yield (
        "PREMUL_SUM",
        NotYetError,
        lambda pg: pg.allreduce([three], options(Op.PREMUL_SUM)),
        "Multiply the tensor before",
    )
    yield (
        "BAND of float",
        UnsupportedTensorError,
        lambda pg: pg.allreduce([three], options(Op.BAND)),
        "integers or bool",
    )
    float8 = three.to(torch.float8_e4m3fn)
    yield "float8", UnsupportedTensorError, lambda pg: pg.allreduce([float8], options(Op.SUM)), "cast it to float16"
    meta = torch.ones(3, device="meta")
    yield (
        "meta",
        UnsupportedTensorError,
        lambda pg: pg.allreduce([meta], options(Op.SUM)),
        "in host memory; got one on meta",
    )
    sparse = torch.eye(3).to_sparse()
    yield (
        "sparse",
        UnsupportedTensorError,
        lambda pg: pg.allreduce([sparse], options(Op.SUM)),
        "expected a dense tensor",
    )
    yield "one tensor", NotYetError, lambda pg: pg.send(three, 0), "lists of tensors"
    yield (
        "size",
        ArgumentError,
        lambda pg: pg._allgather_base(torch.ones(50), three, options()),
        "has 50 elements; expected",
    )
    yield "dest", ArgumentError, lambda pg: pg.send([three], 99), "99"
    yield "barrier", NotYetError, lambda pg: pg.monitored_barrier(), "names who is missing"


@pytest.mark.parametrize(("error", "call", "text"), [pytest.param(*each, id=name) for name, *each in refusals()])
def test_what_is_refused(
    ranks: Ranks, error: type[Exception], call: Callable[[HvdliteProcessGroup], Any], text: str
) -> None:
    def check() -> None:
        with Group() as group:
            with pytest.raises(error, match=text):
                call(group.pg)
            group.pg.barrier().wait()  # the ranks are in step

    ranks(check)
