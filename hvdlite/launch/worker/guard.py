"""The guard of one rank passes on the rank's output, reports the rank's end, and ends the rank when it is told to.

The guard waits for whatever comes first: a message from hvdliterun, a signal, the rank's output or reports, the rank's end.

Nothing here imports ``hvdlite``: guards load this file under the name of another package (see worker.py), so its imports are
relative.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import Any

from ...launcher_link.link import UNREACHABLE, LauncherChannel
from ...launcher_link.session import clip
from . import orphans, shared_memory
from .program import STACK_SIGNAL, without_own_frames

_KILL_AT_ONCE = 0.0
_DRAIN_SECONDS = 0.5
_NO_GRACE = 0.0
_ORPHAN_GRACE_SECONDS = 1.0  # for helper processes that see that their rank has ended, and tidy up
_STACK_SECONDS = 0.4  # a stopped program that runs again writes its stack in less
_WINDOW = 1 << 18  # so many bytes may be sent before hvdliterun has taken them: a slow reader makes the rank wait


class Guard:
    """A `Guard` watches one rank.

    Args:
        connection: The connection to hvdliterun.
        child: The process id of the rank's program, which leads a process group of its own.
        stdout: The read end of a pipe, the program's stdout.
        stderr: The read end of a pipe, the program's stderr.
        reports: The read end of a pipe for the program's own messages and faulthandler's stack dumps.

    Attributes:
        finished: The program came to its end by itself.
    """

    def __init__(self, connection: LauncherChannel, child: int, stdout: int, stderr: int, reports: int) -> None:
        self._connection = connection
        self._child = child
        self._pipes = {stdout: "stdout", stderr: "stderr", reports: "reports"}
        self._report_text = bytearray()
        self._unacknowledged = {"stdout": 0, "stderr": 0, "reports": 0}
        self.finished = False
        self._asked = False  # a signal told the guard to end the rank: the MPI launcher does that
        self._stays = False  # a rank was lost, and the job goes on: no guard leaves before the end
        self._dropped = False  # this rank is the one
        self._ending = False  # hvdliterun told the guard to end the rank, or hvdliterun is gone
        self._status: int | None = None
        self._kill_at: float | None = None
        self._wake, wake_write = os.pipe()
        for end in (self._wake, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def run(self, hello: dict[str, Any]) -> int:
        """Watch the rank until it has ended; if a rank has failed, until hvdliterun or a signal tells the guard to leave.

        Args:
            hello: The fields of the first message to hvdliterun.

        Returns:
            The exit code of the rank, which the guard ends with too.
        """
        try:
            self._send("hello", **hello)
            self._reap()
            while self._status is None or self._waits_for_end():
                self._step()
        except OSError as error:  # hvdliterun is gone
            self._end(_KILL_AT_ONCE)
            if error.errno in UNREACHABLE:
                orphans.end_daemon()
        return self._leave()

    def _waits_for_end(self) -> bool:
        return (self._failed() or self._stays) and not self._ending and not self._asked

    def _failed(self) -> bool:
        return self._status != 0 or not self.finished

    def _send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        self._connection.send(kind, payload, **fields)

    def _step(self) -> None:
        wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        pipes = [pipe for pipe, name in self._pipes.items() if self._unacknowledged[name] < _WINDOW]
        watched = [self._connection.fileno(), self._wake, *pipes]
        ready = select.select(watched, [], [], wait)[0]
        if wait is not None and time.monotonic() >= (self._kill_at or 0.0):
            self._signal(signal.SIGKILL)
            self._kill_at = None
        self._pass_on(ready)
        if self._connection.fileno() in ready:
            self._listen()
        if self._wake in ready:
            self._on_signals(os.read(self._wake, 4096))

    def _pass_on(self, ready: list[int]) -> None:
        for descriptor in ready:
            if descriptor not in self._pipes:
                continue
            data = os.read(descriptor, 1 << 16)
            if not data:
                os.close(descriptor)
                del self._pipes[descriptor]
            elif self._pipes[descriptor] == "reports":
                self._on_report(data)
            else:
                name = self._pipes[descriptor]
                self._unacknowledged[name] += len(data)
                self._send("output", data, stream=name)

    def _on_report(self, data: bytes) -> None:
        # The program's own messages are lines of JSON; anything else is faulthandler's stack dump.
        self._report_text += data
        while (end := self._report_text.find(b"\n")) >= 0 and self._report_text.startswith(b'{"kind"'):
            fields = json.loads(self._report_text[:end])
            del self._report_text[: end + 1]
            self.finished |= fields["kind"] == "done"
            self._send(**fields)

    def _listen(self) -> None:
        for message in self._connection.receive():
            if message.kind == "end":
                self._end(message.fields["grace"])
            elif message.kind == "show":
                self._send("stack", text=self._stack(message.fields["stopped"]))
            elif message.kind in ("stay", "drop"):
                self._stays = True
                if message.kind == "drop":
                    self._drop()
            elif message.kind == "taken":
                self._unacknowledged[message.fields["stream"]] -= message.fields["bytes"]

    def _drop(self) -> None:
        """End what is left of the rank. The files of MPI stay: the other ranks use them."""
        self._dropped = True
        self._signal(signal.SIGKILL)
        if self._status is not None:
            orphans.end(_NO_GRACE)

    def _end(self, grace: float) -> None:
        self._ending = True
        # This comes first: when one guard has left, the MPI launcher may kill the others.
        shared_memory.sweep(self._child)
        if grace > 0:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process would not see the SIGTERM
            self._kill_at = time.monotonic() + grace
        else:
            self._signal(signal.SIGKILL)

    def _stack(self, stopped: bool) -> str:
        """Let the program write the stacks of its threads, and return them. A stopped program runs for that moment.

        It writes in a handler of a signal, in C: so it does although Python's lock is held in code that does not return.
        """
        if STACK_SIGNAL is None or self._status is not None:
            return ""
        before, deadline = len(self._report_text), time.monotonic() + _STACK_SECONDS
        _signal_main_thread(self._child, STACK_SIGNAL)
        if stopped:
            os.kill(self._child, signal.SIGCONT)
        while (
            reports := [pipe for pipe, name in self._pipes.items() if name == "reports"]
        ) and time.monotonic() < deadline:
            if select.select(reports, [], [], 0.02)[0]:
                self._pass_on(reports)
            elif self._report_text.endswith(b"\n", before):
                break
        if stopped:
            os.kill(self._child, signal.SIGSTOP)
        lines = bytes(self._report_text[before:]).splitlines(keepends=True)
        del self._report_text[before:]
        for line in lines:  # what it has reported meanwhile is no part of its stack
            if line.startswith(b'{"kind"'):
                self._on_report(line)
        stack = b"".join(line for line in lines if not line.startswith(b'{"kind"'))
        return clip(without_own_frames(stack.decode(errors="replace")))

    def _on_signals(self, numbers: bytes) -> None:
        if set(numbers) - {signal.SIGCHLD}:
            if not self._asked:
                self._send("asked")
            self._asked = True
            shared_memory.sweep(self._child)
            self._signal(signal.SIGTERM)
        self._reap()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid != self._child:  # a process that the rank left behind
                continue
            if os.WIFSTOPPED(status):
                self._send("stopped", signal=os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._send("continued")
            else:
                self._status = os.waitstatus_to_exitcode(status)
                self._drain()
                trace = clip(without_own_frames(self._report_text.decode(errors="replace")))
                at = time.time()
                self._send("exit", status=self._status, finished=self.finished, trace=trace, time=at)
                if self._dropped:
                    orphans.end(_NO_GRACE)

    def _drain(self) -> None:
        # This does not wait for end of file: a process that the rank left behind may hold the pipes, and write on.
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline and (ready := select.select([*self._pipes], [], [], 0)[0]):
            self._pass_on(ready)

    def _leave(self) -> int:
        failed = self._failed()
        status = self._status
        if failed:
            self._signal(signal.SIGKILL)  # for processes that the rank left behind in its group, such as data loaders
            shared_memory.sweep(self._child)
        else:
            shared_memory.leave_directory()
        if status is None:
            status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        orphans.end(_NO_GRACE if failed else _ORPHAN_GRACE_SECONDS)
        self._connection.finish()
        return status if status >= 0 else 128 - status


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of another process.

    A signal for a process goes to any of its threads if all are stopped, also to a thread of a C library. That thread would
    write the stack of the main thread while the main thread runs on and changes it, and this may crash the process.
    """
    import ctypes

    ctypes.CDLL(None).tgkill(pid, pid, int(number))  # the main thread's id is the process id; glibc 2.30, musl 1.1.20
