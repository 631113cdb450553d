"""Programs for torch.distributed: DistributedDataParallel, FSDP and collectives go on, over the backend "hvdlite"."""

from __future__ import annotations

import ast

from hvdlite.tools.migrate import spawn, variables
from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.program import Program
from hvdlite.tools.migrate.roles import Roles, bind

PACKAGE = "hvdlite_torch"
_STRONG = (
    "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "ZeroRedundancyOptimizer", "init_process_group",
    "init_device_mesh", "init_rpc",
)  # fmt: skip
_PARAMETERS = [
    "backend",
    "init_method",
    "timeout",
    "world_size",
    "rank",
    "store",
    "group_name",
    "pg_options",
    "device_id",
]
_KEPT = ("timeout", "group_name")
_UNSUPPORTED = {
    "torch.distributed.monitored_barrier": "hvdlite has none: barrier() says who is missing anyway",
    "torch.distributed.is_torchelastic_launched": "it is False under hvdliterun",
    "torch.distributed.get_backend": 'it returns "hvdlite" now',
    "torch.distributed.is_nccl_available": "it says what torch has; hvdlite chooses by the tensor's device",
}
_RPC = "hvdlite has no RPC: this part of the program stays with torchrun"


def evidence(program: Program, is_strong: bool = True) -> list[ast.expr]:
    """Return what shows that a program is one for torch.distributed."""
    found = []
    for node in program.walk(ast.Name, ast.Attribute):
        name = program.meaning(node)
        if is_strong:
            is_one = name.startswith("torch.") and name.rpartition(".")[2] in _STRONG
        else:
            is_one = name.startswith("torch.distributed.")
        if is_one:
            found.append(node)
    return found


def translate(program: Program) -> Edits:
    """Return what to change in a program for torch.distributed."""
    edits = Edits(program, PACKAGE)
    variables.translate(edits)
    _local_rank_option(edits)
    roles = Roles(edits)
    starts = [call for call, name in program.calls("torch.distributed.*") if name.endswith(".init_process_group")]
    for call in starts:
        _start(edits, roles, call)
    spawn.translate(edits, roles)
    meshes = [call for call, name in program.calls("torch.distributed.*") if name.endswith("init_device_mesh")]
    if not starts:
        for mesh in meshes[:1]:
            edits.before(mesh, f"{edits.alias}.init(torch_distributed=True)")
    for node in program.walk(ast.Attribute, ast.Name):
        name = program.meaning(node)
        if name in _UNSUPPORTED:
            edits.remark(node, f"{name}: {_UNSUPPORTED[name]}")
        elif name.startswith(("torch.distributed.rpc.", "torch.distributed.autograd.")):
            edits.by_hand(node, _RPC)
    return edits


def _start(edits: Edits, roles: Roles, call: ast.Call) -> None:
    program = edits.program
    given = bind(call, _PARAMETERS)
    if given is None:
        edits.by_hand(call, 'say "hvdlite" for the backend, without an address, rank and world_size')
        return
    backend = given.get("backend")
    if isinstance(backend, ast.Constant) and "hvdlite" in str(backend.value):
        return
    for name in ("store", "pg_options"):
        if name in given and not (isinstance(given[name], ast.Constant) and given[name].value is None):  # type: ignore[attr-defined]
            edits.by_hand(call, f'say "hvdlite" for the backend, and leave {name}= out: hvdlite has its own')
            return
    if "rank" in given:
        roles.settle(given["rank"], "rank", call, False)
    if "world_size" in given:
        roles.settle(given["world_size"], "size", call, False)
    words = ['"hvdlite"', *(f"{name}={program.source(given[name])}" for name in _KEPT if name in given)]
    edits.replace(call, f"{program.source(call.func)}({', '.join(words)})")
    for outer in program.around(call):
        if isinstance(outer, ast.If) and call.lineno > outer.lineno:
            _say_condition(edits, call, outer)
        if isinstance(outer, ast.FunctionDef):
            break


def _say_condition(edits: Edits, call: ast.Call, condition: ast.If) -> None:
    if edits.is_replaced(condition.test) or "__name__" in (text := ast.unparse(condition.test)) or "is_" in text:
        return
    edits.remark(
        call, f"this line runs only in one case of `if {text}` (line {condition.lineno}): start the program so"
    )


def _local_rank_option(edits: Edits) -> None:
    """Let the option ``--local-rank`` of torch.distributed.launch be what hvdlite says."""
    for call in edits.program.walk(ast.Call):
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Attribute)
            or call.func.attr != "add_argument"
        ):
            continue
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        if "--local_rank" not in names and "--local-rank" not in names:
            continue
        default = next((each.value for each in call.keywords if each.arg == "default"), None)
        if default is None:
            edits.by_hand(call, f"add default={edits.alias}.local_rank(), after {edits.alias}.init()")
        elif not edits.is_replaced(default) and edits.replace(default, f"{edits.alias}.local_rank()"):
            edits.once_before(call, f"{edits.alias}.init()")
