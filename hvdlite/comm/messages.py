"""What the messages of `isend` and `irecv` have in common on every transport: which arguments they take."""

from __future__ import annotations

from hvdlite.errors import ArgumentError
from hvdlite.protocols import ANY, LARGEST_TAG, Array


def check_message(data: Array, peer: int, tag: int, size: int, receives: bool) -> None:
    """Let the arguments of `Transport.isend` or `Transport.irecv` pass.

    Args:
        data, tag: As there.
        peer: The other rank.
        size: The number of ranks.
        receives: They are those of `irecv`.

    Raises:
        ArgumentError: They are not as described there.
    """
    if data.ndim != 1 or not data.flags.c_contiguous or (receives and not data.flags.writeable):
        raise ArgumentError(
            f"a message is a flat C-contiguous array{', writable where it is received' * receives}; this one has shape "
            f"{data.shape}: use ravel()."
        )
    if not 0 <= peer < size and not (receives and peer == ANY):
        name = "source" if receives else "dest"
        raise ArgumentError(f"{name}={peer}: expected a rank of the group, 0 to {size - 1}{', or ANY' * receives}.")
    if not 0 <= tag <= LARGEST_TAG:
        raise ArgumentError(f"tag={tag}: expected a number from 0 to {LARGEST_TAG}.")


def wrong_size(expected: str, source: int, sent: str) -> ArgumentError:
    """The error of a receive whose array does not fit the message."""
    return ArgumentError(f"a message of rank {source} was to be {expected}; it has {sent}.")
