"""The program of a rank that hvdliterun starts: ``python -m hvdlite.tools.doctor.rank REQUEST``.

Each word is a line on its stdout. No other file imports this one, so that Python runs it but once.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hvdlite.tools.doctor.heard import line_of
from hvdlite.tools.doctor.probe import ProbeRequest, examine


def _say(kind: str, value: Any) -> None:
    sys.stdout.write(line_of(kind, value))
    sys.stdout.flush()


if __name__ == "__main__":
    examine(_say, ProbeRequest.unpack(json.loads(sys.argv[1])))
