"""The timeline: what every rank did and when. Each rank writes a file while it runs; the files become one Chrome trace.

- `recorder`: the timeline of one rank.
- `rows`: the rows of a trace, and the record of an operation; `records`: the records of a run of operations and of a bucket.
- `writer`: writes the file of a rank; `rank_file`: the format of this file, and its reader.
- `clocks`: measures the differences between the ranks' clocks.
- `merge`: makes one trace of the files; `steps`: the parts of each step; `summary`: says which ranks were late. Training loads
  `merge` and `steps` only when the timeline ends, and never `summary`.
"""

from __future__ import annotations

from hvdlite.timeline.recorder import Timeline
from hvdlite.timeline.records import BucketRecord, RunRecord
from hvdlite.timeline.rows import OperationRecord, Row

__all__ = ["BucketRecord", "OperationRecord", "Row", "RunRecord", "Timeline"]
