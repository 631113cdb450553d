"""What all callbacks share: one base class for both Kerases, their place in the list, and errors that all ranks raise."""

from __future__ import annotations

import sys
from typing import Any

import keras

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError


class ForBothKerases:
    """Lets a callback of Keras 3 be one of tf_keras too: the three questions that only tf_keras asks."""

    def _implements_train_batch_hooks(self) -> bool:
        return self._has_own(("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"))

    def _implements_test_batch_hooks(self) -> bool:
        return self._has_own(("on_test_batch_begin", "on_test_batch_end"))

    def _implements_predict_batch_hooks(self) -> bool:
        return self._has_own(("on_predict_batch_begin", "on_predict_batch_end"))

    def _has_own(self, hooks: tuple[str, ...]) -> bool:
        return any(getattr(type(self), hook) is not getattr(keras.callbacks.Callback, hook) for hook in hooks)


class Callback(ForBothKerases, keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not see Keras
    """The base of our callbacks."""


def list_with(callback: Any) -> list[Any] | None:
    """The list of callbacks that `callback` is in, while its `set_model` runs.

    Keras gives a callback no way to see the others; its loop over the list, which is our caller, does.

    Returns:
        Keras' own list, which can be added to at its end; None if there is none, as in a training loop without `CallbackList`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(found, list) and any(each is callback for each in found):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def ranks_of(process_set: ProcessSet | None) -> tuple[int, ...]:
    """The ranks of a process set (all if None) by their numbers in the job, for messages."""
    return world("a callback").ranks(process_set)


def refuse_together(problem: str, process_set: ProcessSet | None) -> None:
    """Raise on every rank what is wrong on some. Every rank calls this.

    Args:
        problem: What is wrong on this rank; "" if nothing is.
        process_set: The ranks that take part; all if None.

    Raises:
        ArgumentError: Something is wrong on some rank; the text says what, and on which.
    """
    problems = hvdlite.allgather_object(problem, process_set=process_set)
    texts: dict[str, list[int]] = {}
    for rank, text in zip(ranks_of(process_set), problems, strict=True):
        if text:
            texts.setdefault(text, []).append(rank)
    if texts:
        raise ArgumentError(
            " ".join(
                text
                if len(ranks) == len(problems)
                else f"On rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
                for text, ranks in texts.items()
            )
        )
