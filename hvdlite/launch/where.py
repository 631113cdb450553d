"""The options that say how many ranks there are, and where: those of hvdliterun, and of commands that start a job by it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields

from hvdlite.job.mpi import PROGRAMS


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    add = parser.add_argument
    add("-np", "--num-proc", metavar="N", type=positive_int, help="number of ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many ranks each takes")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help='the same as lines "host slots=N"')
    add("-p", "--ssh-port", metavar="PORT", type=positive_int, help="port of ssh on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    add("--network-interface", "--network-interfaces", metavar="NIC,...", help="network that the hosts share")
    add("--mpi", choices=tuple(PROGRAMS), help="which MPI to use, where both are installed")
    add("--mpi-args", metavar="ARGS", default="", help="more arguments for mpirun, in quotes")


def positive_int(text: str) -> int:
    """Read a whole number from 1 on, for argparse."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 on")
    return int(text)


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
