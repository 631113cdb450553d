"""A `Reduction` describes how the values of the ranks become one. The collectives that move the data apply it.

An operation makes a `Reduction` from the dtype of its tensors, its op and its factors. These are the steps, and who does them::

    operation   scale(x) by `before`                                   x of `dtype`, or of `wide` if it is scaled
    collective  combine(x of several ranks) → finish() → narrow()      `dtype` → `wide`: ÷ `divide_by`, × `after` → `dtype`

float16 and bfloat16 are accumulated as float32 and rounded once, to the nearest even number, at the end. Averages of integers
are accumulated in 64 bits and rounded down, as ``//`` does (uint64 as uint64).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdlite.protocols import Array, HalfConverter, ReduceOp, TensorInfo, ufunc_of
from hvdlite.tensors.halves import half_converter
from hvdlite.tensors.numpy_adapter import HALF_DTYPES

NCCL_WITH_FLOAT8 = 22400
"""The number of NCCL 2.24.0, the first version that adds floating-point numbers of 8 bits."""

_INTEGERS = ("int", "uint")


@dataclass(frozen=True)
class Reduction:
    """Describes how the values of the ranks become one. The function `reduction` makes such objects.

    Attributes:
        op: The op that the caller has chosen.
        dtype: The name of the dtype of the values, as in `TensorInfo`.
        wide: The name of the dtype in which they are accumulated.
        before: The factor of each rank's values.
        after: The factor of the result.
        divide_by: The divisor of the result, applied before `after`: the number of ranks if `op` is AVERAGE, else 1.
    """

    op: ReduceOp
    dtype: str
    wide: str
    before: float = 1.0
    after: float = 1.0
    divide_by: int = 1

    @functools.cached_property
    def storage(self) -> np.dtype[Any]:
        """The dtype of the arrays that hold the values. bfloat16 is held as bits in uint16, bool as uint8."""
        return np.dtype({"bfloat16": "uint16", "bool": "uint8"}.get(self.dtype, self.dtype))

    @functools.cached_property
    def wide_dtype(self) -> np.dtype[Any]:
        """The dtype of the arrays in which the values are accumulated: `wide` as a NumPy dtype."""
        return np.dtype(self.wide)

    @property
    def wide_bytes(self) -> int:
        """The size in bytes of one value while it is accumulated."""
        return 1 if self.wide.startswith("float8") else self.wide_dtype.itemsize

    @functools.cached_property
    def exact(self) -> bool:
        """Whether `storage` and `wide_dtype` are the same, so that a result can be accumulated in place."""
        return self.dtype not in HALF_DTYPES and self.storage == self.wide_dtype

    @functools.cached_property
    def combining(self) -> ReduceOp:
        """The op that combines the values: an average is a sum that is divided."""
        return ReduceOp.SUM if self.op is ReduceOp.AVERAGE else self.op

    @functools.cached_property
    def finishes(self) -> bool:
        """Whether `finish` changes the values."""
        return self.divide_by != 1 or self.after != 1.0

    @functools.cached_property
    def widened(self) -> Reduction:
        """The same reduction for values that are in the wide dtype already, so that they are rounded only once."""
        return replace(self, dtype=self.wide)

    def among(self, size: int) -> Reduction:
        """Return the same reduction for `size` ranks: an average is divided by this number."""
        if self.op is not ReduceOp.AVERAGE:
            return self
        return reduction(self.dtype, self.op, self.before, self.after, size)

    @functools.cached_property
    def _ufunc(self) -> np.ufunc:
        return ufunc_of(self.combining)

    @functools.cached_property
    def _half(self) -> HalfConverter | None:
        return half_converter(self.dtype) if self.dtype in HALF_DTYPES else None

    def scale(self, values: Array) -> None:
        """Multiply the values of this rank by `before`, in place. Integers are scaled as float64 and cast back."""
        if self.before != 1.0:
            _multiply(values, self.before)

    def combine(self, sources: Sequence[Array], into: Array) -> None:
        """Reduce arrays in their order.

        Args:
            sources: One or more 1-D arrays of dtype `storage` and equal length.
            into: The result, of dtype `wide_dtype` and the same length. It may be one of the first two sources, if `exact`.
        """
        if not self.exact:
            self._combine_wide(sources, into)
        elif len(sources) == 1:
            if into is not sources[0]:
                np.copyto(into, sources[0])
        else:
            ufunc = self._ufunc
            ufunc(sources[0], sources[1], out=into)
            for source in sources[2:]:
                ufunc(into, source, out=into)

    def _combine_wide(self, sources: Sequence[Array], into: Array) -> None:
        half = self._half
        if half is None:
            np.copyto(into, sources[0])
        else:
            half.widen(sources[0], into)
        for source in sources[1:]:
            if half is None:
                self._ufunc(into, source, out=into)
            else:
                half.accumulate(self._ufunc, into, source)

    def finish(self, wide: Array) -> None:
        """Turn the combined values into the result, in place: divide by `divide_by`, then multiply by `after`."""
        if self.divide_by != 1:
            (np.floor_divide if wide.dtype.kind in "iu" else np.divide)(wide, self.divide_by, out=wide)
        if self.after != 1.0:
            _multiply(wide, self.after)

    def narrow(self, wide: Array, into: Array) -> None:
        """Copy an array of dtype `wide_dtype` to one of dtype `storage`."""
        if self._half is None:
            np.copyto(into, wide, casting="unsafe")
        else:
            self._half.narrow(wide, into)

    def can_be_direct(self, sources: Sequence[Array]) -> bool:
        """Return whether sources can be combined into any one of them. See `combine`."""
        return self.exact and len(sources) <= 2

    def complete(self, sources: Sequence[Array], wide: Array, into: Array) -> None:
        """Do all that comes after `scale`: combine arrays, finish the result, and put it into an array of dtype `storage`.

        Args:
            sources: See `combine`.
            wide: An array of dtype `wide_dtype`, in which they are accumulated; `into` itself if `combine` allows it.
            into: The result.
        """
        self.combine(sources, wide)
        if self.finishes:
            self.finish(wide)
        if wide is not into:
            self.narrow(wide, into)

    def neutral(self) -> float:
        """Return the neutral element of `op`: 0 or 1, or for MIN and MAX the far end of the range of the dtype.

        For Adasum it is 0: the combination of a vector and zeros is the vector (arXiv:2006.02924).
        """
        if self.op is ReduceOp.PRODUCT:
            return 1
        if self.op not in (ReduceOp.MIN, ReduceOp.MAX):
            return 0
        if self.wide_dtype.kind in "iu":
            limits = np.iinfo(self.wide_dtype.name)
            return limits.max if self.op is ReduceOp.MIN else limits.min
        return math.inf if self.op is ReduceOp.MIN else -math.inf

    def neutralize(self, values: Array) -> None:
        """Overwrite an array of dtype `storage` with the neutral element."""
        if self.exact:
            values[...] = self.neutral()
        else:
            self.narrow(np.full(values.size, self.neutral(), self.wide_dtype), values)

    def on_device(self, nccl_version: int) -> str | None:
        """Return the name of the dtype in which NCCL reduces the values, or None if they go by way of the host.

        Complex numbers are added as pairs of real numbers. 16-bit integers are exchanged as 32 bits, and wrap around as usual
        when they are cast back. For bool, Min, Max and Product of bytes that are 0 or 1 mean "all", "any" and "all". Averages
        of integers are summed in 64 bits, as on the host. Min and Max of floating-point numbers go by way of the host, because
        NCCL's lose a NaN, as CUDA's fmin and fmax do. Integers with a factor go by way of the host, too.

        Args:
            nccl_version: The version as NCCL numbers it: 22809 is 2.28.9.
        """
        dtype, op = self.dtype, self.op
        is_integer = dtype.startswith(_INTEGERS)
        if op is ReduceOp.ADASUM or (op is ReduceOp.PRODUCT and dtype.startswith("complex")):
            return None
        if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.startswith(("float", "bfloat")):
            return None
        if (is_integer or dtype == "bool") and (self.before != 1.0 or self.after != 1.0):
            return None
        if dtype.startswith("complex"):
            return "float32" if dtype == "complex64" else "float64"
        if dtype.startswith("float8"):
            return dtype if nccl_version >= NCCL_WITH_FLOAT8 else None
        if op is ReduceOp.AVERAGE and is_integer:
            return None if dtype == "uint64" else "int64"
        return {"bool": "uint8", "int16": "int32", "uint16": "int32"}.get(dtype, dtype)

    @property
    def casts_on_device(self) -> bool:
        """Whether values are cast to the dtype of `on_device` and back. If not, the same bytes are viewed as that dtype.

        NCCL does not average integers, so their sum is divided after NCCL has computed it.
        """
        is_average = self.op is ReduceOp.AVERAGE and self.dtype.startswith(_INTEGERS)
        return is_average or self.dtype in ("int16", "uint16")


@functools.lru_cache(maxsize=4096)  # a program asks for the same few again and again
def reduction(dtype: str, op: ReduceOp, before: float = 1.0, after: float = 1.0, size: int = 1) -> Reduction:
    """Return the reduction of values of a dtype.

    Args:
        dtype: The name of the dtype, as in `TensorInfo` or `Device`.
        op: How the values become one.
        before: The factor of each rank's values.
        after: The factor of the result.
        size: The number of ranks, by which an average is divided.
    """
    wide = dtype
    if dtype in HALF_DTYPES:
        wide = "float32"
    elif dtype == "bool":
        wide = "uint8"
    elif op is ReduceOp.AVERAGE and dtype.startswith(_INTEGERS) and dtype != "uint64":
        wide = "int64"
    return Reduction(op, dtype, wide, before, after, size if op is ReduceOp.AVERAGE else 1)


def nbytes_of(info: TensorInfo) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(info.shape) * reduction(info.dtype, ReduceOp.SUM).storage.itemsize


def _multiply(values: Array, factor: float) -> None:
    np.multiply(values, factor, out=values, casting="unsafe")
