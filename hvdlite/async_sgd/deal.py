"""Which server holds which tensors, and where their bytes are in a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 16
"""Each tensor begins at a multiple of so many bytes, so that any dtype can be read there."""


@dataclass(frozen=True)
class Layout:
    """The tensors of one server.

    Attributes:
        server: The rank of the server in its group.
        tensors: The numbers of its tensors, ascending.
        starts: For each of them, the first byte in a message.
        nbytes: The size of a message with all of them.
    """

    server: int
    tensors: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int


def deal(sizes: Sequence[int], servers: Sequence[int]) -> list[Layout]:
    """Deal out whole tensors so that the servers have about equal numbers of bytes. Every rank gets the same result.

    The largest tensor goes first, each to the server that has the fewest bytes: at most 4/3 of the best possible largest load
    (R. Graham, "Bounds on multiprocessing timing anomalies", 1969).

    Args:
        sizes: The bytes of each tensor.
        servers: The ranks of the servers.

    Returns:
        A layout for each server that has a tensor, in the order of `servers`.
    """
    loads = dict.fromkeys(servers, 0)
    held: dict[int, list[int]] = {server: [] for server in servers}
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        server = min(servers, key=lambda server: (loads[server], len(held[server]), server))
        loads[server] += sizes[number]
        held[server].append(number)
    return [_layout(server, sorted(numbers), sizes) for server, numbers in held.items() if numbers]


def _layout(server: int, numbers: Sequence[int], sizes: Sequence[int]) -> Layout:
    starts, end = [], 0
    for number in numbers:
        starts.append(end)
        end += -(-sizes[number] // _ALIGNMENT) * _ALIGNMENT
    return Layout(server, tuple(numbers), tuple(starts), end)
