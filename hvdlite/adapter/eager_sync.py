"""`EagerSync`: exchanges gradients in eager code, such as Keras on torch, and programs of NumPy and JAX.

The gradients are any tensors for which the core has an adapter. The results are new tensors in the memory of the same devices::

    gradients ─▶ (compressed) ─▶ arrays ─▶ `ArraySync` ─▶ copies ─▶ (decompressed) ─▶ gradients of all ranks

If all gradients lie on a device, they stay there, and the results are views of the memory in which they were combined, without
a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from hvdlite.adapter.advice import Values
from hvdlite.adapter.array_sync import ArraySync
from hvdlite.adapter.gradient_memory import enter_aggregator, numbers_of
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import Adasum, world
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.operations.on_device import DeviceInputs
from hvdlite.protocols import Device, DeviceAdapter, TensorInfo
from hvdlite.tensors.numpy_adapter import dtype_of
from hvdlite.tensors.registry import adapter_for, device_kind_of


class EagerSync:
    """Combines the gradients of all ranks, in code that is not traced.

    Args:
        options: The options of the exchange, the same on all ranks. `sparse_as_dense` has no effect: gradients are dense.
        identity: The identity of the optimizer whose gradients are exchanged; None without an optimizer.
    """

    def __init__(self, options: ExchangeOptions, identity: Identity | None = None) -> None:
        self.options = options
        self._identity = identity
        self._codec = options.codec
        self._in_host_memory = options.op is Adasum or options.aggregator is not None
        enter_aggregator(options)

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Return the gradients of all ranks. Every rank calls this with sources of equal dtypes and shapes in the same order.

        A gradient that only some ranks have counts as zero on the others.

        Args:
            sources: The tensors whose gradients are exchanged.
            gradients: A dense tensor, which is only read, or None for each source.
            weight: The number of samples that this rank's gradients are the mean of; 1 if None.

        Returns:
            For each source a new tensor on the device of the source; None if no rank has a gradient.

        Raises:
            ArgumentError: A gradient has another dtype or shape than its source; or there is a weight without Average.
            UnsupportedTensorError: A source does not hold floating-point numbers, or a gradient is not dense.
            MismatchError: The ranks have different sources. Raised on all ranks.
            HvdliteError: The weights of all ranks are 0.
        """
        if weight is not None:
            self.options.check_weighted()
        _check(sources, gradients)
        if self._is_alone(sources):
            return list(gradients)
        sent = [self._encode(source, gradient) for source, gradient in zip(sources, gradients, strict=True)]
        device = self._device_of([each.encoded for each in sent])
        numbers = numbers_of(self.options, sources)
        found = self._exchange(sent, gradients, weight, lambda: sources, device=device, numbers=numbers)
        return [
            None if result is None else self._decode(each, result, device)
            for each, result in zip(sent, found, strict=True)
        ]

    def combine_like(
        self,
        infos: Sequence[TensorInfo],
        gradients: Sequence[Any],
        weight: float | None,
        *,
        inplace: bool = False,
        refuse: bool = False,
        kind: str = "",
        numbers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the gradients of all ranks, as `combine` does, if all ranks know the dtypes and shapes of the gradients.

        Args:
            infos: Dtype and shape of each gradient.
            gradients: A tensor of this dtype and shape, or None, for each gradient.
            weight: See `combine`.
            inplace: Whether the results overwrite the given tensors.
            refuse: Whether this rank has other gradients, and so exchanges nothing.
            kind: The `Device.kind` of the gradients of all ranks; empty if some gradients are in host memory.
            numbers: The numbers by which an aggregator knows the gradients.

        Raises:
            NewLayout: Some rank refuses. Raised on all ranks.
            Others: See `combine`.
        """
        like = next((gradient for gradient in gradients if gradient is not None), None)
        sources = [
            _zeros(info, like) if gradient is None else gradient
            for info, gradient in zip(infos, gradients, strict=True)
        ]
        if self._codec is None:  # a program may have thousands of small gradients
            sent = [_Sent(_bare(source), None, info) for source, info in zip(sources, infos, strict=True)]
        else:
            sent = [self._encode(source, gradient) for source, gradient in zip(sources, gradients, strict=True)]
        device = None
        if kind and not self._in_host_memory:
            device = self._device_of([each.encoded for each in sent]) if like is not None else _device_here(kind)
        found = self._exchange(sent, gradients, weight, list, refuse, device, numbers)
        results: list[Any] = []
        for each, gradient, result in zip(sent, gradients, found, strict=True):
            if result is None:
                results.append(gradient)
            elif gradient is None or not inplace:
                results.append(self._decode(each, result, device))
            else:
                results.append(self._write(each, result, gradient, device))
        return results

    def _device_of(self, tensors: Sequence[Any]) -> Device | None:
        """Return the device of all these tensors; None if one is in host memory, or if all are needed there."""
        if self._in_host_memory or any(device_kind_of(tensor, adapter_for(tensor)) is None for tensor in tensors):
            return None
        found: Device = cast("DeviceAdapter[Any]", adapter_for(tensors[0])).device(tensors[0])
        return found

    def _write(self, sent: _Sent, result: Any, into: Any, device: Device | None) -> Any:
        adapter = adapter_for(into)
        plain = sent.encoded is into  # neither compressed nor divided, so that one copy is enough
        if device is None:
            array = result if plain else adapter.to_array(self._decode(sent, result, None), wide=False)
            adapter.assign(into, array)
        else:
            on_device = cast("DeviceAdapter[Any]", adapter)
            native = result if plain else on_device.to_device(self._decode(sent, result, device))
            device.copy(native, on_device.to_device(into))
            on_device.touch(into)
        return into

    def _exchange(
        self,
        sent: Sequence[_Sent],
        gradients: Sequence[Any],
        weight: Any,
        values: Values,
        refuse: bool = False,
        device: Device | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[Any]:
        given = [each.encoded for each, gradient in zip(sent, gradients, strict=True) if gradient is not None]
        adapters = [adapter_for(tensor) for tensor in given]
        if device is None:
            own = [adapter.to_array(tensor, wide=False) for tensor, adapter in zip(given, adapters, strict=True)]
        else:
            own = DeviceInputs(given, adapters).natives if given else []
        there = iter(own)
        everything = [
            None if gradient is None else (next(there) if device is not None else next(there).view(dtype_of(each.info)))
            for each, gradient in zip(sent, gradients, strict=True)
        ]
        sync = self._sync([each.info for each in sent], numbers)
        return sync.exchange(everything, 1.0 if weight is None else float(weight), values, refuse, device)

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return this rank's gradients, with zeros for a gradient that only other ranks have, so that passes can be summed.

        Every rank calls this, for the same sources. The ranks tell each other in each call which gradients they have, because
        there is no traced function that would remember it.
        """
        _check(sources, gradients)
        if self._is_alone(sources):
            return list(gradients)
        numbers_of(self.options, sources)  # `combine` may get fewer of them
        sync = self._sync([adapter_for(source).info(source) for source in sources])
        there = sync.gather_by_source([gradient is not None for gradient in gradients])
        return [
            _zeros_like(source) if gradient is None and any(ranks) else gradient
            for source, gradient, ranks in zip(sources, gradients, there, strict=True)
        ]

    def _is_alone(self, sources: Sequence[Any]) -> bool:
        size = world("the exchange of gradients").engine(self.options.process_set).size
        return not sources or (size == 1 and self.options.aggregator is None)

    def _sync(self, infos: Sequence[TensorInfo], numbers: Sequence[int] | None = None) -> ArraySync:
        options = self.options
        return ArraySync(
            infos,
            options.op,
            options.process_set,
            sparse=False,
            identity=self._identity,
            aggregator=options.aggregator,
            numbers=numbers,
        )

    def _encode(self, source: Any, gradient: Any) -> _Sent:
        # Without a gradient, the source is encoded in its place, which shows the dtype and shape of the encoded gradient.
        tensor = _bare(source if gradient is None else gradient)
        encoded, context = (tensor, None) if self._codec is None else self._codec.encode(tensor)
        info = adapter_for(encoded).info(encoded)
        check_floating(info)
        return _Sent(encoded, context, info)

    def _decode(self, sent: _Sent, result: Any, device: Device | None) -> Any:
        adapter = adapter_for(sent.encoded)
        if device is not None and device_kind_of(sent.encoded, adapter) is not None:
            tensor = cast("DeviceAdapter[Any]", adapter).from_device(result, sent.encoded)
        else:
            # The array is copied because it lies in memory that all ranks read, and frameworks clip gradients in place. A rank
            # that has given no gradient gets a result on a device as an array, because nothing says what tensor it wants.
            array = result.copy() if device is None else device.to_host(device.flat(result)).reshape(sent.info.shape)
            bits = array.view(np.uint16) if sent.info.dtype == "bfloat16" else array
            tensor = adapter.from_array(bits, sent.info.dtype, sent.encoded)
        return tensor if self._codec is None else self._codec.decode(tensor, sent.context)


class _Sent(NamedTuple):
    """A gradient that is encoded for the exchange, or an encoded source in its place.

    Attributes:
        encoded: The compressed tensor.
        context: The context that decompresses the tensor.
        info: Dtype and shape of the compressed tensor.
    """

    encoded: Any
    context: Any
    info: TensorInfo


def _bare(tensor: Any) -> Any:
    """Return a tensor without its part in a graph of torch."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _device_here(kind: str) -> Device:
    """Return the device of a kind that this rank uses. This is for a rank that has no tensor on it."""
    return world("the exchange of gradients").devices.here(kind)


def _zeros_like(tensor: Any) -> Any:
    """Return zeros with the shape and dtype of a tensor, on the same device."""
    return _zeros(adapter_for(tensor).info(tensor), tensor)


def _zeros(info: TensorInfo, like: Any) -> Any:
    """Return zeros of this dtype and shape, of the framework and on the device of `like`; of NumPy if `like` is None."""
    if like is None or isinstance(like, np.ndarray | np.generic):
        return np.zeros(info.shape, dtype_of(info))
    adapter = adapter_for(like)
    if device_kind_of(like, adapter) is not None:
        on_device = cast("DeviceAdapter[Any]", adapter)
        return on_device.from_device(on_device.device(like).zeros(info.shape, info.dtype), like)
    zeros = np.zeros(info.shape, np.uint16 if info.dtype == "bfloat16" else info.dtype)
    return adapter.from_array(zeros, info.dtype, like)


@functools.cache
def _is_floating(dtype: str) -> bool:
    return dtype == "bfloat16" or np.dtype(dtype).kind in "fc"


def check_floating(info: TensorInfo) -> None:
    """Raise UnsupportedTensorError unless a tensor holds floating-point (or complex) numbers."""
    if not _is_floating(info.dtype):
        raise UnsupportedTensorError(f"gradients are floating-point numbers; got a source of dtype {info.dtype}.")


def _check(sources: Sequence[Any], gradients: Sequence[Any]) -> None:
    for source, gradient in zip(sources, gradients, strict=True):
        if gradient is None:
            continue
        got, expected = adapter_for(gradient).info(gradient), adapter_for(source).info(source)
        if got != expected:
            raise ArgumentError(
                f"a gradient of {got.dtype} and shape {got.shape} for {expected.dtype} and shape {expected.shape}: expected "
                "the same."
            )
