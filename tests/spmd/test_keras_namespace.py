"""hvdlite_tf.keras: operations on values, optimizers with Horovod's order of arguments, models that are loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf.keras as hvd
from hvdlite.errors import ArgumentError
from hvdlite.testing import on_ranks
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)


class Half(keras.optimizers.SGD):  # type: ignore[misc]  # mypy does not see Keras
    """Steps of half the size."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / 2)


def test_values(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        mean, total = (size - 1) / 2, size * (size - 1) // 2
        for value, dtype in (
            (float(rank), tf.float32),
            (np.float64(rank), tf.float64),
            (np.full((2, 3), rank, np.float32), tf.float32),
            (tf.fill([2], tf.cast(rank, tf.bfloat16)), tf.bfloat16),
            (tf.Variable(float(rank)), tf.float32),
            (keras.Variable([float(rank)]), tf.float32),
        ):
            result = hvd.allreduce(value)
            assert result.dtype == dtype and result.shape == np.shape(tf.convert_to_tensor(value))
            assert (result.numpy().astype(float) == mean).all()
        assert hvd.allreduce(rank, op=hvd.Sum) == total
        assert hvd.allreduce(2.0 * rank, "named", None, 0.5, 3.0, hvd.Sum, hvd.Compression.fp16) == 3 * total
        rows = hvd.allgather(np.full((rank + 1, 2), rank), "rows")
        assert np.array_equal(rows, np.repeat([[r, r] for r in range(size)], np.arange(size) + 1, axis=0))
        assert hvd.broadcast(float(rank), size - 1, "value") == size - 1
        assert hvd.broadcast([rank, 5], 0).numpy().tolist() == [0, 5]
        part = hvd.reducescatter(np.arange(2.0 * size) + rank, op=hvd.Sum)
        assert part.numpy().tolist() == [size * (2 * rank + i) + total for i in range(2)]
        assert hvd.reducescatter(np.arange(size) * 1.0).numpy().tolist() == [rank]

    ranks(check)


def model_with(optimizer: Any) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((2, 1))])
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def test_optimizers_take_horovods_arguments(ranks: Any) -> None:
    def check() -> None:
        optimizer = hvd.DistributedOptimizer(
            *(keras.optimizers.SGD(1.0), "name", "/gpu:0", "/gpu:0", hvd.Compression.fp16, True, 2.0, hvd.Average),
            *(2, False, 0, None, hvd.global_process_set, True),
        )
        variable = tf.Variable([0.0])
        for _ in range(2):
            optimizer.apply([tf.fill([1], float(hvd.rank()))], [variable])
        assert variable.numpy() == -(hvd.size() - 1)  # the sum of two passes

    ranks(check)


@pytest.mark.parametrize("scale", [True, False])
def test_partial(ranks: Any, scale: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model = keras.Sequential([keras.layers.Input((1,)), *(keras.layers.Dense(1, use_bias=False) for _ in range(3))])
        start = [weight.numpy() for weight in model.trainable_variables]
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=[model.layers[0], model.layers[2]], scale_local_gradients=scale
        )
        gradients = [tf.fill([1, 1], float(rank + 1))] * 3
        optimizer.apply(gradients, model.trainable_variables)
        own = (rank + 1) / (size if scale else 1)
        steps = [before - after.numpy() for before, after in zip(start, model.trainable_variables, strict=True)]
        assert np.ravel(steps) == pytest.approx([own, (size + 1) / 2, own], rel=1e-5)
        with pytest.raises(ArgumentError, match="has no variables yet"):
            hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=keras.layers.Dense(1))
        with pytest.raises(ArgumentError, match="expected layers of Keras; got int"):
            hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[3])

    ranks(check)


def test_load_model(ranks: Any, tmp_path: Path) -> None:
    """Saved on one rank, and trained on as one process would with what all ranks have."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        path = hvd.broadcast_object(str(tmp_path / "model.keras"), 0)
        x, y = np.eye(2, dtype="float32"), np.array([[1.0], [-1.0]], "float32")
        if rank == 0:
            plain = model_with(Half(0.25, momentum=0.5))
            plain.fit(x, y, epochs=2, verbose=0)
            plain.save(path)
            plain.fit(x, y * (size - 1) / 2, epochs=2, verbose=0)
            expected = plain.get_weights()[0]
        expected = hvd.broadcast_object(expected if rank == 0 else None, 0)
        model = hvd.load_model(path, [Half], {"unused": Half}, hvd.Compression.none, False)
        assert isinstance(model.optimizer, Half)
        model.run_eagerly = True
        model.fit(x, y * rank, epochs=2, verbose=0)  # a gradient that is linear in y
        assert model.get_weights()[0] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        with pytest.raises(ArgumentError, match="distributed already"):
            hvd.DistributedOptimizer(model.optimizer)

    ranks(check)


def test_a_model_without_an_optimizer(tmp_path: Path) -> None:
    def check() -> None:
        path = tmp_path / "plain.keras"
        keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]).save(path)
        assert getattr(hvd.load_model(path), "optimizer", None) is None

    on_ranks(1, check)
