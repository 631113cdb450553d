"""In the child process of the guard: the process becomes the user's program, runs it, and reports how it ended.

The program runs as ``__main__`` of this very process, as ``python`` would run it. If the process dies before it can report,
its guard sees that.

This file imports only the standard library and `launcher_link`: guards load it without the package, see worker.py.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from typing import NoReturn

from ...launcher_link.handlers import silence_handlers
from ...launcher_link.session import clip

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_LAUNCH = os.path.dirname(_FOLDER)
_RUN_FUNCTION = os.path.join(_LAUNCH, "run_function.py")
_COMPAT = os.path.join(os.path.dirname(_LAUNCH), "compat")
_OWN_FILES = (
    *(os.path.join(_FOLDER, name) for name in ("worker.py", "program.py")),
    *(os.path.join(_COMPAT, name) for name in ("__main__.py", "cli.py")),
)

_DYING_SECONDS = 0.2
"""Connections of a process break when it dies. Its parent sees how it died at most so many seconds later."""

STACK_SIGNAL = signal.SIGRTMAX - 7 if sys.platform == "linux" else None
"""On this signal the program writes the Python stacks of its threads to its guard, whatever it does."""

_loader_deaths: list[str] = []
"""Messages of torch about a killed process of a data loader, raised in a finalizer: Python only prints such exceptions."""

_HOROVOD = """hvdliterun: this program is written for Horovod. Run it as it is with hvdliterun --horovod, or change its import
(import horovod.torch as hvd: import hvdlite_torch as hvd); see hvdlite docs from_horovod.
"""


def become_rank(guard_pid: int, stdout: int, stderr: int, reports: int) -> None:
    """Set up this process: it gets a process group of its own and the guard's pipes, and dies if the guard is killed.

    Args:
        guard_pid: The process id of the guard.
        stdout: The write end of a pipe, which becomes the process's stdout.
        stderr: The write end of a pipe, which becomes the process's stderr.
        reports: The write end of the pipe on which the process reports to the guard.
    """
    os.setpgid(0, 0)  # so that the guard can end the rank together with the processes that the rank started
    _die_with_parent(guard_pid)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    # Pipes are no terminals, so programs print no colours and cursor movements, which would not survive the tags.
    # As on a terminal, each line comes out at once.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(reports)
    if STACK_SIGNAL is not None:
        # Where no handler is any more (at the end of Python, in a program that is no Python), the signal must not kill.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, reports, all_threads=True)
    # A forked copy of the rank (a data loader) that crashes must not report as if it were the rank.
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


def run(arguments: list[str], reports: int) -> NoReturn:
    """Run the program, report how it ended, and end this process.

    Args:
        arguments: The words that would follow ``python``, or ``--exec`` and a command.
        reports: The write end of the pipe to the guard.
    """
    try:
        _run(arguments, reports)
    except SystemExit:
        raise
    except BaseException:  # a signal handler raised it on the way to the end: that is reported too
        _fail(reports, traceback.format_exc(), 1)


def _run(arguments: list[str], reports: int) -> NoReturn:
    own = os.getpid()
    code: object = None
    if arguments[0] == "--exec":
        _exec(arguments[1:], reports)
    _note_finalizer_errors()
    sys.meta_path.insert(0, _StartOfMpi(reports))
    try:
        run_python(arguments)
    except BaseException as error:
        if os.getpid() != own:
            _end_child(error)
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            _fail_by(error, reports)
        code = error.code
    if os.getpid() != own:
        _end_child(None)
    _report(reports, kind="done", used="mpi4py.MPI" in sys.modules)
    raise SystemExit(code)


class _StartOfMpi:
    """An import hook that finds nothing. It reports that this process is about to start MPI, which waits for all ranks.

    Args:
        reports: The write end of the pipe to the guard.
    """

    def __init__(self, reports: int) -> None:
        self._reports, self._own = reports, os.getpid()

    def find_spec(self, name: str, *_: object) -> None:
        """Report the import of ``mpi4py.MPI``, which starts MPI unless the program has set ``mpi4py.rc.initialize``."""
        if name == "mpi4py.MPI" and os.getpid() == self._own and sys.modules["mpi4py"].rc.initialize:
            _report(self._reports, kind="mpi")


def _fail_by(error: BaseException, reports: int) -> NoReturn:
    """Report the exception that has ended the program, whatever else fails meanwhile, and end this process."""
    if isinstance(error, KeyboardInterrupt):
        _fail(reports, "", 130)
    if isinstance(error, SystemExit):
        text = "" if isinstance(error.code, int) else f"{error.code}\n"
        _fail(reports, text, (error.code & 0xFF or 1) if isinstance(error.code, int) else 1)
    more = ""
    try:
        silence_handlers()
        _call_excepthook(error)
    # The hook raised it, or a signal handler did: torch's handler for a killed data loader raises a second time.
    except BaseException as other:
        if type(other) is not type(error) and not isinstance(other, SystemExit):
            more = (
                f"While this was reported, sys.excepthook or a signal handler raised {type(other).__name__}: {other}\n"
            )
    text = "".join(traceback.format_exception(type(error), error, user_frames(error)))
    more += _dead_workers(error, text)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "horovod":
        more += _HOROVOD
    _fail(reports, text + more, 1, " ".join(type(each).__name__ for each in _origins(error)))


def _origins(error: BaseException) -> list[BaseException]:
    """Return an error and those from which it came: a program may raise its own where ours has reached it."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return found


def _call_excepthook(error: BaseException) -> None:
    """Call the program's own ``sys.excepthook``, if there is one. Leave out what prints the traceback and nothing else."""
    hook = sys.excepthook
    if hook is sys.__excepthook__:
        return
    if hook.__module__ != "torch.distributed.distributed_c10d":
        hook(type(error), error, error.__traceback__)
        return
    # torch.distributed's hook prints what the hook before it prints, with the rank before each line.
    captured = io.StringIO()
    with contextlib.redirect_stderr(captured):
        hook(type(error), error, error.__traceback__)
    plain = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if re.sub(r"(?m)^\[rank\d+\]: ", "", captured.getvalue()).split() != plain.split():
        print(captured.getvalue(), end="", file=sys.stderr, flush=True)


def _note_finalizer_errors() -> None:
    """Note what torch's handler of SIGCHLD raises while a finalizer runs: torch raises it only once."""
    previous = sys.unraisablehook

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader"):
            _loader_deaths.append(str(error))
        previous(unraisable)

    sys.unraisablehook = note


def _dead_workers(error: BaseException, text: str) -> str:
    """Return torch's message about a killed process of a data loader, if the program only saw its connection break.

    Args:
        error: The exception that ended the program.
        text: The text of that exception; a message that is in it already is not repeated.

    Returns:
        One line, or an empty text.
    """
    loaders = sys.modules.get("torch.utils.data._utils.signal_handling")
    if loaders is None or not isinstance(error, OSError | EOFError):
        return ""
    if _loader_deaths:
        return f"{_loader_deaths[0]}\n"
    deadline = time.monotonic() + _DYING_SECONDS
    try:
        while time.monotonic() < deadline:
            loaders._error_if_any_worker_fails()
            time.sleep(0.01)
    except RuntimeError as reason:
        return "" if str(reason) in text else f"{reason}\n"
    return ""


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that was forked from the rank and came here as if it were the rank.

    It ends as Python would end it, except that the exit handlers of C libraries do not run: MPI's would wait for ever for the
    other ranks.
    """
    code = 0
    if isinstance(error, SystemExit):
        code = error.code & 0xFF if isinstance(error.code, int) else error.code is not None
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    elif error is not None:
        code = 1
        sys.excepthook(type(error), error, user_frames(error))
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def run_python(arguments: list[str]) -> None:
    """Run what ``python *arguments`` would run: a script, a directory or archive, ``-m module`` or ``-c code``.

    ``sys.path`` must begin with the folder of the program that calls this, as Python has made it. That entry is replaced.
    """
    program, *rest = arguments
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    safe_path = getattr(sys.flags, "safe_path", False)
    if not safe_path:
        del sys.path[0]
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
    # No exit handlers run: MPI_Finalize would wait for the other ranks, which wait for this one.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _report(reports, kind="failed", text=clip(text), code=code, error=error)
    os._exit(code)


def _is_own_frame(filename: str) -> bool:
    return os.path.abspath(filename) in _OWN_FILES or filename in (runpy.__file__, "<frozen runpy>")


def user_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of an error that the program raised, without the frames of hvdlite that ran the program."""
    trace = error.__traceback__
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_name == "work" and frame.f_code.co_filename == _RUN_FUNCTION:
            # With hvdlite.run, the frames before the user's function are hvdlite's too.
            while trace is not None and trace.tb_frame is not frame:
                trace = trace.tb_next
            trace = trace.tb_next if trace is not None else None
            break
    while trace is not None and _is_own_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def without_own_frames(dump: str) -> str:
    """Return a stack dump of faulthandler without the lines of hvdlite's own frames."""
    own = (*_OWN_FILES, "<frozen runpy>")
    return "".join(line for line in dump.splitlines(keepends=True) if not any(name in line for name in own))
