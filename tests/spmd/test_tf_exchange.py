"""`GradientExchange.combine` against NumPy: eager, in a tf.function, in a session; and that results stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite.gradients.bucket
import hvdlite_tf as hvd
from hvdlite.adapter import buckets, gradient_memory
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, UnsupportedTensorError
from hvdlite.tensors.compression import Compression
from hvdlite.testing import on_ranks
from hvdlite_tf.gradients.exchange import GradientExchange
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # See test_keras_training.py.
    tf.config.threading.set_inter_op_parallelism_threads(8)

SHAPES = [(3, 4), (), (5,), (2, 0), (6, 2)]


@pytest.fixture(params=[0, 2**14], ids=["large", "small"])
def large(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether tensors are summed where TensorFlow has them."""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", request.param)


graph_too = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def runner(graph: bool, function: Callable[..., Any], name: str = "step") -> Callable[..., Any]:
    """Functions of one name are taken for the same one, over sources of one layout: another one needs another."""
    function.__name__ = name
    return tf.function(function, autograph=False) if graph else function


def of_rank(rank: int, step: int = 0) -> list[np.ndarray]:
    """Small whole numbers over 4: exact in every dtype, and so are their sums."""
    random = np.random.default_rng([rank, step])
    return [random.integers(-8, 9, shape) / 4 for shape in SHAPES]


def variables(dtype: str = "float32") -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES]


@graph_too
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@pytest.mark.usefixtures("large")
def test_dense_gradients(ranks: Any, graph: bool, op: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        dtypes = ["float32", "float64", "bfloat16", "float16", "complex64"]
        sources = [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
        exchange = GradientExchange(ExchangeOptions(op=op))
        run = runner(graph, lambda *gradients: exchange.combine(sources, gradients))
        for step in range(3):
            own = [tf.cast(tf.constant(x), dtype) for x, dtype in zip(of_rank(rank, step), dtypes, strict=True)]
            found = run(*own)
            total = [sum(each) for each in zip(*(of_rank(r, step) for r in range(size)), strict=True)]
            for tensor, expected, source in zip(found, total, sources, strict=True):
                assert tensor.dtype == source.dtype
                assert tensor.shape == source.shape
                expected = expected / (size if op is hvd.Average else 1)
                tolerance = {"bfloat16": 2**-8, "float16": 2**-11}.get(source.dtype.name, 1e-6)
                np.testing.assert_allclose(tf.cast(tensor, "complex128").numpy(), expected, rtol=tolerance)

    ranks(check)


@graph_too
def test_weights(ranks: Any, graph: bool) -> None:
    """The gradient of the joined batch, whatever the shares; who has nothing may hold anything."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sources, exchange = variables(), GradientExchange(ExchangeOptions())
        run = runner(graph, lambda weight, *gradients: exchange.combine(sources, gradients, weight))
        own = of_rank(rank) if rank > 0 or size == 1 else [np.full(shape, np.nan) for shape in SHAPES]
        weight = 1.0 if size == 1 else float(rank)
        found = run(tf.constant(weight), *(tf.constant(x, "float32") for x in own))
        shares = [1.0] if size == 1 else np.arange(size) / np.arange(size).sum()
        for index, tensor in enumerate(found):
            expected = sum(share * of_rank(r)[index] for r, share in enumerate(shares) if share)
            np.testing.assert_allclose(tensor, expected, rtol=1e-6)
        if size > 1:
            kind = tf.errors.UnknownError if graph else HvdliteError
            with pytest.raises(kind, match="weights of all ranks add up to 0"):
                run(tf.constant(0.0), *(tf.zeros(shape) for shape in SHAPES))
        with pytest.raises(ArgumentError, match="for averages"):
            GradientExchange(ExchangeOptions(op=hvd.Sum)).combine(sources, [None] * len(sources), 2.0)

    ranks(check)


@graph_too
def test_gradients_that_some_ranks_have(ranks: Any, graph: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sources, exchange = variables(), GradientExchange(ExchangeOptions())

        def combine(step: int) -> list[Any]:
            own = [tf.constant(x, "float32") for x in of_rank(rank, step)]
            own[1] = None
            own[2] = own[2] if rank == 0 else None
            own[3] = own[3] if rank == size - 1 else None
            return exchange.combine(sources, own)

        for step in range(2):
            found = runner(graph, lambda step=step: combine(step), "some")()
            assert found[1] is None
            np.testing.assert_allclose(found[2], of_rank(0, step)[2] / size, rtol=1e-6)
            for index in (0, 4):
                expected = sum(of_rank(r, step)[index] for r in range(size)) / size
                np.testing.assert_allclose(found[index], expected, rtol=1e-6)
        nothing = runner(graph, lambda: exchange.combine(sources, [None] * len(sources)), "nothing")()
        assert nothing == [None] * len(sources)

    ranks(check)


def test_a_function_that_one_rank_traces_again(ranks: Any) -> None:
    """For another shape of its input, or another number: nobody is asked, and it fits the others' function."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sources, exchange = variables(), GradientExchange(ExchangeOptions(op=hvd.Sum))

        @tf.function(autograph=False)
        def traced_again(x: Any, often: int) -> Any:
            own = [tf.zeros(shape) + tf.reduce_sum(x) for shape in SHAPES]
            return exchange.combine(sources, [own[0], None, own[2] if rank == 0 else None, *own[3:]])

        for often in range(3):
            found = traced_again(tf.ones(3 + often * rank), often if rank == size - 1 else 0)
            assert (found[0].numpy() == sum(3 + often * r for r in range(size))).all()
            assert found[1] is None
            assert (found[2].numpy() == 3).all()

    ranks(check)


def test_other_gradients_in_a_later_function_of_the_same_name(ranks: Any) -> None:
    """The ranks do not ask each other again: None stays None, and is an error where another rank has a gradient."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sources = [tf.Variable(tf.zeros(7)), tf.Variable(tf.zeros(7))]
        exchange = GradientExchange(ExchangeOptions(op=hvd.Sum))

        def combine(*own: Any) -> Any:
            return runner(True, lambda: exchange.combine(sources, own), "same_name")()

        ones = tf.ones(7)
        combine(ones, ones)
        found = combine(ones, None)
        assert (found[0].numpy() == size).all()
        assert found[1] is None
        if size > 1 and rank > 0:
            with pytest.raises(tf.errors.UnknownError, match="HvdliteError: this rank has no gradient of"):
                combine(ones, None)
        else:
            combine(ones, ones)

    ranks(check)


@graph_too
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_rows_of_embeddings(ranks: Any, graph: bool, as_dense: bool, compression: Any) -> None:
    """Sparse on some ranks, none on others, dense on others in another step; beside a dense gradient; with weights."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        table, bias = tf.Variable(tf.zeros([6, 2])), tf.Variable(tf.zeros([3]))
        exchange = GradientExchange(ExchangeOptions(sparse_as_dense=as_dense, compression=compression))

        def rows_of(r: int) -> tuple[np.ndarray, np.ndarray]:
            random = np.random.default_rng(r)
            return random.integers(6, size=2 * r + 3), random.integers(-8, 9, (2 * r + 3, 2)) / 4

        def combine(kind: str) -> list[Any]:
            indices, values = rows_of(rank)
            gradient: Any = tf.IndexedSlices(
                tf.constant(values, "float32"), tf.constant(indices), tf.constant([6, 2], "int64")
            )
            if kind == "none on the last" and rank == size - 1:
                gradient = None
            elif kind == "dense on the last" and rank == size - 1:
                gradient = tf.convert_to_tensor(gradient)
            return exchange.combine([table, bias], [gradient, tf.fill([3], float(rank))], rank + 1.0)

        weights = np.arange(1.0, size + 1)
        for kind in ("all", "none on the last", "dense on the last", "all"):
            got, other = runner(graph, lambda kind=kind: combine(kind), kind.replace(" ", "_"))()
            np.testing.assert_allclose(other, np.average(np.arange(size), weights=weights), rtol=1e-3)
            if kind == "none on the last" and size == 1:
                assert got is None
                continue
            dense = kind == "dense on the last" and rank == size - 1
            assert isinstance(got, tf.IndexedSlices) == (not as_dense and not dense)
            expected = np.zeros((6, 2))
            for r in range(size if kind != "none on the last" else size - 1):
                np.add.at(expected, rows_of(r)[0], rows_of(r)[1] * weights[r] / weights.sum())
            np.testing.assert_allclose(tf.convert_to_tensor(got), expected, rtol=4e-3, atol=4e-3)

    ranks(check)


@pytest.mark.filterwarnings("ignore:Converting sparse IndexedSlices")
def test_one_rank_alone_has_rows(ranks: Any) -> None:
    """It tells the others, who have no gradient; and again, for another table, when the memory for the rest is there."""

    def check() -> None:
        size = hvd.size()
        sources = [tf.Variable(tf.zeros([4, 1])), tf.Variable(tf.zeros([5, 1])), tf.Variable(tf.zeros([2]))]
        exchange = GradientExchange(ExchangeOptions(op=hvd.Sum))
        for index in (0, 1, 0):
            own: list[Any] = [None, None, tf.ones(2)]
            if hvd.rank() == size - 1:
                own[index] = tf.IndexedSlices(
                    tf.constant([[2.0], [3.0]]), tf.constant([1, 1]), tf.constant([4 + index, 1])
                )
            found = exchange.combine(sources, own)
            assert found[1 - index] is None
            np.testing.assert_array_equal(tf.convert_to_tensor(found[index])[:, 0], [0, 5, 0, 0, 0][: 4 + index])
            np.testing.assert_array_equal(found[2], [size, size])

    ranks(check)


@pytest.mark.ranks(at_least=2)
@graph_too
@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compression(ranks: Any, graph: bool, compression: Any) -> None:
    """The wire's dtype is half as large; dividing before lets sums beyond its range through."""

    def check() -> None:
        sources = [
            tf.Variable(tf.zeros([4])),
            tf.Variable(tf.zeros([2], "float64")),
            tf.Variable(tf.zeros([3], "float16")),
        ]
        own = [
            tf.constant([1e5, -2.0, 0.5, 3.0]),
            tf.constant([1.5, -4.0], "float64"),
            tf.constant([1.0, 2.0, 3.0], "float16"),
        ]
        exchange = GradientExchange(ExchangeOptions(compression=compression, gradient_predivide_factor=16.0))
        found = runner(graph, lambda: exchange.combine(sources, own))()
        for tensor, expected in zip(found, own, strict=True):
            assert tensor.dtype == expected.dtype
            np.testing.assert_allclose(tensor, expected, rtol=1e-2)
        kinds = {
            info.dtype
            for each in world().group().exchanges
            if isinstance(each, buckets.Buckets)
            for info in each._infos
        }
        assert ("bfloat16" if compression is Compression.bf16 else "float16") in kinds

    ranks(check)


@pytest.mark.ranks(2)
@graph_too
def test_adasum(ranks: Any, graph: bool) -> None:
    """Of two ranks: a (1 - a·b / 2|a|²) + b (1 - a·b / 2|b|²), by tensor (Maleki et al., arXiv:2006.02924, section 3)."""

    def check() -> None:
        rank = hvd.rank()
        sources, exchange = (
            [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros(2))],
            GradientExchange(ExchangeOptions(op=hvd.Adasum)),
        )
        a, b = np.array([1.0, 2.0, 3.0]), np.array([-1.0, 0.5, 4.0])
        own = [tf.constant(b if rank else a, "float32"), tf.ones(2) if rank == 0 else None]
        found = runner(graph, lambda: exchange.combine(sources, own))()
        expected = a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b))
        np.testing.assert_allclose(found[0], expected, rtol=1e-5)
        np.testing.assert_allclose(found[1], [1, 1], rtol=1e-6)

    ranks(check)


@graph_too
@pytest.mark.usefixtures("large")
def test_gradients_that_a_program_keeps_stay_as_they_are(ranks: Any, graph: bool) -> None:
    """Of more steps than there are rooms for; those of some ranks for longer than of others."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sources, exchange = variables(), GradientExchange(ExchangeOptions(op=hvd.Sum))
        run = runner(graph, lambda *gradients: exchange.combine(sources, gradients))
        kept: dict[int, list[Any]] = {}
        for step in range(4 * buckets.ROOMS):
            kept[step] = run(*(tf.constant(x, "float32") for x in of_rank(rank, step)))
            if step % (rank + 2) == 0:
                kept.pop(step // 2, None)
            for earlier, tensors in kept.items():
                for index, tensor in enumerate(tensors):
                    np.testing.assert_array_equal(tensor, sum(of_rank(r, earlier)[index] for r in range(size)))

    ranks(check)


@pytest.mark.usefixtures("large")
def test_one_rank_computes_with_gradients_that_the_others_read_too(ranks: Any) -> None:
    """TensorFlow reuses memory of its own for results, and must not do that with memory of all ranks: each would scale it."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        source, exchange = tf.Variable(tf.zeros([64, 64])), GradientExchange(ExchangeOptions(op=hvd.Sum))
        held, moved = tf.Variable(tf.zeros([64, 64])), tf.Variable(tf.zeros([64, 64]))

        @tf.function(autograph=False)
        def step(own: Any) -> Any:
            (gradient,) = exchange.combine([source], [own])
            scaled = tf.clip_by_global_norm([gradient * 3.0 + 1.0], 5.0)[0][0]
            held.assign(gradient)  # which takes the memory for the variable's own
            held.assign_add(tf.ones([64, 64]) * (rank + 1.0))
            held.scatter_nd_update([[0, 0]], [7.0])
            moved.assign_sub(tf.nn.relu(tf.reshape(gradient, [-1, 64])) / 2.0)
            return gradient, tf.identity(gradient), scaled

        for number in range(1, 6):
            gradient, same, _ = step(tf.fill([64, 64], float(rank + number)))
            hvd.barrier()
            expected = sum(r + number for r in range(size))
            assert (gradient.numpy() == expected).all() and (same.numpy() == expected).all()
            after = held.numpy()
            assert after[0, 0] == 7 and (after.reshape(-1)[1:] == expected + rank + 1).all()
            hvd.barrier()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_memory_is_found_again_and_given_up(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges of the same layout share it; of many layouts, those not used for longest are given up, on all ranks alike."""
    monkeypatch.setattr(gradient_memory, "LAYOUTS", 3)

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        here = world()
        before = len(here.group().reducers._open)
        functions = {}
        for elements in [1, 2, 1, 3, 4, 5, 1, 5, 2, 6]:
            source = [tf.Variable(tf.zeros(elements))]
            if elements not in functions:
                functions[elements] = tf.function(
                    lambda own, source=source: GradientExchange(ExchangeOptions()).combine(source, [own]),
                    autograph=False,
                )
            for run in (
                functions[elements],
                lambda own, source=source: GradientExchange(ExchangeOptions()).combine(source, [own]),
            ):
                (found,) = run(tf.fill([elements], float(rank)))
                assert (found.numpy() == (size - 1) / 2).all()
            assert len(here.group().reducers._open) - before <= 3

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_memory_is_given_up_where_a_rank_has_no_more_data(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same as the others in the end, and goes on with them."""
    monkeypatch.setattr(gradient_memory, "LAYOUTS", 3)

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()

        def exchange(elements: int, having: int) -> None:
            source = [tf.Variable(tf.zeros(elements))]
            (found,) = GradientExchange(ExchangeOptions()).combine(source, [tf.fill([elements], float(rank))])
            assert (found.numpy() == (size - 1 if having == 1 else (size - 1) / 2)).all()

        for elements in [71, 72] + [73, 74, 75, 76] * (rank == size - 1):
            exchange(elements, having=size if elements < 73 else 1)
        assert hvd.join() == size - 1
        for elements in (76, 75, 71, 77):
            exchange(elements, having=size)

    ranks(check)


def test_shapes_that_are_not_known_when_a_function_is_traced(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        exchange = GradientExchange(ExchangeOptions(op=hvd.Sum))

        @tf.function(input_signature=[tf.TensorSpec([None, 2])], autograph=False)
        def step(x: Any) -> Any:
            return exchange.combine([x], [x * (rank + 1.0)])[0]

        for rows in (2, 3, 2):
            assert (step(tf.ones([rows, 2])).numpy() == size * (size + 1) / 2).all()

    ranks(check)


def test_in_a_session(ranks: Any) -> None:
    """Two exchanges in one run, which TensorFlow orders as it likes; then one of them alone."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            fed = tf.compat.v1.placeholder(tf.float32, [3])
            exchange = GradientExchange(ExchangeOptions(op=hvd.Sum))
            source = tf.compat.v1.get_variable("x", [3])
            slices = tf.IndexedSlices(tf.reshape(fed, [3, 1]), tf.constant([rank, 0, 1]), tf.constant([4, 1]))
            table = tf.compat.v1.get_variable("table", [4, 1])
            one, two = exchange.combine([source], [fed]), exchange.combine([source, table], [2.0 * fed, slices])
            for order in ([one, two], [two, one]) if rank else ([two, one], [one, two]):
                for _ in range(3):
                    session.run(order, {fed: [rank] * 3})
            got = session.run([*one, two[0], tf.convert_to_tensor(two[1])], {fed: [rank] * 3})
            total = size * (size - 1) / 2
            np.testing.assert_array_equal(got[0], [total] * 3)
            np.testing.assert_array_equal(got[1], [2 * total] * 3)
            rows = np.zeros((4, 1))
            for r in range(size):
                np.add.at(rows, [r, 0, 1], r)
            np.testing.assert_array_equal(got[2], rows)
            np.testing.assert_array_equal(session.run(one, {fed: [rank] * 3})[0], [total] * 3)

    ranks(check)


@graph_too
def test_different_layouts_are_a_mismatch_on_all_ranks(ranks: Any, graph: bool) -> None:
    def check() -> None:
        if hvd.size() > 1:
            source = [tf.Variable(tf.zeros(113 + hvd.rank() // (hvd.size() - 1)))]
            run = runner(graph, lambda: GradientExchange(ExchangeOptions()).combine(source, [tf.ones(source[0].shape)]))
            with pytest.raises(MismatchError, match="gradient buckets"):
                run()
            sources = [tf.Variable(tf.zeros(115)) for _ in range(1 + hvd.rank() // (hvd.size() - 1))]
            own = [tf.ones(115) for _ in sources]
            run = runner(graph, lambda: GradientExchange(ExchangeOptions()).combine(sources, own), "numbers")
            with pytest.raises(MismatchError, match="gradient buckets|different numbers of sources"):
                run()

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="it ends the job")
def test_different_layouts_that_both_are_known_end_the_job() -> None:
    def check() -> None:
        sources = [tf.Variable(tf.zeros(elements)) for elements in (3, 4)]
        exchange = GradientExchange(ExchangeOptions())
        for source in (*sources, sources[hvd.rank()]):
            exchange.combine([source], [tf.ones(source.shape)])

    text = r"rank 0 waits for gradient exchange 2 of 1 tensors with 3 .*\n.*rank 1 .* exchange 2 of 1 tensors with 4 values"
    with pytest.raises(Exception, match=text):
        on_ranks(2, check, config=Config(deadlock_time_seconds=0.3))


def test_bad_gradients(ranks: Any) -> None:
    def check() -> None:
        exchange, source = GradientExchange(ExchangeOptions()), tf.Variable(tf.zeros(3))
        for bad in (tf.ones(4), tf.ones(3, "float64")):
            with pytest.raises(ArgumentError, match="expected the same"):
                exchange.combine([source], [bad])
        assert exchange.combine([], []) == []
        if hvd.size() > 1:
            with pytest.raises(UnsupportedTensorError, match="floating-point"):
                exchange.combine([tf.Variable([1])], [tf.constant([1])])

    ranks(check)


@pytest.mark.parametrize("one_more", [False, True])
def test_a_rank_that_has_no_more_data(ranks: Any, one_more: bool) -> None:
    """The others' averages are of those who have data; in the end all have the weights and the state of the last.

    So it is if a rank has made one optimizer more, for itself.
    """

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        if one_more and rank == 0:
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        # Variables of another test may be in the same process: these optimizers are others.
        model = [keras.Variable([0.0, 0.0]), keras.Variable([[1.0]])]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
        optimizer.build(model)
        step = tf.function(lambda x: optimizer.apply([tf.fill([2], x), tf.fill([1, 1], x)], model))
        expected, velocity = 0.0, 0.0
        for number in range(1 + 2 * (size - 1)):
            having = [r for r in range(size) if number < 1 + 2 * r]
            velocity = 0.5 * velocity - sum(having) / len(having)
            expected += velocity
            if rank in having:
                step(float(rank))
                assert np.allclose(model[0].numpy(), expected)
        assert hvd.join() == size - 1
        assert np.allclose(model[0].numpy(), expected)
        assert np.allclose(model[1].numpy(), 1 + expected)
        step(1.0)  # the momentum is the last one's, too
        assert np.allclose(model[0].numpy(), expected + 0.5 * velocity - 1)
        assert optimizer.iterations.numpy() == 2 + 2 * (size - 1)

    ranks(check)
