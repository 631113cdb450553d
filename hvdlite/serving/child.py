"""Starts a process of the server's own, with a line to it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.config import environment

_THREADS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)


def start(
    module: str,
    threads: int,
    variables: Mapping[str, str] | None = None,
    insist: bool = False,
    descriptors: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that calls ``main()`` of one of hvdlite's modules.

    Args:
        module: The name of the module.
        threads: How many threads its libraries may use, unless the environment says it.
        variables: Environment variables that it gets.
        insist: Whether the number of threads holds in spite of the environment.
        descriptors: Further file descriptors that it gets. Their numbers are the next arguments.

    Returns:
        The process, and the server's end of a pair of sockets. The number of the other end is ``sys.argv[1]`` there.

    Raises:
        OSError: No process can be started.
    """
    counts = dict.fromkeys(_THREADS, str(threads))
    ours, theirs = socket.socketpair()
    with theirs:
        root = str(Path(__file__).parent.parent.parent)
        code = f"import sys; sys.path.append({root!r}); from {module} import main; main()"
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, (theirs.fileno(), *descriptors))],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *descriptors],
                env=environment({**(counts if insist else {}), **(variables or {})}, **counts),
                start_new_session=True,  # Ctrl-C is for the server, which lets its processes finish what they do
            )
        except OSError:
            ours.close()
            raise
    return process, ours
