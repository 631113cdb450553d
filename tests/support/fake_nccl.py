"""A stand-in for NCCL on host memory, with the Python interface of `hvdlite.comm.gpu.nccl`.

It uses sockets, and NumPy on addresses. Ranks are threads or processes. As with NCCL, the unique id contains the address at
which rank 0 listens. A server thread of rank 0 receives every collective, checks that all ranks ask for the same, computes the
results and sends them. The server is slow, but simple enough to be trusted.

The stand-in fails on request: `FakeNccl.fail_at`, `FakeNccl.hang_at`, `FakeNccl.fault`.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import ml_dtypes
import numpy as np

from hvdlite.comm.gpu.nccl import DTYPES, OPS
from hvdlite.errors import NcclError
from hvdlite.protocols import ReduceOp

NUMPY = {
    **{number: np.dtype(name) for name, number in DTYPES.items() if not name.startswith(("bfloat", "float8"))},
    DTYPES["bfloat16"]: np.dtype(ml_dtypes.bfloat16),
    DTYPES["float8_e4m3fn"]: np.dtype(ml_dtypes.float8_e4m3fn),
    DTYPES["float8_e5m2"]: np.dtype(ml_dtypes.float8_e5m2),
}
UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MAX: np.fmax, ReduceOp.MIN: np.fmin}
"""NumPy's functions for NCCL's reductions. NCCL's Max and Min ignore a NaN."""
BY_NUMBER = {number: op for op, number in OPS.items()}

Request = tuple[Any, ...]
Accessed = Callable[[str, int, int, int], None]
"""A function that is called with the kind of access ("read" or "write"), the address, the bytes and the stream."""


def memory(address: int, count: int, dtype: int) -> np.ndarray[Any, Any]:
    """Return the array of `count` elements at an address."""
    kind = NUMPY[dtype]
    if not count:
        return np.empty(0, kind)
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), np.uint8).view(kind)


class _Server(threading.Thread):
    """The server for the collectives of all ranks, in the process of rank 0."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="fake-nccl")
        self.listener = Listener(("127.0.0.1", 0), backlog=16)
        self.start()

    def run(self) -> None:
        first = self.listener.accept()
        size, rank = first.recv()
        ranks: dict[int, Connection] = {rank: first}
        while len(ranks) < size:
            connection = self.listener.accept()
            ranks[connection.recv()[1]] = connection
        self.listener.close()
        for connection in ranks.values():
            connection.send("connected")
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests = [ranks[rank].recv() for rank in range(size)]
                for rank, answer in enumerate(_answer(requests)):
                    ranks[rank].send(answer)
        for connection in ranks.values():  # a rank has gone: the others must notice
            connection.close()


def _answer(requests: list[Request]) -> list[Any]:
    """Return the answers to the requests of all ranks. A request is (kind, arguments that must agree, data)."""
    if len({pickle.dumps(request[:2]) for request in requests}) > 1:
        return [NcclError(f"the ranks ask for different things: {[request[:2] for request in requests]}")] * len(
            requests
        )
    kind, arguments, _ = requests[0]
    data = [request[2] for request in requests]
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        op = BY_NUMBER[arguments["op"]]
        if op is ReduceOp.AVERAGE:
            each = [(part * part.dtype.type(1 / len(data))).astype(part.dtype) for part in data]
            op = ReduceOp.SUM
        else:
            each = data
        result = each[0]
        for part in each[1:]:
            result = UFUNCS[op](result, part).astype(result.dtype)
        if kind == "all_reduce":
            return [result] * len(data)
        if kind == "reduce":
            return [result if rank == arguments["root"] else None for rank in range(len(data))]
        return np.split(result, len(data))
    if kind == "broadcast":
        return [data[arguments["root"]]] * len(data)
    if kind == "all_gather":
        return [np.concatenate(data)] * len(data)
    assert kind == "exchange"
    return [{peer: sent[rank] for peer, sent in enumerate(data) if rank in sent} for rank in range(len(data))]


class FakeNccl:
    """A `hvdlite.comm.gpu.nccl.Library`, one for each rank.

    Attributes:
        fail_at: The name of a call that fails on this rank, such as "connect" or "all_reduce".
        hang_at: The name of a call that lasts until it is aborted.
        fault: The error that `FakeCommunicator.error` reports; None for no error.
        accessed: The function that is called for each read or write of memory.
    """

    path = "tests/support/fake_nccl.py"

    def __init__(self, version: int = 22809, accessed: Accessed = lambda *_: None) -> None:
        self.version = version
        self.accessed = accessed
        self.fail_at = self.hang_at = ""
        self.fault: str | None = None
        self.made: list[FakeCommunicator] = []

    def unique_id(self) -> bytes:
        return pickle.dumps(_Server().listener.address)

    def connect(self, unique_id: bytes, size: int, rank: int) -> FakeCommunicator:
        if self.fail_at == "connect":
            raise NcclError("fake connect failed: unhandled cuda error (no CUDA-capable device is detected)")
        made = FakeCommunicator(self, pickle.loads(unique_id), size, rank)
        self.made.append(made)
        return made


class FakeCommunicator:
    """A `hvdlite.comm.gpu.nccl.DeviceCommunicator`."""

    def __init__(self, library: FakeNccl, address: Any, size: int, rank: int) -> None:
        self.library, self.size, self.rank = library, size, rank
        self.aborted = threading.Event()
        self.destroyed = False
        self.calls: list[str] = []
        self._group: list[tuple[Callable[[], None], tuple[str, int, Any, int] | None]] | None = None
        self._depth = 0
        if library.hang_at == "connect":
            self.aborted.wait()
        self._connection = Client(address)
        self._connection.send((size, rank))
        assert self._connection.recv() == "connected"

    def _ask(self, kind: str, data: Any, **arguments: int) -> Any:
        if self.library.hang_at == kind:
            self.aborted.wait()
        if self.aborted.is_set() or self.destroyed:
            raise NcclError(f"fake {kind}: the communicator is gone")
        if self.library.fail_at == kind:
            raise NcclError(f"fake {kind} failed: internal error (as asked for)")
        self.calls.append(kind)
        try:
            self._connection.send((kind, arguments, data))
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise NcclError(f"fake {kind}: remote process exited or there was a network error ({error!r})") from None
        if isinstance(answer, NcclError):
            raise answer
        return answer

    def _do(self, action: Callable[[], None]) -> None:
        if self._group is None:
            action()
        else:
            self._group.append((action, None))

    def _run(
        self, kind: str, send: int, sent: int, recv: int, received: int, dtype: int, stream: int, **arguments: int
    ) -> None:
        def action() -> None:
            item = NUMPY[dtype].itemsize
            if sent:
                self.library.accessed("read", send, sent * item, stream)
            answer = self._ask(kind, memory(send, sent, dtype).copy(), dtype=dtype, **arguments)
            if answer is not None and received:
                self.library.accessed("write", recv, received * item, stream)
                memory(recv, received, dtype)[:] = answer

        self._do(action)

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._run("all_reduce", send, count, recv, count, dtype, stream, op=op, count=count)

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        received = count if self.rank == root else 0
        self._run("reduce", send, count, recv, received, dtype, stream, op=op, root=root, count=count)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
        sent = count if self.rank == root else 0  # only the root's data is read
        self._run("broadcast", send, sent, recv, count, dtype, stream, root=root, count=count)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        self._run("all_gather", send, count, recv, count * self.size, dtype, stream, count=count)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._run("reduce_scatter", send, count * self.size, recv, count, dtype, stream, op=op, count=count)

    def send(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None:
        assert self._group is not None, "a send outside of a group waits for ever"
        self.library.accessed("read", data, count * NUMPY[dtype].itemsize, stream)
        self._group.append((lambda: None, ("send", peer, memory(data, count, dtype).copy(), stream)))

    def recv(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None:
        assert self._group is not None, "a recv outside of a group waits for ever"
        self._group.append((lambda: None, ("recv", peer, memory(data, count, dtype), stream)))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        if self._depth == 0:
            self._group = []
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            assert self._group is not None
            actions, self._group = self._group, None
            moves = [move for _, move in actions if move is not None]
            for action, move in actions:
                if move is None:
                    action()
            if moves:
                sent = {peer: data for kind, peer, data, _ in moves if kind == "send"}
                came = self._ask("exchange", sent)
                for kind, peer, into, stream in moves:
                    if kind == "recv":
                        self.library.accessed("write", into.ctypes.data, into.nbytes, stream)
                        into[:] = came[peer]

    def error(self) -> str | None:
        return self.library.fault

    def abort(self) -> None:
        self.aborted.set()
        self._connection.close()

    def destroy(self) -> None:
        self.destroyed = True
        self._connection.close()
