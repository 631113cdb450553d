"""A check before the first step of `fit`: that the optimizer uses the gradients of all ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite_tf.gradients.optimizer_parts import has_servers, innermost, options_of

_KERASES = ("keras", "tf_keras")


def refuse_servers(model: Any, callback: Any) -> None:
    """Raise an error if the ranks train at their own pace, for a callback that lets them meet in every epoch.

    Raises:
        ArgumentError: The optimizer of the model trains with a parameter server.
    """
    if has_servers(getattr(model, "optimizer", None)):
        raise ArgumentError(
            "the optimizer of this model trains with a parameter server, so that each rank goes at its own pace, and "
            f"hvd.callbacks.{type(callback).__name__} lets the ranks wait for each other in every epoch: leave it out. The "
            "ranks begin alike, and meet at the end of fit."
        )


def problem_of(model: Any, process_set: ProcessSet | None) -> str:
    """Return the reason why this rank would train alone, though `fit` shall train on all ranks of a set; "" if there is none.

    The function reports only certain problems: a model with its own `train_step`, or an optimizer of the program's own class,
    may exchange gradients itself.

    Args:
        model: A model of Keras 3 or tf_keras.
        process_set: The ranks that train together; None means all ranks.
    """
    here = world("a callback")
    optimizer = getattr(model, "optimizer", None)
    strategy = getattr(model, "distribute_strategy", None)
    if (
        optimizer is None
        or here.engine(process_set).size == 1
        or getattr(strategy, "hvdlite_combines_gradients", False)
    ):
        return ""
    options = options_of(optimizer)
    if options is None:
        if not (_is_kerases(type(innermost(optimizer))) and _is_kerases(_train_step_of(model))):
            return ""
        return (
            f"the optimizer of this model, {type(optimizer).__name__}, is not a distributed one, so every rank would train a "
            "model of its own: pass hvd.DistributedOptimizer(optimizer) to compile()."
        )
    if here.ranks(options.process_set) != here.ranks(process_set):
        return (
            f"the optimizer of this model exchanges gradients among ranks {list(here.ranks(options.process_set))}, and the "
            f"callback is for ranks {list(here.ranks(process_set))}: pass the same process_set to both."
        )
    return ""


def problem_of_backups(callbacks: Sequence[Any], process_set: ProcessSet | None, name: str | None = None) -> str:
    """Return the reason why ranks would overwrite each other's backups; "" if there is none. Every rank calls this.

    Args:
        callbacks: This rank's callbacks.
        process_set: The ranks that train together; None means all ranks.
        name: A name for the operation by which the ranks tell each other their folders.
    """
    own = [os.path.realpath(each.backup_dir) for each in callbacks if type(each).__name__ == "BackupAndRestore"]
    everybody = hvdlite.allgather_object(own, name, process_set=process_set)
    used = Counter(folder for folders in everybody for folder in set(folders))
    if not (several := [folder for folder, ranks in used.items() if ranks > 1]):
        return ""
    return (
        f"several ranks give BackupAndRestore the folder {several[0]}, where each would overwrite the other's files: give each "
        'rank a folder of its own (f"backup/{hvd.rank()}"), or use hvd.checkpoint, which saves once for all ranks.'
    )


def _is_kerases(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _KERASES


def _train_step_of(model: Any) -> Any:
    step = getattr(model, "train_step", None)
    return getattr(step, "__func__", step)
