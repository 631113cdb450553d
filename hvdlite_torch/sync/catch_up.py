"""An optimizer's part in `hvdlite.join`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType

from hvdlite.api import world
from hvdlite_torch.ops.broadcast import broadcast_
from hvdlite_torch.step.driver import StepDriver


class StandIn:
    """As `hvdlite.group.RebindableExchange` says. It does not keep the optimizer.

    Args:
        driver: The optimizer's.
        falls_behind: A rank that stands in takes no steps.
        broadcast_state: Gives every rank's optimizer the state of that of a rank, as
            `hvdlite_torch.training.state.broadcast_optimizer_state` does.

    Attributes:
        process_set: The ranks that take part.
    """

    def __init__(self, driver: StepDriver, falls_behind: bool, broadcast_state: Callable[..., None]) -> None:
        self._driver = weakref.ref(driver)
        self._lease = driver.lease
        self.process_set = driver.process_set
        self._falls_behind = falls_behind
        self._broadcast_state = broadcast_state

    memory_only = False
    passes: Mapping[Hashable, int] = MappingProxyType({})

    @property
    def dropped(self) -> bool:
        """Whether the optimizer is gone."""
        return self._lease.dropped

    def keep(self) -> object:
        """What keeps the optimizer as long as the caller holds it; None if it is gone."""
        return self._driver()

    def release(self) -> None:
        """Release what the optimizer held. Every rank calls this."""
        self._lease.release()

    def leave(self) -> None:
        """Hold nothing of the world any more: it has ended. This is each rank's own affair."""
        self._lease.leave()
        driver = self._driver()
        if driver is not None:
            driver.leave()

    def rebind(self) -> None:
        """Let the optimizer go on in the present world. Every rank of its process set calls this."""
        driver = self._driver()
        if driver is not None:
            driver.rebind()
        world("init()").group(self.process_set).add(self)

    def stand_in(self) -> None:
        """Take part in the others' steps until all ranks have joined."""
        driver = self._driver()
        if driver is None:
            self._lease.stand_in(owns_share=not self._falls_behind)
        else:
            driver.stand_in()

    def catch_up(self, last: int) -> None:
        """Take the parameters and the optimizer state of the rank that joined last."""
        driver = self._driver()
        if not self._falls_behind or driver is None or not driver.sync.missed:
            return
        optimizer, process_set = driver.optimizer, driver.process_set
        parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        broadcast_(parameters, last, process_set=process_set)
        self._broadcast_state(optimizer, last, process_set=process_set)
        driver.have_same_state()
