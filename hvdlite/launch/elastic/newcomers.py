"""New hosts are tried by ssh before the running ranks are interrupted for them: a host that is down costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hvdlite.job.hosts import Host, UnreachableError, check_reachable


class Newcomers:
    """Tries new hosts, in a thread.

    Args:
        ssh: The options of ssh; None if plain ssh does not reach the hosts, so that they are taken as they are.
    """

    def __init__(self, ssh: Sequence[str] | None) -> None:
        self._ssh = ssh
        self._thread = ThreadPoolExecutor(1, "hvdlite-newcomers")
        self._tried: frozenset[str] = frozenset()
        self._answer: Future[None] | None = None

    def are_there(self, hosts: Sequence[Host]) -> bool:
        """Tell whether all these hosts answer. This does not wait: call it again and again.

        Args:
            hosts: The hosts. A call with others begins anew.
        """
        names = frozenset(host.name for host in hosts)
        if not names or self._ssh is None:
            return True
        if self._answer is None or (self._answer.done() and names != self._tried):
            self._tried = names
            self._answer = self._thread.submit(check_reachable, tuple(hosts), self._ssh)
        if not self._answer.done() or names != self._tried or self._answer.exception() is not None:
            return False
        self._answer = None
        return True

    def missing(self) -> tuple[str, ...]:
        """Return the hosts that did not answer, once; empty while it is not known."""
        if self._answer is None or not self._answer.done():
            return ()
        error, self._answer = self._answer.exception(), None
        return error.names if isinstance(error, UnreachableError) else ()

    def close(self) -> None:
        """Try no more hosts."""
        self._thread.shutdown(wait=False, cancel_futures=True)
