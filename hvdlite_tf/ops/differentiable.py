"""Exchanges as functions that TensorFlow can differentiate, eagerly and in graphs.

The gradient of an exchange is an exchange too, so every rank must compute it. That exchange is differentiable again, so
gradients of gradients are right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import ProcessSet
from hvdlite.adapter.arguments import size_of
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.ops.arguments import is_group, tensors_of
from hvdlite_tf.ops.ordered import name_of_call, ordered

Tensors = list[tf.Tensor]
Run = Callable[[list[Array], str | None], Sequence[Array]]
"""The exchange of a list of arrays under a name (or None), which returns the resulting arrays."""
Backward = Callable[[Tensors, Tensors], Tensors]
"""A function from the gradients of the results, and the results, to the gradients of the tensors."""


def differentiable(
    given: Any,
    run: Run,
    spec_of: Callable[[tf.Tensor], tf.TensorSpec],
    backward: Callable[[Tensors], Tensors],
    process_set: ProcessSet,
    name: str | None = None,
    compression: Compressor = Compression.none,
) -> Any:
    """Exchange one tensor or a list of tensors, with one result for each tensor.

    Args:
        given: A tensor or variable, or a list of them.
        run: The exchange.
        spec_of: A function from a tensor to the spec of its result, with the dimensions that are known.
        backward: Differentiable functions from the gradients of the results to the gradients of the tensors.
        process_set: The ranks that take part.
        name: The name that the program gave, or None.
        compression: Compresses the tensors, and their gradients too, because casts are differentiable.

    Returns:
        The result, or a list of results.

    Raises:
        ArgumentError: `compression` has no method `compress`, or this rank is not in the set.
        UnsupportedTensorError: `given` is not a tensor.
    """
    if not callable(getattr(compression, "compress", None)):
        raise ArgumentError(
            f"compression={compression!r}: expected hvd.Compression.none, fp16 or bf16, or what has compress and decompress."
        )
    size_of(process_set)  # an error is raised here, also while a graph is built
    pairs = [compression.compress(tensor) for tensor in tensors_of(given)]
    tensors = [tensor for tensor, _ in pairs]
    results = exchange(
        tensors, run, [spec_of(tensor) for tensor in tensors], lambda gradients, _: backward(gradients), name
    )
    whole = [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
    return whole if is_group(given) else whole[0]


def exchange(
    tensors: Tensors, run: Run, specs: Sequence[tf.TensorSpec], backward: Backward, name: str | None = None
) -> Tensors:
    """Exchange tensors, with any number of results.

    Args:
        tensors: The tensors that `run` gets as arrays.
        run: The exchange.
        specs: One spec for each result, with the dimensions that are known.
        backward: Returns gradients for the first tensors; the remaining tensors have no gradient.
        name: The name that the program gave, or None.

    Returns:
        The results.
    """
    label = name_of_call(name)

    def call(*given: tf.Tensor) -> Tensors:
        return ordered(lambda *arrays: run(list(arrays), label), given, specs, channel=label or "")

    def call_and_gradient(*given: tf.Tensor) -> Any:
        results = call(*given)

        def gradient(*gradients: Any) -> Any:
            # Integers have no gradient, but all ranks must exchange the same number of tensors.
            present = [
                tf.zeros_like(result) if each is None or not _has_gradient(result) else tf.convert_to_tensor(each)
                for each, result in zip(gradients, results, strict=True)
            ]
            found = backward(present, results)
            found = [each if _has_gradient(tensor) else None for each, tensor in zip(found, given, strict=False)]
            return [*found, *[None] * (len(given) - len(found))]

        return results, gradient

    if any(map(_has_gradient, tensors)):
        return list(tf.custom_gradient(call_and_gradient)(*tensors))
    return call(*tensors)


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)
