"""What a rank says of itself once a second, and what follows of the last few of these messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

_KEPT = 6


class Pulses:
    """The last pulses of one rank.

    Attributes:
        heard: The time at which the last one came, as of `time.monotonic`; None before the first.
    """

    def __init__(self) -> None:
        self.heard: float | None = None
        self._kept: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)

    def add(self, fields: Mapping[str, Any], now: float) -> None:
        """Take the fields of a message that came at the time `now`."""
        self.heard = now
        if len(self._kept) > 1 and fields["step"] == self._kept[-1]["step"] == self._kept[-2]["step"]:
            self._kept.pop()  # in a long step: those of the steps before stay, which tell how long a step takes
        if self._kept and fields["step"] < self._kept[-1]["step"]:
            self._kept.clear()  # the rank has begun anew
        self._kept.append(fields)

    @property
    def last(self) -> Mapping[str, Any]:
        """The fields of the last one; empty before the first."""
        return self._kept[-1] if self._kept else {}

    @property
    def step_seconds(self) -> float | None:
        """The mean time of the last steps; None if that is not known yet."""
        ended = [pulse for pulse in self._kept if pulse["step"]]
        steps = ended[-1]["step"] - ended[0]["step"] if ended else 0
        return (ended[-1]["stepped"] - ended[0]["stepped"]) / steps if steps else None

    def rate(self, name: str) -> float | None:
        """Return by how much a field has grown per second; None if that is not known yet."""
        if len(self._kept) < 2 or (passed := self._kept[-1]["time"] - self._kept[0]["time"]) <= 0:
            return None
        return float((self._kept[-1][name] - self._kept[0][name]) / passed)
