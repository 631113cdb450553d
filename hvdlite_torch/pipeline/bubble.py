"""The bubble of a pipeline whose stages are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.adapter.bubble import Bubble


def watch(bubble: Bubble, stage: Any) -> None:
    """Let a bubble measure each forward and backward pass of a stage of torch."""
    stage.forward_one_chunk = _timed(bubble, stage.forward_one_chunk, "FORWARD", stage.stage_index)
    stage.backward_one_chunk = _timed(bubble, stage.backward_one_chunk, "BACKWARD", stage.stage_index)


def _timed(bubble: Bubble, call: Callable[..., Any], category: str, stage: int) -> Callable[..., Any]:
    def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
        with bubble.computing(category, chunk, stage):
            return call(chunk, *args, **kwargs)

    return timed
