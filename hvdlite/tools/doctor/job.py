"""Starts the ranks that examine, and listens to them. A job that says nothing any more is ended."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from hvdlite.config import environment
from hvdlite.tools.doctor.facts import InstallFacts
from hvdlite.tools.doctor.finding import Finding, error
from hvdlite.tools.doctor.heard import Heard, word_in
from hvdlite.tools.doctor.probe import ProbeRequest

SILENCE_SECONDS = 15.0
"""A job that works says something more often."""
_END_SECONDS = 6.0


def run(
    launch: Sequence[str],
    size: int,
    request: ProbeRequest,
    heard: Heard,
    start_by: float,
    progress: Callable[[str], None],
    program: Sequence[str] = (sys.executable, "-m", "hvdlite.tools.doctor.rank"),
) -> list[Finding]:
    """Run the ranks to their end, and put what they say into `heard`.

    Args:
        launch: The arguments of hvdliterun that say where.
        size: The number of ranks.
        request: What they are asked to do.
        heard: Takes their words.
        start_by: The time of `time.monotonic` by which they must have said something.
        progress: Is called with what they do.
        program: What the ranks run, before the request.

    Returns:
        The findings about the job itself: that it failed, or hung.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C. The job has ended.
    """
    words = [sys.executable, "-m", "hvdlite.launch", "-np", str(size), *launch, "--no-tag-output"]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [*words, *program, json.dumps(request.pack())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            errors="replace",
            env=environment(),
        )
        assert process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            hung = _listen(lines, heard, start_by, progress)
        finally:
            code = _end(process)
            reader.join(_END_SECONDS)
        said.seek(0)
        heard.printed = said.read()
        return verdict(heard, size, hung, code)


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _listen(
    lines: queue.SimpleQueue[str | None], heard: Heard, start_by: float, progress: Callable[[str], None]
) -> bool:
    """Take all words. Return True if no more came, although the job has not ended."""
    silent_from = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            limit = start_by if not heard.count else silent_from + SILENCE_SECONDS
            if time.monotonic() > limit:
                return True
            continue
        if line is None:
            return False
        word = word_in(line)
        if word is not None:
            silent_from = time.monotonic()
            heard.take(*word)
            progress(heard.stage)


def _end(process: subprocess.Popen[str]) -> int:
    """Return the exit code of hvdliterun, which is ended if it has not ended."""
    if process.poll() is None:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def verdict(heard: Heard, size: int, hung: bool, code: int) -> list[Finding]:
    """Return the findings about the end of a job.

    Args:
        heard: What the ranks have said.
        size: How many ranks there were.
        hung: Whether they had to be ended because they said nothing any more.
        code: The exit code of hvdliterun.
    """
    if not hung and (code == 0 or any(each.alone for each in heard.mpi.values())):
        return []
    doing = f" while {heard.stage}" if heard.stage else " before they said anything"
    if hung:
        silent = sorted(set(range(size)) - set(heard.hosts))
        who = f"; rank {', '.join(map(str, silent))} never spoke" if silent and heard.hosts else ""
        return [
            error(
                "hanging job",
                f"the ranks hung{doing}{who}",
                "words of them within seconds",
                "try hvdliterun --verbose with a small program; look at firewalls between the hosts, and --network-interface",
            )
        ]
    why = _reason(heard.printed) or f"exit code {code}"
    return [
        error(
            "failed job",
            f"the ranks failed{doing}: {why[:400]}",
            "ranks that start and end",
            "see its last messages above",
        )
    ]


def _reason(printed: str) -> str:
    """Return the line of a job's messages that says best why it has failed: what hvdliterun says of mpirun, or the last one."""
    lines = [line.strip() for line in printed.splitlines() if any(map(str.isalpha, line))]
    of_mpirun = [line for line in lines if line.startswith("hvdliterun: mpirun ")]
    return (of_mpirun or lines or [""])[-1].removeprefix("hvdliterun: ").removesuffix(" It said:").rstrip(".")


def can_start(install: InstallFacts) -> bool:
    """Return whether a job can be started at all."""
    return not (install.launcher_fault or install.library_fault)
