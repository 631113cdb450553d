"""The replicas as the server sees them: processes that are started, given batches, watched, ended and replaced."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from hvdlite.serving.options import Options
from hvdlite.serving.replicas.contract import Owner
from hvdlite.serving.replicas.process import Process
from hvdlite.serving.replicas.replica import Begin

_LAST_WORDS = 2.0
"""Seconds that replicas get to end by themselves when the server ends."""
_LONGEST_PAUSE = 30.0
"""Seconds between two starts of a replica that cannot start."""

log = logging.getLogger(__name__)


class Fleet:
    """Keeps a number of replicas running.

    Args:
        predict: ``module:name``, or a function that cloudpickle has pickled.
        options: The settings.
        devices: The GPU of each replica (`hvdlite.serving.replicas.devices`).
    """

    def __init__(self, predict: str | bytes, options: Options, devices: Sequence[str]) -> None:
        self._begin = Begin(predict, [os.getcwd(), *sys.path], options.max_batch)
        self._options, self._devices = options, devices
        self._processes: dict[int, Process] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._shared: list[int] = []
        """A file in memory for what the replicas have alike (`hvdlite.serving.servable.Servable.share`)."""
        self._numbers = itertools.count()

    def start(self, owner: Owner) -> None:
        """Start the replicas, and return at once. The owner is told when they are ready."""
        loop = asyncio.get_running_loop()
        if hasattr(os, "memfd_create"):  # Linux has it
            self._shared.append(os.memfd_create("hvdlite weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        self._stopping = asyncio.Event()
        self._slots = [loop.create_task(self._keep(place, owner)) for place in range(self._options.replicas)]

    def send(self, replica: int, inputs: Sequence[Any]) -> None:
        """Let a replica compute a batch. If it takes longer than `Options.timeout`, it is lost."""
        self._processes[replica].send(inputs)

    async def stop(self) -> None:
        """End all replicas, and wait until they have ended."""
        self._stopping.set()
        for process in self._processes.values():
            process.hang_up()
        _, late = await asyncio.wait(self._slots, timeout=_LAST_WORDS)
        if late:
            for process in self._processes.values():
                process.kill("the server ends")
            await asyncio.wait(late)
        while self._shared:
            os.close(self._shared.pop())
        for slot in self._slots:
            slot.result()

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [process.pid for process in self._processes.values()]

    async def _keep(self, place: int, owner: Owner) -> None:
        """Start a replica, and another one whenever it ends."""
        failures = 0
        try:
            while not self._stopping.is_set():
                if await self._run_one(place, owner):
                    failures = 0
                else:
                    failures += 1
                    await self._pause(min(2.0 ** (failures - 1), _LONGEST_PAUSE))
        except Exception:  # a mistake of ours: without this, the server would go on with a replica less
            owner.broken(traceback.format_exc())

    async def _run_one(self, place: int, owner: Owner) -> bool:
        """Start a replica, and wait until it has ended. Return whether it was ready."""
        number = next(self._numbers)
        process = self._processes[number] = Process(number, place, self._devices[place], owner, self._options)
        was_ready = None
        try:
            await process.start(self._begin, self._shared)
            was_ready = await process.ready
            if was_ready is not None and not self._stopping.is_set():
                owner.ready(number, was_ready)
            await process.gone
        except OSError as error:
            owner.not_ready(f"no process can be started: {error}")
            return False
        finally:
            del self._processes[number]
            # One that computes gets no other batch, so there is time to see how it has ended.
            why = await process.end() if process.is_computing else ""
            if was_ready is not None and not self._stopping.is_set():
                owner.lost(number, process.has_crashed)
            why = why or await process.end()
        if self._stopping.is_set():
            return True
        if was_ready is None:
            owner.not_ready(why)
            return False
        log.error("%s It is replaced.", why)
        return True

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except asyncio.TimeoutError:
            return
