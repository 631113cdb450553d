"""Train a small convolutional network on handwritten digits with Keras, on any number of processes.

    hvdliterun -np 2 python examples/keras_digits.py

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. Each rank trains on its share of the data, with its share of the
batch size. At the end, rank 0 prints the accuracy on the test images, and whether all ranks have identical weights. The comment
"hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides the start messages of TensorFlow on every rank

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdlite_tf as hvd


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8, 1) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16).astype("float32").reshape(-1, 8, 8, 1), labels[order]


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--checkpoint", help="where to save the model after each epoch, such as digits.keras")
    arguments = parser.parse_args()

    hvd.init()  # hvd
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    tf.config.threading.set_intra_op_parallelism_threads(
        max(1, (os.cpu_count() or 1) // hvd.local_size())  # hvd: the ranks share the cores
    )
    images, labels = load()
    mine = slice(hvd.rank(), 1437, hvd.size())  # hvd: this rank's share of the training data
    test = slice(1437 + hvd.rank(), None, hvd.size())  # hvd: and of the test data

    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(arguments.lr))  # hvd: the one line
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    model.fit(
        images[mine],
        labels[mine],
        batch_size=max(1, arguments.batch_size // hvd.size()),  # hvd
        epochs=arguments.epochs,
        validation_data=(images[test], labels[test]),
        verbose=2,
        callbacks=[
            hvd.callbacks.Distributed(checkpoint=arguments.checkpoint),  # hvd: same start, joint metrics, uneven data
            hvd.callbacks.LearningRateWarmupCallback(arguments.lr, warmup_epochs=2),  # hvd
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=2, min_delta=1e-3),
        ],
    )

    right = model.predict(images[test], verbose=0).argmax(1) == labels[test]
    counts = hvd.allreduce(tf.constant([right.sum(), len(right)]), op=hvd.Sum)  # hvd: over all test images
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    everybody = hvd.allgather(tf.constant(weights[None])).numpy()  # hvd
    if hvd.rank() == 0:
        same = bool((everybody == everybody[0]).all())
        print(f"test accuracy: {100 * counts[0] / counts[1]:.2f} % of {counts[1]} images")
        print(f"weights: {'identical' if same else 'DIFFERENT'} on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")


if __name__ == "__main__":
    main()
