"""The one place where MPI's exceptions become `CommunicationError`. The classes that call MPI are decorated with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mpi4py import MPI

from hvdlite.errors import CommunicationError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def maps_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Return `call` as a function that raises `CommunicationError` where `call` raises ``MPI.Exception``."""

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


def maps_all_errors(cls: C) -> C:
    """Apply `maps_errors` to each method of `cls` whose name does not begin with two underscores, and return `cls`."""
    for name, member in list(vars(cls).items()):
        if callable(member) and not name.startswith("__"):
            setattr(cls, name, maps_errors(member))
    return cls
