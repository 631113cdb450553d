"""NCCL, or AMD's RCCL with the same functions, by ctypes: the library and its communicators. They take addresses, not tensors.

The library is the one that this process has loaded (PyTorch brings one), or that of the ``gpu`` extra, or the system's. The
signatures are those of nccl.h (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html).

Communicators are made in NCCL's blocking mode. In the non-blocking mode recent versions start a thread for every launch
(group.cc, ``groupLaunchNonBlocking``), and the host would have to wait for the end of that thread each time. Calls that may
last are therefore made from a thread that can be left behind (`hvdlite.comm.gpu.abandonable`).
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from hvdlite.errors import DeviceError, NcclError
from hvdlite.protocols import ReduceOp

OLDEST = 21800
"""The oldest version that is accepted, 2.18.0. PyTorch 2.6 brings 2.21. Versions before 2.18 were never tried."""

DTYPES: dict[str, int] = {
    **{"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5},
    **{"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11},
}
"""NCCL's numbers of dtypes. `Reduction.on_device` says which version has the last two."""
OPS: dict[ReduceOp, int] = {
    **{ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVERAGE: 4},
}
"""NCCL's numbers of reductions. NCCL's average multiplies by 1/n, adds, and rounds after both."""

_SUCCESS, _IN_PROGRESS = 0, 7
_LEAVING_SECONDS = 2.0
"""How long `NcclCommunicator.abort` waits for revoked work to end, and for other threads to leave the library, in seconds."""
_WHEELS = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_NAMES = ("libnccl.so", "librccl.so")


class DeviceCommunicator(Protocol):
    """The communicator of one rank in a group. Counts are in elements. A call puts work on a stream and returns."""

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None: ...

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> None: ...

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None: ...

    def all_gather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        """Gather `count` elements from each rank."""
        ...

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce, and give `count` elements to each rank."""
        ...

    def send(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None: ...

    def recv(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None: ...

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. The calls that this thread makes inside of it are launched as one."""
        ...

    def error(self) -> str | None:
        """Return the library's text for an error of launched work, or None if there is none. This does not call the driver."""
        ...

    def abort(self) -> None:
        """End all launched work on this rank and release everything. Any thread may call this, even during another's call."""
        ...

    def destroy(self) -> None:
        """Release everything after all work is done. This may wait until the other ranks call it."""
        ...


class Library(Protocol):
    """A library that makes communicators.

    Attributes:
        path: Where the library was found.
        version: The number of its version, such as 22809 for 2.28.9.
    """

    path: str
    version: int

    def unique_id(self) -> bytes:
        """Return a new id, by which the ranks of a new group find each other. This needs no GPU."""
        ...

    def connect(self, unique_id: bytes, size: int, rank: int) -> DeviceCommunicator:
        """Make this rank's communicator, on the GPU that is current in this thread. This waits for the other ranks."""
        ...


class UniqueId(ctypes.Structure):
    """The structure ``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """The structure ``ncclConfig_t`` of 2.14. Later versions accept it and use their defaults for newer fields."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "GetVersion": (ctypes.POINTER(_INT),),
    "GetUniqueId": (ctypes.POINTER(UniqueId),),
    "CommInitRankConfig": (ctypes.POINTER(_POINTER), _INT, UniqueId, _INT, ctypes.POINTER(_Config)),
    "CommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "CommAbort": (_POINTER,),
    "CommDestroy": (_POINTER,),
    "GroupStart": (),
    "GroupEnd": (),
    "AllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "Reduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER),
    "Broadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "AllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "Send": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "Recv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
}

_OPTIONAL: dict[str, tuple[Any, ...]] = {"CommRevoke": (_POINTER, _INT)}
"""What only some versions have: ncclCommRevoke came with 2.28.9."""


class Nccl:
    """The `Library` NCCL, or RCCL.

    Args:
        library: The loaded library, with the functions of nccl.h.
        path: Its path, for messages.

    Raises:
        DeviceError: The library lacks functions, or is too old.
    """

    def __init__(self, library: Any, path: str) -> None:
        self.path = path
        self._calls: dict[str, Callable[..., int]] = {}
        try:
            there = {name: types for name, types in _OPTIONAL.items() if hasattr(library, "nccl" + name)}
            self.can_revoke = "CommRevoke" in there
            for name, argtypes in {**_SIGNATURES, **there}.items():
                function = getattr(library, "nccl" + name)
                function.argtypes, function.restype = list(argtypes), _INT
                self._calls[name] = function
            self._text = library.ncclGetErrorString
            self._text.argtypes, self._text.restype = [_INT], ctypes.c_char_p
            self._last = library.ncclGetLastError
            self._last.argtypes, self._last.restype = [_POINTER], ctypes.c_char_p
        except AttributeError as error:
            raise DeviceError(f"{path} is no NCCL that can be used here: {error}. {_ADVICE}") from None
        version = _INT()
        self.call("GetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < OLDEST:
            raise DeviceError(
                f"{path} is NCCL {in_words(self.version)}; expected at least {in_words(OLDEST)}. {_ADVICE}"
            )

    def call(self, name: str, *arguments: Any, comm: int | None = None) -> int:
        """Call ``nccl<name>``.

        Returns:
            The result of the function: ``ncclSuccess`` or ``ncclInProgress``.

        Raises:
            NcclError: The function returned another result.
        """
        result = self._calls[name](*arguments)
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError(f"nccl{name} failed: {self.explain(result, comm)}")
        return result

    def explain(self, result: int, comm: int | None) -> str:
        """Return NCCL's text for `result`, with its text for the last error."""
        text = self._text(result).decode(errors="replace")
        last = (self._last(comm) or b"").decode(errors="replace").strip()
        return f"{text} ({last})" if last else f"{text} (NCCL_DEBUG=WARN says more)"

    def unique_id(self) -> bytes:
        made = UniqueId()
        self.call("GetUniqueId", ctypes.byref(made))
        return ctypes.string_at(ctypes.byref(made), ctypes.sizeof(made))

    def connect(self, unique_id: bytes, size: int, rank: int) -> NcclCommunicator:
        handle = _POINTER()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 1)
        known = UniqueId.from_buffer_copy(unique_id)
        self.call("CommInitRankConfig", ctypes.byref(handle), size, known, rank, ctypes.byref(config))
        assert handle.value is not None
        made = NcclCommunicator(self, handle.value)
        made.settle("CommInitRankConfig")
        return made


class NcclCommunicator:
    """A `DeviceCommunicator` of `Nccl`.

    Args:
        library: The library that made the communicator.
        handle: The address that is its ``ncclComm_t``.
    """

    def __init__(self, library: Nccl, handle: int) -> None:
        self._library = library
        self._handle: int | None = handle
        self._depth = 0  # how many `group` statements are open
        self._inside = 0  # how many threads are in calls of this communicator
        self._changed = threading.Condition()  # the watchdog asks for errors, and gives up, from its own threads

    @contextlib.contextmanager
    def _use(self, name: str) -> Iterator[int]:
        """Yield the handle. The communicator is not released before the body is left, or `_LEAVING_SECONDS` have passed."""
        with self._changed:
            handle = self._handle
            if handle is None:
                raise NcclError(f"nccl{name} cannot be called: this communicator was given up.")
            self._inside += 1
        try:
            yield handle
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _call(self, name: str, *arguments: Any) -> None:
        with self._use(name) as handle:
            arguments = (*arguments[:-1], handle, arguments[-1])  # the stream is the last argument of all of them
            if self._library.call(name, *arguments, comm=handle) == _IN_PROGRESS and not self._depth:
                self._settle(name, handle)

    def settle(self, name: str) -> None:
        """Wait until a non-blocking call is done: NCCL_COMM_BLOCKING=0 in the environment overrides our blocking mode."""
        with self._use(name) as handle:
            self._settle(name, handle)

    def _settle(self, name: str, handle: int) -> None:
        while (state := self._state(handle)) == _IN_PROGRESS:
            time.sleep(1e-4)
        if state != _SUCCESS:
            raise NcclError(f"nccl{name} failed: {self._library.explain(state, handle)}")

    def _state(self, handle: int) -> int:
        state = _INT()
        self._library.call("CommGetAsyncError", handle, ctypes.byref(state))
        return state.value

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call("AllReduce", send, recv, count, dtype, op, stream)

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        self._call("Reduce", send, recv, count, dtype, op, root, stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._call("Broadcast", send, recv, count, dtype, root, stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        self._call("AllGather", send, recv, count, dtype, stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call("ReduceScatter", send, recv, count, dtype, op, stream)

    def send(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call("Send", data, count, dtype, peer, stream)

    def recv(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call("Recv", data, count, dtype, peer, stream)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        with self._use("GroupStart") as handle:
            self._library.call("GroupStart")
            self._depth += 1
            try:
                yield
            finally:  # also after an error: else all later calls of this thread would be part of the group
                self._depth -= 1
                if self._library.call("GroupEnd") == _IN_PROGRESS:
                    self._settle("GroupEnd", handle)

    def error(self) -> str | None:
        with self._changed:
            handle = self._handle
            if handle is None:
                return None
            state = self._state(handle)
            return None if state in (_SUCCESS, _IN_PROGRESS) else self._library.explain(state, handle)

    def abort(self) -> None:
        if (handle := self._end()) is None:
            return
        # CommAbort frees what a call in another thread may still use. CommRevoke ends the work, and the calls return.
        revoked = self._revoke(handle)
        with self._changed:
            alone = self._changed.wait_for(lambda: not self._inside, _LEAVING_SECONDS)
        self._library.call("CommDestroy" if revoked and alone else "CommAbort", handle)

    def _revoke(self, handle: int) -> bool:
        """End all launched work without releasing anything, and return whether the library could do so."""
        if not self._library.can_revoke:
            return False
        until = time.monotonic() + _LEAVING_SECONDS
        with contextlib.suppress(NcclError):
            self._library.call("CommRevoke", handle, 0)
            while (state := self._state(handle)) == _IN_PROGRESS and time.monotonic() < until:
                time.sleep(1e-3)
            return state == _SUCCESS
        return False

    def destroy(self) -> None:
        if (handle := self._end()) is not None:
            self._library.call("CommDestroy", handle)

    def _end(self) -> int | None:
        with self._changed:
            handle, self._handle = self._handle, None
        return handle


def in_words(version: int) -> str:
    """Return NCCL's number of a version in words: ``2.28.9`` for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


_ADVICE = (
    "Install NCCL for the CUDA of your framework: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12; or name a "
    "library by HVDLITE_NCCL_LIBRARY. HVDLITE_NCCL=0 does without, through host memory."
)


def find(chosen: str = "") -> str | None:
    """Return the path of the library, or None if there is none.

    Args:
        chosen: The user's choice (``HVDLITE_NCCL_LIBRARY``); empty if there is none.

    Raises:
        DeviceError: Several wheels of NCCL are installed over each other, or the wheel is for another CUDA than torch.
    """
    if chosen:
        return chosen
    wheel = _wheel()
    loaded = _loaded()
    if wheel is not None and (not loaded or wheel in loaded):
        _check_wheels(wheel)
        return wheel
    if loaded:
        return loaded[0]
    return next((found for name in ("nccl", "rccl") if (found := ctypes.util.find_library(name)) is not None), None)


def load(chosen: str = "") -> Nccl | None:
    """Load the library and return it, or None if there is none. See `find` and `Nccl` for the argument and the errors."""
    path = find(chosen)
    if path is None:
        return None
    try:
        return Nccl(ctypes.CDLL(path), path)
    except OSError as error:
        raise DeviceError(f"{path} cannot be loaded: {error}. {_ADVICE}") from None


def _loaded() -> list[str]:
    """Return the paths of all such libraries that this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "ccl.so" in line)
    return [path for path in paths if os.path.basename(path).startswith(_NAMES)]


def _wheel() -> str | None:
    """Return the path of the library in NVIDIA's wheel, or None if the wheel is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("lib/libnccl.so*")):
            return str(path)
    return None


def _cuda_of_torch() -> str | None:
    """Return the version of CUDA that the loaded torch was built for; None if none is loaded, or it was built without."""
    return getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)


def wheel() -> str:
    """Return the name of NVIDIA's package of NCCL that fits the loaded torch; that for CUDA 13 if there is no such torch."""
    return f"nvidia-nccl-cu{(_cuda_of_torch() or '13').partition('.')[0]}"


def _check_wheels(path: str) -> None:
    """Raise DeviceError if NVIDIA's wheels of NCCL cannot be trusted.

    All of these wheels install the same file: if there are two, the later one has overwritten the other. And a wheel for
    another CUDA than torch's would bring a second CUDA into the process.

    Raises:
        DeviceError: Two wheels are installed, or the wheel is for another CUDA than the torch that this process has loaded.
    """
    import importlib.metadata  # not at the top: the import of hvdlite would take a quarter longer

    installed = []
    for name in _WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    if len(installed) > 1:
        raise DeviceError(
            f"{' and '.join(installed)} are installed together, and both are {path}: nobody knows which CUDA it is for. "
            f"pip uninstall -y {' '.join(each.split()[0] for each in installed)}, and install the one that your framework "
            "needs (pip show torch). HVDLITE_NCCL_LIBRARY names a library in any case."
        )
    built_for = _cuda_of_torch()
    for each in installed:
        if built_for is not None and each.split()[0] != wheel():
            raise DeviceError(
                f"{each} is installed, which is for another CUDA than this torch: that was built for CUDA {built_for}. "
                f"pip uninstall -y {each.split()[0]}; pip install --force-reinstall --no-deps {wheel()}. HVDLITE_NCCL_LIBRARY "
                "names a library in any case."
            )
