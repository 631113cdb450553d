"""Models of torch and Keras as a replica calls them, compared with the models themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite
import hvdlite_torch
from hvdlite.errors import ArgumentError
from hvdlite.serving.replicas.computing import compute
from hvdlite.serving.servable import Spec

ROWS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def truth(model: nn.Module, rows: Any = ROWS) -> Any:
    model.eval()
    with torch.no_grad():
        return model(torch.tensor(rows)).numpy()


def test_a_module_computes_as_in_evaluation() -> None:
    model = small_model()
    model(torch.tensor(ROWS) * 3 + 1)  # so that BatchNorm has seen something
    served = hvdlite_torch.servable(model, ROWS[0])
    assert served.spec == Spec("float32", (3,)) and not model.training
    np.testing.assert_array_equal(compute(served, ROWS), truth(model))


@pytest.mark.parametrize(
    "around", [lambda state: state, lambda state: {"model": state, "optimizer": {}, "progress": {"epoch": 3}}]
)
def test_weights_of_files_of_torch(tmp_path: Path, around: Any) -> None:
    trained, fresh = small_model(), small_model()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 1
    torch.save(around(trained.state_dict()), tmp_path / "weights.pt")
    served = hvdlite_torch.servable(fresh, shape=(3,), weights=tmp_path / "weights.pt")
    assert served.spec == Spec("float32", (3,))
    np.testing.assert_array_equal(compute(served, ROWS), truth(trained))
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    with pytest.raises(ArgumentError, match=r"a dict with \['epoch'\]: expected model.state_dict\(\)"):
        hvdlite_torch.servable(fresh, weights=tmp_path / "other.pt")


def test_files_with_other_names_and_of_other_models(tmp_path: Path) -> None:
    trained, fresh = small_model(), small_model()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 1
    path = tmp_path / "weights.pt"
    torch.save({f"module._orig_mod.{name}": value for name, value in trained.state_dict().items()}, path)
    np.testing.assert_array_equal(compute(hvdlite_torch.servable(fresh, weights=path), ROWS), truth(trained))
    torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(ArgumentError, match=r"(?s)weights\.pt': .*size mismatch for weight"):
        hvdlite_torch.servable(nn.Linear(3, 2), weights=path)
    torch.save(trained, path)
    with pytest.raises(ArgumentError, match=r"such as a whole module, .*: save model\.state_dict\(\) in place of it"):
        hvdlite_torch.servable(fresh, weights=path)


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        (nn.Linear(3, 2), Spec("float32", (3,))),
        (nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3).double()), nn.ReLU()), Spec("float64", (3, None, None))),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(5, 2)), Spec("float32", (2, None))),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), Spec("float32", None)),
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), Spec("int64", None)),
        (nn.Sequential(nn.Flatten()), Spec()),
    ],
)
def test_dtype_and_shape_from_the_model(model: nn.Module, spec: Spec) -> None:
    assert hvdlite_torch.servable(model).spec == spec
    assert hvdlite_torch.servable(model, dtype="int32", shape=(7, None)).spec == Spec("int32", (7, None))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        found = self.embedding(words)
        if mask is not None:
            found = found * mask[..., None]
        return {"sum": found.sum(1), "parts": (words.amax(1), words.amin(1))}


def test_outputs_in_dictionaries_and_tuples_and_inputs_that_are_padded() -> None:
    def pad(rows: list[Any]) -> dict[str, Any]:
        longest = max(map(len, rows))
        return {
            "words": np.stack([np.pad(row, (0, longest - len(row))) for row in rows]),
            "mask": torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows]),
        }

    model = TwoOutputs()
    served = hvdlite_torch.servable(model, pad=pad)
    assert served.spec == Spec("int64", None, mixes_shapes=True)
    rows = [np.array([1, 2, 3]), np.array([4])]
    outputs = compute(served, rows)
    for row, output in zip(rows, outputs, strict=True):
        np.testing.assert_allclose(output["sum"], model.embedding.weight.detach().numpy()[row].sum(0), rtol=1e-6)
    assert [each["parts"] for each in outputs] == [(3, 1), (4, 0)]


def test_dtypes_that_numpy_does_not_have() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    served = hvdlite_torch.servable(model, shape=(3,))
    assert served.spec.dtype == "float32"
    with torch.no_grad():
        expected = model(torch.tensor(ROWS).bfloat16()).float().numpy()
    np.testing.assert_array_equal(compute(served, ROWS), expected)


def test_the_adapter_serves_too() -> None:
    assert hvdlite_torch.serve is hvdlite.serve


def test_what_is_no_module() -> None:
    with pytest.raises(ArgumentError, match=r"expected a torch.nn.Module. For a function, use hvdlite.servable"):
        hvdlite_torch.servable(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no arrays of one shape"):
        compute(hvdlite_torch.servable(nn.Linear(3, 2)), [{"a": 1}, {"b": 2}])


def test_keras_models(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras", reason="Keras is not installed, whose models are served here")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed, on which Keras runs here")
    import hvdlite_tf

    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    expected = model(ROWS, training=False).numpy()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = keras.models.clone_model(model)
    late = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    for served in (
        hvdlite_tf.servable(model),
        hvdlite_tf.servable(tmp_path / "model.keras"),
        hvdlite_tf.servable(fresh, weights=tmp_path / "model.weights.h5"),
    ):
        assert served.spec == Spec("float32", (3,))
        np.testing.assert_allclose(compute(served, ROWS), expected, atol=1e-6)
    served = hvdlite_tf.servable(late, ROWS[0])
    np.testing.assert_allclose(compute(served, ROWS), late(ROWS).numpy(), atol=1e-6)
    one, two = keras.Input((3,)), keras.Input((2,))
    both = keras.Model([one, two], [keras.layers.Concatenate()([one, two]), one])
    with pytest.raises(ArgumentError, match="the model has 2 inputs: expected one"):
        hvdlite_tf.servable(both)
    several = keras.Model(one, {"same": one, "double": one * 2})
    outputs = compute(hvdlite_tf.servable(several), ROWS)
    np.testing.assert_array_equal([each["double"] for each in outputs], 2 * ROWS)
    with pytest.raises(ArgumentError, match="expected a Keras model. For a function, use hvdlite.servable"):
        hvdlite_tf.servable(len)


def test_tf_keras_models() -> None:
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed, whose models are served here")
    import hvdlite_tf

    model = tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(2)])
    served = hvdlite_tf.servable(model)
    assert served.spec == Spec("float32", (3,))
    np.testing.assert_allclose(compute(served, ROWS), model(ROWS).numpy(), atol=1e-6)
