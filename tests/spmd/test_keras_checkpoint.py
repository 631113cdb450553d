"""`hvd.checkpoint` with Keras: a model that is made anew and loaded trains on as the one that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = X[:, :1] * 2
OPTIONS: dict[str, Any] = {
    "plain": dict,
    "powersgd": lambda: {"compression": hvd.Compression.powersgd(rank=1)},
    "diloco": lambda: {"local_steps": hvd.DiLoCo(every=2)},
}


def make(kerases: Any, options: str, width: int = 7) -> Any:
    first = kerases.layers.Input((5,)) if kerases is keras else kerases.layers.InputLayer((5,))
    start = [kerases.initializers.RandomNormal(seed=seed) for seed in (1, 2)]
    layers = [
        kerases.layers.Dense(width, kernel_initializer=start[0]),
        kerases.layers.Dense(1, kernel_initializer=start[1]),
    ]
    model = kerases.Sequential([first, *layers])
    model.compile(hvd.DistributedOptimizer(kerases.optimizers.Adam(0.01), **OPTIONS[options]()), loss="mse")
    return model


def train(model: Any, epochs: int) -> None:
    whole = isinstance(model.distribute_strategy, hvd.Strategy)
    mine = slice(None) if whole else slice(hvd.rank(), None, hvd.size())
    model.fit(X[mine], Y[mine], batch_size=4, epochs=epochs, verbose=0, shuffle=False)


def made(kerases: Any, options: str) -> Any:
    """A compiled model; of a strategy, made within its scope."""
    if options != "strategy":
        return make(kerases, options)
    with hvd.Strategy().scope():
        model = make(kerases, "plain")
        model.compile(kerases.optimizers.Adam(0.01), loss="mse")
    return model


@pytest.mark.costly
@pytest.mark.parametrize("options", ["tf_keras", "strategy", *OPTIONS])
def test_training_goes_on_exactly(ranks: Any, tmp_path: Path, options: str) -> None:
    kerases = keras
    if options == "tf_keras":
        kerases, options = pytest.importorskip("tf_keras", reason="tf_keras is not installed"), "plain"

    def check() -> None:
        folder = Path(hvd.broadcast_object(str(tmp_path)))
        model = made(kerases, options)
        train(model, 2)
        if options == "diloco":
            model.optimizer.average_parameters()
        hvd.checkpoint.save(folder, model=model, epoch=2)
        train(model, 1)
        resumed = made(kerases, options)  # its optimizer has no variables yet, and loading makes them out of the scope
        found = hvd.checkpoint.load(folder, model=resumed)
        assert found == {"epoch": 2}
        train(resumed, 1)
        for one, other in zip(model.get_weights(), resumed.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        other = make(kerases, "plain" if options == "strategy" else options, width=8)
        with pytest.raises(
            ArgumentError, match=r"the model was another one .* of shape \(5, 7\), and here .* \(5, 8\)"
        ):
            hvd.checkpoint.load(folder, model=other)
        with pytest.raises(ArgumentError, match="has no weights yet"):
            hvd.checkpoint.save(folder, model=kerases.Sequential([kerases.layers.Dense(1)]))

    ranks(check)
