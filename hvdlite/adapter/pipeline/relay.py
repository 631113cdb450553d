"""`Relay`: makes the passes of a rank, in the order of a schedule. An error on one rank becomes an error on all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvdlite import api
from hvdlite.adapter.agreement import together
from hvdlite.adapter.pipeline.messages import Messages, Received, ValueCodec
from hvdlite.adapter.pipeline.schedules import Pass, Schedule, forward_only
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError, ranks_text
from hvdlite.protocols import Array, ReduceOp
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.ranks.together import Failure

_FORWARD, _BACKWARD = 0, 1


class Stage(Protocol):
    """What a rank computes. Values are those of the framework."""

    def forward(self, part: int, values: Any) -> Any:
        """Make the forward pass of a micro-batch, from the output of the stage before. Return that of this stage."""
        ...

    def backward(self, part: int, values: Any) -> Any:
        """Make the backward pass of a micro-batch, from the gradients of this stage's output. Return those of its input."""
        ...


_AS_BEFORE = (
    "So no rank has made it. This rank's parameters and gradients are as they were, and the next step begins anew."
)


class _LetGo(Exception):
    """Another rank has failed in this step."""


class Relay:
    """The passes of one rank of a pipeline, and the messages between them.

    Args:
        process_set: The ranks of the pipeline. All of them make a relay.
        place, places: The number of this rank in the pipeline, and how many ranks there are.
        schedule: The order of the passes of a training step.
        per_rank: The stages of each rank.
        codec: Converts values.
        kind: What the pipeline calls itself.
    """

    def __init__(
        self,
        process_set: ProcessSet,
        place: int,
        places: int,
        schedule: Schedule,
        per_rank: int,
        codec: ValueCodec,
        kind: str = "pipeline",
    ) -> None:
        ranks = list(process_set.members)
        communicator = world(f"{kind.capitalize()}()").communicators.new(ranks, f"the {kind} of {ranks_text(ranks)}")
        self._messages = Messages(communicator, codec)
        self._process_set, self._place, self._places = process_set, place, places
        self._schedule, self._per_rank, self._kind = schedule, per_rank, kind

    def run(self, stages: Mapping[int, Stage], parts: int, trains: bool, error: Exception | None = None) -> Any:
        """Make the passes of one step. All ranks of the pipeline call this.

        If a stage fails, the rank goes on to receive and to send, but computes nothing more: so no rank waits in vain, and all
        messages of the step have arrived when it is over. `settle` raises the error afterwards.

        Args:
            stages: The stages of this rank, by number.
            parts: The number of micro-batches.
            trains: Whether there are backward passes.
            error: What this rank has failed with before the step; it takes part all the same.

        Returns:
            The error with which this rank has failed, or None.

        Raises:
            HvdliteError: A rank has left.
        """
        said = 1 if error is not None else parts  # a rank that has failed does not know the number of micro-batches
        said = said if trains else -said
        passes, at = self._passes(said), 0
        while at < len(passes):
            each = passes[at]
            come = self._receive(each)
            if come is not None and come.parts != said:
                # The rank of the first stage says how many passes there are. This rank makes as many, so that all messages
                # arrive.
                error = error or (_LetGo() if come.failed else self._differing(said, come.parts))
                said = come.parts
                passes = self._passes(said)
            at += 1
            packed = None
            if error is None and come is not None and come.failed:
                error = _LetGo()
            if error is None:
                try:
                    stage, values = stages[each.stage], None if come is None else come.values
                    result = (stage.forward if each.forward else stage.backward)(each.part, values)
                    if self._neighbour(each, sends=True) is not None:
                        packed = self._messages.pack(result)
                except Exception as failure:
                    error = failure
            self._send(each, packed, said)
        self._messages.finish()
        return error

    def _passes(self, said: int) -> Sequence[Pass]:
        schedule = self._schedule if said > 0 else forward_only
        return schedule(self._place, self._places, abs(said), self._per_rank)

    def _differing(self, own: int, others: int) -> ArgumentError:
        def words(said: int) -> str:
            return f"{abs(said)} micro-batches to {'train' if said > 0 else 'predict'}"

        return ArgumentError(
            f"the ranks of a {self._kind} were called with different batches: this rank has {words(own)}, and the rank before "
            f"it {words(others)}. All ranks call the same method with the same batch."
        )

    def _neighbour(self, each: Pass, sends: bool) -> int | None:
        """Return the place of the rank to which a pass sends its values, or from which it receives; None if there is none."""
        after = each.forward is sends
        stage = each.stage + (1 if after else -1)
        return stage % self._places if 0 <= stage < self._places * self._per_rank else None

    def _receive(self, each: Pass) -> Received | None:
        source = self._neighbour(each, sends=False)
        # A tag is for the border of two stages, named by the later one, and for a direction.
        border = each.stage + (not each.forward)
        tag = 2 * border + (_FORWARD if each.forward else _BACKWARD)
        return None if source is None else self._messages.receive(source, tag)

    def _send(self, each: Pass, packed: Any, said: int) -> None:
        dest = self._neighbour(each, sends=True)
        border = each.stage + each.forward
        if dest is not None:
            self._messages.send(packed, said, dest, 2 * border + (_FORWARD if each.forward else _BACKWARD))

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Do something on this rank after a step. If it raises, the other ranks raise as soon as they need this rank again.

        To ask the others whether they have done it would cost each step a message.
        """
        try:
            yield
        except BaseException as error:
            self._messages.break_off(f"{what} of the {self._kind}", error)
            raise

    def settle(self, error: Exception | None, numbers: Sequence[float], left: str = _AS_BEFORE) -> Array:
        """End a step. All ranks of the pipeline call this; if one has failed, all raise.

        Args:
            error: What `run` has returned.
            numbers: What this rank adds, equally many on all ranks.
            left: What a step that has failed has left, for the text of the error.

        Returns:
            The sums of the ranks' numbers: float64.

        Raises:
            Exception: The error of this rank.
            HvdliteError: Another rank has failed.
        """
        own = np.array([error is not None, *numbers], np.float64)
        total = own if self._places == 1 else api.allreduce(own, ReduceOp.SUM, process_set=self._process_set)
        if total[0] and self._places == 1:
            assert error is not None
            raise error
        if total[0]:
            own_failure = None if error is None or isinstance(error, _LetGo) else Failure.of(error)

            def whole(failures: dict[int, Failure]) -> Exception:
                if own_failure is not None and error is not None:
                    return error
                first = next(iter(failures.values()))
                return (ArgumentError if first.is_argument else HvdliteError)(
                    f"{ranks_text(list(failures))} could not make this step of the {self._kind}: {first}. {left}"
                )

            together(self._process_set).raise_if(own_failure, whole)
        return total[1:]
