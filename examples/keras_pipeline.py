"""Train a convolutional network whose stages are on different ranks, in micro-batches, with Keras on TensorFlow.

    hvdliterun -np 2 python examples/keras_pipeline.py
    hvdliterun -np 4 python examples/keras_pipeline.py --dp 2           # two pipelines side by side
    hvdliterun -np 2 python examples/keras_pipeline.py --check --plot bubble.png

The data are the handwritten digits of scikit-learn: 1797 images of 8 × 8 pixels. At the end, rank 0 prints the accuracy on the
test images, and the share of the time in which the ranks waited for each other. --check computes in float64, trains the same
model in one process too, and compares the weights. --plot draws the time of a step by the number of micro-batches.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides the start messages of TensorFlow on every rank

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import hvdlite_tf as hvd

TRAIN, BLOCKS = 1408, 4  # whole batches of 64


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8, 1) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16).astype(keras.config.floatx()).reshape(-1, 8, 8, 1), labels[order]


def stage(place: int, places: int, width: int) -> keras.Model:
    """Return a stage of the model, with weights that are the same on every rank that makes it."""
    channels = 1 if place == 0 else width
    found: list[keras.layers.Layer] = [keras.Input((8, 8, channels))]
    for block in range(BLOCKS * place // places, BLOCKS * (place + 1) // places):
        seeded = keras.initializers.GlorotUniform(seed=block)
        found.append(layers.Conv2D(width, 3, padding="same", activation="relu", kernel_initializer=seeded))
    if place == places - 1:
        seeded = keras.initializers.GlorotUniform(seed=BLOCKS)
        found += [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10, kernel_initializer=seeded)]
    return keras.Sequential(found)


def batches(epochs: int, size: int) -> list[np.ndarray]:
    """Return the numbers of the images of each batch, the same on every rank."""
    shuffle = np.random.default_rng(1)
    return [batch for _ in range(epochs) for batch in np.split(shuffle.permutation(TRAIN), TRAIN // size)]


def make(arguments: argparse.Namespace, pipelines: hvd.ProcessSet, microbatches: int) -> hvd.Pipeline:
    places = pipelines.size()
    stages = [functools.partial(stage, place, places, arguments.width) for place in range(places)]
    return hvd.Pipeline(stages, microbatches, pipelines)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def draw(arguments: argparse.Namespace, pipelines: hvd.ProcessSet, images: np.ndarray, labels: np.ndarray) -> None:
    """Draw the time of a step by the number of micro-batches. Every rank calls this; rank 0 draws."""
    counts = [count for count in (1, 2, 4, 8, 16) if arguments.batch_size % count == 0]
    medians = []
    for count in counts:
        model = make(arguments, pipelines, count)
        model.compile("adam", loss())
        seconds = []
        for _ in range(8):
            begin = time.perf_counter()
            model.train_on_batch(images[: arguments.batch_size], labels[: arguments.batch_size])
            seconds.append(time.perf_counter() - begin)
        medians.append(1e3 * statistics.median(seconds[2:]))
    if hvd.rank() == 0:
        print(
            f"ms a step by micro-batches: {', '.join(f'{n}: {ms:.0f}' for n, ms in zip(counts, medians, strict=True))}"
        )
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        picture, axes = plt.subplots(layout="constrained")
        axes.plot(counts, medians, marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("micro-batches")
        axes.set_ylabel("median of a step, ms")
        axes.set_title(f"{pipelines.size()} stages, batches of {arguments.batch_size}")
        picture.savefig(arguments.plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="of each pipeline; a divisor of 1408 / dp")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="channels of the convolutions")
    parser.add_argument("--dp", type=int, default=1, help="pipelines side by side")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the time of a step by the number of micro-batches"
    )
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")
    if TRAIN % (arguments.batch_size * arguments.dp):
        parser.error(f"--batch-size {arguments.batch_size}: {TRAIN} images are not whole batches of all pipelines")

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(
        max(1, (os.cpu_count() or 1) // hvd.local_size())  # the ranks share the cores
    )
    grid = hvd.ProcessGrid(dp=arguments.dp, pp=-1)
    places = grid.axes["pp"]
    if places > BLOCKS:
        parser.error(f"{places} stages for {BLOCKS} blocks: start at most {BLOCKS * arguments.dp} ranks")
    if hvd.rank() == 0:
        print(grid, flush=True)
    if arguments.check:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
    images, labels = load()
    model = make(arguments, grid["pp"], arguments.microbatches)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3), process_set=grid["dp"])
    model.compile(optimizer, loss(), metrics=["accuracy"])
    work = batches(arguments.epochs, arguments.batch_size * arguments.dp)
    mine = np.concatenate([np.split(batch, arguments.dp)[grid.place["dp"]] for batch in work])
    # All epochs are one for Keras, so that each of them has an order of its own.
    model.fit(
        *(images[mine], labels[mine]),
        batch_size=arguments.batch_size,
        shuffle=False,
        verbose="auto" if hvd.rank() == 0 else 0,
        validation_data=(images[TRAIN:], labels[TRAIN:]),
    )
    weights, report = [weight for part in model.full_weights() for weight in part], model.report()
    right = (model.predict(images[TRAIN:], verbose=0).argmax(1) == labels[TRAIN:]).mean()
    if hvd.rank() == 0:
        print(report)
        print(f"test accuracy: {100 * right:.2f} % of {len(labels) - TRAIN} images")
    if arguments.check:
        alone = stage(0, 1, arguments.width)
        alone.compile(keras.optimizers.Adam(2e-3), loss())
        order = np.concatenate(work)
        size = arguments.batch_size * arguments.dp
        alone.fit(images[order], labels[order], batch_size=size, shuffle=False, verbose=0)
        away = max(np.abs(one - other).max() for one, other in zip(alone.get_weights(), weights, strict=True))
        same = (alone.predict(images[TRAIN:], verbose=0).argmax(1) == labels[TRAIN:]).mean()
        if hvd.rank() == 0:
            print(f"one process: {100 * same:.2f} %; weights differ by {away:.2g} at most")
    if arguments.plot:
        draw(arguments, grid["pp"], images, labels)


if __name__ == "__main__":
    main()
