"""Elastic training: a job goes on when ranks fail and when hosts come or go, from the last state that it has committed.

state.py    what a training commits and goes on from: `State`, `ObjectState`
run.py      `run`, which calls the training function with the committed state
keeper.py   keeps what a rank commits, and finds what the job has committed before
store.py    the committed states of one host, as files in memory
lifeline.py the connection to the launcher: what it says of the hosts, and how a rank goes on when others fail
"""

from __future__ import annotations

from hvdlite.elastic.run import run
from hvdlite.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State
from hvdlite.errors import CommitError
from hvdlite.errors import CommunicationError as HorovodInternalError

__all__ = [
    "CommitError",
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "run",
]
