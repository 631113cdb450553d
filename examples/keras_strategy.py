"""Train a small convolutional network on handwritten digits with Keras 3 and a strategy of `tf.distribute`.

    hvdliterun -np 2 python examples/keras_strategy.py

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. The program is written as for one process. The strategy divides
each batch among the ranks, also the smaller last batch, so the result does not depend on the number of ranks. At the end,
rank 0 prints the accuracy on the test images, the number of wrong guesses, and whether all ranks have identical weights. The
comment "hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdlite_tf as hvd


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8, 1) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images / 16).astype("float32").reshape(-1, 8, 8, 1)[order], labels[order]


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            *(keras.layers.Conv2D(32, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()),
            keras.layers.BatchNormalization(momentum=0.9, synchronized=True),  # over the global batch
            *(keras.layers.Conv2D(64, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()),
            *(keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    hvd.init()  # hvd
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    cores = max(1, (os.cpu_count() or 1) // hvd.local_size())  # hvd: the ranks share the cores
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    keras.utils.set_random_seed(1)
    images, labels = load()
    train, test = slice(0, 1437), slice(1437, None)

    steps = arguments.epochs * -(-1437 // arguments.batch_size)
    schedule = keras.optimizers.schedules.CosineDecay(arguments.lr, steps)
    strategy = hvd.Strategy()  # hvd
    with strategy.scope():  # hvd: equal initial weights on all ranks
        model = network()
        model.compile(
            optimizer=keras.optimizers.Adam(schedule, global_clipnorm=1.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        images[train],
        labels[train],
        batch_size=arguments.batch_size,  # of all ranks together
        epochs=arguments.epochs,
        verbose=2 if hvd.rank() == 0 else 0,  # hvd: the metrics are over all ranks
    )
    accuracy = model.evaluate(images[test], labels[test], batch_size=arguments.batch_size, verbose=0)[1]
    guesses = model.predict(images[test], batch_size=arguments.batch_size, verbose=0).argmax(1)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    same = all(np.array_equal(weights, other) for other in hvd.allgather_object(weights))  # hvd
    if hvd.rank() == 0:
        print(f"test accuracy: {100 * accuracy:.2f} % of {len(guesses)} images")
        print(f"wrong guesses: {(guesses != labels[test]).sum()}")
        print(f"weights: {'identical' if same else 'DIFFERENT'} on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")


if __name__ == "__main__":
    main()
