"""Two elastic trainings, one after the other. In the second, rank 1 kills itself once; argument 1 is a file that marks it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import hvdlite as hvd

MARK = Path(sys.argv[1])


@hvd.elastic.run
def count(state: hvd.elastic.ObjectState, name: str) -> int:
    begun: int = state.count
    while state.count < 5:
        state.count += 1
        if name == "second" and state.count == 4 and hvd.rank() == 1 and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
    return begun


for name in ("first", "second"):
    values: dict[str, Any] = {"count": 0, name: name}
    begun = count(hvd.elastic.ObjectState(**values), name)
    if hvd.rank() == 0:
        print(f"{name} from {begun}")
