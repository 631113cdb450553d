"""TensorFlow scripts as users wrote them for Horovod, one after the other. The scripts do not mention hvdlite."""

import sys

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(1).permutation(len(labels))
images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
share = slice(hvd.rank(), 1436, hvd.size())
test_images, test_labels = images[1437:], labels[1437:]


def report(name, predictions, weights):
    accuracy = np.mean(np.argmax(predictions, 1) == test_labels)
    accuracy = hvd.allreduce(tf.constant(accuracy), name="accuracy of " + name, op=hvd.Average).numpy()
    digests = hvd.allgather_object(b"".join(weight.tobytes() for weight in weights))
    if hvd.rank() == 0:
        print(f"{name}: ranks {hvd.size()} accuracy {accuracy:.4f} models {len(set(digests))}", flush=True)


def build():
    tf.keras.utils.set_random_seed(hvd.rank())  # so that the broadcast has something to do
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((64,)),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dropout(0.1),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )


def tape_loop():
    dataset = tf.data.Dataset.from_tensor_slices((images[share], labels[share])).repeat().shuffle(1000).batch(32)
    model = build()
    loss_object = tf.losses.SparseCategoricalCrossentropy()
    optimizer = tf.optimizers.Adam(0.002 * hvd.size())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    @tf.function
    def training_step(batch, truth, first_batch):
        with tf.GradientTape() as tape:
            probabilities = model(batch, training=True)
            loss_value = loss_object(truth, probabilities)
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
        gradients = tape.gradient(loss_value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
        if first_batch:
            hvd.broadcast_variables(model.variables[:4], root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss_value

    for batch, (data, truth) in enumerate(dataset.take(400 // hvd.size())):
        training_step(data, truth, batch == 0)
    if hvd.rank() == 0:
        checkpoint.save(sys.argv[1] + "/tape")
    report("tape", model(test_images), model.get_weights())


def keras_fit():
    model = build()
    scaled_lr = 0.002 * hvd_keras.size()
    optimizer = hvd_keras.DistributedOptimizer(
        tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=0),
        hvd_keras.callbacks.LearningRateScheduleCallback(initial_lr=scaled_lr, multiplier=0.5, start_epoch=4),
    ]
    if hvd_keras.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(sys.argv[1] + "/model.keras"))
    history = model.fit(images[share], labels[share], batch_size=32, epochs=6, verbose=0, callbacks=callbacks)
    losses = hvd.allgather(tf.constant(history.history["loss"])[None])
    assert (losses.numpy() == losses.numpy()[0]).all()  # the callback has averaged them
    hvd.broadcast(tf.zeros(1), 0)  # wait until rank 0 has written the file
    report("keras", model.predict(test_images, verbose=0), model.get_weights())
    loaded = hvd_keras.load_model(sys.argv[1] + "/model.keras")
    assert np.isclose(float(loaded.optimizer.learning_rate), scaled_lr / 2)
    loaded.fit(images[share], labels[share], batch_size=32, verbose=0)
    report("loaded", loaded.predict(test_images, verbose=0), loaded.get_weights())


class KeepWeights(tf.compat.v1.train.SessionRunHook):
    def __init__(self, variables):
        self.variables = variables

    def end(self, session):
        self.values = session.run(self.variables)


def session():
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        tf1.set_random_seed(hvd.rank())
        image, label = tf1.placeholder(tf.float32, [None, 64]), tf1.placeholder(tf.int64, [None])
        first = tf1.get_variable("first", [64, 64])
        second = tf1.get_variable("second", [64, 10])
        logits = tf.matmul(tf.nn.relu(tf.matmul(image, first)), second)
        loss = tf1.losses.sparse_softmax_cross_entropy(label, logits)
        optimizer = hvd.DistributedOptimizer(tf1.train.AdamOptimizer(0.002 * hvd.size()), op=hvd.Average)
        global_step = tf1.train.get_or_create_global_step()
        train_op = optimizer.minimize(loss, global_step=global_step)
        weights = KeepWeights([first, second])
        stop = tf1.train.StopAtStepHook(last_step=400 // hvd.size())
        hooks = [hvd.BroadcastGlobalVariablesHook(0), stop, weights]
        checkpoint_dir = sys.argv[1] + "/session" if hvd.rank() == 0 else None
        random = np.random.default_rng(hvd.rank())
        own_images, own_labels = images[share], labels[share]
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks) as mon_sess:
            while not mon_sess.should_stop():
                rows = random.integers(len(own_labels), size=32)
                mon_sess.run(train_op, {image: own_images[rows], label: own_labels[rows]})
    one, two = weights.values
    report("session", np.maximum(test_images @ one, 0) @ two, weights.values)


tape_loop()
keras_fit()
session()
