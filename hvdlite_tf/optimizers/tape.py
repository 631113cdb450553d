"""`tf.GradientTape` whose gradients are those of all ranks::

    with tf.GradientTape() as tape:
        loss = …
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)

Making the tape in each step is cheap. The expensive part, the memory in which gradients are exchanged, belongs to the world. A
tape finds it by the layout of the sources.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.arguments import check_linear
from hvdlite.adapter.options import ExchangeOptions, combined_by
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite.gradients.aggregator import Aggregator, name_of
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.gradients.local_variables import LocalVariables
from hvdlite_tf.ops.arguments import check_groups


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | Aggregator = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = hvdlite.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Return a tape whose `gradient` returns the gradients of all ranks. All ranks call it with sources of equal layout.

    The tape works eagerly and in a tf.function. It shares the recording of `gradtape`, which may be finished, may be going on,
    or may begin later in ``with hvd.DistributedGradientTape(tf.GradientTape()) as tape``. `gradtape` itself still returns this
    rank's own gradients. The other methods and `persistent` do not change. `jacobian` and `batch_jacobian` return this rank's
    own values, because they are about the examples of its batch.

    A source that has no gradient (None) on any rank keeps None. If a source has a gradient on some ranks, its gradient on the
    others counts as zero; see `GradientExchange.combine`. Gradients of embeddings (IndexedSlices) stay sparse and have the rows
    of all ranks. The gradients can be differentiated again; then all ranks do that.

    Args:
        gradtape: The tape.
        device_dense, device_sparse: Horovod's arguments, which have no effect.
        compression: `Compression.none`, `Compression.fp16` or `Compression.bf16`; or an aggregator, such as one
            ``Compression.powersgd(rank=4)`` that is made once and given to the tapes of all steps. Then the sources are
            variables, the same in each step.
        sparse_as_dense: Whether gradients of embeddings are made dense before they are exchanged.
        op: Average or Sum.
        gradient_predivide_factor: The gradients are divided by this factor before they are summed, and multiplied at the end.
        num_groups, groups: Horovod's arguments, which have no effect, because all gradients are exchanged together.
        process_set: The ranks that take part; all ranks by default.
        scale_local_gradients: Whether the gradients of local sources are divided by the number of ranks; see
            `hvdlite_tf.gradients.local_variables`.

    Returns:
        A tape of the class of `gradtape`, with two new methods: `register_local_source` and `get_local_and_global_gradients`.

    Raises:
        ArgumentError: `gradtape` is not a tape or is distributed already, or the arguments do not fit together.

    Examples:
        >>> def gradient():
        ...     weight = tf.Variable([2.0])
        ...     with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        ...         loss = weight * hvd.rank()
        ...     return tape.gradient(loss, weight).numpy().tolist()
        >>> on_ranks(2, gradient)  # this rank's own gradient would be its number
        [[0.5], [0.5]]
    """
    if isinstance(gradtape, DistributedTape):
        raise DistributedAlreadyError("this tape is distributed already: wrap it once.")
    if not isinstance(gradtape, tf.GradientTape):
        raise ArgumentError(f"expected a tf.GradientTape; got {type(gradtape).__name__}.")
    check_groups(num_groups, groups)
    compressor, aggregator = combined_by(compression, None)
    options = ExchangeOptions(
        op=op,
        process_set=process_set,
        compression=compressor,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        aggregator=aggregator,
    )
    plain: Any = type(gradtape)
    tape = _sharing(gradtape, _distributed(plain))
    tape._hvdlite_plain = plain
    tape._hvdlite_exchange = GradientExchange(options)
    tape._hvdlite_local = LocalVariables(scale_local_gradients, process_set)
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | Aggregator = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = hvdlite.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Return a `DistributedGradientTape` for a model with local layers, whose weights and gradients each rank keeps to itself.

    See `DistributedGradientTape` for the other arguments, the result and the errors.

    Args:
        local_layers: A layer of Keras or several layers, whose variables are local. They must be built.

    Raises:
        ArgumentError: `local_layers` contains something that is not a layer, or a layer that is not built.

    Examples:
        >>> def gradients():
        ...     own, common = (keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2))
        ...     own.build((1, 1))
        ...     tape = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=own, scale_local_gradients=False)
        ...     with tape:
        ...         loss = common(own(tf.constant([[float(hvd.rank())]])))
        ...     return [float(each[0, 0]) for each in tape.gradient(loss, [own.kernel, common.kernel])]
        >>> on_ranks(2, gradients)  # the second one is the mean of 0 and 1
        [[0.0, 0.5], [1.0, 0.5]]
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    if local_layers is not None:
        tape._hvdlite_local.register_layers(local_layers)
    return tape


class DistributedTape(tf.GradientTape):  # type: ignore[misc]  # mypy does not see TensorFlow
    """The methods that `DistributedGradientTape` adds to a tape's class."""

    # These are slots, because the object shares its dictionary of attributes with the tape that it was made from.
    __slots__ = ("_hvdlite_exchange", "_hvdlite_local", "_hvdlite_plain")
    _hvdlite_exchange: GradientExchange
    _hvdlite_local: LocalVariables
    _hvdlite_plain: type[tf.GradientTape]

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a source on this rank. Every rank registers the sources at the same positions.

        Args:
            source: A variable, or a tensor that the tape watches.

        Raises:
            ArgumentError: `source` is neither.
        """
        self._hvdlite_local.register(source)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients of all ranks. Every rank calls this method.

        Args:
            target, sources, output_gradients, unconnected_gradients: See `tf.GradientTape.gradient`. The sources of all ranks
                have the same dtypes and shapes, in the same order.
            use_generic_names: Horovod's argument, which has no effect.

        Returns:
            A dense tensor, a tf.IndexedSlices or None for each source, in the structure of `sources`.

        Raises:
            MismatchError: The ranks' sources have different layouts. All ranks raise it.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)
        combine = functools.partial(_differentiable, self._hvdlite_exchange)
        combined = self._hvdlite_local.exchange_others(combine, tf.nest.flatten(sources), tf.nest.flatten(own))
        return tf.nest.pack_sequence_as(sources, combined)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Call `gradient`, and return the gradients of local sources apart from the others. Every rank calls this method.

        Returns:
            Two lists of pairs of source and gradient: for the local sources, and for all others.
        """
        gradients = self.gradient(target, sources, output_gradients, unconnected_gradients)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = [pair for pair in pairs if pair[0] in self._hvdlite_local]
        return local, [pair for pair in pairs if pair[0] not in self._hvdlite_local]

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's own Jacobian. See `tf.GradientTape.jacobian`."""
        return _sharing(self, self._hvdlite_plain).jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's own Jacobians. See `tf.GradientTape.batch_jacobian`."""
        return _sharing(self, self._hvdlite_plain).batch_jacobian(*args, **kwargs)


@functools.cache
def _distributed(plain: Any) -> type[Any]:
    """Return a subclass of `plain` with the methods of `DistributedTape` and the same name."""
    return type(
        plain.__name__,
        (DistributedTape, plain),
        {"__slots__": (), "__module__": plain.__module__, "__doc__": plain.__doc__},
    )


def _sharing(tape: tf.GradientTape, kind: type[Any]) -> Any:
    """Return an object of another class that shares all attributes with `tape`, so that both are one tape."""
    other = object.__new__(kind)
    other.__dict__ = tape.__dict__
    return other


def _differentiable(exchange: GradientExchange, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Call `exchange.combine` in a way that a tape around this one can differentiate: for gradients of gradients.

    Each rank's result is the same function f(x₁ … xₙ) = Σ cᵣxᵣ of the ranks' gradients, and the tapes differentiate the sum of
    all ranks' losses. So the gradient of xᵣ is cᵣ times the sum of the upstream gradients of all ranks: the same exchange.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    found: list[Any] = []
    if not given:
        return exchange.combine(sources, gradients)

    def combine(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        own = iter(values)
        found[:] = exchange.combine(sources, [None if each is None else _like(each, next(own)) for each in gradients])

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            check_linear("the gradient of a distributed tape", exchange.options.op)
            if exchange.options.aggregator is not None:
                raise ArgumentError(
                    f"{name_of(exchange.options.aggregator)} is not linear, so there are no gradients of gradients through it: "
                    "use a plain tf.GradientTape for the outer ones."
                )
            if any(isinstance(each, tf.IndexedSlices) for each in (*given, *found)):
                raise ArgumentError(
                    "gradients of gradients go through dense ones only: pass sparse_as_dense=True to DistributedGradientTape()."
                )
            tensors = iter(upstream)
            back = exchange.combine(sources, [None if each is None else next(tensors) for each in found])
            return [each for each, gradient in zip(back, gradients, strict=True) if gradient is not None]

        return [_values(each) for each in found if each is not None], backward

    results = iter(tf.custom_gradient(combine)(*map(_values, given)))
    return [None if each is None else _like(each, next(results)) for each in found]


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _like(gradient: Any, values: tf.Tensor) -> Any:
    """Return a gradient of the form of `gradient`, dense or sparse, with these values."""
    if not isinstance(gradient, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
