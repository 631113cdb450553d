"""How an operation reduces: which ops and dtypes, in which dtype, divided by what."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hvdlite.algorithms.adasum import check_adasum
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gpu.reduce_dtype import Wire
from hvdlite.operations.absent import neutral_element
from hvdlite.operations.device_reduction import Scaling
from hvdlite.protocols import Array, ReduceOp
from hvdlite.tensors.arithmetic import arithmetic as kernel_of
from hvdlite.tensors.numpy_adapter import HALF_DTYPES


class WireArithmetic:
    """The reduction of one flat array: scale, reduce over the ranks, divide, scale. Equal by value, as fusion needs."""

    def __init__(self, op: ReduceOp, prescale: float, postscale: float, algorithm: str) -> None:
        self.op, self._algorithm = op, algorithm
        self._prescale, self._postscale = prescale, postscale
        self.scales_first = prescale != 1.0
        self._reduces = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
        self._finishes = op is ReduceOp.AVERAGE or postscale != 1.0
        self.scaling = Scaling(op, prescale, postscale)

    def wire(self, dtype: str, channel: DeviceCollectives) -> Wire | None:
        """How a dtype is reduced on a GPU; None if through the host, as its own algorithms and integers times a factor are."""
        scales = self._prescale != 1.0 or self._postscale != 1.0
        if self._algorithm != "auto" or (scales and dtype.startswith(("int", "uint", "bool"))):
            return None
        return channel.wire(dtype, self.op)

    def _key(self) -> Hashable:
        return self.op, self._algorithm, self._prescale, self._postscale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WireArithmetic) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def allreduce(
        self,
        flat: Array,
        dtype: str | None,
        collectives: HierarchicalCollectives,
        nothing: Sequence[slice] = (),
    ) -> None:
        """Reduce `flat` in place. This rank adds no values where `nothing` says so."""
        _scale(flat, self._prescale)
        for where in nothing:
            self._neutralize(flat[where], dtype)
        finish = functools.partial(self._finish, collectives.size) if self._finishes else None
        collectives.allreduce(flat, self._reduces, self._algorithm, dtype, finish)

    def adasum(self, tensors: Sequence[Array], collectives: HierarchicalCollectives) -> None:
        """Combine flat tensors in place."""
        for tensor in tensors:
            _scale(tensor, self._prescale)
        collectives.adasum(tensors)
        for tensor in tensors:
            self._finish(collectives.size, tensor)

    def reduce_scatter(
        self, flat: Array, counts: Sequence[int], collectives: HierarchicalCollectives, nothing: bool = False
    ) -> Array:
        """This rank's slice of the result. `flat` may be changed; this rank adds no values if `nothing`."""
        _scale(flat, self._prescale)
        if nothing:
            self._neutralize(flat, None)
        out = np.empty(counts[collectives.rank], flat.dtype)
        collectives.reduce_scatter(flat, out, counts, self._reduces)
        self._finish(collectives.size, out)
        return out

    def _neutralize(self, flat: Array, dtype: str | None) -> None:
        if dtype is None:
            flat[...] = neutral_element(self.op, flat.dtype)
        else:  # halves
            kernel = kernel_of(dtype, self._reduces)
            kernel.narrow(np.full(flat.size, neutral_element(self.op, kernel.wide), kernel.wide), flat)

    def _finish(self, size: int, flat: Array) -> None:
        if self.op is ReduceOp.AVERAGE:
            _divide(flat, size)
        _scale(flat, self._postscale)


def _scale(flat: Array, factor: float) -> None:
    if factor != 1.0:
        # Integers are scaled as float64 and cast back.
        np.multiply(flat, factor, out=flat, casting="unsafe")


def _divide(flat: Array, size: int) -> None:
    if flat.dtype.kind not in "iu":
        np.divide(flat, size, out=flat)
        return
    np.floor_divide(flat, size, out=flat)


@functools.cache
def wire_dtype(dtype: str, op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which values of `dtype` are reduced."""
    if dtype in HALF_DTYPES:
        return np.dtype(np.float32)
    if dtype == "bool":
        return np.dtype(np.uint8)
    wire = np.dtype(dtype)
    if op is ReduceOp.AVERAGE and wire.kind in "iu" and wire != np.uint64:
        return np.dtype(np.int64)
    return wire


def wire_bytes(dtype: str, op: ReduceOp) -> int:
    return 1 if dtype.startswith("float8") else wire_dtype(dtype, op).itemsize


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
