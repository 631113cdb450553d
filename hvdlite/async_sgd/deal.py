"""Which server holds which tensors, and where their bytes are in a message."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.protocols import Array

_ALIGNMENT = 16
"""Each tensor begins at a multiple of so many bytes, so that any dtype can be read there."""


_CHUNK_BYTES = 1 << 20
"""The largest size of a chunk of several tensors. A chunk of 1 MiB takes 0.08 s on a link of 100 Mbit/s."""


class TensorChunk(NamedTuple):
    """Tensors of a server that lie side by side. Their gradients travel together.

    Attributes:
        places: The places of the tensors in `ServerLayout.tensors`.
        start, end: The bytes of the chunk.
    """

    places: range
    start: int
    end: int


@dataclass(frozen=True)
class ServerLayout:
    """The tensors of one server.

    Attributes:
        server: The rank of the server in its group.
        tensors: The numbers of its tensors, ascending.
        starts: For each of them, the first byte of its values, or of its gradient.
        nbytes: The bytes of all values, or of all gradients.
    """

    server: int
    tensors: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int

    @functools.cached_property
    def chunks(self) -> tuple[TensorChunk, ...]:
        """All tensors in chunks: a large one alone, and small ones together up to 1 MiB."""
        ends = (*self.starts[1:], self.nbytes)
        found: list[TensorChunk] = []
        for place, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
            if found and end - found[-1].start <= _CHUNK_BYTES:
                found[-1] = TensorChunk(range(found[-1].places.start, place + 1), found[-1].start, end)
            else:
                found.append(TensorChunk(range(place, place + 1), start, end))
        return tuple(found)

    def answers(self, in_chunks: bool) -> tuple[TensorChunk, ...]:
        """Return the messages in which a server sends its values: all together, or in chunks, in the order of the tensors."""
        return self.chunks if in_chunks else (TensorChunk(range(len(self.tensors)), 0, self.nbytes),)

    def runs(self, chosen: Array) -> list[slice]:
        """Return the bytes of the chosen chunks. Chunks side by side are one slice, and one message. No slice is empty.

        Args:
            chosen: For each chunk whether it is chosen: bool, shape ``(chunks,)``.
        """
        found: list[slice] = []
        for chunk, yes in zip(self.chunks, chosen, strict=True):
            if yes and found and found[-1].stop == chunk.start:
                found[-1] = slice(found[-1].start, chunk.end)
            elif yes:
                found.append(slice(chunk.start, chunk.end))
        return [run for run in found if run.start < run.stop]


def deal(sizes: Sequence[int], servers: Sequence[int]) -> list[ServerLayout]:
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


def _layout(server: int, numbers: Sequence[int], sizes: Sequence[int]) -> ServerLayout:
    starts, end = [], 0
    for number in numbers:
        starts.append(end)
        end += -(-sizes[number] // _ALIGNMENT) * _ALIGNMENT
    return ServerLayout(server, tuple(numbers), tuple(starts), end)
