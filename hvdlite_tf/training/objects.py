"""What one rank has, for all, without TensorFlow: objects, and variables of Keras on another backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import Everybody, root_within
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.api import world
from hvdlite_tf.variables import plain_variable

T = TypeVar("T")


def broadcast_eagerly(variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = Everybody) -> None:
    """Overwrite the variables of every rank with the root's, at once.

    Args:
        variables: Variables of Keras, in the same order on every rank.
        root_rank: The rank whose values everybody gets; its rank in the job, with a process set too.
        process_set: The ranks that take part.

    Raises:
        UnsupportedTensorError: One of them cannot be written into.
        MismatchError: The ranks have different variables. Raised on all of them.
    """
    plain = [plain_variable(variable) for variable in variables]
    hvdlite.broadcast(plain, root_within(process_set, root_rank), inplace=True, process_set=process_set)


def join_eagerly(*, process_set: ProcessSet = Everybody) -> int:
    """Say that this rank has run out of data: see `hvdlite.join`.

    Returns:
        The rank that joined last; its rank in the job, with a process set too.
    """
    here = world("join()")
    Registry.of(here, process_set)  # this rank may have had no gradients yet, and others have them
    return here.ranks(process_set)[hvdlite.join(process_set)]


def broadcast_object(
    obj: T, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> T:
    """Give every rank the root's object, at once: in code that builds a graph, while it is built.

    Args:
        obj: Anything that can be pickled; only the root's matters.
        root_rank: Whose object everybody gets; its rank in the job, with a process set too.
        session: Horovod's. No session is needed to send objects, so it changes nothing.
        name: As in `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The root's object: a copy on the other ranks.
    """
    return hvdlite.broadcast_object(obj, root_within(process_set, root_rank), name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> Callable[[Any], Any]:
    """A function that does `broadcast_object` of its argument, with these arguments."""

    def send(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return send


def allgather_object(
    obj: T, session: Any = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> list[T]:
    """Give every rank everybody's object, at once: in code that builds a graph, while it is built.

    Args:
        obj: Anything that can be pickled.
        session: As in `broadcast_object`.
        name: As in `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The objects by rank (copies).
    """
    return hvdlite.allgather_object(obj, name, process_set=process_set)


def vars_to_refs(vars: Any) -> Any:
    """What stands for a variable in sets and as a key of dicts.

    Args:
        vars: A variable of TensorFlow or Keras, or a list of them.

    Returns:
        Its reference; for a list, a tuple.
    """
    if isinstance(vars, list | tuple):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref() if hasattr(vars, "ref") else _KerasReference(vars)


def refs_to_vars(refs: Any) -> Any:
    """The variables that `vars_to_refs` was given; for a tuple, a list."""
    if isinstance(refs, list | tuple):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()


class _KerasReference:
    """What `tf.Variable.ref` is for the variables of Keras 3, which have none."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def deref(self) -> Any:
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KerasReference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)
