"""An object with a state for tests of checkpoints: of one tensor each rank has a part, and each has something of its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.checkpoint import loading, saving
from hvdlite.checkpoint.states import Snapshot, StateDict
from hvdlite.checkpoint.structure import Own, TensorPiece


class Counter:
    """An object with a state: a tensor of which each rank has a part, one that all have, and what each has for itself."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.whole = np.full((4, 3), value, np.float32)
        self.own = hvd.rank() + 10 * value

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("its own class saves it")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.whole = state["value"], state["whole"]
        self.own = state["own"]


class CounterState(StateDict):
    def __init__(self, target: Counter) -> None:
        super().__init__(target)
        self.target = target

    def snapshot(self, rank: int) -> Snapshot:
        target, size = self.target, hvd.size()
        cuts = [12 * each // size for each in range(size + 1)]
        piece = target.whole.reshape(-1)[cuts[rank] : cuts[rank + 1]]
        value = {"value": target.value, "whole": TensorPiece(piece, cuts[rank], (4, 3)), "own": Own(target.own)}
        return Snapshot(value, on_each_rank=True)


def register() -> None:
    """Let checkpoints know the class, until the end of the process."""
    for module in (saving, loading):
        plain = module.stateful
        module.stateful = lambda value, plain=plain: (  # type: ignore[assignment]
            CounterState(value) if isinstance(value, Counter) else plain(value)
        )


def save(folder: Path, value: int, size: int = 5000, **more: Any) -> Path:
    weights = np.full(size, value, np.float64)
    return hvd.checkpoint.save(folder, counter=Counter(value), weights=weights, step=value, **more)


def load(folder: Path) -> tuple[int, list[str]] | None:
    """What is loaded, which is checked to be of one save; and the warnings."""
    counter = Counter(-1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = hvd.checkpoint.load(folder, counter=counter)
    if found is None:
        return None
    assert (counter.whole == counter.value).all() and counter.whole.shape == (4, 3)
    assert (found["weights"] == counter.value).all() and found["step"] == counter.value
    assert counter.own == [rank + 10 * counter.value for rank in range(found.ranks)]
    return counter.value, [str(each.message) for each in said]
