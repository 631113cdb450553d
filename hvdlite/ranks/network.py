"""How other hosts may reach this one: its addresses, and its fabrics."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path

_IPV6 = Path("/proc/net/if_inet6")
_GET_FLAGS, _GET_ADDRESS, _GET_MASK = 0x8913, 0x8915, 0x891B  # ioctl's SIOCGIFFLAGS, SIOCGIFADDR and SIOCGIFNETMASK
_UP, _LOOPBACK = 0x1, 0x8


_FABRICS = Path("/sys/class/infiniband")
"""Linux lists networks here that MPI drives itself, without the kernel: InfiniBand, RoCE, Omni-Path, EFA."""


def has_fabric() -> bool:
    """Return whether this host has a network that MPI drives itself."""
    return _FABRICS.is_dir() and any(_FABRICS.iterdir())


def own_addresses(only: Sequence[str] = ()) -> list[str]:
    """Return this host's addresses with the sizes of their networks, such as "10.0.0.1/24", but for those of loopback.

    Args:
        only: Names of interfaces, or networks such as "10.0.0.0/8"; only addresses there are returned. All if empty.

    Raises:
        OSError: There is none. The text says what there is.
    """
    found: list[tuple[str, IPv4Interface | IPv6Interface]] = []
    if sys.platform == "linux":
        found += _ipv4()
        found += _ipv6()
    chosen = [str(address) for name, address in found if not only or _is_among(name, address, only)]
    if not chosen:
        where = f" on {', '.join(only)}" if only else ""
        there = ", ".join(f"{name} {address}" for name, address in found) or "none but loopback"
        raise OSError(f"{socket.gethostname()} has no address for other hosts{where}; it has {there}")
    return chosen


def nearest_first(theirs: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the addresses of another host without the sizes of networks, those first that lie in a network of this host."""
    networks = [ipaddress.ip_interface(each).network for each in own]

    def is_far(address: IPv4Interface | IPv6Interface) -> bool:
        return not any(address.ip in network for network in networks)

    return [str(address.ip) for address in sorted(map(ipaddress.ip_interface, theirs), key=is_far)]


def _is_among(name: str, address: IPv4Interface | IPv6Interface, only: Sequence[str]) -> bool:
    for each in only:
        if each == name:
            return True
        with contextlib.suppress(ValueError):  # it is the name of an interface
            if address.ip in ipaddress.ip_network(each, strict=False):
                return True
    return False


def _ipv4() -> Iterator[tuple[str, IPv4Interface]]:
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has no address
            flags = struct.unpack("H", _ask(_GET_FLAGS, name)[:2])[0]
            if flags & _UP and not flags & _LOOPBACK:
                yield name, IPv4Interface(f"{ipv4_of(name)}/{socket.inet_ntoa(_ask(_GET_MASK, name)[4:8])}")


def ipv4_of(interface: str) -> str:
    """Return the IPv4 address of an interface, on Linux.

    Raises:
        OSError: It has none, or is not there.
    """
    return socket.inet_ntoa(_ask(_GET_ADDRESS, interface)[4:8])


def _ask(number: int, interface: str) -> bytes:
    """Return what the kernel knows of an interface, after its name."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe, number, struct.pack("256s", interface.encode()))[16:]


def _ipv6() -> Iterator[tuple[str, IPv6Interface]]:
    with contextlib.suppress(OSError):  # the system has no IPv6
        for line in _IPV6.read_text().splitlines():
            digits, _, size, scope, _, name = line.split()
            if scope == "00":  # not of one link only
                yield name, IPv6Interface((int(digits, 16), int(size, 16)))
