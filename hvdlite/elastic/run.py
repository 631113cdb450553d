"""`run` calls a training function with the committed state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdlite import api
from hvdlite.elastic.state import State

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a training function elastic: a decorator.

    Args:
        func: The function. Its first argument is the state of the training, a `State`.
    """

    @functools.wraps(func)
    def elastic(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        api.init()
        state.sync()
        return func(state, *args, **kwargs)

    return elastic


__all__: list[Any] = ["run"]
