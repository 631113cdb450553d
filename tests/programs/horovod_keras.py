"""A Keras script as users wrote it for Horovod, limited to what hvdlite supports. The script does not mention hvdlite."""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(1).permutation(len(labels))
images, labels = images[order] / 16, labels[order]
share = slice(hvd.rank(), 1436, hvd.size())

# As in Horovod's examples, the model has no weights before its first batch.
model = tf.keras.Sequential([tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10, "softmax")])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.003 * hvd.size()))
model.compile(
    loss="sparse_categorical_crossentropy",
    optimizer=optimizer,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
model.fit(
    images[share],
    labels[share],
    batch_size=32,
    epochs=8,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
plain = tf.keras.optimizers.SGD(0.1)
plain.build(model.trainable_variables)
if callable(plain.variables):  # a method of all optimizers of Horovod's time, a property of tf_keras' newer ones
    hvd.broadcast_variables(plain.variables(), root_rank=0)
_, accuracy = model.evaluate(images[1437:], labels[1437:], verbose=0)
weights = hvd.allgather(np.concatenate([weight.ravel() for weight in model.get_weights()])[None]).numpy()
if hvd.rank() == 0:
    same = bool((weights == weights[0]).all())
    print(f"ranks {hvd.size()} accuracy {accuracy:.4f} models {1 if same else 'differ'}")
