"""What every rank did and when: written by each rank as it goes, merged into one Chrome trace.

`recorder` keeps what `records` note on `rows`, and `writer` writes it into the rank's file (training loads no more than that).
`clocks` aligns the ranks' clocks; `rank_file` says what a rank's file looks like, and reads it; `merge` makes one trace of the
files, with the shares of each step (`steps`); `summary` says who was late.
"""

from __future__ import annotations

from hvdlite.timeline.recorder import Timeline
from hvdlite.timeline.records import BucketRecord, RunRecord
from hvdlite.timeline.rows import OperationRecord, Row

__all__ = ["BucketRecord", "OperationRecord", "Row", "RunRecord", "Timeline"]
