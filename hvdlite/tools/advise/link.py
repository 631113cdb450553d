"""`NetworkLink`: what a message between two hosts costs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdlite.errors import ArgumentError

DEFAULT_LATENCY = 1e-4
"""The latency of a link of which only the bandwidth was given, in seconds: that of Ethernet with TCP, and of what MPI adds."""

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "kb/s": 8e3, "mb/s": 8e6, "gb/s": 8e9}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


@dataclass(frozen=True)
class NetworkLink:
    """What a host pays for a message to another host. It sends and receives at the same time.

    Attributes:
        latency: α, the seconds until a message arrives.
        seconds_per_byte: β, 1 / bandwidth.
        reduction: γ, the seconds to add a byte to another one.
    """

    latency: float
    seconds_per_byte: float
    reduction: float = 0.0

    @property
    def bits_per_second(self) -> float:
        """The bandwidth."""
        return 8 / self.seconds_per_byte

    def __str__(self) -> str:
        rate = self.bits_per_second
        unit, factor = ("Gbit/s", 1e9) if rate >= 1e9 else ("Mbit/s", 1e6) if rate >= 1e6 else ("kbit/s", 1e3)
        return f"{rate / factor:.3g} {unit}, {1e3 * self.latency:.2g} ms"


def parse_link(text: str) -> NetworkLink:
    """Read a link from a text such as "100mbit", "25gbit,20us" or "12MB/s,1ms": its bandwidth, and its latency if it is known.

    Raises:
        ArgumentError: The text is none of these, or the bandwidth is 0.
    """
    rates, times = "|".join(_RATES), "|".join(_TIMES)
    found = re.fullmatch(rf"{_NUMBER} ?({rates})(?:, ?{_NUMBER} ?({times}))?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ArgumentError(
            f'a link of {text!r}: expected a bandwidth above 0, such as "100mbit", "10gbit" or "12MB/s", and a latency if you '
            'know it, such as "100mbit,0.5ms".'
        )
    latency = DEFAULT_LATENCY if found[3] is None else float(found[3]) * _TIMES[found[4]]
    return NetworkLink(latency, 8 / (float(found[1]) * _RATES[found[2]]))
