"""The one-line wrap for the optimizers of Keras 3.

The optimizer remains the same object. Its class becomes a subclass of the same name, which exchanges the gradients before it
applies them as Keras does::

    gradients ─▶ exchange ─▶ clipping, weight decay, update, moving averages: all as in Keras
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import keras

import hvdlite
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import Options, check_passes
from hvdlite.api import world
from hvdlite.errors import ArgumentError, DistributedAlreadyError, UnsupportedTensorError
from hvdlite_tf.gradients.optimizer_parts import passes_of, rates_of_variables
from hvdlite_tf.gradients.optimizer_sync import OptimizerSync
from hvdlite_tf.optimizers import backends
from hvdlite_tf.variables import has_value, plain_variable, times


def distribute_keras(
    optimizer: Any,
    options: Options,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of Keras 3 apply the gradients of all ranks. It is changed and returned.

    Args:
        optimizer: An optimizer of any class. A LossScaleOptimizer must see the gradients of all ranks, so that all ranks skip
            the same steps. So if the program or ``model.compile`` (for a mixed_float16 model) puts one around a distributed
            optimizer, the LossScaleOptimizer becomes the distributed one, and the optimizer inside becomes a plain one.
        options: How the gradients are exchanged.
        backward_passes_per_step: Keras' ``gradient_accumulation_steps``: the number of calls whose gradients each rank adds up;
            the last of them exchanges and applies the sum.
        average_aggregated_gradients: Whether the sum of several passes is divided by their number.
        scale_local_gradients: Whether the gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError: `optimizer` is not an optimizer of Keras 3 or is distributed already, or hvdlite does not support Keras'
            backend, or the arguments do not fit together.
    """
    _check(optimizer)
    state = _State(options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):
        inner = inner.inner_optimizer
        if isinstance(inner, Distributed):
            raise DistributedAlreadyError(
                "the optimizer inside of this LossScaleOptimizer is distributed already: wrap it once."
            )
    if backward_passes_per_step != 1:
        _accumulate(inner, backward_passes_per_step)
    _wrap(optimizer, state)
    return optimizer


class _State(OptimizerSync):
    """The state that a distributed optimizer has and a plain one does not."""

    identity: Identity

    def __init__(self, options: Options, passes: int, average_passes: bool, scale_local_gradients: bool) -> None:
        backend = backends.current()
        identity = Identity(world("DistributedOptimizer"))
        super().__init__(backend.exchange(options, identity), scale_local_gradients, identity)
        self.options = options
        self.factor = 1 if average_passes else passes
        """A factor for the gradients. Keras divides the sum of several passes by their number; this makes it a sum again."""
        self.accumulated: list[Any] = []
        """The variables whose accumulated gradients are being applied."""
        self.weight = backend.weight() if options.op is hvdlite.Average else None

    def combine(self, variables: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Return the gradients of all ranks, each weighted by the number that its rank's program has set."""
        return super().combine(variables, gradients, self.weight if weight is None else weight)


class Distributed(keras.optimizers.Optimizer):  # type: ignore[misc]  # mypy does not see Keras
    """The methods that `distribute_keras` adds to an optimizer's class."""

    _hvdlite: _State

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on this rank. Every rank registers the variables at the same positions of its model.

        Args:
            var: A trainable variable of the model.

        Raises:
            ArgumentError: `var` is not a variable.
        """
        self._hvdlite.local.register(var)

    def set_batch_weight(self, weight: float) -> None:
        """Set the number of samples whose mean this rank's gradients are. It holds until the next call, and is 1 at first.

        Ranks with different numbers of samples then get the gradient of the global batch.

        Raises:
            ArgumentError: `weight` is negative, or the gradients are not averaged.
        """
        self._hvdlite.options.check_weighted()
        if not weight >= 0:
            raise ArgumentError(f"set_batch_weight({weight!r}): expected the number of this rank's samples, 0 or more.")
        assert self._hvdlite.weight is not None  # because the gradients are averaged
        self._hvdlite.weight.assign(weight)

    def hvdlite_variables(self) -> list[Any]:
        """Return the backend's variables that are equal on all ranks: the model's trainable ones and the optimizer's."""
        apart = set()
        for part in _parts_of(self):
            local = [variable in self._hvdlite.local for variable in part._trainable_variables]
            # Keras' optimizers have lists of slots, in the order of the variables.
            for slots in vars(part).values():
                if any(local) and isinstance(slots, list) and len(slots) == len(local):
                    apart |= {id(slot) for slot, own in zip(slots, local, strict=True) if own}
        return [plain_variable(v) for v in [*self._trainable_variables, *self.variables] if id(v) not in apart]

    def hvdlite_passes(self) -> int | None:
        """Return how many backward passes the optimizer has had; None while its variables have no values."""
        return passes_of(self) if self.built and all(map(has_value, self.hvdlite_variables())) else None

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Combine the gradients over the ranks, and update the variables with them. The arguments are those of Keras."""
        gradients = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        if gradients and given is not None and not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(given)  # as Keras does
        if gradients and self.built:
            gradients, given = self._hvdlite_combine(gradients, self._trainable_variables if given is None else given)
        super().apply(gradients, given)

    def _hvdlite_combine(self, gradients: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the gradients to apply, with their variables: those given, and those that only other ranks have."""
        state, variables = self._hvdlite, self._trainable_variables
        self._check_variables_are_known(given)
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise UnsupportedTensorError(f"{variable.path} (float8 training) has scales in place of gradients.")
        indices = [self._get_variable_index(variable) for variable in given]
        own: list[Any] = [None] * len(variables)
        for index, gradient in zip(indices, gradients, strict=True):
            own[index] = gradient
        accumulates = bool(self.gradient_accumulation_steps)
        found = (state.fill if accumulates else state.combine)(variables, own)
        chosen = [*indices, *(i for i, each in enumerate(found) if each is not None and i not in indices)]
        if accumulates:
            state.accumulated = [variables[i] for i in chosen if found[i] is not None]
        elif state.factor != 1:  # this is a LossScaleOptimizer, and the optimizer inside accumulates
            found = [None if each is None else times(each, state.factor) for each in found]
        return [found[i] for i in chosen], [variables[i] for i in chosen]

    def _clip_gradients(self, grads: list[Any]) -> Any:
        # With accumulation Keras calls this once per update, on the accumulated gradients.
        if self.gradient_accumulation_steps:
            state = self._hvdlite
            grads = state.combine(state.accumulated, grads)
            if state.factor != 1:
                grads = [times(each, state.factor) for each in grads]
        return super()._clip_gradients(grads)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:
            outer = sys._getframe(1).f_locals.get("self")
            if isinstance(outer, keras.optimizers.LossScaleOptimizer) and outer.__dict__.get("inner_optimizer") is self:
                # The constructor of a LossScaleOptimizer sets this, so that the inner optimizer does not scale. The outer one
                # becomes the distributed optimizer.
                state = self._hvdlite
                _unwrap(self)
                _wrap(outer, state)
                self.loss_scale_factor = None
                return
        super().__setattr__(name, value)

    @classmethod
    def from_config(cls, config: Any, *arguments: Any, **keywords: Any) -> Any:
        """Make a plain optimizer of this configuration. The arguments are those of the plain class."""
        plain: Any = next(base for base in cls.__mro__ if not issubclass(base, Distributed))
        return plain.from_config(config, *arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles and copies are plain optimizers, because the exchange belongs to this process.
        _, arguments = super().__reduce__()
        return self.__class__._unpickle_model, arguments


def _parts_of(optimizer: Any) -> list[Any]:
    """Return an optimizer and the built optimizers inside it."""
    inside = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", [])]
    built = [each for each in inside if each is not None and each.built]
    return [optimizer, *(part for each in built for part in _parts_of(each))]


def _wrap(optimizer: Any, state: _State) -> None:
    plain = type(optimizer)
    optimizer.__class__ = type(
        plain.__name__,
        (Distributed, plain),
        # Keras serializes `obj.__class__`, so saved files and pickles do not name hvdlite, and any process can load them.
        # `type(obj)` and `isinstance` see the distributed class.
        {
            "__module__": plain.__module__,
            "__doc__": plain.__doc__,
            "__class__": property(lambda self: plain),
        },
    )
    # A plain assignment would make Keras track the variables in the state.
    object.__setattr__(optimizer, "_hvdlite", state)
    backends.current().shield(optimizer)
    state.identity.rates = rates_of_variables(optimizer)
    state.identity.optimizer = optimizer
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):
        inner = inner.inner_optimizer
        object.__setattr__(inner, "_hvdlite_inside", True)


def _unwrap(optimizer: Any) -> None:
    vars(object)["__class__"].__set__(optimizer, optimizer.__class__)
    object.__delattr__(optimizer, "_hvdlite")
    vars(optimizer).pop("apply", None)


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras accumulate the gradients of several passes.

    Raises:
        ArgumentError: The optimizer cannot accumulate that number of passes.
    """
    check_passes(passes)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ArgumentError(
            f"backward_passes_per_step={passes}: a MultiOptimizer does not add up gradients itself. Make the optimizers inside "
            f"with gradient_accumulation_steps={passes}, which averages them."
        )
    if optimizer.gradient_accumulation_steps:
        raise ArgumentError(
            f"backward_passes_per_step={passes}, and the optimizer has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}, which means the same: say one of them."
        )
    if optimizer.built:
        raise ArgumentError(
            f"backward_passes_per_step={passes}: this optimizer has been used, or built for its variables, without room for "
            "gradients of several passes. Wrap it before, or make it with gradient_accumulation_steps."
        )
    optimizer.gradient_accumulation_steps = passes


def _check(optimizer: Any) -> None:
    if isinstance(optimizer, Distributed):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap it once.")
    backends.current()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise ArgumentError(
            "expected an optimizer of Keras 3, such as keras.optimizers.Adam(1e-3), of tf_keras, or of tf.compat.v1.train; "
            f"got {kind.__module__}.{kind.__qualname__}."
        )
    if getattr(optimizer, "_hvdlite_inside", False):
        raise DistributedAlreadyError(
            "the LossScaleOptimizer around this optimizer is distributed already: wrap it once."
        )
