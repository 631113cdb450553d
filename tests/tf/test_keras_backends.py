"""Which backends of Keras 3 the Keras layer serves: TensorFlow (tests/spmd/test_keras_*.py), torch, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import keras
import pytest

import hvdlite_tf as hvd
from hvdlite.checks import how_to_install
from hvdlite.errors import ArgumentError
from hvdlite.testing import on_ranks
from tests.support.jobs import LIMIT, PROGRAMS, ROOT, Start

CASES = ["sgd", "adam", "all settings", "accumulating", "loss scaling"]
CASES = [shown for case in CASES for shown in (case, f"{case}, loss")]
CASES += ["topk of all", "LocalSGD of each step", "DiLoCo of each step"]
CASES += ["adam, compiled", "uneven", "between two updates", "fit twice between two updates"]
CASES += ["missing gradients", "clipping", "weights", "different data"]
CASES += ["server", "servers"]

RESTARTED = [
    "arrays",
    "fit",
    "fit with callbacks",
    "fit accumulating",
    "fit with an aggregator",
    "fit with local steps",
    "apply",
    "traced apply",
    "traced apply, two passes",
    "tape",
]
RESTARTED += ["traced tape", "tf_keras", "tf_keras, two passes"]


WITHOUT_TENSORFLOW = {"PYTHONPATH": os.pathsep.join([str(PROGRAMS / "without_tensorflow"), str(ROOT)])}


@pytest.mark.slow
def test_training_on_torch_equals_one_process(start: Start) -> None:
    """Where TensorFlow is not installed. (The job of `test_training_goes_on_after_a_restart` runs where it is.)"""
    ended = start("-np", "2", "python", str(PROGRAMS / "keras_on_torch.py"), env=WITHOUT_TENSORFLOW).end(2 * LIMIT)
    assert ended.code == 0, ended.err
    found = re.findall(r"^\[0\] ([\w ,]+): (\S+) (alike|different)$", ended.out, re.M)
    assert [case for case, _, _ in found] == CASES
    for case, deviation, weights in found:
        assert float(deviation) <= 1e-5, case
        assert weights == "alike", case


@pytest.mark.parametrize(
    "backend", [pytest.param("tensorflow", marks=pytest.mark.slow), pytest.param("torch", marks=pytest.mark.weekly)]
)
def test_training_goes_on_after_a_restart(start: Start, backend: str) -> None:
    """`shutdown` and `init` around what was compiled, wrapped and traced before."""
    ended = start("-np", "2", "python", str(PROGRAMS / "restart_keras.py"), env={"KERAS_BACKEND": backend}).end(
        2 * LIMIT
    )
    assert ended.code == 0, ended.err
    found = dict(re.findall(r"^\[0\] ([\w ,]+): (\S+)$", ended.out, re.M))
    traced = found.pop("alone", None)
    assert list(found) == (RESTARTED if backend == "tensorflow" else RESTARTED[:6])
    assert {name: value for name, value in found.items() if float(value) > 1e-6} == {}
    assert traced == ("True" if backend == "tensorflow" else None)


@pytest.mark.slow
def test_names_that_need_tensorflow_say_so() -> None:
    code = """
import sys, hvdlite_tf as hvd, hvdlite_tf.keras
for module, name in ((hvd, "allreduce"), (hvd, "Strategy"), (hvdlite_tf.keras, "allgather")):
    try:
        getattr(module, name)
    except ModuleNotFoundError as error:
        print(type(error).__name__, error)
print(all(getattr(module, name) is not None for module in (hvd, hvdlite_tf.keras) for name in module.__all__))
print("nosuch" in dir(hvd), hasattr(hvd, "nosuch"), "tensorflow.python" in sys.modules, "Strategy" in hvd.__all__)
"""
    environment = {**os.environ, **WITHOUT_TENSORFLOW, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    *missing, all_there, rest = done.stdout.splitlines()
    assert all_there == "True" and rest == "False False False False"
    names = ["hvdlite_tf.allreduce", "hvdlite_tf.Strategy", "hvdlite_tf.keras.allgather"]
    for text, name in zip(missing, names, strict=True):
        assert text.startswith(f"MissingPackageError {name} needs tensorflow, which is not installed here")
        assert how_to_install("tf") in text
    assert "hvdlite.allreduce does without" in missing[0]


def test_an_unknown_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ArgumentError, match="its backend is jax.*KERAS_BACKEND=torch"):
        on_ranks(1, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))


@pytest.mark.parametrize("make", [hvd.Strategy, hvd.SyncBatchNormalization])
def test_what_is_made_of_tensorflow_refuses_other_backends(monkeypatch: pytest.MonkeyPatch, make: type) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ArgumentError, match=f"{make.__name__}.* needs Keras on TensorFlow; its backend is torch"):
        on_ranks(1, make)
