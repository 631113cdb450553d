"""The options that say how many ranks there are, and where: those of hvdliterun, and of commands that start a job by it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hvdlite.errors import LaunchError
from hvdlite.launch.allocation import choose_hosts
from hvdlite.launch.arguments import positive_int
from hvdlite.launch.job.mpi import PROGRAMS

AUTO = 0
"""The number of ranks that ``-np auto`` stands for, until they are counted."""


def add_where(parser: argparse._ActionsContainer) -> None:
    """Add the options to a parser, or to a group of one."""
    add = parser.add_argument
    add("-np", "--num-proc", metavar="N", type=_number, help='number of ranks; "auto": the GPUs here, else the cores')
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many ranks each takes")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help='the same as lines "host slots=N"')
    add("-p", "--ssh-port", metavar="PORT", type=positive_int, help="port of ssh on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    add("--network-interface", "--network-interfaces", metavar="NIC,...", help="network that the hosts share")
    add("--mpi", choices=tuple(PROGRAMS), help="which MPI to use, where both are installed")
    add("--mpi-args", metavar="ARGS", default="", help="more arguments for mpirun, in quotes")


def _number(text: str) -> int:
    if text == "auto":
        return AUTO
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}, nor "auto"') from None


@dataclass(frozen=True)
class Where:
    """The values of the options."""

    num_proc: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interface: str | None = None
    mpi: str | None = None
    mpi_args: str = ""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Where:
        """Take the values from what a parser has read."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    def words(self) -> list[str]:
        """Return the options as arguments of hvdliterun, without the number of ranks."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "num_proc"}
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value]


def count_ranks(where: Where, environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks. For ``-np auto``, count the slots of the hosts, or what this machine has.

    Raises:
        LaunchError: They cannot be counted here, or the hosts cannot be read.
    """
    if where.num_proc != AUTO:
        return where.num_proc
    if where.hosts is not None or where.hostfile is not None:
        return sum(host.slots for host in choose_hosts(where.hosts, where.hostfile, 1, environ).hosts)
    if choose_hosts(None, None, 1, environ).hosts:
        raise LaunchError(
            "-np auto counts the slots of -H or --hostfile, or the GPUs or cores of this machine. Here is an allocation of "
            "hosts: give -np N, the number of its tasks."
        )
    return _slots_here(environ)


def _slots_here(environ: Mapping[str, str]) -> int:
    """Return how many ranks suit this machine: one for each NVIDIA GPU that a program sees; without any, one for each core."""
    gpus = len([name for name in os.listdir("/dev") if re.fullmatch("nvidia[0-9]+", name)])
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([each for each in visible.split(",") if each.strip() not in ("", "-1")]))
    return gpus or len(os.sched_getaffinity(0))
