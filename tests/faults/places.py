"""Runs a job on this machine, or on namespaces as hosts, and finds the job's processes and all that the job leaves behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.hosts import Hosts, hosts

ROOT = Path(__file__).resolve().parent.parent.parent
_MARK = "FAULT_MARK"
LAUNCH = [sys.executable, "-m", "hvdlite.launch"]


class Job:
    """A running hvdliterun and all processes of its job. A mark in the environment identifies the processes.

    Args:
        words: The command line of hvdliterun.
        environ: Environment variables to add.
        folder: The folder for the output of hvdliterun and for the files of the ranks.
        on: The hosts of the job; None for this machine.
    """

    def __init__(self, words: list[str], environ: dict[str, str], folder: Path, on: Hosts | None) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._on = on
        self._shared_memory = set() if on else set(os.listdir("/dev/shm"))
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        environ = {**os.environ, **environ, _MARK: self.mark, "OMP_NUM_THREADS": "1"}
        if on is None:
            environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self._temporary)}
        else:
            words, environ = on.command(on.names[0], words, environ)
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            self._process = subprocess.Popen(
                words, env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of hvdliterun; None if hvdliterun does not end within `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def last_words(self) -> str:
        """The end of stderr, from the last line on that begins with "hvdliterun: "."""
        text = "\n" + self.stderr
        return text[text.rfind("\nhvdliterun: ") + 1 :]

    # ---- its processes ----

    @property
    def launcher(self) -> int:
        """The process id of hvdliterun."""
        return next(pid for pid in self.processes() if "hvdlite.launch" in command_line(pid) and not is_rank(pid))

    @property
    def mpirun(self) -> int:
        return children(self.launcher)[0]

    @property
    def daemon(self) -> int:
        """The process id of the MPI launcher's daemon on another host."""
        return next(pid for pid in self.processes() if os.path.basename(command_line(pid).split(" ")[0]) == "prted")

    def rank(self, number: int) -> int:
        """Return the process id of a rank's program."""
        return next(pid for pid in self._of_rank(number) if parent(pid) in self._of_rank(number))

    def guard(self, number: int) -> int:
        return parent(self.rank(number))

    def descendants(self, pid: int) -> list[int]:
        """Return the process ids of all descendants of a process."""
        found = children(pid)
        return found + [below for child in found for below in self.descendants(child)]

    @staticmethod
    def command_line(pid: int) -> str:
        return command_line(pid)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port at which hvdliterun listens."""
        text = variable(self.guard(0), "HVDLITE_CONTROL") or variable(self.rank(0), "HVDLITE_CONTROL") or ""
        host, port, _ = text.rsplit(":", 2)
        return host, int(port)

    def _of_rank(self, number: int) -> list[int]:
        """Return the process ids of a rank's guard, its program, and the processes that the program has started."""
        return [pid for pid in self.processes() if is_rank(pid, number)]

    def processes(self) -> list[int]:
        """Return the ids of all running processes of the job: those with the mark in their environment, or all on the hosts."""
        if self._on is not None:
            return [pid for pid in self._on.pids() if state(pid) != "Z"]
        return [pid for pid in all_processes() if variable(pid, _MARK) == self.mark and state(pid) != "Z"]

    # ---- what is left ----

    def remains(self) -> list[str]:
        """Return descriptions of all that the job has left behind: processes, shared memory, temporary files."""
        left = [f"process {pid}: {command_line(pid)[:80]}" for pid in self.processes()]
        if self._on is None:
            own = f"hvdlite.{self._process.pid}."  # there may be other jobs on this machine
            for name in sorted(set(os.listdir("/dev/shm")) - self._shared_memory):
                if name.startswith(own) or (name.startswith("mpich_shm_") and not is_mapped(f"/dev/shm/{name}")):
                    left.append(f"/dev/shm/{name}")
        else:
            left += [f"{host}: /dev/shm/{name}" for host in self._on.names for name in self._on.shared_memory(host)]
        # torch, not hvdlite, leaves the files of killed DataLoader workers behind.
        left += [
            f"TMPDIR/{path.name}" for path in self._temporary.iterdir() if not path.name.startswith(("pymp-", "torch"))
        ]
        return left

    def clean_up(self) -> None:
        """Kill the processes that are left, so that they cannot disturb the next job."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait()


@contextlib.contextmanager
def place(host_count: int) -> Iterator[Hosts | None]:
    """Yield the hosts for one job; None for one host, which is this machine."""
    if host_count == 1:
        yield None
    else:
        with hosts(host_count) as found:
            yield found


@contextlib.contextmanager
def job(words: list[str], environ: dict[str, str], on: Hosts | None) -> Iterator[Job]:
    """Start a job. After the body, kill all that is left of the job, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-fault.", ignore_cleanup_errors=True) as folder:
        running = Job(words, {**environ, "FAULT_FOLDER": folder}, Path(folder), on)
        try:
            yield running
        finally:
            running.clean_up()


# ---- /proc ----


def all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ").strip()


def variable(pid: int, name: str) -> str | None:
    start = f"{name}="
    return next((entry[len(start) :] for entry in _read(pid, "environ").split("\0") if entry.startswith(start)), None)


def is_rank(pid: int, number: int | None = None) -> bool:
    """Return whether a process belongs to a rank: to any rank, or to the rank `number`."""
    found = variable(pid, "OMPI_COMM_WORLD_RANK") or variable(pid, "PMI_RANK")
    return found is not None and (number is None or found == str(number))


def state(pid: int) -> str:
    return (_stat(pid) or ["Z"])[0]


def parent(pid: int) -> int:
    return int((_stat(pid) or ["", "0"])[1])


def children(pid: int) -> list[int]:
    return [child for child in all_processes() if parent(child) == pid]


def is_mapped(path: str) -> bool:
    return any(path in _read(pid, "maps") for pid in all_processes())


def _stat(pid: int) -> list[str]:
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # the process has ended
        return ""
