"""``horovod.common.elastic`` has the states of `hvdlite.elastic`, and ``run_fn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "run_fn"]


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Make a training function elastic, as `hvdlite.elastic.run` does.

    Args:
        func: The function. Its first argument is the state.
        reset: Not called: hvdliterun starts the program again, instead of a reset inside of the process.
    """
    return run(func)
