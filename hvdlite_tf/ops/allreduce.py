"""Allreduce of one tensor and of a group of tensors, with gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.arguments import Everybody, check_linear, choose_op, factors, group_of
from hvdlite.protocols import Array
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.ops.differentiable import Tensors, differentiable
from hvdlite_tf.ops.ordered import as_written
from hvdlite_tf.ops.sparse import allreduce_slices, refuse_slices

T = TypeVar("T")


@as_written
def allreduce(
    tensor: T,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = Everybody,
    ignore_name_scope: bool = False,
    *,
    algorithm: str | None = None,
) -> T:
    """Reduce a tensor elementwise over the ranks. See `hvdlite.allreduce` for the other arguments, the result and the errors.

    The function is differentiable for Sum and Average: the gradient of `tensor` is the same allreduce of the ranks' gradients.

    Args:
        tensor: See `hvdlite.allreduce`. The tensor may also be a tf.IndexedSlices, such as the gradient of an embedding, with
            any number of rows: the result has the rows of all ranks, for Average divided by the number of ranks (integers
            become floats, because rounded rows would not add up to the average).
        average: The old spelling of `op`: True means Average, False means Sum.
        device_dense, device_sparse, ignore_name_scope: Horovod's arguments, which have no effect.
        compression: The dtype in which the ranks exchange the tensor, and its gradient; see `Compression`.
        op: The reduction; None means Average. A tf.IndexedSlices takes Sum and Average.

    Raises:
        ArgumentError: `average` and `op` are both given, or one of them has a value that is not allowed; or a tf.IndexedSlices
            comes with another `op`, a factor or an algorithm.
        tf.errors.OpError: An error was only seen when a graph ran; the text is that of hvdlite's error.

    Examples:
        >>> on_ranks(2, lambda: hvd.allreduce(tf.constant([1.0, hvd.rank()])).numpy().tolist())
        [[1.0, 0.5], [1.0, 0.5]]
        >>> on_ranks(2, lambda: hvd.allreduce(tf.constant([1.0, hvd.rank()]), op=hvd.Sum).numpy().tolist())
        [[2.0, 1.0], [2.0, 1.0]]
    """
    chosen = choose_op(op, average, stacklevel=4)
    options = factors(prescale_factor, postscale_factor, process_set) | {"algorithm": algorithm}
    reduced: T = _reduce(tensor, chosen, name, compression, options)
    return reduced


@as_written
def grouped_allreduce(
    tensors: Iterable[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Run `allreduce` on several tensors of any dtypes as one operation. Return the list of results. See `allreduce`.

    Some of the tensors may be tf.IndexedSlices, at the same positions of the list on every rank.

    Examples:
        >>> def sums():
        ...     both = hvd.grouped_allreduce([tf.ones(2), tf.constant([hvd.rank()])], op=hvd.Sum)
        ...     return [each.numpy().tolist() for each in both]
        >>> on_ranks(2, sums)
        [[[2.0, 2.0], [1]], [[2.0, 2.0], [1]]]
    """
    chosen = choose_op(op, average, stacklevel=4)
    options = factors(prescale_factor, postscale_factor, process_set)
    group = group_of(tensors)
    sparse = [place for place, tensor in enumerate(group) if isinstance(tensor, tf.IndexedSlices)]
    dense = [place for place in range(len(group)) if place not in sparse]
    if sparse:
        refuse_slices(chosen, prescale_factor, postscale_factor)  # before the dense tensors are reduced
    reduced = _reduce([group[place] for place in dense], chosen, name, compression, options)
    slices: list[Any] = []
    if sparse:
        part = None if name is None else f"{name}.sparse"
        slices = allreduce_slices([group[place] for place in sparse], chosen, part, compression, **options)
    found = dict(zip([*sparse, *dense], [*slices, *reduced], strict=True))
    return [found[place] for place in range(len(group))]


def _reduce(given: Any, op: ReduceOp, name: str | None, compression: Compressor, options: dict[str, Any]) -> Any:
    if isinstance(given, tf.IndexedSlices):
        return allreduce_slices([given], op, name, compression, **options)[0]

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        return hvdlite.allreduce(arrays, op, label, **options)

    def backward(gradients: Tensors) -> Tensors:
        check_linear("allreduce", op)
        reduced: Tensors = _reduce(gradients, op, None, Compression.none, options)
        return reduced

    return differentiable(given, run, tf.TensorSpec.from_tensor, backward, options["process_set"], name, compression)
