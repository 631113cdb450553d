"""Train as people do in Keras: augmentation, validation, checkpoints, early stopping, TensorBoard, mixed precision.

    hvdliterun -np 2 python examples/keras_training.py --folder run --plot curve.png
    hvdliterun -np 2 python examples/keras_training.py --folder run --epochs 40    # resumes where it stopped
    tensorboard --logdir run

A convolutional network learns handwritten digits, which come with scikit-learn. Each rank takes its share of each batch, and
moves the images at random. All ranks validate together. Layers compute in bfloat16 (--no-mixed: float32).
The comment "hvd" marks the lines that hvdlite adds to
an ordinary program. `docs/keras_training.md` explains such a program piece by piece.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # fewer lines of TensorFlow's

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from tqdm import tqdm

import hvdlite_tf as hvd
from hvdlite_tf.keras import load_model


class Progress(keras.callbacks.Callback):
    """A progress bar with the metrics of all ranks."""

    def __init__(self, epochs: int, start: int) -> None:
        super().__init__()
        self.bar = tqdm(total=epochs, initial=start, unit="epoch")

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.bar.set_postfix(loss=f"{logs['val_loss']:.4f}", accuracy=f"{100 * logs['val_accuracy']:.1f} %")
        self.bar.update()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self.bar.close()


def make_model() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            *(layers.Input((8, 8, 1)), layers.RandomTranslation(0.125, 0.125, fill_mode="constant")),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Flatten(), layers.Dropout(0.2), layers.Dense(10, dtype="float32")),
        ]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(3e-3))  # hvd: the one line
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def plot(history: dict[str, list[float]], start: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots()
    epochs = range(start + 1, start + 1 + len(history["loss"]))
    panel.plot(epochs, history["loss"], label="training, moved images")
    panel.plot(epochs, history["val_loss"], label="validation, all ranks")
    panel.set(xlabel="epoch", ylabel="loss", title=f"digits on {hvd.size()} ranks")
    panel.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better loss before training stops")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="for the checkpoint and TensorBoard's files")
    parser.add_argument("--no-mixed", action="store_true", help="float32 everywhere, in place of bfloat16 in layers")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    arguments = parser.parse_args()

    hvd.init()  # hvd
    keras.utils.set_random_seed(0)  # the same order of rows and the same model on all ranks
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    rows, batch = 1437, arguments.batch_size
    train = tf.data.Dataset.from_tensor_slices((images[:rows], labels[:rows]))
    train = hvd.shard(train.shuffle(rows, seed=1).batch(batch, drop_remainder=True), by="batches")  # hvd: its share
    mine = slice(rows + hvd.rank(), None, hvd.size())  # hvd: each row on one rank
    test = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine])).batch(128)

    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32" if arguments.no_mixed else "mixed_bfloat16")
    file = arguments.folder / "model.keras"
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
        arguments.folder.mkdir(parents=True, exist_ok=True)
    found = hvd.rank() == 0 and file.exists()  # hvd: one rank reads, and all get it when fit begins
    model = load_model(str(file)) if found else make_model()
    start = hvd.broadcast_object(int(model.optimizer.iterations.numpy()), 0) // (rows // batch)  # hvd
    callbacks = [
        hvd.callbacks.Distributed(checkpoint=str(file)),  # hvd: the first in the list
        keras.callbacks.EarlyStopping("val_loss", patience=arguments.patience),
    ]
    if hvd.rank() == 0:  # hvd: one rank writes and draws
        callbacks += [keras.callbacks.TensorBoard(str(arguments.folder)), Progress(arguments.epochs, start)]
    keras.utils.set_random_seed(1000 + hvd.rank())  # hvd: dropout and moves differ between ranks
    fitted = model.fit(
        train,
        validation_data=test,
        epochs=arguments.epochs,
        initial_epoch=start,
        shuffle=False,  # the dataset does
        verbose=0,
        callbacks=callbacks,
    )
    keras.config.set_dtype_policy(policy)
    if hvd.rank() == 0 and fitted.history:
        done = start + len(fitted.history["loss"])
        why = "all epochs are done" if done == arguments.epochs else "no better loss for a while"
        print(f"epoch {done}: {why}; loss {fitted.history['val_loss'][-1]:.4f}")
        print(f"test accuracy: {100 * fitted.history['val_accuracy'][-1]:.2f} % of 360 images")
        if arguments.plot is not None:
            plot(fitted.history, start, arguments.plot)


if __name__ == "__main__":
    main()
