"""A module imports lower layers only, and siblings do not import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = (
    # lowest first; modules of one row do not import each other, those of one folder may
    {"guide"},
    {"protocols", "errors", "config", "process_set", "topology", "session", "handlers"},
    {"control", "devices", "algorithms", "extras", "threads", "timeline"},
    {"tensors"},
    {"arithmetic", "layout", "compression", "header"},
    {
        "comm.local",
        "comm.mpi",
        "comm.point_to_point",
        "comm.shared_memory",
        "comm.start",
        "comm.nccl",
        "comm.objects",
        "comm.patience",
    },
    {"comm.device", "built"},
    {"comm.device_mpi"},
    {"comm.device_setup"},
    {"comm.devices"},
    {"comm.host"},
    {"comm.host_collectives", "comm.layers"},
    {"comm.hierarchical"},
    {"operations", "failure", "standoff"},
    {"letters"},
    {"disagreement", "tally"},
    {"controller", "stall"},
    {"watch"},
    {"engine", "room"},
    {"bucket"},
    {"reducer"},
    {"overlap", "sharded_reducer", "shared_reducers", "autotune"},
    {"planner"},
    {"world"},
    {"api"},
    {"testing", "launch", "command", "arguments", "inner_class"},
    {"compat"},
    {"__main__"},
)
# Also allowed: point_to_point and mpi use algorithms; errors are for everybody.
EXCEPTIONS = {
    ("config", "errors"),
    ("protocols", "errors"),
    ("protocols", "process_set"),
    ("process_set", "errors"),
    ("topology", "errors"),
}
LAUNCH_MAY_IMPORT = {"errors", "config", "control", "handlers", "session", "launch"}


def modules() -> list[Path]:
    return sorted(path for path in (ROOT / "hvdlite").rglob("*.py") if path != ROOT / "hvdlite/__init__.py")


def unit_of(dotted: str) -> str | None:
    """The unit of the layering that ``hvdlite.<dotted>`` belongs to."""
    parts = dotted.split(".")
    for name in (".".join(parts[:2]), parts[0]):
        if any(name in layer for layer in LAYERS):
            return name
    return None


def imports_of(path: Path) -> set[str]:
    """What a file of the core imports of the core, when it is loaded or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hvdlite":
            base = node.module.removeprefix("hvdlite").lstrip(".")
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            found |= {name if unit_of(name) else base for name in names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("hvdlite.") for a in node.names if a.name.startswith("hvdlite.")}
    return {unit for name in found if (unit := unit_of(name)) is not None}


def level(unit: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if unit in layer)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_modules_import_lower_layers_only(path: Path) -> None:
    dotted = ".".join(path.relative_to(ROOT / "hvdlite").with_suffix("").parts).removesuffix(".__init__")
    own = unit_of(dotted)
    if dotted == "comm":
        assert not imports_of(path)
        return
    assert own is not None, f"hvdlite.{dotted} has no place in LAYERS yet"
    for other in imports_of(path) - {own}:
        assert level(other) < level(own) or (own, other) in EXCEPTIONS, f"hvdlite.{dotted} imports hvdlite.{other}"
        if own == "launch":
            assert other in LAUNCH_MAY_IMPORT, f"hvdlite.{dotted} imports hvdlite.{other}"


@pytest.mark.parametrize("package", ["hvdlite", "hvdlite_torch", "hvdlite_tf"])
def test_packages_import_what_they_may(package: str) -> None:
    forbidden = {
        "hvdlite": {"torch", "tensorflow", "keras", "hvdlite_torch", "hvdlite_tf"},
        "hvdlite_torch": {"tensorflow", "keras", "hvdlite_tf"},
        "hvdlite_tf": {"torch", "hvdlite_torch"},
    }[package]
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] not in forbidden, f"{path.relative_to(ROOT)} imports {name}"


def test_settings_are_read_in_one_place() -> None:
    """Only config.py reads the settings; the launcher and its line to the ranks handle the environment as such."""
    for path in modules():
        dotted = ".".join(path.relative_to(ROOT / "hvdlite").with_suffix("").parts)
        # Two have functions of Horovod's that are about the environment.
        excepted = ("config", "comm.mpi", "comm.start", "control", "compat.common.util", "compat.environment")
        if dotted not in excepted and not dotted.startswith("launch"):
            assert "os.environ" not in path.read_text(), f"hvdlite.{dotted} reads the environment"
