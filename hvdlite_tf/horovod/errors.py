"""The errors of ``horovod.tensorflow``: they are hvdlite's and TensorFlow's, so that programs catch them as either.

A mismatch is also a ``tf.errors.FailedPreconditionError``, and an argument that is not allowed is also a
``tf.errors.InvalidArgumentError``: in eager code, out of a tf.function, and out of a session. Their first line says what
happened. In a process that has not imported ``horovod`` nothing changes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf
from tensorflow.python.eager.context import Context

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite_tf.ops import failures

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _class_for(cls: Any) -> Any:
    """Return a class that derives from `cls` and from the class of TensorFlow that Horovod raises."""
    theirs = tf.errors.UnknownError
    for own, other in (
        (MismatchError, tf.errors.FailedPreconditionError),
        (ArgumentError, tf.errors.InvalidArgumentError),
    ):
        if issubclass(cls, own):
            theirs = other
    # TensorFlow's class comes first: TensorFlow makes its errors again, by the arguments of their classes.
    return type(cls.__name__, (theirs, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def as_both(error: Exception, about: Any = None) -> Exception:
    """Return an error of both kinds for an error of hvdlite. Return other errors unchanged.

    Args:
        error: The error.
        about: TensorFlow's error about it, which says where in the graph it happened; None in eager code.
    """
    if not isinstance(error, HvdliteError) or isinstance(error, tf.errors.OpError):
        return error
    return _made(type(error), str(error), about)


def _made(cls: Any, text: str, about: Any) -> Exception:
    node, operation = (None, None) if about is None else (about.node_def, about.op)
    rest = "" if about is None else f"\n\n{about.message}"
    made: Exception = _class_for(cls)(node, operation, text + rest)
    return made


def with_tensorflow_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with errors of both kinds."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except HvdliteError as error:
            both = as_both(error)
            if both is error:
                raise
            raise both.with_traceback(error.__traceback__) from None

    return wrapped


def _from_graph(error: Any) -> Any:
    """Return the error that a program gets for an error of TensorFlow: of both kinds if hvdlite has caused it."""
    if "horovod" not in sys.modules or isinstance(error, HvdliteError):
        return error
    found = failures.original(error.message)
    if found is None or not issubclass(found[0], HvdliteError):
        return error
    return _made(found[0], found[1], error)


def let_tensorflow_raise() -> None:
    """Let TensorFlow raise errors of both kinds. This changes TensorFlow for the whole process, once."""
    if failures.shown:
        return
    failures.shown.append(lambda error: as_both(error) if "horovod" in sys.modules else error)
    # A tf.function that the program calls runs by this method, and a graph of TensorFlow 1 by a session.
    Context.call_function = _with_errors_of_both_kinds(Context.call_function)
    session: Any = next(each for each in tf.compat.v1.Session.__mro__ if "run" in vars(each))
    session.run = _with_errors_of_both_kinds(session.run)


def _with_errors_of_both_kinds(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except tf.errors.OpError as error:
            found = _from_graph(error)
            if found is error:
                raise
            raise found from None

    return wrapped
