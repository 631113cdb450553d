"""An optimizer's part in `hvdlite.join`."""

from __future__ import annotations

from hvdlite import ProcessSet
from hvdlite_torch.distributed import Exchange
from hvdlite_torch.movements import broadcast_
from hvdlite_torch.state import broadcast_optimizer_state


class StandIn:
    """As `hvdlite.protocols.Exchange` says.

    Args:
        exchange: The optimizer's.
        falls_behind: A rank that stands in takes no steps.
    """

    def __init__(self, exchange: Exchange, falls_behind: bool) -> None:
        self._exchange = exchange
        self._falls_behind = falls_behind

    def belongs_to(self, process_set: ProcessSet | None) -> bool:
        """Whether the ranks of this set, and no others, exchange here."""
        return self._exchange.belongs_to(process_set)

    def stand_in(self) -> None:
        """Take part in the others' steps until all ranks have joined."""
        self._exchange.stand_in()

    def catch_up(self, last: int) -> None:
        """Take the parameters and the optimizer state of the rank that joined last."""
        if not self._falls_behind or not self._exchange.missed:
            return
        optimizer, process_set = self._exchange.optimizer, self._exchange.process_set
        parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        broadcast_(parameters, last, process_set=process_set)
        broadcast_optimizer_state(optimizer, last, process_set=process_set)
        self._exchange.have_same_state()
