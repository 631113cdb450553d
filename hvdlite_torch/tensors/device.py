"""torch's GPU memory and streams, as the core uses them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvdlite.errors import DeviceError
from hvdlite.protocols import Array, Device, Stream
from hvdlite.protocols.device import SLICE
from hvdlite.tensors.held import Held
from hvdlite_torch.tensors.ownership import uses_of_storage

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
}
"""The dtypes that ranks can exchange in host memory, with their names in the core."""
FLOAT8: dict[torch.dtype, str] = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
"""The dtypes that ranks can exchange between GPUs only, with their names in the core."""
TORCH: dict[str, torch.dtype] = {name: dtype for dtype, name in (*DTYPES.items(), *FLOAT8.items())}
_SIGNED: dict[torch.dtype, torch.dtype] = {
    **{torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
}
"""The dtype as which the bits of another dtype are copied, where torch has no GPU kernel for the other one."""


class TorchStream:
    """A torch stream as `hvdlite.protocols.Stream`."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw

    @property
    def handle(self) -> int:
        return int(self.raw.cuda_stream)

    def record(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self.raw.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self.raw.wait_event(event)

    def synchronize(self) -> None:
        self.raw.synchronize()


class TorchMirror:
    """A `hvdlite.protocols.HostMirror` whose memory is a torch tensor.

    Args:
        count: The length of `values`.
        pinned: Whether the memory is page-locked.
    """

    def __init__(self, count: int, pinned: bool) -> None:
        self._host = torch.zeros(count, dtype=torch.float64, pin_memory=pinned)
        self.values: Array = self._host.numpy()

    def take(self, tensor: torch.Tensor) -> None:
        self._host.copy_(tensor, non_blocking=True)


class TorchDevice:
    """A GPU as `hvdlite.protocols.Device`.

    Args:
        device: The torch device, which must have an index.
    """

    kind = "cuda"
    library = "torch"
    pinned = True
    """Whether host memory that the GPU copies from and to is page-locked."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.index: int = device.index

    @functools.cached_property
    def identity(self) -> str:
        """The UUID of the GPU; of a slice of one (MIG), also its kind."""
        properties = torch.cuda.get_device_properties(self.index)
        _, is_slice, kind = properties.name.partition(" MIG ")
        return f"{properties.uuid}{SLICE}{kind}" if is_slice else str(properties.uuid)

    @property
    def visible(self) -> int:
        return torch.cuda.device_count()

    def current(self) -> Stream:
        return TorchStream(torch.cuda.current_stream(self.index))

    def side(self) -> Stream:
        return TorchStream(torch.cuda.Stream(self.index, priority=-1))

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with torch.no_grad(), self._guard(), torch.cuda.stream(stream.raw):
            yield

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        """Make this the current GPU. torch.cuda.stream() alone would set the previous one on exit, and use memory there."""
        if torch.cuda.current_device() == self.index:  # nearly always, and each guard costs the host time
            return contextlib.nullcontext()
        return torch.cuda.device(self.index)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream.raw)

    def pointer(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def dtype(self, tensor: torch.Tensor) -> str:
        return DTYPES.get(tensor.dtype) or FLOAT8[tensor.dtype]

    def count(self, tensor: torch.Tensor) -> int:
        return tensor.numel()

    def is_plain(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=TORCH[dtype], device=self.torch_device)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)

    def shaped(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return tensor.view(tuple(shape))

    def view(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.view(TORCH[dtype])

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(TORCH[dtype], copy=True)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(source)

    def pack(self, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=into)

    def unpack(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        values = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):  # _foreach_copy_ does not take these
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        elif flat.dtype in _SIGNED:
            signed = _SIGNED[flat.dtype]
            torch._foreach_copy_([tensor.view(signed) for tensor in tensors], [value.view(signed) for value in values])
        else:
            torch._foreach_copy_(list(tensors), values)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        tensor.fill_(value)

    def scale(self, tensor: torch.Tensor, factor: float) -> None:
        if tensor.dtype in FLOAT8:  # torch has no arithmetic for these
            tensor.copy_(tensor.float().mul_(factor))
        else:
            tensor.mul_(factor)

    def divide(self, tensor: torch.Tensor, divisor: int) -> None:
        if tensor.dtype in FLOAT8:
            tensor.copy_(tensor.float().div_(divisor))
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(divisor)
        else:
            tensor.div_(divisor, rounding_mode="trunc")

    def to_host(self, tensor: torch.Tensor) -> Array:
        host = self.fetch(tensor)
        array: Array = (host.view(torch.uint16) if host.dtype is torch.bfloat16 else host).numpy()
        return array

    def from_host(self, array: Array, tensor: torch.Tensor) -> None:
        values = torch.from_numpy(np.ascontiguousarray(array))
        self.send(values.view(torch.bfloat16) if tensor.dtype is torch.bfloat16 else values, tensor)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor in page-locked host memory. The host waits for the copy."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
        host.copy_(tensor, non_blocking=True)
        self.current().synchronize()
        return host

    def send(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy a tensor in host memory, which may have another dtype, to the GPU. The host does not wait.

        The copy goes through page-locked memory, which torch keeps until the GPU has read it.
        """
        host = torch.empty(values.shape, dtype=into.dtype, pin_memory=self.pinned)
        host.copy_(values)
        into.copy_(host, non_blocking=True)

    # For gradients in flat memory

    no_memory: type[Exception] = torch.OutOfMemoryError

    @property
    def place(self) -> str:
        return str(self.torch_device)

    def is_capturing(self) -> bool:
        return is_capturing()

    def is_over(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def mirror(self, count: int) -> TorchMirror:
        return TorchMirror(count, self.pinned)

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=TORCH[dtype], device=self.torch_device)

    def strided(self, flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        return flat.as_strided(tuple(shape), tuple(strides), flat.storage_offset())

    def where(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    def is_at(self, tensor: torch.Tensor, where: tuple[Any, ...]) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.data_ptr() == where[0]
            and self.where(tensor) == where
            and not (tensor.is_neg() or tensor.is_conj())
        )

    def version(self, tensor: torch.Tensor) -> int:
        return tensor._version

    def allocation(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def users(self, tensor: torch.Tensor) -> int:
        return uses_of_storage(tensor)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def copy_all(self, sources: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        torch._foreach_copy_(into, sources)

    def clear_all(self, tensors: list[torch.Tensor]) -> None:
        torch._foreach_zero_(tensors)

    def add(self, source: torch.Tensor, into: torch.Tensor) -> None:
        into.add_(source)

    def scale_into(self, source: torch.Tensor, factor: float, into: torch.Tensor) -> None:
        torch.mul(source, factor, out=into)

    def scale_by_ratio(
        self,
        source: torch.Tensor,
        numerator: torch.Tensor,
        denominator: torch.Tensor,
        room: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        torch.div(numerator, denominator, out=room)
        # A factor of shape () would not count for the dtype of the product, which would be rounded to that of `source`.
        torch.mul(source, room.view(1), out=into)


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph. The host cannot query such a stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class LendingDevice(TorchDevice):
    """A GPU on which torch works on memory of another framework (JAX), which torch's allocator does not know."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._held = Held()

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        self._held.until(stream.record(), tensor, lambda event: event.query())


@functools.cache
def lending_device(index: int) -> Device:
    """Return the device for arrays of other frameworks on GPU number `index`. For `hvdlite.tensors.device_registry`.

    Raises:
        DeviceError: torch cannot use a GPU here.
    """
    check_available()
    return LendingDevice(torch.device("cuda", index))


@functools.cache
def _cuda(device: torch.device) -> Device:
    return TorchDevice(device)


MAKERS: dict[str, Callable[[torch.device], Device]] = {"cuda": _cuda}
"""The functions that make a `Device` of a torch device, by the device's type. Tests add others."""


def device_kind(tensor: torch.Tensor) -> str | None:
    """Return the `Device.kind` of a tensor's device; None for host memory and for devices that are not supported."""
    if tensor.is_cpu and "cpu" not in MAKERS:
        return None
    return TorchDevice.kind if tensor.device.type in MAKERS else None


def device_of(tensor: torch.Tensor) -> Device:
    """Return the device of a tensor; the tensor's `device_kind` must not be None."""
    return MAKERS[tensor.device.type](tensor.device)


def current_device() -> Device:
    """Return the GPU that this process has chosen (``torch.cuda.set_device``).

    Raises:
        DeviceError: torch cannot use a GPU here.
    """
    if "cpu" in MAKERS:
        return MAKERS["cpu"](torch.device("cpu"))
    check_available()
    return MAKERS["cuda"](torch.device("cuda", torch.cuda.current_device()))


def check_available() -> None:
    """Raise DeviceError unless torch can use a GPU; the text says why it cannot."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise DeviceError(
            f"torch {torch.__version__} was built for the CPU only: install one for CUDA (https://pytorch.org/get-started)."
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} sees no GPU: is CUDA_VISIBLE_DEVICES empty, the driver (nvidia-smi) too old, or the "
            "GPU not passed on to this container?"
        )
