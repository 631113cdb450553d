"""Exchanges in graphs: whatever order TensorFlow runs its operations in, all ranks make their exchanges in the same."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite_tf.gradients.exchange import GradientExchange
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    tf.config.threading.set_inter_op_parallelism_threads(8)


def after_work(value: Any, amount: int) -> Any:
    """`value`, once some work is done."""
    work = tf.fill([16, 16], 0.01)
    for _ in range(amount):
        work = tf.linalg.matmul(work, work)
    return value + 0 * tf.reduce_sum(work)


def amounts(count: int) -> list[int]:
    """How much work comes before each of some values: on each rank others are early and late."""
    return np.random.default_rng(hvd.rank()).integers(0, 4, count).tolist()


def test_functions_branches_and_loops_run_in_the_order_of_the_program(ranks: Any) -> None:
    """Exchanges of equal shapes without names: two of them swapped on one rank would give wrong sums, and no error."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        first, second = tf.Variable(1.0), tf.Variable(2.0)
        work = amounts(6)

        @tf.function
        def of_first(x: Any) -> Any:
            return hvd.allreduce(after_work(first * x, work[0]), op=hvd.Sum)

        @tf.function
        def of_second(x: Any) -> Any:
            return hvd.allreduce(after_work(second * x, work[1]), op=hvd.Sum)

        def one_branch(x: Any) -> Any:
            return of_second(x), hvd.allreduce(after_work(3 * x, work[2]), op=hvd.Sum)

        def other_branch(x: Any) -> Any:
            third = hvd.allreduce(after_work(3 * x, work[3]), op=hvd.Sum)
            return of_second(x), third

        @tf.function
        def steps(count: Any) -> Any:
            wrong = 0
            for step in tf.range(count):
                x = tf.cast(step + rank, tf.float32)
                fourth = hvd.allreduce(after_work(4 * x, work[4]), op=hvd.Sum)
                one = of_first(x)
                # Graphs that differ from rank to rank, in which the exchanges come in the same order.
                if (step + rank) % 2 == 0:
                    two, three = one_branch(x)
                else:
                    two, three = one_branch(x) if rank % 2 else (of_second(x), of_first(3 * x))
                if step % 3 == 0:
                    two, three = other_branch(x)
                total = tf.cast(size * step + size * (size - 1) // 2, tf.float32)
                expected = total * tf.constant([1.0, 2.0, 3.0, 4.0])
                wrong += int(tf.reduce_any(tf.stack([one, two, three, fourth]) != expected))
            return wrong

        assert steps(tf.constant(100)).numpy() == 0

    ranks(check)


def test_gradients_of_loops_and_branches(ranks: Any) -> None:
    """An exchange in a loop, in a loop in a loop, in a branch in a loop, and others before and after."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()

        def total(x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum)

        def loop(x: Any) -> Any:
            _, y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, total(y) * y), [0, x])
            return y

        def branches(x: Any) -> Any:
            y = total(x)
            for i in tf.range(3):
                if i % 2 == 0:  # noqa: SIM108  # AutoGraph makes a branch of it
                    y = total(y) / size
                else:
                    y = y * y
            return total(y) + x

        def branch(x: Any) -> Any:
            return tf.cond(tf.reduce_sum(x) > 0, lambda: total(x) * x, lambda: total(x))

        def loops(x: Any) -> Any:
            y = x
            for _ in tf.range(2):
                for _ in tf.range(2):
                    y = total(y) * 0.5
            return y

        @tf.function
        def gradients(function: Any, x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            return y, tape.gradient(y, x)

        s = float(sum(range(1, size + 1)))  # of all x
        x = tf.constant(rank + 1.0)
        # of the sum of all ranks' results:
        expected = {
            loop: (s**3 * (rank + 1), 4 * s**3),
            branches: (size * s * s + rank + 1, 2 * size**2 * s + 1),
            branch: (s * (rank + 1), 2 * s),
            loops: (s * (size / 2) ** 3 / 2, size * (size / 2) ** 3 / 2),
        }
        for function, wanted in expected.items():
            for _ in range(2):
                assert np.allclose(gradients(function, x), wanted), function.__name__

    ranks(check)


def test_functions_in_threads_of_the_program(ranks: Any) -> None:
    """Operations with names, more at once than TensorFlow has threads, in another order on each rank."""

    def check() -> None:
        rank, count = hvd.rank(), 10
        functions = [
            tf.function(lambda x, i=i: hvd.allreduce(x, op=hvd.Sum, name=f"thread {i}") + i) for i in range(count)
        ]
        for function in functions:
            function(tf.ones(1))  # traced
        found: dict[int, float] = {}
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(lambda i=i: found.update({i: float(functions[i](tf.ones(1))[0])}),),
                daemon=True,
            )
            for i in range(count)
        ]
        for thread in threads[:: -1 if rank else 1]:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert found == {i: hvd.size() + i for i in range(count)}

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_200_gradients_in_any_order(ranks: Any, pytestconfig: pytest.Config) -> None:
    """50 steps (with --everything 1000) of 200 variables in a few buckets; on each rank other gradients are late."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        buckets, each, count = 4, 50, 1000 if UNDER_MPI and pytestconfig.option.everything else 50
        variables = [tf.Variable(0.0) for _ in range(buckets * each)]
        factors = tf.constant([(rank + 1.0) * i for i in range(len(variables))])
        work = amounts(len(variables))
        exchange = GradientExchange(ExchangeOptions(op=hvd.Sum))

        @tf.function(autograph=False)
        def step(number: Any) -> Any:
            gradients = tf.unstack(number + factors)
            for i in range(0, len(gradients), 10):
                gradients[i] = after_work(gradients[i], work[i])
            for bucket in reversed(range(buckets)):
                of_bucket = slice(bucket * each, (bucket + 1) * each)
                combined = exchange.combine(variables[of_bucket], gradients[of_bucket])
                for variable, gradient in zip(variables[of_bucket], combined, strict=True):
                    variable.assign_add(gradient)
            return number + 1

        @tf.function(autograph=False)
        def train() -> Any:
            return tf.while_loop(lambda number: number < count, lambda number: (step(number),), (tf.constant(0.0),))

        train()
        steps, ranks_sum = size * count * (count - 1) // 2, size * (size + 1) // 2
        for i, variable in enumerate(variables):  # whole numbers below 2^24, so exact
            assert variable.numpy() == steps + count * ranks_sum * i

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_many_operations_in_any_order(ranks: Any) -> None:
    """The same with an operation for each variable."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        work = amounts(24)

        @tf.function(autograph=False)
        def step(number: Any) -> Any:
            given = [after_work(number + (rank + 1.0) * i, amount) for i, amount in enumerate(work)]
            return [hvd.allreduce(each, op=hvd.Sum) for each in given]

        for number in range(25):
            results = step(tf.constant(float(number)))
            assert [float(each) for each in results] == [
                size * number + size * (size + 1) // 2 * i for i in range(len(work))
            ]

    ranks(check)


def test_static_shapes(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()

        @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([5, 3]), tf.TensorSpec(None)])
        def call(any_rows: Any, rows: Any, anything: Any) -> Any:
            shapes = {
                "allreduce": [hvd.allreduce(each).shape.as_list() for each in (any_rows, rows)],
                "allgather": [hvd.allgather(each).shape.as_list() for each in (any_rows, rows, tf.constant(1))],
                "broadcast": [hvd.broadcast(each, 0).shape.as_list() for each in (any_rows, rows)],
                "alltoall": [hvd.alltoall(each).shape.as_list() for each in (any_rows,)],
                "reducescatter": [hvd.reducescatter(each).shape.as_list() for each in (any_rows, rows)],
            }
            own = 5 // size + (rank < 5 % size)
            assert shapes == {
                "allreduce": [[None, 3], [5, 3]],
                "allgather": [[None, 3], [None, 3], [None]],
                "broadcast": [[None, 3], [5, 3]],
                "alltoall": [[None, 3]],
                "reducescatter": [[None, 3], [own, 3]],
            }
            unknown = hvd.allreduce(anything), hvd.allgather(anything), hvd.reducescatter(anything)
            assert all(each.shape.rank is None for each in unknown)
            return unknown

        reduced, gathered, scattered = call(tf.ones([size, 3]), tf.ones([5, 3]), tf.ones([size, 2]))
        assert (reduced.shape, gathered.shape, scattered.shape) == ((size, 2), (size * size, 2), (1, 2))

    ranks(check)


def test_xla_cannot_compile_exchanges(ranks: Any) -> None:
    def check() -> None:
        inner = tf.function(lambda x: hvd.allreduce(x), autograph=False)
        for call in (
            tf.function(lambda x: hvd.allgather(x), jit_compile=True, autograph=False),
            tf.function(lambda x: inner(x), jit_compile=True, autograph=False),
            tf.function(translated, jit_compile=True),
        ):
            with pytest.raises(ArgumentError, match="pass jit_compile=False"):
                call(tf.ones(2))

    ranks(check)


def translated(x: Any) -> Any:
    """AutoGraph goes through this one, and our error through AutoGraph."""
    if tf.reduce_sum(x) > 0:
        x = hvd.allreduce(x)
    return x


def one_thread() -> tf.compat.v1.Session:
    """A session with one thread for its operations."""
    return tf.compat.v1.Session(
        config=tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=1, intra_op_parallelism_threads=1, use_per_session_threads=True
        )
    )


def test_a_session_runs_operations_in_any_order(ranks: Any) -> None:
    """With one thread, and each rank asking for the results in another order."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        with tf.Graph().as_default(), one_thread() as session:
            x = tf.compat.v1.placeholder(tf.float32, [])
            sums = [hvd.allreduce(x * (i + 1), op=hvd.Sum) for i in range(12)]
            order = np.random.default_rng(rank).permutation(len(sums))
            for number in range(20):
                got = session.run([sums[i] for i in order], {x: number + rank})
                total = size * number + size * (size - 1) // 2
                assert got == [total * (i + 1) for i in order]

    ranks(check)


def test_a_session_runs_nothing_that_it_is_not_asked_for(ranks: Any) -> None:
    def check() -> None:
        with tf.Graph().as_default(), one_thread() as session:
            not_fed = tf.compat.v1.placeholder(tf.float32, [])
            hvd.allreduce(not_fed)
            assert session.run(hvd.allreduce(2.0)) == 2.0
            unequal = tf.cond(tf.constant(True), lambda: hvd.allreduce(3.0), lambda: hvd.allreduce(not_fed))
            loop = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, 2 * hvd.allreduce(x)), (0, unequal))
            in_function = tf.function(lambda x: hvd.allreduce(x) + 1)(loop[1])
            assert session.run(in_function) == 25.0

    ranks(check)


def test_a_failure_in_a_session_has_our_text(ranks: Any) -> None:
    def check() -> None:
        with tf.Graph().as_default(), one_thread() as session:
            x = tf.compat.v1.placeholder(tf.float32, [None])
            exchanged = hvd.alltoall(x, [1] * hvd.size())
            with pytest.raises(tf.errors.InvalidArgumentError, match="that add up to the first dimension, 99"):
                session.run(exchanged, {x: np.ones(99)})
            hvd.barrier()

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.skipif(UNDER_MPI, reason="ends the job")
def test_functions_that_wait_for_each_other(ranks: Any) -> None:
    """One in an exchange of gradients, one in an operation: the threads of the program are inside of TensorFlow meanwhile."""

    def check() -> None:
        exchange = GradientExchange(ExchangeOptions())
        variable = tf.Variable([1.0])
        step = tf.function(lambda: exchange.combine([variable], [tf.ones(1)]), autograph=False)
        other = tf.function(lambda: hvd.allreduce(tf.ones(1)), autograph=False)
        step()
        other()
        (other if hvd.rank() else step)()

    if ranks(hvd.size) == [1]:
        return
    with pytest.raises((HvdliteError, tf.errors.OpError), match="two ranks wait for each other"):
        ranks(check)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_of_datasets_that_run_in_parallel_are_refused(ranks: Any) -> None:
    """Their calls have no order. This looks at the frames of TensorFlow's constructors, whose names may change."""

    def check() -> None:
        numbers = tf.data.Dataset.range(8)

        def summed(number: Any) -> Any:
            return hvd.allreduce(tf.cast(number, tf.float32), op=hvd.Sum)

        def nested(number: Any) -> Any:
            return tf.function(summed)(number)

        def dataset(number: Any) -> Any:
            return tf.data.Dataset.from_tensors(summed(number))

        for wrong in (
            lambda: numbers.map(summed, num_parallel_calls=4),
            lambda: numbers.map(nested, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True),
            lambda: numbers.interleave(dataset, num_parallel_calls=2),
            lambda: numbers.apply(tf.data.experimental.map_and_batch(summed, 2, num_parallel_calls=2)),
        ):
            with pytest.raises(ArgumentError, match="tf.data that runs in parallel.*Leave out num_parallel_calls"):
                wrong()
        for right in (numbers.map(summed), numbers.map(summed, num_parallel_calls=1), numbers.interleave(dataset)):
            assert [each.numpy() for each in right] == [hvd.size() * number for number in range(8)]

    ranks(check)


@pytest.mark.ranks(2)
def test_a_function_that_was_traced_before_says_that_xla_cannot_compile_it(ranks: Any) -> None:
    """TensorFlow does not trace it again."""

    def check() -> None:
        summed = tf.function(lambda value: hvd.allreduce(value, op=hvd.Sum))
        summed(tf.ones(2))
        compiled = tf.function(lambda value: summed(value) + 1, jit_compile=True)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="pass jit_compile=False"):
                compiled(tf.ones(2))
        assert tf.function(lambda value: summed(value) + 1)(tf.ones(2)).numpy().tolist() == [hvd.size() + 1] * 2

    ranks(check)
