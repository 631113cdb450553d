"""Which reductions make sense for which dtypes."""

from __future__ import annotations

from hvdlite.algorithms.adasum import check_adasum
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import ReduceOp


def check_op(op: ReduceOp) -> None:
    """Let a ReduceOp pass.

    Raises:
        ArgumentError: It is none.
    """
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op={op!r}: expected one of {', '.join(f'hvdlite.{each!r}' for each in ReduceOp)}.")


def check_reducible(dtype: str, op: ReduceOp) -> None:
    """Let a dtype pass that `op` makes sense for.

    Raises:
        UnsupportedTensorError: It makes none.
    """
    if op is ReduceOp.ADASUM:
        check_adasum(dtype)
    if dtype == "bool" and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UnsupportedTensorError(
            f"{op!r} of bool is not defined: use Max for 'any', Min for 'all', or cast to an integer to count."
        )
    if dtype.startswith("complex") and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedTensorError(f"{op!r} of {dtype} is not defined: complex numbers have no order.")
