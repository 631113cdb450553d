"""Train a small convolutional network on handwritten digits with a custom TensorFlow loop, on any number of processes.

    hvdliterun -np 2 python examples/tf_custom_loop.py

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. Each step is a tf.function, in which the gradient tape returns
the combined gradients of all ranks. The ranks divide each batch among them, evenly or not, so the result does not depend on
the number of ranks. At the end, rank 0 prints the accuracy on the test images, and whether all ranks have identical weights.
The comment "hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tqdm import tqdm

import hvdlite_tf as hvd


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8, 1) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images / 16).astype("float32").reshape(-1, 8, 8, 1)[order], labels[order].astype("int32")


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPool2D()),
            *(layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPool2D()),
            *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    hvd.init()  # hvd
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    cores = max(1, (os.cpu_count() or 1) // hvd.local_size())  # hvd: the ranks share the cores
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    images, labels = load()
    train, test = slice(0, 1437), slice(1437, None)
    model = network()
    starts = range(0, 1437, arguments.batch_size)
    schedule = keras.optimizers.schedules.CosineDecay(arguments.lr, arguments.epochs * len(starts))
    optimizer = keras.optimizers.Adam(schedule)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)  # hvd: equal start on all ranks

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int32), tf.TensorSpec([])])
    def step(batch: Any, truth: Any, mean_share: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(truth, model(batch, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / mean_share  # hvd: its average over the ranks is the mean loss
        tape = hvd.DistributedGradientTape(tape)  # hvd: combines the gradients of all ranks
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    shuffle = np.random.default_rng(1)  # the same batches on every rank …
    with tqdm(total=arguments.epochs, unit="epoch", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for _ in range(arguments.epochs):
            order = shuffle.permutation(1437)
            for start in starts:
                batch = order[start : start + arguments.batch_size]
                mine = batch[hvd.rank() :: hvd.size()]  # hvd: … and each rank takes its share
                loss = step(images[train][mine], labels[train][mine], len(batch) / hvd.size())
            progress.set_postfix(loss=f"{float(loss):.3f}")
            progress.update()

    mine = np.arange(len(labels))[test][hvd.rank() :: hvd.size()]
    right = np.argmax(model(images[mine]), 1) == labels[mine]
    counts = hvd.allreduce(tf.constant([right.sum(), len(mine)]), op=hvd.Sum).numpy()  # hvd: over all test images
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    everybody = hvd.allgather_object(weights)  # hvd
    if hvd.rank() == 0:
        same = all(np.array_equal(weights, other) for other in everybody)
        print(f"test accuracy: {100 * counts[0] / counts[1]:.2f} % of {counts[1]} images")
        print(f"weights: {'identical' if same else 'DIFFERENT'} on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")


if __name__ == "__main__":
    main()
