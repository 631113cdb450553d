"""`run` calls a training function with the state that the job has committed.

The launcher restarts the job, so every generation of it comes here anew:

    init ── find the newest commit ── sync ── reset callbacks, if the number of ranks is another ── the function
                                                                                                       │
      hosts have changed: commit, and leave in order; hvdliterun starts the next generation <──────────┤
      a failure: the error goes on, and ends this rank; hvdliterun ends the others and starts again <──┘

A recovery inside of the process, which goes on with the ranks that are left, would take the place of the last line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from hvdlite import api
from hvdlite.elastic.keeper import HostKeeper
from hvdlite.elastic.state import HostsUpdatedInterrupt, State
from hvdlite.errors import ArgumentError
from hvdlite.launcher_link.generation import Generation

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

_calls = itertools.count()
"""Numbers the calls of elastic functions in this process: each has its own commits."""


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a training function elastic: a decorator.

    Under ``hvdliterun --min-np N`` (or ``--max-np``, or ``--host-discovery-script``) the training survives: when a rank fails,
    or when hosts come or go, hvdliterun starts the program again, and this function goes on from the last state that was
    committed. A program that is started in another way runs the function once, and a failure ends the job.

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
    """

    @functools.wraps(func)
    def elastic(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        api.init()
        config = api.world("elastic.run()").config
        if not config.generation:
            state.sync()
            return func(state, *args, **kwargs)
        try:
            generation = Generation.parse(config.generation)
        except ValueError as error:
            raise ArgumentError(f"{error}.") from None
        keeper = HostKeeper(generation, next(_calls), config.control)
        try:
            return _run(keeper, state, functools.partial(func, state, *args, **kwargs))
        finally:
            state._keeper = None
            keeper.close()

    return elastic


def _run(keeper: HostKeeper, state: State, function: Callable[[], T]) -> T:
    size = keeper.load(state)
    state.sync()
    if size not in (None, api.size()):
        state.on_reset()
        state.save()
    state._keeper = keeper
    try:
        return function()
    except HostsUpdatedInterrupt as interrupt:
        if not interrupt.is_committed:
            _commit(state)
    keeper.leave()
    raise SystemExit(0)


def _commit(state: State) -> None:
    try:
        state.commit()
    except HostsUpdatedInterrupt:  # as before
        return
