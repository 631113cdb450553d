"""Sums of sparse tensors: the entries of all ranks are gathered, and entries of equal index are added."""

from __future__ import annotations

import torch

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.arguments import size_of
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite_torch.ops.handles import CompositeHandle


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = hvdlite.global_process_set
) -> CompositeHandle:
    """Start the reduction of a sparse tensor over the ranks, such as the gradient of an embedding.

    Args:
        tensor: A tensor in COO layout, coalesced or not, with any number of entries. The dtype, the shape and the number of
            sparse dimensions are the same on every rank.
        name: Calls of equal name belong together on all ranks; calls with None belong together by their order.
        op: Sum, or for floating-point and complex dtypes Average.
        process_set: The ranks that take part.

    Returns:
        A handle. Calling it, or `synchronize`, waits for the sparse result, which is coalesced.

    Raises:
        UnsupportedTensorError: `tensor` has another layout, or `op` is not defined for its dtype.
        ArgumentError: `op` is neither Sum nor Average.
        MismatchError: The ranks' tensors are not alike. The handle raises it, on all ranks.

    Examples:
        >>> def summed():
        ...     own = torch.sparse_coo_tensor([[hvd.rank()]], [1.0], (3,), check_invariants=True)
        ...     return hvd.sparse_allreduce_async(own, "rows", hvd.Sum)().to_dense().tolist()
        >>> on_ranks(2, summed)
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    """
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedTensorError(
            f"expected a tensor of layout torch.sparse_coo; got {tensor.layout}. Use tensor.to_sparse_coo(), or allreduce "
            "for a dense one."
        )
    if op not in (hvdlite.Sum, hvdlite.Average):
        raise ArgumentError(f"op={op!r}: sparse tensors are reduced by Sum or Average.")
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    if tensor.dtype is torch.bool or (exact and op is hvdlite.Average):
        raise UnsupportedTensorError(f"{op!r} of sparse tensors of {tensor.dtype} is not defined; cast it.")
    size = size_of(process_set)
    shape = tensor.shape
    # Entries of equal index are added on this rank first, so that fewer are sent. Each entry becomes a row.
    entries = tensor.detach().coalesce()
    indices = entries.indices().t().contiguous()
    parts = [
        hvdlite.allgather_async(torch.tensor([shape]), _named(name, "shape"), process_set=process_set),
        hvdlite.allgather_async(indices, _named(name, "indices"), process_set=process_set),
        hvdlite.allgather_async(entries.values(), _named(name, "values"), process_set=process_set),
    ]

    def combine(shapes: torch.Tensor, all_indices: torch.Tensor, all_values: torch.Tensor) -> torch.Tensor:
        if not bool((shapes == shapes[0]).all()):
            raise hvdlite.MismatchError(
                f"sparse_allreduce_async(name={name!r}): the ranks' tensors have different shapes, by rank: {shapes.tolist()}."
            )
        summed = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=False).coalesce()
        return summed / size if op is hvdlite.Average else summed

    return CompositeHandle(parts, combine)


def _named(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"
