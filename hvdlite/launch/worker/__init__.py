"""The MPI launcher starts a worker for each rank, on every host: a guard process, and as its child the user's program.

    worker.py, run by path ── guard.py   watches the program, and reports to hvdliterun
      |                        |- orphans.py        ends the processes that the program left behind
      |                        '- shared_memory.py  creates and removes MPI's files in /dev/shm
      |- fork ── program.py    becomes the user's program, and reports how it ended
      '- rank_environment.py   reads the MPI launcher's variables, and sets those of compute libraries and of Horovod

The guard is small because it loads these files without this `__init__`, without NumPy and without `hvdlite` itself. So these
files import only the standard library, `launcher_link` and each other, by relative imports.
"""

from __future__ import annotations

import os

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
"""The program that the MPI launcher starts."""
