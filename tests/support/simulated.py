"""Runs ranks on a simulated network, and counts time and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.comm.local import LocalFabric, LocalTransport, Network


def run_counting(size: int, network: Network, on_rank: Callable[[LocalTransport], None]) -> tuple[float, int]:
    """Run ranks that use only `send`, `recv` and `sendrecv` of their transports.

    Returns:
        The virtual seconds until the last rank was done, and the bytes that all of them have sent.
    """
    sent = [0] * size

    def counting(transport: LocalTransport) -> None:
        depart = transport._depart

        def counted(data: Any, dest: int) -> Any:
            sent[transport.rank] += data.nbytes
            return depart(data, dest)

        transport._depart = counted  # type: ignore[method-assign]
        on_rank(transport)

    fabric = LocalFabric(size, network)
    fabric.run(counting, timeout=20)
    return fabric.elapsed(), sum(sent)
