"""`combine_sparse`: the ranks exchange only the rows that were looked up in an embedding with ``sparse=True``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import HvdliteError, MismatchError

_DENSE = -1
"""A rank sends this for a dense gradient, in place of the number of sparse dimensions."""


@torch.no_grad()
def combine_sparse(
    parameters: Sequence[torch.Tensor], weight: float, average: bool, process_set: ProcessSet | None
) -> None:
    """Replace the sparse gradients of parameters by the combined ones. Every rank calls this.

    Args:
        parameters: Each ``grad`` is sparse (COO), dense, or None, which counts as zero.
        weight: The number of samples of this rank.
        average: Whether the sum is divided by the sum of the weights.
        process_set: The ranks that take part.

    Raises:
        HvdliteError: An average is wanted, and the weights of all ranks are 0.
        MismatchError: The ranks' gradients of one parameter have different numbers of sparse dimensions.
    """
    own = [parameter.grad for parameter in parameters]
    # A rank with a dense gradient, or none, learns from the others how many dimensions are sparse.
    about: tuple[float, list[int | None]] = weight, [None if each is None else _sparse_dim(each) for each in own]
    everybody = hvdlite.allgather_object(about, "optimizer.sparse", process_set=process_set)
    total = sum(share for share, _ in everybody)
    for number, (parameter, gradient) in enumerate(zip(parameters, own, strict=True)):
        said = {dimension for _, dimensions in everybody if (dimension := dimensions[number]) is not None}
        if not said:
            parameter.grad = None
            continue
        found = said - {_DENSE} or {1}
        if len(found) > 1:
            raise MismatchError(
                f"the ranks' gradients of a parameter of shape {tuple(parameter.shape)} have {sorted(found)} sparse "
                "dimensions: every rank needs the same."
            )
        (sparse_dim,) = found
        if gradient is None or (average and weight == 0):  # the gradient of a rank without samples may be anything
            indices = torch.zeros(0, sparse_dim, dtype=torch.int64, device=parameter.device)
            values = parameter.new_zeros(0, *parameter.shape[sparse_dim:], requires_grad=False)
        else:
            entries = (gradient if gradient.is_sparse else gradient.to_sparse(sparse_dim)).coalesce()
            indices, values = entries.indices().t().contiguous(), entries.values()
        indices, values = hvdlite.allgather(
            [indices, values * weight if average else values],
            f"optimizer.sparse.{number}",
            process_set=process_set,
        )
        if average:
            if total <= 0:
                raise HvdliteError("the weights of all ranks add up to 0, so their sparse gradients have no average.")
            values = values / total
        parameter.grad = None  # the present gradient may have another layout
        parameter.grad = torch.sparse_coo_tensor(
            indices.t(), values, parameter.shape, check_invariants=False
        ).coalesce()


def _sparse_dim(gradient: torch.Tensor) -> int:
    return gradient.sparse_dim() if gradient.layout is torch.sparse_coo else _DENSE
