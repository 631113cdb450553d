"""In which dtype a device reduces."""

from __future__ import annotations

from typing import NamedTuple

from hvdlite.gpu.nccl import FLOAT8_SINCE
from hvdlite.protocols import ReduceOp


class Wire(NamedTuple):
    """How values of a dtype are reduced on the device.

    Attributes:
        dtype: As elements of this dtype.
        cast: They are cast to it, and back; if not, the dtype is the same, or the same bytes are seen as it.
    """

    dtype: str
    cast: bool


def wire_of(dtype: str, op: ReduceOp, version: int) -> Wire | None:
    """How NCCL reduces a dtype, or None if it does not.

    Complex numbers are added as pairs of real ones. 16-bit integers travel as 32 bits, and wrap around as ever when they are
    cast back. For bool, Min, Max and Product of bytes that are 0 or 1 are "all", "any" and "all". Averages of integers are
    summed in 64 bits, as on the host. Min and Max of floating-point numbers go by way of the host: NCCL's lose a NaN, as CUDA's
    fmin and fmax do.

    Args:
        dtype: A name as in `hvdlite.protocols.Device`.
        op: The reduction; of bool no Sum or Average, of complex numbers no Min or Max.
        version: NCCL's.
    """
    if op is ReduceOp.ADASUM or (op is ReduceOp.PRODUCT and dtype.startswith("complex")):
        return None
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.startswith(("float", "bfloat")):
        return None
    if dtype.startswith("complex"):
        return Wire("float32" if dtype == "complex64" else "float64", False)
    if dtype.startswith("float8"):
        return Wire(dtype, False) if version >= FLOAT8_SINCE else None
    if op is ReduceOp.AVERAGE and dtype.startswith(("int", "uint")):
        return None if dtype == "uint64" else Wire("int64", True)
    if dtype == "bool":
        return Wire("uint8", False)
    if dtype in ("int16", "uint16"):
        return Wire("int32", True)
    return Wire(dtype, False)
