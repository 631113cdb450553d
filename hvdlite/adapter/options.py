"""The options with which a program chooses how gradients are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from hvdlite.adapter.few_bytes.local_steps import DiLoCo, LocalSGD
from hvdlite.api import Adasum, Average, Sum
from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import Aggregator, name_of
from hvdlite.gradients.codec import Codec
from hvdlite.protocols import ReduceOp
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.tensors.compression import Compression, Compressor


@dataclass(frozen=True)
class ExchangeOptions:
    """The options of a gradient exchange.

    Attributes:
        op: The reduction: Average, Sum, or Adasum.
        process_set: The ranks that participate; all if None.
        compression: The compression of single gradients.
        sparse_as_dense: Whether sparse gradients are made dense.
        gradient_predivide_factor: With compression and Average, gradients are divided by this factor before the compression and
            multiplied by it in the end, so that sums fit into the smaller dtype. Without compression the factor has no effect.
        aggregator: Combines the gradients; None for their weighted sum.
        local_steps: Ranks make steps of their own, and bring their parameters together at times; None if they do not.

    Raises:
        ArgumentError: The options do not fit together.
    """

    op: ReduceOp = Average
    process_set: ProcessSet | None = None
    compression: Compressor = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    aggregator: Aggregator | None = None
    local_steps: LocalSGD | None = None

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum, Adasum):
            raise ArgumentError(f"op={self.op!r}: gradients are combined by Average or Sum, or by Adasum.")
        if not callable(getattr(self.compression, "compress", None)):
            raise ArgumentError(
                f"compression={self.compression!r}: expected hvd.Compression.none, fp16 or bf16, or what has compress and "
                "decompress."
            )
        if self.aggregator is not None:
            self._check_aggregator()
        if self.local_steps is not None:
            self._check_local_steps()
        factor = self.gradient_predivide_factor
        if factor != 1.0 and self.op is not Average:
            raise ArgumentError(f"gradient_predivide_factor={factor} needs op=Average; got {self.op!r}.")
        if not factor > 0:
            raise ArgumentError(f"gradient_predivide_factor={factor}: expected a number above 0.")

    def _check_aggregator(self) -> None:
        if not callable(getattr(self.aggregator, "aggregate", None)) or isinstance(self.aggregator, type):
            raise ArgumentError(
                f"aggregator={self.aggregator!r}: expected an object with a method aggregate(bucket, weights, collectives)."
            )
        self.refuse(
            f"aggregator={name_of(self.aggregator)}",
            "the aggregator alone says how gradients travel and are combined, once in a step, on every rank",
            op=self.op if self.op is not Average else None,
            compression=self.compressor_name,
        )

    def _check_local_steps(self) -> None:
        how = self.local_steps
        if not isinstance(how, LocalSGD):
            raise ArgumentError(
                f"local_steps={how!r}: expected hvd.LocalSGD(every=8) or hvd.DiLoCo(every=64), which say when ranks meet."
            )
        self.refuse(
            f"local_steps={how}",
            "each rank steps all parameters with its own gradients, and only the mean of parameters travels",
            op=self.op if self.op is not Average else None,
            aggregator=None if self.aggregator is None else name_of(self.aggregator),
        )
        if not isinstance(how, DiLoCo):
            self.refuse(
                f"local_steps={how}",
                "parameters would be rounded. DiLoCo can compress, because it sends how far the parameters have moved",
                compression=self.compressor_name,
            )

    @cached_property
    def codec(self) -> Codec | None:
        """The codec that compresses single gradients; None if they are not compressed."""
        return None if self.compression is Compression.none else Codec(self.compression, self.gradient_predivide_factor)

    def refuse(self, what: str, why: str, **others: Any) -> None:
        """Raise ArgumentError if an option does not go together with others.

        Args:
            what: The option, as the program wrote it.
            why: The reason.
            others: The options that must not be given, by name; None or False if they are not.
        """
        for name, value in others.items():
            if value:
                raise ArgumentError(f"{name}={value!r} and {what} do not go together: {why}.")

    @property
    def compressor_name(self) -> str | None:
        """The name of what compresses single gradients; None without compression."""
        return None if self.codec is None else self.codec.name

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
    """Raise ArgumentError unless `passes`, the number of backward passes per step, is a whole number from 1 on."""
    check_count("backward_passes_per_step", passes)
