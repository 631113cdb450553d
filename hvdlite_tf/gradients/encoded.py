"""Gradients encoded for the exchange: one compressed tensor if dense, two (indices and compressed values) if sparse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdlite.adapter.array_sync import UNKNOWN, Gradient
from hvdlite.adapter.tables import TableRows
from hvdlite.errors import UnsupportedTensorError
from hvdlite.gradients.codec import Codec
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.numpy_adapter import check_dtype

T = TypeVar("T")

NONE, DENSE, SPARSE = "nds"
"""The kinds of gradients. A kind's position in this text is the number of its tensors: sparse ones have indices and values."""


class Wire:
    """A gradient encoded for the exchange.

    Args:
        source: The variable or tensor whose gradient it is.
        gradient: This rank's gradient: a dense tensor, a tf.IndexedSlices, or None.
        codec: Compresses the values; None if they travel as they are.

    Attributes:
        source: The variable or tensor.
        kind: The kind of this rank's gradient.
        info: The dtype and shape of the compressed dense gradient. A dimension that is not known is `UNKNOWN`.

    Raises:
        UnsupportedTensorError: The source is not of a floating-point or complex dtype.
    """

    def __init__(self, source: Any, gradient: Any, codec: Codec | None) -> None:
        self.source = source
        self._codec = codec
        self.kind = NONE if gradient is None else SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE
        self._tensors: list[tf.Tensor] = []
        self._context = None
        if self.kind == DENSE:
            self._tensors = [self._compress(tf.convert_to_tensor(gradient))]
        elif self.kind == SPARSE:
            self._tensors = [tf.cast(gradient.indices, tf.int64), self._compress(gradient.values)]
        # Variables of TensorFlow 1 have dtypes of references, so this takes their base dtypes.
        self._dtype, self._shape = source.dtype.base_dtype, source.shape
        if codec is not None:
            with tf.Graph().as_default():  # this takes no memory, and shows the compressed dtype and shape
                encoded, context = codec.encode(tf.compat.v1.placeholder(self._dtype, self._shape))
            self._dtype, self._shape = encoded.dtype, encoded.shape
            if self.kind == NONE:
                self._context = context
        if not (self._dtype.is_floating or self._dtype.is_complex):
            raise UnsupportedTensorError(
                f"gradients are floating-point numbers; got a source of dtype {self._dtype.name}."
            )
        name = check_dtype(np.dtype(self._dtype.as_numpy_dtype))
        dimensions = [None] if self._shape.rank is None else self._shape.as_list()
        self.info = TensorInfo(name, tuple(UNKNOWN if length is None else length for length in dimensions))

    def _compress(self, values: tf.Tensor) -> tf.Tensor:
        if self._codec is not None:
            values, self._context = self._codec.encode(values)
        return values

    def tensors(self) -> list[tf.Tensor]:
        """Return the tensors that this rank sends, as many as its kind has."""
        return self._tensors

    def specs(self, kind: str) -> list[tf.TensorSpec]:
        """Return the specs of the tensors that the exchange returns for a gradient of this kind."""
        if kind == SPARSE:
            return [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, *self._shape[1:]], self._dtype)]
        return [tf.TensorSpec(self._shape, self._dtype)] if kind == DENSE else []

    def decode(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the gradient for tensors that the exchange returned: one for a dense tensor, two for a tf.IndexedSlices."""
        decoded = tensors[-1] if self._codec is None else self._codec.decode(tensors[-1], self._context)
        return decoded if len(tensors) == 1 else tf.IndexedSlices(decoded, tensors[0], shape_of(self.source))


def as_dense(gradient: Any, source: Any) -> Any:
    """Return a sparse gradient of `source` as a dense tensor; a dense gradient unchanged.

    Rows of equal index are summed. (Keras keeps them apart, so its Adam would square each of them alone.)
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    dense = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape_of(source)[0])
    dense.set_shape(source.shape)
    return dense


def shape_of(source: Any) -> tf.Tensor:
    """Return the shape of `source` as a tensor, without reading a variable: an outer tape would record the read."""
    if source.shape.is_fully_defined():
        return tf.constant(source.shape.as_list(), tf.int64)
    return tf.shape(source, tf.int64)


def taken(kind: str, arrays: Iterator[Array]) -> Gradient:
    """Return a gradient of this kind, made of the next arrays."""
    found = take(kind, arrays)
    if kind == SPARSE:
        return TableRows(*found)
    return found[0] if found else None


def take(kind: str, items: Iterator[T]) -> list[T]:
    """Return the next items, as many as a gradient of this kind has."""
    return list(itertools.islice(items, (NONE + DENSE + SPARSE).index(kind)))


def arrays_of(gradient: Gradient) -> list[Array]:
    """Return the arrays of a gradient, which must not be None."""
    return [*gradient] if isinstance(gradient, TableRows) else [gradient]
