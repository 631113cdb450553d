"""Draws pairs, starts jobs of real processes that run them, and says what became of each."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.one_process.excuses import EXCUSES
from tests.support.jobs import mpirun

FRAMEWORKS = ("torch", "keras", "keras_on_torch")
GOOD = ("right", "refused", "excused")
JOB_LIMIT = 3000.0  # seconds


class Pair(NamedTuple):
    """A program, which does one thing or more, and a way."""

    framework: str
    program: tuple[str, ...]
    way: str

    def __str__(self) -> str:
        return f"{' + '.join(self.program)} × {self.framework}: {self.way}"


class Result(NamedTuple):
    """What became of a pair."""

    pair: Pair
    outcome: str
    detail: str


def pairs_of(framework: str) -> dict[int, list[Pair]]:
    """Return all pairs of one row and one way, by the number of ranks that they need."""
    kind = importlib.import_module(f"tests.one_process.{framework}_ways")
    found: dict[int, list[Pair]] = {}
    for name, way in kind.WAYS.items():
        found.setdefault(way.ranks, []).extend(Pair(framework, (row,), name) for row in kind.PROGRAMS)
    return found


def run(pairs: Sequence[Pair], ranks: int, budget: float = JOB_LIMIT) -> Iterator[Result]:
    """Run pairs of one framework, and yield what became of each. A job that ends early is followed by one with the rest.

    Args:
        pairs: The pairs.
        ranks: The number of ranks.
        budget: Seconds after which no further job is started, and the present one ends with its pair.
    """
    end = time.monotonic() + budget
    left = list(pairs)
    with tempfile.TemporaryDirectory(prefix="hvdlite-one-process-") as folder:
        while left and time.monotonic() < end:
            file = Path(folder) / f"results-{len(left)}"
            said = ""
            try:
                done = mpirun(
                    ranks,
                    *("-m", "tests.one_process.worker", left[0].framework, str(file), str(end - time.monotonic())),
                    json.dumps([[pair.program, pair.way] for pair in left]),
                    timeout=max(end - time.monotonic(), 0.0) + 120,
                    HVDLITE_ADVICE="0",
                    HVDLITE_DEADLOCK_TIME_SECONDS="0.5",
                    OMP_NUM_THREADS="1",
                    TF_CPP_MIN_LOG_LEVEL="3",
                )
                said = done.stdout[-4000:] + done.stderr[-8000:]
            except subprocess.TimeoutExpired:
                done, said = None, "the job did not end in time"
            results = _read(file, left, said)
            if not results:
                raise RuntimeError(f"the job of {ranks} ranks ran no pair:\n{said}")
            yield from results
            left = left[len(results) :]
            if done is not None and done.returncode == 0:
                break


def _read(file: Path, pairs: Sequence[Pair], said: str) -> list[Result]:
    """Return the results in a file: of each pair the last line counts, for the first one says that it has begun."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found: list[Result] = []
    for program, way, outcome, detail in lines:
        pair = Pair(pairs[0].framework, tuple(program), way)
        if found and found[-1].pair == pair:
            found.pop()
        found.append(Result(pair, outcome, detail))
    if found and found[-1].outcome not in GOOD and not found[-1].detail:
        found[-1] = found[-1]._replace(detail=said)
    return [judged(result) for result in found]


def judged(result: Result) -> Result:
    """Return the result; one that an excuse is meant for is excused, and one that is right in spite of its excuse is wrong."""
    pair = result.pair
    for excuse in EXCUSES:
        if (
            pair.framework.startswith(excuse.framework)
            and pair.way in excuse.ways
            and set(excuse.rows) & set(pair.program)
        ):
            if result.outcome == excuse.outcome:
                return result._replace(outcome="excused", detail=excuse.reason)
            if result.outcome == "right" and len(pair.program) == 1:
                return result._replace(
                    outcome="wrong", detail=f"it is right, so its excuse is out of date: {excuse.reason}"
                )
    return result


def draw(framework: str, seed: int, combined: bool = True) -> Iterator[tuple[int, list[Pair]]]:
    """Yield pairs in an order that the seed decides, for each number of ranks. Some programs do two things at once."""
    kind = importlib.import_module(f"tests.one_process.{framework}_ways")
    dice = random.Random(seed)
    for ranks, pairs in pairs_of(framework).items():
        dice.shuffle(pairs)
        yield ranks, pairs if not combined else list(_combined(kind, pairs, dice))


def _combined(kind: Any, pairs: Sequence[Pair], dice: random.Random) -> Iterator[Pair]:
    rows = list(kind.PROGRAMS)
    for number, pair in enumerate(pairs):
        yield pair
        if number % 3 == 2:
            other = dice.choice(rows)
            if kind.go_together(pair.program[0], other):
                yield pair._replace(program=(pair.program[0], other))


def picture(results: Sequence[Result]) -> str:
    """Return a table of the results: a row for each program, a column for each way."""
    signs = {"right": "=", "refused": "r", "excused": "e"}
    ways = list(dict.fromkeys(result.pair.way for result in results))
    rows = list(dict.fromkeys(result.pair.program for result in results))
    found = {(result.pair.program, result.pair.way): signs.get(result.outcome, "#") for result in results}
    width = max(len(" + ".join(row)) for row in rows)
    lines = [f"  {chr(ord('A') + number)}  {way}" for number, way in enumerate(ways)]
    lines += ["", " " * width + "  " + "".join(chr(ord("A") + n) for n in range(len(ways)))]
    for row in rows:
        lines.append(f"{' + '.join(row):{width}}  " + "".join(found.get((row, way), " ") for way in ways))
    counts = {
        kind: sum(sign == found_sign for found_sign in found.values())
        for kind, sign in [*signs.items(), ("wrong", "#")]
    }
    lines += ["", "= as one process   r refused in words   e excused   # wrong"]
    lines.append(", ".join(f"{number} {kind}" for kind, number in counts.items()) + f", of {len(found)}")
    return "\n".join(lines)
