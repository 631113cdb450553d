"""Elastic training: a job goes on when ranks fail and when hosts come or go, from the last state that it has committed.

state.py    what a training commits and goes on from: `State`, `ObjectState`
run.py      `run`, which calls the training function with the committed state
keeper.py   keeps what a rank commits, and finds what the job has committed before
store.py    the committed states of one host, as files in memory
lifeline.py the connection to the launcher: what it says of the hosts, and how a rank goes on when others fail

A `State` commits to a `Store`: files in memory that outlive the processes of a host. Rank 0 tells the launcher what is
committed. If a rank fails and enough are left, these go on in their processes. Nobody tells MPI of the failure: the failed
rank's guard stays until the end, so mpirun goes on, and no ULFM is needed. Each rank keeps a connection to the launcher
(`lifeline`), in a thread that sets the `Interrupt` of its world, and every wait polls this interrupt; MPI is never called
so that it blocks. The launcher grants the next generation, the ranks make a communicator of themselves
(``MPI_Comm_create_group``, for which the others need not be there), and a new `World` takes the place of the one before, to
which everything that exchanges gradients is bound anew.
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
