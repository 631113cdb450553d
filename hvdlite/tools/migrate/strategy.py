"""Programs for ``tf.distribute``: `hvdlite_tf.Strategy` in the place of a strategy of several workers or several GPUs."""

from __future__ import annotations

import ast

from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.program import Program
from hvdlite.tools.migrate.variables import asked, reads, writes

PACKAGE = "hvdlite_tf"
_OURS = ("MultiWorkerMirroredStrategy", "MirroredStrategy", "CollectiveAllReduceStrategy")
_OTHERS = {
    "ParameterServerStrategy": "has a successor of another form (hvdlite docs asynchronous)",
    "ParameterServerStrategyV2": "has a successor of another form (hvdlite docs asynchronous)",
    "TPUStrategy": "is for TPUs, which hvdlite does not use",
    "CentralStorageStrategy": "keeps variables in one place, which hvdlite does not",
}
_RANK_0 = {
    "ModelCheckpoint": "every rank would write: give it to rank 0 only",
    "BackupAndRestore": "every rank would write: give each a folder of its own, or use hvd.checkpoint",
    "TensorBoard": "every rank would write: give it to rank 0 only",
}
_SAVES = ("save", "save_weights", "save_model")


_VALUES = {
    ("len", "cluster", "worker"): "{}.size()",
    ("task", "index"): "{}.rank()",
    ("task", "type"): '"worker"',
}
"""What the parts of TF_CONFIG are."""


def _kind(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith("tensorflow.") and ".distribute." in f"{name}." else ""


def evidence(program: Program, is_strong: bool = True) -> list[ast.expr]:
    """Return what shows that a program is one for tf.distribute."""
    found = []
    for node in program.walk(ast.Attribute, ast.Name):
        name = program.meaning(node)
        is_one = _kind(name) in (*_OURS, *_OTHERS) if is_strong else name.startswith("tensorflow.distribute.")
        if is_one:
            found.append(node)
    return found


def translate(program: Program) -> Edits:
    """Return what to change in a program for tf.distribute."""
    edits = Edits(program, PACKAGE)
    is_changed = False
    for node in evidence(program):
        name, call = _kind(program.meaning(node)), program.parent(node)
        if name in _OTHERS:
            edits.by_hand(node, f"tf.distribute's {name} {_OTHERS[name]}")
        elif ".v1." in program.meaning(node) or not isinstance(call, ast.Call) or call.func is not node:
            edits.by_hand(node, f"write {edits.alias}.Strategy() for the object, after {edits.alias}.init()")
        elif edits.replace(call, f"{edits.alias}.Strategy()"):
            edits.once_before(call, f"{edits.alias}.init()")
            is_changed = True
            if call.args or call.keywords:
                edits.remark(call, "the arguments are left out: hvdliterun says how many ranks there are, and where")
    _translate_cluster(edits)
    if is_changed:
        _say_what_ranks_share(edits)
    return edits


def _translate_cluster(edits: Edits) -> None:
    """Change what the program reads and writes of TF_CONFIG, which describes the workers to TensorFlow."""
    program = edits.program
    is_used = any(name == "TF_CONFIG" for _, name in reads(program))
    for statement, name in writes(program):
        if name == "TF_CONFIG":
            edits.remove(statement)
            is_used = True
    if not is_used:
        return
    for node in program.walk(ast.Call, ast.Subscript):
        value, whole = _VALUES.get(_path(node), ""), node
        outer = program.parent(node)
        if value and isinstance(outer, ast.Call) and ast.unparse(outer.func) == "int" and len(outer.args) == 1:
            whole = outer
        if value and edits.replace(whole, value.format(edits.alias)) and "{}" in value:
            edits.once_before(node, f"{edits.alias}.init()")
    for read in (node for node, name in (*reads(program), *asked(program)) if name == "TF_CONFIG"):
        if edits.is_replaced(read):
            continue
        loads, statement = program.parent(read), program.statement(read)
        if (
            isinstance(statement, ast.Assign)
            and statement.value is loads
            and isinstance(statement.targets[0], ast.Name)
        ):
            uses = [
                node
                for node in program.walk(ast.Name)
                if node.id == statement.targets[0].id and node is not statement.targets[0]
            ]
            if all(edits.is_replaced(node) for node in uses):
                edits.remove(statement)
                continue
        edits.by_hand(read, f"there is no TF_CONFIG: ask {edits.alias}.rank() and {edits.alias}.size()")


def _path(node: ast.expr) -> tuple[str, ...]:
    """Return the keys of ``config["task"]["index"]``, with "len" before them for ``len(…)`` of it."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name) and node.func.id == "len":
        return ("len", *_path(node.args[0]))
    keys: list[str] = []
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.ctx, ast.Load):
        keys.insert(0, str(node.slice.value))
        node = node.value
    return tuple(keys)


def _say_what_ranks_share(edits: Edits) -> None:
    program = edits.program
    edits.remark(None, "batch sizes stay those of all ranks together; the strategy works on CPUs only so far")
    for node in program.walk(ast.Call):
        name = program.meaning(node.func).rpartition(".")[2]
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in _RANK_0:
            edits.by_hand(node, f"{name}: {_RANK_0[name]}")
        elif method in _SAVES and not _chooses_rank(program, node):
            edits.by_hand(node, f"every rank would write: put it under `if {edits.alias}.rank() == 0:`")


def _chooses_rank(program: Program, node: ast.AST) -> bool:
    """Tell whether the program asks for the chief before it comes here, as far as names say."""
    words = ("chief", "rank", "task_id", "index", "worker_id")
    tests = [ast.unparse(outer.test) for outer in program.around(node) if isinstance(outer, ast.If | ast.IfExp)]
    return any(word in test for test in tests for word in words)
