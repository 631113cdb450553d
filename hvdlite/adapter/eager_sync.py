"""Gradients of eager frameworks, exchanged: of Keras on torch, of NumPy and JAX programs.

Any tensors that the core has an adapter for. Results are new tensors, where the gradients are::

    gradients ─▶ (compressed) ─▶ arrays ─▶ `ArraySync` ─▶ copies ─▶ (decompressed) ─▶ gradients of all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.adapter.advice import Values
from hvdlite.adapter.array_sync import ArraySync
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import Options
from hvdlite.api import world
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.numpy_adapter import dtype_of
from hvdlite.tensors.registry import adapter_for


class EagerSync:
    """Combines the gradients of all ranks, in code that is not traced.

    Args:
        options: How. The same on all ranks. `sparse_as_dense` changes nothing: gradients are dense.
        identity: The optimizer whose exchange it is; None if it is no optimizer's.
    """

    def __init__(self, options: Options, identity: Identity | None = None) -> None:
        self.options = options
        self._identity = identity

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """The gradients of all ranks. Every rank calls this, with sources of the same dtypes and shapes in the same order.

        A gradient that some ranks have counts as zero on the others.

        Args:
            sources: The tensors that the gradients are of.
            gradients: For each a dense tensor, which is only read, or None.
            weight: The number of samples that this rank's gradients are the mean of; 1 if None.

        Returns:
            For each a new tensor where its source is, or None if no rank has a gradient.

        Raises:
            ArgumentError: A gradient is not like its source; or a weight without Average.
            UnsupportedTensorError: A source is no floating-point number, or a gradient is not dense.
            MismatchError: The ranks have different sources. Raised on all of them.
            HvdliteError: The weights of all ranks are 0.
        """
        if weight is not None:
            self.options.check_weighted()
        _check(sources, gradients)
        if self._is_alone(sources):
            return list(gradients)
        sent = [self._encode(source, gradient) for source, gradient in zip(sources, gradients, strict=True)]
        found = self._exchange(sent, gradients, weight, lambda: sources)
        return [None if array is None else self._decode(each, array) for each, array in zip(sent, found, strict=True)]

    def combine_like(
        self,
        infos: Sequence[TensorInfo],
        gradients: Sequence[Any],
        weight: float | None,
        *,
        inplace: bool = False,
        refuse: bool = False,
    ) -> list[Any]:
        """`combine`, for gradients whose dtypes and shapes all ranks know.

        Args:
            infos: Dtype and shape of each gradient.
            gradients: Like `infos`, or None.
            weight: As for `combine`.
            inplace: Write into the tensors that are given.
            refuse: This rank has other gradients, and exchanges nothing.

        Raises:
            NewLayout: Some rank refuses. Raised on all of them.
            Others: As `combine`.
        """
        kind = next((gradient for gradient in gradients if gradient is not None), None)
        sources = [
            _zeros(info, kind) if gradient is None else gradient
            for info, gradient in zip(infos, gradients, strict=True)
        ]
        sent = [self._encode(source, gradient) for source, gradient in zip(sources, gradients, strict=True)]
        found = self._exchange(sent, gradients, weight, list, refuse)
        results: list[Any] = []
        for each, gradient, array in zip(sent, gradients, found, strict=True):
            if array is None:
                results.append(gradient)
            elif gradient is None or not inplace:
                results.append(self._decode(each, array))
            else:
                results.append(self._write(each, array, gradient))
        return results

    def _write(self, sent: _Sent, array: Array, into: Any) -> Any:
        plain = sent.encoded is into  # neither compressed nor divided, so that one copy is enough
        result = array if plain else adapter_for(into).to_array(self._decode(sent, array), wide=False)
        adapter_for(into).assign(into, result)
        return into

    def _exchange(
        self, sent: Sequence[_Sent], gradients: Sequence[Any], weight: Any, values: Values, refuse: bool = False
    ) -> list[Any]:
        own = [None if gradient is None else each.array for each, gradient in zip(sent, gradients, strict=True)]
        sync = self._sync([each.info for each in sent])
        return sync.exchange(own, 1.0 if weight is None else float(weight), values, refuse)

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """This rank's gradients, with zeros for those that other ranks have: for adding up before they are exchanged.

        Every rank calls this, for the same sources. The ranks tell each other each time: there is no trace that would keep it.
        """
        _check(sources, gradients)
        if self._is_alone(sources):
            return list(gradients)
        sync = self._sync([adapter_for(source).info(source) for source in sources])
        there = sync.gather_by_source([gradient is not None for gradient in gradients])
        return [
            _zeros_like(source) if gradient is None and any(ranks) else gradient
            for source, gradient, ranks in zip(sources, gradients, there, strict=True)
        ]

    def _is_alone(self, sources: Sequence[Any]) -> bool:
        return not sources or world("the exchange of gradients").engine(self.options.process_set).size == 1

    def _sync(self, infos: Sequence[TensorInfo]) -> ArraySync:
        options = self.options
        return ArraySync(infos, options.op, options.process_set, sparse=False, identity=self._identity)

    def _encode(self, source: Any, gradient: Any) -> _Sent:
        # Without a gradient, the source stands for it: to see what would be sent.
        tensor = source if gradient is None else gradient
        if hasattr(tensor, "detach"):  # torch's
            tensor = tensor.detach()
        if self.options.divisor != 1.0:
            tensor = tensor / self.options.divisor
        encoded, context = self.options.compression.compress(tensor)
        adapter = adapter_for(encoded)
        info = adapter.info(encoded)
        dtype = dtype_of(info)
        check_floating(info)
        return _Sent(encoded, context, info, adapter.to_array(encoded, wide=False).view(dtype))

    def _decode(self, sent: _Sent, array: Array) -> Any:
        # Copied: the array lies in memory that all ranks read, and frameworks clip gradients in place.
        bits = array.copy().view(np.uint16) if sent.info.dtype == "bfloat16" else array.copy()
        tensor = adapter_for(sent.encoded).from_array(bits, sent.info.dtype, sent.encoded)
        tensor = self.options.compression.decompress(tensor, sent.context)
        return tensor if self.options.divisor == 1.0 else tensor * self.options.divisor


class _Sent(NamedTuple):
    """A gradient, or what stands for it: compressed, what decompresses it, its layout, and as an array."""

    encoded: Any
    context: Any
    info: TensorInfo
    array: Array


def _zeros_like(tensor: Any) -> Any:
    """Zeros of the shape and dtype of a tensor, where it is."""
    return _zeros(adapter_for(tensor).info(tensor), tensor)


def _zeros(info: TensorInfo, like: Any) -> Any:
    """Zeros of this shape and dtype, of the framework of `like`, and where that is; NumPy's if it is None."""
    if like is None or isinstance(like, np.ndarray | np.generic):
        return np.zeros(info.shape, dtype_of(info))
    zeros = np.zeros(info.shape, np.uint16 if info.dtype == "bfloat16" else info.dtype)
    return adapter_for(like).from_array(zeros, info.dtype, like)


def check_floating(info: TensorInfo) -> None:
    """Raise UnsupportedTensorError unless a tensor holds floating-point (or complex) numbers."""
    if info.dtype != "bfloat16" and np.dtype(info.dtype).kind not in "fc":
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
