"""When requests are sent in an open loop: times in seconds from the beginning, in rising order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvdlite.errors import ArgumentError

Floats = npt.NDArray[np.float64]


def poisson(rate: float, seconds: float, burst: int = 1, seed: int = 0) -> Floats:
    """Return the times of independent requests, or of independent bursts, whose requests come at once.

    Args:
        rate: Requests per second.
        seconds: For how long.
        burst: The requests of a burst.
        seed: Where chance begins.
    """
    chance = np.random.default_rng(seed)
    starts = chance.uniform(0, seconds, max(chance.poisson(rate / burst * seconds), 1))
    return np.repeat(np.sort(starts), burst)


def trace(path: Path) -> Floats:
    """Read times from a file that has one in each line, in seconds. The first one becomes 0.

    Args:
        path: The file. What follows a comma, empty lines, and lines that begin with #, are left out.

    Raises:
        ArgumentError: A line has no time, the times go back, or there are none.
        OSError: The file cannot be read.
    """
    times: list[float] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition(",")[0].strip()
        if not text or text.startswith("#"):
            continue
        try:
            time = float(text)
        except ValueError:
            raise ArgumentError(f"{path}, line {number}: {text!r} is no time in seconds.") from None
        if not np.isfinite(time) or (times and time < times[-1]):
            raise ArgumentError(f"{path}, line {number}: {text} does not come after the time before it.")
        times.append(time)
    if not times:
        raise ArgumentError(f"{path}: there is no time in it; expected one in each line, in seconds.")
    return np.array(times) - times[0]
