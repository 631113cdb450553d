"""How gradients are exchanged, as a program says it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.api import Adasum, Average, Sum
from hvdlite.errors import ArgumentError
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.compression import Compression, Compressor


@dataclass(frozen=True)
class Options:
    """How gradients are exchanged.

    Attributes:
        op: Average, Sum, or Adasum.
        process_set: The ranks that take part; all if None.
        compression: How gradients are compressed.
        sparse_as_dense: Make sparse gradients dense.
        gradient_predivide_factor: With compression and Average: gradients are divided by it before they are compressed, and
            multiplied by it in the end, so that sums fit into the smaller dtype. Without compression it makes no difference.

    Raises:
        ArgumentError: These do not fit together.
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
        """What gradients are divided by before they are compressed, and multiplied by in the end."""
        return 1.0 if self.compression is Compression.none else self.gradient_predivide_factor

    def check_weighted(self) -> None:
        """Raise ArgumentError unless a batch weight has a meaning for `op`."""
        if self.op is not Average:
            raise ArgumentError(f"a batch weight has no meaning for op={self.op!r}: it is for averages.")


def check_passes(passes: int) -> None:
    """Raise ArgumentError unless there can be so many backward passes before a step."""
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes}: expected 1 or more.")
