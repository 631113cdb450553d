"""`AsyncDistributedOptimizer`: training with a parameter server, in one line."""

from __future__ import annotations

import os
from typing import Any

import keras

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.agreement import together
from hvdlite.adapter.arguments import size_of
from hvdlite.async_sgd.compensation import DelayCompensation
from hvdlite.async_sgd.training.options import AsyncOptions, Servers, make_options
from hvdlite.errors import ArgumentError
from hvdlite_tf.async_sgd.checks import check_optimizer, check_parts, check_settings, check_torch_only
from hvdlite_tf.async_sgd.training import KerasTraining
from hvdlite_tf.async_sgd.wrapped import AsyncDistributed
from hvdlite_tf.optimizers import backends
from hvdlite_tf.optimizers.plain_class import named_like
from hvdlite_tf.variables import plain_variable


def AsyncDistributedOptimizer(
    optimizer: Any,
    model: Any = None,
    *,
    mode: str = "async",
    staleness: int | None = None,
    servers: Servers | None = None,
    push_every: int = 1,
    delay_compensation: DelayCompensation | None = None,
    on_worker_loss: str = "end",
    checkpoint: str | os.PathLike[str] | None = None,
    on_nan: str = "raise",
    overlap: bool | None = None,
    overlap_pull: bool = False,
    hogwild: bool = False,
    process_set: ProcessSet = hvdlite.global_process_set,
) -> AsyncDistributed:
    """Let ranks train at their own pace: a step pushes gradients to servers, and pulls the variables. Every rank calls this.

    Servers hold the variables in host memory, each a part of them, and step them with an optimizer of the same class. In the
    beginning all ranks get rank 0's weights, and its optimizer's state and learning rate. A push says the learning rate and
    the other numbers of the pushing rank's optimizer, so callbacks and schedules work; a schedule goes by the number of steps
    that the servers have made. A variable without a gradient keeps its value in that step. At the end of `fit` all ranks meet.
    `AsyncDistributed` has the methods that the optimizer gets; call `finish` at the end.

    ``hvdlite docs asynchronous`` says when to use which mode:

    - "sync": the server waits for all ranks that still train, and makes one step with the mean of their gradients, weighted by
      `set_batch_weight`. The result is that of `DistributedOptimizer`.
    - "ssp": the server makes one step with each rank's gradients, as they come. No rank gets more than `staleness` steps ahead
      of the slowest that still trains (Ho et al., NIPS 2013).
    - "async": the server makes one step with each rank's gradients, as they come. Nobody waits for others (Dean et al., NIPS
      2012).

    In "ssp" and "async" nothing is scaled: n ranks make n steps where "sync" makes one, each with the gradient of one rank.

    Of a sparse gradient (tf.IndexedSlices, of an embedding) the rows are pushed. Rows that come twice are added, as with
    ``DistributedOptimizer(…, sparse_as_dense=True)``.

    Args:
        optimizer: An optimizer of Keras 3 that steps each variable by itself. It is changed and returned.
        model: The model, which is built, or the variables that are trained. Of a model all ranks get rank 0's weights. None for
            an optimizer that is built: then its variables.
        mode: "sync", "ssp" or "async".
        staleness: For "ssp": how many steps a rank may be ahead of the slowest, 0 or more. A step is a push.
        servers: "sharded": every rank serves a part, in a thread beside its training. A number n: the last n ranks only
            serve; there, ``optimizer.is_server`` is True, and the program calls `serve_parameters` instead of its loop. None:
            the number of ``hvdliterun --servers n``, and "sharded" if the job was started without.
        push_every: The gradients of so many steps are added up before they are pushed; with mode="sync" their weights too.
        delay_compensation: For "ssp" and "async", what servers do about gradients that are old when they arrive: None,
            `StalenessRate` or `DCASGD`.
        on_worker_loss: "end": a rank that fails ends the job. "go on": the others go on without a rank that trains and fails
            (not: serves). This needs servers=n, hvdliterun with Open MPI, and all ranks on one host.
        checkpoint: A file. If the job fails, the lowest rank that trains and lives saves there the variables that it has
            pulled last, by their paths: ``numpy.load(checkpoint)``. This needs hvdliterun.
        on_nan: "raise": a step with a gradient that has NaN or infinite elements raises ArgumentError, and nothing
            of it is pushed. "pass on": it is pushed like any other, and each server makes the step with its part.
        overlap, overlap_pull, hogwild: For torch only; an error says why. Leave them out.
        process_set: The ranks that take part; all by default.

    Returns:
        `optimizer`, still an instance of its class, with the methods of `AsyncDistributed`.

    Raises:
        DistributedAlreadyError: The optimizer is distributed already.
        ArgumentError: An argument is wrong, or the optimizer needs all gradients at once, or the model is not built, or has
            nothing to train, or hvdlite does not support Keras' backend.
        UnsupportedTensorError: A variable is not trained by gradients.
        MismatchError: The ranks have different variables, settings or arguments. All ranks raise it.

    Examples:
        >>> def trained():
        ...     weight = keras.Variable([0.0])
        ...     optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(1.0), [weight], mode="async")
        ...     for step in range(3):
        ...         optimizer.apply_gradients([(tf.constant([1.0]), weight)])
        ...     optimizer.finish()
        ...     return weight.numpy().tolist()
        >>> on_ranks(2, trained)  # the server has made the steps of both ranks
        [[-6.0], [-6.0]]
    """
    backend = backends.current()
    check_optimizer(optimizer)
    check_torch_only(overlap, overlap_pull, hogwild)
    options = make_options(
        *(mode, staleness, servers, push_every, process_set, size_of(process_set), delay_compensation),
        on_worker_loss=on_worker_loss,
        checkpoint=checkpoint,
        on_nan=on_nan,
    )
    check_settings(optimizer, options)
    trained, weights = _variables_of(optimizer, model)
    if not optimizer.built:
        optimizer.build(trained)
    elif [*map(id, map(plain_variable, optimizer._trainable_variables))] != [*map(id, map(plain_variable, trained))]:
        raise ArgumentError("the optimizer was built for other variables than those of the model: make a new one.")
    check_parts(optimizer)
    _agree(optimizer, weights, options)
    training = KerasTraining(optimizer, options)  # the servers' optimizers are of the plain class
    optimizer.__class__ = named_like(type(optimizer), AsyncDistributed)
    # A plain assignment would make Keras track what is inside.
    object.__setattr__(optimizer, "_hvdlite_training", training)
    backend.shield(optimizer)
    wrapped: AsyncDistributed = optimizer
    return wrapped


def _variables_of(optimizer: Any, model: Any) -> tuple[list[Any], list[Any]]:
    """Return the variables that are trained, and all weights that the ranks have in common."""
    if model is None and optimizer.built:
        model = optimizer._trainable_variables
    if isinstance(model, keras.Model):
        if not model.built:
            raise ArgumentError(
                f"the model {model.name!r} is not built, so it has no variables yet: begin it with keras.layers.Input, or call "
                "model.build(shape), before AsyncDistributedOptimizer."
            )
        trained, weights = list(model.trainable_variables), list(model.weights)
    else:
        try:
            trained = weights = list(model)
        except TypeError:
            trained = []
        if not all(hasattr(variable, "assign") for variable in trained):
            trained = []
    if not trained:
        raise ArgumentError(
            f"expected a model with something to train, or its trainable variables; got {type(model).__name__}. Write "
            "hvd.AsyncDistributedOptimizer(optimizer, model)."
        )
    return trained, weights


def _agree(optimizer: Any, weights: list[Any], options: AsyncOptions) -> None:
    """Check that all ranks call this alike, and give them the first rank's weights, state and learning rate."""
    settings = {key: value for key, value in optimizer.get_config().items() if key not in ("name", "learning_rate")}
    lines = [f"optimizer={type(optimizer).__name__}", *options.lines()]
    lines += [f"{key}={value!r}" for key, value in settings.items()]
    for number, v in enumerate(optimizer._trainable_variables):
        lines.append(
            f"variable {number} {v.name} is {keras.backend.standardize_dtype(v.dtype)} of shape {tuple(v.shape)}"
        )
    lines.append(f"variables: {len(optimizer._trainable_variables)}, weights: {len(weights)}")
    process_set = options.process_set
    together(process_set).check_same(lines, "what AsyncDistributedOptimizer is given")
    hvdlite.broadcast(
        [plain_variable(variable) for variable in [*weights, *optimizer.variables]],
        0,
        inplace=True,
        process_set=process_set,
    )
