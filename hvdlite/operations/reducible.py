"""The checks that a reduction makes sense for a dtype."""

from __future__ import annotations

from hvdlite.algorithms.adasum import check_adasum
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import ReduceOp


def check_op(op: ReduceOp) -> None:
    """Raise ArgumentError unless `op` is a `ReduceOp`."""
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op={op!r}: expected one of {', '.join(f'hvdlite.{each!r}' for each in ReduceOp)}.")


def check_reducible(dtype: str, op: ReduceOp) -> None:
    """Raise UnsupportedTensorError unless `op` makes sense for values of `dtype`."""
    if op is ReduceOp.ADASUM:
        check_adasum(dtype)
    if dtype == "bool" and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UnsupportedTensorError(
            f"{op!r} of bool is not defined: use Max for 'any', Min for 'all', or cast to an integer to count."
        )
    if dtype.startswith("complex") and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedTensorError(f"{op!r} of {dtype} is not defined: complex numbers have no order.")
