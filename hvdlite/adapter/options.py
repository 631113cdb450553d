"""The options with which a program chooses how gradients are exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.api import Adasum, Average, Sum
from hvdlite.errors import ArgumentError
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.compression import Compression, Compressor


@dataclass(frozen=True)
class Options:
    """The options of a gradient exchange.

    Attributes:
        op: The reduction: Average, Sum, or Adasum.
        process_set: The ranks that participate; all if None.
        compression: The compression of gradients.
        sparse_as_dense: Whether sparse gradients are made dense.
        gradient_predivide_factor: With compression and Average, gradients are divided by this factor before the compression and
            multiplied by it in the end, so that sums fit into the smaller dtype. Without compression the factor has no effect.

    Raises:
        ArgumentError: The options do not fit together.
    """

    op: ReduceOp = Average
    process_set: ProcessSet | None = None
    compression: Compressor = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum, Adasum):
            raise ArgumentError(f"op={self.op!r}: gradients are combined by Average or Sum, or by Adasum.")
        factor = self.gradient_predivide_factor
        if factor != 1.0 and self.op is not Average:
            raise ArgumentError(f"gradient_predivide_factor={factor} needs op=Average; got {self.op!r}.")
        if not factor > 0:
            raise ArgumentError(f"gradient_predivide_factor={factor}: expected a number above 0.")

    @property
    def divisor(self) -> float:
        """The number by which gradients are divided before the compression, and multiplied in the end."""
        return 1.0 if self.compression is Compression.none else self.gradient_predivide_factor

    def check_weighted(self) -> None:
        """Raise ArgumentError unless `op` is Average: a batch weight has no meaning for other reductions."""
        if self.op is not Average:
            raise ArgumentError(f"a batch weight has no meaning for op={self.op!r}: it is for averages.")


def check_passes(passes: int) -> None:
    """Raise ArgumentError unless `passes`, the number of backward passes per step, is at least 1."""
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes}: expected 1 or more.")
