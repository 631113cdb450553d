"""`tf.GradientTape` whose gradients are those of all ranks::

    with tf.GradientTape() as tape:
        loss = …
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)

The tape is cheap to make, once per step; what is dear, the memory in which gradients are exchanged, belongs to the world and is
found again by the layout of the sources.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.arguments import check_linear
from hvdlite.adapter.options import Options
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.gradients.local_variables import LocalVariables
from hvdlite_tf.ops.arguments import check_groups


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = hvdlite.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """A tape whose `gradient` returns the gradients of all ranks. Every rank calls `gradient`, with sources of equal layout.

    Eager and inside of tf.function. It goes on where `gradtape` is, which may have recorded already, or record now, or begin to
    in ``with hvd.DistributedGradientTape(tf.GradientTape()) as tape``; `gradtape` itself still gives this rank's own gradients.
    All other methods and `persistent` are as before. `jacobian` and `batch_jacobian` are this rank's own, as they are of the
    examples in its batch.

    A source without gradient (None) on every rank stays None. One that has a gradient on some ranks counts as zero on the
    others; see `GradientExchange.combine`. Gradients of embeddings (IndexedSlices) stay sparse: the rows of all ranks.
    Gradients can be differentiated again, all ranks together.

    Args:
        gradtape: The tape.
        device_dense, device_sparse: Horovod's, without effect: the exchange is where the ranks' memory is.
        compression: `Compression.none`, `Compression.fp16`, `Compression.bf16`.
        sparse_as_dense: Make gradients of embeddings dense before they are exchanged.
        op: Average or Sum.
        gradient_predivide_factor: Gradients are divided by it before they are summed, and multiplied by it in the end.
        num_groups, groups: Horovod's, without effect: all gradients travel together anyway.
        process_set: The ranks that take part; all by default.
        scale_local_gradients: Divide the gradients of local sources by the number of ranks; see
            `hvdlite_tf.gradients.local_variables`.

    Returns:
        A tape of the class of `gradtape`, with two more methods: `register_local_source`, and `get_local_and_global_gradients`.

    Raises:
        ArgumentError: `gradtape` is no tape, or is distributed already, or the arguments do not fit.
    """
    if isinstance(gradtape, Distributed):
        raise DistributedAlreadyError("this tape is distributed already: wrap it once.")
    if not isinstance(gradtape, tf.GradientTape):
        raise ArgumentError(f"expected a tf.GradientTape; got {type(gradtape).__name__}.")
    check_groups(num_groups, groups)
    options = Options(
        op=op,
        process_set=process_set,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
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
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = hvdlite.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """`DistributedGradientTape`, for a model some of whose layers each rank has for itself.

    Args:
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op: As there.
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients: As there.
        local_layers: A layer of Keras or several, built, whose variables are local.

    Raises:
        ArgumentError: Also if one of `local_layers` is no layer, or not built.
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


class Distributed(tf.GradientTape):  # type: ignore[misc]  # mypy does not see TensorFlow
    """What `DistributedGradientTape` adds to a tape's class."""

    # Slots, since the dictionary of attributes is that of the tape it was made from: they are one tape in two forms.
    __slots__ = ("_hvdlite_exchange", "_hvdlite_local", "_hvdlite_plain")
    _hvdlite_exchange: GradientExchange
    _hvdlite_local: LocalVariables
    _hvdlite_plain: type[tf.GradientTape]

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a source on this rank. Every rank registers the sources of the same places.

        Args:
            source: A variable, or a tensor that is watched.

        Raises:
            ArgumentError: It is neither.
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
        """The gradients of all ranks. Every rank calls this.

        Args:
            target, sources, output_gradients, unconnected_gradients: As for `tf.GradientTape.gradient`. The sources of all
                ranks have the same dtypes and shapes, in the same order.
            use_generic_names: Horovod's, without effect.

        Returns:
            In the structure of `sources`: for each a dense tensor, IndexedSlices, or None.

        Raises:
            MismatchError: The sources of other ranks have another layout. Raised on all ranks.
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
        """The gradients of `gradient`, with their sources, apart. Every rank calls this; arguments as there.

        Returns:
            Pairs of source and gradient: of the local sources, and of all others.
        """
        gradients = self.gradient(target, sources, output_gradients, unconnected_gradients)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = [pair for pair in pairs if pair[0] in self._hvdlite_local]
        return local, [pair for pair in pairs if pair[0] not in self._hvdlite_local]

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's own, as `tf.GradientTape.jacobian`."""
        return _sharing(self, self._hvdlite_plain).jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's own, as `tf.GradientTape.batch_jacobian`."""
        return _sharing(self, self._hvdlite_plain).batch_jacobian(*args, **kwargs)


@functools.cache
def _distributed(plain: Any) -> type[Any]:
    """`plain` with the methods of `Distributed`, under the same name."""
    return type(
        plain.__name__,
        (Distributed, plain),
        {"__slots__": (), "__module__": plain.__module__, "__doc__": plain.__doc__},
    )


def _sharing(tape: tf.GradientTape, kind: type[Any]) -> Any:
    """`tape` in the form of another class: what is done to one is done to both."""
    other = object.__new__(kind)
    other.__dict__ = tape.__dict__
    return other


def _differentiable(exchange: GradientExchange, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """`exchange.combine`, for a tape around this one: gradients of gradients.

    Each rank's result is the same function f(x₁ … xₙ) = Σ cᵣxᵣ of the ranks' gradients, and what is differentiated are the
    losses of all ranks together. So the gradient of xᵣ is cᵣ times the sum of what all ranks have upstream: the same exchange.
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
    """`gradient` with other values."""
    if not isinstance(gradient, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
