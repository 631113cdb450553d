"""Sets up hosts for tests on one machine: namespaces that a real MPI launcher takes for hosts.

    pytest ── unshare ── lab: this file, process 1 of a pid namespace, with a bridge in its own network
                          ├─ node1: a network (10.77.0.1), host name, /dev/shm, /etc/hosts, IPC of its own
                          └─ node2: the same (10.77.0.2) ...

The names of the hosts are valid only in the lab. The lab ends when the pipe from pytest closes. The kernel then
kills every process in the lab, and removes its networks and mounts: nothing is left, even if pytest is killed.

On the hosts, ``ssh`` is a script that enters the namespaces of the other host. Like the real ssh, the script does not
pass the environment on. hvdliterun and mpirun find the script on the PATH.

This file runs itself as the lab and as each host, and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20.0  # limit of a set-up command, and of the end of the lab
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "env")
_ITSELF = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
_NETWORK = "10.77.0"
_NODE_NAMESPACES = ("--net", "--uts", "--ipc", "--mount")

_ENTER = """\
#!/bin/sh
# enter HOST COMMAND...
pid=$(cat "{directory}/$1") || exit 255
shift
exec nsenter --target "$pid" --net --uts --ipc --mount -- "$@"
"""
_SSH = """\
#!/bin/sh
# ssh [OPTIONS] HOST COMMAND...
while :; do
    case "$1" in
        -[oipl]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
# A host that is cut off cannot be reached, although its namespaces can: one that is there refuses a connection.
case $(timeout 2 bash -c ": <> /dev/tcp/$host/9" 2>&1) in
    *refused*) ;;
    *) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255 ;;
esac
exec "{directory}/enter" "$host" env -i HOME="$HOME" TMPDIR="{directory}" PATH=/usr/local/bin:/usr/bin:/bin sh -c "$*"
"""
_SRUN = """\
#!/bin/sh
# srun --nodelist=HOST,... [OPTIONS] COMMAND...: one process on each, with this environment, as Slurm's starts daemons of mpirun
nodes=
while :; do
    case "$1" in
        --version) echo "slurm 23.11.4"; exit ;;
        --nodelist=*) nodes=${{1#--nodelist=}}; shift ;;
        -*) shift ;;
        *) break ;;
    esac
done
echo "$nodes: $*" >> "{directory}/srun.log"
number=0
for node in $(echo "$nodes" | tr , " "); do
    "{directory}/enter" "$node" env SLURM_NODEID=$number SLURM_PROCID=$number "$@" &
    number=$((number + 1))
done
wait
"""


class Hosts:
    """Running hosts, named node1, node2, …"""

    def __init__(self, directory: Path, names: Sequence[str], pid: int) -> None:
        self.names = tuple(names)
        self.directory = directory  # for files that end with the hosts
        self.pid = pid  # of the lab's process 1, as seen from outside

    def run(self, host: str, *words: str, timeout: float, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in the project's folder, with the environment of this process and `environ`.

        Raises:
            TimeoutExpired: The command takes longer than `timeout` seconds. Its processes end with the lab.
        """
        command, env = self.command(host, words, {**os.environ, **environ})
        return subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )

    def command(self, host: str, words: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the words and the environment that run a command on a host, in the project's folder."""
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        enter = [*self._enter_lab(), str(self.directory / "enter"), host, "env", f"--chdir={ROOT}"]
        # MPI's files end with the lab. Else a process would take the files of a killed one with the same pid for its own.
        # Hosts of two labs have the same names and the same pids, so they must not share the folder of this run of the tests.
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.directory)}
        chosen = {
            name: value for name, value in environ.items() if (name, value) != ("TMPDIR", os.environ.get("TMPDIR"))
        }
        return [*enter, *words], {**own, **chosen, "PATH": path}

    @property
    def started_by_srun(self) -> list[str]:
        """The commands that the stand-in of Slurm's srun has started, as ``HOST,...: COMMAND``."""
        path = self.directory / "srun.log"
        return path.read_text().splitlines() if path.exists() else []

    def cut(self, host: str) -> None:
        """Disconnect a host from the network."""
        _call([*self._enter_lab("--net"), "ip", "link", "set", f"to-{host}", "down"])

    def join(self, host: str) -> None:
        """Connect a host to the network again."""
        _call([*self._enter_lab("--net"), "ip", "link", "set", f"to-{host}", "up"])

    def power_off(self, host: str) -> None:
        """Take a host's processes, memory and network away, without a word to others. `join` connects it again, empty."""
        self.cut(host)
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for path in self._shared_memory(host).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def processes(self, host: str | None = None) -> list[str]:
        """Return the command lines of all processes on the hosts, or on one of them."""
        return [_command_line(pid) for pid in self.pids(host)]

    def pids(self, host: str | None = None) -> list[int]:
        """Return the ids, as seen from outside, of all processes on the hosts, or on one of them."""
        lines = {pid: _command_line(pid) for pid in self._pids() if host is None or self._is_on(pid, host)}
        return [pid for pid, line in lines.items() if line and _ITSELF[-1] not in line]

    def shared_memory(self, host: str) -> list[str]:
        """Return the names in a host's /dev/shm."""
        return os.listdir(self._shared_memory(host))

    def temporary(self) -> list[str]:
        """Return the names of the files that processes on the hosts have in their folder for temporary files, which is one."""
        own = {"bin", "enter", "hosts", "srun.log", *self.names}
        return sorted({*os.listdir(self.directory)} - own)

    def _shared_memory(self, host: str) -> Path:
        return Path(f"/proc/{self._holder(host)}/root/dev/shm")

    def _holder(self, host: str) -> int:
        return next(pid for pid in self._pids() if f"{_ITSELF[-1]} host {host} " in _command_line(pid))

    def _is_on(self, pid: int, host: str) -> bool:
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            return os.readlink(f"/proc/{pid}/ns/uts") == os.readlink(f"/proc/{self._holder(host)}/ns/uts")
        return False

    def _enter_lab(self, *more: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--pid", "--mount", *more, "--"]

    def _pids(self) -> Iterator[int]:
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if os.readlink(entry / "ns/pid") == own:
                    yield int(entry.name)


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None, burst: str = "256kb") -> Iterator[Hosts]:
    """Set up some hosts, and remove them after the body, whatever happens.

    Args:
        count: The number of hosts.
        rate: The limit on what each host sends, in the notation of ``tc``, such as "1gbit"; None for no limit.
        burst: So many bytes a host may send at once after it has sent nothing for a while, likewise.

    Raises:
        RuntimeError: The hosts cannot be set up here. The text says why.
    """
    names = [f"node{number}" for number in range(1, count + 1)]
    directory = Path(tempfile.mkdtemp(prefix="hvdlite-hosts."))  # the lab removes it
    lab = subprocess.Popen(
        [
            *("unshare", *_NODE_NAMESPACES, "--pid", "--fork", "--kill-child", "--mount-proc"),
            *(*_ITSELF, "lab", str(directory), rate or "", burst, *names),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to pytest only, which then ends the lab
    )
    assert lab.stdout is not None
    try:
        if lab.stdout.readline() != "ready\n":
            said = (lab.communicate(timeout=SECONDS)[1].strip().splitlines() or ["no word"])[-1]
            raise RuntimeError(f"setting up {count} hosts as namespaces failed: {said}")
        children = Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()
        yield Hosts(directory, names, int(children[0]))
    finally:
        try:
            if lab.poll() is None:
                lab.communicate(timeout=SECONDS)  # closes the pipe, so the lab ends
        finally:
            lab.kill()
            lab.wait()
            shutil.rmtree(directory, ignore_errors=True)


@functools.cache
def why_not(needs_rate: bool = False) -> str:
    """Return why hosts cannot be set up here; an empty string if they can.

    Args:
        needs_rate: Whether the hosts need a limit on what they send.
    """
    if sys.platform != "linux":
        return f"hosts as namespaces need Linux; this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts as namespaces need root: run pytest with sudo"
    needed = (*PROGRAMS, "tc") if needs_rate else PROGRAMS
    if missing := [program for program in needed if shutil.which(program) is None]:
        return f"hosts as namespaces need the programs {', '.join(missing)} (packages util-linux and iproute2)"
    try:
        with hosts(1, "1gbit" if needs_rate else None):
            return ""
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"{error}; they need CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged)"


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _call(words: Sequence[str]) -> None:
    try:
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(words)}: {error.stderr.strip()}") from None


# ---- the code below runs in the lab and on the hosts ----


def _be_lab(directory: Path, rate: str, burst: str, names: Sequence[str]) -> None:
    try:
        _write_files(directory, names)
        _call(["ip", "link", "add", "switch", "type", "bridge"])
        _call(["ip", "link", "set", "switch", "up"])
        holders = [_add_host(directory, rate, burst, number, name) for number, name in enumerate(names, 1)]
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # process 1 must reap orphans
        print("ready", flush=True)
        sys.stdin.read()
        del holders  # the names have kept the pipes open
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_files(directory: Path, names: Sequence[str]) -> None:
    lines = [f"{_NETWORK}.{number} {name}\n" for number, name in enumerate(names, 1)]
    (directory / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    (directory / "bin").mkdir()
    for path, script in (("enter", _ENTER), ("bin/ssh", _SSH), ("bin/srun", _SRUN)):
        (directory / path).write_text(script.format(directory=directory))
        (directory / path).chmod(0o755)


def _add_host(directory: Path, rate: str, burst: str, number: int, name: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        ["unshare", *_NODE_NAMESPACES, *_ITSELF, "host", name, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        raise RuntimeError(f"the host {name} did not start; its own message is above")
    (directory / name).write_text(str(holder.pid))
    inside = ["nsenter", "--target", str(holder.pid), "--net", "--"]
    _call(["ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)])
    _call(["ip", "link", "set", f"to-{name}", "master", "switch", "up"])
    _call([*inside, "ip", "address", "add", f"{_NETWORK}.{number}/24", "dev", "eth0"])
    _call([*inside, "ip", "link", "set", "eth0", "up"])
    if rate:
        limit = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
        _call([*inside, "tc", "qdisc", "add", "dev", "eth0", "root", *limit])
    return holder


def _be_host(name: str, directory: Path) -> None:
    socket.sethostname(name)
    _call(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])
    _call(["mount", "-t", "sysfs", "sysfs", "/sys"])  # shows this network's interfaces, not the machine's
    _call(["mount", "--bind", str(directory / "hosts"), "/etc/hosts"])
    _call(["ip", "link", "set", "lo", "up"])
    print("ready", flush=True)
    sys.stdin.read()


def _main(role: str, *arguments: str) -> None:
    try:
        if role == "lab":
            _be_lab(Path(arguments[0]), *arguments[1:3], arguments[3:])
        else:
            _be_host(arguments[0], Path(arguments[1]))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main(*sys.argv[1:])
