"""What torchrun says by environment variables, and hvdlite by functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.program import Program

FUNCTIONS = {
    "RANK": "rank",
    "WORLD_SIZE": "size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_size",
    "GROUP_RANK": "cross_rank",
    "GROUP_WORLD_SIZE": "cross_size",
}
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def reads(program: Program) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions that read an environment variable, and its name."""
    for node in program.walk(ast.Subscript, ast.Call):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key, read = node.slice, program.meaning(node.value) == "os.environ"
        elif isinstance(node, ast.Call) and node.args:
            key, read = node.args[0], program.meaning(node.func) in ("os.environ.get", "os.getenv")
        else:
            continue
        if read and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield node, key.value


def asked(program: Program) -> Iterator[tuple[ast.Compare, str]]:
    """Yield the expressions that ask whether an environment variable is there, and its name."""
    for node in program.walk(ast.Compare):
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.In):
            name, owner = node.left, node.comparators[0]
            if (
                program.meaning(owner) == "os.environ"
                and isinstance(name, ast.Constant)
                and isinstance(name.value, str)
            ):
                yield node, name.value


def writes(program: Program) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements that only set an environment variable, and its name."""
    for node in program.walk(ast.Assign, ast.Expr):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            key, written = target.slice, program.meaning(target.value) == "os.environ"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            key, written = node.value.args[0], program.meaning(node.value.func) == "os.environ.setdefault"
        else:
            continue
        if written and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield node, key.value


def translate(edits: Edits) -> None:
    """Change what the program reads and writes of torchrun's variables."""
    program = edits.program
    for statement, name in writes(program):
        if name in (*_ADDRESS, *FUNCTIONS):
            edits.remove(statement)
    for question, name in asked(program):
        if name in FUNCTIONS:
            edits.replace(question, "True")
    for node, name in reads(program):
        if name in FUNCTIONS:
            _translate(edits, node, f"{edits.alias}.{FUNCTIONS[name]}()")
        elif name in _ADDRESS:
            edits.by_hand(node, f"hvdliterun sets no {name}: leave out what uses it")
        elif name in _SLURM:
            edits.by_hand(
                node, f"{name} is of Slurm's own tasks: use {edits.alias}.rank(), size(), local_rank() for it"
            )
    for call in program.walk(ast.Call):
        if program.meaning(call.func) == "os.environ.update":
            edits.by_hand(call, "do not set MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE or LOCAL_RANK here")
    for item in program.walk(ast.Subscript):
        if not isinstance(item.slice, ast.Constant):
            words = {each.value for each in ast.walk(program.statement(item)) if isinstance(each, ast.Constant)}
            if program.meaning(item.value) == "os.environ" and words & {*FUNCTIONS, *_ADDRESS}:
                edits.by_hand(item, "hvdliterun sets none of torchrun's variables: leave this out")


def _translate(edits: Edits, node: ast.expr, value: str) -> None:
    outer = edits.program.parent(node)
    if any(statement.lineno <= node.lineno <= (statement.end_lineno or 0) for statement in edits.removed):
        return
    is_int = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name) and outer.func.id == "int"
    if is_int and len(outer.args) == 1 and not outer.keywords:  # type: ignore[union-attr]
        done = edits.replace(outer, value)  # type: ignore[arg-type]
    else:
        done = edits.replace(node, f"str({value})")
    if done:
        edits.once_before(node, f"{edits.alias}.init()")
