"""``horovod.common.elastic`` has the names only, so that programs can import them. Using one raises `NotYetError`."""

from __future__ import annotations

from hvdlite.errors import not_yet

State = not_yet("horovod.common.elastic.State")
ObjectState = not_yet("horovod.common.elastic.ObjectState")
run_fn = not_yet("horovod.common.elastic.run_fn")
