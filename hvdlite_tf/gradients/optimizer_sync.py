"""What every distributed optimizer has, of whichever Keras: an exchange, and variables that each rank has for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import Options
from hvdlite_tf.gradients.local_variables import LocalVariables


class Exchange(Protocol):
    """Combines gradients, in the tensors of a backend: `hvdlite_tf.gradients.exchange.GradientExchange` says how."""

    options: Options

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """The gradients of all ranks."""
        ...

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """This rank's gradients, with zeros where other ranks have one."""
        ...


class OptimizerSync:
    """How the gradients of one optimizer become those of all ranks.

    Args:
        exchange: Combines the gradients of the variables that are not local.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.
        identity: What the ranks know the optimizer by; None if nothing is to be known of it.

    Attributes:
        exchange, identity: As given.
        local: The variables whose gradients are not exchanged.
    """

    def __init__(self, exchange: Exchange, scale_local_gradients: bool, identity: Identity | None = None) -> None:
        self.exchange = exchange
        self.identity = identity
        self.local = LocalVariables(scale_local_gradients, exchange.options.process_set)

    def combine(self, variables: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """The gradients of all ranks. Of embeddings the rows of all ranks' batches, as Keras has them of one batch."""

        def exchange(shared: list[Any], own: list[Any]) -> list[Any]:
            return self.exchange.combine(shared, own, weight)

        return self.local.exchange_others(exchange, variables, gradients)

    def fill(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """This rank's gradients, with zeros where other ranks have one."""
        return self.local.change_others(self.exchange.fill, variables, gradients)
