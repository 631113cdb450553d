"""Starts a real Slurm for tests, on hosts that are namespaces (tests/support/hosts.py): its daemons end with the hosts.

    node1: munged, slurmctld, slurmd        node2: slurmd

Everything that the daemons write is in a folder of the lab. Each host has a folder of its own for PMIx's files, since Slurm
makes folders of equal names on all hosts of a job.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support import hosts as lab

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo", "scancel", "squeue")
SYSTEM = "/usr/sbin:/sbin"  # where the daemons are, which a user's PATH may lack
SLOTS = 4  # processors that Slurm believes each host to have

_CONFIGURATION = """\
ClusterName=hvdlite
SlurmctldHost={names[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/own
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/own/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=2
NodeName={nodes} CPUs={slots} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running Slurm.

    Attributes:
        hosts: The hosts of its nodes. Commands are given on the first one.
        folder: Where its daemons keep their files; programs may write there too.
    """

    def __init__(self, hosts: lab.Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder

    def run(self, *words: str, timeout: float, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, in the project's folder.

        Raises:
            TimeoutExpired: The command takes longer than `timeout` seconds. Its processes end with the hosts.
        """
        command, own = self.command(*words, **environ)
        return self.hosts.run(self.hosts.names[0], *command, timeout=timeout, **own)

    def command(self, *words: str, **environ: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return words and environment that give the command to `hosts`: Slurm's own srun, and not the stand-in for it."""
        path = f"PATH={os.environ['PATH']}{os.pathsep}{SYSTEM}"
        return ("env", path, *words), {**environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def log(self) -> str:
        """Return the ends of the daemons' logs, for the message of a failed test."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


def start(hosts: lab.Hosts, seconds: float = lab.SECONDS) -> Slurm:
    """Start Slurm on some hosts, and wait until all of them can take jobs.

    Args:
        hosts: The hosts. The daemons end with them.
        seconds: The limit on the start.

    Raises:
        RuntimeError: Slurm does not start. The text says why.
    """
    folder = hosts.directory / "slurm"
    folder.mkdir()
    hosts.directory.chmod(0o755)  # munged refuses a folder that others cannot enter
    slurm = Slurm(hosts, folder)
    _write_files(slurm)
    first, *_ = hosts.names
    key = f"--key-file={folder}/munge.key"
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    _start(slurm, first, ["munged", "--force", key, f"--socket={folder}/munge.socket", *files])
    _start(slurm, first, ["slurmctld"])
    for name in hosts.names:
        _start(slurm, name, ["mount", "-t", "tmpfs", "tmpfs", str(folder / "own")])
        _start(slurm, name, ["slurmd"])
    end = time.monotonic() + seconds
    ready = f"idle {len(hosts.names)}"
    while (states := slurm.run("sinfo", "-h", "-o", "%T %D", timeout=seconds).stdout.strip()) != ready:
        if time.monotonic() > end:
            raise RuntimeError(f"Slurm's nodes are {states!r} after {seconds:g} s.\n{slurm.log()}")
        time.sleep(0.05)
    return slurm


def _write_files(slurm: Slurm) -> None:
    folder, names = slurm.folder, slurm.hosts.names
    text = _CONFIGURATION.format(folder=folder, names=names, nodes=",".join(names), slots=SLOTS)
    (folder / "slurm.conf").write_text(text)
    (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}/own\n")
    # Nothing here needs control groups, but slurmd looks for them: of old versions, the plugin for version 1 looks later.
    plugin = "disabled" if _version() >= (23, 11) else "cgroup/v1"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\nCgroupMountpoint={folder}/cgroup\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "own"):
        (folder / name).mkdir()


def _start(slurm: Slurm, host: str, words: Sequence[str]) -> None:
    command, environ = slurm.command(*words)
    done = slurm.hosts.run(host, *command, timeout=lab.SECONDS, **environ)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} on {host}: {done.stderr.strip()}\n{slurm.log()}")


def _version() -> tuple[int, ...]:
    said = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=lab.SECONDS).stdout
    return tuple(int(number) for number in re.findall(r"\d+", said)[:2])


@functools.cache
def why_not() -> str:
    """Return why Slurm cannot be started here; an empty string if it can."""
    if reason := lab.why_not():
        return reason
    path = f"{os.environ.get('PATH', '')}{os.pathsep}{SYSTEM}"
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        return f"there is no {', '.join(missing)} (Debian: slurm-wlm, munge, libpmix-dev)"
    return ""
