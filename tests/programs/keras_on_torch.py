"""Keras on torch: training on several ranks equals training in one process on the joined batch."""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import hvdlite_tf as hvd

torch.set_num_threads(1)
rng = np.random.default_rng(7)
BATCHES, ROWS = 4, 12
X = rng.standard_normal((BATCHES, ROWS, 10)).astype("float32")
Y = rng.integers(0, 4, (BATCHES, ROWS))
WEIGHTS = [rng.standard_normal(shape).astype("float32") * 0.3 for shape in [(10, 16), (16,), (16, 4), (4,)]]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "all settings": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.02, decay_steps=4, decay_rate=0.8),
        weight_decay=1e-2,
        global_clipnorm=0.05,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
    "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.01, gradient_accumulation_steps=2),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
}


def make_model(optimizer: Any, scale: float = 1.0, **options: Any) -> Any:
    layers = [keras.layers.Input((10,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    model.set_weights([weights * scale for weights in WEIGHTS])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": optimizer, "loss": loss, "metrics": ["accuracy"]} | options)
    return model


def fit(model: Any, rank: int, size: int, epochs: int = 3, batches: int = BATCHES, **options: Any) -> Any:
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    x, y = X[:batches, rows].reshape(-1, 10), Y[:batches, rows].reshape(-1)
    return model.fit(x, y, batch_size=ROWS // size, epochs=epochs, shuffle=False, verbose=0, **options).history


def flat(model: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


def deviation(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got), np.asarray(expected)
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def show(what: str, model: Any, value: float) -> None:
    """Print the largest deviation of all ranks, and whether all ranks have the same weights."""
    same = len({each.tobytes() for each in hvd.allgather_object(flat(model))}) == 1
    values = hvd.allgather_object(value)
    if hvd.rank() == 0:
        print(f"{what}: {max(values):.1e} {'alike' if same else 'different'}")


def alone(make: Callable[[], Any], epochs: int = 3, batches: int = BATCHES) -> Any:
    model = make_model(make())
    return model, fit(model, 0, 1, epochs, batches)


hvd.init()
rank, size = hvd.rank(), hvd.size()
for name, make in OPTIMIZERS.items():
    expected, history = alone(make)
    # Ranks begin with different weights. The callback replaces them by the weights of rank 0.
    model = make_model(hvd.DistributedOptimizer(make()), scale=1.0 + rank)
    found = fit(model, rank, size, callbacks=[hvd.callbacks.Distributed()])
    show(name, model, deviation(flat(model), flat(expected)))
    show(f"{name}, loss", model, deviation(found["loss"], history["loss"]))

# All that travels in few bytes, with settings by which nothing is lost.
FEW_BYTES: dict[str, Callable[[], dict[str, Any]]] = {
    "topk of all": lambda: {"compression": hvd.Compression.topk(1.0, smallest=0)},
    "LocalSGD of each step": lambda: {"local_steps": hvd.LocalSGD(every=1)},
    "DiLoCo of each step": lambda: {"local_steps": hvd.DiLoCo(every=1, outer=keras.optimizers.SGD(1.0))},
}
expected, _ = alone(lambda: keras.optimizers.SGD(0.1))
for name, options in FEW_BYTES.items():
    model = make_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options()), scale=1.0 + rank)
    fit(model, rank, size, callbacks=[hvd.callbacks.Distributed()])
    show(name, model, deviation(flat(model), flat(expected)))

# torch's compiler must find the method that exchanges gradients in the step. The backend "eager" needs no C++ compiler.
# It takes longer than all of the rest, so it sees one optimizer, and no metrics.
compiled, torch.compile = torch.compile, functools.partial(torch.compile, backend="eager")
expected, _ = alone(OPTIMIZERS["adam"])
model = make_model(hvd.DistributedOptimizer(OPTIMIZERS["adam"]()), scale=1.0 + rank, jit_compile=True, metrics=[])
fit(model, rank, size, callbacks=[hvd.callbacks.Distributed()])
show("adam, compiled", model, deviation(flat(model), flat(expected)))
torch.compile = compiled

# Rank 0 has all batches, and the others have one less: rank 0 makes the last step alone.
expected = make_model(keras.optimizers.SGD(0.1))
mine = slice(0, ROWS // size)
for _, batch in itertools.product(range(2), range(BATCHES)):
    rows = mine if batch == BATCHES - 1 else slice(0, ROWS // size * size)
    expected.train_on_batch(X[batch, rows], Y[batch, rows])
model = make_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
fit(model, rank, size, 2, BATCHES if rank == 0 else BATCHES - 1, callbacks=[hvd.callbacks.Distributed()])
show("uneven", model, deviation(flat(model), flat(expected)))

# Three batches in an epoch, and two for an update: the sum of the third one goes over to the next epoch, or the next `fit`.
BETWEEN = OPTIMIZERS["accumulating"]
expected, _ = alone(BETWEEN, 2, 3)
model = make_model(hvd.DistributedOptimizer(BETWEEN()))
fit(model, rank, size, 2, 3, callbacks=[hvd.callbacks.Distributed()])
show("between two updates", model, deviation(flat(model), flat(expected)))
model = make_model(hvd.DistributedOptimizer(BETWEEN()))
for _ in range(2):
    fit(model, rank, size, 1, 3, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
show("fit twice between two updates", model, deviation(flat(model), flat(expected)))

# A missing gradient counts as zero. Gradients are summed over passes and averaged over ranks.
variables = [keras.Variable([0.0]), keras.Variable([0.0])]
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
for number in [1.0, 2.0]:
    optimizer.apply([torch.tensor([number]), torch.tensor([number]) if rank == 0 else None], variables)
got = [float(variable.numpy()[0]) for variable in variables]
show("missing gradients", model, deviation(got, [-3.0, -3.0 / size]))

# The applied gradient is clipped. The program's gradient does not change.
variables, gradient = [keras.Variable([0.0])], torch.tensor([4.0 + rank])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=1.0), compression=hvd.Compression.bf16)
optimizer.apply([gradient], variables)
show("clipping", model, deviation([float(variables[0].numpy()[0]), float(gradient[0])], [-1.0, 4.0 + rank]))

# Each rank has the weight of its number of samples.
variables = [keras.Variable([0.0])]
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
optimizer.set_batch_weight(rank)
optimizer.apply([torch.tensor([float(rank)])], variables)
weighted = sum(other * other for other in range(size)) / sum(range(size))
show("weights", model, deviation(variables[0].numpy(), [-weighted]))

# The ranks have data of different kinds, which is an error.
model = make_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
labels = torch.tensor(Y[0]) if rank == 0 else torch.tensor(Y[0])[:, None]
try:
    model.fit(torch.tensor(X[0]), labels, verbose=0, callbacks=[hvd.callbacks.Distributed()])
    refused = False
except hvd.MismatchError as error:
    refused = "data of different kinds" in str(error)
show("different data", model, 0.0 if refused else 1.0)

# A parameter server: the mean of all ranks, then each rank's pushes, whose sum is what the variable changes by.
expected, _ = alone(OPTIMIZERS["adam"])
model = make_model("sgd", scale=1.0 + rank)
optimizer = hvd.AsyncDistributedOptimizer(OPTIMIZERS["adam"](), model, mode="sync")
model.compile(optimizer, loss=model.loss)
fit(model, rank, size)
optimizer.finish()
show("server", model, deviation(flat(model), flat(expected)))
variables = [keras.Variable([0.0]), keras.Variable([[0.0, 1.0]])]
with hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(1.0), variables, push_every=2) as optimizer:
    for number in [1.0, 2.0, 3.0]:
        optimizer.apply(
            [torch.tensor([number]), torch.tensor([[number + rank, 0.0]]) if number == 3 else None], variables
        )
got = [*variables[0].numpy(), *variables[1].numpy()[0]]
show("servers", model, deviation(got, [-6.0 * size, -sum(3.0 + other for other in range(size)), 1.0]))
