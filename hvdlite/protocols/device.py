"""The contract of an accelerator: its memory and its streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hvdlite.protocols.types import Array

SLICE = ", the slice "
"""What follows the identity of a card in `Device.identity`, if the device is a slice of the card (NVIDIA's MIG)."""


class Stream(Protocol):
    """A queue of work on a device. Work on one stream is done in order. Two streams wait for each other only by events."""

    @property
    def handle(self) -> int:
        """The driver's handle of the stream (``cudaStream_t``), for libraries such as NCCL."""
        ...

    def record(self) -> Any:
        """Return an event that happens when all work that is on this stream now has been done."""
        ...

    def wait(self, event: Any) -> None:
        """Let later work on this stream begin only after `event`. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until all work on this stream has been done."""
        ...


class HostMirror(Protocol):
    """A few numbers in host memory. A device copies a tensor to them while the host goes on.

    Attributes:
        values: The numbers: float64, shape ``(count,)``, zeros at first.
    """

    @property
    def values(self) -> Array: ...

    def take(self, tensor: Any) -> None:
        """Begin to copy a tensor of the dtype and shape of `values` to them, on the current stream. The host does not wait."""
        ...


class Device(Protocol):
    """The memory and the streams of one accelerator, by way of a framework.

    The tensors are the framework's own. A method that computes or copies puts this work on the current stream of the calling
    thread (see `on`) and returns at once, unless its description says that the host waits. A new tensor belongs to that stream.
    A dtype is given by its name: a name of `TensorInfo`, or ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
    """

    @property
    def kind(self) -> str:
        """The kind of the accelerator, which must be the same on all ranks: ``"cuda"``, also for AMD's GPUs."""
        ...

    @property
    def library(self) -> str:
        """The framework of the tensors: ``"torch"`` or ``"cupy"``."""
        ...

    @property
    def index(self) -> int:
        """The framework's number of the accelerator."""
        ...

    @property
    def identity(self) -> str:
        """A text that no other accelerator of this host has. It is the same in all processes, whatever number they use."""
        ...

    @property
    def visible(self) -> int:
        """The number of accelerators of this kind that this process sees."""
        ...

    def current(self) -> Stream:
        """Return the stream on which the calling thread works."""
        ...

    def side(self) -> Stream:
        """Return a new stream of high priority."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a context manager in which the calling thread works on this device and on `stream`."""
        ...

    def keep(self, tensor: Any, stream: Stream) -> None:
        """Keep the memory of `tensor` until all work that is on `stream` at the time of this call has been done."""
        ...

    def pointer(self, tensor: Any) -> int:
        """Return the address of the first element of a contiguous tensor."""
        ...

    def dtype(self, tensor: Any) -> str:
        """Return the name of the dtype of a tensor."""
        ...

    def count(self, tensor: Any) -> int:
        """Return the number of elements of a tensor."""
        ...

    def is_plain(self, tensor: Any) -> bool:
        """Return whether the memory of a tensor holds its values side by side, so that a library can use it by its address."""
        ...

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Return a new contiguous tensor whose values are not set.

        Raises:
            Exception: There is no memory. The exception is the framework's own.
        """
        ...

    def flat(self, tensor: Any) -> Any:
        """Return the elements of `tensor` side by side in one dimension: a view if possible, else a copy."""
        ...

    def shaped(self, tensor: Any, shape: Sequence[int]) -> Any:
        """Return a view of a contiguous tensor in another shape."""
        ...

    def view(self, tensor: Any, dtype: str) -> Any:
        """Return a view of the bytes of a flat contiguous tensor as elements of another dtype."""
        ...

    def cast(self, tensor: Any, dtype: str) -> Any:
        """Return a new tensor with the values of `tensor`, cast to another dtype."""
        ...

    def copy(self, source: Any, into: Any) -> None:
        """Overwrite `into` with the values of `source`, cast to the dtype of `into`. The shapes are equal."""
        ...

    def pack(self, tensors: Sequence[Any], into: Any) -> None:
        """Copy tensors of any shapes, one after the other, into a flat tensor of the same dtype."""
        ...

    def unpack(self, flat: Any, tensors: Sequence[Any]) -> None:
        """Copy a flat tensor into tensors of any shapes, contiguous or not. This is the reverse of `pack`."""
        ...

    def fill(self, tensor: Any, value: float) -> None:
        """Set every element to `value`."""
        ...

    def scale(self, tensor: Any, factor: float) -> None:
        """Multiply floating-point or complex elements by `factor`, in place."""
        ...

    def divide(self, tensor: Any, divisor: int) -> None:
        """Divide the elements by `divisor`, in place. Integers are rounded toward zero."""
        ...

    def to_host(self, tensor: Any) -> Array:
        """Copy a flat tensor to a new array in (pinned) host memory; bfloat16 becomes its bits in uint16. The host waits."""
        ...

    def from_host(self, array: Array, tensor: Any) -> None:
        """Overwrite a flat tensor with an array in the form of `to_host`. The caller may change `array` afterwards."""
        ...

    # For gradients in flat memory

    @property
    def place(self) -> str:
        """The framework's name of the accelerator for messages, such as ``"cuda:0"``."""
        ...

    @property
    def no_memory(self) -> type[Exception]:
        """The class of the exception that the framework raises if there is no memory."""
        ...

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph. No event can be queried during a capture."""
        ...

    def is_over(self, event: Any) -> bool:
        """Return whether an event of `Stream.record` has happened. The host does not wait."""
        ...

    def mirror(self, count: int) -> HostMirror:
        """Return a new mirror of `count` numbers, in page-locked memory."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """Return a new contiguous tensor of zeros. The errors are those of `empty`."""
        ...

    def strided(self, flat: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        """Return a view of a flat contiguous tensor in another shape. `strides` are in elements and leave no gaps."""
        ...

    def where(self, tensor: Any) -> tuple[Any, ...]:
        """Return address, shape, strides and dtype of a tensor, for `is_at`."""
        ...

    def is_at(self, tensor: Any, where: tuple[Any, ...]) -> bool:
        """Return whether a tensor has the memory, the shape, the strides and the dtype of another tensor.

        The host asks for each gradient in each step, so this is quick, above all if the address differs.

        Args:
            tensor: The tensor.
            where: What `where` has returned for the other tensor.
        """
        ...

    def version(self, tensor: Any) -> int:
        """Return a number that changes when an operation of the framework writes to the memory of `tensor`.

        The number is always 0 if the framework does not count writes.
        """
        ...

    def allocation(self, tensor: Any) -> int:
        """Return the address of the beginning of the allocation in which a tensor lies."""
        ...

    def users(self, tensor: Any) -> int:
        """Return how many tensors, and objects made of tensors, use the memory of `tensor`, plus maybe a constant."""
        ...

    def alias(self, tensor: Any) -> Any:
        """Return another tensor object on the memory of `tensor`. It counts as one more of the `users`."""
        ...

    def copy_all(self, sources: list[Any], into: list[Any]) -> None:
        """Apply `copy` to each pair of tensors, at least one pair. The number of launches is small for any number of pairs."""
        ...

    def clear_all(self, tensors: list[Any]) -> None:
        """Overwrite one or more tensors with zeros. The number of launches is small for any number of tensors."""
        ...

    def add(self, source: Any, into: Any) -> None:
        """Add `source` to `into`, in place. The shapes and dtypes are equal."""
        ...

    def scale_into(self, source: Any, factor: float, into: Any) -> None:
        """Overwrite `into` with the values of `source` times `factor`, cast to the dtype of `into`. The shapes are equal."""
        ...

    def scale_by_ratio(self, source: Any, numerator: Any, denominator: Any, room: Any, into: Any) -> None:
        """Write a tensor times ``numerator / denominator`` to another one, in one pass. The host never sees this ratio.

        Args:
            source: A flat floating-point or complex tensor.
            numerator, denominator: Tensors on the device: float64, shape ``()``.
            room: A tensor of shape ``()`` that is overwritten with the ratio. Its dtype is the real dtype of `into`.
            into: A tensor of the same shape: `source` itself, or one of a wider dtype, in which the product is computed.
        """
        ...
