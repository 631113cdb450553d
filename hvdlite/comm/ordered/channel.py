"""Messages between two ranks, whose waits the watchdog owns: `hvdlite.protocols.Channel` on any transport.

In this file a rank is a number in the group. The watchdog counts the ranks of the job.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from hvdlite.comm.naps import LONGEST_NAP, OFFERS_SECONDS, wait_until
from hvdlite.errors import HvdliteError
from hvdlite.protocols import ANY, Array, Request, Transport, WaitKind
from hvdlite.ranks.own_core import yield_core
from hvdlite.ranks.topology import Members
from hvdlite.watchdog.deadlock import Need
from hvdlite.watchdog.letters import Letter, Letters
from hvdlite.watchdog.waits import Wait
from hvdlite.watchdog.watchdog import Watchdog

_SERVICE_NAP = 10 * LONGEST_NAP
"""The longest nap of a server, in seconds. A server that gets no requests looks every 2 ms and uses a hundredth of a core."""


_SPINS = 50
"""How often a wait looks before it lets other threads of this process run, which takes 40 µs. A look takes 1 to 2 µs, and Open
MPI finds a small message at the fourth."""


class _Guard(threading.local):
    """What one thread waits for, as the program has said by `WatchedChannel.guarded`; `what` is None if it has not."""

    what: str | None = None
    kind = WaitKind.PEER
    beside_threads = False
    asks_all = False


class WatchedChannel:
    """A `Channel` whose waits the watchdog owns. All ranks of the group make one, at the same point of their sequence.

    Args:
        transport: A transport over the group, for this object alone. `close` closes it.
        members: The ranks of the group.
        watch: The watchdog of this rank.
        limit: The longest time of a wait in seconds; None for the setting `stall_shutdown_time_seconds`.
    """

    def __init__(self, transport: Transport, members: Members, watch: Watchdog, limit: float | None = None) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._members, self._watch, self._limit = transport, members, watch, limit
        self._link = watch.link(members, watch.new_channel(members), lambda error: None)
        self._guard = _Guard()
        self._letters = self._link.letters = Letters(self._link.id, self.rank)

    def isend(self, data: Array, dest: int, tag: int = 0) -> Request:
        """See `Channel.isend`."""
        self._link.check()
        request = self._transport.isend(data, dest, tag)
        return _WatchedRequest(
            self,
            request,
            [dest],
            lambda: f"rank {self._members.ranks[dest]} to take a message with tag {tag} of {self._name()}",
            self._letters.begin(self.rank, dest, tag),
        )

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request:
        """See `Channel.irecv`."""
        self._link.check()
        request = self._transport.irecv(data, source, tag)
        senders = [rank for rank in range(self.size) if rank != self.rank] if source == ANY else [source]

        def what() -> str:
            sender = "any rank" if source == ANY else f"rank {self._members.ranks[source]}"
            return f"a message with tag {tag} from {sender} to {self._name()}"

        return _WatchedRequest(self, request, senders, what, self._letters.begin(source, self.rank, tag))

    def _name(self) -> str:
        return f"rank {self._members.ranks[self.rank]}"

    @contextlib.contextmanager
    def guarded(
        self, what: str, kind: WaitKind = WaitKind.PEER, beside_threads: bool = False, asks_all: bool = False
    ) -> Iterator[None]:
        """See `Channel.guarded`."""
        guard = self._guard
        before = guard.what, guard.kind, guard.beside_threads, guard.asks_all
        guard.what, guard.kind, guard.beside_threads, guard.asks_all = what, kind, beside_threads, asks_all
        try:
            yield
        finally:
            guard.what, guard.kind, guard.beside_threads, guard.asks_all = before

    def wait(self, request: Request, peers: Sequence[int], what: Callable[[], str], letter: Letter | None) -> None:
        """Wait for a request of the transport.

        Args:
            request: The request of the transport.
            peers: Ranks of the group. One of them is enough to end the wait.
            what: A function that says in words what the request waits for. A text given to `guarded` replaces it.
            letter: The message, if it can be told from others.

        Raises:
            HvdliteError: The watchdog has failed the wait, or the channel is broken or closed.
        """
        for _ in range(_SPINS):
            if request.test():
                return
            yield_core()
        guard, link = self._guard, self._link
        said, kind = guard.what, guard.kind
        errors: list[HvdliteError] = []
        text = what if said is None else partial(str, said)
        wait = Wait(
            text,
            self._among(range(self.size) if guard.asks_all else (self.rank, *peers)),
            errors.append,
            need=None if letter is None else lambda: Need(self._among(letter[1:3]), None, 0, text(), letter=letter),
            link=link,
            kind=kind,
            one_of=tuple(self._members.ranks[rank] for rank in peers),
            limit=self._limit,
            letter=letter,
        )

        def check() -> None:
            link.check()
            if errors:
                raise errors[0]

        number = self._watch.begin(wait)
        try:
            check()
            offers_seconds = 0.0 if guard.beside_threads else OFFERS_SECONDS
            longest_nap = _SERVICE_NAP if kind is WaitKind.SERVICE else LONGEST_NAP
            wait_until(request.test, check, offers_seconds=offers_seconds, longest_nap=longest_nap)
        finally:
            self._watch.end(number)

    def _among(self, ranks: Iterable[int]) -> Members:
        """Return some ranks of the group, as those of the job."""
        return self._members._replace(ranks=tuple(sorted({self._members.ranks[rank] for rank in ranks})))

    def cancelled(self, letter: Letter) -> None:
        """Note that a receive was given up."""
        self._letters.cancelled(letter)

    def check(self) -> None:
        """Raise the error that has broken this channel, if there is one."""
        self._link.check()

    def break_off(self, what: str, error: BaseException) -> None:
        """See `Channel.break_off`."""
        self._link.break_off(what, error)

    def close(self) -> None:
        """See `Channel.close`."""
        self._link.fail(HvdliteError("this channel was closed."))
        self._transport.close()


class _WatchedRequest:
    """A `Request` of a `WatchedChannel`.

    Args:
        channel: The channel that waits for the request.
        request: The request of the transport.
        peers, what, letter: See `WatchedChannel.wait`.
    """

    def __init__(
        self,
        channel: WatchedChannel,
        request: Request,
        peers: Sequence[int],
        what: Callable[[], str],
        letter: Letter | None,
    ) -> None:
        self._channel, self._request, self._peers, self._what, self._letter = channel, request, peers, what, letter

    @property
    def source(self) -> int | None:
        return self._request.source

    def test(self) -> bool:
        if self._request.test():
            return True
        self._channel.check()
        return False

    def wait(self) -> None:
        self._channel.wait(self._request, self._peers, self._what, self._letter)

    def cancel(self) -> bool:
        cancelled = self._request.cancel()
        if cancelled and self._letter is not None:
            self._channel.cancelled(self._letter)
        return cancelled
