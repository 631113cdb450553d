"""Run several programs one after the other, each as ``python PROGRAM ARGUMENT …`` would: Python takes seconds to start.

Call this program as ``run_each.py FOLDER COMMAND …``. Each rank writes FOLDER/RANK.json: for each command its exit code, its
stdout and its stderr. A program that raises ends the job.
"""

import contextlib
import io
import json
import runpy
import sys
import tempfile
from pathlib import Path

import hvdlite


def run(command: str) -> tuple[int, str, str]:
    """Run one program. Return its exit code, its stdout and its stderr."""
    sys.argv = command.split()
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):  # Python prints a text, and exits with 1
                print(end.code, file=sys.stderr)
                code = 1
            else:
                code = end.code or 0
    return code, out.getvalue(), err.getvalue()


folder, *commands = sys.argv[1:]
tempfile.tempdir = folder  # what programs leave goes with it
ends, rank = {}, 0
for command in commands:
    ends[command] = run(command)
    if hvdlite.is_initialized():
        rank = hvdlite.rank()
        hvdlite.shutdown()
(Path(folder) / f"{rank}.json").write_text(json.dumps(ends))
