"""Measures the time that the gradient exchange adds to the steps of a Keras model's `fit`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

from benchmarks.checks import check_weights
from benchmarks.figures import in_turn, mpi_in_use, summary, until_all_are_done
from benchmarks.plan import ALONE, KERAS_STEPS, MULTI_WORKER, TF_KERAS_ALONE

BATCH = 64


@dataclass
class Variant:
    """A model in training.

    Attributes:
        model: The compiled model, of Keras or tf_keras.
        clock: The callback that measures the time of each step.
        dataset: The training data.
        passes: The number of batches in a step.
    """

    model: Any
    clock: Any
    dataset: Any
    passes: int = 1

    def fit(self) -> None:
        """Train for `KERAS_STEPS` steps."""
        options = {"steps_per_epoch": self.passes * KERAS_STEPS, "epochs": 1, "verbose": 0, "shuffle": False}
        self.model.fit(self.dataset, callbacks=[self.clock], **options)

    def weights(self) -> np.ndarray[Any, Any]:
        """Return all weights as one flat array."""
        return _flat(self.model)


def measure(names: Sequence[str], rounds: int, tiny: bool, progress: bool) -> dict[str, Any]:
    """Train all variants on this rank.

    Args:
        names: Names in `plan.KERAS_WORKLOADS`.
        rounds: The number of times that each variant makes `KERAS_STEPS` timed steps.
        tiny: Whether to use models with few parameters.
        progress: Whether rank 0 shows a progress bar.

    Returns:
        ``figures``: one entry for each workload and variant; ``skipped``: reasons by variant; ``mpi``: the result of
        `mpi_in_use`.
    """
    comm = MPI.COMM_WORLD
    skipped: dict[str, str] = {}
    strategy = _start_tensorflow(skipped)
    figures: list[dict[str, Any]] = []
    for name in names:
        widths = (784, 16, 10) if tiny else (784, 2048, 2048, 2048, 10)
        initial, variants, joined = _models(name, widths, strategy)
        start = initial.get_weights()
        for each in [*variants.values(), joined]:
            each.model.set_weights(start)
            each.fit()
        # Compare the changes of the weights since the start. The truth is one model that trains on the data of all ranks.
        truth = joined.weights() - _flat(initial)
        deviations = {variant: _distance(each.weights() - _flat(initial), truth) for variant, each in variants.items()}
        for turn in tqdm(range(rounds), name, unit="round", leave=False, disable=not progress or comm.rank > 0):
            for variant in in_turn(list(variants), turn):
                variants[variant].fit()
        spreads = {}
        for variant, each in variants.items():
            first = each.weights() - _flat(initial)
            comm.Bcast(first)
            spreads[variant] = _distance(each.weights() - _flat(initial), first)
        together = [variant for variant in variants if variant not in (ALONE, TF_KERAS_ALONE)]
        check_weights({f"{name}: {variant}, against the joined batch": deviations[variant] for variant in together})
        check_weights({f"{name}: {variant}, rank against rank": spreads[variant] for variant in together})
        results = {
            variant: summary(until_all_are_done(each.clock.seconds[KERAS_STEPS:])) for variant, each in variants.items()
        }
        for variant, figure in results.items():
            figures.append(
                {
                    **{"workload": name, "parameters": len(truth), "ranks": comm.size, "variant": variant},
                    **{**figure, "reference": ALONE, "ratio": figure["median"] / results[ALONE]["median"]},
                    **{"deviation": deviations[variant], "rank_spread": spreads[variant]},
                }
            )
    return {"figures": figures, "skipped": skipped, "mpi": mpi_in_use()}


def _start_tensorflow(skipped: dict[str, str]) -> Any:
    """Start TensorFlow with one thread for each rank. Return a MultiWorkerMirroredStrategy, or None without tf_keras.

    TensorFlow wants the strategy to be made before anything else.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    there = importlib.util.find_spec("tf_keras") is not None
    if there:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports = MPI.COMM_WORLD.allgather(server.getsockname()[1])
        workers = [f"127.0.0.1:{port}" for port in ports]
        task = {"type": "worker", "index": MPI.COMM_WORLD.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")  # no warnings of callbacks that are slower than a tiny model
    if not there:
        skipped |= dict.fromkeys(
            (MULTI_WORKER, TF_KERAS_ALONE), "tf_keras cannot be imported here (pip install tf_keras)"
        )
        return None
    return tf.distribute.MultiWorkerMirroredStrategy()


def _models(name: str, widths: Sequence[int], strategy: Any) -> tuple[Any, dict[str, Variant], Variant]:
    """Return a model with the initial weights, the variants, and a variant that trains on the batches of all ranks."""
    import keras

    import hvdlite_tf

    make: dict[str, Callable[..., Any]] = {
        "Keras MLP, SGD momentum": lambda optimizers, **more: optimizers.SGD(0.01, momentum=0.9, **more),
        "Keras MLP, Adam": lambda optimizers, **more: optimizers.Adam(1e-4, **more),
    }

    batches = [_batches(rank) for rank in range(MPI.COMM_WORLD.size)]
    own = _dataset(*batches[MPI.COMM_WORLD.rank])

    def trained(module: Any, optimizer: Any, dataset: Any = own) -> Variant:
        return Variant(_model(module, widths, optimizer), _clock(module), dataset)

    optimizer = make[name]
    keras.utils.set_random_seed(0)
    initial = _model(keras, widths, optimizer(keras.optimizers))
    variants = {
        ALONE: trained(keras, optimizer(keras.optimizers)),
        "hvdlite": trained(keras, hvdlite_tf.DistributedOptimizer(optimizer(keras.optimizers))),
        "hvdlite shard": trained(keras, hvdlite_tf.DistributedOptimizer(optimizer(keras.optimizers), shard=True)),
    }
    if strategy is not None:
        tf_keras = importlib.import_module("tf_keras")
        variants[TF_KERAS_ALONE] = trained(tf_keras, optimizer(tf_keras.optimizers))
        with strategy.scope():
            whole = strategy.distribute_datasets_from_function(lambda _: own)  # it divides no batch
            variants[MULTI_WORKER] = trained(tf_keras, optimizer(tf_keras.optimizers), whole)
    # One process sums the gradients of all batches in the order in which the ranks do: training magnifies rounding errors.
    size = len(batches)
    images, labels = (np.stack(each, 1).reshape(-1, *each[0].shape[1:]) for each in zip(*batches, strict=True))
    joined = trained(keras, optimizer(keras.optimizers, gradient_accumulation_steps=size), _dataset(images, labels))
    joined.passes = size
    return initial, variants, joined


def _model(module: Any, widths: Sequence[int], optimizer: Any) -> Any:
    layers = [module.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    model = module.Sequential([module.layers.Input((widths[0],)), *layers, module.layers.Dense(widths[-1])])
    model.compile(optimizer, module.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _clock(module: Any) -> Any:
    class Clock(module.callbacks.Callback):  # type: ignore[misc]  # Keras' or tf_keras'
        """Records the seconds of each step on this rank. All ranks begin each step together."""

        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            MPI.COMM_WORLD.Barrier()
            self._start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self._start)

    return Clock()


def _batches(rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the training data of a rank: images of shape ``(KERAS_STEPS, BATCH, 784)`` and their labels."""
    random = np.random.default_rng(1 + rank)
    images = random.standard_normal((KERAS_STEPS, BATCH, 784)).astype(np.float32)
    return images, random.integers(10, size=(KERAS_STEPS, BATCH))


def _dataset(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((images, labels)).repeat()


def _flat(model: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([weight.reshape(-1).astype(np.float64) for weight in model.get_weights()])


def _distance(way: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return the distance between two changes of the weights, relative to `other`: the largest of all ranks."""
    own = float(np.linalg.norm(way - other) / np.linalg.norm(other))
    return float(np.max(MPI.COMM_WORLD.allgather(own)))
