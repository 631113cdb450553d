"""``horovod.common.elastic``: the names, so that programs which only may use them run. Using one raises."""

from __future__ import annotations

from hvdlite.errors import not_yet

State = not_yet("horovod.common.elastic.State")
ObjectState = not_yet("horovod.common.elastic.ObjectState")
run_fn = not_yet("horovod.common.elastic.run_fn")
