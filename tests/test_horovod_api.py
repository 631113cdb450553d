"""hvdlite_torch has Horovod's names with Horovod's arguments, by the table that the project keeps of them."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import hvdlite_torch as hvd

ROOT = Path(__file__).parent.parent
TABLE = json.loads((ROOT / "tests/data/horovod_api.json").read_text())

RELAXED = {("broadcast_parameters", "root_rank"), ("broadcast_optimizer_state", "root_rank")}
"""Parameters that Horovod requires and that have a default here."""

EXPORTS: list[str] = TABLE["exports"]["horovod.torch"]
BASICS: dict[str, Any] = TABLE["modules"]["horovod.common.basics"]["HorovodBasics"]["methods"]
FUNCTIONS: dict[str, Any] = {
    name: entry
    for module in ("mpi_ops", "functions", "optimizer", "sync_batch_norm")
    for name, entry in TABLE["modules"][f"horovod.torch.{module}"].items()
    if not name.startswith("_")
}
SIGNATURES: dict[str, Any] = {
    **{name: entry for name, entry in BASICS.items() if name in EXPORTS},
    # Some only hand their arguments on, to functions that are listed too.
    **{n: e for n, e in FUNCTIONS.items() if "VAR_POSITIONAL" not in {p.get("kind") for p in e["parameters"]}},
    **TABLE["modules"]["horovod.common.process_sets"],
}


def value_of(default: str) -> Any:
    """A default as Horovod's source writes it, here."""
    return eval(default, {"__builtins__": {}}, vars(hvd))


def differences(name: str) -> list[str]:
    """How the signature of a name differs from Horovod's."""
    if not hasattr(hvd, name):
        return ["it does not exist"]
    ours = list(inspect.signature(getattr(hvd, name)).parameters.values())
    theirs = SIGNATURES[name]["parameters"]
    found = []
    for number, parameter in enumerate(theirs):
        kind = parameter.get("kind", "POSITIONAL_OR_KEYWORD")
        if number >= len(ours) or (ours[number].name, ours[number].kind.name) != (parameter["name"], kind):
            return [f"parameter {number} should be {parameter['name']} ({kind})"]
        own = ours[number].default
        wanted = value_of(parameter["default"]) if "default" in parameter else inspect.Parameter.empty
        if (name, parameter["name"]) not in RELAXED and (own is not wanted and own != wanted):
            found.append(f"the default of {parameter['name']} is {own!r} and should be {wanted!r}")
    found += [f"{p.name} is not Horovod's" for p in ours[len(theirs) :] if p.kind is not p.KEYWORD_ONLY]
    return found


def test_the_table_has_what_the_issue_is_about() -> None:
    assert {"allreduce", "sparse_allreduce_async", "SyncBatchNorm", "Compression", "elastic", "poll"} <= set(EXPORTS)
    assert len(SIGNATURES) > 50
    assert [p["name"] for p in SIGNATURES["allreduce"]["parameters"]][:3] == ["tensor", "average", "name"]
    assert SIGNATURES["join"]["parameters"] == [{"name": "device", "default": "-1"}]


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_every_name_is_there(name: str) -> None:
    assert hasattr(hvd, name)
    assert name in hvd.__all__


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_every_signature_is_horovods(name: str) -> None:
    assert differences(name) == []


@pytest.mark.parametrize(
    ("kind", "entry"), [(hvd.ProcessSet, TABLE["modules"]["horovod.common.process_sets"]["ProcessSet"])]
)
def test_methods(kind: type, entry: dict[str, Any]) -> None:
    for name, method in entry["methods"].items():
        parameters = list(inspect.signature(getattr(kind, name)).parameters)
        assert parameters == ["self", *(p["name"] for p in method["parameters"])]


@pytest.mark.parametrize("name", TABLE["modules"]["horovod.torch.compression"])
def test_compressors(name: str) -> None:
    compressor = value_of(name)
    assert list(inspect.signature(compressor.compress).parameters) == ["tensor"]
    assert list(inspect.signature(compressor.decompress).parameters) == ["tensor", "ctx"]


@pytest.mark.parametrize("name", TABLE["modules"]["horovod.torch.elastic"])
def test_elastic_names_say_that_they_are_not_there_yet(name: str) -> None:
    with pytest.raises(hvd.NotYetError, match=rf"elastic\.{name} is not there yet"):
        getattr(hvd.elastic, name)(None)


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
