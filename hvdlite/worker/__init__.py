"""What the MPI launcher starts for each rank, on every host: a guard, and below it the user's program.

    worker.py, run by path ── guard.py   watches the program, and tells the launcher of it
      |                        |- orphans.py        what it left behind
      |                        '- shared_memory.py  MPI's files in /dev/shm
      '─ fork ── program.py    becomes the user's program
    rank_environment.py        MPI's variables, and the threads of compute libraries

The guard is small because it loads these files without this `__init__`, without NumPy and without `hvdlite` itself. So they
import the standard library, `launcher_link` and each other only, by relative imports.
"""

from __future__ import annotations

import os

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
"""The program that the MPI launcher starts."""
