"""The one place where MPI's exceptions become `CommunicationError`. The classes that call MPI are decorated with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from mpi4py import MPI

from hvdlite.errors import CommunicationError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def in_our_words(call: str, error: MPI.Exception) -> CommunicationError:
    """Return the error to raise in place of `error`, which MPI has raised in the function `call`."""
    return CommunicationError(
        f"MPI failed in {call}: {error.Get_error_string()}. This rank cannot go on with the others: end the "
        "job, and look for what MPI or the network has said before (hvdliterun --verbose shows MPI's command)."
    )


def maps_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Return `call` as a function that raises `CommunicationError` where `call` raises ``MPI.Exception``."""

    @functools.wraps(call)
    def mapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except MPI.Exception as error:
            raise in_our_words(call.__name__, error) from error

    return mapped


def maps_own_errors(call: F) -> F:
    """Mark a method that raises `in_our_words` itself: a wrapper would cost more than a small message may."""
    call._maps_own_errors = True  # type: ignore[attr-defined]
    return call


def maps_all_errors(cls: C) -> C:
    """Apply `maps_errors` to each method of `cls` whose name does not begin with two underscores, and return `cls`.

    Methods with `maps_own_errors` stay as they are.
    """
    for name, member in list(vars(cls).items()):
        if callable(member) and not name.startswith("__") and not hasattr(member, "_maps_own_errors"):
            setattr(cls, name, maps_errors(member))
    return cls
