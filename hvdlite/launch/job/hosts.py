"""The hosts of a job: this file reads lists of hosts, and finds the address of this machine that the hosts can reach."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlite.errors import LaunchError
from hvdlite.ranks.network import ipv4_of

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_RANK_BYTES = 32 << 20


class UnreachableError(LaunchError):
    """Some hosts do not answer.

    Args:
        text: The text of the error.
        names: The names of these hosts.
    """

    def __init__(self, text: str, names: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.names = tuple(names)


@dataclass(frozen=True)
class Host:
    """A host, and its number of slots: how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> list[Host]:
    """Read ``host:slots,host:slots``. A host without a number has one slot.

    Raises:
        LaunchError: The text is not such a list.
    """
    return [make_host(*_split(entry, f"-H {text}"), f"-H {text}") for entry in text.split(",")]


def _split(entry: str, where: str) -> tuple[str, str]:
    name, colon, slots = entry.strip().partition(":")
    if colon and not slots:
        raise LaunchError(f"{where}: {entry!r} has no number after the colon; expected host:slots.")
    return name, slots or "1"


def parse_hostfile(path: str) -> list[Host]:
    """Read a file with a host on each line: ``host slots=N``, ``host:N``, or a host alone. ``#`` starts a comment.

    Open MPI's ``max_slots=N`` may follow: no host gets more ranks than it has slots anyway.

    Raises:
        LaunchError: The file cannot be read, names no host, or has a line of another form.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the hostfile {path}: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        words = [word for word in words if not re.fullmatch(r"max[-_]slots=[0-9]+", word)]
        if not words:
            continue
        if len(words) == 1:
            hosts.append(make_host(*_split(words[0], where), where))
        elif len(words) == 2 and words[1].startswith("slots="):
            hosts.append(make_host(words[0], words[1].removeprefix("slots="), where))
        else:
            raise LaunchError(f"{where}: {line.strip()!r}; expected 'host slots=N'.")
    if not hosts:
        raise LaunchError(f"the hostfile {path} names no host; expected lines 'host slots=N'.")
    return hosts


def make_host(name: str, slots: str, where: str) -> Host:
    """Make a `Host` of the words that were read for it.

    Args:
        name: The name or address of the host.
        slots: The number of its slots, in digits.
        where: The option, file or variable that the words come from; errors name it.

    Raises:
        LaunchError: `name` is no host name, or `slots` is no whole number from 1 to 999999.
    """
    if not _NAME.fullmatch(name):
        raise LaunchError(f"{where}: {name!r} is not a host name; expected host:slots.")
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", slots):
        raise LaunchError(f"{where}: {slots[:20]!r} slots for {name}; expected a whole number from 1 to 999999.")
    return Host(name, int(slots))


def check_slots(hosts: Sequence[Host], num_proc: int, source: str, advice: str) -> None:
    """Raise LaunchError if the hosts have too few slots for the ranks. It says that `source` named them, and gives `advice`."""
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        listed = ",".join(map(str, hosts[:20])) + (", ..." if len(hosts) > 20 else "")
        raise LaunchError(f"-np {num_proc}: {listed} has only {slots} slots ({source}). {advice}")


def check_ranks_here(num_proc: int) -> None:
    """Raise LaunchError if this machine has not enough memory to start so many ranks.

    Each rank is two processes, the guard and the program. Both together count as 32 MiB, which is the least they take.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(1, memory // _RANK_BYTES)
    if num_proc > most:
        raise LaunchError(
            f"-np {num_proc}: this machine has memory for {most} ranks at most, 32 MiB for each. Start fewer, or name "
            "more hosts with -H."
        )


def is_local(name: str) -> bool:
    """Tell whether a host name or address means this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)  # only a machine's own address can be bound
                return True
            except OSError:
                continue
    return False


def control_host(hosts: Sequence[Host], interface: str | None) -> str:
    """Return the address of this machine that all ranks can reach.

    Args:
        hosts: The hosts of the ranks. If all are this machine, the address is 127.0.0.1.
        interface: The network interfaces to use, separated by commas; the first one's address is returned. If None, the
            address is that of the interface that leads to the first other host whose name has an address.

    Raises:
        LaunchError: The interface does not exist or has no IPv4 address, or no name of another host has an address.
    """
    remote = [host.name for host in hosts if not is_local(host.name)]
    if not remote:
        return "127.0.0.1"
    if interface is not None:
        return _interface_address(interface.split(",")[0])
    for name in remote:
        try:
            return address_towards(name)
        except OSError as error:
            failure = error
    text = f"no way to host {remote[-1]}: {failure}. Check the names in -H or the hostfile."
    raise UnreachableError(text, remote) from failure


def address_towards(name: str) -> str:
    """Return the address from which this machine speaks to another host.

    Raises:
        OSError: The name has no address, or there is no way to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, but picks the route
        return str(probe.getsockname()[0])


def _interface_address(interface: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise LaunchError(f"--network-interface {interface}: this machine has {', '.join(names)}.")
    if sys.platform != "linux":
        raise LaunchError("--network-interface is known on Linux only.")
    try:
        return ipv4_of(interface)
    except OSError as error:
        raise LaunchError(f"--network-interface {interface} has no IPv4 address: {error}.") from error
