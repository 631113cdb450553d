"""The one-line wrap for the optimizers of Keras 3.

The optimizer remains the same object. Its class becomes a subclass of the same name, which exchanges the gradients before it
applies them as Keras does::

    gradients ─▶ exchange ─▶ clipping, weight decay, update, moving averages: all as in Keras
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

import hvdlite
from hvdlite.adapter.agreement import all_together
from hvdlite.adapter.few_bytes.local_steps import Rounds
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions, check_passes
from hvdlite.api import world
from hvdlite.errors import ArgumentError, DistributedAlreadyError, UnsupportedTensorError
from hvdlite_tf.gradients.optimizer_parts import has_servers, innermost, passes_of, rates_of_variables, settings_of
from hvdlite_tf.gradients.optimizer_sync import OptimizerSync
from hvdlite_tf.gradients.own_variables import has_own_sums, own_of, settle, sums_of, without
from hvdlite_tf.optimizers import backends
from hvdlite_tf.optimizers.local_steps import LocalSteps, OwnGradients
from hvdlite_tf.optimizers.plain_class import named_like
from hvdlite_tf.variables import has_value, is_slices, note_own, plain_variable, times


def distribute_keras(
    optimizer: Any,
    options: ExchangeOptions,
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
    inner = check(optimizer)
    state = DistributedState(options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)
    if backward_passes_per_step != 1:
        accumulate(inner, backward_passes_per_step)
    if options.local_steps is not None:
        everybody = all_together("local_steps=", options.process_set)
        everybody.check_same([f"local_steps={options.local_steps.name}"], "what DistributedOptimizer is given")
        passes = getattr(inner, "gradient_accumulation_steps", None) or 1
        state.steps = LocalSteps(options, passes, state.local)
        if optimizer.built:
            state.steps.build(optimizer._trainable_variables)
    wrap(optimizer, state)
    return optimizer


class DistributedState(OptimizerSync):
    """The state that a distributed optimizer has and a plain one does not."""

    identity: Identity

    def __init__(
        self, options: ExchangeOptions, passes: int, average_passes: bool, scale_local_gradients: bool
    ) -> None:
        backend = backends.current()
        identity = Identity(options.process_set)
        alone = options.local_steps is not None
        exchange = OwnGradients(options) if alone else backend.exchange(options, identity)
        super().__init__(exchange, scale_local_gradients and not alone, identity)
        self.options = options
        self.steps: LocalSteps | None = None
        """The steps that this rank makes by itself; None if each step combines gradients."""
        self.factor = 1 if average_passes else passes
        """A factor for the gradients. Keras divides the sum of several passes by their number; this makes it a sum again."""
        self.accumulated: list[Any] = []
        """The variables whose accumulated gradients are being applied."""
        self.joint: int | None = None
        """A checksum of what the ranks had added up when a join has last let them share it."""
        self.weight = backend.weight() if options.op is hvdlite.Average else None

    @property
    def methods(self) -> type:
        """The class with the methods that the optimizer gets."""
        return DistributedKerasOptimizer

    def enter(self, optimizer: Any) -> None:
        """Note that this is the state of `optimizer` now."""

    def combine(self, variables: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Return the gradients of all ranks, each weighted by the number that its rank's program has set."""
        return super().combine(variables, gradients, self.weight if weight is None else weight)


class DistributedKerasOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # mypy does not see Keras
    """The methods that `distribute_keras` adds to an optimizer's class."""

    _hvdlite: DistributedState

    def average_parameters(self) -> None:
        """Bring the parameters of all ranks together now, before the program evaluates or saves. Every rank calls this.

        The next steps are counted from here. A rank that has made no step since the last meeting does nothing.

        Raises:
            ArgumentError: The optimizer was made without ``local_steps``.
            MismatchError, HvdliteError: See `hvdlite.adapter.few_bytes.local_steps.Rounds.meet`.
        """
        if self._hvdlite.steps is None:
            raise ArgumentError("average_parameters() is for optimizers that are made with local_steps=.")
        self._hvdlite.steps.average()

    def exchange_state(self) -> dict[str, Any]:
        """Return what this rank remembers of the exchange, which the optimizer's variables and files do not have.

        It is made of dicts, lists, numbers and arrays: ``"aggregator"``, the state of an aggregator that has one, and
        ``"local_steps"``, the steps since the last meeting and the outer optimizer. Each rank saves and loads its own.
        """
        aggregator: Any = self._hvdlite.options.aggregator
        found, steps = {}, self._hvdlite.steps
        if hasattr(aggregator, "state_dict"):
            found["aggregator"] = aggregator.state_dict()
        if steps is not None:
            found["local_steps"] = steps.state()
        return found

    def load_exchange_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `exchange_state` has returned, before the next step.

        Raises:
            ArgumentError: The state is of an optimizer with other arguments; or it has an outer optimizer, and this one is not
                built.
        """
        aggregator: Any = self._hvdlite.options.aggregator
        steps = self._hvdlite.steps
        expected = set(self.exchange_state())
        if set(state) != expected:
            raise ArgumentError(
                f"this state has {sorted(state)}, and this optimizer {sorted(expected)}: use the arguments with which "
                "it was saved."
            )
        if "aggregator" in state:
            aggregator.load_state_dict(state["aggregator"])
        if steps is not None:
            steps.load(state["local_steps"])

    def build(self, variables: Any) -> None:
        """Make the optimizer's variables, as Keras does."""
        super().build(variables)
        if self._hvdlite.steps is not None:
            self._hvdlite.steps.build(self._trainable_variables)
        if has_own_sums(self):
            note_own(sums_of(self))

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
        if self._hvdlite.steps is not None:
            self._hvdlite.steps.weight = float(weight), True

    def hvdlite_variables(self) -> list[Any]:
        """Return the backend's variables that are equal on all ranks: the model's trainable ones and the optimizer's."""
        outer = [] if self._hvdlite.steps is None else self._hvdlite.steps.outer_variables
        found = without([*self._trainable_variables, *self.variables, *outer], own_of(self))
        return [plain_variable(variable) for variable in found]

    def hvdlite_passes(self) -> int | None:
        """Return how many backward passes the optimizer has had; None while its variables have no values."""
        if not self.built or not all(map(has_value, self.hvdlite_variables())):
            return None
        rounds = self.hvdlite_rounds()
        return passes_of(self) if rounds is None else rounds.made

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Combine the gradients over the ranks, and update the variables with them. The arguments are those of Keras."""
        gradients = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        if gradients and given is not None and not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(given)  # as Keras does
        if gradients and self.built:
            gradients, given = self._hvdlite_combine(gradients, self._trainable_variables if given is None else given)
        steps = self._hvdlite.steps if gradients else None
        if steps is not None:
            steps.before()
        with backends.current().after(
            [each.values if is_slices(each) else each for each in gradients if each is not None]
        ):
            super().apply(gradients, given)
        if steps is not None:
            steps.after(gradients)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Overwrite the model's variables with their moving averages, as Keras does; every rank calls this, as `fit` does."""
        inner = innermost(self)
        if self._hvdlite.steps is not None and inner.use_ema:
            self._hvdlite.steps.share_averages(inner._model_variables_moving_average)
        super().finalize_variable_values(var_list)

    def hvdlite_settle(self, passes: Sequence[int], root: int) -> None:
        """Let what the ranks have added up count, after some have missed passes. See `hvdlite_tf.gradients.own_variables`."""
        settle(self, passes, root)

    def hvdlite_rounds(self) -> Rounds | None:
        """Return the rounds of an optimizer whose ranks have states of their own; None if all ranks have the same state."""
        return None if self._hvdlite.steps is None else self._hvdlite.steps.rounds

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
        # An aggregator remembers gradients from step to step, and the scale of a loss changes.
        scale = self.dynamic_scale if state.options.aggregator and hasattr(self, "dynamic_scale") else None
        if scale is not None:
            own = [None if each is None else times(each, 1 / scale) for each in own]
        found = (state.fill if accumulates else state.combine)(variables, own)
        if scale is not None:
            found = [None if each is None else times(each, scale) for each in found]
        chosen = [*indices, *(i for i, each in enumerate(found) if each is not None and i not in indices)]
        if accumulates:
            state.accumulated = [variables[i] for i in chosen if found[i] is not None]
        elif state.factor != 1:  # this is a LossScaleOptimizer, and the optimizer inside accumulates
            found = [None if each is None else times(each, state.factor) for each in found]
        return [found[i] for i in chosen], [variables[i] for i in chosen]

    def hvdlite_to_clip(self, grads: list[Any]) -> list[Any]:
        """Return the gradients of all ranks, which are not clipped yet."""
        # With accumulation Keras calls _clip_gradients once per update, on the accumulated gradients.
        if self.gradient_accumulation_steps:
            state = self._hvdlite
            grads = state.combine(state.accumulated, grads)
            if state.factor != 1:
                grads = [times(each, state.factor) for each in grads]
        return grads

    def _clip_gradients(self, grads: list[Any]) -> Any:
        return super()._clip_gradients(self.hvdlite_to_clip(grads))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:
            outer = sys._getframe(1).f_locals.get("self")
            if isinstance(outer, keras.optimizers.LossScaleOptimizer) and outer.__dict__.get("inner_optimizer") is self:
                # The constructor of a LossScaleOptimizer sets this, so that the inner optimizer does not scale. The outer one
                # becomes the distributed optimizer.
                state = self._hvdlite
                unwrap(self)
                wrap(outer, state)
                self.loss_scale_factor = None
                return
        super().__setattr__(name, value)

    @classmethod
    def from_config(cls, config: Any, *arguments: Any, **keywords: Any) -> Any:
        """Make a plain optimizer of this configuration. The arguments are those of the plain class."""
        plain: Any = next(base for base in cls.__mro__ if not issubclass(base, DistributedKerasOptimizer))
        return plain.from_config(config, *arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles and copies are plain optimizers, because the exchange belongs to this process.
        _, arguments = super().__reduce__()
        return self.__class__._unpickle_model, arguments


def wrap(optimizer: Any, state: DistributedState) -> None:
    """Make an optimizer a distributed one with this state."""
    optimizer.__class__ = named_like(type(optimizer), state.methods)
    # A plain assignment would make Keras track the variables in the state.
    object.__setattr__(optimizer, "_hvdlite", state)
    backends.current().shield(optimizer)
    state.identity.rates = rates_of_variables(optimizer)
    state.identity.settings = settings_of(optimizer)
    state.identity.optimizer = optimizer
    if state.steps is not None:  # there is no exchange that would tell the ranks which one it is
        Registry.of(world("DistributedOptimizer"), state.options.process_set).made_together(state.identity)
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):
        inner = inner.inner_optimizer
        object.__setattr__(inner, "_hvdlite_inside", True)
    state.enter(optimizer)


def unwrap(optimizer: Any) -> None:
    """Make a distributed optimizer a plain one."""
    vars(object)["__class__"].__set__(optimizer, optimizer.__class__)
    object.__delattr__(optimizer, "_hvdlite")
    vars(optimizer).pop("apply", None)


def accumulate(optimizer: Any, passes: int) -> None:
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


def check(optimizer: Any) -> Any:
    """Return the optimizer that makes the steps: the innermost one. Raise an error unless this is a plain one of Keras 3.

    Raises:
        DistributedAlreadyError: It is distributed already, or one inside of it is.
        ArgumentError: It is of another kind, or hvdlite does not support Keras' backend.
    """
    if isinstance(optimizer, DistributedKerasOptimizer) or has_servers(optimizer):
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
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):
        inner = inner.inner_optimizer
        if isinstance(inner, DistributedKerasOptimizer):
            raise DistributedAlreadyError(
                "the optimizer inside of this LossScaleOptimizer is distributed already: wrap it once."
            )
    return inner
