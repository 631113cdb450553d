"""``python -m hvdlite.compat`` runs a program written for Horovod, or reports which parts of Horovod it uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hvdlite.compat import finder
from hvdlite.config import Config
from hvdlite.launch import horovod
from hvdlite.launch.worker.program import run_python, user_frames

USAGE = """\
usage: hvdlite compat program.py [argument ...]     run a program written for Horovod: `import horovod` means hvdlite
       hvdlite compat -m module [argument ...]      the same for a module
       hvdlite compat -c code [argument ...]        the same for code
       hvdlite compat --report PATH [PATH ...]      what of Horovod a program uses, and whether it is here
       hvdlite compat --table                       what of Horovod is here, as Markdown

To run it on several ranks: hvdliterun --horovod -np 4 program.py, or mpirun -n 4 python -m hvdlite.compat program.py.
A report takes Python files, shell scripts and folders. Its exit code is 1 if something is missing.
"""
USAGE_ERROR = 2


def main(arguments: Sequence[str]) -> int:
    """Run ``python -m hvdlite.compat`` with these arguments.

    Returns:
        The exit code: 0 if the program came to its end, 1 if it raised an exception; 2 if the arguments are wrong. For
        ``--report`` see `hvdlite.compat.report.main`.

    Raises:
        BaseException: The program raised a SystemExit or KeyboardInterrupt; or any exception under hvdliterun, which prints
            it.
    """
    words = list(arguments)
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if first in ("--report", "--table"):
        from hvdlite.compat import report

        if first == "--table" and len(words) == 1:
            print(report.markdown())
            return 0
        if first == "--report" and len(words) > 1:
            return report.main(words[1:])
        return _refuse(f"{first}: expected {'no' if first == '--table' else 'the paths of programs as'} arguments.")
    if first in ("-m", "-c"):
        if len(words) == 1:
            return _refuse(f"{first}: expected {'a module' if first == '-m' else 'code'} after it.")
    elif not first or first.startswith("-"):
        return _refuse(f"expected a program, not {first!r}." if first else "expected a program.")
    elif not os.path.exists(first):
        return _refuse(f"there is no program {first!r} in {os.getcwd()}.")
    return _run(words)


def _refuse(text: str) -> int:
    print(f"hvdlite compat: {text} See hvdlite compat --help", file=sys.stderr)
    return USAGE_ERROR


def _run(program: list[str]) -> int:
    finder.install()
    horovod.add_startup_folder()
    try:
        run_python(program)
    except Exception as error:
        if Config.from_env().control:  # hvdliterun's worker reports the exception
            raise
        sys.excepthook(type(error), error.with_traceback(user_frames(error)), error.__traceback__)
        return 1
    return 0
