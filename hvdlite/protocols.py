"""The contracts between the layers: what a transport, a set of collectives and a tensor adapter are.

Nothing here does any work. A module of a higher layer names the protocol, never the class behind it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hvdlite.process_set import ProcessSet

Array = NDArray[Any]
"""A NumPy array. Between the layers it is one-dimensional and C-contiguous unless said otherwise."""

T = TypeVar("T")


class ReduceOp(enum.Enum):
    """How the values of the ranks become one."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    __hash__ = object.__hash__  # Enum's own is a call of Python, and these are looked up in every call

    def __repr__(self) -> str:
        return self.name.capitalize()


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group: what an algorithm is written on.

    Two kinds of message, which never meet: arrays whose size the receiver knows (`send`, `recv`,
    `sendrecv`: blocking, in order for each pair of ranks), and small letters of any size that are
    posted without blocking and picked up when somebody looks (`post`, `poll`: in order for each
    pair of ranks).
    """

    @property
    def rank(self) -> int:
        """This process in the group, 0 … size - 1."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    @property
    def medium(self) -> str:
        """What carries the messages, for people: such as "Open MPI v5.0.11"."""
        ...

    def send(self, data: Array, dest: int) -> None:
        """Send `data`; it may be overwritten when the call returns. May block until it is received."""
        ...

    def recv(self, data: Array, source: int) -> None:
        """Receive exactly ``data.size`` elements from `source` into `data`."""
        ...

    def sendrecv(self, send: Array, dest: int, recv: Array, source: int) -> None:
        """Send and receive at the same time. The two arrays must not overlap."""
        ...

    def post(self, letter: bytes, dest: int) -> None:
        """Send a letter without waiting for it to be read."""
        ...

    def poll(self) -> tuple[int, bytes] | None:
        """The next letter that has arrived and its sender, or None."""
        ...

    def duplicate(self) -> Transport:
        """A transport over the same ranks whose messages never mix with this one's. Collective."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        """A transport over `ranks` (sorted ranks of this group). Called by these ranks and no others."""
        ...

    def close(self) -> None:
        """Release what the transport holds. Local."""
        ...


class Collectives(Protocol):
    """Whole-group operations on one-dimensional arrays, called by all ranks in the same order.

    The data plane: no negotiation, no names, no tensors. `op` is never AVERAGE here: averaging is
    a sum and a division, and the caller knows best where to divide. Nor is it ADASUM, which needs to know
    where one tensor ends and the next begins (`hvdlite.algorithms.adasum`).
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allreduce(self, data: Array, op: ReduceOp, algorithm: str = "auto") -> None:
        """Reduce `data` over the ranks, in place."""
        ...

    def start_sum(self, data: Array) -> Callable[[], bool]:
        """Begin to sum a small array over the ranks, in place.

        Returns:
            What tells whether it is over, and is to be asked until it is: the caller decides how to wait.
        """
        ...

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `data` (``counts[r]`` elements from rank r) in `out`."""
        ...

    def broadcast(self, data: Array, root: int) -> None:
        """Overwrite `data` with rank `root`'s."""
        ...

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        """Give slice r of `data` to rank r; put what comes from rank r in slice r of `out`."""
        ...

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce `data` over the ranks and keep slice `rank` of it (``counts[rank]`` elements) in `out`."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def duplicate(self) -> Collectives:
        """Collectives over the same ranks that may run at the same time as these. Collective."""
        ...

    def close(self) -> None:
        """Release what the collectives hold. Local."""
        ...


Finish = Callable[[Array], None]
"""Changes a piece of a result in place, while it is at hand; called once for each piece."""


class TensorInfo(NamedTuple):
    """What the ranks must agree on about a tensor, without its values."""

    dtype: str
    """NumPy's name of the dtype, or ``"bfloat16"``."""
    shape: tuple[int, ...]


class Plan(NamedTuple):
    """How gradients are exchanged; the same on all ranks.

    Attributes:
        chunk_bytes: What is summed at a time: as many bytes of each rank as stay in a core's cache.
        message_bytes: Bytes that go between hosts at a time.
        buckets: The numbers of the tensors that are exchanged together, in the order of the exchanges; all at once if empty.
        lend: If not 0, results lie apart from gradients and may be kept by a framework, those of so many exchanges at a time.
        spare: Each rank has a second room for results, for when its program holds what is in the first.
    """

    chunk_bytes: int = 2**18
    message_bytes: int = 25 * 2**20
    buckets: tuple[tuple[int, ...], ...] = ()
    lend: int = 0
    spare: bool = False


class TensorAdapter(Protocol[T]):
    """How the core reads and makes tensors of one framework.

    Between the core and a framework travels a NumPy array, shared with the tensor where that is
    possible. bfloat16, which NumPy lacks, travels as its bits in uint16, or as float32 (`wide`).
    """

    def info(self, tensor: T) -> TensorInfo:
        """The dtype and shape of `tensor`."""
        ...

    def dtype(self, tensor: T) -> str:
        """The name of the dtype, as in `TensorInfo`; of tensors that cannot be exchanged too (sparse ones, symbols)."""
        ...

    def cast(self, tensor: T, dtype: str) -> T:
        """`tensor` in another dtype, by the framework's own cast, which it can differentiate."""
        ...

    def check_writable(self, tensor: T) -> None:
        """Let a tensor pass that `assign` can overwrite.

        Raises:
            UnsupportedTensorError: It cannot be overwritten.
        """
        ...

    def to_array(self, tensor: T, *, wide: bool) -> Array:
        """The values as a C-contiguous array of the tensor's shape, sharing its memory if possible.

        With `wide`, float16 and bfloat16 become float32 (a copy), to be reduced with its accuracy.
        """
        ...

    def from_array(self, array: Array, dtype: str, like: T) -> T:
        """A new tensor of `dtype` of the same kind (and device) as `like`, that may keep `array`'s memory.

        `array` has the dtype that `to_array` gives for `dtype`, wide or not.
        """
        ...

    def assign(self, tensor: T, array: Array) -> None:
        """Overwrite the values of `tensor` with those of `array` (as `to_array` gives them, wide or not)."""
        ...


class HalfConverter(Protocol):
    """Arithmetic on float16, or on bfloat16 as bits in uint16, by way of float32. All arrays are flat and of equal length."""

    def widen(self, half: Array, wide: Array) -> None:
        """Copy halves to float32."""
        ...

    def accumulate(self, ufunc: np.ufunc, wide: Array, half: Array) -> None:
        """``wide = ufunc(wide, half)``; add, multiply, minimum or maximum."""
        ...

    def narrow(self, wide: Array, half: Array) -> None:
        """Copy float32 to halves, rounding to nearest even."""
        ...


Combine = Callable[[Array, Array], None]
"""``combine(into, other)``: ``into[...] = into (op) other``."""


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def ufunc_of(op: ReduceOp) -> np.ufunc:
    """NumPy's function for `op` (not AVERAGE, not ADASUM)."""
    return _UFUNCS[op]


def numpy_combine(op: ReduceOp) -> Combine:
    """The `Combine` of `op` for NumPy arrays."""
    ufunc = ufunc_of(op)

    def combine(into: Array, other: Array) -> None:
        ufunc(into, other, out=into)

    return combine


class Exchange(Protocol):
    """What an adapter has made to exchange gradients, for `hvdlite.join`.

    Attributes:
        dropped: The program cannot use it any more on this rank.
        memory_only: It has nothing to catch up.
        passes: How far this rank has gone with each of its optimizers, in passes that the program adds up between two
            exchanges. Ranks know an optimizer by the same key. Empty if it is not known.
    """

    @property
    def dropped(self) -> bool: ...

    @property
    def memory_only(self) -> bool: ...

    @property
    def passes(self) -> Mapping[Hashable, int]: ...

    def release(self) -> None:
        """Release what it holds: all ranks have dropped it. Every rank calls this."""
        ...

    def belongs_to(self, process_set: ProcessSet | None) -> bool:
        """Whether the ranks of this set, and no others, exchange here."""
        ...

    def stand_in(self) -> None:
        """Take part in the exchanges of the others with nothing, until all ranks have joined."""
        ...

    def catch_up(self, last: int) -> None:
        """Make up for the steps that were not taken meanwhile. All ranks call this.

        Args:
            last: The rank that joined last; its rank in the job.
        """
        ...


class Stream(Protocol):
    """A queue of work on a device. What is on one stream is done in its order; streams wait for each other by events only."""

    @property
    def handle(self) -> int:
        """The driver's handle of it (``cudaStream_t``), for libraries such as NCCL."""
        ...

    def record(self) -> Any:
        """An event: it happens when all that is on this stream by now has been done."""
        ...

    def wait(self, event: Any) -> None:
        """Let what is put on this stream from now on begin after `event`. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until all that is on this stream has been done."""
        ...


class Device(Protocol):
    """The memory of one accelerator, and the streams that work on it, as a framework has them.

    Its tensors are the framework's own. Methods that compute or copy put that on the stream that is current in the calling
    thread (`on`) and return at once, if they do not say otherwise; tensors that they make belong to that stream. Dtypes are
    names as in `TensorInfo`, and ``"float8_e4m3fn"`` and ``"float8_e5m2"``.
    """

    @property
    def kind(self) -> str:
        """What must be the same on all ranks: ``"cuda"`` (AMD's too)."""
        ...

    @property
    def library(self) -> str:
        """Whose tensors its are: ``"torch"`` or ``"cupy"``."""
        ...

    @property
    def index(self) -> int:
        """The number by which the framework knows it."""
        ...

    @property
    def identity(self) -> str:
        """What no other accelerator of this host has, whatever each process calls it."""
        ...

    @property
    def visible(self) -> int:
        """How many of its kind this process sees."""
        ...

    def current(self) -> Stream:
        """The stream on which the calling thread works."""
        ...

    def side(self) -> Stream:
        """A new stream of high priority."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """For a with statement: the calling thread works on this device and on `stream`."""
        ...

    def keep(self, tensor: Any, stream: Stream) -> None:
        """Do not give away the memory of `tensor` before what is on `stream` now has been done. Called once that is there."""
        ...

    def pointer(self, tensor: Any) -> int:
        """The address of the first element of a contiguous tensor."""
        ...

    def dtype(self, tensor: Any) -> str:
        """The name of the dtype of a tensor."""
        ...

    def count(self, tensor: Any) -> int:
        """The number of elements of a tensor."""
        ...

    def is_plain(self, tensor: Any) -> bool:
        """Whether the elements of a tensor lie side by side, as its values: what works on addresses can use it as it is."""
        ...

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A new contiguous tensor without values.

        Raises:
            Exception: The framework's own, if there is no memory.
        """
        ...

    def flat(self, tensor: Any) -> Any:
        """`tensor` with one dimension and its elements side by side: a view if it can be, else a copy."""
        ...

    def shaped(self, tensor: Any, shape: Sequence[int]) -> Any:
        """A contiguous tensor in another shape, as a view."""
        ...

    def view(self, tensor: Any, dtype: str) -> Any:
        """The bytes of a flat contiguous tensor as elements of another dtype: a view."""
        ...

    def cast(self, tensor: Any, dtype: str) -> Any:
        """The values of a tensor in another dtype: a new tensor."""
        ...

    def copy(self, source: Any, into: Any) -> None:
        """Overwrite the values of `into` with those of `source`, of equal shape, cast to its dtype."""
        ...

    def pack(self, tensors: Sequence[Any], into: Any) -> None:
        """Copy tensors of any shapes one after the other into a flat one of the same dtype."""
        ...

    def unpack(self, flat: Any, tensors: Sequence[Any]) -> None:
        """Copy a flat tensor back into tensors of any shapes (which need not be contiguous): the reverse of `pack`."""
        ...

    def fill(self, tensor: Any, value: float) -> None:
        """Give every element the same value."""
        ...

    def scale(self, tensor: Any, factor: float) -> None:
        """Multiply floating-point (or complex) elements in place."""
        ...

    def divide(self, tensor: Any, divisor: int) -> None:
        """Divide in place; integers are rounded down, as ``//`` does."""
        ...

    def to_host(self, tensor: Any) -> Array:
        """The values of a flat tensor in (pinned) host memory of its own; bfloat16 as its bits in uint16. The host waits."""
        ...

    def from_host(self, array: Array, tensor: Any) -> None:
        """Overwrite a flat tensor with what `to_host` gave. `array` may be changed when the call returns."""
        ...


class DeviceAdapter(TensorAdapter[T], Protocol[T]):
    """A `TensorAdapter` of tensors that may lie on an accelerator. Of these, `to_array` and `from_array` copy."""

    def device_kind(self, tensor: T) -> str | None:
        """`Device.kind` of where the tensor lies; None for host memory."""
        ...

    def device(self, tensor: T) -> Device:
        """Where a tensor lies of which `device_kind` is not None.

        Raises:
            DeviceError: What is needed to work on it is not there.
        """
        ...

    def to_device(self, tensor: T) -> Any:
        """The same memory as a tensor of `device`, of the same shape; ready on the calling thread's current stream."""
        ...

    def from_device(self, native: Any, like: T) -> T:
        """The reverse, of the kind of `like`."""
        ...

    def touch(self, tensor: T) -> None:
        """Tell the framework that the values of a tensor have changed, by what works on addresses."""
        ...
