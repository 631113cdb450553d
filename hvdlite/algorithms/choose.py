"""Chooses the algorithm of an allreduce."""

from __future__ import annotations

LATENCY_BYTES = 16 * 1024
"""α/β: the bytes that a network can carry in the time that a message takes to arrive.

10 µs at 1.6 GB/s, or 2 µs at 8 GB/s: the same order of magnitude on Ethernet, on InfiniBand and
between processes of one host. Below it steps count, above it bytes do. In the α-β model the
butterfly is the faster up to 1.3 (256 ranks) to 4 (4 ranks) times as much.
"""


def choose(ranks: int, nbytes: int) -> str:
    """Return the name of the algorithm that should be the fastest for a vector of `nbytes` bytes.

    This is a simple rule and not the minimum of `predict`, because it runs before every allreduce. It never chooses the
    parameter server: the model makes it look too fast, because it charges nothing for the handling of a short message.
    """
    if nbytes <= LATENCY_BYTES:
        return "butterfly"
    if ranks & (ranks - 1) == 0:
        return "rabenseifner"
    # Folding sends the whole vector twice more, and a ring takes more steps. With k = ⌊lg P⌋ and α = Lβ,
    # 2(P-1)α + 2nβ < (2k + 2)α + 4nβ where n > (P - k - 2)L.
    crossover = (ranks - ranks.bit_length() - 1) * LATENCY_BYTES
    return "ring" if nbytes > crossover else "rabenseifner"
