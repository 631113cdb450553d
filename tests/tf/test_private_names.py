"""The private names of TensorFlow and Keras that hvdlite_tf uses: each is listed, and is there in the installed versions."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdlite_tf.private import FRAMES, PRIVATE
from tests.support.jobs import ROOT

FILES = sorted((ROOT / "hvdlite_tf").rglob("*.py"))
CORE = sorted((ROOT / "hvdlite").rglob("*.py"))
OURS = "hvdlite|horovod"
"""What the names have that hvdlite gives to objects of Keras."""
PYTHONS = {"_getframe"}


def tf_keras() -> Any:
    return pytest.importorskip("tf_keras")


def built(optimizer: Any, library: Any) -> Any:
    variables = [library.Variable(np.ones(3, "float32"))]
    (optimizer._create_all_weights if hasattr(optimizer, "_create_all_weights") else optimizer.build)(variables)
    return optimizer


def keras_model() -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def masked() -> Any:
    return keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))


def strategy() -> Any:
    return tf.distribute.OneDeviceStrategy("/cpu:0").extended


def numbers() -> Any:
    return tf.data.Dataset.range(6)


def shuffled() -> Any:
    return numbers().shuffle(3, seed=1)


def mapped(**options: Any) -> Any:
    return numbers().map(lambda x: x, **options)


def parallel() -> Any:
    return mapped(num_parallel_calls=2, deterministic=False)


def classes() -> Any:
    """The names of the datasets that `hvd.shard` can build anew."""
    whole = numbers()
    cut = [whole.take(1), whole.skip(1), whole.repeat(2), whole.batch(2), whole.prefetch(1)]
    found = [shuffled(), mapped(), parallel(), whole.with_options(tf.data.Options()), *cut]
    return SimpleNamespace(**{type(each).__name__: each for each in found})


EXAMPLES: dict[str, Callable[[], Any]] = {
    "strategy": strategy,
    "tf.Variable": lambda: tf.Variable(1.0),
    "tf.data iterator": lambda: iter(numbers()),
    "tf.data dataset": numbers,
    "tf.data shuffle": shuffled,
    "tf.data batch": lambda: numbers().batch(2),
    "tf.data repeat": lambda: numbers().repeat(2),
    "tf.data classes": classes,
    "tf.data map": mapped,
    "tf.data map function": lambda: mapped()._map_func,
    "tf.data parallel map": parallel,
    "keras optimizer": lambda: built(keras.optimizers.Adam(gradient_accumulation_steps=2, use_ema=True), keras),
    "keras loss scale optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "keras multi optimizer": lambda: keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.1)),
    "keras momentum": lambda: built(keras.optimizers.SGD(momentum=0.5), keras),
    "keras rmsprop": lambda: built(keras.optimizers.RMSprop(momentum=0.5), keras),
    "keras variable": lambda: keras.Variable(1.0),
    "keras model": keras_model,
    "keras loss": lambda: keras.losses.Hinge(),
    "keras masked output": masked,
    "keras batch normalization": lambda: keras.layers.BatchNormalization(),
    "tf_keras optimizer": lambda: built(tf_keras().optimizers.SGD(momentum=0.5), tf),
    "tf_keras legacy optimizer": lambda: tf_keras().optimizers.legacy.SGD(0.1),
    "tf_keras batch normalization": lambda: tf_keras().layers.BatchNormalization(),
    "tf_keras loss": lambda: tf_keras().losses.Hinge(),
}


def test_each_is_there() -> None:
    gone = []
    for where in dict.fromkeys(each.where for each in PRIVATE):
        owner = EXAMPLES[where]() if where in EXAMPLES else importlib.import_module(where)
        if where == "keras batch normalization":
            owner.build((None, 3))
        gone += [f"{where}: {each.name}" for each in PRIVATE if each.where == where and not hasattr(owner, each.name)]
    assert not gone, "the installed version has dropped these names; what follows is in hvdlite_tf/private.py"


def test_each_that_is_used_is_listed() -> None:
    """A private name that hvdlite_tf reads, and that no code of ours defines, is another package's."""
    defined, used = set(), {}
    for path, reads in [*((path, True) for path in FILES), *((path, False) for path in CORE)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif not reads:
                continue
            elif isinstance(node, ast.Attribute):
                used[node.attr] = path
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used[node.value] = path
            elif isinstance(node, ast.ImportFrom) and re.match(
                r"(tensorflow\.python|\w*keras\.src)", node.module or ""
            ):
                used.update((f"_{each.name}" if each.name[0] != "_" else each.name, path) for each in node.names)
    listed = {each.name for each in PRIVATE}
    listed |= {f"_{name}" for name in listed}
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for name, path in used.items()
        if re.fullmatch(r"_[a-zA-Z]\w*[a-zA-Z0-9]", name) and name not in defined | listed | PYTHONS
        if not re.search(OURS, name)
    }
    assert not unknown, "write these names down in hvdlite_tf/private.py"


def test_each_look_at_frames_is_listed() -> None:
    looks = {
        str(path.relative_to(ROOT / "hvdlite_tf").with_suffix("")).replace("/", ".")
        for path in FILES
        if "_getframe" in path.read_text() and path.name != "private.py"
    }
    assert looks == {".".join(name.split(".")[:2]) for name in FRAMES}
    for told in FRAMES.values():
        assert (ROOT / told.partition(":")[0]).exists()
