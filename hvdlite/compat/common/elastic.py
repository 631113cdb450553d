"""``horovod.common.elastic``: the names, so that programs which only may use them run. Using one raises."""

from __future__ import annotations

from typing import Any

from hvdlite.errors import NotYetError


def not_yet(module: str, name: str) -> type[Any]:
    """A class that can be subclassed, and raises NotYetError when it is called."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotYetError(
            f"{module}.{name} is not in hvdlite yet: the number of ranks is fixed while a job runs. Save checkpoints, and "
            "start the job again with hvdliterun when a rank fails."
        )

    text = f"Raises `NotYetError` when it is called: elastic training is not there yet. Horovod's ``{module}.{name}``."
    return type(name, (), {"__init__": __init__, "__doc__": text, "__module__": __name__})


State = not_yet("horovod.common.elastic", "State")
ObjectState = not_yet("horovod.common.elastic", "ObjectState")
run_fn = not_yet("horovod.common.elastic", "run_fn")
