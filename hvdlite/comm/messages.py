"""The checks of the arguments of `isend` and `irecv`, the same for every transport."""

from __future__ import annotations

from hvdlite.errors import ArgumentError
from hvdlite.protocols import ANY, LARGEST_TAG, Array


def check_message(data: Array, peer: int, tag: int, size: int, receives: bool) -> None:
    """Raise ArgumentError unless the arguments of `Transport.isend` or `Transport.irecv` are valid.

    Args:
        data: The array to send or to fill: flat and C-contiguous, and writable if it is filled.
        peer: The other rank, from 0 to ``size - 1``. A receive may also say `ANY`.
        tag: A number from 0 to `LARGEST_TAG`.
        size: The number of ranks in the group.
        receives: True for `irecv`, False for `isend`.

    Raises:
        ArgumentError: An argument is out of its range, or `data` has another layout.
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
    """Return the error of a receive whose array does not fit the message.

    Args:
        expected: The length that the receive expects, in words.
        source: The rank that sent the message.
        sent: The length of the message, in words.
    """
    return ArgumentError(f"a message of rank {source} was to be {expected}; it has {sent}.")
