"""NCCL's library: how it is found, loaded and called. The real one where it is installed; no GPU is needed for that."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import importlib.metadata
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvdlite.adapter import capabilities
from hvdlite.comm.gpu import nccl
from hvdlite.comm.gpu.abandonable import AbandonableCall
from hvdlite.comm.gpu.nccl import Nccl
from hvdlite.errors import DeviceError, NcclError, UnsupportedTensorError
from hvdlite.protocols import ReduceOp
from hvdlite.tensors import cupy_device, device_registry, registry
from hvdlite.tensors.cupy_device import CupyDevice
from hvdlite.tensors.held import Held
from hvdlite.tensors.reduction import NCCL_WITH_FLOAT8, reduction
from tests.support.jobs import PROGRAMS, ROOT, mpirun


class Function:
    """What ctypes gives for a name in a library: it can be called, and given types."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes)
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            kind.from_param(argument)  # raises where C would get something else
        return self.call(*arguments)


class Stub:
    """A library with NCCL's functions, which note how they are called."""

    def __init__(self, version: int = 22809, without: str = "") -> None:
        self.version, self.without = version, without
        self.calls: list[tuple[Any, ...]] = []
        self.states: list[int] = []  # what ncclCommGetAsyncError says, one after the other; then success
        self.results: dict[str, int] = {}
        self.functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Any:
        if name == self.without or not name.startswith("nccl"):
            raise AttributeError(f"undefined symbol: {name}")
        if name not in self.functions:
            special = {
                "ncclGetVersion": lambda out: self.write(out, self.version),
                "ncclCommInitRankConfig": self.connect,
                "ncclCommGetAsyncError": lambda comm, out: self.write(out, self.states.pop(0) if self.states else 0),
                "ncclGetErrorString": lambda code: f"error {code}".encode(),
                "ncclGetLastError": lambda comm: b"the last words",
            }
            self.functions[name] = Function(special.get(name, lambda *arguments: self.note(name, arguments)))
        return self.functions[name]

    def write(self, out: Any, value: int) -> int:
        out._obj.value = value
        return 0

    def connect(self, handle: Any, size: int, unique_id: Any, rank: int, config: Any) -> int:
        handle._obj.value = 4711
        made = config._obj
        self.calls.append(("connect", size, ctypes.string_at(ctypes.byref(unique_id), 128), rank, made.blocking))
        assert made.size == ctypes.sizeof(made) and made.magic == 0xCAFEBEEF
        return self.results.get("connect", 0)

    def note(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.calls.append((name, *arguments))
        return self.results.get(name, 0)


def test_too_old_or_no_nccl_at_all() -> None:
    with pytest.raises(DeviceError, match=r"stub is NCCL 2\.4\.8; expected at least 2\.18\.0\. Install NCCL"):
        Nccl(Stub(20408), "stub")
    with pytest.raises(
        DeviceError, match="stub is no NCCL that can be used here: undefined symbol: ncclCommInitRankConfig"
    ):
        Nccl(Stub(without="ncclCommInitRankConfig"), "stub")
    assert Nccl(Stub(), "stub").version == 22809


def test_calls_reach_the_library() -> None:
    stub = Stub()
    library = Nccl(stub, "stub")
    unique_id = bytes(range(128))
    comm = library.connect(unique_id, 3, 1)
    assert stub.calls.pop() == ("connect", 3, unique_id, 1, 1)
    comm.all_reduce(1, 2, 3, 7, 0, 99)
    comm.reduce(1, 2, 3, 7, 0, 2, 99)
    comm.broadcast(1, 2, 3, 7, 2, 99)
    comm.all_gather(1, 2, 3, 7, 99)
    comm.reduce_scatter(1, 2, 3, 7, 0, 99)
    with comm.group():
        comm.send(1, 2, 7, 2, 99)
        comm.recv(1, 2, 7, 2, 99)
    assert stub.calls == [
        ("ncclAllReduce", 1, 2, 3, 7, 0, 4711, 99),
        ("ncclReduce", 1, 2, 3, 7, 0, 2, 4711, 99),
        ("ncclBroadcast", 1, 2, 3, 7, 2, 4711, 99),
        ("ncclAllGather", 1, 2, 3, 7, 4711, 99),
        ("ncclReduceScatter", 1, 2, 3, 7, 0, 4711, 99),
        ("ncclGroupStart",),
        ("ncclSend", 1, 2, 7, 2, 4711, 99),
        ("ncclRecv", 1, 2, 7, 2, 4711, 99),
        ("ncclGroupEnd",),
    ]


def test_errors_have_the_librarys_words() -> None:
    stub = Stub()
    comm = Nccl(stub, "stub").connect(bytes(128), 2, 0)
    stub.results["ncclAllReduce"] = 5
    with pytest.raises(NcclError, match=r"ncclAllReduce failed: error 5 \(the last words\)"):
        comm.all_reduce(1, 2, 3, 7, 0, 99)
    assert comm.error() is None
    stub.states = [6]
    assert comm.error() == "error 6 (the last words)"


def test_a_group_ends_also_after_an_error() -> None:
    stub = Stub()
    comm = Nccl(stub, "stub").connect(bytes(128), 2, 0)
    stub.results["ncclSend"] = 4
    with pytest.raises(NcclError, match="ncclSend"), comm.group():
        comm.send(1, 2, 7, 1, 99)
    assert stub.calls[-1] == ("ncclGroupEnd",)


def test_calls_that_do_not_wait_are_waited_for() -> None:
    """Where the environment says NCCL_COMM_BLOCKING=0, calls return before they are done."""
    stub = Stub()
    comm = Nccl(stub, "stub").connect(bytes(128), 2, 0)
    stub.results["ncclAllReduce"], stub.states = 7, [7, 7, 0]
    comm.all_reduce(1, 2, 3, 7, 0, 99)
    assert not stub.states
    stub.states = [7, 2]
    with pytest.raises(NcclError, match="ncclAllReduce failed: error 2"):
        comm.all_reduce(1, 2, 3, 7, 0, 99)
    with comm.group():
        comm.all_reduce(1, 2, 3, 7, 0, 99)  # inside of a group there is nothing to wait for: it would be for ever
    assert [call[0] for call in stub.calls[-3:]] == ["ncclGroupStart", "ncclAllReduce", "ncclGroupEnd"]


@pytest.mark.parametrize(("method", "function"), [("abort", "ncclCommAbort"), ("destroy", "ncclCommDestroy")])
def test_nothing_is_called_after_the_end(method: str, function: str) -> None:
    stub = Stub(without="ncclCommRevoke")  # as in versions before 2.28.9
    comm = Nccl(stub, "stub").connect(bytes(128), 2, 0)
    for _ in range(2):
        getattr(comm, method)()
    assert [call for call in stub.calls if call[0] == function] == [(function, 4711)]
    with pytest.raises(NcclError, match="ncclAllReduce cannot be called: this communicator was given up"):
        comm.all_reduce(1, 2, 3, 7, 0, 99)
    assert comm.error() is None


def test_work_is_revoked_before_anything_is_released() -> None:
    stub = Stub()
    stub.states = [0, 7, 7, 0]  # connecting; then it takes a while until all is quiet
    comm = Nccl(stub, "stub").connect(bytes(128), 2, 0)
    comm.abort()
    assert [call[0] for call in stub.calls[1:]] == ["ncclCommRevoke", "ncclCommDestroy"] and not stub.states


@pytest.mark.parametrize("result", [5, 0])
def test_what_cannot_be_revoked_is_aborted(result: int) -> None:
    stub = Stub()
    stub.results["ncclCommRevoke"] = result  # an error at once, or one while the work ends
    comm = Nccl(stub, "stub").connect(bytes(128), 2, 0)
    stub.states = [1]
    comm.abort()
    assert [call[0] for call in stub.calls[1:]] == ["ncclCommRevoke", "ncclCommAbort"]


def test_nothing_is_released_while_another_thread_is_inside() -> None:
    stub, inside, revoked = Stub(), threading.Event(), threading.Event()
    comm = Nccl(stub, "stub").connect(bytes(128), 2, 0)

    def all_reduce(*arguments: Any) -> int:
        inside.set()
        assert revoked.wait(60)
        return stub.note("left", ())

    def revoke(*arguments: Any) -> int:
        revoked.set()
        return stub.note("ncclCommRevoke", ())

    stub.functions["ncclAllReduce"].call, stub.functions["ncclCommRevoke"].call = all_reduce, revoke
    caller = threading.Thread(target=comm.all_reduce, args=(1, 2, 3, 7, 0, 99))
    caller.start()
    assert inside.wait(60)
    comm.abort()
    caller.join(60)
    assert [call[0] for call in stub.calls[1:]] == ["ncclCommRevoke", "left", "ncclCommDestroy"]


def test_which_library_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's choice; that of the wheel; one that is loaded already; the system's."""
    wheel = tmp_path / "nvidia/nccl"
    (wheel / "lib").mkdir(parents=True)
    (wheel / "lib/libnccl.so.2").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(wheel)])
    loaded: list[str] = []
    monkeypatch.setattr(nccl, "_loaded", lambda: loaded)
    monkeypatch.setattr(nccl, "_check_wheels", lambda path: None)
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: spec)
    assert nccl.find("/my/libnccl.so") == "/my/libnccl.so"
    assert nccl.find() == str(wheel / "lib/libnccl.so.2")
    loaded.append("/torch/lib/librccl.so.1")
    assert nccl.find() == "/torch/lib/librccl.so.1"
    loaded.append(str(wheel / "lib/libnccl.so.2"))
    assert nccl.find() == str(wheel / "lib/libnccl.so.2")
    loaded.clear()
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(nccl.ctypes.util, "find_library", lambda name: {"rccl": "librccl.so.1"}.get(name))
    assert nccl.find() == "librccl.so.1"
    monkeypatch.setattr(nccl.ctypes.util, "find_library", lambda name: None)
    assert nccl.find() is None and nccl.load() is None


def test_a_library_that_is_loaded_is_seen(tmp_path: Path) -> None:
    """By the kernel's list: any library will do, under NCCL's name."""
    path = tmp_path / "libnccl.so.2"
    shutil.copy(_ctypes.__file__, path)
    library = ctypes.CDLL(str(path))
    assert str(path) in nccl._loaded()
    _ctypes.dlclose(library._handle)
    assert str(path) not in nccl._loaded()


def test_two_wheels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        DeviceError, match=r"nvidia-nccl-cu12 2\.27\.3 and nvidia-nccl-cu13 2\.28\.9 are installed together"
    ):
        nccl._check_wheels("/site/nvidia/nccl/lib/libnccl.so.2")
    del versions["nvidia-nccl-cu12"]
    for built_for, agrees in ((None, True), ("13.0", True), ("12.8", False)):
        torch = SimpleNamespace(version=SimpleNamespace(cuda=built_for))
        monkeypatch.setitem(sys.modules, "torch", torch)
        if agrees:
            nccl._check_wheels("/site/nvidia/nccl/lib/libnccl.so.2")
        else:
            with pytest.raises(
                DeviceError, match=r"cu13 2\.28\.9 is installed.*CUDA 12\.8.*pip install .* nvidia-nccl-cu12"
            ):
                nccl._check_wheels("/site/nvidia/nccl/lib/libnccl.so.2")


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "libnccl.so.2"
    broken.write_text("no library")
    with pytest.raises(DeviceError, match=r"libnccl\.so\.2 cannot be loaded: .*Install NCCL"):
        nccl.load(str(broken))


@pytest.mark.parametrize(
    ("dtype", "op", "there", "casts"),
    [
        ("bfloat16", ReduceOp.SUM, "bfloat16", False),
        ("bool", ReduceOp.MAX, "uint8", False),
        ("complex64", ReduceOp.AVERAGE, "float32", False),
        ("complex128", ReduceOp.PRODUCT, None, False),
        ("uint16", ReduceOp.SUM, "int32", True),
        ("int32", ReduceOp.AVERAGE, "int64", True),
        ("int64", ReduceOp.AVERAGE, None, True),
        ("uint64", ReduceOp.AVERAGE, None, True),
        ("float8_e5m2", ReduceOp.SUM, "float8_e5m2", False),
        ("float32", ReduceOp.ADASUM, None, False),
        ("int32", ReduceOp.MIN, "int32", False),
        ("bfloat16", ReduceOp.MIN, None, False),  # a NaN would be lost
    ],
)
def test_how_dtypes_travel(dtype: str, op: ReduceOp, there: str | None, casts: bool) -> None:
    how = reduction(dtype, op)
    assert (how.on_device(NCCL_WITH_FLOAT8), how.casts_on_device) == (there, casts)


def test_what_does_not_travel() -> None:
    assert reduction("float8_e5m2", ReduceOp.SUM).on_device(NCCL_WITH_FLOAT8 - 1) is None
    assert reduction("int32", ReduceOp.SUM, 0.5).on_device(NCCL_WITH_FLOAT8) is None
    assert reduction("float32", ReduceOp.SUM, 0.5, 2.0).on_device(NCCL_WITH_FLOAT8) == "float32"


def test_a_call_that_never_comes_back_is_left_behind() -> None:
    release = threading.Event()
    attempt = AbandonableCall(release.wait, "test")
    assert not attempt.is_over(0.0)
    release.set()
    assert attempt.is_over(20.0) and attempt.result() is True

    def fails() -> None:
        raise NcclError("as asked for")

    failing = AbandonableCall(fails, "test")
    assert failing.is_over(20.0)
    with pytest.raises(NcclError, match="as asked for"):
        failing.result()


def test_what_is_built() -> None:
    assert capabilities.cuda_built() is (torch.version.cuda is not None)
    assert capabilities.rocm_built() is (torch.version.hip is not None)
    without_torch = {name: module for name, module in sys.modules.items() if name != "torch"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capabilities, "sys", SimpleNamespace(modules=without_torch))
        assert capabilities.cuda_built() is (torch.version.cuda is not None)


# GPUs by other libraries, and none at all


class Lent:
    """An array on GPU 1, as DLPack says it."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(DeviceError, match="was built for the CPU only"):
        device_registry.find_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="sees no GPU: is CUDA_VISIBLE_DEVICES empty"):
        device_registry.find_device("cuda")
    assert device_registry.device_kind(Lent()) == "cuda"
    device_registry._library.cache_clear()
    monkeypatch.setattr(device_registry, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(device_registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="neither is installed"):
        device_registry.device_of(Lent())


def test_cupys_arithmetic_on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's arrays have NumPy's methods, so NumPy's stand for them where there is no GPU."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=np.empty))
    device = CupyDevice(0)
    parts = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32).T, np.float32(5).reshape(())]
    flat = device.empty([13], "float32")
    device.pack(parts, flat)
    np.testing.assert_array_equal(flat, np.concatenate([part.reshape(-1) for part in parts]))
    device.scale(flat, 3.0)
    device.divide(flat, 2)
    out = [device.empty(part.shape, "float32") for part in parts]
    device.unpack(flat, out)
    for part, result in zip(parts, out, strict=True):
        np.testing.assert_array_equal(result, part * 1.5)
    whole = device.cast(np.array([-7.0, 7.0]), "int64")
    device.divide(whole, 2)
    assert whole.tolist() == [-3, 3] and device.dtype(whole) == "int64"
    assert device.is_plain(parts[0]) and not device.is_plain(parts[1])
    assert device.count(device.view(flat, "uint8")) == 52
    with pytest.raises(UnsupportedTensorError, match="CuPy arrays have no dtype float7"):
        device.empty([1], "float7")
    small = np.full(3, 1e-3, np.float16)
    device.scale(small, 1e5)  # more than a float16 can be
    np.testing.assert_allclose(small, 100, rtol=1e-3)


def test_cupys_arithmetic_of_gradients_on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = SimpleNamespace(empty=np.empty, zeros=np.zeros)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device = CupyDevice(0)
    assert device.place == "cuda:0"
    flat = device.zeros([12], "float32")
    plain, turned = device.strided(flat, (3, 4), (4, 1)), device.strided(flat, (3, 4), (1, 3))
    single = device.strided(flat, (1, 12, 1), (1, 1, 12))
    gradients = [np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 4), np.float32)]
    device.copy_all(gradients[:1], [turned])
    np.testing.assert_array_equal(flat.reshape(4, 3), gradients[0].T)
    np.testing.assert_array_equal(single.reshape(-1), flat)
    device.add(gradients[1], plain)
    np.testing.assert_array_equal(turned, gradients[0] + 1)
    small = device.empty([12], "float16")
    device.scale_into(flat, 0.5, small)
    np.testing.assert_array_equal(small, (flat / 2).astype(np.float16))
    room = device.empty([], "float32")
    device.scale_by_ratio(flat, np.array(3.0), np.array(4.0), room, flat)
    np.testing.assert_array_equal(turned, (gradients[0] + 1) * 0.75)
    wide = device.empty([12], "float32")
    device.scale_by_ratio(small, np.array(1.0), np.array(3.0), room, wide)
    np.testing.assert_array_equal(wide, small.astype(np.float32) * np.float32(1 / 3))
    device.clear_all([turned[0], turned[1:]])
    assert not flat.any() and device.version(flat) == 0
    assert [device.is_over(SimpleNamespace(done=done)) for done in (False, True)] == [False, True]


def test_cupys_arrays_do_not_name_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy.ndarray has no __array_namespace__ (14.2)."""

    class ndarray:
        shape, dtype = (2, 3), np.dtype(np.float32)

        def __dlpack__(self, **_: Any) -> Any: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

    ndarray.__module__ = "cupy"
    made: list[Any] = []
    cupy = SimpleNamespace(__name__="cupy", float32=np.float32, asarray=lambda array: made.append(array) or ndarray())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(registry, "_adapters", {})
    array = ndarray()
    adapter = registry.adapter_for(array)
    assert adapter.info(array) == ("float32", (2, 3))
    assert registry.device_kind_of(array, adapter) == "cuda"
    assert type(adapter.from_array(np.ones((2, 3), np.float32), "float32", array)) is ndarray and len(made) == 1


def test_page_locked_memory_is_held_while_a_copy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [SimpleNamespace(done=False), SimpleNamespace(done=True)]
    streams = SimpleNamespace(record=lambda: events[0])
    cuda = SimpleNamespace(alloc_pinned_memory=bytearray, get_current_stream=lambda: streams)
    held = Held()
    monkeypatch.setattr(cupy_device, "_copying", held)
    mirror = cupy_device.CupyMirror(SimpleNamespace(cuda=cuda), 3)
    tensor = SimpleNamespace(data=SimpleNamespace(copy_to_host_async=lambda *_: None))
    mirror.take(tensor)
    assert [each[1] for each in held._held] == [mirror._memory]
    events[0].done = True
    held.until(events[1], None, lambda event: event.done)
    assert not held._held


def test_cupys_gpu_is_current_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy makes an event on the thread's current GPU, and its default stream is that of the current one."""
    current = [0]

    class Gpu:
        pci_bus_id = "0000:17:00.0"

        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class RawStream:
        ptr = 0

        def record(self) -> int:
            return current[-1]

        def wait_event(self, event: int) -> None:
            assert event == current[-1] == 1

        def synchronize(self) -> None:
            assert current[-1] == 1

    uuid = bytes(range(16, 32))
    runtime = SimpleNamespace(getDeviceProperties=lambda index: {"uuid": uuid})
    cuda = SimpleNamespace(
        Device=Gpu, Stream=lambda **_: RawStream(), get_current_stream=lambda: RawStream(), runtime=runtime
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    device = CupyDevice(1)
    for stream in (device.current(), device.side()):
        stream.wait(stream.record())
        stream.synchronize()
    assert device.identity == "10111213-1415-1617-1819-1a1b1c1d1e1f"
    uuid = b"\x10\x11"  # CuPy's, of one that goes on with a zero byte
    assert CupyDevice(1).identity == "0000:17:00.0"


def test_what_is_held_is_let_go_once() -> None:
    """Whoever looks at what is held may be several threads."""
    held, over = Held(), threading.Event()
    looked = threading.Barrier(2, timeout=0.2)

    def is_over(event: str) -> bool:
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait()  # so that both have seen the same one, if they could
        return event == "past" or over.is_set()

    held.until("past", "first", lambda _: False)
    held.until("future", "second", lambda _: False)
    threads = [threading.Thread(target=held.until, args=("future", "more", is_over)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tensor for _, tensor in held._held] == ["second", "more", "more"]


# The real library


@pytest.fixture(scope="module")
def real() -> Nccl:
    found = nccl.load()
    if found is None:
        pytest.skip("NCCL is not installed: pip install nvidia-nccl-cu13 (no GPU is needed)")
    return found


def test_the_real_library(real: Nccl) -> None:
    assert real.version >= nccl.OLDEST
    first, second = real.unique_id(), real.unique_id()
    assert len(first) == len(second) == 128 and first != second
    assert capabilities.nccl_built() == real.version


def test_the_real_library_up_to_the_gpu(real: Nccl) -> None:
    """Two ranks meet over MPI, agree on the library, and start NCCL, which says on both that there is no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a GPU driver here: tests/gpu goes further")
    done = mpirun(2, str(PROGRAMS / "gpu_bootstrap.py"), real.path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(lines) == 2 and all("could not connect the ranks" in line for line in lines), done.stdout
    assert done.stdout.count("ranks 0, 1: ncclCommInitRankConfig failed: unhandled cuda error") == 2


def test_python_that_starts_no_thread_at_exit_calls_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    call = AbandonableCall(lambda: 7, "last")
    assert call.is_over(0) and call.result() == 7
