"""``torch.multiprocessing.spawn`` in a program: hvdliterun starts the processes instead, and each calls the function once."""

from __future__ import annotations

import ast

from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.roles import Roles, bind, parameters

SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn", "torch.multiprocessing.start_processes")
_PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process")
_PARAMETERS = ["fn", "args", "nprocs", "join", "daemon", "start_method"]


def translate(edits: Edits, roles: Roles) -> None:
    """Change the calls of spawn into calls of the function."""
    for call, _ in edits.program.calls(*SPAWN):
        if not _translate(edits, roles, call):
            edits.by_hand(
                call,
                "hvdliterun starts the processes: call the function once, with "
                f"{edits.alias}.local_rank() for the number of the process",
            )
    for call, _ in edits.program.calls(*_PROCESSES):
        edits.by_hand(call, "if these processes are the ranks: hvdliterun starts them, so call their function once")


def _translate(edits: Edits, roles: Roles, call: ast.Call) -> bool:
    program = edits.program
    given = bind(call, _PARAMETERS)
    if given is None or "fn" not in given or not isinstance(program.parent(call), ast.Expr):
        return False
    functions, passed, processes = roles.called(given["fn"]), given.get("args"), given.get("nprocs")
    if not functions:
        return False
    words = []
    values = passed.elts if isinstance(passed, ast.Tuple) else []
    is_open = passed is not None and not isinstance(passed, ast.Tuple)
    if is_open and any(role == "size" for (owner, _), role in roles.of.items() if owner in functions):
        return False
    for number in range(len(values) + 1):
        found = {roles.of.get((each, _name(parameters(each), number))) for each in functions}
        if len(found) > 1:
            return False
        role = found.pop()
        if number == 0:
            words.append(roles.value("rank") if role == "rank" else f"{edits.alias}.local_rank()")
        elif role is not None:
            words.append(roles.value(role))
        elif processes is not None and not isinstance(processes, ast.Constant):
            is_number = ast.dump(values[number - 1]) == ast.dump(processes)
            words.append(f"{edits.alias}.local_size()" if is_number else program.source(values[number - 1]))
        else:
            words.append(program.source(values[number - 1]))
    if is_open and passed is not None:
        words.append(f"*{program.source(passed)}")
    if any(edits.is_replaced(each) for each in values):
        return False
    if not edits.replace(call, f"{program.source(given['fn'])}({', '.join(words)})"):
        return False
    edits.once_before(call, f"{edits.alias}.init()")
    if words[0] == roles.value("rank"):
        edits.remark(
            call, f"the first argument is now the rank in the job; devices are counted by {edits.alias}.local_rank()"
        )
    return True


def _name(names: list[str], number: int) -> str:
    return names[number] if number < len(names) else ""
