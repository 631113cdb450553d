"""Classify images of digits with Keras. `hvd.shard` gives each rank its share of each batch.

hvdliterun -np 2 python examples/cookbook/vision_keras.py
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import hvdlite_tf as hvd

hvd.init()
images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))  # the same on all ranks
images, labels = (images[order] / 16).astype("float32").reshape(-1, 8, 8, 1), labels[order]
data = tf.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
data = hvd.shard(data.shuffle(1437, seed=0).batch(64), by="batches")

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        *(layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D()),
        *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.Flatten(), layers.Dense(10)),
    ]
)
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(3e-3)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(data, epochs=6, verbose=2, callbacks=[hvd.callbacks.Distributed()])

mine = slice(1437 + hvd.rank(), None, hvd.size())
right = (model.predict(images[mine], verbose=0).argmax(1) == labels[mine]).sum()
right = hvd.allreduce(tf.constant(right), op=hvd.Sum)
if hvd.rank() == 0:
    print(f"{right} of {len(labels) - 1437} test images are right")
