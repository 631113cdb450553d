"""Which variables are those of a stage of a Keras model whose layers are on different ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import hvdlite
from hvdlite.adapter.pipeline.stages import StageRanks
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_tf.variables import plain_variable

_NOTE = "_hvdlite_stage"


def note(stages: StageRanks, variables: Iterable[Any], first: int) -> None:
    """Note that variables are the weights of this rank's stage.

    Args:
        stages: The ranks that have the stages.
        variables: The weights.
        first: How many weights the stages before have.
    """
    for place, variable in enumerate(variables, first):
        for each in (variable, plain_variable(variable)):
            setattr(each, _NOTE, (stages, place))


def stages_of(variables: Sequence[Any]) -> StageRanks | None:
    """Return the stages whose weights variables are; None if all ranks have them.

    Raises:
        ArgumentError: They are of several models, or some of none.
    """
    found = {each for variable in variables if (each := getattr(variable, _NOTE, (None,))[0]) is not None}
    if not found:
        return None
    others = sum(not hasattr(variable, _NOTE) for variable in variables)
    if len(found) > 1 or others:
        raise ArgumentError(
            f"weights of {len(found)} models in stages, and {others} weights of none: this is done with those of one model "
            "only. Do it with each for itself, such as model=pipeline."
        )
    stages: StageRanks = found.pop()
    return stages


def place_of(variable: Any) -> int:
    """Return the number of a weight of a stage among the weights of the whole model."""
    place: int = getattr(variable, _NOTE)[1]
    return place


def check_apart(variables: Iterable[Any], process_set: ProcessSet | None) -> None:
    """Raise ArgumentError if ranks that exchange variables have different stages of a model."""
    for variable in variables:
        stages = getattr(variable, _NOTE, (None,))[0]
        if stages is not None:
            together = hvdlite.global_process_set if process_set is None else process_set
            stages.check_apart(getattr(variable, "path", variable.name), together.members, hvdlite.rank())
