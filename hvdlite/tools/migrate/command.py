"""``hvdlite migrate PROGRAM``: prints a diff, and what is left to do."""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError
from hvdlite.tools.migrate import accelerate, ddp, horovod, strategy
from hvdlite.tools.migrate.edits import Edits, Note
from hvdlite.tools.migrate.program import Program, split

NOTHING = 1
_KINDS: dict[str, tuple[str, Callable[[Program], Sequence[ast.expr | ast.stmt]], Callable[[Program], Edits]]] = {
    "ddp": ("torch.distributed", ddp.evidence, ddp.translate),
    "horovod": ("Horovod", horovod.evidence, horovod.translate),
    "tf.distribute": ("tf.distribute", strategy.evidence, strategy.translate),
    "accelerate": ("Accelerate or transformers.Trainer", accelerate.evidence, accelerate.translate),
}
_OURS = ("hvdlite", "hvdlite_torch", "hvdlite_tf")
_WIDTH = 118


def add_migrate(commands: Any) -> None:
    """Add the command ``hvdlite migrate``."""
    migrate = commands.add_parser(
        "migrate",
        help="say what to change in a program for DDP, Horovod, tf.distribute or Accelerate",
        description="Print a unified diff of what to change in a program, so that hvdlite trains it, and below what is left "
        "to do by hand. The program is read only; nothing of it is run. The exit code is 1 if it uses none of the four.",
        allow_abbrev=False,
    )
    add = migrate.add_argument
    add("program", metavar="PROGRAM", type=Path, help="a Python file")
    add("--from", dest="kind", choices=list(_KINDS), help="what it is written for, if it uses more than one of these")
    add("-o", "--output", type=Path, metavar="FILE", help="write the new program there; there must be no such file")
    migrate.set_defaults(action=_migrate)


def _migrate(options: argparse.Namespace) -> int:
    path, output = options.program, options.output
    program = Program.read(path)
    if output is not None and output.exists():
        same = ", the program itself" if output.samefile(path) else ""
        raise ArgumentError(f"--output {output}: that file exists{same}. migrate writes new files only.")
    kind = options.kind or _kind(program, path)
    if kind is None:
        return NOTHING
    edits = _KINDS[kind][2](program)
    new = edits.result()
    try:
        ast.parse(new)
    except SyntaxError as error:  # never hand out what does not even parse
        raise ArgumentError(
            f"{path}: hvdlite migrate cannot change this program: line {error.lineno} would be wrong."
        ) from error
    print(diff(program.text, new, str(path)), end="")
    print(remarks(edits.notes, path, output, changed=new != program.text), end="")
    if output is not None:
        with output.open("x", encoding="utf-8", newline="") as file:
            file.write(new)
    return 0


def _kind(program: Program, path: Path) -> str | None:
    """Return what a program is written for. Print why, if that is nothing that we know, or more than one."""
    found = {name: places for name, (_, evidence, _) in _KINDS.items() if (places := evidence(program))}
    if not found:
        weak = {"ddp": ddp.evidence(program, False), "tf.distribute": strategy.evidence(program, False)}
        found = {name: places for name, places in weak.items() if places}
    if len(found) == 1:
        return next(iter(found))
    if found:
        lines = []
        for name, places in found.items():
            numbers = sorted({place.lineno for place in places})
            shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
            lines.append(f"  {_KINDS[name][0]} in line {shown}: say --from {name}")
        print(
            f"hvdlite migrate: {path} uses {len(found)} of DDP, Horovod, tf.distribute and Accelerate:",
            *lines,
            sep="\n",
            file=sys.stderr,
        )
        return None
    ours = [node.lineno for node in program.walk(ast.Import, ast.ImportFrom) if _is_ours(node)]
    already = f" It imports hvdlite already, in line {ours[0]}." if ours else ""
    print(
        f"hvdlite migrate: {path} uses none of DDP (torch.distributed), Horovod, tf.distribute and Accelerate.{already} For a "
        "program for one process see hvdlite docs tutorial_torch or tutorial_keras.",
        file=sys.stderr,
    )
    return None


def _is_ours(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in _OURS for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in _OURS


def diff(old: str, new: str, name: str) -> str:
    """Return a unified diff, which ``patch -p0`` understands."""
    lines = difflib.unified_diff(split(old), split(new), name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def remarks(notes: Sequence[Note], path: Path, output: Path | None, changed: bool) -> str:
    """Return what is said below the diff, as comments, which ``patch`` passes over."""
    found = [] if changed else ["# Nothing is to be changed by this command.\n"]
    for title, by_hand in (("Left to do by hand", True), ("To know", False)):
        some = sorted(note for note in notes if note.by_hand == by_hand)
        if some:
            found.append(f"# {title}, by the lines of {path}:\n")
        for note in some:
            text = (f"line {note.line}: " if note.line else "") + note.text.rstrip(".")
            wrapped = textwrap.wrap(f"{text}.", _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
            found += [f"{line}\n" for line in wrapped]
    return "".join([*found, f"# Start: hvdliterun -np 4 python {output or path}\n"])
