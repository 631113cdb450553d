"""`GradientExchange`: exchanges gradients in TensorFlow's eager code, in a tf.function, and in a graph of TensorFlow 1.

One call of Python exchanges all gradients of a step::

    gradients ─▶ (compressed) ─▶ ordered call: `ArraySync` ─▶ (decompressed) ─▶ gradients of all ranks

A graph must know the results of the call before it runs. So when a function is traced for the first time, the ranks tell each
other which gradients they have. A gradient that some rank has is a tensor on all ranks, and a gradient that no rank has is
None. When a function is traced again, maybe on a single rank, the ranks do not communicate. In eager code the set of gradients
may change from step to step.

Eager gradients stay on a GPU if all of them lie there (`hvdlite_tf.gradients.on_device`). A graph of TensorFlow can call Python
only with arrays in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.adapter.array_sync import ArraySync, as_array
from hvdlite.adapter.gradient_memory import Registry, enter_aggregator, numbers_of
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.adapter.tables import TableRows, as_rows
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.gradients.aggregator import name_of
from hvdlite.protocols import Array, Device
from hvdlite_tf.gradients import on_device
from hvdlite_tf.gradients.encoded import DENSE, NONE, SPARSE, Wire, arrays_of, as_dense, take, taken
from hvdlite_tf.ops import failures
from hvdlite_tf.ops.ordered import is_built_for_a_session, ordered
from hvdlite_tf.ops.rank_ops import check_still_alone
from hvdlite_tf.variables import has_value, plain_variable, read


class GradientExchange:
    """Combines the gradients of all ranks. The object is cheap to make, because the world keeps the memory.

    Args:
        options: The options of the exchange, the same on all ranks.
        identity: The identity of the optimizer whose gradients are exchanged, the same each time a function is traced; None
            without an optimizer. It keeps apart what the ranks tell each other about the gradients of two optimizers, which
            may have functions of the same name over equal variables.
    """

    def __init__(self, options: ExchangeOptions, identity: Identity | None = None) -> None:
        self.options = options
        self._identity = identity
        enter_aggregator(options)

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Return the gradients of all ranks. Every rank calls this with sources of equal dtypes and shapes in the same order.

        A gradient that only some ranks have counts as zero on the others. In a tf.function, this holds if some rank had the
        gradient when a function of this name was first traced with these sources.

        Args:
            sources: Variables of TensorFlow or Keras, or tensors.
            gradients: A dense tensor, a tf.IndexedSlices or None for each source.
            weight: The number of samples that this rank's gradients are the mean of; a number or a scalar tensor; 1 if None.

        Returns:
            For each source a dense tensor; or a tf.IndexedSlices with the rows of all ranks, if this rank has one, or if this
            rank has None and other ranks have one; None if no rank has a gradient.

        Raises:
            ArgumentError: XLA compiles this function; or a gradient has another dtype or shape than its source; or there is a
                weight without Average.
            UnsupportedTensorError: A source does not hold floating-point numbers.
            MismatchError: The ranks have different sources. Raised on all ranks, in eager code or when a function is traced.
            HvdliteError: The weights of all ranks are 0; or, in a function, another rank has a gradient for which the function
                has no result. (When a function runs, TensorFlow raises its own error with the text of ours.)
        """
        if weight is not None:
            self.options.check_weighted()
        call = self._call(sources, gradients, 1.0 if weight is None else weight)
        if isinstance(call, list):
            return call
        with failures.as_shown():
            return call.eagerly() if tf.executing_eagerly() else call.in_graph()

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return this rank's gradients, with zeros for a gradient that only other ranks have, so that passes can be summed.

        Every rank calls this. The ranks tell each other which gradients they have in the way of a tf.function (see `combine`),
        also in eager code.
        """
        call = self._call(sources, gradients, 1.0)
        return call if isinstance(call, list) else call.filled()

    def _call(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any) -> _Call | list[Any]:
        """Check the gradients and return their exchange; the gradients themselves if this rank exchanges nothing."""
        here, options = world("the exchange of gradients"), self.options
        plain = [plain_variable(source) for source in sources]
        for source, gradient in zip(plain, gradients, strict=True):
            check_gradient(source, gradient)
        if options.sparse_as_dense or options.op is hvdlite.Adasum:
            gradients = [as_dense(gradient, source) for gradient, source in zip(gradients, plain, strict=True)]
        if not plain:
            return []
        numbers = numbers_of(options, plain)
        if here.engine(options.process_set).size == 1 and options.aggregator is None:
            check_still_alone(options.process_set)
            return list(gradients)
        kept = [place for place, source in enumerate(sources) if not _is_kernel(source)]
        return _Call(options, plain, gradients, weight, self._identity, numbers, kept)


class _Call:
    """One call of `GradientExchange.combine` or `fill`."""

    def __init__(
        self,
        options: ExchangeOptions,
        sources: Sequence[Any],
        gradients: Sequence[Any],
        weight: Any,
        identity: Identity | None,
        numbers: Sequence[int] | None,
        kept: Sequence[int],
    ) -> None:
        self._options = options
        self._gradients = gradients
        self._weight = weight
        self._wires = [
            Wire(source, gradient, options.codec) for source, gradient in zip(sources, gradients, strict=True)
        ]
        self._kinds = "".join(wire.kind for wire in self._wires)
        in_session = not tf.executing_eagerly() and is_built_for_a_session()
        if in_session and options.aggregator is not None:
            raise ArgumentError(
                f"{name_of(options.aggregator)} combines gradients in eager code and in tf.functions, and this is a graph for "
                "a session, whose exchanges may run in any order: use Keras 3, or hvd.Compression.fp16."
            )
        registry = Registry.of(world("the exchange of gradients"), options.process_set)
        self._channel = registry.new_channel() if in_session else ""
        infos = [wire.info for wire in self._wires]
        sparse = not options.sparse_as_dense
        self._sync = ArraySync(
            infos, options.op, options.process_set, self._channel, sparse, identity, options.aggregator, numbers, kept
        )
        self._key = tuple(infos), options.op, sparse, self._channel
        self._sources = [] if in_session else [wire.source for wire in self._wires]

    def eagerly(self) -> list[Any]:
        """Return the gradients of all ranks in eager code; on the GPU if all dense gradients lie there."""
        device = self._device()
        own = [
            on_device.borrow(wire.tensors()[0], device)
            if wire.kind == DENSE and device is not None
            else taken(wire.kind, map(np.asarray, wire.tensors()))
            for wire in self._wires
        ]
        everything = self._sync.exchange(own, float(self._weight), lambda: values_of(self._sources), device=device)
        del own  # this is memory of TensorFlow
        native = [i for i, found in enumerate(everything) if not isinstance(found, np.ndarray | TableRows | None)]
        lent = iter(on_device.lend([everything[i] for i in native], device) if device is not None else [])
        combined: list[Any] = []
        for i, (wire, found) in enumerate(zip(self._wires, everything, strict=True)):
            if found is None:
                combined.append(None)
            elif i in native:
                combined.append(wire.decode([next(lent)]))
            else:
                gradient = as_array(wire.info, found) if wire.kind == DENSE else found
                combined.append(wire.decode([*map(tf.convert_to_tensor, arrays_of(gradient))]))
        return combined

    def _device(self) -> Device | None:
        """Return the device on which the dense gradients are exchanged; None for host memory.

        Other ranks may have a dense gradient that this rank does not have. The device of its source is used for it.
        """
        if self._options.op is hvdlite.Adasum or self._options.aggregator is not None:
            return None
        dense = [wire for wire in self._wires if wire.kind != SPARSE]
        device = on_device.device_of([wire.tensors()[0] if wire.kind == DENSE else wire.source for wire in dense])
        if device is not None and all(wire.kind == NONE for wire in dense):
            on_device.wait_for(dense[0].source)  # otherwise `on_device.borrow` waits, for the first gradient
        return device

    def in_graph(self) -> list[Any]:
        """Return the gradients of all ranks as tensors of the function or graph that is being built."""
        kinds, sync, agreed = self._kinds, self._sync, self._agreed()
        variables = [source if isinstance(source, tf.Variable) else None for source in self._sources]
        union = agreed.union()
        if union is not None and set(union) == {NONE}:
            return [None] * len(kinds)
        expected = "".join(there if kind == NONE else kind for kind, there in zip(kinds, union or kinds, strict=True))
        infos = [wire.info for wire in self._wires]
        names = [getattr(wire.source, "name", f"source {i}") for i, wire in enumerate(self._wires)]

        def run(weight: Array, *arrays: Array) -> list[Array]:  # this must not hold a reference to the graph
            agreed.check(expected)
            given = iter(arrays)
            found = sync.exchange([taken(kind, given) for kind in kinds], float(weight), lambda: values_of(variables))
            results: list[Array] = []
            for i, (gradient, kind) in enumerate(zip(found, expected, strict=True)):
                if (gradient is None) != (kind == NONE) and not (gradient is None and sync.joined):
                    raise HvdliteError(unexpected(names[i], gradient is None))
                if kind == DENSE:
                    results.append(as_array(infos[i], gradient))
                elif kind == SPARSE:
                    results += as_rows(infos[i], gradient)
            return results

        inputs = [tf.cast(self._weight, tf.float64), *(tensor for wire in self._wires for tensor in wire.tensors())]
        outputs = [spec for wire, kind in zip(self._wires, expected, strict=True) for spec in wire.specs(kind)]
        tensors = iter(ordered(run, inputs, outputs, self._channel))
        return [
            None if kind == NONE else wire.decode(take(kind, tensors))
            for wire, kind in zip(self._wires, expected, strict=True)
        ]

    def filled(self) -> list[Any]:
        """Return the result of `GradientExchange.fill`."""
        return [
            tf.zeros(wire.source.shape, wire.source.dtype.base_dtype)
            if gradient is None and there != NONE
            else gradient
            for wire, gradient, there in zip(
                self._wires, self._gradients, self._agreed().union() or self._kinds, strict=True
            )
        ]

    def _agreed(self) -> Agreed:
        return Agreed(self._sync, (*self._key, function_name()), self._kinds)


class Agreed:
    """The kinds of gradients in one function that the ranks have told each other. It holds no reference to the graph.

    Args:
        sync: The exchange of these gradients.
        key: A key of the function and its gradients, the same on all ranks.
        kinds: The kinds of the gradients that this rank has.
    """

    def __init__(self, sync: ArraySync, key: Hashable, kinds: str) -> None:
        self._sync = sync
        self._key = key
        self._kinds = kinds
        self._registry: weakref.ref[Registry] = weakref.ref(sync.enter())

    def union(self) -> str | None:
        """Return the kinds of gradients that the ranks have together. The first call for a key lets the ranks tell each other.

        Return None if this rank had gradients of other kinds then: this is another function with the same key.
        """
        registry = self._sync.enter()
        key = (self._key, self._sync.number)
        known = registry.known(key)
        if known is None:
            union = "".join(map(_together, self._sync.gather_by_source(self._kinds)))
            registry.learn(key, self._kinds, union)
            self._sync.prepare([i for i, kind in enumerate(union) if kind == SPARSE])
            return union
        own, union = known
        if own is None:  # the other ranks told each other while this rank had no data
            registry.learn(key, self._kinds, union)
        return union if own in (None, self._kinds) else None

    def check(self, expected: str) -> None:
        """Let the ranks of a new world compare their gradients with those for which the function was traced in the last world.

        Every rank calls this when the function runs. In the world of the trace it does nothing.

        Args:
            expected: The kinds of gradients that the traced function returns.

        Raises:
            HvdliteError: The ranks of this world have gradients of other kinds.
        """
        registry = self._sync.enter()
        if registry is self._registry():
            return
        self._registry = weakref.ref(registry)
        union = self.union()
        if union is not None and union != expected:
            raise HvdliteError(
                "this function was traced before hvdlite.shutdown(), and the ranks that there are now have gradients of other "
                "variables than those that there were: make the tf.function (or compile the model) anew after init()."
            )


def _is_kernel(source: Any) -> bool:
    """Return whether this is the kernel of a layer of Keras 3: a product with a sparse input has each row of its gradient once.

    The gradient of any other table has a row for each place that is looked up. Keras 3 does not add up rows that come twice,
    so one process with the batches of all ranks has them twice too; and whoever clips sees them apart.
    """
    return str(getattr(source, "path", "")).endswith("/kernel")


def _together(kinds: Sequence[str]) -> str:
    """Return the kind of one gradient on all ranks together, from its kind on each rank."""
    if DENSE in kinds:
        return DENSE
    return SPARSE if SPARSE in kinds else NONE


def function_name() -> str:
    """Return the name of the outermost tf.function that is being traced; an empty text in eager code."""
    graph, name = tf.compat.v1.get_default_graph(), ""
    while graph is not None:
        name = getattr(graph, "name", "") or name
        graph = getattr(graph, "outer_graph", None)
    return name


def values_of(sources: Sequence[Any]) -> list[Any] | None:
    """Return the values of variables and eager tensors; None if one of them has no value in memory."""
    if not all(hasattr(source, "numpy") and has_value(source) for source in sources):
        return None
    return [read(source) for source in sources]


def unexpected(name: str, missing: bool) -> str:
    what = (
        f"no rank has a gradient of {name}, and some had one when this function was traced"
        if missing
        else f"this rank has no gradient of {name}, and other ranks have one"
    )
    return (
        f"{what}: let every rank use the same variables (add 0 times the unused output to the loss), or exchange gradients "
        "outside of tf.function."
    )


def check_gradient(source: Any, gradient: Any) -> None:
    if gradient is None:
        return
    if gradient.dtype != source.dtype.base_dtype or not gradient.shape.is_compatible_with(source.shape):
        raise ArgumentError(
            f"a gradient of {gradient.dtype.name} and shape {tuple(gradient.shape)} for {source.dtype.name} and shape "
            f"{tuple(source.shape)}: expected the same."
        )
