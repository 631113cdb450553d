"""Models of torch and Keras as a replica calls them, compared with the models themselves."""

from __future__ import annotations

import os
import tempfile
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
from hvdlite_torch.servable.shared_weights import share

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


class Match(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.image = nn.Embedding(10, 4), nn.Linear(3, 4).double()

    def forward(self, image: torch.Tensor, *, words: torch.Tensor) -> torch.Tensor:
        return (self.image(image) * self.embedding(words).sum(1)).sum(1).double()


def test_a_module_with_several_inputs() -> None:
    model = Match()
    served = hvdlite_torch.servable(model, inputs={"words": (torch.int64, (2,)), "image": (torch.float64, (3,))})
    assert served.spec == Spec(inputs=(("words", Spec("int64", (2,))), ("image", Spec("float64", (3,)))))
    rows = [{"words": np.array([place, 9]), "image": np.arange(3.0) + place} for place in range(4)]
    with torch.no_grad():
        expected = [model(torch.tensor(row["image"])[None], words=torch.tensor(row["words"])[None]) for row in rows]
    np.testing.assert_allclose(compute(served, rows), torch.cat(expected).numpy())
    (output,) = compute(served, [served.example])
    assert np.isfinite(output)
    half = hvdlite_torch.servable(model.bfloat16(), inputs={"words": ("int64", (2,)), "image": (torch.bfloat16, (3,))})
    assert dict(half.spec.inputs)["image"] == Spec("float32", (3,))
    assert len(compute(half, rows)) == len(rows)
    with pytest.raises(RuntimeError, match="same dtype"):  # a float32 is one, as it was said
        compute(hvdlite_torch.servable(model, inputs={"words": ("int64", (2,)), "image": ("float32", (3,))}), rows)
    for inputs, words in (
        (
            {"image": ("float64", (3,)), "word": ("int64", (2,))},
            "'image', 'word', which forward.* does not take: missing",
        ),
        ({"image": ("bfloat16", (3,)), "words": ("int64", (2,))}, "dtype='?bfloat16'?: expected"),
        ({"image": torch.float64, "words": ("int64", (2,))}, "inputs has 'image': .*: expected a pair of a dtype"),
    ):
        with pytest.raises(ArgumentError, match=words):
            hvdlite_torch.servable(model, inputs=inputs)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="inputs= has a dtype and a shape for each"):
        hvdlite_torch.servable(model, torch.zeros(3), inputs={"image": ("float64", (3,)), "words": ("int64", (2,))})


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has files in memory that can be sealed")
def test_replicas_share_their_weights() -> None:
    def model(*, changed: bool) -> nn.Module:
        torch.manual_seed(0)
        found = nn.Sequential(
            nn.Linear(3, 256), nn.Linear(256, 256, bias=False), nn.Linear(256, 300), nn.Linear(300, 2)
        )
        found.append(nn.Linear(2, 2**15))
        found[2].register_buffer("view", found[2].weight.detach()[:1])  # it shares memory with the weight
        with torch.no_grad():
            found[4].weight[7] += changed
        return found

    descriptor = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
    try:
        models = [model(changed=False), model(changed=False), model(changed=True)]
        expected = [truth(each) for each in models]
        size = 4 * 256 * 256, 4 * (2**16 + 2**15)
        assert [share(each, descriptor) for each in models] == [sum(size), sum(size), sum(size) - 4 * 2**16]
        assert share(nn.Linear(300, 300), descriptor) == 0  # another module
        first, second, third = models
        for each, output in zip(models, expected, strict=True):
            np.testing.assert_array_equal(compute(hvdlite_torch.servable(each), ROWS), output)
        with torch.no_grad():
            first[1].weight.zero_()  # it is the first one's own now
        np.testing.assert_array_equal(truth(second), expected[1])
        np.testing.assert_array_equal(truth(third), expected[2])
        assert not np.array_equal(truth(first), expected[0])
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
    finally:
        os.close(descriptor)


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
    one = keras.Input((3,))
    several = keras.Model(one, {"same": one, "double": one * 2})
    outputs = compute(hvdlite_tf.servable(several), ROWS)
    np.testing.assert_array_equal([each["double"] for each in outputs], 2 * ROWS)
    with pytest.raises(ArgumentError, match="expected a Keras model. For a function, use hvdlite.servable"):
        hvdlite_tf.servable(len)


class TwoNamed:
    """Models of Keras 3 or tf_keras with the inputs "one" (3 float32) and "two" (2 int32), whose output is `one`, and ones."""

    def __init__(self, keras: Any) -> None:
        self._layers, self._model = keras.layers, keras.Model
        self.one, self.two = keras.Input((3,), name="one"), keras.Input((2,), name="two", dtype="int32")

    def of(self, inputs: Any) -> Any:
        same = self._layers.Dense(3, use_bias=False, kernel_initializer="identity")
        two = self._layers.Embedding(9, 1, embeddings_initializer="ones")(self.two)
        return self._model(inputs, self._layers.Concatenate()([same(self.one), self._layers.Flatten()(two)]))

    def check(self, served: Any) -> None:
        assert dict(served.spec.inputs) == {"one": Spec("float32", (3,)), "two": Spec("int32", (2,))}
        rows = [{"two": np.array([1, place], "i4"), "one": np.full(3, place, "f4")} for place in range(4)]
        expected = [[place] * 3 + [1, 1] for place in range(4)]
        np.testing.assert_array_equal(compute(served, rows), expected)


def check_models_with_several_inputs(keras: Any) -> None:
    import hvdlite_tf

    named = TwoNamed(keras)
    for inputs in ([named.two, named.one], {"two": named.two, "one": named.one}):
        named.check(hvdlite_tf.servable(named.of(inputs)))
    with pytest.raises(ArgumentError, match="example=: the model has the inputs 'two', 'one'"):
        hvdlite_tf.servable(named.of([named.two, named.one]), np.zeros(3))
    with pytest.raises(ArgumentError, match="inputs= has 'one': expected those of the model, 'two', 'one'"):
        hvdlite_tf.servable(named.of([named.two, named.one]), inputs={"one": ("float32", (3,))})

    class Own(keras.Model):  # type: ignore[misc]  # any
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, batch: Any) -> Any:
            return self.dense(batch["one"]) + batch["two"]

    trained = Own()
    row = {"one": np.ones(3, "f4"), "two": np.ones(2, "f4")}
    (expected,) = trained.predict_on_batch({name: each[np.newaxis] for name, each in row.items()})
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/own.weights.h5"
        trained.save_weights(path)
        inputs = {"one": ("float32", (3,)), "two": ("float32", (2,))}
        (found,) = compute(hvdlite_tf.servable(Own(), inputs=inputs, weights=path), [row])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_keras_models_with_several_inputs() -> None:
    keras = pytest.importorskip("keras", reason="Keras is not installed, whose models are served here")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed, on which Keras runs here")
    check_models_with_several_inputs(keras)


def test_tf_keras_models() -> None:
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed, whose models are served here")
    import hvdlite_tf

    check_models_with_several_inputs(tf_keras)
    model = tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(2)])
    served = hvdlite_tf.servable(model)
    assert served.spec == Spec("float32", (3,))
    np.testing.assert_allclose(compute(served, ROWS), model(ROWS).numpy(), atol=1e-6)
