"""What comes after each generation of an elastic job. `Policy` is a state machine: it has no process, no thread and no clock.

    take_hosts ──┐                                    ┌──> Start   a generation, on these hosts
    committed  ──┼──> Policy ── next, when none runs ─┼──> Wait    for hosts, or until one is not set aside any more
    ended      ──┤       │                            └──> End     well, or with the reason
    lose       ──┘       └───── update, while one runs ───> the ranks are to leave at their next commit

A host on which a rank has failed is set aside for a while, if the others have enough slots. A host that cannot be reached is
set aside in any case. If the ranks that are left go on in their processes, the slot of the one that has failed is set aside;
after that time the ranks are to leave, and one more starts. Of the hosts that the next generation gets, one at least has the
committed state in its memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hvdlite.launch.job.hosts import Host
from hvdlite.launcher_link.generation import ADDED, REMOVED

FRUITLESS = 3
"""So many generations in a row may fail without a commit, all in the same way, unless the user says another number. A failure
that always comes again would otherwise never end."""
_ANY_WAY = 5
"""So many times as many may fail without a commit in different ways, or because somebody kills their ranks."""


@dataclass(frozen=True)
class Limits:
    """What the user allows.

    Attributes:
        first: The number of ranks that the first generation waits for.
        fewest: The smallest number of ranks of later generations.
        most: The largest number of ranks of a generation; None means all slots.
        wait: Seconds to wait for enough hosts.
        restarts: How often the job may start again; None means without limit.
        cooldown: The shortest and the longest time, in seconds, for which a host is set aside.
        fruitless: So many generations in a row may fail in the same way before they have committed anything.
    """

    first: int
    fewest: int
    most: int | None = None
    wait: float = 600.0
    restarts: int | None = None
    cooldown: tuple[float, float] = (10.0, 300.0)
    fruitless: int = FRUITLESS


@dataclass(frozen=True)
class Start:
    """Start a generation: its number, from 1 on, and its hosts, each with as many slots as it gets ranks."""

    generation: int
    hosts: tuple[Host, ...]

    @property
    def num_proc(self) -> int:
        """The number of ranks."""
        return _slots(self.hosts)


@dataclass(frozen=True)
class Wait:
    """Wait, and ask again. `why` is for the user."""

    why: str


@dataclass(frozen=True)
class End:
    """End the job: well if `why` is empty."""

    why: str = ""


@dataclass(frozen=True)
class Ended:
    """How a generation has ended.

    Attributes:
        good: All ranks have finished the program.
        left: All ranks have left at a commit, because the hosts have changed.
        started: All ranks had started.
        failed: The hosts on which ranks have failed.
        unreachable: The hosts that cannot be reached.
        cause: A text that is the same for failures that come in the same way from the same place; None if somebody outside of
            the program has killed a rank.
        final: The job is not to go on, whatever the limits are: the user has ended it, say.
    """

    good: bool = False
    left: bool = False
    started: bool = True
    failed: frozenset[str] = frozenset()
    unreachable: frozenset[str] = frozenset()
    cause: str | None = ""
    final: bool = False


@dataclass
class _Aside:
    until: float = 0.0
    strikes: int = 0
    is_unreachable: bool = False


@dataclass
class _Running:
    start: Start
    since: float
    has_committed: bool = False
    is_told: bool = False
    has_lost: bool = False
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(host.name for host in self.start.hosts)


class _Fruitless:
    """Counts the generations in a row that have failed before they committed anything.

    Args:
        limit: The number of those that may fail in the same way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.reset()

    def reset(self) -> None:
        """Note that a generation has committed."""
        self._all = self._same = 0
        self._cause: str | None = None

    def note(self, cause: str | None) -> None:
        """Count a generation, with the cause of its failure (see `Ended`)."""
        self._all += 1
        if cause is not None:
            self._same = self._same + 1 if cause == self._cause else 1
            self._cause = cause

    @property
    def too_many(self) -> str:
        """Why the job ends; empty if it goes on."""
        if self._same >= self._limit:
            return f"{self._same} generations in a row have failed in the same way before they committed anything"
        if self._all >= _ANY_WAY * self._limit:
            return f"{self._all} generations in a row have failed before they committed anything"
        return ""

    @property
    def nearly_too_many(self) -> str:
        """Why another failure in the same way would end the job; empty if it would not."""
        if self._same + 1 >= self._limit or self._all + 1 >= _ANY_WAY * self._limit:
            return f"{self._all} generations in a row have failed before they committed anything, and one more has"
        return ""


class Policy:
    """A `Policy` decides for one job.

    Args:
        limits: What the user allows.
        rng: Makes the times for which hosts are set aside differ a little.

    Attributes:
        restarts: How often the job has started again.
    """

    def __init__(self, limits: Limits, rng: random.Random | None = None) -> None:
        self._limits = limits
        self._rng = rng or random.Random()
        self._hosts: tuple[Host, ...] = ()
        self._aside: dict[str, _Aside] = {}
        self._holders: tuple[str, ...] = ()
        self._running: _Running | None = None
        self._generation = 0
        self._fruitless = _Fruitless(limits.fruitless)
        self._short_since: float | None = None
        self._end: End | None = None
        self.restarts = -1

    @property
    def present(self) -> int:
        """The number of ranks that the running generation has; 0 if none runs."""
        return 0 if self._running is None else self._running.start.num_proc

    # ---- what happens ----

    def take_hosts(self, hosts: Sequence[Host]) -> None:
        """Take the hosts that there are now, in the order in which they are to be filled."""
        self._hosts = tuple(hosts)

    def committed(self) -> None:
        """Note that the running generation has committed its state: all its hosts hold it."""
        assert self._running is not None
        self._running.has_committed = True
        self._holders = tuple(host.name for host in self._running.start.hosts)

    def ended(self, now: float, how: Ended) -> None:
        """Note that the running generation has ended."""
        running, self._running = self._running, None
        assert running is not None
        if how.good:
            self._end = End()
        elif how.final:
            self._end = End("the job is not to go on")
        if how.started:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        for name in running.names | how.unreachable:
            if name in how.failed | how.unreachable:
                self._set_aside(name, now, name in how.unreachable)
            elif now - running.since > self._limits.cooldown[1]:
                self._aside.pop(name, None)
        if running.has_committed or how.left:
            self._fruitless.reset()
        elif not how.unreachable:
            self._fruitless.note(how.cause)
        if self._end is None and (why := self._fruitless.too_many):
            self._end = End(why)

    def why_not_without(self, names: Sequence[str]) -> str:
        """Say why the ranks that are left must not go on in their processes; empty if they may.

        Args:
            names: The hosts of the ranks that have failed; for each rank one.
        """
        running = self._running
        assert running is not None
        left = running.start.num_proc - len(names)
        if left < max(1, self._limits.fewest):
            return f"{left} are left, and {self._limits.fewest} are needed (--min-np)"
        if self._limits.restarts is not None and self.restarts >= self._limits.restarts:
            return f"the job has started again {self._limits.restarts} times (--reset-limit)"
        if not running.has_committed and (why := self._fruitless.nearly_too_many):
            return why
        return "hosts have changed" if running.is_told else ""

    def lose(self, now: float, names: Sequence[str], cause: str | None = "") -> int:
        """Note that ranks of the running generation have failed, and that the others go on. Return their generation.

        Args:
            now: The time.
            names: The hosts of the ranks that have failed; for each rank one.
            cause: See `Ended`.
        """
        running = self._running
        assert running is not None
        self._generation += 1
        self.restarts += 1
        if running.has_committed:
            self._fruitless.reset()
        else:
            self._fruitless.note(cause)
        left = [Host(host.name, host.slots - names.count(host.name)) for host in running.start.hosts]
        start = Start(self._generation, tuple(host for host in left if host.slots))
        self._running = _Running(start, now, has_lost=True)
        for name in set(names):
            self._set_aside(name, now, is_unreachable=False)
        return self._generation

    def _set_aside(self, name: str, now: float, is_unreachable: bool) -> None:
        aside = self._aside.setdefault(name, _Aside())
        shortest, longest = self._limits.cooldown
        seconds = min(longest, shortest * 2.0**aside.strikes)
        aside.until = now + min(longest, seconds * self._rng.uniform(1.0, 1.25))
        aside.strikes = min(aside.strikes + 1, 64)
        aside.is_unreachable = is_unreachable

    def found_unreachable(self, now: float, names: Iterable[str]) -> None:
        """Note that hosts cannot be reached, which the running generation does not use."""
        for name in names:
            self._set_aside(name, now, is_unreachable=True)

    # ---- what to do ----

    def next(self, now: float) -> Start | Wait | End:
        """Say what to do now that no generation runs."""
        assert self._running is None
        if self._end is not None:
            return self._end
        limit = self._limits.restarts
        if limit is not None and self.restarts >= limit:
            return self._give_up(f"it has started again {limit} times (--reset-limit)")
        chosen = self._choose(now)
        waited = 0.0 if self._short_since is None else now - self._short_since
        if waited > self._limits.wait:
            return self._give_up(f"{self._shortage(now)}, for {waited:.0f} s (--elastic-timeout)")
        if not chosen:
            self._short_since = now if self._short_since is None else self._short_since
            return Wait(self._shortage(now))
        self._generation += 1
        self.restarts += 1
        start = Start(self._generation, chosen)
        self._running = _Running(start, now)
        return start

    def update(self, now: float) -> int:
        """Say what the running generation is to be told of its hosts: `REMOVED`, `ADDED`, both, or 0. It is told once."""
        running = self._running
        if running is None or running.is_told:
            return 0
        before = {host.name: host.slots for host in running.start.hosts}
        listed = {host.name: host.slots for host in self._hosts}
        chosen = self._choose(now)
        after = (
            {host.name: host.slots for host in chosen}
            if chosen
            else {name: min(slots, listed.get(name, 0)) for name, slots in before.items()}
        )
        fewer = any(after.get(name, 0) < slots for name, slots in before.items())
        more = any(before.get(name, 0) < slots for name, slots in after.items())
        running.is_told = fewer or more
        return fewer * REMOVED | more * ADDED

    def newcomers(self, now: float) -> tuple[Host, ...]:
        """Return the hosts that the next generation would use and the running one does not; empty if it is told already."""
        running = self._running
        if running is None or running.is_told:
            return ()
        return tuple(host for host in self._choose(now) if host.name not in running.names)

    def _give_up(self, why: str) -> End:
        self._end = End(why)
        return self._end

    @property
    def _needed(self) -> int:
        return self._limits.fewest if self._generation else self._limits.first

    def _choose(self, now: float) -> tuple[Host, ...]:
        """Return the hosts of a generation that would start now, in their order; empty if there are not enough."""
        usable = [host for host in self._in_order() if not self._is_aside(host.name, now)]
        if not self._are_enough(usable):
            usable = [host for host in self._in_order() if not self._is_aside(host.name, now, only_unreachable=True)]
        if not self._are_enough(usable):
            return ()
        chosen: list[Host] = []
        left = _slots(usable) if self._limits.most is None else self._limits.most
        for host in usable:
            if left > 0:
                chosen.append(Host(host.name, min(self._slots_of(host, now), left)))
                left -= chosen[-1].slots
        return tuple(chosen)

    def _slots_of(self, host: Host, now: float) -> int:
        """Return the slots of a host, without those of ranks that have failed while the others go on, for a while."""
        running, aside = self._running, self._aside.get(host.name)
        if running is None or not running.has_lost or aside is None or now >= aside.until:
            return host.slots
        return min(host.slots, sum(each.slots for each in running.start.hosts if each.name == host.name))

    def _are_enough(self, hosts: Sequence[Host]) -> bool:
        holds = not self._holders or any(host.name in self._holders for host in hosts)
        return holds and _slots(hosts) >= self._needed

    def _in_order(self) -> list[Host]:
        """Return the hosts, first those that hold the committed state: rank 0 then has it at hand."""
        place = {name: number for number, name in enumerate(self._holders)}
        return sorted(self._hosts, key=lambda host: place.get(host.name, len(place)))

    def _is_aside(self, name: str, now: float, only_unreachable: bool = False) -> bool:
        aside = self._aside.get(name)
        if aside is None or now >= aside.until or (self._running is not None and name in self._running.names):
            return False
        return aside.is_unreachable or not only_unreachable

    def _shortage(self, now: float) -> str:
        listed = ",".join(map(str, self._hosts[:20])) or "no host"
        aside = [host.name for host in self._hosts if self._is_aside(host.name, now)]
        text = f"{_slots(self._hosts)} slots ({listed}) and {self._needed} are needed"
        if aside:
            text += f"; set aside after a failure: {', '.join(aside)}"
        if self._holders and not any(host.name in self._holders for host in self._hosts):
            text += f"; the committed state is in the memory of {', '.join(self._holders)}, which are gone"
        return f"there are {text}"


def _slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)
