"""Horovod's operations on TensorFlow's tensors: eagerly, in a tf.function and in a session, with their gradients.

The truth is NumPy's, or TensorFlow's own for the same sums in one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, MismatchError, UnsupportedTensorError
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    tf.config.threading.set_inter_op_parallelism_threads(8)

Inputs = list[Any]
Truth = Callable[[Inputs, int], Any]

_rng = np.random.default_rng(3)
EQUAL = [_rng.standard_normal((4, 2)) for _ in range(4)]
RAGGED = [_rng.standard_normal((rows, 2)) for rows in (2, 0, 3, 1)]
MODES = ("eager", "function", "session")


def in_mode(mode: str, call: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """What `call` returns for tensors like `arrays`, as arrays."""
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            places = [tf.compat.v1.placeholder(array.dtype, [None, *array.shape[1:]]) for array in arrays]
            return session.run(call(*places), dict(zip(places, arrays, strict=True)))
    if mode == "function":
        call = tf.function(call, autograph=False)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), call(*map(tf.constant, arrays)))


def rows_of(tensor: Any, size: int, rank: int) -> Any:
    """The share of a rank: the first ones get a row more."""
    lengths = [len(part) for part in np.array_split(np.arange(tensor.shape[0]), size)]
    return tf.split(tensor, lengths)[rank]


def both(results: Any) -> Any:
    """The results of a group of two as one tensor."""
    return tf.concat([tf.reshape(each, [-1]) for each in results], 0)


def of_both(one: Truth) -> Truth:
    """The truth for a group of x and of the first column of 3 x."""
    return lambda xs, r: both([one(xs, r), one([3 * x[:, 0] for x in xs], r)])


def group(x: Any) -> list[Any]:
    return [x, 3 * x[:, 0]]


def to_the_next(x: Any) -> Any:
    splits = tf.one_hot((hvd.rank() + 1) % hvd.size(), hvd.size(), dtype=tf.int32) * tf.shape(x)[0]
    rows, received = hvd.alltoall(x, splits)
    return rows[: tf.reduce_sum(received)]


def total(xs: Inputs, r: int = 0) -> Any:
    return tf.add_n(xs)


CASES: dict[str, tuple[Inputs, Callable[[Any], Any], Truth]] = {
    # inputs, what a rank calls, and the same for rank r from everybody's inputs
    "allreduce sum": (EQUAL, lambda x: hvd.allreduce(x, op=hvd.Sum), total),
    "allreduce average": (EQUAL, hvd.allreduce, lambda xs, r: total(xs) / len(xs)),
    "allreduce scaled": (
        EQUAL,
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
        lambda xs, r: 6 * total(xs),
    ),
    "allreduce of a scalar": (EQUAL, lambda x: hvd.allreduce(x[0, 0], op=hvd.Sum), lambda xs, r: total(xs)[0, 0]),
    "grouped allreduce": (EQUAL, lambda x: both(hvd.grouped_allreduce(group(x), op=hvd.Sum)), of_both(total)),
    "allreduce of rows": (
        EQUAL,
        lambda x: tf.convert_to_tensor(hvd.allreduce(tf.IndexedSlices(x, [1, 0, 1, 4], [5, 2]))),
        lambda xs, r: tf.math.unsorted_segment_sum(total(xs) / len(xs), [1, 0, 1, 4], 5),
    ),
    "allgather": (RAGGED, hvd.allgather, lambda xs, r: tf.concat(xs, 0)),
    "allgather of scalars": (EQUAL, lambda x: hvd.allgather(x[0, 0]), lambda xs, r: tf.stack([x[0, 0] for x in xs])),
    "grouped allgather": (
        RAGGED,
        lambda x: both(hvd.grouped_allgather(group(x))),
        of_both(lambda xs, r: tf.concat(xs, 0)),
    ),
    "broadcast": (EQUAL, lambda x: hvd.broadcast(x, hvd.size() - 1), lambda xs, r: tf.identity(xs[-1])),
    "reducescatter": (
        EQUAL,
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda xs, r: rows_of(total(xs), len(xs), r),
    ),
    "reducescatter average": (
        EQUAL,
        lambda x: hvd.reducescatter(x, prescale_factor=3.0, postscale_factor=2.0),
        lambda xs, r: 6 * rows_of(total(xs) / len(xs), len(xs), r),
    ),
    "reducescatter of few rows": (
        EQUAL,
        lambda x: hvd.reducescatter(x[:2], op=hvd.Sum),
        lambda xs, r: rows_of(total(xs)[:2], len(xs), r),
    ),
    "grouped reducescatter": (
        EQUAL,
        lambda x: both(hvd.grouped_reducescatter(group(x))),
        of_both(lambda xs, r: rows_of(total(xs) / len(xs), len(xs), r)),
    ),
    "alltoall": (
        EQUAL,
        lambda x: hvd.alltoall(tf.tile(x, [hvd.size(), 1])),
        lambda xs, r: tf.concat(xs, 0),
    ),
    "alltoall with splits": (
        EQUAL,
        lambda x: hvd.alltoall(x, [4] + [0] * (hvd.size() - 1))[0],
        lambda xs, r: tf.concat(xs, 0) if r == 0 else xs[0][:0],
    ),
    "alltoall of ragged rows": (RAGGED, to_the_next, lambda xs, r: tf.identity(xs[r - 1])),
}


FEW = {
    "allreduce average",
    "allreduce of rows",
    "allgather",
    "broadcast",
    "reducescatter",
    "alltoall of ragged rows",
}
"""Large graphs are slow to build, and are made of the same parts."""


def weights(result: Any, rank: int) -> Any:
    """Something that makes a loss of a rank's result, different for each element and rank."""
    return tf.reshape(tf.range(1, tf.size(result) + 1), tf.shape(result)) * (rank + 1)


def loss_of(result: Any, rank: int) -> Any:
    return tf.reduce_sum(result**3 * tf.cast(weights(result, rank), result.dtype))


def with_gradients(call: Callable[[Any], Any], rank: int, twice: bool) -> Callable[[Any], Any]:
    """The result of a call, the gradient of a loss of it, and, if `twice`, the gradient of a loss of that."""

    def compute(x: Any) -> Any:
        if not twice:
            result = call(x)
            return result, tf.gradients(loss_of(result, rank), x)[0]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                result = call(x)
                loss = loss_of(result, rank)
            first = inner.gradient(loss, x)
            loss = loss_of(first, 0)
        return result, first, outer.gradient(loss, x)

    return compute


def expectation(inputs: Inputs, truth: Truth, size: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Of all ranks, in one process: results, gradients of the sum of all losses, and gradients of a loss of these."""
    xs = [tf.constant(x) for x in inputs[:size]]
    with tf.GradientTape() as outer:
        outer.watch(xs)
        with tf.GradientTape() as inner:
            inner.watch(xs)
            results = [truth(xs, r) for r in range(size)]
            loss = tf.add_n([loss_of(result, r) for r, result in enumerate(results)])
        first = inner.gradient(loss, xs, unconnected_gradients="zero")
        loss = tf.add_n([loss_of(each, 0) for each in first])
    second = outer.gradient(loss, xs, unconnected_gradients="zero")
    return results, first, second


@pytest.mark.parametrize("mode", MODES)
def test_results_and_gradients(ranks: Any, mode: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        if mode != "eager" and size < (2 if UNDER_MPI else 3):
            return
        for case, (inputs, call, truth) in CASES.items():
            if mode == "session" and case not in FEW:
                continue
            twice = mode == "eager" or (mode == "function" and case in FEW)
            expected = expectation(inputs, truth, size)
            got = in_mode(mode, with_gradients(call, rank, twice), inputs[rank])
            for what, value, values in zip(("result", "gradient", "second gradient"), got, expected, strict=False):
                np.testing.assert_allclose(value, values[rank], rtol=1e-9, atol=1e-9, err_msg=f"{what} of {case}")

    ranks(check)


DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64", "complex64", "bool")


@pytest.mark.parametrize("mode", MODES)
def test_dtypes(ranks: Any, mode: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        kinds = [tf.as_dtype(name) for name in DTYPES]
        numbers = np.array([[0, 1], [rank, 2]])
        everybody = np.array([[[0, 1], [r, 2]] for r in range(size)])

        def call() -> Any:
            tensors = [tf.cast(numbers, kind) for kind in kinds]
            return (
                hvd.grouped_allreduce(tensors[:-1], op=hvd.Sum),
                [hvd.allreduce(tensor, op=hvd.Max) for tensor in tensors if tensor.dtype != tf.complex64],
                hvd.grouped_allgather(tensors),
                hvd.broadcast(tensors, size - 1),
                hvd.alltoall(tf.cast([rank] * size, kinds[0])),
                hvd.grouped_reducescatter(tensors[:4], op=hvd.Min),
            )

        summed, most, gathered, sent, exchanged, least = in_mode(mode, call)
        most.insert(-1, None)  # complex numbers have no order
        summed.append(None)  # nor bool a sum
        for number, kind in enumerate(kinds):
            as_kind = kind.as_numpy_dtype
            for got, expected in (
                (summed[number], everybody.sum(0)),
                (most[number], everybody.max(0)),
                (gathered[number], everybody.reshape(-1, 2)),
                (sent[number], everybody[-1]),
            ):
                if got is not None:
                    assert got.dtype == as_kind
                    np.testing.assert_array_equal(got, expected.astype(as_kind), err_msg=str(kind))
        assert exchanged.astype(int).tolist() == list(range(size))
        for rows in least:
            np.testing.assert_array_equal(rows.astype(int), np.array_split(everybody.min(0), size)[rank])

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_empty_tensors_and_groups(ranks: Any, mode: str) -> None:
    def check() -> None:
        def call() -> Any:
            nothing = tf.zeros([0, 3])
            return (
                hvd.allreduce(nothing),
                hvd.allgather(nothing),
                hvd.broadcast(nothing, 0),
                hvd.alltoall(nothing, [0] * hvd.size()),
                hvd.reducescatter(nothing),
                hvd.allgather(tf.ones([hvd.rank(), 3])),
                [*hvd.grouped_allreduce([]), tf.constant(7)],
            )

        reduced, gathered, sent, (exchanged, received), scattered, some, last = in_mode(mode, call)
        assert {each.shape for each in (reduced, gathered, sent, exchanged, scattered)} == {(0, 3)}
        assert received.tolist() == [0] * hvd.size()
        assert some.shape == (sum(range(hvd.size())), 3)
        assert len(last) == 1

    ranks(check)


def test_variables_arrays_and_numbers(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        mean = (size - 1) / 2
        for given in (tf.Variable(float(rank)), keras.Variable(float(rank)), np.float32(rank), float(rank)):
            result = hvd.allreduce(given)
            assert isinstance(result, tf.Tensor) and result.numpy() == mean
        assert hvd.allreduce([1.0, rank]).numpy().tolist() == [1.0, mean]
        first, second = hvd.allreduce([tf.constant(rank), np.ones(2)], op=hvd.Sum)
        assert first.numpy() == sum(range(size)) and second.numpy().tolist() == [size, size]

    ranks(check)


def test_a_gradient_reaches_variables(ranks: Any) -> None:
    def check() -> None:
        variable = tf.Variable([1.0, 2.0])

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                counts, y = hvd.grouped_allreduce([tf.constant([3, 4]), variable], op=hvd.Sum)
                loss = tf.reduce_sum(y * [1.0, hvd.rank() + 1.0])
            return counts, tape.gradient(loss, variable)

        counts, gradient = step()
        assert counts.numpy().tolist() == [3 * hvd.size(), 4 * hvd.size()]
        assert gradient.numpy().tolist() == [hvd.size(), sum(range(hvd.size() + 1))]

    ranks(check)


def test_extremes_have_no_gradient(ranks: Any) -> None:
    def check() -> None:
        for call in (hvd.allreduce, hvd.reducescatter):
            x = tf.ones(hvd.size())
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = call(x, op=hvd.Max)
            with pytest.raises(ArgumentError, match="not for Max"):
                tape.gradient(result, x)

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_compression(ranks: Any, mode: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        x = np.array([1 + 2**-12, 2.0 + rank])  # the first needs more than 11 bits

        def call(x: Any) -> Any:
            def compute(x: Any, compression: Any) -> Any:
                reduced = hvd.allreduce(x, compression=compression)
                scattered = hvd.reducescatter(tf.stack([x] * size), compression=compression)
                return reduced, scattered, tf.gradients(reduced, x)[0] if mode != "eager" else tf.ones_like(x)

            return [compute(x, c) for c in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16)]

        for (reduced, scattered, gradient), first in zip(in_mode(mode, call, x), (1 + 2**-12, 1.0, 1.0), strict=True):
            assert reduced.dtype == scattered.dtype == gradient.dtype == np.float64
            assert reduced.tolist() == [first, 2 + (size - 1) / 2]
            assert scattered.tolist() == [[first, 2 + (size - 1) / 2]]
            assert gradient.tolist() == [1.0, 1.0]
        with pytest.raises(ArgumentError, match="Compression.none, fp16"):
            hvd.allreduce(x, compression="fp16")

    ranks(check)


def test_slices(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        rows = tf.fill([rank, 2], float(size))  # rank 0 has none
        slices = tf.IndexedSlices(rows, tf.range(rank), tf.constant([9, 2]))
        average, dense, summed = hvd.grouped_allreduce([slices, tf.constant(2.0 * rank), slices], op=hvd.Average)
        indices = [index for r in range(size) for index in range(r)]
        for each in (average, summed):
            assert each.indices.numpy().tolist() == indices
            np.testing.assert_array_equal(each.values, np.ones((len(indices), 2)))
            assert each.dense_shape.numpy().tolist() == [9, 2]
        assert dense.numpy() == size - 1
        halves = hvd.allreduce(slices, op=hvd.Sum, compression=hvd.Compression.fp16)
        assert halves.values.dtype == tf.float32 and (halves.values.numpy() == size).all()
        with pytest.raises(ArgumentError, match="Sum or Average"):
            hvd.allreduce(slices, op=hvd.Max)
        with pytest.raises(ArgumentError, match=r"prescale_factor=2.0.*scale their values"):
            hvd.allreduce(slices, prescale_factor=2.0)
        with pytest.raises(UnsupportedTensorError, match="IndexedSlices"):
            hvd.allgather(slices)

    ranks(check)


@pytest.mark.ranks(at_least=3)
@pytest.mark.parametrize("mode", MODES)
def test_in_a_process_set(ranks: Any, mode: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        pair = hvd.add_process_set([0, size - 1])
        number = pair.process_set_id
        if pair.included():

            def call(x: Any) -> Any:
                ys = [
                    hvd.allreduce(x, process_set=pair),
                    hvd.allgather(x, process_set=pair),
                    hvd.broadcast(x, size - 1, process_set=pair),
                    hvd.reducescatter(x, op=hvd.Sum, process_set=pair),
                    hvd.alltoall(x, process_set=pair),
                ]
                return [*ys, hvd.size_op(number), hvd.process_set_included_op(number)]

            got = in_mode(mode, call, np.array([rank + 1.0, 2.0]))
            assert [each.tolist() for each in got] == [
                [1 + (size - 1) / 2, 2],
                [1, 2, size, 2],
                [size, 2],
                [4] if rank else [1 + size],
                [2, 2] if rank else [1, size],
                2,
                1,
            ]
            with pytest.raises(ArgumentError, match="expected the rank in the job"):
                hvd.broadcast(tf.ones(2), 1, process_set=pair)
        else:
            with pytest.raises(ArgumentError, match="cannot take part"):
                in_mode(mode, lambda x: hvd.allreduce(x, process_set=pair), np.ones(2))
            assert in_mode(mode, lambda: hvd.process_set_included_op(number)) == 0
        hvd.remove_process_set(pair)

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_as_tensors(ranks: Any, mode: str) -> None:
    def check() -> None:
        def call() -> Any:
            return [
                *(hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()),
                hvd.process_set_included_op(),
            ]

        got = in_mode(mode, call)
        assert [int(each) for each in got] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]
        assert {each.dtype for each in got} == {np.dtype("int32")} and got[0].shape == ()
        with pytest.raises((ArgumentError, tf.errors.InvalidArgumentError), match="process_set_id=99"):
            in_mode(mode, lambda: hvd.size_op(99))

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_broadcast_of_variables(ranks: Any, mode: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        root = size - 1
        if mode == "session":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                for resource in (True, False):
                    variable = tf.compat.v1.Variable([float(rank), 1.0], use_resource=resource)
                    session.run(tf.compat.v1.global_variables_initializer())
                    assert session.run(hvd.broadcast_variables([variable], root)) is None
                    assert session.run(variable).tolist() == [root, 1.0]
            return
        variables = [tf.Variable([float(rank), 1.0]), keras.Variable(float(rank)), tf.Variable(rank), tf.Variable(True)]

        def call() -> None:
            return hvd.broadcast_variables(variables, root, inplace=True)

        (tf.function(call) if mode == "function" else call)()
        assert variables[0].numpy().tolist() == [root, 1.0]
        assert float(variables[1]) == int(variables[2]) == root
        variables[0].assign([rank, rank])
        (value,) = hvd.broadcast_([variables[0]], 0)
        assert value.numpy().tolist() == variables[0].numpy().tolist() == [0.0, 0.0]
        with pytest.raises(UnsupportedTensorError, match="expected a variable"):
            hvd.broadcast_variables([tf.ones(1)], 0)
        with pytest.raises(ArgumentError, match="such as model.weights or optimizer.variables; got a Module"):
            hvd.broadcast_variables(tf.Module(), 0)
        with pytest.raises(ArgumentError, match="root_rank=-1"):
            hvd.broadcast_variables(variables, -1)

    ranks(check)


def test_objects(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        assert hvd.broadcast_object({"from": rank}, size - 1) == {"from": size - 1}
        assert hvd.broadcast_object_fn(size - 1)(rank) == size - 1
        assert hvd.allgather_object(rank) == list(range(size))
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            assert hvd.broadcast_object(rank, 0, session) == 0
            assert hvd.allgather_object(rank, session) == list(range(size))

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_join(ranks: Any, mode: str) -> None:
    """Rank 0 has no data: it adds nothing, and averages are divided by the number of all ranks."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        if rank:

            def call(x: Any) -> Any:
                average = hvd.allreduce(x)
                gathered = hvd.allgather(x)
                loss = tf.reduce_sum(gathered)
                gradient = tf.gradients(loss, x)[0] if mode != "eager" else tf.fill([2], size - 1.0)
                return average, gathered, gradient

            average, gathered, gradient = in_mode(mode, call, np.full(2, float(rank)))
            assert np.allclose(average, sum(range(size)) / size)
            assert gathered.tolist() == [float(r) for r in range(1, size) for _ in range(2)]
            assert gradient.tolist() == [size - 1.0] * 2
        last = int(in_mode(mode, hvd.join))
        assert last in range(size) and hvd.broadcast_object(last) == last

        def meet() -> list[Any]:
            operation = hvd.barrier()
            return [operation] if mode == "session" else []

        in_mode(mode, meet)

    ranks(check)


def test_arguments(ranks: Any) -> None:
    def check() -> None:
        x = tf.ones(2)
        with pytest.warns(DeprecationWarning, match="op=hvd.Sum") as seen:
            assert hvd.allreduce(x, average=False).numpy().tolist() == [hvd.size()] * 2
        assert seen[0].filename == __file__  # the line that made the call
        with pytest.raises(ArgumentError, match="give `op` alone"):
            hvd.allreduce(x, average=True, op=hvd.Sum)
        with pytest.raises(ArgumentError, match="a list of tensors; got one"):
            hvd.grouped_allreduce(x)
        with pytest.raises(ArgumentError, match="alltoall takes one tensor"):
            hvd.alltoall([x, x])
        with pytest.raises(UnsupportedTensorError, match="expected numbers or bool"):
            hvd.allreduce(tf.constant("text"))
        with pytest.raises(UnsupportedTensorError, match="expected a dense tensor"):
            hvd.allgather(tf.sparse.from_dense(x))
        with pytest.raises(UnsupportedTensorError, match="expected a tensor; got object"):
            hvd.allreduce(object())
        with pytest.raises(ArgumentError, match="that add up to the first dimension, 2"):
            hvd.alltoall(x, [1] * (hvd.size() + 2))
        hvd.barrier()

    with warnings.catch_warnings():
        ranks(check)


def test_small_helpers() -> None:
    variables = [tf.Variable(1.0), tf.Variable(1.0), keras.Variable(1.0)]
    refs = hvd.vars_to_refs(variables)
    assert isinstance(refs, tuple) and len(set(refs)) == 3
    assert set(refs) == set(hvd.vars_to_refs(variables))
    assert all(a is b for a, b in zip(hvd.refs_to_vars(refs), variables, strict=True))
    assert hvd.refs_to_vars(hvd.vars_to_refs(variables[0])) is variables[0]
    assert [n for n in range(9) if hvd.check_num_rank_power_of_2(n)] == [1, 2, 4, 8]
    assert hvd.handle_average_backwards_compatibility(None, None) is hvd.Average
    assert hvd.handle_average_backwards_compatibility(hvd.Max, None) is hvd.Max
    with pytest.warns(DeprecationWarning, match="old spelling"):
        assert hvd.handle_average_backwards_compatibility(None, False) is hvd.Sum


WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "shapes": (lambda rank: hvd.allreduce(tf.ones(3 + min(rank, 1))), r"allreduce\(float32\(3\)"),
    "dtypes": (lambda rank: hvd.allgather(tf.ones(3, tf.float64 if rank else tf.float32)), r"float64\(\*\)"),
    "widths": (lambda rank: hvd.allgather(tf.ones([2, 3 + min(rank, 1)])), r"float32\(\*, 3\)"),
    "roots": (lambda rank: hvd.broadcast(tf.ones(2), min(rank, 1)), "root_rank=1"),
    "operations": (lambda rank: hvd.allreduce(tf.ones(2)) if rank else hvd.allgather(tf.ones(2)), "do not agree"),
    "ops": (lambda rank: hvd.allreduce(tf.ones(2), op=hvd.Max if rank else hvd.Sum), "op=max"),
    "groups": (lambda rank: hvd.grouped_allreduce([tf.ones(2)] * (2 + min(rank, 1))), "do not agree"),
    "names": (lambda rank: hvd.allreduce(tf.ones(2), name=f"x{min(rank, 1)}"), "another rank has not submitted"),
}


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_belong_together_fails_everywhere(ranks: Any, mode: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        hvd.barrier()  # a thread of the program has used hvdlite, and waits for TensorFlow's then
        for case, (call, text) in WRONG.items():
            if mode == "session" and case == "names":
                continue  # a session may be on the way to another call: reported after a minute
            with pytest.raises((MismatchError, tf.errors.UnknownError), match=text):
                in_mode(mode, lambda call=call: call(rank))
            assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == size, case  # all are together again

    ranks(check)
