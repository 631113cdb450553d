"""A rank of a job that runs pairs: `python -m tests.one_process.worker FRAMEWORK RESULTS SECONDS PAIRS`, on every rank."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import hvdlite
from hvdlite.errors import HvdliteError
from tests.one_process.rows import Inapplicable

LIMIT = 150.0  # seconds for a pair, also on a busy machine: only a hang takes that long


def main(framework: str, results: str, seconds: str, pairs: str) -> None:
    if framework == "keras_on_torch":
        os.environ["KERAS_BACKEND"] = "torch"
    if framework.startswith("keras"):  # before its rows make losses, and not where other tests run in the process
        importlib.import_module("keras").config.set_floatx("float64")
    kind = importlib.import_module(f"tests.one_process.{framework}_ways")
    warnings.simplefilter("ignore")  # advice
    tempfile.tempdir = str(Path(results).parent)  # whose owner removes it
    hvdlite.init()
    from mpi4py import MPI

    end = time.monotonic() + float(seconds)
    with Path(results).open("a") as file:
        for program, way in json.loads(pairs):
            if MPI.COMM_WORLD.bcast(time.monotonic() > end):
                break
            _say(file, program, way, "hangs, or ends the job", "")
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            outcome, detail = _outcome(kind, tuple(program), way)
            if outcome != "right":  # another rank may wait for this one, in a join
                hvdlite.shutdown()
            everybody = MPI.COMM_WORLD.allgather((outcome, detail))  # the job's own way may be broken
            if any(each[0] != "right" for each in everybody):
                kind.clean_up()
            faulthandler.cancel_dump_traceback_later()
            _say(file, program, way, *_together(everybody))


def _say(file: Any, *what: Any) -> None:
    if hvdlite.rank() == 0:
        print(json.dumps(what), file=file, flush=True)


@functools.cache
def _alone(kind: Any, run: Any, program: tuple[str, ...]) -> Any:
    return kind.results(run, program)


def _outcome(kind: Any, program: tuple[str, ...], way: str) -> tuple[str, str]:
    column = kind.WAYS[way]
    try:
        try:
            wanted = _alone(kind, column.alone, program)
        except Exception as error:
            if len(program) == 1:
                raise
            raise Inapplicable(f"one process cannot do both: {type(error).__name__}: {error}") from error
        off = kind.distance(kind.results(column, program), wanted)
    except Inapplicable as error:
        return "excused", str(error)
    except HvdliteError as error:
        text = str(error)
        words = ["|".join(kind.PROGRAMS[name].words for name in program), column.words]  # of one row, and of the way
        lacking = [pattern for pattern in words if pattern and not re.search(pattern, text)]
        if lacking:
            return "refused in other words", f"{type(error).__name__}: {text} (no word of {', '.join(lacking)})"
        return "refused", text
    except Exception as error:
        return "fails", "".join(traceback.format_exception(error)[-3:])
    return ("right", "") if off <= column.tolerance else ("wrong", f"off by {off:.2g}")


_WORST = ("hangs, or ends the job", "wrong", "fails", "refused in other words", "refused", "excused", "right")


def _together(everybody: list[tuple[str, str]]) -> tuple[str, str]:
    """Return the outcome of all ranks: the worst, and whether they differ."""
    worst = min(everybody, key=lambda each: _WORST.index(each[0]))
    kinds = {outcome for outcome, _ in everybody}
    if "refused" in kinds and "right" in kinds:
        return "wrong", f"refused on some ranks only: {everybody}"
    if kinds == {"refused", "refused in other words"}:  # a rank says why, and the others that it has left
        others = [text for outcome, text in everybody if outcome != "refused"]
        if all("has left the job" in text for text in others):
            return next(each for each in everybody if each[0] == "refused")
    return worst


if __name__ == "__main__":
    main(*sys.argv[1:])
