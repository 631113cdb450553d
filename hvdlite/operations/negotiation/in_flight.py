"""The operations of one rank that are not over, by key, each with the program's handle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from hvdlite.errors import DuplicateNameError
from hvdlite.operations import Operation, Signature, describe
from hvdlite.operations.negotiation.handle import Handle
from hvdlite.operations.negotiation.messages import JOIN, Key
from hvdlite.operations.negotiation.mismatch import name_of
from hvdlite.timeline import Timeline


def in_words(key: Key, signature: Signature) -> str:
    """Return an operation in words, for messages."""
    return f"{name_of(key)}: {describe(signature)}"


class InFlight:
    """The operations that were submitted and are not over. The engine and the driver hold the locks.

    Args:
        timeline: The timeline, which records every operation.

    Attributes:
        entries: The operations and their handles.
        new: The keys that the controller does not know yet, in the order of submission.
        kinds: The kinds of the operations that this rank has ever submitted.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.entries: dict[Key, tuple[Operation, Handle[Any]]] = {}
        self.new: deque[Key] = deque()
        self.kinds: set[str] = set()
        self._names: dict[Key, int] = {}  # the names in use, each with the id() of its handle
        self._next_number = 0

    def new_key(self, name: str | None) -> Key:
        """Return the key of a new operation, `next_key`, and use it up.

        Raises:
            DuplicateNameError: The program has not yet waited for an earlier operation of this name.
        """
        key = self.next_key(name)
        self.use_up(key)
        return key

    def use_up(self, key: Key) -> None:
        """Note that `next_key` is the key of an operation, so that no later one gets its number."""
        if isinstance(key, int):
            self._next_number = key + 1

    def next_key(self, name: str | None) -> Key:
        """Return the key that a new operation would get: its name, or the next number.

        Raises:
            DuplicateNameError: The program has not yet waited for an earlier operation of this name.
        """
        if name is None:
            return self._next_number
        if name in self._names:
            raise DuplicateNameError(
                f"an operation named {name!r} is still in flight on this rank: wait for its handle before the "
                "name is used again, or leave the name out. (Threads that train at the same time need a process set each.)"
            )
        return name

    def put(self, key: Key, operation: Operation, handle: Handle[Any]) -> None:
        """Add an operation that the program has submitted."""
        self.put_agreed(key, operation, handle)
        self.new.append(key)

    def put_agreed(self, key: Key, operation: Operation, handle: Handle[Any]) -> None:
        """Add an operation that the ranks have agreed on already, so that it has nothing to be told of."""
        kind = operation.signature[0]
        self.kinds.add(kind)
        if self._timeline.counts is not None:
            self._timeline.counts.nbytes += operation.nbytes
        if self._timeline.on:
            handle.record = self._timeline.submitted(kind, key, operation.nbytes)
        self.entries[key] = (operation, handle)
        if isinstance(key, str):
            self._names[key] = id(handle)

    def put_for_absent(self, key: Key, operation: Operation, handle: Handle[Any]) -> None:
        """Add an operation that other ranks have submitted, and in which this rank takes part though it has joined."""
        self.entries[key] = (operation, handle)
        self.skip([key])

    def skip(self, keys: Sequence[Key]) -> None:
        """Use the numbers of these operations for no later one, so that unnamed operations have equal numbers on all ranks."""
        self._next_number = max([self._next_number, *(key + 1 for key in keys if isinstance(key, int))])

    def release_name(self, handle: Handle[Any]) -> None:
        """Allow the name of `handle` again: the program has seen the result, or cannot ask for it any more."""
        if self._names.get(handle.key) == id(handle):
            self._names.pop(handle.key, None)

    @property
    def has_joined(self) -> bool:
        """True while this rank has joined and others have not."""
        return JOIN in self.entries

    def signatures(self) -> list[tuple[Key, Signature]]:
        """Return the key and the signature of each operation in flight."""
        return [(key, operation.signature) for key, (operation, _) in list(self.entries.items())]

    def describe(self, key: Key) -> str:
        """Return an operation in words, whether it is in flight or not."""
        entry = self.entries.get(key)
        return in_words(key, entry[0].signature) if entry and key != JOIN else name_of(key)

    def finish_join(self, last: int) -> None:
        """Complete the join of this rank: all ranks have joined, rank `last` after the others."""
        _, handle = self.entries.pop(JOIN)
        if handle.record is not None:
            self._timeline.settled(handle.record)
        handle.finish(last, None)

    def fail(self, keys: Sequence[Key], error: BaseException) -> None:
        """Fail those of the operations `keys` that are in flight with `error`."""
        for key in keys:
            entry = self.entries.pop(key, None)
            if entry is not None:
                record = entry[1].record
                if record is not None:
                    self._timeline.settled(record, error)
                entry[1].finish(None, error)

    def fuse(self, keys: Sequence[Key], threshold: int) -> Iterator[list[Key]]:
        """Yield groups of keys whose operations can be fused, of at most `threshold` bytes unless one alone has more."""
        if len(keys) == 1:
            yield list(keys)
            return
        groups: dict[Any, tuple[list[Key], int]] = {}
        for key in keys:
            operation = self.entries[key][0]
            kind = operation.fusion_key
            group, nbytes = groups.get(kind, ([], 0))
            if group and (kind is None or nbytes + operation.nbytes > threshold):
                yield group
                group, nbytes = [], 0
            groups[kind] = ([*group, key], nbytes + operation.nbytes)
        for group, _ in groups.values():
            yield group
