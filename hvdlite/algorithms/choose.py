"""The rule that chooses an allreduce algorithm."""

from __future__ import annotations

LATENCY_BYTES = 16 * 1024
"""α/β: the bytes that a network carries in the time that a message takes to arrive.

This is 10 µs at 1.6 GB/s, or 2 µs at 8 GB/s: the same order of magnitude on Ethernet, on InfiniBand and
between processes of one host. For shorter vectors the number of steps decides, for longer ones the number of bytes.
In the α-β model the butterfly is the faster up to 1.3 times (256 ranks) to 4 times (4 ranks) as many bytes.
"""


def choose(ranks: int, nbytes: int) -> str:
    """Return the name of the algorithm that should be the fastest for `ranks` ranks and a vector of `nbytes` bytes.

    The rule is simpler than the minimum of `predict`, because every allreduce applies it. It never
    chooses the parameter server: the model is too favourable to it, since it charges nothing for the
    handling of a short message.
    """
    if nbytes <= LATENCY_BYTES:
        return "butterfly"
    if ranks & (ranks - 1) == 0:
        return "rabenseifner"
    # Folding sends the whole vector twice more, and a ring takes more steps. With k = ⌊lg P⌋ and α = Lβ,
    # 2(P-1)α + 2nβ < (2k + 2)α + 4nβ where n > (P - k - 2)L.
    crossover = (ranks - ranks.bit_length() - 1) * LATENCY_BYTES
    return "ring" if nbytes > crossover else "rabenseifner"
