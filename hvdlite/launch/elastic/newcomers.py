"""New hosts are tried before the running ranks are interrupted for them: a host that is down costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hvdlite.launch.job.hosts import Host


class Newcomers:
    """Tries new hosts, each in a thread of its own.

    Args:
        answers: Tells whether a host, by its name, can run ranks. None if the hosts are taken as they are.
    """

    def __init__(self, answers: Callable[[str], bool] | None) -> None:
        self._answers = answers
        self._tries: dict[str, _Try] = {}

    def are_there(self, hosts: Sequence[Host]) -> bool:
        """Tell whether all these hosts answer. This does not wait: call it again and again.

        Args:
            hosts: The hosts. What was found of others is forgotten.
        """
        if self._answers is None:
            return True
        names = {host.name for host in hosts}
        self._tries = {name: each for name, each in self._tries.items() if name in names}
        for name in names - self._tries.keys():
            self._tries[name] = _Try(name, self._answers)
        return all(each.answers for each in self._tries.values())

    def missing(self) -> list[str]:
        """Return the hosts that have not answered. They are tried anew when they are asked for again."""
        found = [name for name, each in self._tries.items() if each.is_over and not each.answers]
        for name in found:
            del self._tries[name]
        return found


class _Try(threading.Thread):
    def __init__(self, name: str, ask: Callable[[str], bool]) -> None:
        super().__init__(name=f"hvdlite-try-{name}", daemon=True)  # hvdliterun does not wait for it in the end
        self._host, self._ask = name, ask
        self.is_over = self.answers = False
        self.start()

    def run(self) -> None:
        self.answers = self._ask(self._host)
        self.is_over = True
