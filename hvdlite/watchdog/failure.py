"""How a rank ends the whole job, so that its peers do not wait for it for ever."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import sys
import termios
import time
import traceback
from types import TracebackType

from hvdlite.config import Config, is_task_of_srun


def end_job(config: Config, rank: int, text: str) -> None:
    """Report why the job fails, and end all ranks. This function does not return.

    The report goes to the launcher, which prints it last, or to stderr if there is no launcher. Any thread may call this,
    while another thread may be inside MPI for ever.
    """
    from hvdlite.launcher_link.link import (
        report_failure,  # imported here: it loads sockets and JSON, which nothing else needs
    )

    if not report_failure(config.control, rank, text, 1):
        print(f"hvdlite: rank {rank}: {text}", file=sys.stderr, flush=True)
    abort(1)


def abort(code: int) -> None:
    """End all ranks of the MPI job with the exit code `code`. This function does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    if is_task_of_srun():
        _let_slurm_forward()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _let_slurm_forward() -> None:
    """Wait until Slurm has read what this process has printed, for 2 s at most, and 1 s for its way to srun.

    Slurm drops all that is still on its way when a task aborts the step: the traceback, now and then.
    """
    end = time.monotonic() + 2.0
    for descriptor in (1, 2):
        waiting = array.array("i", [0])
        with contextlib.suppress(OSError):  # it is no pipe
            while fcntl.ioctl(descriptor, termios.FIONREAD, waiting) == 0 and waiting[0] and time.monotonic() < end:
                time.sleep(0.01)
    time.sleep(1.0)


def end_job_on_uncaught_exceptions() -> None:
    """Let an exception that nobody catches end the job, after its traceback was printed as usual.

    Ranks that mpirun or srun started call this. For ranks that hvdliterun started, its worker does the same.
    """
    previous, rank = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            previous(kind, value, trace)
        except (
            BaseException
        ):  # raised by a hook of the program or by a signal handler: the first reason must be seen nevertheless
            traceback.print_exception(kind, value, trace)
            traceback.print_exc()
        finally:
            # torch.distributed captures what is printed here, and would print it after this hook, which does not return.
            captured = getattr(sys.stderr, "getvalue", None)
            if captured is not None and sys.__stderr__ is not None:
                print(captured(), end="", file=sys.__stderr__, flush=True)
            if os.getpid() == rank:  # a forked child ends alone
                abort(1)

    sys.excepthook = hook
