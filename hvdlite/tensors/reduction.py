"""A `Reduction` describes how the values of the ranks become one. The collectives that move the data apply it.

An operation makes a `Reduction` from the dtype of its tensors, its op and its factors. These are the steps, and who does them::

    operation   scale(x) by `before`                                   x of `dtype`, or of `wide` if it is scaled
    collective  combine(x of several ranks) → finish() → narrow()      `dtype` → `wide`: ÷ `divide_by`, × `after` → `dtype`

float16 and bfloat16 are accumulated as float32 and rounded once, to the nearest even number, at the end. Averages of integers
are accumulated in 64 bits and rounded toward zero, as torch's ``div(rounding_mode="trunc")`` does.

An average fits in its dtype where the sum may not. `complete`, which has the values of all ranks, sees where a sum of
floating-point numbers has overflowed, and computes these from values that are scaled by a power of two first. Sums that travel
by messages are always scaled so (`partial`, `conclude`). 64-bit integers are averaged as quotients and remainders by the number
of ranks, each of which can be summed (`average_long`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
    def is_long_average(self) -> bool:
        """Whether the values are averaged that no wider integers can sum."""
        return self.divide_by != 1 and self.wide == self.dtype and self.dtype in ("int64", "uint64")

    @functools.cached_property
    def shift(self) -> float:
        """The power of two by which floating-point numbers are scaled, so that their sum fits where their average does."""
        return fitting_factor(self.divide_by) if self.wide_dtype.kind in "fc" else 1.0

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
            _divide(wide, self.divide_by, wide)
        if self.after != 1.0:
            _multiply(wide, self.after)

    def partial(self, sources: Sequence[Array], into: Array) -> None:
        """Combine the values of some ranks, for a sum by messages with those of others. The arguments are those of `combine`.

        An average is scaled by `shift`. `into` is none of several sources then.
        """
        if self.shift == 1.0:
            self.combine(sources, into)
        else:
            _combine_scaled(self, sources, into)

    def conclude(self, wide: Array) -> None:
        """Turn values that `partial` has combined, and then messages, into the result, in place."""
        if (left := self.divide_by * self.shift) != 1.0:
            _divide(wide, int(left) if wide.dtype.kind in "iu" else left, wide)
        if self.after != 1.0:
            _multiply(wide, self.after)

    def narrow(self, wide: Array, into: Array) -> None:
        """Copy an array of dtype `wide_dtype` to one of dtype `storage`."""
        if self._half is None:
            np.copyto(into, wide, casting="unsafe")
        else:
            self._half.narrow(wide, into)

    def can_be_direct(self, sources: Sequence[Array]) -> bool:
        """Return whether sources can be combined into any one of them. See `combine`. Averages need theirs to the end."""
        return self.exact and len(sources) <= 2 and self.divide_by == 1

    def complete(self, sources: Sequence[Array], wide: Array, into: Array) -> None:
        """Do all that comes after `scale`: combine arrays, finish the result, and put it into an array of dtype `storage`.

        Args:
            sources: See `combine`.
            wide: An array of dtype `wide_dtype`, in which they are accumulated; `into` itself if `can_be_direct` allows it, or
                if that is none of the sources.
            into: The result.
        """
        if self.divide_by != 1:
            _average(self, sources, wide, into)
            return
        self.combine(sources, wide)
        if self.finishes:
            self.finish(wide)
        if wide is not into:
            self.narrow(wide, into)

    def may_have_overflowed(self, wide: Array) -> bool:
        """Return whether a sum may have overflowed of which NumPy tells nothing: torch adds halves. Those of float16 fit."""
        return self.dtype == "bfloat16" and not np.isfinite(wide).all()

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
        of integers are summed in 64 bits; those of 64-bit integers, whose sum may not fit, go by way of the host. So do Min and
        Max of floating-point numbers, because NCCL's lose a NaN, as CUDA's fmin and fmax do, and integers with a factor.

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
            return None if dtype in ("int64", "uint64") else "int64"
        return {"bool": "uint8", "int16": "int32", "uint16": "int32"}.get(dtype, dtype)

    @property
    def casts_on_device(self) -> bool:
        """Whether values are cast to the dtype of `on_device` and back. If not, the same bytes are viewed as that dtype.

        NCCL does not average integers, so their sum is divided after NCCL has computed it.
        """
        is_average = self.op is ReduceOp.AVERAGE and self.dtype.startswith(_INTEGERS)
        return is_average or self.dtype in ("int16", "uint16")


def fitting_factor(divisor: float) -> float:
    """Return the largest power of two, at most 1, by which a sum of values fits where its quotient by `divisor` does."""
    if divisor <= 1:
        return 1.0
    mantissa, exponent = math.frexp(divisor)
    return 2.0 ** -(exponent - 1 if mantissa == 0.5 else exponent)


def average_long(how: Reduction, sources: Sequence[Array], into: Array, total: Callable[[Array], Array]) -> None:
    """Average 64-bit integers (`is_long_average`).

    Args:
        how: The reduction.
        sources: The values of some ranks, of which `into` may be one.
        into: The result.
        total: Returns the sum of an array over those who have the values of the other ranks. It may overwrite the array.
    """
    quotients, remainders = np.divmod(sources[0], sources[0].dtype.type(how.divide_by))
    for source in sources[1:]:
        more, rest = np.divmod(source, source.dtype.type(how.divide_by))
        np.add(quotients, more, out=quotients)
        np.add(remainders, rest, out=remainders)
    quotients, remainders = total(quotients), total(remainders)
    more, rest = np.divmod(remainders, remainders.dtype.type(how.divide_by))
    np.add(quotients, more, out=into)
    if into.dtype.kind == "i":  # it is rounded down now
        np.add(into, 1, out=into, where=(into < 0) & (rest != 0))
    if how.after != 1.0:
        _multiply(into, how.after)


def _average(how: Reduction, sources: Sequence[Array], wide: Array, into: Array) -> None:
    """Average arrays. `wide` is none of them."""
    if how.is_long_average:
        average_long(how, sources, into, lambda part: part)
        return
    overflow = Overflow()
    with np.errstate(over="call", call=overflow):
        how.combine(sources, wide)
    target = into if how.exact else wide
    overflows = overflow.seen or how.may_have_overflowed(wide)
    if overflows:
        scaled, fits = np.empty_like(wide), np.isfinite(wide)
        _combine_scaled(how, sources, scaled)
        np.divide(scaled, how.divide_by * how.shift, out=scaled)
    _divide(wide, how.divide_by, target)
    if overflows:
        np.copyto(target, scaled, where=~fits)
    if how.after != 1.0:
        _multiply(target, how.after)
    if target is not into:
        how.narrow(target, into)


def _combine_scaled(how: Reduction, sources: Sequence[Array], into: Array) -> None:
    term = np.empty_like(into) if len(sources) > 1 else into
    for number, source in enumerate(sources):
        how.combine((source,), term if number else into)
        np.multiply(term if number else into, how.shift, out=term if number else into)
        if number:
            np.add(into, term, out=into)


class Overflow:
    """Notes that NumPy has seen a result overflow: the `call` of ``np.errstate(over="call")``."""

    seen = False

    def __call__(self, kind: str, flag: int) -> None:
        self.seen = True


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


def _divide(values: Array, divisor: float, out: Array) -> None:
    """Divide; integers are rounded toward zero."""
    kind = values.dtype.kind
    if kind not in "iu":
        np.divide(values, divisor, out=out)
        return
    negative = values < 0 if kind == "i" else None
    if negative is not None and negative.any():
        np.negative(values, out=values, where=negative)
        np.floor_divide(values, divisor, out=out)
        np.negative(out, out=out, where=negative)
    else:
        np.floor_divide(values, divisor, out=out)


def _multiply(values: Array, factor: float) -> None:
    np.multiply(values, factor, out=values, casting="unsafe")
