"""Named operations on tensors that lie on a (pretended) GPU, by a pretended NCCL (tests/support/fake_device.py)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.errors import DeviceError, MismatchError, NcclError, PeerLeftError, UnsupportedTensorError
from hvdlite.testing import on_ranks
from hvdlite_torch.tensors.device import TorchDevice
from tests.support.fake_device import HERE, FakeDevice, fake_gpu
from tests.support.fake_nccl import FakeNccl

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
FUNCTIONS: dict[hvd.ReduceOp, Callable[[list[Any]], Any]] = {
    hvd.Sum: lambda each: sum(each),
    hvd.Product: lambda each: np.prod(each, axis=0),
    hvd.Min: lambda each: np.min(each, axis=0),
    hvd.Max: lambda each: np.max(each, axis=0),
    hvd.Average: lambda each: sum(each) / len(each),
}


def values_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def of_rank(rank: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    base = (np.arange(6).reshape(2, 3) + rank) % 3
    if dtype is torch.bool:
        return base > 0
    return base * (1 + 1j) if dtype.is_complex else base


def defined(dtype: torch.dtype, op: hvd.ReduceOp) -> bool:
    if dtype is torch.bool:
        return op not in (hvd.Sum, hvd.Average)
    return not (dtype.is_complex and op in (hvd.Min, hvd.Max))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("library", ["fake", None], ids=["nccl", "staged"])
@pytest.mark.filterwarnings("ignore:NCCL was not found")
def test_reductions(ranks: Any, dtype: torch.dtype, library: Any) -> None:
    def check() -> None:
        with fake_gpu(library) as gpu:
            rank, size = hvd.rank(), hvd.size()
            each = [of_rank(r, dtype) for r in range(size)]
            x = gpu.ready(torch.from_numpy(each[rank]).to(dtype))
            for op in filter(lambda op: defined(dtype, op), FUNCTIONS):
                expected = FUNCTIONS[op](each)
                if op is hvd.Average and not dtype.is_floating_point and not dtype.is_complex:
                    expected = np.trunc(expected)
                result = hvd.allreduce(x, op=op)
                assert result.dtype is dtype and result is not x
                tolerance = 1e-2 if op is hvd.Average and dtype.itemsize == 2 else 1e-6
                np.testing.assert_allclose(values_of(result), expected, tolerance)
                rows = hvd.reducescatter(x, op=op)
                share = np.array_split(np.asarray(expected), size)[rank]
                np.testing.assert_allclose(values_of(rows), share, tolerance)
                gpu.use(result, rows)
            np.testing.assert_array_equal(values_of(x), values_of(torch.from_numpy(each[rank]).to(dtype)))
            gpu.check_kept()

    ranks(check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_of_halves_have_no_bias(ranks: Any, dtype: torch.dtype) -> None:
    """NCCL's own average multiplies by 1/n in the dtype, which is 2e-3 too much for three ranks and bfloat16."""

    def check() -> None:
        with fake_gpu() as gpu:
            x = gpu.ready((1 + torch.rand(2000, generator=torch.Generator().manual_seed(hvd.rank()))).to(dtype))
            everybody = torch.stack(hvd.allgather_object(x)).double()
            for mean in (hvd.allreduce(x), hvd.allreduce_(x.clone())):
                error = mean.double() / everybody.mean(0) - 1
                assert error.abs().max() <= 3 * torch.finfo(dtype).eps and error.mean().abs() < 2e-4
            share = hvd.reducescatter(x).double() / everybody.mean(0).tensor_split(hvd.size())[hvd.rank()] - 1
            assert share.mean().abs() < 3e-4

    ranks(check)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=lambda dtype: str(dtype)[6:])
def test_movements(ranks: Any, dtype: torch.dtype) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            rank, size = hvd.rank(), hvd.size()
            mine = gpu.ready(torch.full((rank + 1, 2), rank + 1.0).to(dtype))
            gathered = hvd.allgather(mine)
            assert gathered.dtype is dtype
            assert values_of(gathered)[:, 0].tolist() == [r + 1 for r in range(size) for _ in range(r + 1)] or (
                dtype is torch.bool
            )
            got = hvd.broadcast(mine[:1].contiguous(), size - 1)
            np.testing.assert_array_equal(values_of(got), values_of(torch.full((1, 2), float(size)).to(dtype)))
            # Rank r sends r + 1 rows to the last rank, and none to the others.
            splits = torch.tensor([0] * (size - 1) + [rank + 1])
            rows, received = hvd.alltoall(mine, gpu.ready(splits))
            gpu.use(gathered, got, rows, received)
            assert received.dtype is torch.int32
            if rank == size - 1:
                assert received.tolist() == [r + 1 for r in range(size)]
                np.testing.assert_array_equal(values_of(rows), values_of(gathered))
            else:
                assert rows.shape == (0, 2) and received.tolist() == [0] * size
            gpu.check_kept()

    ranks(check)


def test_in_place_groups_and_layouts(ranks: Any) -> None:
    """Results go back into strided and conjugated memory too; tensors of several dtypes are one call."""

    def check() -> None:
        with fake_gpu() as gpu:
            rank, size = hvd.rank(), hvd.size()
            total = sum(range(size))
            grid = torch.arange(12.0).reshape(3, 4) + rank
            strided = gpu.ready(grid).t()
            assert hvd.allreduce_(strided, op=hvd.Sum) is strided
            np.testing.assert_array_equal(strided.numpy(), size * np.arange(12.0).reshape(3, 4).T + total)
            conj = gpu.ready(torch.tensor([1 + 2j, rank * 1j])).conj()
            hvd.allreduce_(conj, op=hvd.Sum)
            np.testing.assert_array_equal(conj.resolve_conj().numpy(), [size * (1 - 2j), -1j * total])
            group = [gpu.ready(torch.full(shape, rank).to(dtype)) for shape, dtype in GROUP]
            results = hvd.grouped_allreduce(group, op=hvd.Sum)
            for given, result in zip(group, results, strict=True):
                assert result.shape == given.shape and result.dtype is given.dtype
                assert (values_of(result) == total).all()
            same = hvd.grouped_allreduce_(group, op=hvd.Sum)
            assert all(a is b for a, b in zip(same, group, strict=True))
            empty = hvd.allreduce(gpu.ready(torch.empty(0, 3)))
            assert empty.shape == (0, 3)
            across = gpu.ready(torch.full((4, 3), float(rank))).t()
            hvd.broadcast_(across, size - 1)
            assert across.shape == (3, 4) and (across == size - 1).all()
            gpu.use(strided, *results, *group, across)
            gpu.check_kept()

    ranks(check)


GROUP: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((), torch.float32),
    ((3,), torch.bfloat16),
    ((2, 2), torch.float32),
    ((1,), torch.int16),
    ((2, 0), torch.float32),
]


def test_many_at_once_in_any_order(ranks: Any) -> None:
    """Handles are waited for in another order than that of submission; operations that are ready together run as one."""

    def check() -> list[str]:
        with fake_gpu() as gpu:
            rank, size = hvd.rank(), hvd.size()
            order = list(range(12))
            handles = {}
            for number in order[rank:] + order[:rank]:  # each rank submits in an order of its own
                x = gpu.ready(torch.full((3,), float(number + rank)))
                handles[number] = hvd.allreduce_async(x, op=hvd.Sum, name=f"n{number}")
            for number in reversed(order):
                result = hvd.synchronize(handles[number])
                gpu.use(result)
                assert result.tolist() == [number * size + sum(range(size))] * 3
            gpu.check_kept()
            return [call for made in fake_of(gpu).made for call in made.calls]

    calls = ranks(check)
    assert all(each == calls[0] for each in calls)


def fake_of(gpu: FakeDevice) -> FakeNccl:
    library = hvdlite.api.world().devices.load()
    assert isinstance(library, FakeNccl)
    return library


def test_scales(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            rank, size = hvd.rank(), hvd.size()
            for dtype in (torch.float32, torch.float16, torch.complex64, torch.int32):
                x = gpu.ready((torch.arange(4) + rank).to(dtype))
                result = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
                gpu.use(result)
                each = [np.arange(4) + r for r in range(size)]
                halves = [part // 2 if dtype is torch.int32 else part * 0.5 for part in each]
                np.testing.assert_array_equal(values_of(result), sum(halves) * 4)
                assert x.tolist() == (torch.arange(4) + rank).to(dtype).tolist()
                hvd.allreduce_(x, op=hvd.Sum, prescale_factor=0.5)
                np.testing.assert_array_equal(values_of(x), sum(halves))

    ranks(check)


def test_float8_is_scaled_and_averaged(ranks: Any) -> None:
    """torch knows no arithmetic of float8, on a GPU as little as here."""

    def check() -> None:
        with fake_gpu():
            x = torch.full((4,), 2.0).to(torch.float8_e5m2)
            scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
            assert scaled.dtype is x.dtype and scaled.float().tolist() == [4.0 * hvd.size()] * 4
            assert hvd.allreduce(x).float().tolist() == [2.0] * 4

    ranks(check)


def test_lists_of_unsigned_integers(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._foreach_copy_` does not know them on a GPU (ForeachBinaryOpList.cu)."""
    real = torch._foreach_copy_

    def as_on_a_gpu(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        for tensor in (*tensors, *values):
            if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
                raise NotImplementedError(f'"foreach_tensor_copy" not implemented for {tensor.dtype}')
        real(tensors, values)

    monkeypatch.setattr(torch, "_foreach_copy_", as_on_a_gpu)

    def check() -> None:
        with fake_gpu():
            for dtype in (torch.uint16, torch.uint32, torch.uint64):
                each = [torch.tensor([[1, 2], [3, 4]]).to(dtype).T, torch.tensor(5).to(dtype)]
                first, second = hvd.grouped_allreduce(each, op=hvd.Max)
                assert first.dtype is dtype and first.tolist() == [[1, 3], [2, 4]] and second.item() == 5

    ranks(check)


def test_streams_are_ordered(ranks: Any) -> None:
    """Work of the caller on another stream than usual comes before the exchange, and what he does there next after it."""

    def check() -> None:
        with fake_gpu() as gpu:
            mine = gpu.side()
            with gpu.on(mine):
                x = gpu.ready(torch.ones(5))
                y = hvd.allreduce(x, op=hvd.Sum)
                gpu.use(y)
                hvd.allreduce_(x, op=hvd.Sum)
                gpu.use(x)
                handle = hvd.allreduce_async(x, op=hvd.Sum, name="later")
            result = hvd.synchronize(handle)  # on the usual stream
            gpu.use(result)
            gpu.check_kept()
            before = gpu.host_waits
            hvd.allreduce(gpu.ready(torch.ones(3)))
            hvd.allgather(gpu.ready(torch.ones(3)))
            assert gpu.host_waits == before, "the host has waited for the GPU"

    ranks(check)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product], ids=repr)
def test_join(ranks: Any, op: hvd.ReduceOp) -> None:
    """A rank that has joined, and has never had a tensor on a GPU, changes no result."""

    def check() -> None:
        with fake_gpu() as gpu:
            rank, size = hvd.rank(), hvd.size()
            if rank < size - 1 or size == 1:
                present = range(size - 1) if size > 1 else range(1)
                each = [np.arange(4.0) + r for r in present]
                expected = FUNCTIONS[op](each) if op is not hvd.Average else sum(each) / size
                result = hvd.allreduce(gpu.ready(torch.arange(4.0) + rank), op=op)
                np.testing.assert_allclose(result.numpy(), expected, 1e-6)
                whole = hvd.allreduce(gpu.ready(torch.arange(4) + rank), op=op)
                np.testing.assert_allclose(whole.numpy(), np.trunc(expected))
                rows = hvd.allgather(gpu.ready(torch.full((2,), rank)))
                assert rows.tolist() == [r for r in present for _ in range(2)]
                share = hvd.reducescatter(gpu.ready(torch.ones(size, 2)), op=hvd.Sum)
                assert (share == len(each)).all()
                root = hvd.broadcast(gpu.ready(torch.full((2,), rank)), 0)
                assert root.tolist() == [0, 0]
                gpu.use(result, whole, rows, share, root)
            hvd.join()

    ranks(check)


def test_process_sets_have_their_own(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            rank, size = hvd.rank(), hvd.size()
            if size < 3:
                return
            pair = hvd.add_process_set([0, size - 1])
            total = hvd.allreduce(gpu.ready(torch.ones(2)), op=hvd.Sum)
            if pair.included():
                part = hvd.allreduce(gpu.ready(torch.full((2,), float(rank))), op=hvd.Sum, process_set=pair)
                assert part.tolist() == [size - 1.0] * 2
                gpu.use(part)
            gpu.use(total)
            assert total.tolist() == [size] * 2
            hvd.remove_process_set(pair)

    ranks(check)


def test_host_and_gpu_side_by_side(ranks: Any) -> None:
    """NumPy arrays, which lie in host memory, and GPU tensors in one job, by turns; in one call they are an error."""

    def check() -> None:
        with fake_gpu() as gpu:
            rank, size = hvd.rank(), hvd.size()
            a = hvdlite.allreduce_async(np.ones(3), hvdlite.Sum, "host")
            b = hvdlite.allreduce_async(gpu.ready(torch.ones(3)), hvdlite.Sum, "gpu")
            np.testing.assert_array_equal(b.wait(), [size] * 3)
            np.testing.assert_array_equal(a.wait(), [size] * 3)
            with pytest.raises(UnsupportedTensorError, match="some tensors of this list are in host memory"):
                hvdlite.allreduce([np.ones(3), torch.ones(3)])
            if size > 1:
                x: Any = np.ones(3, np.float32) if rank else gpu.ready(torch.ones(3))
                with pytest.raises(MismatchError, match="device=cuda"):
                    hvdlite.allreduce(x, hvdlite.Sum)

    ranks(check)


def test_adasum_and_named_algorithms_go_through_the_host(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            x = gpu.ready(torch.full((4,), 2.0))
            assert hvd.allreduce(x, op=hvd.Adasum).tolist() == [2.0] * 4  # of equal vectors: the vector
            result = hvdlite.allreduce(x, hvdlite.Sum, algorithm="ring")
            assert result.tolist() == [2.0 * hvd.size()] * 4

    ranks(check)


def test_float8_needs_a_new_nccl(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu(FakeNccl(22400)) as gpu:
            x = gpu.ready(torch.ones(4).to(torch.float8_e4m3fn))
            result = hvd.allreduce(x, op=hvd.Sum)
            assert result.dtype is x.dtype and result.float().tolist() == [float(hvd.size())] * 4
        if hvd.size() > 1:
            with fake_gpu(FakeNccl(22300)) as gpu:
                x = gpu.ready(torch.ones(4).to(torch.float8_e4m3fn))
                with pytest.raises(UnsupportedTensorError, match=r"2\.24"):
                    hvd.allreduce(x, op=hvd.Sum)

                with pytest.raises(UnsupportedTensorError, match="float16"):
                    hvd.allreduce(x, op=hvd.Max)

    ranks(check)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max], ids=repr)
def test_no_nan_is_lost(ranks: Any, op: hvd.ReduceOp) -> None:
    """As NCCL's own Min and Max do: so does the pretended one."""

    def check() -> None:
        with fake_gpu() as gpu:
            for who in range(hvd.size()):
                x = gpu.ready(torch.full((6,), float("nan") if who == hvd.rank() else 1.0))
                for result in (hvd.allreduce(x, op=op), hvd.reducescatter(x, op=op)):
                    assert result.isnan().all()

    ranks(check)


# What goes wrong: the same error on every rank, soon


def test_no_memory_on_one_rank(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            hvd.allreduce(gpu.ready(torch.ones(2)))
            if hvd.rank() == hvd.size() - 1:
                gpu.capacity = 100
            big = gpu.ready(torch.ones(1000))
            for call in (lambda: hvd.allreduce(big), lambda: hvd.allgather(big), lambda: hvd.broadcast(big, 0)):
                with pytest.raises(DeviceError, match=f"rank {hvd.size() - 1}: OutOfMemoryError: CUDA out of memory"):
                    call()
            gpu.capacity = None
            assert hvd.allreduce(big).tolist() == [1.0] * 1000

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_two_ranks_on_one_gpu(ranks: Any) -> None:
    def check() -> None:
        crowded = r"ranks 0, 1.* use the same GPU.*Start at most 1 ranks"
        with fake_gpu(index=0, visible=1) as gpu, pytest.raises(DeviceError, match=crowded):
            hvd.allreduce(gpu.ready(torch.ones(2)))
        with fake_gpu(index=0, visible=8) as gpu, pytest.raises(DeviceError, match=r"torch\.cuda\.set_device"):
            hvd.allreduce(gpu.ready(torch.ones(2)))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_ranks_on_slices_of_one_card(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(uuid="1234", name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    identity = TorchDevice(torch.device("cuda", 0)).identity

    def check() -> None:
        with fake_gpu(index=0, visible=1) as gpu:
            gpu.uuid = identity
            with pytest.raises(
                DeviceError, match=r"same GPU, 1234, the slice 1g\.5gb .*HVDLITE_NCCL=0 they go through host"
            ):
                hvd.allreduce(gpu.ready(torch.ones(2)))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_card_that_refuses_one_rank(ranks: Any) -> None:
    """All ranks hear of it, whatever class of error the framework raises."""

    def check() -> None:
        def identity(_: Any) -> str:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

        with fake_gpu() as gpu:
            if hvd.rank() == 1:
                gpu.__class__ = type("Busy", (type(gpu),), {"identity": property(identity)})
            with pytest.raises(DeviceError, match=r"rank 1: RuntimeError: CUDA error: .* exclusive mode: .nvidia-smi"):
                hvd.allreduce(gpu.ready(torch.ones(2)))

    ranks(check)


def test_another_gpu_than_before(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            hvd.allreduce(gpu.ready(torch.ones(2)))
            gpu.index += 100
            first = FakeDevice(gpu.index - 100)
            hvdlite.api.world().devices._chosen["cuda"] = first
            with pytest.raises(DeviceError, match="each rank uses one GPU"):
                hvd.allreduce(torch.ones(2))
            gpu.index -= 100
            hvdlite.api.world().devices._chosen["cuda"] = by_cupy = FakeDevice(gpu.index)
            by_cupy.library = "cupy"
            with pytest.raises(DeviceError, match="by way of cupy before, and this one would go by way of torch"):
                hvd.allreduce(torch.ones(2))
            hvdlite.api.world().devices._chosen["cuda"] = gpu
            assert hvd.allreduce(gpu.ready(torch.ones(2))).tolist() == [1.0, 1.0]

    ranks(check)


def test_memory_of_others_is_kept_by_who_knows_it(ranks: Any) -> None:
    """The group's channel was made for torch's memory; that of arrays that are lent to torch is unknown to its allocator."""

    def check() -> None:
        with fake_gpu() as gpu:
            hvd.allreduce(gpu.ready(torch.ones(2)))  # makes the channel
            lent, kept = gpu.ready(torch.ones(3)), []
            lending = copy.copy(gpu)
            lending.keep = lambda tensor, stream: kept.append(tensor.data_ptr())  # type: ignore[method-assign]
            token = HERE.set(lending)
            hvd.allreduce(lent, op=hvd.Sum)
            HERE.reset(token)
            assert lent.data_ptr() in kept

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_the_gpu_is_current_where_a_communicator_ends(ranks: Any, end: str) -> None:
    """NCCL makes current again, in that thread, what was current before: not GPU 0, where another rank works."""

    def check() -> None:
        with fake_gpu() as gpu:
            hvd.allreduce(gpu.ready(torch.ones(2)))
            on, threads = gpu.on, []

            def seen(stream: Any) -> Any:
                threads.append(threading.current_thread().name)
                return on(stream)

            gpu.on = seen  # type: ignore[method-assign]
            (channel,) = hvdlite.api.world().devices._open
            ended = channel._communicator  # type: ignore[attr-defined]
            getattr(channel, {"destroy": "close"}.get(end, end))()
            hvdlite.api.world().devices._shared.clear()
            assert ended.aborted.wait(5) if end == "abort" else ended.destroyed
            assert threads == [f"hvdlite-nccl-{end}"]

    ranks(check)


def refuse() -> FakeNccl:
    raise DeviceError("/lib/libnccl.so.2 is NCCL 2.4.8; expected at least 2.18.0.")


@pytest.mark.ranks(at_least=2)
def test_one_rank_cannot_load_nccl(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            if hvd.rank() == 0:
                hvdlite.api.world().devices.load = refuse
            for _ in range(2):  # the second time too
                with pytest.raises(DeviceError, match=r"rank 0: /lib/libnccl.so.2 is NCCL 2\.4\.8"):
                    hvd.allreduce(gpu.ready(torch.ones(2)))
        library = FakeNccl(22809 if hvd.rank() else 22805)
        with fake_gpu(library) as gpu, pytest.raises(DeviceError, match=r"need the same NCCL(.|\n)*2\.28\.5"):
            hvd.allreduce(gpu.ready(torch.ones(2)))

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("call", ["connect", "all_reduce"])
def test_one_rank_cannot_start_nccl(ranks: Any, call: str) -> None:
    """The other ranks are inside of NCCL's own start, or of the first sum, and wait for it."""

    def check() -> None:
        library = FakeNccl()
        library.fail_at = call if hvd.rank() == 1 else ""
        with fake_gpu(library) as gpu:
            with pytest.raises(NcclError, match=rf"could not connect the ranks(.|\n)*rank 1: fake {call} failed"):
                hvd.allreduce(gpu.ready(torch.ones(2)))
            library.fail_at = ""
            assert hvd.allreduce(gpu.ready(torch.ones(2))).tolist() == [1.0, 1.0]

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_no_nccl_is_said_once(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu(None) as gpu:
            if hvd.rank() == 0:
                with pytest.warns(RuntimeWarning, match="go through host memory"):
                    result = hvd.allreduce(gpu.ready(torch.ones(2)))
            else:
                result = hvd.allreduce(gpu.ready(torch.ones(2)))
            assert result.tolist() == [1.0, 1.0]
            assert hvd.allreduce(gpu.ready(torch.ones(2))).tolist() == [1.0, 1.0]

    ranks(check)


def test_a_start_that_takes_too_long() -> None:
    def check() -> None:
        library = FakeNccl()
        library.hang_at = "connect" if hvd.rank() == 1 else ""
        with fake_gpu(library) as gpu, pytest.raises(NcclError, match=r"after 0\.2 s .*(.|\n)*waits for the others"):
            hvd.allreduce(gpu.ready(torch.ones(2)))
        for made in library.made:
            made.aborted.set()

    on_ranks(3, check, config=Config(nccl_start_seconds=0.2))


def test_an_asynchronous_error_is_found_by_the_watch() -> None:
    """The others are in a launch that never ends: the communicators are aborted, and every call after that raises."""

    def check() -> None:
        library = FakeNccl()
        with fake_gpu(library) as gpu:
            world = hvdlite.api.world()
            channel = world.group().device_collectives(gpu)
            x = gpu.ready(torch.ones(4))
            channel.allreduce(x, hvd.Sum, gpu.current())
            assert x.tolist() == [hvd.size()] * 4
            hvd.barrier()
            library.fault = "remote process exited or there was a network error"
            (made,) = library.made
            assert made.aborted.wait(20), "the watch has not aborted it"
            with pytest.raises(NcclError, match=r"rank \d: what was launched on cuda:\d has failed: remote process"):
                channel.allreduce(x, hvd.Sum, gpu.current())
            with pytest.raises(NcclError, match="remote process"):
                channel.check()
            library.fault = None

    on_ranks(2, check)


def test_a_rank_that_leaves_ends_what_the_others_have_launched() -> None:
    """Rank 0 launches once more than rank 1, which has left: nobody would ever end that."""
    failures: list[Exception] = []

    def check() -> None:
        library = FakeNccl()
        with fake_gpu(library) as gpu:
            world = hvdlite.api.world()
            channel = world.group().device_collectives(gpu)
            x = gpu.ready(torch.ones(4))
            channel.allreduce(x, hvd.Sum, gpu.current())
            if hvd.rank() == 1:
                world.watch.leave("it has come to the end of its program")
                return
            library.hang_at = "all_reduce"  # as a kernel that waits for rank 1
            try:
                channel.allreduce(x, hvd.Sum, gpu.current())
            except Exception as error:
                failures.append(error)
            world.watch.leave("it has come to the end of its program")

    on_ranks(2, check, timeout=30)
    (failure,) = failures
    assert isinstance(failure, PeerLeftError) and "rank 1 has left the job" in str(failure)


@pytest.mark.ranks(at_least=2)
def test_the_order_of_making_channels_must_agree(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            world = hvdlite.api.world()
            call = hvd.barrier if hvd.rank() else (lambda: world.group().device_collectives(gpu))
            with pytest.raises(MismatchError, match="do not agree|none can go on"):
                call()
            first, second = (world.group().device_collectives(gpu) for _ in range(2))
            x, y = gpu.ready(torch.ones(2)), gpu.ready(torch.ones(2))
            first.allreduce(x, hvd.Sum, gpu.current())
            second.allreduce(y, hvd.Sum, gpu.current())
            assert x.tolist() == y.tolist() == [hvd.size()] * 2
            second.close()
            first.close()

    ranks(check)


def test_the_fake_finds_what_would_be_a_race(ranks: Any) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            side = gpu.side()
            x = gpu.ready(torch.ones(2))
            with gpu.on(side), pytest.raises(AssertionError, match="before stream"):
                gpu.use(x)
            side.wait(gpu.current().record())
            with gpu.on(side):
                gpu.use(x)
            with pytest.raises(AssertionError, match="no keep"):
                gpu.check_kept()
            gpu.keep(x, side)
            gpu.check_kept()

    ranks(check)
