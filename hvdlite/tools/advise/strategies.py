"""`TrainingStrategy`: a way for ranks to train together, by the name that a user gives, and what it changes in the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.errors import ArgumentError


class Kind(NamedTuple):
    """What all strategies of one kind have in common.

    Attributes:
        number: The usual number in its name; None if its name has none.
        changes: How much it changes what is learned: 0 nothing, 1 rounding, 2 and 3 more, as the page slow_networks says.
        how: How a program asks for it, with {} for the number.
        lost: What is lost in an update.
    """

    number: float | None
    changes: int
    how: str
    lost: str


_SLOW, _ASYNC = "hvdlite docs slow_networks", "hvdlite docs asynchronous"
_NOTHING = "nothing"
KINDS: dict[str, Kind] = {
    "gradients": Kind(None, 0, "DistributedOptimizer(…)", _NOTHING),
    "sharded": Kind(None, 0, "DistributedOptimizer(…, shard=True)", _NOTHING),
    "overlapped": Kind(None, 0, "DistributedOptimizer(…, overlap=True)", _NOTHING),
    "sync": Kind(0, 0, 'AsyncDistributedOptimizer(…, mode="sync", servers={})', _NOTHING),
    "fp16": Kind(None, 1, "DistributedOptimizer(…, compression=hvd.Compression.fp16)", "digits of each gradient"),
    "powersgd": Kind(4, 2, "DistributedOptimizer(…, compression=hvd.Compression.powersgd({}))", f"accuracy: {_SLOW}"),
    "topk": Kind(0.01, 3, "DistributedOptimizer(…, compression=hvd.Compression.topk({}))", f"accuracy: {_SLOW}"),
    "localsgd": Kind(8, 2, "DistributedOptimizer(…, local_steps=hvd.LocalSGD({}))", f"accuracy: {_SLOW}"),
    "diloco": Kind(64, 3, "DistributedOptimizer(…, local_steps=hvd.DiLoCo({}))", f"accuracy: {_SLOW}"),
    "async": Kind(0, 3, 'AsyncDistributedOptimizer(…, mode="async", servers={})', f"gradients are old: {_ASYNC}"),
}
"""The kinds of strategies by name. Of those that change as much, the simpler ones come first."""


@dataclass(frozen=True)
class TrainingStrategy:
    """A way to train.

    Attributes:
        kind: A key of `KINDS`.
        number: The columns of powersgd, the part of topk, the steps between two meetings of localsgd and diloco; for sync and
            async, how many of the last ranks only serve, 0 for none. 0 for the others.
    """

    kind: str
    number: float = 0

    def __str__(self) -> str:
        return self.kind if not self.number else f"{self.kind}:{self.number:g}"

    @property
    def about(self) -> Kind:
        """What all strategies of this kind have in common."""
        return KINDS[self.kind]

    @property
    def kept(self) -> float:
        """A number that is larger if an update keeps more, among strategies of this kind."""
        return self.number if self.kind in ("powersgd", "topk") else -self.number

    @property
    def how(self) -> str:
        """How a program asks for it."""
        servers = self.kind in ("sync", "async") and not self.number
        return self.about.how.format('"sharded"' if servers else f"{self.number:g}")


def parse_strategy(text: str) -> TrainingStrategy:
    """Read a name such as "fp16", "powersgd:8", "localsgd" or "async:1" (one rank only serves).

    Raises:
        ArgumentError: There is no such strategy, or its number cannot be.
    """
    kind, colon, number = text.partition(":")
    about = KINDS.get(kind)
    if about is None or (colon and about.number is None):
        names = ", ".join(name if one.number is None else f"{name}:{one.number:g}" for name, one in KINDS.items())
        raise ArgumentError(f"strategy {text!r}: expected one of {names}, or one of these with another number.")
    if about.number is None:
        return TrainingStrategy(kind)
    try:
        value = float(number) if colon else about.number
    except ValueError:
        value = -1.0
    whole = kind != "topk"
    least = 0 if kind in ("sync", "async") else 1
    if (whole and (value != int(value) or value < least)) or (not whole and not 0 < value <= 1):
        raise ArgumentError(
            f"strategy {text!r}: expected {f'a whole number from {least} on' if whole else 'a part above 0, at most 1'} after "
            "the colon."
        )
    return TrainingStrategy(kind, value)


USUAL = tuple(
    parse_strategy(name)
    for name in (
        *("gradients", "sharded", "overlapped", "fp16", "powersgd:4", "powersgd:8", "topk:0.01"),
        *("localsgd:8", "diloco:64", "sync", "async", "sync:1", "async:1"),
    )
)
"""The strategies that are compared if the user names none."""
