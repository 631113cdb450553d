"""`Planner`: how many buckets one model's gradients have, and whether these travel while the backward pass runs.

It learns a plan in the first steps, or searches for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.config import Config
from hvdlite.gradients.autotune import Autotune, candidates
from hvdlite.protocols import Plan
from hvdlite.ranks.log import tell
from hvdlite.ranks.topology import has_free_core

LEARNED_STEPS = 2
BUCKET_SECONDS = 1e-3
"""The seconds that a bucket's exchange should take: long against its meetings (0.1 ms), short against a backward pass."""
MAX_FAILED = 2
"""After so many failed speculations, buckets do not travel early any more."""
_TRIED_BUCKETS = 2, 4, 8


def longest(orders: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the order that all ranks follow: the longest, because a rank without samples has seen no gradients."""
    return max(orders, key=len)


def plan_buckets(
    order: Sequence[int], nbytes: Sequence[int], bucket_bytes: int, first_bytes: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Deal tensors out to buckets.

    Args:
        order: The tensors in the order in which the backward pass has their gradients, each once; some may be missing.
        nbytes: The bytes of each tensor of the model.
        bucket_bytes: The bytes of a bucket, about: no tensor is cut.
        first_bytes: The bytes of the first bucket; None for `bucket_bytes`.

    Returns:
        The buckets in the order of their exchanges. The last one has the tensors that are not in `order`. The tuple is empty if
        one bucket is enough.
    """
    buckets: list[list[int]] = [[]]
    held, wanted = 0, bucket_bytes if first_bytes is None else first_bytes
    for index in order:
        if held >= wanted:
            buckets.append([])
            held, wanted = 0, bucket_bytes
        buckets[-1].append(index)
        held += nbytes[index]
    buckets[-1] += sorted(set(range(len(nbytes))).difference(order))
    return tuple(map(tuple, buckets)) if len(buckets) > 1 else ()


class Planner:
    """The plans for one reducer, on one rank. All ranks ask their planners at the same steps, and get the same answers.

    Args:
        nbytes: The bytes of each gradient.
        plan: The first plan.
        config: The settings `overlap`, `autotune` and `autotune_log`, the same on all ranks.
        local_size: The number of ranks on this host.
        several_hosts: Whether gradients travel between hosts.
        gather: Returns the objects of all ranks.
        first: Whether this rank writes the log and prints messages.
        adapts: Whether the caller calls `ready` for each gradient, and can follow another plan.

    Attributes:
        plan: The present plan.
        learning: Whether `ready` must be called.
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
            tell("autotune", "hvdlite: autotune: this exchange has nothing to choose from.", 0)

    @property
    def settings(self) -> list[tuple[str, Any]]:
        """The settings that must be the same on all ranks, by name."""
        return [("overlap", self._config.overlap), ("autotune", self._config.autotune)]

    def ready(self, index: int) -> None:
        """Note that a backward pass has gradient `index`."""
        self._order[index] = None

    def exchanged(self, seconds: float, failed: int = 0) -> Plan | None:
        """Note that a step has exchanged its gradients.

        Args:
            seconds: How long the exchange took.
            failed: `Overlap.failed`: the failed speculations since the last change of plans.

        Returns:
            The plan for the next steps, if it is another one; None if the plan stays.
        """
        if self.learning:
            self._steps += 1
            if self._steps < LEARNED_STEPS:
                self._order.clear()  # the first step differs from the later ones
                return None
            self.learning = False
            return self._change(self._learned(seconds))
        if self._tuner is not None and not self._tuner.done:
            return self._change(self._tuner.current) if self._tuner.step() else None
        if failed >= MAX_FAILED and self.plan.buckets:
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
        seconds = min(answer[1] for answer in everybody)  # the rank that came last has not waited for others
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
