"""The hosts of an elastic job, which a script of the user prints: one on each line, ``host`` or ``host:slots``."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO

from hvdlite.errors import LaunchError
from hvdlite.launch.job.hosts import Host, make_host

PERIOD = 1.0
"""Seconds between the ends of a call of the script and the next call."""
LIMIT = 30.0
"""Seconds after which a call of the script is given up."""
_MOST_BYTES = 1 << 20
_TOO_MUCH = "it printed more than 1 MiB; expected lines host:slots"


class Discovery:
    """A `Discovery` runs the script again and again, one call at a time, and waits for none.

    Args:
        words: The script and its arguments (see `words_of`).
        slots: The slots of a host for which the script prints no number.
        say: Is called with a problem, once for each problem, after a good call. The hosts that were found before stay.

    Attributes:
        hosts: The hosts that the last good call has printed; None before that.
        problem: Why the last call was not good; empty if it was.
    """

    def __init__(self, words: Sequence[str], slots: int, say: Callable[[str], None]) -> None:
        self._words = words
        self._slots = slots
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._since = float("-inf")
        self._files: tuple[IO[bytes], IO[bytes]] | None = None
        self.hosts: tuple[Host, ...] | None = None
        self.problem = ""

    def poll(self, now: float) -> None:
        """Start the script if it is time for that, or take what it has printed. This does not wait.

        Args:
            now: The time, as of `time.monotonic`.
        """
        if self._process is None:
            if now - self._since >= PERIOD:
                self._since = now
                self._start()
        elif (status := self._process.poll()) is not None:
            self._kill()  # processes that the script has left behind
            self._take(status)
            self._since = now
        elif now - self._since > LIMIT:
            self._give_up(now, f"it does not end: it was given up after {LIMIT:g} s")
        elif any(os.fstat(file.fileno()).st_size > _MOST_BYTES for file in self._files or ()):  # it would fill the disk
            self._give_up(now, _TOO_MUCH)

    def _give_up(self, now: float, why: str) -> None:
        self.close()
        self._since = now
        self._note(why)

    def close(self) -> None:
        """End a call that is not over."""
        if self._process is not None:
            self._kill()
            self._process.wait()
            self._close()

    def _start(self) -> None:
        out, err = self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (`_close` closes them)
        try:
            # Files, not pipes: nobody need read them meanwhile, and a process that the script leaves behind holds nothing up.
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            self._close()
            self._note(f"it cannot be run: {error.strerror}")

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> None:
        for file in self._files or ():
            file.close()
        self._process = self._files = None

    def _take(self, status: int) -> None:
        out, err = map(_read, self._files or ())
        self._close()
        if status:
            said = err.decode(errors="replace").strip() or out.decode(errors="replace").strip()
            end = f"exit code {status}" if status > 0 else f"signal {-status}"
            self._note(f"it ended with {end}" + (f", saying:\n{said[-2000:]}" if said else ", and said nothing"))
            return
        try:
            found = parse(out, self._slots)
        except LaunchError as error:
            self._note(str(error).rstrip("."))
            return
        if self.hosts and not found:  # a script that fails often ends well and prints nothing
            self._note("it printed no host")
            return
        self.hosts, self.problem = found, ""

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            if self.hosts is not None:
                self._say(problem)


def parse(data: bytes, slots: int) -> tuple[Host, ...]:
    """Read what the script has printed. The order of the lines stays.

    Args:
        data: The lines, each a ``host`` or ``host:slots``.
        slots: The slots of a host without a number.

    Raises:
        LaunchError: There is a line of another form, a host that comes twice, or more than 1 MiB.
    """
    if len(data) > _MOST_BYTES:
        raise LaunchError(_TOO_MUCH)
    try:
        lines = [line.strip() for line in data.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise LaunchError(f"it printed bytes that are no text ({error}); expected lines host:slots") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        name, colon, count = line.partition(":")
        where = f"it printed, in line {number}, {line[:100]!r}"
        host = make_host(name, count if colon else str(slots), where)
        if name in hosts:
            raise LaunchError(f"{where}: the host {name} comes twice")
        hosts[name] = host
    return tuple(hosts.values())


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(_MOST_BYTES + 1)


def words_of(command: str) -> list[str]:
    """Split the script and its arguments as a shell does.

    Raises:
        LaunchError: They cannot be split, there is no such program, or it is not executable.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--host-discovery-script {command!r}: {error}.") from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise LaunchError(f"--host-discovery-script {command!r}: there is no such program, or it is not executable.")
    return [program, *words[1:]]


class Newcomers:
    """Tries new hosts, each in a thread of its own, before ranks are interrupted for them: one that is down costs nothing.

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
