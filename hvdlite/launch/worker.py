"""What the MPI launcher starts for each rank: a small guard, and under it the user's program.

    mpirun ── guard (this file, about 10 MB, asleep) ── fork ── the program, as ``__main__``
                │ TCP to hvdliterun                        │ pipes: stdout, stderr, reports
                └──────────────── select ──────────────────┘

The guard is a process of its own because only a parent learns for certain how a process ended:
the signal, a stop, ``os._exit``. It also works while the program holds the GIL, loses no output
that was written before a crash, and leaves nothing running when hvdliterun or mpirun are killed.
The guard of a failed rank stays until hvdliterun says "end", so that the MPI launcher, which would
kill the others and bury the reason under its own words, sees no failure before hvdliterun does.

Run by path (``python .../worker.py train.py``), not with ``-m``: that imports ``hvdlite``, and with
it NumPy, whose threads and memory have no place in the guard, and it would have the working
directory shadow the standard library.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib.util
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import types
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from hvdlite import control
else:
    _spec = importlib.util.spec_from_file_location(
        "_hvdlite_control", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "control.py")
    )
    control = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(control)

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SHARED_DIRECTORY_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
SHARED_DIRECTORY_PREFIX = "/dev/shm/hvdlite."
_KILL_AT_ONCE = 0.0
_DRAIN_SECONDS = 0.5
_RUN_FUNCTION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_function.py")


def main(arguments: list[str]) -> int:
    """Guard one rank. ``arguments`` are what would follow ``python``, or ``--exec`` and a command."""
    rank = _own_rank()
    address = control.Address.parse(os.environ["HVDLITE_CONTROL"])
    try:
        connection = control.connect(address)
    except OSError as error:
        print(
            f"hvdliterun: rank {rank} on {socket.gethostname()} cannot reach hvdliterun at "
            f"{address.host}:{address.port} ({error}). Name a network that all hosts share with --network-interface.",
            file=sys.stderr,
        )
        return 1
    if directory := _shared_directory():
        os.makedirs(directory, mode=0o700, exist_ok=True)
    pipes = [os.pipe(), os.pipe(), os.pipe()]
    guard_pid = os.getpid()
    child = os.fork()
    if child == 0:
        connection.close()
        for read_end, _ in pipes:
            os.close(read_end)
        _become_rank(guard_pid, *(write_end for _, write_end in pipes))
        _run(arguments, pipes[2][1])
    for _, write_end in pipes:
        os.close(write_end)
    with contextlib.suppress(OSError):  # the child does it too: whoever comes first
        os.setpgid(child, child)
    hello = {"token": address.token, "rank": rank, "host": socket.gethostname(), "pid": child, "guard": guard_pid}
    guard = Guard(connection, child, *(read_end for read_end, _ in pipes))
    guard.finished = arguments[0] == "--exec"  # such a program cannot say so: its exit code has to do
    return guard.run(hello)


def _own_rank() -> int:
    for variable in RANK_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable])
    raise SystemExit(f"hvdliterun: the MPI launcher set none of {', '.join(RANK_VARIABLES)}: which rank is this?")


class Guard:
    """Watches one rank: passes on its output and its end, and ends it when told to."""

    def __init__(self, connection: socket.socket, child: int, stdout: int, stderr: int, reports: int) -> None:
        self._connection = connection
        self._child = child
        self._pipes = {stdout: "stdout", stderr: "stderr", reports: "reports"}
        self._decoder = control.Decoder()
        self._report_text = bytearray()
        self.finished = False  # the program came to its end by itself
        self._asked = False  # the MPI launcher told this rank to go
        self._ending = False  # hvdliterun told this rank to go, or is gone
        self._status: int | None = None
        self._kill_at: float | None = None
        self._wake, wake_write = os.pipe()
        for end in (self._wake, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def run(self, hello: dict[str, Any]) -> int:
        """Watch until the rank is gone (and, if it failed, until hvdliterun knows). Returns the exit code."""
        try:
            self._send("hello", **hello)
            self._reap()
            while self._status is None or (self._failed() and not self._ending and not self._asked):
                self._step()
        except OSError:  # hvdliterun is gone, and its end of the connection with it
            self._end(_KILL_AT_ONCE)
        return self._leave()

    def _failed(self) -> bool:
        return self._status != 0 or not self.finished

    def _send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        self._connection.sendall(control.Message(kind, fields, payload).encode())

    def _step(self) -> None:
        wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        watched = [self._connection.fileno(), self._wake, *self._pipes]
        ready = select.select(watched, [], [], wait)[0]
        if wait is not None and time.monotonic() >= (self._kill_at or 0.0):
            self._signal(signal.SIGKILL)
            self._kill_at = None
        self._pass_on(ready)
        if self._connection.fileno() in ready:
            self._listen()
        if self._wake in ready:
            self._on_signals(os.read(self._wake, 4096))

    def _pass_on(self, ready: list[int]) -> None:
        for descriptor in ready:
            if descriptor not in self._pipes:
                continue
            data = os.read(descriptor, 1 << 16)
            if not data:
                os.close(descriptor)
                del self._pipes[descriptor]
            elif self._pipes[descriptor] == "reports":
                self._on_report(data)
            else:
                self._send("output", data, stream=self._pipes[descriptor])

    def _on_report(self, data: bytes) -> None:
        # The program's own messages are lines of JSON; anything else is faulthandler's stack dump.
        self._report_text += data
        while (end := self._report_text.find(b"\n")) >= 0 and self._report_text.startswith(b'{"kind"'):
            fields = json.loads(self._report_text[:end])
            del self._report_text[: end + 1]
            self.finished |= fields["kind"] == "done"
            self._send(**fields)

    def _listen(self) -> None:
        data = self._connection.recv(1 << 16)
        if not data:
            raise ConnectionError("hvdliterun is gone")
        for message in self._decoder.feed(data):
            if message.kind == "end":
                self._end(message.fields["grace"])

    def _end(self, grace: float) -> None:
        self._ending = True
        _sweep(self._child)  # first of all: when one guard has left, the MPI launcher may kill the others
        if grace > 0:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process would not see the SIGTERM
            self._kill_at = time.monotonic() + grace
        else:
            self._signal(signal.SIGKILL)

    def _on_signals(self, numbers: bytes) -> None:
        if set(numbers) - {signal.SIGCHLD}:
            self._asked = True
            _sweep(self._child)
            self._signal(signal.SIGTERM)
        self._reap()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, number)

    def _reap(self) -> None:
        while self._status is None:
            pid, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._send("stopped", signal=os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._send("continued")
            else:
                self._status = os.waitstatus_to_exitcode(status)
                self._drain()
                trace = _without_own_frames(self._report_text.decode(errors="replace"))
                at = time.time()
                self._send("exit", status=self._status, finished=self.finished, asked=self._asked, trace=trace, time=at)

    def _drain(self) -> None:
        # Not until end of file: a process that the rank left behind may hold the pipes, and write on.
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline and (ready := select.select([*self._pipes], [], [], 0)[0]):
            self._pass_on(ready)

    def _leave(self) -> int:
        failed = self._failed()
        status = self._status
        if failed:
            self._signal(signal.SIGKILL)  # what the rank started and left behind, such as data loaders
            _sweep(self._child)
        else:
            _leave_shared_directory()
        if status is None:
            status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        return status if status >= 0 else 128 - status


def _mpich_segments(pid: int) -> set[str]:
    """The shared memory files of MPICH that a rank has mapped; Open MPI's have a directory of their own."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/mpich_shm_" in line}
    except OSError:
        return set()


def _sweep(pid: int) -> None:
    """Remove the shared memory of a job that ends early: where nothing fails, MPI does it itself."""
    for path in _mpich_segments(pid):
        with contextlib.suppress(OSError):
            os.unlink(path)
    if directory := _shared_directory():
        shutil.rmtree(directory, ignore_errors=True)


def _leave_shared_directory() -> None:
    if directory := _shared_directory():
        with contextlib.suppress(OSError):  # other ranks of this host still use it: the last one removes it
            os.rmdir(directory)


def _shared_directory() -> str:
    """The directory that hvdliterun named for this job's shared memory; empty if there is none."""
    directory = os.environ.get(SHARED_DIRECTORY_VARIABLE, "")
    return directory if directory.startswith(SHARED_DIRECTORY_PREFIX) else ""


# ---- from here on: in the child, which becomes the user's program ----


def _become_rank(guard_pid: int, stdout: int, stderr: int, reports: int) -> None:
    """Set up this process: its own group, its pipes, and its end when the guard is killed."""
    os.setpgid(0, 0)  # so that the guard can end the rank together with what the rank started
    _die_with_parent(guard_pid)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    # Pipes, not terminals: programs then print no colours and cursor movements, which would not
    # survive the tags. What a terminal's user is used to is kept: each line comes out at once.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(reports)
    # A forked copy (a data loader) that crashes must not speak for the rank.
    os.register_at_fork(after_in_child=lambda: os.dup2(2, reports, inheritable=False))


def _die_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # _IOLBF: printf of C code, line by line
    if os.getppid() != parent:
        os._exit(1)


def _run(arguments: list[str], reports: int) -> NoReturn:
    """Run the program, report how it ended, and leave."""
    own = os.getpid()
    code: object = None
    if arguments[0] == "--exec":
        _exec(arguments[1:], reports)
    try:
        _run_python(arguments)
    except SystemExit as leave:
        if os.getpid() != own or leave.code in (None, 0):
            code = leave.code
        else:
            text = "" if isinstance(leave.code, int) else f"{leave.code}\n"
            _fail(reports, text, (leave.code & 0xFF or 1) if isinstance(leave.code, int) else 1)
    except KeyboardInterrupt:
        _fail(reports, "", 130)
    except BaseException as error:
        if os.getpid() != own:
            raise
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, error.__traceback__)
        _fail(reports, _user_traceback(error), 1, type(error).__name__)
    if os.getpid() == own:
        _report(reports, kind="done")
    raise SystemExit(code)


def _run_python(arguments: list[str]) -> None:
    """What ``python *arguments`` does: a script, a directory or archive, ``-m module`` or ``-c code``."""
    program, *rest = arguments
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    safe_path = getattr(sys.flags, "safe_path", False)
    if not safe_path:
        del sys.path[0]  # this file's directory
    if program == "-m":
        sys.argv = ["-m", *rest[1:]]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif program == "-c":
        sys.argv = ["-c", *rest[1:]]
        if not safe_path:
            sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    elif os.path.isfile(program) and not program.endswith((".zip", ".pyz")):
        sys.argv = arguments
        path = os.path.abspath(program)
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        main.__file__ = path
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(program, run_name="__main__")


def _exec(command: list[str], reports: int) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; other programs rely on it
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _fail(reports, f"cannot run {command[0]!r}: {error.strerror}\n", 127)


def _report(reports: int, **fields: object) -> None:
    data = memoryview(json.dumps(fields).encode() + b"\n")
    while data:
        data = data[os.write(reports, data) :]


def _fail(reports: int, text: str, code: int, error: str = "") -> NoReturn:
    # No exit handlers: MPI_Finalize would wait for the other ranks, which wait for this one.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _report(reports, kind="failed", text=text, code=code, error=error)
    os._exit(code)


def _is_own_frame(filename: str) -> bool:
    return filename in (__file__, os.path.abspath(__file__), runpy.__file__, "<frozen runpy>")


def _user_traceback(error: BaseException) -> str:
    trace = error.__traceback__
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_name == "work" and frame.f_code.co_filename == _RUN_FUNCTION:
            # hvdlite.run: what comes before the user's function is ours too
            while trace is not None and trace.tb_frame is not frame:
                trace = trace.tb_next
            trace = trace.tb_next if trace is not None else None
            break
    while trace is not None and _is_own_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _without_own_frames(dump: str) -> str:
    """A stack as printed by faulthandler, without the frames of this file."""
    own = ("hvdlite/launch/worker.py", "<frozen runpy>")
    return "".join(line for line in dump.splitlines(keepends=True) if not any(name in line for name in own))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
