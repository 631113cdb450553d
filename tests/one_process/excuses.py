"""The pairs that need not hold, each with the reason. An excuse for what has become right is an error."""

from __future__ import annotations

from typing import NamedTuple


class Excuse(NamedTuple):
    """Pairs that may have this outcome.

    Attributes:
        framework: The framework.
        ways: The names of the ways.
        rows: The names of the rows.
        outcome: What becomes of each of these pairs.
        reason: Why that is as it should be: which page says so.
    """

    framework: str
    ways: tuple[str, ...]
    rows: tuple[str, ...]
    outcome: str
    reason: str


_PIPELINES = (
    *("pipeline", "pipeline gpipe", "pipeline interleaved", "pipeline, shard"),
    *("grid dp × pp", "grid dp × pp, shard", "grid pp × tp"),
)
_FIT = ("fit", "fit, shard", "fit, fp16", "fit, topk(1.0)", "fit, local steps", "fit, async sync")

EXCUSES: tuple[Excuse, ...] = (
    Excuse(
        "torch",
        ("local steps",),
        ("clip_grad_norm_", "clip_grad_value_", "GradScaler and clipping"),
        "wrong",
        "each rank steps with its own gradients, and clips its own: docs/slow_networks.md",
    ),
    Excuse(
        "torch",
        ("local steps",),
        ("Adam", "AdamW in two groups", "Adafactor", "LBFGS"),
        "wrong",
        "each rank keeps its own state; it is one process for plain SGD only: docs/slow_networks.md",
    ),
    Excuse(
        "torch",
        ("local steps",),
        ("masks rows", "weighs rows", "uneven rows", "a rank runs out of data"),
        "wrong",
        "parameters are weighed by the rows, momenta are each rank's own",
    ),
    Excuse(
        "torch",
        _PIPELINES,
        ("batch norm",),
        "wrong",
        "each micro-batch has statistics of its own: docs/model_parallel.md",
    ),
    Excuse(
        "torch",
        ("slices", "grid dp × tp", "grid pp × tp"),
        ("Adafactor",),
        "fails",
        "torch's Adafactor raises for DTensor: an in-place operation that requires placement changes",
    ),
    Excuse(
        "keras",
        ("fit, local steps",),
        ("clipnorm", "global_clipnorm", "clipvalue", "LossScaleOptimizer, one overflow", "a constraint"),
        "wrong",
        "each rank steps with its own gradients: it clips them, skips and constrains for itself: docs/slow_networks.md",
    ),
    Excuse(
        "keras",
        ("fit, local steps",),
        ("Adam", "AdamW, weight decay", "Adam, accumulating and clipping", "Lamb", "embedding, Adam"),
        "wrong",
        "each rank keeps its own state; it is one process for plain SGD only: docs/slow_networks.md",
    ),
    Excuse(
        "keras",
        ("fit, async sync",),
        ("embedding, Adam",),
        "wrong",
        "rows that come twice are added up before the step, as with sparse_as_dense=True: docs/asynchronous.md",
    ),
    Excuse(
        "keras",
        tuple(way for way in _FIT if way != "fit, fp16"),  # whose tolerance does not see it
        ("a sum over rows",),
        "wrong",
        "the weights are right, and the log of a loss that is a sum is the mean of the ranks' sums: docs/keras.md",
    ),
    Excuse(
        "keras",
        ("pipeline",),
        ("batch normalization",),
        "wrong",
        "each micro-batch has statistics of its own: docs/model_parallel.md",
    ),
    Excuse(
        "keras",
        (*_FIT, "tape"),
        ("a mean by weights", "ignore_class", "masks", "a last, smaller batch"),
        "wrong",
        "a gradient is the mean of a rank's samples, and fit counts the ranks alike: docs/keras.md",
    ),
)
