"""What type checkers are told is true: users' programs with every public name pass mypy --strict, and run.

The configuration is that of the project: mypy sees neither TensorFlow nor Keras, which have no types, and lets programs call
torch's own functions that have none, such as `Tensor.backward`. The programs of README.md and of the tutorials pass too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import hvdlite
import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests.support import page_blocks
from tests.support.jobs import ROOT
from tests.support.pages import program_of
from tests.typed import arrays, basics, keras_training, torch_operations, torch_training

# Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
tf.config.threading.set_inter_op_parallelism_threads(8)

PACKAGES = ("hvdlite", "hvdlite_torch", "hvdlite_tf")
MODULES = (
    *PACKAGES,
    *("hvdlite.checkpoint", "hvdlite.elastic", "hvdlite.errors", "hvdlite.testing"),
    *("hvdlite_torch.checkpoint", "hvdlite_torch.elastic"),
    *("hvdlite_tf.callbacks", "hvdlite_tf.checkpoint", "hvdlite_tf.elastic"),
)
"""The modules of which programs use names."""
FOR_TYPES_ONLY = ("README.md", "docs/tutorial_torch.md", "docs/tutorial_keras.md", "docs/tutorial_arrays.md")
"""The pages whose pieces are checked."""


def sources() -> dict[str, str]:
    """The programs by their names. That of the basics is there once for each package."""
    found = {path.stem: path.read_text() for path in (ROOT / "tests/typed").glob("*.py") if path.stem != "__init__"}
    text = found.pop("basics")
    assert "import hvdlite as hvd\n" in text
    for package in PACKAGES:
        found[f"basics_of_{package}"] = text.replace("import hvdlite as hvd\n", f"import {package} as hvd\n")
    return found


def used(source: str) -> Iterator[str]:
    """The names that a program uses of modules, with those of the modules: ``hvdlite_torch.elastic.run``."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                aliases[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in aliases:
                yield f"{aliases[first]}.{rest}"


def public(module: str) -> set[str]:
    """The names of a module that programs may use."""
    found = importlib.import_module(module)
    own = [name for name, value in vars(found).items() if inspect.isclass(value) and value.__module__ == found.__name__]
    names = getattr(found, "__all__", own)
    if module == "hvdlite.errors":  # programs take an error from the package that they import
        names = [name for name in names if name not in hvdlite.__all__]
    return {f"{module}.{name}" for name in names}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_a_program(module: str) -> None:
    programs = {name for source in sources().values() for name in used(source)}
    names = public(module)
    assert names
    missing = sorted(names - programs)
    assert not missing, f"tests/typed needs programs with these names: {missing}"


def pages() -> dict[str, str]:
    """The programs of pages, as they stand there; the parts of one are functions, behind what stands before them."""
    found = {}
    for page in FOR_TYPES_ONLY:
        name = re.sub(r"\W", "_", page).lower()
        if page in page_blocks.PROGRAMS:
            found[name] = program_of(ROOT / page)
            # The constructor of torch's sampler does not say of what it is a sampler.
            found[name] = found[name].replace(
                "sampler = DistributedSampler(", "sampler: DistributedSampler[int] = DistributedSampler("
            )
            continue
        for line, block in page_blocks.blocks(page):
            _, before, _ = page_blocks.part_of(page, block)
            found[f"{name}_{line}"] = f"{before}\ndef program() -> None:\n{textwrap.indent(block, '    ')}"
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy(tmp_path: Path) -> None:
    """All programs pass but one that is wrong, with the cache that scripts/check leaves."""
    api = pytest.importorskip("mypy.api", reason="mypy is not installed, which checks these programs")
    for name, source in {**sources(), **pages()}.items():
        (tmp_path / f"{name}_program.py").write_text(source)
    wrong = "import hvdlite_torch as hvd\n\nnumber: str = hvd.rank()\n"
    (tmp_path / "wrong.py").write_text(wrong)  # mypy sees our types at all
    command = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    out, err, code = api.run([*command, *map(str, sorted(tmp_path.glob("*.py")))])
    assert code == 1 and not err, out + err
    assert re.fullmatch(r".*wrong.py:3: error: .*\nFound 1 error in 1 file .*\n", out), out


def test_the_programs_run(tmp_path: Path) -> None:
    config = Config(advice=False)  # both ranks train on the same data
    assert on_ranks(2, torch_training.train, config=config) == [2, 2]
    assert on_ranks(2, torch_operations.exchange) == [(4, 4)] * 2
    assert on_ranks(2, torch_operations.in_place) == [4.0, 4.0]
    assert on_ranks(2, lambda: float(torch_operations.sparse().to_dense().sum())) == [2.0, 2.0]
    on_ranks(2, torch_operations.grouped)
    assert [own for own, _ in on_ranks(2, torch_training.asynchronous, config=config)] == [2, 2]
    assert on_ranks(2, torch_training.local_steps, config=config) == [2, 2]
    assert on_ranks(2, torch_training.around_training, config=config) == [4, None]
    assert on_ranks(2, torch_training.saved, tmp_path / "torch") == [2, 2]
    assert on_ranks(1, torch_training.elastic) == [7]


def test_the_programs_without_torch_run(tmp_path: Path) -> None:
    config = Config(advice=False)
    assert on_ranks(2, basics.who) == [0, 1]
    assert on_ranks(2, basics.sets) == [[0, 1]] * 2
    assert len(basics.values()) == 6
    assert on_ranks(2, arrays.exchange) == [[4.0, 2.0, 2.0]] * 2
    assert on_ranks(2, arrays.columns) == [[2.0, 2.0]] * 2
    assert on_ranks(2, arrays.saved, tmp_path / "arrays") == [2, 2]
    assert on_ranks(1, arrays.elastic) == [3]
    assert arrays.predict_with().tolist() == [[2.0, 2.0]]
    assert arrays.without_mpi() == [0, 1]
    (first, second) = on_ranks(2, keras_training.fit, tmp_path / "fit", config=config)
    assert first == second
    assert on_ranks(2, keras_training.exchange) == [[0, 1]] * 2
    on_ranks(2, keras_training.tapes, config=config)
    assert on_ranks(2, keras_training.few_exchanges, config=config)[0].every == 2
    assert on_ranks(2, keras_training.saved, tmp_path / "keras", config=config) == [2, 2]
    assert len(keras_training.horovods_own()) == 7
    assert on_ranks(1, keras_training.elastic) == [3]
    on_ranks(1, keras_training.strategy)


@pytest.mark.parametrize("module", [hvdlite, hvd])
def test_signatures_say_what_comes_back(module: typing.Any) -> None:
    functions = {name: getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    for name, function in functions.items():
        hints = typing.get_type_hints(function)  # every name in them can be found
        assert "return" in hints, name
        assert "hvdlite.api.Call" not in str(hints["return"]), name
        assert str(inspect.signature(function).return_annotation) == function.__annotations__["return"]
        if name.endswith(("_async", "_async_")) and name != "sparse_allreduce_async":
            assert typing.get_origin(hints["return"]) is hvdlite.Handle, name
    assert typing.get_args(typing.get_type_hints(module.barrier_async)["return"]) == (type(None),)
