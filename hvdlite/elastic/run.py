"""`run` calls a training function with the state that the job has committed.

Every generation of the job comes here anew:

    init ── find the newest commit ── sync ── reset callbacks, if the number of ranks is another ── the function
     ▲             ▲                                                                                   │
     │             └─── a new world of the ranks that are left, in the same processes ◀────────────────┤ other ranks fail
     │                                                                                                 │
     └─── hvdliterun starts the processes again ◀── this rank fails, or others and it cannot go on ◀───┤
          hosts have changed: commit, and leave in order ◀─────────────────────────────────────────────┘
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from hvdlite import api
from hvdlite.elastic.keeper import HostKeeper
from hvdlite.elastic.lifeline import Lifeline
from hvdlite.elastic.state import HostsUpdatedInterrupt, State
from hvdlite.errors import ArgumentError, PeerLeftError
from hvdlite.launcher_link.generation import Generation

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

_calls = itertools.count()
"""Numbers the calls of elastic functions in this process: each has its own commits."""


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a training function elastic: a decorator.

    Under ``hvdliterun --min-np N`` (or ``--max-np``, or ``--host-discovery-script``) the training survives when a rank fails,
    or when hosts come or go: this function goes on from the last state that was committed. If ranks have failed and enough are
    left, these call it again in their processes. If not, hvdliterun starts the program again. A program that is started in
    another way runs the function once, and a failure ends the job.

    What depends on the number of ranks, such as this rank's share of the data, belongs into the function, or into a reset
    callback of the state: the code before the function is not run again in a process that goes on.

    The function may be called several times in a program, in the same order on every rank. A program that was started again
    comes to the same calls: those that had come to their ends go on from their last commits.

    Args:
        func: The function. Its first argument is the state of the training, a `State`, which it commits again and again.

    Returns:
        A function with the arguments of `func`, which calls `hvdlite.init` first. It returns what `func` returns.

    Raises:
        ArgumentError: The environment has a setting of hvdliterun that has another form.
        CommitError: What the job has committed is lost.
        SystemExit: The hosts have changed. The program ends on all ranks, and hvdliterun starts it again.

    Examples:
        >>> @hvdlite.elastic.run
        ... def train(state):
        ...     while state.epoch < 3:
        ...         state.epoch += 1
        ...         state.commit()
        ...     return state.epoch
        >>> on_ranks(2, lambda: train(hvdlite.elastic.ObjectState(epoch=0)))
        [3, 3]
    """

    @functools.wraps(func)
    def elastic(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        api.init()
        config = api.world("elastic.run()").config
        if not config.generation:
            state.sync()
            return func(state, *args, **kwargs)
        try:
            outlives = Generation.parse(config.generation).outlives
        except ValueError as error:
            raise ArgumentError(f"{error}.") from None
        call = next(_calls)
        speaks = outlives or api.rank() == 0
        lifeline = Lifeline(config.control, call) if config.control and speaks else None
        try:
            while True:
                try:
                    return _run(call, lifeline, state, functools.partial(func, state, *args, **kwargs))
                except Exception as error:
                    if lifeline is None or not lifeline.explains(error):
                        raise
                    _forget_frames(error)
                lifeline.go_on()
        finally:
            state._keeper = None
            if lifeline is not None:
                lifeline.close()

    return elastic


def _run(call: int, lifeline: Lifeline | None, state: State, function: Callable[[], T]) -> T:
    generation = Generation.parse(api.world("elastic.run()").config.generation)
    keeper = HostKeeper(generation, call, lifeline)
    size = keeper.load(state)
    state.sync()
    if size not in (None, api.size()):
        state.on_reset()
        state.save()
    state._keeper = keeper
    try:
        result = function()
    except HostsUpdatedInterrupt as interrupt:
        if not interrupt.is_committed:
            _commit(state)
    else:
        if lifeline is None or lifeline.end():
            return result
        raise PeerLeftError("other ranks have failed, and go on from what was committed last.")
    keeper.leave()
    raise SystemExit(0)


def _forget_frames(error: BaseException) -> None:
    """Drop the variables of the functions that an error has left: what exchanges gradients there is gone on all ranks."""
    errors: list[BaseException | None] = [error]
    for each in errors:  # it grows meanwhile
        if each is not None:
            traceback.clear_frames(each.__traceback__)
            errors += [other for other in (each.__cause__, each.__context__) if other not in errors]


def _commit(state: State) -> None:
    try:
        state.commit()
    except HostsUpdatedInterrupt:  # as before
        return
