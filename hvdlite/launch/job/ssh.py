"""Other hosts by ssh: this file checks, before a job starts, that each host is fit for its ranks, and tidies up after the job.

The check runs one command on every other host, on all at the same time. The command finds out what the ranks will need there:
the same Python and hvdlite, the MPI launcher and the working directory under the same paths, and a way back to hvdliterun.
Each host that lacks something is named, with the reason and what helps.
"""

from __future__ import annotations

import base64
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from hvdlite.launch.job.hosts import Host, UnreachableError, is_local
from hvdlite.launch.worker import FILE as WORKER

_SSH_SECONDS = 10
_REMOVE_SECONDS = 2
_NOTE_SECONDS = 3.0
_AT_ONCE = 64

# What the other host runs. It imports nothing but the standard library, and prints one line for each thing that is wrong.
_LOOK = """\
import os, re, socket, sys
version, pattern, hvdlite, init, launcher, folder, host, port = sys.argv[1:]
if "%d.%d" % sys.version_info[:2] != version:
    print(f"its {sys.executable} is Python {sys.version.split()[0]}, here it is {version}")
try:
    with open(init) as file:
        found = re.search(pattern, file.read())[1]
    if found != hvdlite:
        print(f"it has hvdlite {found}, here it is {hvdlite}")
except OSError:
    print(f"hvdlite is not there in {os.path.dirname(init)}, as it is here")
if not os.access(launcher, os.X_OK):
    print(f"there is no MPI launcher {launcher}, as it is here")
if not os.path.isdir(folder):
    print(f"there is no folder {folder}, where this job starts")
try:
    socket.create_connection((host, int(port)), timeout=5).close()
except OSError as error:
    print(f"it cannot connect to this machine at {host} ({error}): look at firewalls, or give --network-interface")
"""
_VERSION = r'__version__ = "([^"]*)"'
_MARK = "hvdlite-looks"

_ADVICE = (
    # what ssh says, what helps
    (r"Could not resolve hostname", "No such name: check the spelling, or enter the host in DNS or /etc/hosts."),
    (r"Connection refused", "Nothing listens there: start sshd on that host, or give its port with --ssh-port."),
    (r"IDENTIFICATION HAS CHANGED", "Another key is known for that name: if that is right, ssh-keygen -R {name}."),
    (r"Host key verification failed", "Its key is not known here: ssh-keyscan {name} >> ~/.ssh/known_hosts."),
    (r"Permission denied", "It takes no key of this user: ssh-copy-id {name}, or give a key with --ssh-identity-file."),
    (
        r"timed out|No route to host|Network is unreachable|no answer",
        "Is it up, and its port of ssh open to this host?",
    ),
    (r"UNPROTECTED PRIVATE KEY|bad permissions", "ssh ignores a key that others can read: chmod 600."),
)


def options(port: int | None, identity_file: str | None) -> list[str]:
    """Return the options of ``ssh`` for a port and a key; None leaves an option out."""
    return [*(["-p", str(port)] if port else []), *(["-i", identity_file] if identity_file else [])]


def check_hosts(
    hosts: Sequence[Host], ssh: Sequence[str], launcher: str, address: str, say: Callable[[str], None]
) -> None:
    """Check that every other host can run ranks of this job. It takes 20 s at most, for 64 hosts at a time.

    Args:
        hosts: The hosts of the job.
        ssh: The options of ``ssh``.
        launcher: The path of the MPI launcher.
        address: The address of this machine at which the ranks reach hvdliterun.
        say: Prints which hosts have not answered, after 3 s.

    Raises:
        UnreachableError: Some hosts cannot be reached without a password, or lack something. It names each, and says why.
    """
    remote = list(dict.fromkeys(host.name for host in hosts if not is_local(host.name)))
    if not remote:
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=4096)  # for connecting: nobody reads
    with listener, ThreadPoolExecutor(_AT_ONCE) as pool:
        command = _look_command(launcher, address, listener.getsockname()[1])
        answers = {pool.submit(_look, name, ssh, command): name for name in remote}
        _await(answers, say)
    bad = {name: why for future, name in answers.items() if (why := future.result())}
    if bad:
        listed = "\n".join(f"  {name}: {why}" for name, why in bad.items())
        again = shlex.join(["ssh", *ssh, next(iter(bad)), "true"])
        raise UnreachableError(
            f"cannot use {len(bad)} of {len(remote)} other hosts:\n{listed}\n"
            "Every host must answer ssh without a password, and have the same environment under the same paths. "
            f"Try: {again}",
            list(bad),
        )


def _await(answers: dict[Future[str], str], say: Callable[[str], None]) -> None:
    """Wait for all answers. Say who has not answered after 3 s, and again if half of these have answered meanwhile."""
    missing, told = set(answers), 2 * len(answers)
    while missing:
        done, missing = wait(missing, _NOTE_SECONDS, FIRST_COMPLETED)
        if not done and 2 * len(missing) <= told:
            told = len(missing)
            names = sorted(answers[future] for future in missing)
            listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            say(f"hvdliterun: waits for ssh to {listed}, up to {2 * _SSH_SECONDS} s.\n")


def _look_command(launcher: str, address: str, port: int) -> str:
    """Return the command line by which a host looks for what the ranks need. Any login shell can read it."""
    init = Path(WORKER).parents[2] / "__init__.py"
    found = re.search(_VERSION, init.read_text())
    version = ".".join(platform.python_version_tuple()[:2])
    facts = [version, _VERSION, found[1] if found else "", str(init), launcher, os.getcwd()]
    code = f"import base64; exec(base64.b64decode({base64.b64encode(_LOOK.encode()).decode()!r}))"  # no line breaks
    return f"echo {_MARK}; exec {shlex.join([sys.executable, '-I', '-S', '-c', code, *facts, address, str(port)])}"


def _look(name: str, ssh: Sequence[str], command: str) -> str:
    """Return what a host lacks; an empty text if it is fit."""
    done = _run(name, ssh, command, _SSH_SECONDS)
    if isinstance(done, str):
        return f"{done}. {_advice(done, name)}".strip()
    told = done.stdout.rpartition(_MARK)[2].strip().splitlines()
    if _MARK not in done.stdout:
        said = done.stderr.strip().splitlines() or [f"ssh exit code {done.returncode}"]
        return f"{said[-1].rstrip('.')}. {_advice(done.stderr, name)}".strip()
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"ssh works, but {sys.executable} does not run there ({said[-1]})"
    return "; ".join(told)


def _advice(said: str, name: str) -> str:
    return next((what.format(name=name) for pattern, what in _ADVICE if re.search(pattern, said)), "")


def why_silent(name: str, ssh: Sequence[str], seconds: int = _SSH_SECONDS) -> str:
    """Return why a host does not answer ssh; an empty text if it does.

    Args:
        name: The host.
        ssh: The options of ``ssh``.
        seconds: The time to connect; the whole may take twice as long.
    """
    done = _run(name, ssh, "true", seconds)
    if isinstance(done, str):
        return done
    said = done.stderr.strip().splitlines() or [f"ssh exit code {done.returncode}"]
    return said[-1] if done.returncode else ""


def try_port(port: int | None, address: str) -> str:
    """Say what comes of a connection to the port of ssh of a host, within a second.

    Args:
        port: The port; None for the usual one.
        address: The address of the host.
    """
    what = f"port {port or 22} of it, that of ssh"
    try:
        socket.create_connection((address, port or 22), timeout=1.0).close()
    except ConnectionRefusedError:
        return f"{what}, where it refused a connection: so it is up now"
    except OSError as error:
        return f"{what}, where nothing answered within a second ({error.strerror or error})"
    return f"{what}, which answers: so it is up now"


def remove_elsewhere(hosts: Sequence[Host], ssh: Sequence[str], directory: str) -> list[str]:
    """Remove a directory on all other hosts by ssh. Return those that have not done so within 4 s."""
    remote = sorted({host.name for host in hosts if not is_local(host.name)})
    if not directory or not remote:
        return []
    command = f"rm -rf {shlex.quote(directory)}"
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda name: _run(name, ssh, command, _REMOVE_SECONDS), remote))
    return [name for name, done in zip(remote, answers, strict=True) if isinstance(done, str) or done.returncode]


def _run(name: str, ssh: Sequence[str], command: str, seconds: int) -> subprocess.CompletedProcess[str] | str:
    """Run a command on a host by ssh. Return what became of it, or in words why there is no answer."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}", *ssh, name, command]
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=2 * seconds
        )
    except FileNotFoundError:
        return "there is no program ssh here"
    except subprocess.TimeoutExpired:
        return f"no answer in {2 * seconds} s"
