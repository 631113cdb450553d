"""A folder that keeps commits of an elastic job when hvdliterun, or the memory of all hosts, is lost: ``--state DIR``.

    a commit is in the memory of this host ── each n-th ──▶ the writer, a process: hold it by a link, copy it, sync, rename
                                                                │
    the same command, started again ◀── the newest whole commit ┘

The writer holds a commit without a copy: what has a second name in the memory of the host is not written again. It has at most
one commit under way, so the training never waits for it. When hvdliterun ends, whatever ends it, the writer copies the newest
commit that there is. No clock is asked which commit is newer: their numbers say it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, NoReturn

from hvdlite.errors import LaunchError
from hvdlite.launch.job.signals import outlive_terminal
from hvdlite.launch.worker.shared_memory import make_private
from hvdlite.launcher_link import commit_file
from hvdlite.launcher_link.generation import CommitId
from hvdlite.launcher_link.whole_file import write_whole

_JOB, _LOCK, _DRAFT = "job.json", "lock", ".draft"
_KEPT = 2
_AT_ONCE = 1 << 24
_PATIENCE_SECONDS = 10.0
"""So long may the processes of a job whose hvdliterun was killed take to end."""


class StateFolder:
    """The folder of one job, which this process alone uses until it ends.

    Args:
        path: The folder. It is made if need be.
        command: The program and its arguments: they say which job this is, with the working directory.
        every: Each so many commits, one is kept.
        say: Prints a text for the user.

    Attributes:
        key: The secret of the job, in hexadecimal digits.

    Raises:
        LaunchError: The folder cannot be used, others may write to it, or it has the state of another job.
    """

    def __init__(self, path: str, command: Sequence[str], every: int, say: Callable[[str], None]) -> None:
        self._path, self._every, self._say = path, every, say
        self._commits = 0
        self._busy = self._due = False
        self._problem = ""
        self._requests = self._news = -1
        self._writer = 0
        try:
            self._lock = self._open()
            try:
                self.key = self._job({"command": list(command), "folder": os.getcwd()})
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise self._error(f"the folder cannot be used: {error.strerror or error}") from error

    def _error(self, why: str) -> LaunchError:
        return LaunchError(f"--state {self._path}: {why}.")

    def _open(self) -> int:
        with contextlib.suppress(FileExistsError):
            os.makedirs(self._path, mode=0o700)
        found = os.stat(self._path)
        if not stat.S_ISDIR(found.st_mode):
            raise self._error("it is no folder")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise self._error(
                "another user made the folder, or others may write to it, and a job trusts what it finds there: name a folder "
                "of your own (chmod go-w)"
            )
        lock = os.open(os.path.join(self._path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise self._error(
                        "another job uses the folder, or what is left of one still writes its last commit: give each job a "
                        "folder of its own, or wait"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a network file system that has no locks
                return lock
            else:
                return lock

    def _job(self, job: dict[str, object]) -> str:
        """Return the key of the job in this folder; begin the folder if it has no job."""
        path = os.path.join(self._path, _JOB)
        try:
            with open(path) as file:
                found = json.load(file)
            key = found.pop("key")
            bytes.fromhex(key)
        except FileNotFoundError:
            if commit_file.commits_in(self._path):
                raise self._error(
                    f"it has commits, and {_JOB} is gone: they cannot be used. Remove the folder"
                ) from None
            key = secrets.token_hex(32)
            content = json.dumps({**job, "key": key}).encode()
            write_whole(path, lambda file: file.write(content), draft=_DRAFT, mode=0o600)
            return key
        except (ValueError, KeyError, AttributeError, TypeError):
            raise self._error(f"{_JOB} is damaged, so its commits cannot be used. Remove the folder") from None
        if found != job:
            raise self._error(
                f"it has the state of another job: {_words(found)}, and this one is {_words(job)}. Name another folder, or "
                "remove this one"
            )
        return str(key)

    # ---- what an earlier start has left ----

    def restore(self, directory: str) -> dict[int, CommitId]:
        """Put the newest whole commits into the directory of a job that starts, and say so.

        Args:
            directory: Where this host keeps what is committed.

        Returns:
            The commits, by the number of the call of ``elastic.run``.

        Raises:
            LaunchError: Nothing of what was kept is whole, or there is no room for it.
        """
        try:
            kept = commit_file.commits_in(self._path)
            found: dict[int, CommitId] = {}
            for call, commit in reversed(kept):
                name = commit_file.name_of(call, commit)
                if call in found:
                    continue
                if commit_file.read(os.path.join(self._path, name), call, bytes(self.key, "ascii")) is None:
                    self._say(f"hvdliterun: --state {self._path}: the file {name} is damaged, and is left out.\n")
                    continue
                make_private(directory)
                _copy(os.path.join(self._path, name), os.path.join(directory, name))
                found[call] = commit
        except OSError as error:
            raise self._error(f"what was kept cannot be copied to {directory}: {error.strerror or error}") from error
        if missing := {call for call, _ in kept} - set(found):
            raise self._error(
                f"no commit of call {min(missing)} of elastic.run is whole. Remove the folder to begin anew"
            )
        if found:
            self._say(
                f"hvdliterun: --state {self._path}: an earlier start of this job has left its state. It goes on from commit "
                f"number {max(found.values()).number}.\n"
            )
        return found

    # ---- while the job runs ----

    def start(self, directory: str) -> None:
        """Start the writer.

        Args:
            directory: Where this host keeps what is committed.
        """
        requests, self._requests = os.pipe()
        self._news, news = os.pipe()
        os.set_blocking(self._news, False)
        self._writer = os.fork()
        if self._writer == 0:
            os.close(self._requests)
            os.close(self._news)
            _write_behind(requests, news, directory, self._path)
        os.close(requests)
        os.close(news)

    def committed(self) -> None:
        """Note a commit. The writer copies it if it is due and the writer is at rest, and else the newest when it is."""
        self._commits += 1
        self._due |= self._commits % self._every == 0
        self.look()

    def look(self) -> None:
        """Take what the writer says, and give it the next commit. This does not wait."""
        if self._requests < 0:
            return
        self._hear()
        if self._due and not self._busy and self._requests >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._requests, b".")
                self._due, self._busy = False, True

    def _hear(self) -> None:
        try:
            said = os.read(self._news, 4096)
        except BlockingIOError:
            return
        if not said and self._requests >= 0:
            said = b"the process that writes was killed, and no commit is kept any more\n"
            self._close_requests()
        self._busy = False
        for problem in said.decode(errors="replace").splitlines():
            if problem and problem != self._problem:
                self._say(f"hvdliterun: --state {self._path}: {problem}. The training goes on.\n")
            self._problem = problem

    def finish(self, is_over: bool) -> None:
        """End the writer, and remove what it has kept if the job has come to its end.

        Args:
            is_over: The job has ended well.
        """
        if self._requests >= 0 and is_over:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._requests, b"q")
        self._close_requests()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._writer, 0)
        self._hear()
        if is_over:
            for name in (*(commit_file.name_of(*each) for each in commit_file.commits_in(self._path)), _JOB):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._path, name))
        os.close(self._news)
        os.close(self._lock)

    # ---- in the process that cleans up after hvdliterun ----

    def let_go(self) -> None:
        """Let the writer see the end of hvdliterun, in a process that has come from it."""
        self._close_requests()

    def wait_for_writer(self) -> None:
        """Wait until the writer has ended, in a process that has come from hvdliterun."""
        os.set_blocking(self._news, True)
        while os.read(self._news, 4096):
            pass

    def _close_requests(self) -> None:
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1


def _words(job: dict[str, object]) -> str:
    command = job.get("command")
    words = " ".join(map(str, command)) if isinstance(command, list) else "unknown"
    return f"{words} (in {job.get('folder')})"


def _write_behind(requests: int, news: int, directory: str, folder: str) -> NoReturn:
    """Copy the newest commits when asked to, and once more when hvdliterun has ended without a word."""
    try:
        outlive_terminal()
        os.nice(19)
        while (word := os.read(requests, 1)) != b"q":
            try:
                _keep_newest(directory, folder)
                problem = ""
            except OSError as error:
                problem = f"a commit cannot be kept: {error.strerror or error}"
            with contextlib.suppress(BrokenPipeError):
                os.write(news, f"{problem}\n".encode())
            if not word:
                break
    finally:
        os._exit(0)


def _keep_newest(directory: str, folder: str) -> None:
    """Copy the newest commit of each call, unless the folder has it."""
    kept = dict(commit_file.commits_in(folder))
    held = os.path.join(directory, "held")
    for call, commit in dict(commit_file.commits_in(directory)).items() if os.path.isdir(directory) else ():
        if commit <= kept.get(call, CommitId()):
            continue
        name = commit_file.name_of(call, commit)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(held)
        try:
            os.link(os.path.join(directory, name), held)
        except FileNotFoundError:  # two newer ones have come meanwhile: the next request takes the newest of them
            continue
        try:
            _copy(held, os.path.join(folder, name))
        finally:
            os.unlink(held)
        commit_file.remove_older(folder, call, _KEPT)


def _copy(source: str, target: str) -> None:
    """Copy a file, and return when it is on the disk, whole, under its name."""
    with open(source, "rb") as file:

        def send(copy: BinaryIO) -> None:
            place = 0
            while count := os.sendfile(copy.fileno(), file.fileno(), place, _AT_ONCE):
                place += count

        write_whole(target, send, draft=_DRAFT, mode=0o600)
