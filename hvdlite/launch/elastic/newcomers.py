"""New hosts are tried by ssh before the running ranks are interrupted for them: a host that is down costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hvdlite.job import ssh as by_ssh
from hvdlite.job.hosts import Host


class Newcomers:
    """Tries new hosts, each in a thread of its own.

    Args:
        ssh: The options of ssh; None if plain ssh does not reach the hosts, so that they are taken as they are.
    """

    def __init__(self, ssh: Sequence[str] | None) -> None:
        self._ssh = ssh
        self._tries: dict[str, _Try] = {}

    def are_there(self, hosts: Sequence[Host]) -> bool:
        """Tell whether all these hosts answer. This does not wait: call it again and again.

        Args:
            hosts: The hosts. What was found of others is forgotten.
        """
        if self._ssh is None:
            return True
        names = {host.name for host in hosts}
        self._tries = {name: each for name, each in self._tries.items() if name in names}
        for name in names - self._tries.keys():
            self._tries[name] = _Try(name, self._ssh)
        return all(each.answers for each in self._tries.values())

    def missing(self) -> list[str]:
        """Return the hosts that have not answered. They are tried anew when they are asked for again."""
        found = [name for name, each in self._tries.items() if each.is_over and not each.answers]
        for name in found:
            del self._tries[name]
        return found


class _Try(threading.Thread):
    def __init__(self, name: str, ssh: Sequence[str]) -> None:
        super().__init__(name=f"hvdlite-try-{name}", daemon=True)  # hvdliterun does not wait for it in the end
        self._host, self._ssh = name, ssh
        self.is_over = self.answers = False
        self.start()

    def run(self) -> None:
        self.answers = by_ssh.answers(self._host, self._ssh)
        self.is_over = True
