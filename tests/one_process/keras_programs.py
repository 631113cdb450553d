"""What Keras programs do: the rows of the table, as parts of `compile` and `fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from tests.one_process.rows import Inapplicable, Row, row_adder

if TYPE_CHECKING:
    from tests.one_process.keras_ways import Run

BATCHES, ROWS, FEATURES, WIDTH, CLASSES, WORDS = 3, 12, 5, 8, 3, 7
_draw = np.random.default_rng(4)
X = _draw.standard_normal((BATCHES * ROWS, FEATURES))
Y = _draw.standard_normal((BATCHES * ROWS, CLASSES)) + 0.5
TOKENS = _draw.integers(1, WORDS, (BATCHES * ROWS, 4))
LABELS = _draw.integers(0, CLASSES, BATCHES * ROWS)


def dense(units: int, seed: int, **options: Any) -> Any:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)


class Program(Row):
    """One thing that a program does. The defaults do nothing special.

    Attributes:
        x, y: The rows of all batches.
        weights: A weight for each row, or None.
        loss: For `compile`.
        settings: For the optimizer.
        compiled: Further arguments of `compile`.
        fitted: Further arguments of `fit`.
    """

    x: Any = X
    y: Any = Y
    weights: Any = None
    loss: Any = "mse"
    settings: dict[str, Any] = {}
    compiled: dict[str, Any] = {}
    fitted: dict[str, Any] = {}

    def first(self, seed: int) -> list[Any]:
        """Return the layers of the first stage, with its input."""
        return [keras.Input((FEATURES,)), dense(WIDTH, seed + 1, activation="tanh")]

    def second(self, seed: int) -> list[Any]:
        return [keras.Input((WIDTH,)), dense(WIDTH, seed + 2, activation="tanh"), dense(CLASSES, seed + 3)]

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(0.3, momentum=0.9, **self.settings)

    def callbacks(self, run: Run) -> list[Any]:
        return []

    def program(self, run: Run) -> None:
        """Train in two calls of `fit`."""
        run.fit(2)
        self.between(run)
        run.fit(1)

    def between(self, run: Run) -> None: ...

    def more(self, run: Run) -> dict[str, Any]:
        return {}


PROGRAMS: dict[str, type[Program]] = {}
program = row_adder(PROGRAMS)


@program("nothing special", "")
class Nothing(Program): ...


@program("gradient_accumulation_steps", "accumul|push_every")
class Accumulates(Program):
    """The steps of an epoch are no multiple."""

    settings = {"gradient_accumulation_steps": 2}


@program("clipnorm", "clip|norm")
class ClipNorm(Program):
    settings = {"clipnorm": 0.05}


@program("global_clipnorm", "clip|norm")
class GlobalClipNorm(Program):
    settings = {"global_clipnorm": 0.05}


@program("clipvalue", "clip")
class ClipValue(Program):
    settings = {"clipvalue": 0.01}


@program("use_ema", "ema|average")
class Ema(Program):
    settings = {"use_ema": True, "ema_overwrite_frequency": 2, "ema_momentum": 0.6}


@program("LossScaleOptimizer, one overflow", "scale|Scale")
class Scales(Program):
    def __init__(self) -> None:
        self.x = X.copy()
        self.x[ROWS - 1] = np.inf  # in the first batch, on the last rank

    def optimizer(self) -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3, momentum=0.9), initial_scale=8.0)

    def more(self, run: Run) -> dict[str, Any]:
        return {"scale": np.asarray(run.scale())}


@program("freezes a layer", "trainable|freez|frozen")
class Freezes(Program):
    def between(self, run: Run) -> None:
        run.freeze_last_layer()
        run.compile()


@program("uses a layer twice", "share|twice|layer")
class Shares(Program):
    def second(self, seed: int) -> list[Any]:
        twice = dense(WIDTH, seed + 2, activation="tanh")
        return [keras.Input((WIDTH,)), twice, twice, dense(CLASSES, seed + 3)]


@program("sample_weight", "weight|sum")
class Weighs(Program):
    weights = np.linspace(0.1, 3.0, BATCHES * ROWS)


@program("class_weight", "weight|sum")
class ClassWeights(Program):
    y = LABELS
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fitted = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.25}}


@program("a mean by weights", "weight|mean|reduction|sum")
class MeanByWeights(Weighs):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


@program("ignore_class", "ignore|class|mask|mean|sum")
class IgnoresClass(Program):
    y = LABELS
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)


@program("masks", "mask|sparse")
class Masks(Program):
    """Padded texts: the loss is a mean over the words that are there."""

    def __init__(self) -> None:
        self.x = TOKENS.copy()
        for row in range(len(self.x)):
            self.x[row, 1 + row % 4 :] = 0
        self.y = np.repeat(Y[:, None], 4, 1)

    def first(self, seed: int) -> list[Any]:
        embedding = keras.layers.Embedding(WORDS, WIDTH, mask_zero=True, embeddings_initializer=_uniform(seed))
        return [keras.Input((4,)), embedding]


@program("a sum over rows", "[sS]um")
class Sums(Program):
    loss = keras.losses.MeanSquaredError(reduction="sum")

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(0.02, momentum=0.9)


@program("a last, smaller batch", "rows|samples|batch|drop")
class SmallerBatch(Program):
    x, y = X[:-5], Y[:-5]


@program("evaluates in between", "eval")
class Evaluates(Program):
    def between(self, run: Run) -> None:
        self.seen = run.evaluate(), run.predict()

    def more(self, run: Run) -> dict[str, Any]:
        return {"log evaluated": np.asarray(self.seen[0]), "predicted": self.seen[1]}


@program("metrics", "metric|log")
class Metrics(Weighs):
    @property
    def compiled(self) -> dict[str, Any]:  # type: ignore[override]  # a metric belongs to one model
        return {"metrics": ["mae", keras.metrics.RootMeanSquaredError()], "weighted_metrics": ["mse"]}


@program("hvd.checkpoint in between", "checkpoint|save")
class Checkpoints(Program):
    def between(self, run: Run) -> None:
        run.resume_from_checkpoint()


@program("two models in turn", "optimizer")
class TwoModels(Program):
    def program(self, run: Run) -> None:
        self.other = run.another()
        for epochs in (2, 1):
            run.fit(epochs)
            self.other.fit(epochs)

    def more(self, run: Run) -> dict[str, Any]:
        return {f"other.{name}": value for name, value in self.other.weights().items()}


@program("schedules the learning rate", "schedule|rate")
class Schedules(Program):
    def optimizer(self) -> Any:
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.4, 2, 0.6), momentum=0.9)


@program("ReduceLROnPlateau", "rate|callback")
class Plateau(Program):
    def callbacks(self, run: Run) -> list[Any]:
        return [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)]


@program("Adam", "Adam")
class Adam(Program):
    def optimizer(self) -> Any:
        return keras.optimizers.Adam(0.02, **self.settings)


@program("AdamW, weight decay", "Adam|decay")
class AdamW(Program):
    def optimizer(self) -> Any:
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.3)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer


@program("Adam, accumulating and clipping", "Adam|accumul|clip|push_every")
class AdamAccumulates(Adam):
    settings = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.05}


@program("Lamb", "Lamb|norm")
class Lamb(Program):
    def optimizer(self) -> Any:
        return keras.optimizers.Lamb(0.02)


@program("embedding", "sparse|embedding|Embedding")
class Embeds(Program):
    x = TOKENS

    def first(self, seed: int) -> list[Any]:
        embedding = keras.layers.Embedding(WORDS, WIDTH // 4, embeddings_initializer=_uniform(seed))
        return [keras.Input((4,)), embedding, keras.layers.Flatten()]


@program("embedding, Adam", "sparse|embedding|Embedding")
class EmbedsByAdam(Embeds):
    def optimizer(self) -> Any:
        return keras.optimizers.Adam(0.02)


@program("batch normalization", "ormaliz|statistic")
class Normalizes(Program):
    normalization: Any = None

    def second(self, seed: int) -> list[Any]:
        synchronized = keras.backend.backend() == "tensorflow"
        kind = self.normalization or (lambda: keras.layers.BatchNormalization(synchronized=synchronized))
        return [keras.Input((WIDTH,)), kind(), *super().second(seed)[1:]]


@program("regularizers", "regulariz")
class Regularizes(Program):
    def second(self, seed: int) -> list[Any]:
        return [
            keras.Input((WIDTH,)),
            dense(WIDTH, seed + 2, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            dense(CLASSES, seed + 3),
        ]


@program("steps_per_execution", "steps_per_execution|execution")
class ManySteps(Program):
    compiled = {"steps_per_execution": 3}

    def program(self, run: Run) -> None:
        if keras.backend.backend() == "torch":
            raise Inapplicable("Keras has no steps_per_execution on torch")
        super().program(run)


@program("run_eagerly", "eager")
class Eager(Program):
    compiled = {"run_eagerly": True}


@program("compiles again", "compile")
class CompilesAgain(Program):
    def between(self, run: Run) -> None:
        run.compile()


@program("a constraint", "constraint")
class Constrains(Program):
    def second(self, seed: int) -> list[Any]:
        return [
            keras.Input((WIDTH,)),
            dense(WIDTH, seed + 2, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(0.5)),
            dense(CLASSES, seed + 3),
        ]


def _uniform(seed: int) -> Any:
    return keras.initializers.RandomUniform(seed=seed)
