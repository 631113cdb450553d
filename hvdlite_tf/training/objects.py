"""Functions that send objects, and variables of Keras, from one rank to all ranks without TensorFlow."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import Everybody, root_within
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.api import world
from hvdlite.errors import HvdliteError, ranks_text
from hvdlite.runtime.group import Group
from hvdlite_tf.variables import plain_variable

T = TypeVar("T")

_out_of_reach: weakref.WeakSet[Group] = weakref.WeakSet()
"""The groups that have optimizers whose variables a join cannot reach."""


def note_out_of_reach(process_set: ProcessSet | None) -> None:
    """Note that an optimizer of TensorFlow 1 is made, whose variables are in a session, so that `join` says what to do."""
    with contextlib.suppress(HvdliteError):  # before init()
        _out_of_reach.add(world("DistributedOptimizer()").group(process_set))


def broadcast_eagerly(variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = Everybody) -> None:
    """Overwrite the variables of every rank with the root's values, at once.

    Args:
        variables: Variables of Keras, in the same order on every rank.
        root_rank: The rank in the job of the root, whose values all ranks get; also with a process set.
        process_set: The ranks that take part.

    Raises:
        UnsupportedTensorError: A variable cannot be changed in place.
        MismatchError: The ranks have different variables. All ranks raise it.
    """
    plain = [plain_variable(variable) for variable in variables]
    hvdlite.broadcast(plain, root_within(process_set, root_rank), inplace=True, process_set=process_set)


def join_eagerly(*, process_set: ProcessSet = Everybody) -> int:
    """Say that this rank has no more data. See `hvdlite.join`.

    Returns:
        The rank that joined last; its rank in the job, also with a process set.

    Raises:
        HvdliteError: A rank has missed steps with an optimizer that has no variables there. All ranks raise it.
    """
    here = world("join()")
    registry = Registry.of(here, process_set)  # this rank may not have exchanged gradients yet, and others may have
    last = here.ranks(process_set)[hvdlite.join(process_set)]
    if behind := sorted({*registry.behind}):
        raise HvdliteError(
            f"{ranks_text(behind)} called join() before the first step, when the optimizer had no variables there, "
            "and so cannot take over what the others have reached: call optimizer.build(model.trainable_variables) on all "
            "ranks before they train."
        )
    group = here.group(process_set)
    if group.rank == 0 and any(group.missed) and group in _out_of_reach:
        warnings.warn(
            "hvdlite: ranks have missed steps of an optimizer of TensorFlow 1, whose variables join() cannot reach: give all "
            f"ranks those of rank {last}, which join() returns, by session.run(hvd.broadcast_global_variables({last})). With "
            "backward_passes_per_step run tf.compat.v1.local_variables_initializer() too: all begin with the same pass then.",
            RuntimeWarning,
            stacklevel=2,
        )
    return last


def broadcast_object(
    obj: T, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> T:
    """Give every rank the root's object. See `hvdlite.broadcast_object` for the other arguments, the result and the errors.

    The function acts at once. In code that builds a graph it acts while the graph is built.

    Args:
        root_rank: The rank in the job of the root, also with a process set.
        session: Horovod's argument, which has no effect.

    Examples:
        >>> on_ranks(2, lambda: hvd.broadcast_object(f"from rank {hvd.rank()}", root_rank=1))
        ['from rank 1', 'from rank 1']
    """
    return hvdlite.broadcast_object(obj, root_within(process_set, root_rank), name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> Callable[[Any], Any]:
    """Return a function of one object that calls `broadcast_object` for it, with these arguments.

    Examples:
        >>> on_ranks(2, lambda: hvd.broadcast_object_fn(root_rank=1)(f"from rank {hvd.rank()}"))
        ['from rank 1', 'from rank 1']
    """

    def send(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return send


def allgather_object(
    obj: T, session: Any = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> list[T]:
    """Give every rank the objects of all ranks. See `hvdlite.allgather_object` for the other arguments and the result.

    The function acts at once. In code that builds a graph it acts while the graph is built.

    Args:
        session: Horovod's argument, which has no effect.

    Examples:
        >>> on_ranks(2, lambda: hvd.allgather_object({"rank": hvd.rank()}))[0]
        [{'rank': 0}, {'rank': 1}]
    """
    return hvdlite.allgather_object(obj, name, process_set=process_set)


def vars_to_refs(vars: Any) -> Any:
    """Return a reference to a variable, which can be an element of a set and a key of a dict.

    Args:
        vars: A variable of TensorFlow or Keras, or a list of variables.

    Returns:
        The reference; for a list, a tuple of references.

    Examples:
        >>> variable = tf.Variable(1.0)
        >>> hvd.vars_to_refs(variable) in {hvd.vars_to_refs(variable)}
        True
    """
    if isinstance(vars, list | tuple):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref() if hasattr(vars, "ref") else _KerasReference(vars)


def refs_to_vars(refs: Any) -> Any:
    """Return the variable of a reference that `vars_to_refs` made; for a tuple of references, a list of variables.

    Examples:
        >>> variable = tf.Variable(1.0)
        >>> hvd.refs_to_vars(hvd.vars_to_refs(variable)) is variable
        True
    """
    if isinstance(refs, list | tuple):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()


class _KerasReference:
    """A reference to a variable of Keras 3, which has no method `ref` as a `tf.Variable` has."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def deref(self) -> Any:
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KerasReference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)
