"""A kind of device: its memory and its streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hvdlite.protocols.types import Array


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


class HostMirror(Protocol):
    """A few numbers in host memory that a device copies its own to, while the host goes on.

    Attributes:
        values: Shape ``(count,)``, float64: zeros at first.
    """

    @property
    def values(self) -> Array: ...

    def take(self, tensor: Any) -> None:
        """Begin to copy a tensor like `values` there, on the current stream. The host does not wait."""
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

    # What gradients in flat memory need besides

    @property
    def place(self) -> str:
        """How the framework writes it, such as ``"cuda:0"``, for messages."""
        ...

    @property
    def no_memory(self) -> type[Exception]:
        """What the framework raises where there is no memory."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph, so that nothing can be asked about it."""
        ...

    def mirror(self, count: int) -> HostMirror:
        """A new mirror of `count` numbers, in page-locked memory."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """As `empty`, with zeros in it."""
        ...

    def strided(self, flat: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        """A flat contiguous tensor as a view of another shape; `strides` are in elements and leave no gap."""
        ...

    def is_same(self, one: Any, other: Any) -> bool:
        """Whether two tensors are the same elements in the same order: memory, shape, strides and dtype."""
        ...

    def version(self, tensor: Any) -> int:
        """Another number after somebody has written into the memory of `tensor` by the framework's operations, if it counts
        these; else always 0."""
        ...

    def allocation(self, tensor: Any) -> int:
        """The address where the memory begins that a tensor is a part of."""
        ...

    def users(self, tensor: Any) -> int:
        """How many tensors, and things made of them, have the memory of `tensor`, and maybe some more, always as many."""
        ...

    def alias(self, tensor: Any) -> Any:
        """Another tensor object with the memory of `tensor`, one more of its users."""
        ...

    def copy_all(self, sources: list[Any], into: list[Any]) -> None:
        """`copy` each of at least one tensor; with few launches, whatever their number."""
        ...

    def clear_all(self, tensors: list[Any]) -> None:
        """Overwrite at least one tensor with zeros; with few launches, whatever their number."""
        ...

    def add(self, source: Any, into: Any) -> None:
        """Add the values of `source` to those of `into`, of equal shape and dtype."""
        ...

    def scale_into(self, source: Any, factor: float, into: Any) -> None:
        """Overwrite the values of `into` with those of `source`, of equal shape, times `factor`, cast to its dtype."""
        ...

    def scale_by_ratio(self, tensor: Any, numerator: Any, denominator: Any, room: Any) -> None:
        """Multiply in place by a number that only the device knows.

        Args:
            tensor: Floating-point or complex.
            numerator, denominator: Shape (), float64.
            room: Shape (), of the dtype of `tensor`, or of its real part; is overwritten with the number.
        """
        ...
