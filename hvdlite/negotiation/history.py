"""What a rank keeps of the past to understand messages of its children that are older than its latest plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdlite.negotiation.messages import Cache, Key, Report
from hvdlite.operations import Signature


class History:
    """Caches that have been replaced, and operations that have been failed, until no message can refer to them any more.

    Args:
        children: The ranks whose messages arrive here.
        cache_entries: How many ids a cache has, at most, before another one takes its place.

    Attributes:
        retired: The caches, and the plan that ended each.
        failed: The operations that were failed before every rank had reported them, and the plan that did it.
    """

    def __init__(self, children: Iterable[int], cache_entries: int) -> None:
        self._cache_entries = cache_entries
        self._heard = dict.fromkeys(children, 0)  # plans that each child had received when it last reported
        self.retired: list[tuple[int, Cache]] = []
        self.failed: dict[Key, int] = {}

    def learn(self, key: Key, signature: Signature, cache: Cache, plans: int) -> Cache:
        """Give what was agreed on by this plan an id, the same as on all other ranks. Returns the cache to use from now on."""
        entry = (key if isinstance(key, str) else None, signature)
        if entry not in cache.ids:
            if len(cache.entries) == self._cache_entries:
                self.retired.append((plans, cache))
                cache = Cache()
            cache.ids[entry] = len(cache.entries)
            cache.entries.append(entry)
        return cache

    def fail(self, key: Key, plans: int) -> None:
        """This plan has failed an operation, which some ranks may have reported or may be reporting."""
        self.failed[key] = plans

    def cache_of(self, child: int, plans: int, current: Cache) -> Cache:
        """The cache that a child's message was written with, which had received so many plans."""
        self._heard[child] = plans
        if not self.retired:
            return current
        return next((old for until, old in self.retired if plans < until), current)

    def still_open(self, reports: Sequence[tuple[Key, Report]], plans: int) -> Sequence[tuple[Key, Report]]:
        """Those reports of a child that no plan has failed which is on its way to it, and will do the same there."""
        if not self.failed:
            return reports
        return [(key, report) for key, report in reports if plans >= self.failed.get(key, 0)]

    def forget(self, plans: int) -> None:
        """Let go of what no message can refer to any more, because all children have received later plans.

        Args:
            plans: How many plans there have been, for a rank without children.
        """
        if not self.retired and not self.failed:
            return
        oldest = min(self._heard.values(), default=plans)
        self.retired = [(until, cache) for until, cache in self.retired if until > oldest]
        self.failed = {key: plan for key, plan in self.failed.items() if plan > oldest}
