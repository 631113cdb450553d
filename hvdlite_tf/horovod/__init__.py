"""What ``import horovod.tensorflow`` gives under `hvdlite.compat` in the place of our own: with habits of Horovod's, which
programs rely on and hvdlite does not share.

- `operations`: operations with Horovod's gradients. `names`: what programs import from inside of Horovod.
- `keras`, `keras_callbacks`: the same of ``horovod.keras``; `keras_habits`: habits of the Keras of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from hvdlite_tf.horovod.keras_habits import KerasHabits, gradients_of, is_known, let_keras_take
from hvdlite_tf.horovod.operations import (
    allgather,
    broadcast,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from hvdlite_tf.optimizers import wrap as own
from hvdlite_tf.optimizers.keras import Distributed
from hvdlite_tf.optimizers.tf_keras import DistributedTfKeras
from hvdlite_tf.optimizers.v1 import DistributedV1

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "broadcast",
    "grouped_allgather",
    "grouped_reducescatter",
    "reducescatter",
]

Wrap = TypeVar("Wrap", bound=Callable[..., Any])


def with_habits(wrap: Wrap) -> Wrap:
    """Let a function that makes an optimizer a distributed one give it the habits of `KerasHabits` and `_TfKerasHabits`."""

    @functools.wraps(wrap)
    def wrapped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        distributed = wrap(optimizer, *args, **kwargs)
        if isinstance(distributed, Distributed):
            _add_to_class(distributed, KerasHabits)
        elif isinstance(distributed, DistributedTfKeras):
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
    """`f`, which is called once for each list of arguments, in eager code and in graphs apart."""
    known: dict[Any, Any] = {}

    @functools.wraps(f)
    def cached(*args: Any) -> Any:
        key = args, _executing_eagerly()
        if key not in known:
            known[key] = f(*args)
        return known[key]

    return cached


class _TfKerasHabits(DistributedTfKeras):
    """`compute_gradients` returns the gradients of all ranks, and `iterations` counts every pass."""

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
        # The newer ones have none, and programs for Horovod call it.
        compute = getattr(super(), "_compute_gradients", gradients_of)
        return self._combined(compute(loss, var_list, grad_loss, tape))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks, with their variables. Arguments as the plain optimizer has them."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        return self._combined(pairs)

    def _combined(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Apply gradients, and combine them first unless they come from `compute_gradients`."""
        pairs = list(grads_and_vars)
        known = self.__dict__.get("_horovod_combined", ())
        plain = functools.partial(super().apply_gradients, pairs, *args)  # type: ignore[misc]
        if not is_known([gradient for gradient, _ in pairs], known):
            return plain(**kwargs)
        plain = functools.partial(plain, **{**kwargs, "experimental_aggregate_gradients": False})
        passes = self._hvdlite_state.passes
        return plain() if passes is None else passes.apply_gradients(plain, self, pairs)


def _add_to_class(optimizer: Any, mixin: type) -> None:
    """Let this one object have the methods of `mixin` before those of its class, which it goes on to say it is of."""
    shown, kind = optimizer.__class__, type(optimizer)
    namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__class__": property(lambda self: shown)}
    # By way of object, for the class has a __class__ of its own, which says what is saved.
    vars(object)["__class__"].__set__(optimizer, type(kind.__name__, (mixin, kind), namespace))


DistributedOptimizer = with_habits(own.DistributedOptimizer)
let_keras_take()
