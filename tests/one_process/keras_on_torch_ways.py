"""How a Keras training on the backend torch is distributed: without shards, strategy, tape, pipeline (docs/keras.md)."""

from __future__ import annotations

from tests.one_process import keras_ways
from tests.one_process.keras_ways import PROGRAMS, Run, clean_up, distance, go_together, results

WAYS: dict[str, type[Run]] = {
    name: keras_ways.WAYS[name] for name in ("fit", "fit, fp16", "fit, topk(1.0)", "fit, local steps")
}

__all__ = ["PROGRAMS", "WAYS", "clean_up", "distance", "go_together", "results"]
