"""Programs for Accelerate, and for the Trainer of transformers: `hvdlite_torch.accelerate.prepare` comes first."""

from __future__ import annotations

import ast

from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.program import Program
from hvdlite.tools.migrate.variables import FUNCTIONS, reads

PACKAGE = "hvdlite_torch.accelerate"
_BEGIN = {
    "accelerate": ("Accelerator", "PartialState", "AcceleratorState", "GradientState"),
    "transformers": ("TrainingArguments", "Seq2SeqTrainingArguments", "HfArgumentParser", "Trainer", "Seq2SeqTrainer"),
    "trl": ("TrlParser", "SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig", "RewardConfig", "RLOOConfig"),
}
_LAUNCHERS = ("notebook_launcher", "debug_launcher")
_UNTRIED = ("DeepSpeedPlugin", "FullyShardedDataParallelPlugin", "MegatronLMPlugin", "ParallelismConfig")
_OPTIONS = {
    "ddp_backend": "leave it out: prepare() has made the group",
    "deepspeed": "DeepSpeed over hvdlite was not run",
    "fsdp": "FSDP by the Trainer over hvdlite was not run",
    "local_rank": "leave it out: prepare() says which rank this is",
}


def evidence(program: Program) -> list[ast.expr]:
    """Return the calls that begin Accelerate."""
    return [call.func for call in _beginnings(program)]


def _is(name: str, kinds: tuple[str, ...], packages: tuple[str, ...] = tuple(_BEGIN)) -> bool:
    return name.partition(".")[0] in packages and name.rpartition(".")[2] in kinds


def _beginnings(program: Program) -> list[ast.Call]:
    own = {
        node.name for node in program.walk(ast.ClassDef) if any(_begins(program.meaning(base)) for base in node.bases)
    }
    found = []
    for node in program.walk(ast.Call):
        if _begins(program.meaning(node.func)) or (isinstance(node.func, ast.Name) and node.func.id in own):
            found.append(node)
    return found


def _begins(name: str) -> bool:
    return any(_is(name, kinds, (package,)) for package, kinds in _BEGIN.items())


def translate(program: Program) -> Edits:
    """Return what to change in a program for Accelerate."""
    edits = Edits(program, PACKAGE)
    variables = [node for node, name in reads(program) if name in FUNCTIONS]
    for node in sorted([*_beginnings(program), *variables], key=lambda node: node.lineno):
        edits.once_before(node, f"{PACKAGE}.prepare()")
    for call in program.walk(ast.Call):
        name = program.meaning(call.func)
        if _is(name, _LAUNCHERS):
            edits.by_hand(call, "hvdliterun starts the processes: call the function once, with these arguments")
        elif _is(name, _UNTRIED):
            edits.remark(call, f"{name.rpartition('.')[2]} over hvdlite was not run")
        elif _is(name, ("TrainingArguments", "Seq2SeqTrainingArguments")):
            for keyword in call.keywords:
                if keyword.arg in _OPTIONS:
                    edits.by_hand(keyword.value, f"{keyword.arg}: {_OPTIONS[keyword.arg]}")
        elif _is(name, ("InitProcessGroupKwargs",)) and any(each.arg == "backend" for each in call.keywords):
            edits.by_hand(call, "leave the backend out: prepare() has made the group")
        elif name.startswith("torch.distributed.") and name.endswith(".init_process_group"):
            edits.by_hand(call, "leave it out: prepare() has made the group")
    edits.remark(None, "what `accelerate config` has chosen does not hold under hvdliterun: give it to Accelerator(…)")
    return edits
