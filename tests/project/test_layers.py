"""A room imports rooms of lower floors, and its files import each other in no circle.

A room is a folder of a package, or a module at its top. The floors are data here, so that a new import is either one of those
that are meant, or a failed test.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = {
    # The lowest first. Rooms of one floor do not import each other.
    "hvdlite": (
        {"errors"},
        {"protocols"},
        {"ranks"},
        {"config", "checks", "launcher_link"},
        {"algorithms", "tensors", "timeline", "watchdog"},
        {"comm"},
        {"launch", "serving", "operations"},
        {"gradients"},
        {"runtime"},
        {"api"},
        {"adapter", "checkpoint", "elastic"},
        {"async_sgd"},
        {"basics"},
        {"compat"},
        {"tools"},
        {"__init__", "testing", "__main__"},
    ),
    "hvdlite_torch": (
        {"tensors", "checks", "servable"},
        {"ops", "step", "distributed"},
        {"training", "sync", "slicing", "lightning", "accelerate"},
        {"optimizer", "pipeline", "async_sgd", "checkpoint"},
        {"elastic"},
        {"__init__", "horovod"},
    ),
    "hvdlite_tf": (
        {"variables", "private", "tensor", "data", "servable"},
        {"split"},
        {"ops"},
        {"gradients", "training"},
        {"optimizers", "callbacks", "checkpoint", "pipeline"},
        {"strategy", "async_sgd", "elastic"},
        {"__init__", "keras"},
        {"horovod"},
    ),
}
PACKAGES = tuple(FLOORS)
FRAMEWORKS = {
    "hvdlite": {"torch", "tensorflow", "keras", "hvdlite_torch", "hvdlite_tf"},
    "hvdlite_torch": {"tensorflow", "keras", "hvdlite_tf"},
    "hvdlite_tf": {"torch", "hvdlite_torch"},
}
LAUNCH_MAY_IMPORT = {  # hvdliterun does without MPI and NumPy's threads; a guard, without `hvdlite` itself
    "launch": {"errors", "ranks", "checks", "config", "launcher_link", "launch.worker", "launch.job"},
    "launch.job": {"errors", "ranks", "checks", "config", "launcher_link", "launch.worker"},
    "launch.worker": {"launcher_link"},
}


@functools.cache
def modules() -> dict[str, Path]:
    """All modules of the three packages, by name; a folder's `__init__` has the folder's name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    """The room of a module: "comm" of ``hvdlite.comm.local``, "__init__" of ``hvdlite``."""
    return (*module.split("."), "__init__")[1]


def launcher_part_of(module: str) -> str:
    """The part of the launcher that a module is in, or its room."""
    part = ".".join(module.split(".")[1:3])
    return part if part in LAUNCH_MAY_IMPORT else room_of(module)


def names_imported(module: str) -> Iterator[str]:
    """What a file imports, when it is loaded or later, as absolute names; also by `importlib.import_module`."""
    path = modules()[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules() else base
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", None) == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Which of our modules a module imports."""
    return frozenset(name for name in names_imported(module) if name in modules() and name != module)


def floor_of(module: str) -> int:
    """The floor of a module's room.

    Raises:
        AssertionError: The room is on no floor, or on two.
    """
    package = module.split(".")[0]
    floors = [number for number, rooms in enumerate(FLOORS[package], 1) if room_of(module) in rooms]
    assert len(floors) == 1, f"{package}: the room {room_of(module)!r} is on the floors {floors}: give it one in FLOORS"
    return floors[0]


@pytest.mark.parametrize("module", modules())
def test_a_room_imports_rooms_of_lower_floors(module: str) -> None:
    package = module.split(".")[0]
    own_part = launcher_part_of(module)
    for other in imports_of(module):
        if package == "hvdlite" and own_part in LAUNCH_MAY_IMPORT and launcher_part_of(other) != own_part:
            assert launcher_part_of(other) in LAUNCH_MAY_IMPORT[own_part], f"{module} imports {other}"
        if other.split(".")[0] != package or room_of(other) == room_of(module):
            continue
        assert floor_of(other) < floor_of(module), (
            f"{module} (floor {floor_of(module)}) imports {other} ({floor_of(other)})"
        )


@pytest.mark.parametrize("module", modules())
def test_packages_import_what_they_may(module: str) -> None:
    package = module.split(".")[0]
    for name in names_imported(module):
        assert name.split(".")[0] not in FRAMEWORKS[package], f"{module} imports {name}"


def test_no_files_import_each_other_in_a_circle() -> None:
    over: set[str] = set()

    def follow(path: tuple[str, ...]) -> None:
        for other in sorted(imports_of(path[-1])):
            assert other not in path, " imports ".join(path[path.index(other) :]) + f" imports {other}"
            if other not in over:
                follow((*path, other))
        over.add(path[-1])

    for module in modules():
        if module not in over:
            follow((module,))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_on_a_floor_is_there(package: str) -> None:
    there = {room_of(module) for module in modules() if module.split(".")[0] == package}
    listed = [room for rooms in FLOORS[package] for room in rooms]
    assert sorted(listed) == sorted(there)


def test_folders_say_what_is_in_them() -> None:
    """The docstring of a folder's `__init__` names every file in it."""
    for module, path in modules().items():
        if (
            path.name != "__init__.py"
            or module in PACKAGES
            or module.startswith(("hvdlite.compat", "hvdlite_tf.keras"))
        ):
            continue
        charter = ast.get_docstring(ast.parse(path.read_text()))
        assert charter, f"{module} has no docstring"
        files = [file.stem for file in path.parent.glob("*.py") if file.stem != "__init__"]
        missing = [file for file in files if f"`{file}`" not in charter and f"{file}.py" not in charter]
        assert not missing, f"the docstring of {module} does not name {', '.join(missing)}"


OTHER_TESTS = {"torch", "tf", "spmd", "gpu", "one_process", "benchmarks", "docs", "project"}
"""Folders of tests beside those for the rooms of the core: of the adapters, of several rooms, and of the whole."""


def test_tests_lie_by_room() -> None:
    folders = {room for rooms in FLOORS["hvdlite"] for room in rooms} | OTHER_TESTS
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.relative_to(ROOT / "tests").parts[0]
        assert folder in folders, (
            f"{path.relative_to(ROOT)}: expected tests/ROOM/{path.name}, ROOM one of {sorted(folders)}"
        )


def test_settings_are_read_in_one_place() -> None:
    """Only config.py reads the settings; the launcher and its line to the ranks handle the environment as such."""
    excepted = (
        *("hvdlite.config", "hvdlite.launcher_link.link", "hvdlite.comm.mpi.job", "hvdlite.comm.mpi.start"),
        "hvdlite.tools.advise.command",  # it starts a job with another setting
        "hvdlite.tools.migrate.variables",  # it reads programs that do
        # Two have functions of Horovod's that are about the environment.
        *("hvdlite.compat.common.util", "hvdlite.compat.environment"),
    )
    for module, path in modules().items():
        if module.split(".")[0] == "hvdlite" and module not in excepted and room_of(module) not in LAUNCH_MAY_IMPORT:
            assert "os.environ" not in path.read_text(), f"{module} reads the environment"
