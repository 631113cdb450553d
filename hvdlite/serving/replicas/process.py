"""One process of a replica, from its start to its end, as the server's event loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, cast

from hvdlite.serving import child
from hvdlite.serving.options import Options
from hvdlite.serving.replicas.contract import Owner
from hvdlite.serving.replicas.replica import Begin, Compute, Computed, NotReady, Raised, Ready
from hvdlite.serving.wire import Frames, frame, pack, unpack

_DUMP = signal.SIGURG
"""The signal at which a replica writes down where each of its threads is (`hvdlite.serving.replicas.replica`). A process that
has not come so far ignores it."""
_DUMP_SECONDS = 1.0
"""What it gets for that."""
_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which a process is ended by somebody else: a person, or the kernel when memory is short."""
_LAST_WORDS = 1.0
"""Seconds that a process gets to end by itself after its line to the server was cut."""


log = logging.getLogger(__name__)


class Process:
    """One replica.

    Args:
        number: Its number, which no other process has.
        place: The number of the replica, from 0 on. The process that takes its place has the same.
        device: Its GPU, as CUDA_VISIBLE_DEVICES names it; empty if it sees what the server sees.
        owner: Who is told of its batches.
        options: The settings.

    Attributes:
        ready: What it said when it was ready; None if it ended before.
        gone: Done when its line to the server is cut.
        is_computing: Whether it has a batch.
        has_crashed: Whether it has ended by itself, or was ended because a batch took too long. Known after `end`.
    """

    def __init__(self, number: int, place: int, device: str, owner: Owner, options: Options) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready | None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._number, self._owner, self._options = number, owner, options
        self._place, self._device = place, device
        self.is_computing = self.has_crashed = False
        self._why, self._is_refused = "", False
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The number of the process, which has started."""
        assert self._process is not None
        return self._process.pid

    @property
    def _where(self) -> str:
        return f"pid {self.pid}, GPU {self._device}" if self._device else f"pid {self.pid}"

    async def start(self, begin: Begin, shared: Sequence[int] = ()) -> None:
        """Start the process, and tell it what to serve.

        Args:
            begin: What to serve.
            shared: The file for weights that it shares with others, if there is one.
        """
        self._process, ours = child.start(
            "hvdlite.serving.replicas.replica",
            self._options.threads,
            {"HVDLITE_REPLICA": str(self._place), **({"CUDA_VISIBLE_DEVICES": self._device} if self._device else {})},
            insist=self._options.threads_per_replica is not None,
            descriptors=shared,
        )
        self._predict = begin.predict if isinstance(begin.predict, str) else "the function"
        ours.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: Frames(self._received, self._ended), sock=ours
        )
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.writelines(frame(begin))
        self._limit(
            self._options.start_timeout,
            f"took longer than {self._options.start_timeout:g} s to import {self._predict} and to warm up",
            ": see above where it is. If it needs more time, give a longer --start-timeout",
        )

    def send(self, inputs: Sequence[Any]) -> None:
        """Let the replica compute a batch."""
        self.is_computing = True
        how, buffers = pack(inputs)
        assert self._transport is not None
        self._transport.writelines(frame(Compute(how), buffers))
        self._limit(
            self._options.timeout,
            f"took longer than {self._options.timeout:g} s for a batch of {len(inputs)} (--timeout)",
        )

    def hang_up(self) -> None:
        """Cut the line: the process ends then."""
        if self._transport is not None:
            self._transport.abort()

    def kill(self, why: str) -> None:
        """End the process and what it has started, at once."""
        if self._process is None:
            return
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> str:
        """Wait until the process has ended, and return why it has. One whose line is not cut is ended."""
        if self._process is None:
            return "did not start"
        if not self.gone.done():
            self.kill("was not wanted any more")
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _LAST_WORDS)
        said = self._why
        self.kill("did not end when its line to the server was cut")
        code = await asyncio.to_thread(self._process.wait)
        self.has_crashed = bool(said) or -code not in _BY_OTHERS
        if self.ready.done() and self.ready.result() is not None:
            return f"Replica {self._place} ({self._where}) {said or _how_it_ended(code)}."
        if self._is_refused:
            return said
        if said:
            return f"the replica {said}."
        hint = ""
        if code == -signal.SIGKILL:
            hint = (
                " The system ends a process so if there is too little memory for it: give a smaller --max-batch (it is "
                f"{self._options.max_batch}), or fewer --replicas."
            )
        return f"the replica {_how_it_ended(code)} while it imported {self._predict} or warmed up.{hint}"

    def _limit(self, seconds: float, why: str, way_out: str = "") -> None:
        if not self.gone.done():
            self._timer = asyncio.get_running_loop().call_later(seconds, self._overdue, why, way_out)

    def _overdue(self, why: str, way_out: str) -> None:
        """Let the process say where it is, and end it. A stopped one says nothing."""
        log.error("Replica %d (%s) %s. It is here:", self._place, self._where, why)
        self._why = why + way_out
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, _DUMP)
        self._timer = asyncio.get_running_loop().call_later(_DUMP_SECONDS, self.kill, why + way_out)

    def _received(self, message: Any, data: bytearray) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._why = ""  # it may have been late, but not too late
        self.is_computing = False
        if isinstance(message, Computed):
            self._owner.computed(self._number, unpack(message.how, data))
        elif isinstance(message, Raised):
            self._owner.raised(self._number, message.text, message.blame)
        elif isinstance(message, NotReady):
            self._why, self._is_refused = message.text, True
        else:
            self.ready.set_result(message)

    def _ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.ready.done():
            self.ready.set_result(None)
        self.gone.set_result(None)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
