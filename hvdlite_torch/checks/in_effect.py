"""The error of an optimizer that was made before ``shutdown()`` and that the present world does not know."""

from __future__ import annotations

from typing import NoReturn

from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError


def refuse_to_step(process_set: ProcessSet) -> NoReturn:
    """Raise the reason why an optimizer of `process_set` cannot step: its world has ended.

    Raises:
        NotInitializedError: There is no new world yet.
        ArgumentError: The process set is not in effect in the new world, or this rank is not in it any more; or the set was
            removed before the old world ended.
    """
    here = world("optimizer.step()")
    if process_set.process_set_id is None:
        raise ArgumentError(
            f"{process_set} is not in effect after the restart (shutdown() and init()), so its optimizer cannot step: pass "
            "this very ProcessSet object, not one of equal ranks, to init(process_sets=[…]) or add_process_set() on every rank."
        )
    here.engine(process_set)  # raises if this rank is not in it
    raise ArgumentError(
        f"this optimizer was made before shutdown(), and did not go on with init(), for its process set, {process_set}, had "
        "been removed: make the optimizer anew."
    )
