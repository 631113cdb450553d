"""`OptimizerMember`: the part of an optimizer in a group of ranks, when ranks join, and when the world ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType

from hvdlite.api import world
from hvdlite_torch.ops.broadcast import broadcast_
from hvdlite_torch.step.driver import StepDriver
from hvdlite_torch.tensors.sliced import local_of


class OptimizerMember:
    """The `hvdlite.runtime.group.RebindableExchange` of one optimizer. It does not keep the optimizer alive.

    Args:
        driver: The driver of the optimizer.
        falls_behind: Whether a rank that has joined makes no steps, so that it must catch up.
        broadcast_state: Gives the optimizer of every rank the state of one rank's, but what is a rank's own, as
            `hvdlite_torch.training.state.share_state` does.

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
        """Whether the optimizer was dropped."""
        return self._lease.dropped

    def keep(self) -> object:
        """Return an object that keeps the optimizer alive while the caller holds it; None if the optimizer was dropped."""
        return self._driver()

    def release(self) -> None:
        """Release what the optimizer held. Every rank calls this."""
        self._lease.release()

    def leave(self) -> None:
        """Drop what belongs to the world that has ended. Each rank does this by itself."""
        self._lease.leave()
        driver = self._driver()
        if driver is not None:
            driver.leave()

    def rebind(self) -> None:
        """Let the optimizer continue in the present world. Every rank of its process set calls this."""
        driver = self._driver()
        if driver is not None:
            driver.rebind()
        world("init()").group(self.process_set).add(self)

    def stand_in(self) -> None:
        """Take part in the steps of the other ranks until all ranks have joined."""
        driver = self._driver()
        if driver is None:
            self._lease.stand_in(owns_shard=not self._falls_behind)
        else:
            driver.stand_in()

    def catch_up(self, last: int) -> None:
        """Take over the parameters and the optimizer state of rank `last`, which has joined last. Every rank calls this."""
        driver = self._driver()
        if not self._falls_behind or driver is None or not driver.sync.missed:
            return
        optimizer, process_set = driver.optimizer, driver.process_set
        parameters = [local_of(p.detach()) for group in optimizer.param_groups for p in group["params"]]
        broadcast_(parameters, last, process_set=process_set)
        self._broadcast_state(optimizer, last, process_set=process_set)
        driver.have_same_state()
