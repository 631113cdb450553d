"""Gradients of eager frameworks, exchanged: of Keras on torch.

Any tensors that the core has an adapter for. Results are new tensors, where the gradients are::

    gradients ─▶ (compressed) ─▶ arrays ─▶ `ArrayExchange` ─▶ copies ─▶ (decompressed) ─▶ gradients of all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdlite.api import world
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.registry import adapter_for
from hvdlite_tf.gradients.advice import Advice
from hvdlite_tf.gradients.array_exchange import ArrayExchange
from hvdlite_tf.gradients.exchange import Options
from hvdlite_tf.gradients.gradient_memory import Registry
from hvdlite_tf.gradients.identity import Identity
from hvdlite_tf.tensor import plain_variable, zeros_like


class EagerExchange:
    """Combines the gradients of all ranks: `GradientExchange` without graphs.

    Args:
        options: How. The same on all ranks. `sparse_as_dense` changes nothing: gradients are dense.
        identity: Of the optimizer whose exchange it is.
    """

    def __init__(self, options: Options, identity: Identity) -> None:
        self.options = options
        self._identity = identity
        self._advice = Advice(world("the exchange of gradients").config.advice)

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """The gradients of all ranks. Every rank calls this, with sources of the same dtypes and shapes in the same order.

        A gradient that some ranks have counts as zero on the others.

        Args:
            sources: Variables of Keras, or tensors.
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
        plain = [plain_variable(source) for source in sources]
        _check(plain, gradients)
        if self._is_alone(plain):
            return list(gradients)
        sent = [self._encode(source, gradient) for source, gradient in zip(plain, gradients, strict=True)]
        own = [None if gradient is None else each.array for each, gradient in zip(sent, gradients, strict=True)]
        exchange = self._exchange([each.info for each in sent])
        found = exchange.exchange(own, 1.0 if weight is None else float(weight), plain, self._advice)
        return [None if array is None else self._decode(each, array) for each, array in zip(sent, found, strict=True)]

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """This rank's gradients, with zeros for those that other ranks have: for adding up before they are exchanged.

        Every rank calls this, for the same sources. The ranks tell each other each time: there is no trace that would keep it.
        """
        plain = [plain_variable(source) for source in sources]
        _check(plain, gradients)
        if self._is_alone(plain):
            return list(gradients)
        exchange = self._exchange([adapter_for(source).info(source) for source in plain])
        there = exchange.gather_by_source([gradient is not None for gradient in gradients])
        return [
            zeros_like(source) if gradient is None and any(ranks) else gradient
            for source, gradient, ranks in zip(plain, gradients, there, strict=True)
        ]

    def _is_alone(self, sources: Sequence[Any]) -> bool:
        return not sources or world("the exchange of gradients").engine(self.options.process_set).size == 1

    def _exchange(self, infos: Sequence[TensorInfo]) -> ArrayExchange:
        options = self.options
        registry = Registry.of(world("the exchange of gradients"), options.process_set)
        return ArrayExchange(registry, infos, options.op, options.process_set, sparse=False, identity=self._identity)

    def _encode(self, source: Any, gradient: Any) -> _Sent:
        # Without a gradient, the source stands for it: to see what would be sent.
        tensor = (source if gradient is None else gradient).detach()
        if self.options.divisor != 1.0:
            tensor = tensor / self.options.divisor
        encoded, context = self.options.compression.compress(tensor)
        adapter = adapter_for(encoded)
        info = adapter.info(encoded)
        dtype = _numpy_dtype(info)
        if dtype.kind not in "fc" and info.dtype != "bfloat16":
            raise UnsupportedTensorError(f"gradients are floating-point numbers; got a source of dtype {info.dtype}.")
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


def _numpy_dtype(info: TensorInfo) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(tf.dtypes.as_dtype(info.dtype).as_numpy_dtype)
    return dtype


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
