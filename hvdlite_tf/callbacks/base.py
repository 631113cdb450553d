"""What all callbacks share: a base class for both Kerases, a look at the list of callbacks, and errors that all ranks raise."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import keras

from hvdlite import ProcessSet
from hvdlite.adapter.agreement import together
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite.ranks.together import ranks_by


class ForBothKerases:
    """A mixin with the three methods that only tf_keras calls, so that a callback of Keras 3 works in tf_keras too."""

    def _implements_train_batch_hooks(self) -> bool:
        return self._has_own(("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"))

    def _implements_test_batch_hooks(self) -> bool:
        return self._has_own(("on_test_batch_begin", "on_test_batch_end"))

    def _implements_predict_batch_hooks(self) -> bool:
        return self._has_own(("on_predict_batch_begin", "on_predict_batch_end"))

    def _has_own(self, hooks: tuple[str, ...]) -> bool:
        return any(getattr(type(self), hook) is not getattr(keras.callbacks.Callback, hook) for hook in hooks)


class Callback(ForBothKerases, keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not see Keras
    """The base class of the callbacks of hvdlite."""


def list_with(callback: Any) -> list[Any] | None:
    """Return the list of callbacks that contains `callback`, while Keras calls its `set_model`.

    Keras gives a callback no access to the other callbacks. So this function looks for the list in the frames of its callers,
    one of which is Keras' loop over the list.

    Returns:
        Keras' own list, to which a callback can be appended; None in a training loop without `CallbackList`.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        found = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(found, list) and any(each is callback for each in found):
            return found
    return None


def ranks_of(process_set: ProcessSet | None) -> tuple[int, ...]:
    """Return the world ranks of a process set (all ranks if None), for messages."""
    return world("a callback").ranks(process_set)


def refuse_together(problem: str, process_set: ProcessSet | None) -> None:
    """Raise an error on all ranks if any rank has a problem. Every rank calls this.

    Args:
        problem: This rank's problem in words; "" if there is none.
        process_set: The ranks that take part; None means all ranks.

    Raises:
        ArgumentError: A rank has a problem; the text has all problems, with their ranks.
    """
    everybody = together(process_set)

    def error(problems: dict[int, str]) -> ArgumentError:
        return ArgumentError(
            " ".join(
                text
                if len(ranks) == len(everybody.ranks)
                else f"On rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
                for text, ranks in ranks_by(problems.items()).items()
            )
        )

    everybody.raise_if(problem, error)
