"""The names of ``import horovod.tensorflow`` under `hvdlite.compat` that differ from `hvdlite_tf`.

Programs for Horovod rely on behaviour of Horovod that hvdlite does not have.

- `operations`: the operations with Horovod's gradients and errors; `errors`: errors that are TensorFlow's too.
- `names`: the names that programs import from modules inside Horovod.
- `keras`, `keras_callbacks`: the names of ``horovod.keras`` that differ from `hvdlite_tf.keras`.
- `keras_habits`: the behaviour of the Keras versions of Horovod's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from hvdlite_tf.horovod.errors import let_tensorflow_raise
from hvdlite_tf.horovod.keras_habits import KerasHabits, gradients_of, is_known, let_keras_take
from hvdlite_tf.horovod.operations import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvdlite_tf.optimizers import wrap as own
from hvdlite_tf.optimizers.keras import DistributedKerasOptimizer
from hvdlite_tf.optimizers.tf_keras import DistributedTfKeras
from hvdlite_tf.optimizers.v1 import DistributedV1

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

Wrap = TypeVar("Wrap", bound=Callable[..., Any])


def with_habits(wrap: Wrap) -> Wrap:
    """Return a function like `wrap`, whose distributed optimizers also behave as `KerasHabits` or `_TfKerasHabits` says."""

    @functools.wraps(wrap)
    def wrapped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        distributed = wrap(optimizer, *args, **kwargs)
        if isinstance(distributed, DistributedKerasOptimizer):
            distributed._hvdlite.identity.may_differ = True
            _add_to_class(distributed, KerasHabits)
        elif isinstance(distributed, DistributedTfKeras):
            distributed._hvdlite_state.identity.may_differ = True
            _add_to_class(distributed, _TfKerasHabits)
            distributed._hvdlite_state.counts_passes = True
        elif isinstance(distributed, DistributedV1):
            distributed._optimizer = distributed  # Horovod's is another object, around the user's
        return distributed

    result: Any = wrapped
    return result  # type: ignore[no-any-return]


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    return tf.function(f)


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `f` once for each list of arguments, separately in eager code and in graphs."""
    known: dict[Any, Any] = {}

    @functools.wraps(f)
    def cached(*args: Any) -> Any:
        key = args, _executing_eagerly()
        if key not in known:
            known[key] = f(*args)
        return known[key]

    return cached


class _TfKerasHabits(DistributedTfKeras):
    """Horovod's behaviour: `compute_gradients` returns the gradients of all ranks, and `iterations` counts every pass."""

    @property
    def _agg_helper(self) -> Any:
        return self._hvdlite_state.passes

    def _allreduce(self, grads: Iterable[Any], vars: Iterable[Any]) -> list[Any]:
        pairs = self._hvdlite_state.combine_pairs(zip(grads, vars, strict=True))
        combined = [gradient for gradient, _ in pairs]
        object.__setattr__(self, "_horovod_combined", combined)
        return combined

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        # New optimizers do not have this method, and programs for Horovod call it.
        compute = getattr(super(), "_compute_gradients", gradients_of)
        return self._combined(compute(loss, var_list, grad_loss, tape))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the gradients of all ranks with their variables. The arguments are those of the plain optimizer."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        return self._combined(pairs)

    def _combined(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Apply gradients. Combine them over the ranks before, unless they come from `compute_gradients`."""
        pairs = list(grads_and_vars)
        known = self.__dict__.get("_horovod_combined", ())
        plain = functools.partial(super().apply_gradients, pairs, *args)  # type: ignore[misc]
        if not is_known([gradient for gradient, _ in pairs], known):
            return plain(**kwargs)
        plain = functools.partial(plain, **{**kwargs, "experimental_aggregate_gradients": False})
        passes = self._hvdlite_state.passes
        return plain() if passes is None else passes.apply_gradients(plain, self, pairs)


def _add_to_class(optimizer: Any, mixin: type) -> None:
    """Give one object the methods of `mixin` before those of its class. Its `__class__` remains what it was."""
    shown, kind = optimizer.__class__, type(optimizer)
    namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__class__": property(lambda self: shown)}
    # This calls the setter of `object`, because the class has a property __class__ of its own, for saved models.
    vars(object)["__class__"].__set__(optimizer, type(kind.__name__, (mixin, kind), namespace))


DistributedOptimizer = with_habits(own.DistributedOptimizer)
let_keras_take()
let_tensorflow_raise()
