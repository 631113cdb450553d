"""The options with which a program chooses how gradients are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, cast

from hvdlite.api import Adasum, Average, Sum
from hvdlite.errors import ArgumentError, NotYetError
from hvdlite.gradients.aggregator import Aggregator, name_of
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
        if not callable(getattr(self.compression, "compress", None)):
            self._refuse_compression()
        factor = self.gradient_predivide_factor
        if factor != 1.0 and self.op is not Average:
            raise ArgumentError(f"gradient_predivide_factor={factor} needs op=Average; got {self.op!r}.")
        if not factor > 0:
            raise ArgumentError(f"gradient_predivide_factor={factor}: expected a number above 0.")

    def _refuse_compression(self) -> NoReturn:
        if hasattr(self.compression, "aggregate"):
            raise NotYetError(
                f"compression={name_of(cast(Aggregator, self.compression))} combines all gradients of a step, which only "
                "hvdlite_torch.DistributedOptimizer does so far. Use hvd.Compression.fp16 or bf16."
            )
        raise ArgumentError(
            f"compression={self.compression!r}: expected hvd.Compression.none, fp16 or bf16, or what has compress and "
            "decompress."
        )

    @property
    def divisor(self) -> float:
        """The number by which gradients are divided before the compression, and multiplied in the end."""
        return 1.0 if self.compression is Compression.none else self.gradient_predivide_factor

    def check_weighted(self) -> None:
        """Raise ArgumentError unless `op` is Average: a batch weight has no meaning for other reductions."""
        if self.op is not Average:
            raise ArgumentError(f"a batch weight has no meaning for op={self.op!r}: it is for averages.")


def combined_by(
    compression: Compressor | Aggregator, aggregator: Aggregator | None
) -> tuple[Compressor, Aggregator | None]:
    """Return what compresses single gradients, and what combines all gradients of a step, from a program's arguments.

    Args:
        compression: A compressor; or a compression of whole steps such as ``Compression.powersgd()``, which is an aggregator.
        aggregator: An aggregator of the program's own, or None.

    Raises:
        ArgumentError: There are two aggregators, or a class in place of one.
    """
    if not hasattr(compression, "aggregate"):
        return compression, aggregator
    if isinstance(compression, type):
        raise ArgumentError(
            f"compression={compression.__name__} is a class: make one for this optimizer, for example "
            "compression=hvd.Compression.powersgd(rank=4) or hvd.Compression.topk(0.01)."
        )
    if aggregator is not None:
        raise ArgumentError(
            f"compression={name_of(cast(Aggregator, compression))} and aggregator= both combine gradients: give one of them."
        )
    return Compression.none, cast(Aggregator, compression)


def check_passes(passes: int) -> None:
    """Raise ArgumentError unless `passes`, the number of backward passes per step, is at least 1."""
    if passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes}: expected 1 or more.")
