"""allreduce in its forms.

The names, and the order and defaults of the arguments, are Horovod's. Works eagerly, in a tf.function and in a graph for a
session; differentiable for Sum and Average.
"""

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
from hvdlite_tf.ops.sparse import allreduce_slices

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
    """Reduce a tensor elementwise over the ranks. Differentiable for Sum and Average.

    The gradient is the same allreduce of the ranks' gradients: that of the sum of all ranks' losses.

    Args:
        tensor: Any shape and dtype, the same on every rank: a tensor, a variable, or what `tf.convert_to_tensor` takes; or a
            list of tensors, exchanged as one. Or a tf.IndexedSlices, such as the gradient of an embedding, with any number of
            rows: the rows of all ranks are put together, each divided by the number of ranks for Average.
        average: An old spelling of `op`: True for Average, False for Sum.
        device_dense, device_sparse: Horovod's. Exchanges are done in host memory, so they change nothing.
        compression: How the tensor travels; see `Compression`.
        op: Sum, Average, Min, Max, Product or Adasum; Average by default. See `hvdlite.allreduce`.
        prescale_factor: Multiplies each rank's values before they are reduced.
        postscale_factor: Multiplies the result.
        name: Calls of equal name belong together on all ranks; without names, calls belong together by their order.
        process_set: The ranks that take part.
        ignore_name_scope: Horovod's. Names here have no scope, so it changes nothing.
        algorithm: As in `hvdlite.allreduce`.

    Returns:
        A new tensor (or a list) of the same dtype and shape; a tf.IndexedSlices for one.

    Raises:
        ArgumentError: `average` and `op` are both given, or are none of those; or a tf.IndexedSlices is to be scaled, or
            reduced by another operation.
        UnsupportedTensorError: `tensor` is none, or `op` is not defined for its dtype.
        MismatchError: The ranks' calls do not belong together; raised on all of them.
        DuplicateNameError: `name` is in flight.
        tf.errors.OpError: In place of these, with their text, where it is only seen when a graph runs.
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
    """`allreduce` of several tensors at once, of any dtypes and shapes. Arguments as there; returns a list.

    There may be tf.IndexedSlices among them, at the same places on every rank.
    """
    chosen = choose_op(op, average, stacklevel=4)
    options = factors(prescale_factor, postscale_factor, process_set)
    group = group_of(tensors)
    sparse = [place for place, tensor in enumerate(group) if isinstance(tensor, tf.IndexedSlices)]
    dense = [place for place in range(len(group)) if place not in sparse]
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
