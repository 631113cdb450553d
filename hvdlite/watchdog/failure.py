"""How a rank ends the whole job, so that its peers do not wait for it for ever."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from hvdlite.config import Config


def end_job(config: Config, rank: int, text: str) -> None:
    """Say why (to the launcher, which prints it last; else on stderr) and end all ranks. Does not return.

    Called from any thread, while another may be inside MPI for ever.
    """
    from hvdlite.launcher_link.link import (
        report_failure,  # not at import: it loads sockets and JSON, for this moment alone
    )

    if not report_failure(config.control, rank, text, 1):
        print(f"hvdlite: rank {rank}: {text}", file=sys.stderr, flush=True)
    abort(1)


def abort(code: int) -> None:
    """End all ranks of the MPI job with this exit code. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def end_job_on_uncaught_exceptions() -> None:
    """From now on an exception that nobody catches ends the job, after its traceback was printed as ever.

    What hvdliterun's worker does for its ranks, for those that plain mpirun or srun started.
    """
    previous, rank = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            previous(kind, value, trace)
        except (
            BaseException
        ):  # of a hook of the program's, or of a signal handler: the reason must be seen nevertheless
            traceback.print_exception(kind, value, trace)
            traceback.print_exc()
        finally:
            if os.getpid() == rank:  # a forked child ends alone
                abort(1)

    sys.excepthook = hook
