"""Rows of tables: the sparse gradients of embeddings, and of dense layers on sparse inputs, which the ranks gather."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.api import Average, Sum, allgather, allreduce
from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.tensors.numpy_adapter import dtype_of


class TableRows(NamedTuple):
    """Some rows of the gradient of a table.

    Attributes:
        indices: The numbers of the rows; int64 of shape (n,). If a number occurs more than once, its values are summed.
        values: The rows; shape (n, …), where … is the shape of a row of the table.
    """

    indices: Array
    values: Array


def as_rows(info: TensorInfo, gradient: Any) -> TableRows:
    """Return any gradient of a table as `TableRows`. `info` is the table's dtype and shape."""
    if isinstance(gradient, TableRows):
        return gradient
    if gradient is None:
        return TableRows(np.zeros(0, np.int64), np.zeros((0, *info.shape[1:]), dtype_of(info)))
    return TableRows(np.arange(len(gradient)), gradient)


def exchange_rows(
    infos: Sequence[TensorInfo],
    own: Sequence[Any],
    weight: float,
    op: ReduceOp,
    kept: Collection[int],
    name: str,
    process_set: ProcessSet | None,
) -> list[TableRows | None]:
    """Return the rows of all ranks. Every rank calls this.

    Args:
        infos: Dtype and shape of each table.
        own: This rank's gradient of each table: `TableRows`, an array, or None.
        weight: The weight of this rank in an average.
        op: Sum or Average.
        kept: The places of tables whose rows of equal index stay apart. Those of other tables are added up if on no rank a row
            comes twice: then one process would have each row once too.
        name: The name of the exchange.
        process_set: The ranks that participate; all if None.

    Returns:
        For each table the rows; None if no rank has a gradient.

    Raises:
        HvdliteError: The weights of all ranks are 0.
    """
    if not infos:
        return []
    there = [gradient is not None for gradient in own]
    apart = [place in kept or comes_twice(gradient) for place, gradient in enumerate(own)]
    counts = allreduce(np.array([weight, *there, *apart], np.float64), Sum, name, process_set=process_set)
    total, anywhere, as_they_are = float(counts[0]), counts[1 : 1 + len(own)] > 0, counts[1 + len(own) :] > 0
    factor = 1.0
    if op is Average:
        if total <= 0 and anywhere.any():
            raise HvdliteError("the weights of all ranks add up to 0, so their sparse gradients have no average.")
        factor = weight / total if total else 0.0
    mine: list[Array] = []
    for info, gradient in zip(infos, own, strict=True):
        indices, values = as_rows(info, gradient)
        mine += [indices, values if factor == 1.0 else values * np.asarray(factor, values.dtype)]
    # This cannot be one operation with the allreduce, because `factor` needs the sum of the weights.
    gathered = iter(allgather(mine, f"all {name}", process_set=process_set))
    found = map(TableRows, gathered, gathered)
    added = [rows if keep else added_up(rows) for rows, keep in zip(found, as_they_are, strict=True)]
    return [rows if has else None for rows, has in zip(added, anywhere, strict=True)]


def comes_twice(gradient: Any) -> bool:
    """Return whether a row of a gradient comes more than once."""
    return isinstance(gradient, TableRows) and len(np.unique(gradient.indices)) < len(gradient.indices)


def added_up(rows: TableRows) -> TableRows:
    """Return the rows with each index once, in ascending order; values of equal index are summed in their order."""
    order = np.argsort(rows.indices, kind="stable")
    indices, starts = np.unique(rows.indices[order], return_index=True)
    if len(indices) == len(order):
        return rows
    values = rows.values[order]
    wide = values.astype(np.float32) if values.dtype.itemsize == 2 else values
    return TableRows(indices, np.add.reduceat(wide, starts).astype(values.dtype))
