"""Which optimizers of Keras can be stepped in parts, by servers."""

from __future__ import annotations

from typing import Any

import keras

from hvdlite.async_sgd.server import Mode
from hvdlite.async_sgd.training.options import AsyncOptions
from hvdlite.errors import ArgumentError, DistributedAlreadyError, UnsupportedTensorError
from hvdlite_tf.gradients.optimizer_parts import has_servers, options_of
from hvdlite_tf.gradients.stepped_alone import differs_alone
from hvdlite_tf.variables import tensorflow


def check_optimizer(given: Any) -> None:
    """Raise an error unless this is an optimizer of Keras 3 that servers may have.

    Raises:
        DistributedAlreadyError: The optimizer is distributed already.
        ArgumentError: It is of another kind.
    """
    if has_servers(given) or options_of(given) is not None or getattr(given, "_hvdlite_inside", False):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap the plain one, and once.")
    if not isinstance(given, keras.optimizers.Optimizer):
        kind = given if isinstance(given, type) else type(given)
        raise ArgumentError(
            f"AsyncDistributedOptimizer wraps an optimizer of Keras 3; got {kind.__module__}.{kind.__qualname__}. Write "
            "hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1), model)."
        )
    if isinstance(given, keras.optimizers.LossScaleOptimizer | keras.optimizers.MultiOptimizer):
        raise ArgumentError(
            f"a {type(given).__name__} does not work with a parameter server: wrap a single optimizer. For models of "
            "mixed_float16 use mixed_bfloat16 or DistributedOptimizer."
        )
    tf = tensorflow()
    if tf is not None and (not tf.executing_eagerly() or tf.distribute.has_strategy()):
        raise ArgumentError(
            "AsyncDistributedOptimizer: call it outside of a tf.function, of a graph, and of the scope of a strategy."
        )


def check_torch_only(overlap: bool | None, overlap_pull: bool, hogwild: bool) -> None:
    """Raise an error if an argument is given that only torch's optimizer can have.

    Raises:
        ArgumentError: It is.
    """
    if overlap:
        raise ArgumentError(
            f"overlap={overlap!r}: Keras gives an optimizer all gradients of a step at once, when the backward pass is over, "
            "so none can travel before. Leave it out; hvdlite_torch.AsyncDistributedOptimizer has it."
        )
    if overlap_pull:
        raise ArgumentError(
            f"overlap_pull={overlap_pull!r}: the layers of a graph read their variables without a call of Python before, in "
            "which they could wait. Leave it out; hvdlite_torch.AsyncDistributedOptimizer has it."
        )
    if hogwild:
        raise ArgumentError(
            f"hogwild={hogwild!r}: the ranks would share the memory of the variables, and TensorFlow keeps variables in memory "
            "of its own. Leave it out; hvdlite_torch.AsyncDistributedOptimizer has it."
        )


def check_settings(optimizer: Any, options: AsyncOptions) -> None:
    """Raise an error if settings of an optimizer need what no server has.

    Raises:
        ArgumentError: They do.
    """
    if optimizer.gradient_accumulation_steps:
        raise ArgumentError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: a parameter server makes a step with each "
            "push. Use push_every, which adds gradients up (gradient_accumulation_steps averages them)."
        )
    if optimizer.global_clipnorm and (options.mode is Mode.SYNC or options.push_every > 1):
        raise ArgumentError(
            f"global_clipnorm={optimizer.global_clipnorm} with mode={options.mode.value!r} and push_every="
            f"{options.push_every}: the norm of all gradients of a step is needed, and each server has a part of them. Use "
            "clipnorm, which clips each variable's gradient, or DistributedOptimizer; or push_every=1 in another mode, where "
            "each rank clips what it pushes."
        )


def check_parts(optimizer: Any) -> None:
    """Raise an error unless a built optimizer steps each variable by itself. Keras' own do; others are tried out.

    Raises:
        ArgumentError: It does not, or it cannot be made again from its configuration.
        UnsupportedTensorError: A variable is not trained by gradients.
    """
    for variable in optimizer._trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedTensorError(f"{variable.path} (float8 training) has scales in place of gradients.")
    kind = optimizer.__class__
    if kind.__module__.partition(".")[0] == "keras":
        return
    difference = differs_alone(optimizer)
    if difference:
        raise ArgumentError(
            f"{kind.__name__} does not step each variable by itself, and a server has a part of them: {difference}. Use "
            "DistributedOptimizer."
        )
