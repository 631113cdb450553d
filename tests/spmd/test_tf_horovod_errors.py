"""What ``horovod.tensorflow`` raises: errors of hvdlite that are TensorFlow's too, in eager code, functions and sessions."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as own
from hvdlite.errors import ArgumentError, CommunicationError, HvdliteError, MismatchError
from hvdlite_tf import horovod as hvd
from hvdlite_tf.horovod import keras as hvd_keras
from tests.conftest import UNDER_MPI
from tests.spmd.test_tf_operations import MODES, in_mode

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)


@pytest.fixture(autouse=True)
def program_for_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has imported horovod."""
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))


MISMATCHES: dict[str, Any] = {
    "allreduce": (lambda rank: hvd.allreduce(tf.ones([2 + rank, 3])), r"float32\(3, 3\)"),
    "dtype": (lambda rank: hvd.allreduce(tf.ones(2, tf.int32 if rank else tf.float32)), r"int32\(2\)"),
    "grouped": (lambda rank: hvd.grouped_allreduce([tf.ones(2), tf.ones(2 + rank)]), r"float32\(3\)"),
    "allgather": (lambda rank: hvd.allgather(tf.ones([2, 3 + rank])), r"float32\(\*, 4\)"),
    "broadcast": (lambda rank: hvd.broadcast(tf.ones(2), min(rank, 1)), "root_rank=1"),
    "alltoall": (lambda rank: hvd.alltoall(tf.ones([own.size(), 3 + rank])), r"float32\(\*, 4\)"),
    "reducescatter": (lambda rank: hvd.reducescatter(tf.ones([6 + rank, 3])), r"float32\(7, 3\)"),
}


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("mode", MODES)
def test_a_mismatch_is_a_failed_precondition_too(ranks: Any, mode: str) -> None:
    def check() -> None:
        own.barrier()
        for case, (call, text) in MISMATCHES.items():
            for expected in (tf.errors.FailedPreconditionError, MismatchError):
                with pytest.raises(expected, match=text) as caught:
                    in_mode(mode, lambda call=call: call(own.rank()))
                assert isinstance(caught.value, CommunicationError)
                assert str(caught.value).startswith("the ranks do not agree on "), case
            assert own.allreduce(1.0, op=own.Sum).numpy() == own.size()

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_argument_is_an_invalid_argument_too(ranks: Any, mode: str) -> None:
    def check() -> None:
        size = own.size()
        alone = own.add_process_set([0])
        for call, text in (
            (lambda: hvd.alltoall(tf.ones([size + 1])), "splits"),
            (lambda: hvd.alltoall(tf.ones([size - 1]), tf.ones([size], tf.int32)), "splits"),
            (lambda: hvd.reducescatter(tf.constant(1.0)), "reducescatter: a scalar has no rows"),
            (lambda: hvd.grouped_reducescatter([tf.ones([size, 1]), 1.0]), "grouped_reducescatter: a scalar"),
            *([] if own.rank() == 0 else [(lambda: hvd.allreduce(tf.ones(2), process_set=alone), "is not in")]),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError, match=text) as caught:
                in_mode(mode, call)
            assert isinstance(caught.value, ArgumentError) and isinstance(caught.value, ValueError)
        assert own.allreduce(1.0, op=own.Sum).numpy() == size
        own.remove_process_set(alone)

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("graph", [False, True])
def test_gradients(ranks: Any, graph: bool) -> None:
    """Also by the wrapped tape, and by an optimizer in `fit`."""

    def check() -> None:
        rank = own.rank()
        variable = tf.Variable(tf.ones([2 + rank]))

        def step() -> Any:
            with own.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(variable)
            return tape.gradient(loss, [variable])

        with pytest.raises(tf.errors.OpError, match="do not agree") as caught:
            (tf.function(step) if graph else step)()
        assert isinstance(caught.value, tf.errors.FailedPreconditionError) and isinstance(caught.value, MismatchError)

        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2 + rank)])
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=not graph)
        with pytest.raises(tf.errors.OpError, match="do not agree") as caught:
            model.fit(np.ones((4, 2)), np.ones((4, 2 + rank)), verbose=0)
        assert isinstance(caught.value, tf.errors.FailedPreconditionError) and isinstance(caught.value, MismatchError)
        assert own.allreduce(1.0, op=own.Sum).numpy() == own.size()

    ranks(check)


def test_what_hvdlite_has_not_caused_stays(ranks: Any) -> None:
    def check() -> None:
        def fail() -> Any:
            raise RuntimeError("of the program")

        with pytest.raises(tf.errors.UnknownError, match="of the program") as caught:
            tf.function(lambda: tf.numpy_function(fail, [], tf.float32))()
        assert not isinstance(caught.value, HvdliteError)
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            tf.function(lambda x: tf.gather(x, [5]))(tf.ones(2))
        assert not isinstance(caught.value, HvdliteError)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_without_horovod_errors_are_as_before(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod")

    def check() -> None:
        def call() -> Any:
            return own.allreduce(tf.ones(2 + own.rank()))

        with pytest.raises(MismatchError) as caught:
            call()
        assert not isinstance(caught.value, tf.errors.OpError)
        with pytest.raises(tf.errors.UnknownError, match="do not agree") as caught:
            tf.function(call)()
        assert not isinstance(caught.value, MismatchError)

    ranks(check)


# Rows


DTYPES = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.float64]


@pytest.mark.parametrize("mode", MODES)
def test_averages_of_rows_add_up(ranks: Any, mode: str) -> None:
    """Alone, in a group, and in a group with dense tensors: rank r has the rows r and r + 1."""

    def check() -> None:
        rank, size = own.rank(), own.size()
        row = np.array([1, 3, 0])
        counts = np.array([1, *[2] * (size - 1), 1])  # so many ranks have each row

        def rows(dtype: tf.DType) -> tf.IndexedSlices:
            return tf.IndexedSlices(tf.constant(np.array([row, row]), dtype), tf.constant([rank, rank + 1]))

        def sums(found: tf.IndexedSlices) -> Any:
            return tf.math.unsorted_segment_sum(found.values, found.indices, size + 1)

        for dtype in DTYPES:
            average, (first, second), (sparse, dense) = in_mode(
                mode,
                lambda dtype=dtype: (
                    sums(hvd.allreduce(rows(dtype), op=own.Average)),
                    [sums(each) for each in hvd.grouped_allreduce([rows(dtype)] * 2)],
                    [
                        each if isinstance(each, tf.Tensor) else sums(each)
                        for each in hvd.grouped_allreduce([rows(dtype), tf.constant(row, dtype)], op=own.Average)
                    ],
                ),
            )
            for each in (average, first, second, sparse):
                assert np.asarray(each).dtype.kind == "f"
                np.testing.assert_allclose(
                    each, np.outer(counts, row) / size, rtol=2e-3 if dtype == tf.float16 else 1e-6
                )
            np.testing.assert_array_equal(dense, row)
            total = in_mode(mode, lambda dtype=dtype: hvd.allreduce(rows(dtype), op=own.Sum).values)
            assert np.asarray(total).dtype == dtype.as_numpy_dtype and np.array_equal(total, [row] * (2 * size))

    ranks(check)


def test_what_rows_cannot_do_is_not_implemented(ranks: Any) -> None:
    def check() -> None:
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([own.rank()]))
        for op in (own.Min, own.Max, own.Product, own.Adasum):
            for call in (
                lambda op=op: hvd.allreduce(rows, op=op),
                lambda op=op: hvd.grouped_allreduce(iter([tf.ones(2), rows]), op=op),
            ):
                with pytest.raises(NotImplementedError, match="Sum or Average"):
                    call()
        for factor in ("prescale_factor", "postscale_factor"):
            with pytest.raises(NotImplementedError, match=f"{factor}=0.5"):
                hvd.allreduce(rows, op=own.Sum, **{factor: 0.5})
        assert own.allreduce(1.0, op=own.Sum).numpy() == own.size()  # nothing was sent

    ranks(check)
