"""The timeline records what every rank did and when, and becomes one Chrome trace of all ranks.

While a job runs, each rank writes a file of its own (training imports no more of this folder than these modules):

- `recorder`: the `Timeline` of a rank, a queue of events, and the thread that writes them; the record of an operation.
- `counts`: what the rank has done, in a few numbers, for those who look at a running job (`hvdlite.runtime.pulse`).
- `records`: the records of a run and of a bucket.
- `writer`: the writer of the rank's file. `clocks`: how far the clocks of the ranks are apart.

When the recording ends, or in ``hvdlite timeline``, the files become one trace:

- `rank_file`: the rows of the picture, the format of a rank's file, and its reader.
- `merge`: one trace from the files of all ranks.
- `steps`: how the time of a step divides into computing, waiting and exchange. `summary`: tables that say who was late.
"""

from __future__ import annotations

from hvdlite.timeline.counts import Counts
from hvdlite.timeline.rank_file import Row
from hvdlite.timeline.recorder import OperationRecord, Timeline
from hvdlite.timeline.records import BucketRecord, RunRecord

__all__ = ["BucketRecord", "Counts", "OperationRecord", "Row", "RunRecord", "Timeline"]
