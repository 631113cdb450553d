"""Horovod's names for training that goes on when ranks come and go. hvdlite does not have that yet: using one raises.

Importing them works, so that a program which only may use them runs.
"""

from __future__ import annotations

from typing import Any

from hvdlite.errors import NotYetError


def _not_yet(name: str) -> type[Any]:
    class Unavailable:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise NotYetError(
                f"hvdlite_torch.elastic.{name} is not there yet: the number of ranks is fixed while a job runs. Save "
                "checkpoints, and start the job again with hvdliterun when a rank fails."
            )

    Unavailable.__name__ = Unavailable.__qualname__ = name
    Unavailable.__doc__ = f"Raises `NotYetError` when called: elastic training is not there yet. Horovod's ``{name}``."
    return Unavailable


run = _not_yet("run")
TorchState = _not_yet("TorchState")
StateHandler = _not_yet("StateHandler")
ModelStateHandler = _not_yet("ModelStateHandler")
OptimizerStateHandler = _not_yet("OptimizerStateHandler")
SamplerStateHandler = _not_yet("SamplerStateHandler")
ElasticSampler = _not_yet("ElasticSampler")
get_handler_registry = _not_yet("get_handler_registry")
set_handler_registry = _not_yet("set_handler_registry")
