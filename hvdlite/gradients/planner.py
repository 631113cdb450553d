"""How one model's gradients are exchanged: learned in the first steps, and searched for if that is wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.config import Config
from hvdlite.gradients.autotune import Autotune, candidates
from hvdlite.gradients.plan import BUCKET_SECONDS, PATIENCE, has_free_core, longest, plan_buckets
from hvdlite.protocols import Plan

LEARNED_STEPS = 2
_TRIED_BUCKETS = 2, 4, 8


class Planner:
    """Plans for one reducer, on one rank. Those of all ranks are asked at the same steps, and answer the same.

    Args:
        nbytes: Bytes of each gradient.
        plan: To begin with.
        config: Its settings `overlap`, `autotune` and `autotune_log`; the same on all ranks.
        local_size: Ranks on this host.
        several_hosts: There are hosts to exchange with.
        gather: Makes a list of the objects of all ranks.
        first: This rank writes the log and talks.
        adapts: The caller says when it has a gradient (by `ready`), and can follow another plan.

    Attributes:
        plan: The present one.
        learning: `ready` is to be called.
    """

    def __init__(
        self,
        nbytes: Sequence[int],
        plan: Plan,
        config: Config,
        local_size: int,
        several_hosts: bool,
        gather: Callable[[Any], list[Any]],
        first: bool,
        adapts: bool,
    ) -> None:
        self._nbytes = nbytes
        self.plan = plan
        self._config = config
        self._local_size = local_size
        self._several_hosts = several_hosts
        self._gather = gather
        self._first = first
        self._overlaps = adapts and config.overlap != "off"
        self._order: dict[int, None] = {}
        self._steps = 0
        self._tuner: Autotune | None = None
        self.learning = adapts and (self._overlaps or config.autotune)
        if config.autotune and not adapts and first:
            print("hvdlite: autotune: this exchange has nothing to choose from.", file=sys.stderr, flush=True)

    @property
    def settings(self) -> list[tuple[str, Any]]:
        """What must be the same on all ranks."""
        return [("overlap", self._config.overlap), ("autotune", self._config.autotune)]

    def ready(self, index: int) -> None:
        """A backward pass has a gradient."""
        self._order[index] = None

    def exchanged(self, seconds: float, lost: int = 0) -> Plan | None:
        """A step has exchanged its gradients.

        Args:
            seconds: How long that took.
            lost: The bets that `Overlap` has lost since the last change of plans.

        Returns:
            The plan for the next steps, if it is another one.
        """
        if self.learning:
            self._steps += 1
            if self._steps < LEARNED_STEPS:
                self._order.clear()  # the first step is not like the others
                return None
            self.learning = False
            return self._change(self._learned(seconds))
        if self._tuner is not None and not self._tuner.done:
            return self._change(self._tuner.current) if self._tuner.step() else None
        if lost >= PATIENCE and self.plan.buckets:
            return self._change(self.plan._replace(buckets=()))
        return None

    def _change(self, plan: Plan) -> Plan | None:
        if plan == self.plan:
            return None
        self.plan = plan
        return plan

    def _learned(self, seconds: float) -> Plan:
        everybody = self._gather((list(self._order), seconds, has_free_core(self._local_size)))
        order = longest([answer[0] for answer in everybody])
        seconds = min(answer[1] for answer in everybody)  # who came last has not waited
        total = sum(self._nbytes)
        plan = self.plan
        if self._overlaps and len(everybody) > 1:
            in_time = max(1, int(total * BUCKET_SECONDS / max(seconds, 1e-9)))
            if self._config.overlap == "on":
                plan = plan._replace(buckets=self._at_least_two(order, in_time))
            elif all(answer[2] for answer in everybody):
                plan = plan._replace(buckets=plan_buckets(order, self._nbytes, in_time))
        if self._config.autotune:
            tried = [plan_buckets(order, self._nbytes, total // n) for n in _TRIED_BUCKETS] if self._overlaps else []
            self._tuner = Autotune(
                candidates(plan, list(dict.fromkeys(tried)), self._several_hosts),
                lambda value: max(self._gather(value)),
                self._config.autotune_log if self._first else "",
                self._first,
            )
        return plan

    def _at_least_two(self, order: Sequence[int], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
        while bucket_bytes > 1 and len(order) > 1:
            buckets = plan_buckets(order, self._nbytes, bucket_bytes)
            if buckets:
                return buckets
            bucket_bytes //= 2
        return ()
