"""How a Keras training is distributed: the columns of the table. `Run` is one process, and each way changes some of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

import hvdlite_tf as hvd
from tests.one_process.keras_programs import PROGRAMS, ROWS, Program
from tests.one_process.rows import Inapplicable

_TOLERANCE = 3e-6 if keras.backend.backend() == "torch" else 1e-6
"""On torch Keras' gradients of float64 are off by 5e-8, also in one process (two halves of a batch and the whole)."""


class Run:
    """One training. This class trains in one process, on the joined batches.

    Args:
        rows: What the program does.
        seed: Of the weights.
    """

    words = ""
    ranks = 1
    tolerance = _TOLERANCE
    alone: type[Run]

    def __init__(self, rows: Sequence[Program], seed: int = 0) -> None:
        self.rows, self.seed = rows, seed
        self.logs: list[Any] = []
        self.start()

    # The parts that ways change

    def start(self) -> None:
        self.model = self.make_model()
        self.compile()

    def wrap(self, optimizer: Any) -> Any:
        return optimizer

    def own(self, data: Any) -> Any:
        """Return this rank's rows of each batch."""
        return data

    @property
    def batch_size(self) -> int:
        return ROWS

    def callbacks(self) -> list[Any]:
        return []

    def fit(self, epochs: int) -> None:
        callbacks = [*self.callbacks(), *(found for row in self.rows for found in row.callbacks(self))]
        x, y, weights = (self.own(self.data(name)) for name in ("x", "y", "weights"))
        fitted = {name: value for row in self.rows for name, value in row.fitted.items()}
        history = self.model.fit(
            x,
            y,
            sample_weight=weights,
            batch_size=self.batch_size,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
            **fitted,
        )
        self.logs.append({name: values for name, values in history.history.items() if name != "learning_rate"})

    def evaluate(self) -> Any:
        return self.model.evaluate(
            self.own(self.data("x")), self.own(self.data("y")), batch_size=self.batch_size, verbose=0
        )

    def predict(self) -> Any:
        return self.model.predict(self.data("x"), batch_size=ROWS, verbose=0)

    def scale(self) -> Any:
        return keras.ops.convert_to_numpy(self.model.optimizer.dynamic_scale)

    def freeze_last_layer(self) -> None:
        self.model.layers[-1].trainable = False

    def resume_from_checkpoint(self) -> None: ...

    def weights(self) -> dict[str, Any]:
        return {str(number): value for number, value in enumerate(self.model.get_weights())}

    def finish(self) -> None: ...

    # What is the same everywhere

    def make_model(self) -> Any:
        return keras.Sequential([*self.pick("first")(self.seed), *self.pick("second")(self.seed)[1:]])

    def pick(self, name: str) -> Any:
        """Return the attribute of the row that has its own, or the common one."""
        own = [row for row in self.rows if getattr(type(row), name) is not getattr(Program, name)]
        return getattr((own or self.rows)[0], name)

    def data(self, name: str) -> Any:
        common = getattr(Program, name)
        return next((own for row in self.rows if (own := getattr(row, name)) is not common), common)

    def compile(self) -> None:
        settings = {name: value for row in self.rows for name, value in row.settings.items()}
        make = self.pick("optimizer")
        make.__self__.settings = settings
        compiled = {name: value for row in self.rows for name, value in row.compiled.items()}
        self.model.compile(self.wrap(make()), self.pick("loss"), **compiled)

    def another(self) -> Run:
        return type(self)(self.rows, self.seed + 10)


Run.alone = Run


class Distributed(Run):
    """Several ranks. As in one process, all give the whole batches."""

    ranks = 2

    def resume_from_checkpoint(self) -> None:
        folder = hvd.broadcast_object(tempfile.mkdtemp(prefix="hvdlite-one-process-"))
        hvd.checkpoint.save(folder, model=self.model, optimizer=self.model.optimizer)
        self.seed += 7
        self.start()
        hvd.checkpoint.load(folder, model=self.model, optimizer=self.model.optimizer)


class Fit(Distributed):
    """`fit` with a distributed optimizer and the callback that does everything: each rank gives its own rows."""

    options: dict[str, Any] = {}

    def wrap(self, optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, **self.options, **self.op)

    @property
    def op(self) -> dict[str, Any]:
        """What the program says about the loss: gradients of sums are added up."""
        return {"op": hvd.Sum} if any(row.name == "a sum over rows" for row in self.rows) else {}

    def make_model(self) -> Any:
        for row in self.rows:
            if hasattr(row, "normalization"):
                if keras.backend.backend() == "torch":
                    raise Inapplicable("SyncBatchNormalization needs TensorFlow: docs/keras.md")
                row.normalization = hvd.SyncBatchNormalization
        return super().make_model()

    def own(self, data: Any) -> Any:
        if data is None:
            return None
        rank, size = hvd.rank(), hvd.size()
        parts = [data[first : first + ROWS] for first in range(0, len(data), ROWS)]
        return np.concatenate([part[len(part) * rank // size : len(part) * (rank + 1) // size] for part in parts])

    @property
    def batch_size(self) -> int:
        return ROWS // hvd.size()

    def callbacks(self) -> list[Any]:
        return [hvd.callbacks.Distributed()]

    def evaluate(self) -> Any:
        own = super().evaluate()  # of this rank's rows: docs/keras.md
        return np.mean(hvd.allgather_object(own), axis=0)


class Sharded(Fit):
    words = "shard"
    options = {"shard": True}


class Compressed(Fit):
    words = "compress|fp16"
    options = {"compression": hvd.Compression.fp16}
    tolerance = 3e-3


class TopK(Fit):
    """Everything is sent, so nothing is lost."""

    words = "topk|TopK|aggregator|compress"

    def wrap(self, optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.topk(1.0), **self.op)


class LocalSteps(Fit):
    """One local step: for plain SGD that is training with averaged gradients."""

    words = "local"
    options = {"local_steps": hvd.LocalSGD(every=1)}


class AsyncSync(Fit):
    """The parameter server, in step."""

    words = "async|Async|server|push"

    def wrap(self, optimizer: Any) -> Any:
        return hvd.AsyncDistributedOptimizer(optimizer, self.model, mode="sync")

    def callbacks(self) -> list[Any]:
        return []

    def fit(self, epochs: int) -> None:
        super().fit(epochs)
        everybody = hvd.allgather_object(self.logs.pop())  # each rank's are its own
        means = [name for name in everybody[0] if name in ("loss", "mae")]  # over rows: not roots, nor means by weights
        self.logs.append({name: np.mean([logs[name] for logs in everybody], axis=0) for name in means})


class Tape(Fit):
    """A loop of the program's own: eager, with a distributed tape and a plain optimizer."""

    words = "tape|Tape|gradient"

    def wrap(self, optimizer: Any) -> Any:
        return optimizer

    def fit(self, epochs: int) -> None:
        import tensorflow as tf  # Keras on torch needs none

        if any(row.compiled or row.fitted for row in self.rows) or any(row.callbacks(self) for row in self.rows):
            raise Inapplicable("a loop of one's own has no such argument")
        model, size = self.model, self.batch_size
        x, y, weights = (self.own(self.data(name)) for name in ("x", "y", "weights"))
        if len(self.data("x")) % ROWS:
            raise Inapplicable("the tape counts ranks alike: docs/keras.md")
        for _ in range(epochs):
            for first in range(0, len(x), size):
                part = slice(first, first + size)
                with hvd.DistributedGradientTape(tf.GradientTape(), **self.op) as tape:
                    output = model(x[part], training=True)
                    weight = None if weights is None else tf.constant(weights[part])
                    loss = model.compute_loss(x[part], tf.constant(y[part]), output, weight)
                    scaled = model.optimizer.scale_loss(loss)
                model.optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        model.optimizer.finalize_variable_values(model.trainable_variables)  # as fit does in the end


class Strategy(Distributed):
    """`hvd.Strategy`, and a plain optimizer."""

    words = "trategy"

    def start(self) -> None:
        self.strategy = hvd.Strategy()
        with self.strategy.scope():
            super().start()

    def compile(self) -> None:
        with self.strategy.scope():
            super().compile()


class Pipelined(Distributed):
    words = "ipeline|stage"

    def start(self) -> None:
        self.grid = hvd.ProcessGrid(dp=1, pp=2)
        stages = [lambda part=part: keras.Sequential(self.pick(part)(self.seed)) for part in ("first", "second")]
        self.model = hvd.Pipeline(stages, microbatches=2, process_set=self.grid["pp"])
        self.compile()

    def wrap(self, optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, process_set=self.grid["dp"])

    def freeze_last_layer(self) -> None:
        if hvd.rank() == hvd.size() - 1:
            self.model.stage.layers[-1].trainable = False

    def weights(self) -> dict[str, Any]:
        values = [value for stage in self.model.full_weights() for value in stage]
        return {str(number): value for number, value in enumerate(values)}


WAYS: dict[str, type[Run]] = {
    "fit": Fit,
    "fit, shard": Sharded,
    "fit, fp16": Compressed,
    "fit, topk(1.0)": TopK,
    "fit, local steps": LocalSteps,
    "fit, async sync": AsyncSync,
    "tape": Tape,
    "strategy": Strategy,
    "pipeline": Pipelined,
}


def results(run: type[Run], names: Iterable[str]) -> dict[str, Any]:
    """Return the weights, the logs, and what else the rows compare, after a training."""
    rows = [PROGRAMS[name]() for name in names]
    keras.utils.set_random_seed(0)
    training = run(rows)
    training.pick("program")(training)
    training.finish()
    found = dict(training.weights())
    for number, logs in enumerate(training.logs):
        found |= {f"log {number} {name}": np.asarray(values) for name, values in logs.items()}
    for row in rows:
        found |= row.more(training)
    return found


def distance(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference of two results; infinity where a name is missing. A loop of one's own has no logs."""
    names = [name for name in wanted if name in got or not name.startswith("log ")]
    if any(name not in got for name in names):
        return float("inf")
    # Keras keeps what it logs in float32.
    factors = [1e-4 if name.startswith("log ") else 1.0 for name in names]
    return max(_off(got[name], wanted[name]) * factor for name, factor in zip(names, factors, strict=True))


def _off(one: Any, other: Any) -> float:
    one, other = np.asarray(one, float), np.asarray(other, float)
    if one.shape != other.shape or (np.isnan(one) != np.isnan(other)).any():
        return float("inf")
    return float(np.nan_to_num(np.abs(one - other)).max(initial=0.0))


def clean_up() -> None:
    """Leave nothing of a training behind, so that the next one begins as in a new job."""
    hvd.shutdown()
    hvd.init()


def go_together(one: str, other: str) -> bool:
    """Return whether a program can do both. Two rows that change the same thing cannot be one program."""
    changes = ("first", "second", "optimizer", "loss", "x", "y", "weights", "program", "between")
    first, second = PROGRAMS[one], PROGRAMS[other]

    def own(row: Any, name: str) -> bool:
        return getattr(row, name) is not getattr(Program, name)

    both = [name for name in changes if own(first, name) and own(second, name)]
    settings = [row for row in (first, second) if row.settings]
    return one != other and not both and not (settings and any(own(row, "optimizer") for row in (first, second)))
