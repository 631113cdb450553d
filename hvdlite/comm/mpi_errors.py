"""MPI's errors as ours, in one place: what the classes that call MPI for the core are wrapped in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mpi4py import MPI

from hvdlite.errors import CommunicationError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def told(call: Callable[P, R]) -> Callable[P, R]:
    """A function that raises `CommunicationError` where `call` raises MPI's own exception."""

    @functools.wraps(call)
    def in_our_words(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except MPI.Exception as error:
            raise CommunicationError(
                f"MPI failed in {call.__name__}: {error.Get_error_string()}. This rank cannot go on with the others: end the "
                "job, and look for what MPI or the network has said before (hvdliterun --verbose shows MPI's command)."
            ) from error

    return in_our_words


def all_told(cls: C) -> C:
    """A class whose methods are `told`."""
    for name, member in list(vars(cls).items()):
        if callable(member) and not name.startswith("__"):
            setattr(cls, name, told(member))
    return cls
