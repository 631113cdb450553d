"""What the ranks that save or load together agree on. A failure of one rank is raised on all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from hvdlite.api import allgather_object, broadcast, broadcast_object, world
from hvdlite.checkpoint.disk import CHUNK
from hvdlite.errors import ArgumentError, CheckpointError, HvdliteError, MismatchError, ranks_text
from hvdlite.protocols import Array
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.ranks.together import Failure, Together, ranks_by

T = TypeVar("T")


class CheckpointRanks:
    """The ranks of one call. All of them call the same methods in the same order.

    Args:
        call: The call, such as "checkpoint.save()", for messages.
        process_set: The ranks; all if None.

    Attributes:
        rank: The number of this rank among them.
        size: How many there are.
        world_ranks: Their ranks in the job.
    """

    def __init__(self, call: str, process_set: ProcessSet | None) -> None:
        self._call = call
        self._process_set = process_set
        here = world(call).group(process_set)
        self.rank, self.size = here.rank, here.size
        self.world_ranks = world(call).ranks(process_set)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_do(self, what: str, do: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return what it returned on each.

        Args:
            what: What it does, for errors.
            do: The function. What it returns can be pickled.

        Raises:
            ArgumentError: The function raised it on some rank, and nothing else on any.
            CheckpointError: It raised something else on some rank. Then every rank raises, with the texts of all that failed.
        """

        def in_words(failure: Failure) -> str:
            is_ours = failure.is_argument or failure.kind == CheckpointError.__name__
            return failure.text if is_ours else str(failure)

        def error(failures: dict[int, Failure]) -> HvdliteError:
            texts = [
                text if len(ranks) == len(self.world_ranks) else f"{ranks_text(ranks)}: {text}"
                for text, ranks in ranks_by((rank, in_words(each)) for rank, each in failures.items()).items()
            ]
            kind = ArgumentError if all(each.is_argument for each in failures.values()) else CheckpointError
            return kind(f"{self._call}, {what}: " + "\n".join(texts))

        gather = functools.partial(allgather_object, name=f"{self._call} {what}", process_set=self._process_set)
        return Together(self.world_ranks, gather).all_do(do, error)

    def first_does(self, what: str, do: Callable[[], T]) -> T:
        """Call a function on the first rank, and return its result on every rank. See `all_do` for the errors."""
        result: Any = self.all_do(what, lambda: do() if self.is_first else None)[0]
        return result  # type: ignore[no-any-return]

    def check_same(self, what: str, own: Any) -> None:
        """Raise MismatchError on all ranks unless all have an equal value."""
        told = self.all_do(what, lambda: own)
        if any(each != told[0] for each in told):
            lines = [f"rank {rank}: {each}" for rank, each in zip(self.world_ranks, told, strict=True)]
            raise MismatchError(f"{self._call}: the ranks have different {what}:\n" + "\n".join(lines))

    def send(self, content: Array | None, length: int, sender: int) -> Array:
        """Give all ranks the bytes that one of them has.

        Args:
            content: The bytes: uint8, flat. It counts on the sender only.
            length: How many they are.
            sender: The number of the rank that has them.
        """
        if self.size == 1:
            assert content is not None
            return content
        if content is None:
            content = np.empty(length, np.uint8)
        for begin in range(0, length, CHUNK):
            part = content[begin : begin + CHUNK]
            broadcast(part, sender, f"{self._call} bytes", inplace=True, process_set=self._process_set)
        return content

    def stream(self, chunks: Iterator[Any] | None, sender: int) -> Iterator[Any]:
        """Return the chunks of one rank on all ranks, one after the other. Every rank goes through all of them.

        Args:
            chunks: Buffers of bytes. It counts on the sender only.
            sender: The number of the rank that has them.
        """
        while True:
            chunk = None
            if self.rank == sender:
                assert chunks is not None
                chunk = next(chunks, None)
            length = broadcast_object(
                None if chunk is None else len(memoryview(chunk)), sender, process_set=self._process_set
            )
            if length is None:
                return
            own = None if chunk is None else np.array(np.frombuffer(chunk, np.uint8))
            yield self.send(own, length, sender).data
