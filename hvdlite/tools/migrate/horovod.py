"""Programs for Horovod: other imports, and names that hvdlite does not have, from the tables of `hvdlite.compat`."""

from __future__ import annotations

import ast
import importlib
import re
from typing import Any

from hvdlite.compat import status
from hvdlite.compat.modules import missing, note_on
from hvdlite.compat.table import MODULES, NOTES
from hvdlite.compat.usage import Use, of_python
from hvdlite.errors import MissingPackageError
from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.program import Program

_ANYWHERE = ("hvdlite", "hvdlite.elastic")
"""Where the names of ``horovod.common`` are."""
_RUN = "hvdlite.compat.runner"
"""Where ``horovod.run`` is, with Horovod's arguments."""
_GRADIENTS = ("allgather", "grouped_allgather", "broadcast", "reducescatter", "grouped_reducescatter")


def evidence(program: Program) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of Horovod."""
    found: list[ast.Import | ast.ImportFrom] = [*program.walk(ast.Import), *program.walk(ast.ImportFrom)]
    return [node for node in found if any(name.partition(".")[0] == "horovod" for name in _imported(node))]


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []


def translate(program: Program) -> Edits:
    """Return what to change in a program for Horovod."""
    edits = Edits(program, "")
    for node in evidence(program):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _plain(edits, node, alias)
        elif isinstance(node, ast.ImportFrom):
            _from(edits, node)
    uses = of_python(program.text)
    for use in uses:
        _check(edits, use)
    for name in _GRADIENTS:
        both = (f"horovod.torch.{name}", f"horovod.tensorflow.{name}")
        used = [use for use in uses if use.kind == "name" and use.name in both]
        if used:
            edits.remark(_at(used[0].line), f"if gradients go through {name}, they are not scaled as Horovod's are")
    edits.remark(
        None, "to change nothing, start it by hvdliterun --horovod; hvdlite docs from_horovod says what differs"
    )
    return edits


def _at(line: int) -> ast.AST:
    return ast.Pass(lineno=line)


def _homes(module: str) -> list[str]:
    """Return the modules of hvdlite that have the public names of one of Horovod's."""
    sources = MODULES[module].sources if module in MODULES else ()
    ours = [each for each in sources if each.startswith(("hvdlite_torch", "hvdlite_tf")) and ".horovod" not in each]
    if module in ("horovod", "horovod.runner"):
        return [_RUN]
    return ours or [each for each in _ANYWHERE if module.startswith("horovod.common")]


def _has(home: str, names: list[str]) -> bool:
    try:
        found: Any = importlib.import_module(home)
    except MissingPackageError:  # the framework is not here: the tables of compat say what there is
        return True
    return all(hasattr(found, name) and name in {*getattr(found, "__all__", names)} for name in names)


def _plain(edits: Edits, node: ast.Import, alias: ast.alias) -> None:
    program = edits.program
    if alias.name.partition(".")[0] != "horovod":
        return
    homes = _homes(alias.name)
    if not homes:
        edits.by_hand(node, _reason(alias.name))
    elif alias.asname:
        edits.replace_text(program.start(alias), program.end(alias), f"{homes[-1]} as {alias.asname}")
    else:
        used = [each for each in program.walk(ast.Attribute, ast.Name) if program.meaning(each) == alias.name]
        used = [each for each in used if program.meaning(program.parent(each) or each) not in {*MODULES} - {alias.name}]
        if not all(edits.replace(each, homes[-1]) for each in used):
            edits.by_hand(node, f"this module is {homes[-1]} here")
        edits.replace_text(program.start(alias), program.end(alias), homes[-1])


def _from(edits: Edits, node: ast.ImportFrom) -> None:
    program, module = edits.program, node.module or ""
    names = [alias.name for alias in node.names]
    if len(names) == 1 and f"{module}.{names[0]}" in MODULES:  # from horovod import torch as hvd
        homes, alias = _homes(f"{module}.{names[0]}"), node.names[0]
        if homes:
            edits.replace_text(
                program.start(node), program.end(node), f"import {homes[-1]} as {alias.asname or alias.name}"
            )
            return
    home = next((each for each in _homes(module) if _has(each, [name for name in names if name != "*"])), None)
    begin = re.match(r"from\s+([\w.]+)\s+import\b", program.source(node))
    if home is None or begin is None:
        edits.by_hand(node, " ".join(dict.fromkeys(_reason(f"{module}.{name}") for name in names)))
        return
    start = program.start(node)
    edits.replace_text(start + begin.start(1), start + begin.end(1), home)


def _reason(name: str) -> str:
    note = note_on(name)
    return f"{name} stays: {note.text}" if note is not None else f"{missing(name)} See hvdlite docs from_horovod."


def _check(edits: Edits, use: Use) -> None:
    """Say what hvdlite does not have of what the program uses, under the name that the program has now."""
    if use.kind == "variable":
        found = status.of_variable(use.name)
        if found.kind != "supported":
            edits.remark(_at(use.line), f"{use.name}: {found.note}")
        return
    module = next(
        (each for each in sorted(MODULES, key=len, reverse=True) if f"{use.name}.".startswith(f"{each}.")), ""
    )
    homes = _homes(module)
    if use.kind == "argument":
        found = status.of_name(use.name)
        if found.kind != "missing" and (found := status.of_argument(use.name, use.argument)).kind == "missing":
            edits.by_hand(_at(use.line), f"{use.name}({use.argument}=…): {found.note}")
        return
    rest = use.name[len(module) + 1 :].partition("().")[0].partition(".")[0]
    if homes and rest and not any(_has(home, [rest]) for home in homes):
        edits.by_hand(_at(use.line), _reason(use.name))
    elif homes and use.name in NOTES and NOTES[use.name].status == "changed":
        edits.remark(_at(use.line), f"{use.name}: {NOTES[use.name].text}")
