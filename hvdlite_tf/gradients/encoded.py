"""What of a gradient is exchanged, and what becomes of it: compressed tensors, a number of them for each kind of gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdlite.adapter.array_sync import UNKNOWN, Gradient, Rows
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite.tensors.numpy_adapter import check_dtype

T = TypeVar("T")

NONE, DENSE, SPARSE = "nds"
"""Kinds of gradients. One consists of as many tensors as its place here says: sparse ones of indices and values."""


class Wire:
    """A gradient as it is exchanged.

    Args:
        source: A variable or tensor.
        gradient: This rank's gradient of it: dense, tf.IndexedSlices, or None.
        compression: How it is compressed.
        divisor: It is divided by this before that, and multiplied by it in the end.

    Attributes:
        source: As given.
        kind: Of this rank's gradient.
        info: Dtype and shape, compressed. A dimension is `UNKNOWN` if it is not known.

    Raises:
        UnsupportedTensorError: It is no floating-point number.
    """

    def __init__(self, source: Any, gradient: Any, compression: Compressor, divisor: float) -> None:
        self.source = source
        self._compression = compression
        self._divisor = divisor
        self.kind = NONE if gradient is None else SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE
        self._tensors: list[tf.Tensor] = []
        self._context = None
        if self.kind == DENSE:
            self._tensors = [self._compress(tf.convert_to_tensor(gradient))]
        elif self.kind == SPARSE:
            self._tensors = [tf.cast(gradient.indices, tf.int64), self._compress(gradient.values)]
        self._dtype, self._shape = (
            source.dtype.base_dtype,
            source.shape,
        )  # variables of TensorFlow 1 have dtypes of references
        if compression is not Compression.none:
            with tf.Graph().as_default():  # no memory, only to see what comes out
                encoded, context = compression.compress(tf.compat.v1.placeholder(self._dtype, self._shape))
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
        if self._divisor != 1.0:
            values = values / tf.cast(self._divisor, values.dtype)
        encoded, self._context = self._compression.compress(values)
        return encoded

    def tensors(self) -> list[tf.Tensor]:
        """What this rank sends: as many tensors as its kind has."""
        return self._tensors

    def specs(self, kind: str) -> list[tf.TensorSpec]:
        """What comes back if it is of this kind."""
        if kind == SPARSE:
            return [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, *self._shape[1:]], self._dtype)]
        return [tf.TensorSpec(self._shape, self._dtype)] if kind == DENSE else []

    def decode(self, tensors: Sequence[tf.Tensor]) -> Any:
        """The gradient that has come back: a dense tensor of one, tf.IndexedSlices of two."""
        decoded = self._compression.decompress(tensors[-1], self._context)
        if self._divisor != 1.0:
            decoded = decoded * tf.cast(self._divisor, decoded.dtype)
        return decoded if len(tensors) == 1 else tf.IndexedSlices(decoded, tensors[0], shape_of(self.source))


def as_dense(gradient: Any, source: Any) -> Any:
    """A sparse gradient of `source` as a dense one; any other as it is.

    Rows that were looked up more than once are summed. Keras leaves them apart, so that its Adam squares each part alone.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    dense = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape_of(source)[0])
    dense.set_shape(source.shape)
    return dense


def shape_of(source: Any) -> tf.Tensor:
    """As a tensor. A variable is not read for it: an outer tape would take it for an input."""
    if source.shape.is_fully_defined():
        return tf.constant(source.shape.as_list(), tf.int64)
    return tf.shape(source, tf.int64)


def taken(kind: str, arrays: Iterator[Array]) -> Gradient:
    """A gradient of this kind from the next arrays."""
    found = take(kind, arrays)
    if kind == SPARSE:
        return Rows(*found)
    return found[0] if found else None


def take(kind: str, items: Iterator[T]) -> list[T]:
    """The next items, as many as make a gradient of this kind."""
    return list(itertools.islice(items, (NONE + DENSE + SPARSE).index(kind)))


def arrays_of(gradient: Gradient) -> list[Array]:
    """The arrays of a gradient that there is."""
    return [*gradient] if isinstance(gradient, Rows) else [gradient]
