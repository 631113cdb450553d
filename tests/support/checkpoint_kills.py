"""Kills trainings while they save behind the training: ``scripts/faults --checkpoints --seed 1 --count 100``.

What was said to be saved must be there, whole, at whatever moment a process is killed, and the next process goes on from it.
By turns all ranks are killed (the threads of one process), and one rank of a job, whose others may finish the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from hvdlite.testing import on_ranks
from tests.support import counted_state
from tests.support.jobs import PROGRAMS, PYTHONPATH

RANKS = 2
_PROGRAM = str(PROGRAMS / "saves_behind.py")
_JOB = ["-m", "hvdlite.launch", "-np", str(RANKS)]


class Kills:
    """Kills one process after another, all of which save in the same folder. `check` is called after each.

    Args:
        folder: The folder of the checkpoints.
        seed: It chooses the moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._chance = folder, random.Random(seed)
        self.last = 0
        """The newest checkpoint."""
        self.more = 0
        """How often a checkpoint was there that nobody had been told of: it had got its name just before."""

    def kill(self, in_a_job: bool = False) -> None:
        """Start a process, or a job, kill it, and check what is left.

        Raises:
            AssertionError: Something that was said to be saved is not there, or what is there is not whole.
        """
        words = [*_JOB, _PROGRAM, str(self._folder)] if in_a_job else [_PROGRAM, str(self._folder), str(RANKS)]
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
        assert process.stdout is not None
        out = ""
        enough = self._chance.randrange(2, 9)
        while out.count("saved ") < enough:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            out += line
        pids = [int(pid) for pid in re.findall(r"rank \d+ is (\d+)", out)]
        threading.Event().wait(self._chance.random() * 0.05)  # anywhere
        os.kill(self._chance.choice(pids or [process.pid]), signal.SIGKILL)
        out += process.communicate(timeout=60)[0]
        said = int(re.findall(r"saved (\d+)\n", out)[-1])
        for size in (1, RANKS):  # a checkpoint that has its name is whole: there is no warning
            ((found, warned), *_) = on_ranks(size, counted_state.load, self._folder)
            assert not warned, warned
            assert found >= said >= self.last, f"{said} was said to be saved, and {found} is there"
        self.last = found
        self.more += found > said


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults --checkpoints", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same moments, more or less")
    parser.add_argument("--count", type=int, required=True, help="how many")
    options = parser.parse_args()
    counted_state.register()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills = Kills(Path(folder, "checkpoints"), options.seed)
        for number in range(options.count):
            kills.kill(in_a_job=number % 2 == 1)
            print(
                f"{number + 1}/{options.count} kills, {kills.last} checkpoints, none lost; "
                f"{kills.more} times one more was there than was said, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
