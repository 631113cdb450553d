"""Train a small network on handwritten digits with NumPy alone, on any number of processes.

    hvdliterun -np 2 python examples/numpy_digits.py

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. The ranks divide each batch among them, also the smaller last
batch, so the result does not depend on the number of ranks. At the end, rank 0 prints the accuracy on the test images, and
whether all ranks have identical weights. The comment "hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import hvdlite as hvd

Weights = dict[str, np.ndarray]


def initial_weights(random: np.random.Generator) -> Weights:
    return {
        "hidden": random.normal(0, 1 / 8, (64, 64)),
        "hidden_bias": np.zeros(64),
        "output": random.normal(0, 1 / 8, (64, 10)),
        "output_bias": np.zeros(10),
    }


def predict(weights: Weights, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of the hidden layer for images (n, 64), and the probabilities of the ten digits (n, 10)."""
    hidden = np.maximum(images @ weights["hidden"] + weights["hidden_bias"], 0)
    scores = hidden @ weights["output"] + weights["output_bias"]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    return hidden, chances / chances.sum(1, keepdims=True)


def gradient(weights: Weights, images: np.ndarray, labels: np.ndarray) -> Weights:
    """Return the gradient of the mean cross-entropy."""
    hidden, chances = predict(weights, images)
    wrong = (chances - np.eye(10)[labels]) / max(1, len(labels))
    back = (wrong @ weights["output"].T) * (hidden > 0)
    return {
        "hidden": images.T @ back,
        "hidden_bias": back.sum(0),
        "output": hidden.T @ wrong,
        "output_bias": wrong.sum(0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()

    hvd.init()  # hvd
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order] / 16, labels[order]
    weights = initial_weights(np.random.default_rng(1))  # the same seed, so equal weights on all ranks
    velocity = {name: np.zeros_like(array) for name, array in weights.items()}
    combine = hvd.DistributedGradient(inplace=True)  # hvd: made once

    shuffle = np.random.default_rng(2)  # the same batches on every rank …
    for _ in range(arguments.epochs):
        order = shuffle.permutation(1437)
        for start in range(0, 1437, arguments.batch_size):
            batch = order[start : start + arguments.batch_size]
            mine = batch[hvd.rank() :: hvd.size()]  # hvd: … and each rank takes its share
            gradients = gradient(weights, images[mine], labels[mine])
            gradients = combine(gradients, weight=len(mine))  # hvd: shares may differ
            for name, array in gradients.items():
                velocity[name] = 0.9 * velocity[name] - arguments.lr * array
                weights[name] += velocity[name]

    mine = np.arange(1437, len(labels))[hvd.rank() :: hvd.size()]
    right = (predict(weights, images[mine])[1].argmax(1) == labels[mine]).sum()
    counts = hvd.allreduce(np.array([right, len(mine)]), op=hvd.Sum)  # hvd: over all test images
    everybody = hvd.allgather(np.concatenate([array.reshape(-1) for array in weights.values()])[None])  # hvd
    if hvd.rank() == 0:
        same = bool((everybody == everybody[0]).all())
        print(f"test accuracy: {100 * counts[0] / counts[1]:.2f} % of {counts[1]} images")
        print(f"weights: {'identical' if same else 'DIFFERENT'} on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")


if __name__ == "__main__":
    main()
