"""`hvd.Strategy`: what it trains, measures and predicts is what one process does with the global batches."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, MismatchError, NotInitializedError
from hvdlite_tf.strategy import Strategy
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: a thread of TensorFlow's for each rank that waits.
    tf.config.threading.set_inter_op_parallelism_threads(8)

_rng = np.random.default_rng(11)
ROWS, BATCH = 52, 12  # the last batch has 4 rows, which 3 ranks share as 2, 1, 1
X = _rng.standard_normal((ROWS, 6)).astype("float32")
Y = _rng.integers(0, 3, ROWS)
WEIGHTS = [_rng.standard_normal(shape).astype("float32") * 0.5 for shape in [(6, 8), (8,), (8, 3), (3,)]]
MEAN, SUM = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM


def make_model(library: Any, optimizer: Any, *, normalized: bool = False, **options: Any) -> Any:
    """Of Keras 3 or tf_keras, with the same weights on every rank."""
    normalization = [library.layers.BatchNormalization(synchronized=True)] if normalized else []
    model = library.Sequential(
        [
            library.layers.Input((6,)),
            library.layers.Dense(8, activation="tanh"),
            *normalization,
            library.layers.Dense(3),
        ]
    )
    for layer, pair in zip((model.layers[0], model.layers[-1]), (WEIGHTS[:2], WEIGHTS[2:]), strict=True):
        layer.set_weights(pair)
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


def flat(model: Any) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def distance(got: Any, expected: Any) -> float:
    return float(np.abs(np.subtract(got, expected)).max() / np.abs(expected).max())


def everything(model: Any, epochs: int) -> dict[str, np.ndarray]:
    """What `fit`, `evaluate` and `predict` leave behind."""
    history = model.fit(
        X, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, validation_data=(X[:13], Y[:13])
    ).history
    return {
        "weights": flat(model),
        **{name: np.array(values) for name, values in history.items()},
        "evaluation": np.array(model.evaluate(X[:31], Y[:31], batch_size=BATCH, verbose=0)),
        "predictions": model.predict(X[:31], batch_size=BATCH, verbose=0),
    }


CASES = {
    "clipped": lambda library: library.optimizers.Adam(1e-2, global_clipnorm=0.05),
    "accumulated": lambda library: library.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}


@functools.cache
def alone(library: Any, kind: str, normalized: bool) -> dict[str, np.ndarray]:
    return everything(make_model(library, CASES[kind](library), normalized=normalized), 4)


@pytest.mark.ranks(2, 3)
def test_keras_does_what_one_process_does(ranks: Any) -> None:
    """20 steps: 4 epochs of 5 batches, the last one uneven."""
    check_everything(ranks, keras, "clipped", True)


@pytest.mark.slow
@pytest.mark.ranks(2)  # as three threads it takes a busy machine a minute
@pytest.mark.parametrize(("library", "kind"), [("keras", "accumulated"), ("tf_keras", "clipped")])
def test_sums_of_passes_and_tf_keras_do_what_one_process_does(ranks: Any, library: str, kind: str) -> None:
    check_everything(ranks, pytest.importorskip(library), kind, False)


def check_everything(ranks: Any, library: Any, kind: str, normalized: bool) -> None:
    expected = alone(library, kind, normalized)

    def check() -> None:
        strategy = Strategy()
        with strategy.scope():
            model = make_model(library, CASES[kind](library), normalized=normalized)
        got = everything(model, 4)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name].shape == value.shape, name
            assert distance(got[name], value) <= 1e-5, name
        assert all(np.array_equal(got["weights"], other) for other in hvd.allgather_object(got["weights"]))

    ranks(check)


class Rows(keras.metrics.Metric):  # type: ignore[misc]  # mypy does not see Keras
    """The number of rows, looked at in one of many ways."""

    def __init__(self, name: str, look: Any) -> None:
        super().__init__(name=name)
        self.rows, self.look = self.add_variable((), "zeros", name="rows"), look

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

    def result(self) -> Any:
        return self.look(self.rows)


def make_metrics(labels: str) -> list[Any]:
    """All kinds of Keras' metrics, new ones, for labels of rows as a class each or as 3 bits."""
    kinds = keras.metrics
    if labels == "classes":
        return [kinds.MeanIoU(3, sparse_y_pred=False), kinds.SparseTopKCategoricalAccuracy(2), "accuracy"]
    return [
        kinds.R2Score(),
        kinds.R2Score(name="of_each", class_aggregation=None),
        kinds.F1Score(),
        kinds.FBetaScore(average="macro", threshold=0.3),
        kinds.AUC(),
        kinds.Precision(),
        kinds.Recall(thresholds=[0.3, 0.6]),
        kinds.SensitivityAtSpecificity(0.5),
        kinds.RootMeanSquaredError(),
        kinds.OneHotIoU(3, [0, 1]),
        kinds.CosineSimilarity(),
        kinds.PearsonCorrelation(),
        kinds.ConcordanceCorrelation(),
        kinds.KLDivergence(),
        kinds.FalseNegatives(),
        Rows("times", lambda rows: rows * 1.0),
        Rows("root", lambda rows: keras.ops.sqrt(rows)),
        Rows("power", lambda rows: tf.abs(rows.value) ** 2),
    ]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*lower than 2")
@pytest.mark.parametrize("labels", ["bits", "classes"])
def test_metrics_are_those_of_all_rows(ranks: Any, labels: str) -> None:
    """What `evaluate` gives is what one process gives, with batches that the ranks cannot share evenly."""
    rows = 31
    y = Y[:rows] if labels == "classes" else (np.random.default_rng(2).random((rows, 3)) > 0.5).astype("float32")
    loss = "sparse_categorical_crossentropy" if labels == "classes" else "mse"

    def evaluate() -> dict[str, Any]:
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, "softmax")])
        model.layers[0].set_weights([WEIGHTS[0][:, :3], WEIGHTS[3]])
        model.compile(loss=loss, metrics=make_metrics(labels))
        found: dict[str, Any] = model.evaluate(X[:rows], y, batch_size=7, verbose=0, return_dict=True)
        return {name.rstrip("_0123456789"): np.asarray(value) for name, value in found.items()}

    expected = evaluate()

    def check() -> None:
        with Strategy().scope():
            found = evaluate()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name

    ranks(check)


@pytest.mark.slow
def test_a_loop_of_ones_own(ranks: Any) -> None:
    """Losses divided by the size of the global batch; gradients clipped together, in one loop over the dataset in a graph."""

    def train(strategy: Any, dataset: Any, optimizer: Any, make: Any) -> tuple[np.ndarray, float]:
        with strategy.scope():
            variable = make()
            metric = keras.metrics.Mean()

        def step(batch: Any) -> Any:
            x, y, size = batch
            with tf.GradientTape() as tape:
                error = tf.linalg.matvec(x, variable) - y
                loss = tf.nn.compute_average_loss(error**2, global_batch_size=size)
            metric.update_state(error**2)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
            return loss

        @tf.function
        def epoch() -> Any:
            total = 0.0
            for batch in dataset:
                total += strategy.reduce(SUM, strategy.run(step, args=(batch,)), axis=None)
            return total

        total = sum(float(epoch()) for _ in range(4))
        return np.append(variable.numpy(), total), float(metric.result())

    def pipeline() -> Any:
        rows = tf.data.Dataset.from_tensor_slices((X, X[:, 0] ** 2)).batch(BATCH)
        return rows.map(lambda x, y: (x, y, tf.shape(x)[0]))

    def optimizer() -> Any:
        return keras.optimizers.SGD(0.2, clipnorm=0.3)

    default = tf.distribute.get_strategy()
    expected, error = train(default, pipeline(), optimizer(), lambda: tf.Variable(WEIGHTS[0][:, 0]))

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()
        assert strategy.num_replicas_in_sync == size
        with strategy.scope():
            own = strategy.distribute_optimizer(optimizer())
        assert strategy.distribute_optimizer(own) is own
        dataset = strategy.experimental_distribute_dataset(pipeline())
        assert dataset.cardinality == 5
        got, mean = train(strategy, dataset, own, lambda: tf.Variable(WEIGHTS[0][:, 0] + rank))  # rank 0's counts
        assert distance(got, expected) <= 1e-5
        assert mean == pytest.approx(error, rel=1e-5)

    ranks(check)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_what_is_built_in_the_first_step(ranks: Any) -> None:
    """A program in the manner of TensorFlow's tutorials: the chief by its task, a model and an optimizer built by `run`."""

    def program(strategy: Any, seed: int) -> tuple[np.ndarray, float, float]:
        with strategy.scope():
            layers = [
                keras.layers.Dense(units, kernel_initializer=keras.initializers.RandomNormal(seed=seed + units))
                for units in (8, 3)
            ]
            model = keras.Sequential(layers)
            optimizer = keras.optimizers.Adam(0.01)
            objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
            accuracy = keras.metrics.SparseCategoricalAccuracy()

        def step(inputs: Any) -> Any:
            x, y = inputs
            with tf.GradientTape() as tape:
                predictions = model(x, training=True)
                loss = tf.nn.compute_average_loss(objective(y, predictions), global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, predictions)
            return loss

        @tf.function
        def distributed_step(inputs: Any) -> Any:
            return strategy.reduce(SUM, strategy.run(step, args=(inputs,)), axis=None)

        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=4).batch(BATCH)
        total = 0.0
        for _ in range(2):
            for batch in strategy.experimental_distribute_dataset(dataset):
                total += float(distributed_step(batch))
        return flat(model), total, float(accuracy.result())

    weights, total, accuracy = program(tf.distribute.get_strategy(), 0)

    def check() -> None:
        strategy = Strategy()
        found, loss, share = program(strategy, 100 * hvd.rank())
        assert distance(found, weights) <= 1e-4
        assert loss == pytest.approx(total, rel=1e-4)
        assert share == pytest.approx(accuracy)
        resolver = strategy.cluster_resolver
        assert (resolver.task_type, resolver.task_id) == ("worker", hvd.rank())
        assert len(resolver.cluster_spec().as_dict()["worker"]) == hvd.size()

    ranks(check)


def test_ranks_skip_the_same_steps(ranks: Any) -> None:
    """A loss scale looks at the gradients of all ranks, in a model's step as elsewhere."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()
        with strategy.scope():
            optimizer = strategy.distribute_optimizer(
                keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
            )
            variable = keras.Variable([1.0])
            optimizer.build([variable])

        @tf.function
        def step(gradient: Any) -> None:
            strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))

        step(tf.constant([np.inf if rank == size - 1 else 1.0]))
        assert variable.numpy() == 1
        assert optimizer.dynamic_scale.numpy() == 2
        step(tf.constant([2.0 * rank]))
        assert variable.numpy() == 1 - size * (size - 1) / 2

    ranks(check)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_optimizer_that_is_left_alone(ranks: Any, clip: float | None) -> None:
    """It asks the strategy for sums, after it has clipped; large gradients and rows of an embedding."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()
        with strategy.scope():
            table = tf.Variable(tf.zeros([20_000]))
            optimizer = keras.optimizers.SGD(1.0, clipvalue=clip)
            optimizer.build([table])

        def step() -> None:
            optimizer.apply_gradients([(tf.fill([20_000], rank + 1.0), table)])
            rows = tf.IndexedSlices(tf.constant([rank + 1.0]), tf.constant([rank % 2]), tf.constant([20_000]))
            if clip is None:
                optimizer.apply_gradients([(rows, table)])

        for run in (step, tf.function(step)):
            strategy.run(run)
        own = np.arange(1.0, size + 1)
        expected = np.full(20_000, -2 * (own if clip is None else np.minimum(own, clip)).sum())
        if clip is None:
            expected[0] -= 2 * own[::2].sum()
            expected[1] -= 2 * own[1::2].sum()
        assert np.allclose(table.numpy(), expected)

    ranks(check)


def test_reductions(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()
        rows = np.arange(2.0 * rank, 2.0 * rank + 2 + rank)  # 2, 3, 4 … of them
        table = tf.constant([rows, rows + 1])
        everybody = np.concatenate([np.arange(2.0 * r, 2.0 + 3 * r) for r in range(size)])
        for graph in (False, True):
            call: Any = tf.function if graph else lambda function: function
            assert call(lambda: strategy.reduce("sum", tf.constant(rank + 1), axis=None))().numpy() == sum(
                range(size + 1)
            )
            assert call(lambda: strategy.reduce("MEAN", tf.constant(rank + 1.0), axis=None))() == (size + 1) / 2
            assert call(lambda: strategy.reduce(SUM, rows, axis=0))() == everybody.sum()
            assert np.isclose(call(lambda: strategy.reduce(MEAN, rows, axis=0))(), everybody.mean())
            both = call(lambda: strategy.reduce(MEAN, {"a": rows, "b": rows + 1}, axis=0))()
            assert np.allclose([both["a"], both["b"]], [everybody.mean(), everybody.mean() + 1])
            assert np.array_equal(call(lambda: strategy.gather(tf.constant(rows), axis=0))(), everybody)
            assert np.array_equal(call(lambda: strategy.gather(table, axis=1))(), [everybody, everybody + 1])
            assert np.array_equal(call(lambda: strategy.gather(table, axis=-1))(), [everybody, everybody + 1])

    ranks(check)


def test_what_a_replica_sees(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()

        def step(value: Any) -> Any:
            context = tf.distribute.get_replica_context()
            assert context.num_replicas_in_sync == size
            assert context.replica_id_in_sync_group == rank
            with tf.GradientTape() as tape:
                tape.watch(value)
                total, mean = context.all_reduce("sum", value), context.all_reduce(MEAN, [value, value])[1]
                loss = (rank + 1) * total * mean
            return total, mean, tape.gradient(loss, value), context.all_gather(value[None], axis=0)

        values = np.arange(1.0, size + 1)
        total, mean, gradient, gathered = strategy.run(step, args=(tf.constant(rank + 1.0),))
        assert total == values.sum()
        assert mean == values.mean()
        # of the sum of all ranks' losses: Σ (r + 1) · 2 · total · d(mean)
        assert np.isclose(gradient, values.sum() * 2 * values.sum() / size)
        assert np.array_equal(gathered, values)

        own = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        assert own == rank

        def dataset_of(context: Any) -> Any:
            assert context.num_replicas_in_sync == context.num_input_pipelines == size
            share = tf.data.Dataset.range(2 * size).shard(context.num_input_pipelines, context.input_pipeline_id)
            return share.batch(context.get_per_replica_batch_size(2 * size))

        (batch,) = strategy.distribute_datasets_from_function(dataset_of)
        assert batch.numpy().tolist() == [rank, rank + size]
        rest = strategy.experimental_distribute_dataset(hvd.shard(tf.data.Dataset.range(2 * size)).batch(2))
        assert next(iter(rest)).numpy().tolist() == [rank, rank + size]  # left as it was

    ranks(check)


def test_variables(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()
        with strategy.scope():
            variable = tf.Variable([float(rank + 5)])
            half = keras.Variable([rank + 5], dtype="bfloat16")
            random = keras.random.SeedGenerator(seed=rank)
            metric = keras.metrics.Mean()
        assert variable.numpy() == 5
        assert np.asarray(half.numpy(), float) == 5
        assert len({tuple(state) for state in hvd.allgather_object(random.state.numpy().tolist())}) == size
        strategy.run(lambda: metric.update_state([rank, rank + 2.0]))
        assert metric.result() == 1 + (size - 1) / 2  # of all ranks
        assert metric.total.numpy() == 2 * rank + 2  # one rank can look at its own, and save it
        assert strategy.run(metric.result) == rank + 1
        metric.reset_state()
        assert metric.result() == 0

    ranks(check)


@pytest.mark.parametrize("graph", [False, True])
def test_what_replicas_assign_is_aggregated(ranks: Any, graph: bool) -> None:
    """As MirroredStrategy does it, with a replica for each rank."""
    kinds = tf.VariableAggregation

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()
        with strategy.scope():
            made = {
                kind: tf.Variable(1.0, aggregation=kind) for kind in (kinds.SUM, kinds.MEAN, kinds.ONLY_FIRST_REPLICA)
            }
            counted = {
                kind: tf.Variable(0.0, False, aggregation=kind, synchronization=tf.VariableSynchronization.ON_READ)
                for kind in made
            }
        own = np.arange(1.0, size + 1)  # what the ranks give
        together = {kinds.SUM: own.sum(), kinds.MEAN: own.mean(), kinds.ONLY_FIRST_REPLICA: own[0]}

        def step() -> None:
            for each in made.values():
                each.assign_add(rank + 1.0)
                each.assign_sub(2 * (rank + 1.0))
            for each in counted.values():
                each.assign_add(rank + 1.0)

        def assign() -> None:
            for each in made.values():
                each.assign(rank + 1.0)
            made[kinds.SUM].scatter_add(tf.IndexedSlices(tf.zeros(1), [0], [1]))

        strategy.run(tf.function(step) if graph else step)
        for kind, value in together.items():
            assert made[kind].numpy() == 1 - value
            assert tf.convert_to_tensor(counted[kind]) == value
            counted[kind].assign(7.0)  # of all ranks
            assert tf.convert_to_tensor(counted[kind]) == 7
            made[kind].assign(8.0)
            assert made[kind].numpy() == 8
        with pytest.raises(ArgumentError, match="scatter_add.. of the variable .*use assign"):
            strategy.run(tf.function(assign) if graph else assign)
        if not graph:
            assert [made[kind].numpy() for kind in together] == list(together.values())

    ranks(check)


def test_data_that_ranks_shuffle_differently_is_refused(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        strategy = Strategy()
        alike = tf.data.Dataset.range(64).shuffle(64, seed=3).batch(16)
        seen = [[int(x) for batch in strategy.experimental_distribute_dataset(alike) for x in batch] for _ in range(2)]
        everybody = hvd.allgather_object(seen)
        for epoch in range(2):
            assert sorted(x for each in everybody for x in each[epoch]) == list(range(64))
        if size == 1:
            return
        with pytest.raises(ArgumentError, match="in different orders.*pass the same seed"):
            strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).shuffle(64, seed=rank).batch(16))
        with pytest.raises(MismatchError, match="different numbers of elements"):
            strategy.experimental_distribute_dataset(tf.data.Dataset.range(64 + 16 * rank).batch(16))
        other = tf.data.Dataset.range(64).map(lambda x: tf.cast(x, tf.int32 if rank else tf.int64))
        with pytest.raises(MismatchError, match="different elements"):
            strategy.experimental_distribute_dataset(other.batch(16))

    ranks(check)


class Looks(keras.Model):  # type: ignore[misc]  # mypy does not see Keras
    """Notes the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def train_step(self, data: Any) -> dict[str, Any]:
        tf.numpy_function(lambda rows: self.seen.extend(map(int, rows[:, 0])), [data[0]], [])
        return {"loss": tf.constant(0.0)}

    def call(self, x: Any) -> Any:
        return x


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_each_row_is_seen_once(ranks: Any) -> None:
    """Of generators, which Keras looks at to build the model; and of what is shuffled, though ranks have looked at it alone."""
    rows = np.arange(24.0).reshape(24, 1)

    def generator() -> Any:
        for begin in range(0, 24, 6):
            yield rows[begin : begin + 6], rows[begin : begin + 6]

    def check() -> None:
        rank = hvd.rank()
        strategy = Strategy()
        with strategy.scope():
            model = Looks()
            model.compile()
        shuffled = tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(24, seed=1).batch(6)
        distributed = strategy.experimental_distribute_dataset(shuffled)

        @tf.function
        def loop() -> None:
            for x, _ in distributed:
                tf.numpy_function(lambda part: model.seen.extend(map(int, part[:, 0])), [x], [])

        def fit() -> None:
            model.fit(shuffled, epochs=1, shuffle=False, verbose=0)

        orders = []
        for train in (lambda: model.fit(generator(), shuffle=False, verbose=0), fit, fit, loop, loop):
            if rank == 0:
                next(iter(shuffled))
            model.seen.clear()
            train()
            everybody = hvd.allgather_object(list(model.seen))
            assert sorted(row for each in everybody for row in each) == list(range(24))
            orders.append(everybody)
        assert len({str(order) for order in orders}) == 5

    ranks(check)


def test_bad_use(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not UNDER_MPI:
        with pytest.raises(NotInitializedError, match="Strategy"):
            Strategy()

    def check() -> None:
        strategy, other = Strategy(), Strategy()
        with strategy.scope():
            with pytest.raises(ArgumentError, match="do not nest"):
                other.scope()
            with pytest.raises(ArgumentError, match="do not nest"):
                Strategy()
            twice = make_model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
            compiled_outside = make_model(keras, keras.optimizers.SGD(0.1))
        compiled_outside.compile("sgd", "sparse_categorical_crossentropy")
        outside = make_model(keras, keras.optimizers.SGD(0.1))
        with pytest.raises(ArgumentError, match="exchanges gradients by itself"):
            twice.fit(X, Y, batch_size=ROWS, verbose=0)
        with strategy.scope(), pytest.raises(ArgumentError, match="was made outside of this strategy"):
            outside.fit(X, Y, batch_size=ROWS, verbose=0)
        with pytest.raises(ArgumentError, match="loss/total was made outside .* build and compile the model within"):
            compiled_outside.fit(X, Y, batch_size=ROWS, verbose=0)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="evaluate of a model under hvd.Strategy, which all ranks call"):
                (twice.evaluate if hvd.rank() == 0 else twice.fit)(X, Y, verbose=0)
            backups = keras.callbacks.BackupAndRestore("nothing is written there")
            with pytest.raises(ArgumentError, match="several ranks give BackupAndRestore the folder"):
                compiled_outside.fit(X, Y, batch_size=ROWS, verbose=0, callbacks=backups)
        with strategy.scope(), pytest.raises(ArgumentError, match="made in a tf.function, of a value"):
            tf.function(lambda: tf.Variable(tf.ones(3)), autograph=False)()
        with pytest.raises(ArgumentError, match="call it within strategy.run"):
            strategy.distribute_optimizer(keras.optimizers.SGD(0.1)).apply([tf.ones(1)], [keras.Variable([1.0])])
        with pytest.raises(ArgumentError, match="expected an optimizer"):
            strategy.distribute_optimizer("sgd")

    ranks(check)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU:0"])

    def with_gpu() -> None:
        with pytest.raises(ArgumentError, match="CPUs only so far"):
            Strategy()

    ranks(with_gpu)
