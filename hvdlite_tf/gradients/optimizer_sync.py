"""The part that all distributed optimizers of Keras and TensorFlow have: an exchange of gradients, and local variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite_tf.gradients.local_variables import LocalVariables


class GradientCombiner(Protocol):
    """An object that combines gradients over the ranks, as tensors of a backend.

    `hvdlite_tf.gradients.exchange.GradientExchange` describes both methods.
    """

    options: ExchangeOptions

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Return the gradients of all ranks."""
        ...

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return this rank's gradients, with zeros where only other ranks have a gradient."""
        ...


class OptimizerSync:
    """The object by which the gradients of one optimizer become those of all ranks.

    Args:
        exchange: The object that combines the gradients of the variables that are not local.
        scale_local_gradients: Whether the gradients of local variables are divided by the number of ranks.
        identity: The identity by which the ranks match their optimizers, or None.

    Attributes:
        exchange: The object that combines gradients.
        identity: The identity, or None.
        local: The variables whose gradients are not exchanged.
    """

    def __init__(
        self, exchange: GradientCombiner, scale_local_gradients: bool, identity: Identity | None = None
    ) -> None:
        self.exchange = exchange
        self.identity = identity
        self.local = LocalVariables(scale_local_gradients, exchange.options.process_set)

    def combine(self, variables: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Return the gradients of all ranks. A sparse gradient has the rows of all ranks, one after the other."""

        def exchange(shared: list[Any], own: list[Any]) -> list[Any]:
            return self.exchange.combine(shared, own, weight)

        return self.local.exchange_others(exchange, variables, gradients)

    def fill(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return this rank's gradients, with zeros where only other ranks have a gradient."""
        return self.local.change_others(self.exchange.fill, variables, gradients)
