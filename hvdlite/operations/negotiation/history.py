"""Past state of a rank. The rank needs it to understand messages that its children wrote before they had its latest plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdlite.operations import Signature
from hvdlite.operations.negotiation.messages import Cache, Key, Report


class History:
    """Replaced caches and failed operations, kept until no message can refer to them any more.

    Args:
        children: The children of this rank.
        cache_entries: The largest number of ids of a cache. A full cache is replaced.

    Attributes:
        retired: The replaced caches, each with the number of the plan that replaced it.
        failed: The operations that have failed before every rank had reported them, each with the number of the plan.
    """

    def __init__(self, children: Iterable[int], cache_entries: int) -> None:
        self._cache_entries = cache_entries
        self._heard = dict.fromkeys(children, 0)  # for each child, the plans that it had received at its latest report
        self.retired: list[tuple[int, Cache]] = []
        self.failed: dict[Key, int] = {}

    def learn(self, key: Key, signature: Signature, cache: Cache, plans: int) -> Cache:
        """Give an operation of the current plan an id, the same on all ranks. Return the cache to use from now on."""
        entry = (key if isinstance(key, str) else None, signature)
        if entry not in cache.ids:
            if len(cache.entries) == self._cache_entries:
                self.retired.append((plans, cache))
                cache = Cache()
            cache.ids[entry] = len(cache.entries)
            cache.entries.append(entry)
        return cache

    def fail(self, key: Key, plans: int) -> None:
        """Record that plan number `plans` has failed an operation. Reports of it may still be on their way."""
        self.failed[key] = plans

    def cache_of(self, child: int, plans: int, current: Cache) -> Cache:
        """Return the cache with which a child wrote a message, when it had received `plans` plans."""
        self._heard[child] = plans
        if not self.retired:
            return current
        return next((old for until, old in self.retired if plans < until), current)

    def still_open(self, reports: Sequence[tuple[Key, Report]], plans: int) -> Sequence[tuple[Key, Report]]:
        """Return the reports of a child without those of failed operations.

        The plan that failed them is on its way to the child, and fails them there too.
        """
        if not self.failed:
            return reports
        return [(key, report) for key, report in reports if plans >= self.failed.get(key, 0)]

    def forget(self, plans: int) -> None:
        """Forget the state that no message can refer to any more, because all children have received later plans.

        Args:
            plans: The number of plans so far. It decides for a rank without children.
        """
        if not self.retired and not self.failed:
            return
        oldest = min(self._heard.values(), default=plans)
        self.retired = [(until, cache) for until, cache in self.retired if until > oldest]
        self.failed = {key: plan for key, plan in self.failed.items() if plan > oldest}
