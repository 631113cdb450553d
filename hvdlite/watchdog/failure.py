"""Ends the whole job after a failure of one rank, so that the other ranks do not wait for this rank for ever."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from hvdlite.config import Config


def end_job(config: Config, rank: int, text: str) -> None:
    """Report `text` and end all ranks. This does not return.

    The text goes to the launcher, which prints it last, or to stderr if there is no launcher. Any thread may call this, even
    while another thread hangs inside MPI.
    """
    from hvdlite.launcher_link.link import (
        report_failure,  # not at the top: it loads sockets and JSON, which only a failure needs
    )

    if not report_failure(config.control, rank, text, 1):
        print(f"hvdlite: rank {rank}: {text}", file=sys.stderr, flush=True)
    abort(1)


def abort(code: int) -> None:
    """End all ranks of the MPI job with the exit code `code`. This does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def end_job_on_uncaught_exceptions() -> None:
    """Let an uncaught exception end the job from now on, after its traceback was printed as usual.

    This is for ranks that plain mpirun or srun has started. For its own ranks hvdliterun does the same in its worker.
    """
    previous, rank = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            previous(kind, value, trace)
        except (
            BaseException
        ):  # an error in a hook of the program, or in a signal handler: the traceback must be printed all the same
            traceback.print_exception(kind, value, trace)
            traceback.print_exc()
        finally:
            if os.getpid() == rank:  # a forked child ends without ending the job
                abort(1)

    sys.excepthook = hook
