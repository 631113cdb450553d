"""hvdlite_torch and hvdlite_tf have Horovod's names with Horovod's arguments, by the table that the project keeps of them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import hvdlite_tf
import hvdlite_tf.keras
import hvdlite_tf.keras.callbacks
import hvdlite_tf.optimizers.tape
import hvdlite_tf.optimizers.v1
import hvdlite_torch
from hvdlite.compat.table import MODULES

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = json.loads((ROOT / "tests/data/horovod_api.json").read_text())
API: dict[str, Any] = TABLE["modules"]


class Relaxed(NamedTuple):
    """A parameter in which ours differs on purpose.

    Attributes:
        function, parameter: Horovod's names.
        how: "default": ours has another one, or one where Horovod has none. "moved": others of ours come before it. "more":
            only ours has it.
    """

    function: str
    parameter: str
    how: str


RELAXED = {
    # A root that is not given is rank 0.
    Relaxed("horovod.torch.broadcast_parameters", "root_rank", "default"),
    Relaxed("horovod.torch.broadcast_optimizer_state", "root_rank", "default"),
    Relaxed("horovod.tensorflow.broadcast_variables", "root_rank", "default"),
    *(
        Relaxed(f"horovod.{module}.callbacks.BroadcastGlobalVariablesCallback", "root_rank", "default")
        for module in ("keras", "tensorflow.keras")
    ),
    # One module serves both; it has the parameters of horovod.tensorflow.keras, where there are more.
    Relaxed("horovod.keras.DistributedOptimizer", "num_groups", "moved"),
    Relaxed("horovod.keras.DistributedOptimizer", "process_set", "more"),
    Relaxed("horovod.keras.DistributedOptimizer", "scale_local_gradients", "more"),
    Relaxed("horovod.keras.allreduce", "average", "default"),  # None means the same
    Relaxed("horovod.keras.callbacks.BestModelCheckpoint", "mode", "moved"),
    # unconnected_gradients comes before it, as in tf.GradientTape.
    Relaxed("horovod.tensorflow._DistributedGradientTape.gradient", "use_generic_names", "moved"),
    Relaxed("horovod.tensorflow._DistributedGradientTape.get_local_and_global_gradients", "use_generic_names", "moved"),
}

OURS: dict[str, ModuleType] = {
    "horovod.torch": hvdlite_torch,
    "horovod.tensorflow": hvdlite_tf,
    "horovod.tensorflow.keras": hvdlite_tf.keras,
    "horovod.tensorflow.keras.callbacks": hvdlite_tf.keras.callbacks,
    "horovod.keras": hvdlite_tf.keras,
    "horovod.keras.callbacks": hvdlite_tf.keras.callbacks,
    "horovod.torch.elastic": hvdlite_torch.elastic,
    "horovod.tensorflow.elastic": hvdlite_tf.elastic,
    "horovod.tensorflow.keras.elastic": hvdlite_tf.keras.elastic,
    "horovod.keras.elastic": hvdlite_tf.keras.elastic,
}
PARTS = {
    "horovod.torch": ("mpi_ops", "functions", "optimizer", "sync_batch_norm"),
    "horovod.tensorflow": ("mpi_ops", "functions", "gradient_aggregation", "sync_batch_norm"),
}
"""Modules below, whose names the module has too."""

NAMES = {
    module: {name for name in MODULES[module].names if not name.startswith("_")} - {"gpu_available"} for module in OURS
}
"""What each module has, by the compatibility table; without a helper of Horovod's that only its own name brings."""


def signatures(module: str) -> dict[str, Any]:
    """The entries of the functions and classes that a module has, by their names."""
    found: dict[str, Any] = {}
    if not module.endswith((".callbacks", ".elastic")):
        basics = API["horovod.common.basics"]["HorovodBasics"]["methods"]
        found |= {name: entry for name, entry in basics.items() if name in NAMES[module]}
        found |= API["horovod.common.process_sets"]
    for part in (module, *(f"{module}.{part}" for part in PARTS.get(module, ()))):
        found |= {name: entry for name, entry in API.get(part, {}).items() if not name.startswith("_")}
    # Some only hand their arguments on, to functions that are listed too.
    return {name: entry for name, entry in found.items() if not takes_anything(entry)}


def takes_anything(entry: dict[str, Any]) -> bool:
    return "VAR_POSITIONAL" in {parameter.get("kind") for parameter in entry["parameters"]}


SIGNATURES = {module: signatures(module) for module in OURS}


def value_of(module: str, default: str) -> Any:
    """A default as Horovod's source writes it, here."""
    return eval(default, {"__builtins__": {}}, {**vars(hvdlite_tf), **vars(OURS[module])})


def how_relaxed(function: str, parameter: str) -> set[str]:
    return {relaxation.how for relaxation in RELAXED if relaxation[:2] == (function, parameter)}


def differences(module: str, name: str, ours: Any, theirs: list[dict[str, str]]) -> Iterator[str]:
    """How the signature of one of ours differs from Horovod's."""
    # Of Keras' layers, early versions of Python 3.11 would show that of __new__.
    function = ours.__init__ if isinstance(ours, type) else ours
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        del parameters[0]
    keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    expected = 0
    for wanted in theirs:
        place, kind = wanted["name"], wanted.get("kind", "POSITIONAL_OR_KEYWORD")
        relaxed = how_relaxed(f"{module}.{name}", place)
        if kind.startswith("VAR_"):
            if kind == "VAR_KEYWORD" and not keywords:
                yield f"it should take **{place}"
            continue
        found = [number for number, each in enumerate(parameters) if (each.name, each.kind.name) == (place, kind)]
        if not found or (found[0] != expected and "moved" not in relaxed):
            yield f"parameter {expected} should be {place} ({kind})"
            return
        expected = found[0] + 1
        own = parameters[found[0]].default
        default = value_of(module, wanted["default"]) if "default" in wanted else inspect.Parameter.empty
        if own is not default and own != default and "default" not in relaxed:
            yield f"the default of {place} is {own!r} and should be {default!r}"
    for parameter in parameters[expected:]:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and "more" not in how_relaxed(
            f"{module}.{name}", parameter.name
        ):
            yield f"{parameter.name} is not Horovod's"


def test_the_table_has_what_the_issues_are_about() -> None:
    assert {"allreduce", "sparse_allreduce_async", "SyncBatchNorm", "Compression", "elastic", "poll"} <= set(
        TABLE["exports"]["horovod.torch"]
    )
    for module, exports in TABLE["exports"].items():
        assert set(exports) - {"elastic"} <= NAMES[module]  # those are modules
    assert {module: len(found) for module, found in SIGNATURES.items()} == {
        "horovod.torch": 55,
        "horovod.tensorflow": 51,
        "horovod.tensorflow.keras": 31,
        "horovod.tensorflow.keras.callbacks": 5,
        "horovod.keras": 32,
        "horovod.keras.callbacks": 5,
        "horovod.torch.elastic": 9,
        "horovod.tensorflow.elastic": 3,
        "horovod.tensorflow.keras.elastic": 4,
        "horovod.keras.elastic": 4,
    }
    assert [p["name"] for p in SIGNATURES["horovod.torch"]["allreduce"]["parameters"]][:3] == [
        "tensor",
        "average",
        "name",
    ]
    assert SIGNATURES["horovod.torch"]["join"]["parameters"] == [{"name": "device", "default": "-1"}]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in OURS for name in sorted(NAMES[module])])
def test_every_name_is_there(module: str, name: str) -> None:
    assert hasattr(OURS[module], name)
    assert name in OURS[module].__all__


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, found in SIGNATURES.items() for name in sorted(found)]
)
def test_every_signature_is_horovods(module: str, name: str) -> None:
    ours, theirs = getattr(OURS[module], name), SIGNATURES[module][name]["parameters"]
    assert list(differences(module, name, ours, theirs)) == []


def test_every_relaxation_is_needed() -> None:
    used = {*RELAXED}
    for relaxation in used:
        RELAXED.remove(relaxation)
        module = max((name for name in OURS if relaxation.function.startswith(f"{name}.")), key=len)
        name = relaxation.function[len(module) + 1 :]
        ours, theirs = METHODS[name] if name in METHODS else (getattr(OURS[module], name), SIGNATURES[module][name])
        assert list(differences(module, name, ours, theirs["parameters"])), relaxation
        RELAXED.add(relaxation)


METHODS = {
    f"{kind}.{name}": (getattr(ours, name), entry)
    for kind, ours in (
        ("_DistributedGradientTape", hvdlite_tf.optimizers.tape.DistributedTape),
        ("_DistributedOptimizer", hvdlite_tf.optimizers.v1.DistributedV1),
        ("BroadcastGlobalVariablesHook", hvdlite_tf.optimizers.v1.BroadcastGlobalVariablesHook),
    )
    for name, entry in API["horovod.tensorflow"][kind]["methods"].items()
    if not takes_anything(entry)
} | {
    f"{kind}.{name}": (getattr(getattr(hvdlite_tf, kind), name), entry)
    for kind in ("LocalGradientAggregationHelper", "LocalGradientAggregationHelperEager")
    for name, entry in API["horovod.tensorflow.gradient_aggregation"][kind]["methods"].items()
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_what_is_returned(name: str) -> None:
    ours, entry = METHODS[name]
    if takes_anything(entry):
        entry = {"parameters": [each for each in entry["parameters"] if not each.get("kind", "").startswith("VAR_")]}
    assert list(differences("horovod.tensorflow", name, ours, entry["parameters"])) == []


@pytest.mark.parametrize("hvd", [hvdlite_torch, hvdlite_tf, hvdlite_tf.keras])
def test_methods(hvd: Any) -> None:
    for name, method in API["horovod.common.process_sets"]["ProcessSet"]["methods"].items():
        parameters = list(inspect.signature(getattr(hvd.ProcessSet, name)).parameters)
        assert parameters == ["self", *(p["name"] for p in method["parameters"])]


@pytest.mark.parametrize("hvd", [hvdlite_torch, hvdlite_tf, hvdlite_tf.keras])
@pytest.mark.parametrize("name", [name.rpartition(".")[2] for name in API["horovod.torch.compression"]])
def test_compressors(hvd: Any, name: str) -> None:
    compressor = getattr(hvd.Compression, name)
    assert list(inspect.signature(compressor.compress).parameters) == ["tensor"]
    assert list(inspect.signature(compressor.decompress).parameters) == ["tensor", "ctx"]


# The script that makes the table

NOTES = """
Horovod master 1234 (2026-01-01). More words.

## 1. Common

### exceptions

```python
class HorovodInternalError(...)   # bases: RuntimeError
class State(a, b)   # bases: A,B
    .sync()
    field: int = 60
    .run(x: Optional[Union[int, str]]=None) -> int
```

## 2. horovod.torch

Exported names (horovod/torch/__init__.py): join, allreduce[_async][_], x_built. (No y here.)

### ops (`horovod/torch/mpi_ops.py`)

```python
init(*args, **kwargs)
join(device=-1) -> int
reduce(tensor, op=Average, compression=Compression.none, *, scale=1.0)
```

### compression

```python
Compression.none
Compression.fp16   # a remark
```
"""


def script() -> Any:
    spec = importlib.util.spec_from_file_location("horovod_api", ROOT / "scripts/horovod_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_reads_notes() -> None:
    table = script().make_table(NOTES)
    assert json.loads(script().to_json(table)) == table
    assert table == {
        "source": "Horovod master 1234 (2026-01-01).",
        "exports": {
            "horovod.torch": ["join", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "x_built"]
        },
        "modules": {
            "horovod.common.exceptions": {
                "HorovodInternalError": {
                    "kind": "class",
                    "parameters": None,
                    "bases": ["RuntimeError"],
                    "methods": {},
                },
                "State": {
                    "kind": "class",
                    "parameters": [{"name": "a"}, {"name": "b"}],
                    "bases": ["A", "B"],
                    "methods": {
                        "sync": {"kind": "function", "parameters": []},
                        "field": {"kind": "value"},
                        "run": {"kind": "function", "parameters": [{"name": "x", "default": "None"}]},
                    },
                },
            },
            "horovod.torch.mpi_ops": {
                "init": {
                    "kind": "function",
                    "parameters": [
                        {"name": "args", "kind": "VAR_POSITIONAL"},
                        {"name": "kwargs", "kind": "VAR_KEYWORD"},
                    ],
                },
                "join": {"kind": "function", "parameters": [{"name": "device", "default": "-1"}]},
                "reduce": {
                    "kind": "function",
                    "parameters": [
                        {"name": "tensor"},
                        {"name": "op", "default": "Average"},
                        {"name": "compression", "default": "Compression.none"},
                        {"name": "scale", "default": "1.0", "kind": "KEYWORD_ONLY"},
                    ],
                },
            },
            "horovod.torch.compression": {"Compression.none": {"kind": "value"}, "Compression.fp16": {"kind": "value"}},
        },
    }


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        (NOTES.replace("### compression", "### something new"), "MODULES does not know"),
        (NOTES.replace("Compression.none\n", "what is this\n"), "cannot read"),
        (NOTES.replace("Compression.none\n", "    .method()\n"), "before any class"),
    ],
)
def test_the_script_refuses_what_it_does_not_understand(notes: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        script().make_table(notes)
