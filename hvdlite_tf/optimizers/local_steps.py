"""`LocalSteps`: an optimizer of Keras that steps with its rank's own gradients, and brings the ranks together at times.

The same code runs eagerly and in a tf.function. What a step costs there is one call of Python, which counts it::

    update, as in Keras ─▶ count ─▶ every few steps: parameters ─▶ mean of all ranks ─▶ (outer optimizer) ─▶ parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.adapter.few_bytes.local_steps import OUTER_MOMENTUM, OUTER_RATE, DiLoCo, Rounds
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import Average, allreduce
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array, TensorInfo
from hvdlite_tf.gradients.local_variables import LocalVariables
from hvdlite_tf.optimizers import backends
from hvdlite_tf.variables import is_slices, plain_variable


class OwnGradients:
    """The `hvdlite_tf.gradients.optimizer_sync.GradientCombiner` of an optimizer that steps with its rank's own gradients.

    Args:
        options: The options of the optimizer.
    """

    def __init__(self, options: ExchangeOptions) -> None:
        self.options = options

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Return the gradients as they are."""
        return list(gradients)

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients as they are."""
        return list(gradients)


class LocalSteps:
    """The rounds of one optimizer.

    Args:
        options: The options of the optimizer, with `local_steps`.
        passes: The number of calls of `apply` that are one step.
        local: The variables that each rank keeps for itself.

    Attributes:
        rounds: Counts the steps.
        weight: The number of samples of each batch from now on, and whether the program has set it.

    Raises:
        ArgumentError: The outer optimizer is not one of Keras.
    """

    def __init__(self, options: ExchangeOptions, passes: int, local: LocalVariables) -> None:
        how = options.local_steps
        assert how is not None
        self.rounds = Rounds(how, options.process_set, options.codec, passes)
        self.weight = 1.0, False
        self._options, self._local = options, local
        self._outer = _outer_of(how) if isinstance(how, DiLoCo) else None
        self._variables: list[Any] = []
        self._start: list[Any] = []
        """For an outer optimizer, the variables that it steps: what all ranks had at the beginning of the round."""
        self._begun: Any = None
        """A variable: 1 if `_start` has values."""

    def build(self, variables: Sequence[Any]) -> None:
        """Make the variables of an outer optimizer for these variables of a model."""
        self._variables = list(variables)
        if self._outer is None:
            return
        self._begun = keras.Variable(0, dtype="int32", trainable=False, name="hvdlite_begun")
        self._start = [
            keras.Variable(keras.initializers.Zeros(), variable.shape, variable.dtype, name=f"hvdlite_start_{place}")
            for place, variable in enumerate(variables)
        ]
        self._outer.build(self._start)

    @property
    def outer_variables(self) -> list[Any]:
        """The variables of the outer optimizer, which are equal on all ranks."""
        return [] if self._outer is None or not self._start else [self._begun, *self._start, *self._outer.variables]

    def before(self) -> None:
        """Note where the first round begins. Every step calls this before it changes parameters."""
        if self._outer is not None:
            keras.ops.cond(keras.ops.equal(self._begun, 0), self._begin, lambda: None)

    def _begin(self) -> None:
        for start, variable in zip(self._start, self._variables, strict=True):
            start.assign(variable)
        self._begun.assign(1)

    def after(self, gradients: Sequence[Any]) -> None:
        """Count a step with these gradients, and let the ranks meet if it is time."""

        def count() -> list[Array]:
            self.rounds.weigh(*self.weight)
            return [np.asarray(self.rounds.count())]

        dense = [each.values if is_slices(each) else each for each in gradients if each is not None]
        self._meet_if(count, dense)

    def average(self) -> None:
        """Bring the parameters of all ranks together, if this rank has made a step since the last meeting."""
        if self._variables:
            self._meet_if(lambda: [np.asarray(self.rounds.pending)])

    def _meet_if(self, due: Callable[[], list[Array]], after: Sequence[Any] = ()) -> None:
        (meets,) = backends.current().call(due, [], [TensorInfo("bool", ())], after)
        keras.ops.cond(meets, self._meet, lambda: None)

    def _meet(self) -> None:
        shared = [place for place, variable in enumerate(self._variables) if variable not in self._local]
        variables = [self._variables[place] for place in shared]
        start = [self._start[place] for place in shared] if self._outer is not None else []

        def meet(*arrays: Array) -> list[Array]:
            return self.rounds.meet(arrays[: len(shared)], arrays[len(shared) :])

        given = [plain_variable(variable) for variable in [*variables, *start]]
        results = [TensorInfo(variable.dtype, tuple(variable.shape)) for variable in variables]
        found = backends.current().call(meet, given, results)
        if self._outer is not None:
            self._outer.apply(found, start)
            found = start
        for variable, value in zip(variables, found, strict=True):
            variable.assign(value)

    def share_averages(self, averages: Sequence[Any]) -> None:
        """Give all ranks the mean of the moving averages that each has of the variables. Every rank calls this."""
        pairs = zip(self._variables, averages, strict=True)
        shared = [average for variable, average in pairs if average is not None and variable not in self._local]
        given = [keras.ops.convert_to_numpy(average) for average in shared]
        name, process_set = "optimizer.moving_averages", self._options.process_set
        for average, value in zip(shared, allreduce(given, Average, name, process_set=process_set), strict=True):
            average.assign(value)

    def begin(self) -> None:
        """Begin a round with the present parameters. The outer optimizer keeps its momentum."""
        self.rounds.begin()
        if self._begun is not None:
            self._begun.assign(0)

    def state(self) -> dict[str, Any]:
        """Return the state of this rank: numbers by name, and the outer optimizer's variables as arrays."""
        outer = [keras.ops.convert_to_numpy(variable) for variable in self.outer_variables]
        return self.rounds.state() | ({"outer": outer} if outer else {})

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state that `state` has returned.

        Raises:
            ArgumentError: The state has other variables than this outer optimizer.
        """
        variables, given = self.outer_variables, state.get("outer", [])
        if [tuple(each.shape) for each in variables] != [np.shape(each) for each in given]:
            raise ArgumentError(
                f"this state has {len(given)} variables of an outer optimizer, and here there are {len(variables)}, or they "
                "have other shapes: call optimizer.build(model.trainable_variables) first, and use the same settings."
            )
        for variable, value in zip(variables, given, strict=True):
            variable.assign(value)
        self.rounds.load(state)


def _outer_of(how: DiLoCo) -> Any:
    outer = how.outer
    if outer is None:
        return keras.optimizers.SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    if not isinstance(outer, keras.optimizers.Optimizer) or hasattr(outer, "_hvdlite") or outer.built:
        what = "a distributed or used one" if isinstance(outer, keras.optimizers.Optimizer) else type(outer).__name__
        raise ArgumentError(
            f"DiLoCo: outer={what}: expected a new optimizer of Keras for this optimizer alone, such as "
            "keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)."
        )
    return outer
