"""What is known of the models of Hugging Face's transformers: blocks that can be sliced, by the code of their forward passes.

A block is known if the code of its forward passes is, letter by letter but for comments and annotations, the code that the
table here was written for. Many models have copies of BERT's and ViT's. A block with other code, of another version of
transformers for example, is left whole. Models that come with a plan of their own for tensor parallelism (``_tp_plan``: Llama,
Qwen2, Mistral, …) are sliced by it, where it is columns and rows.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

_ACTIVATIONS = frozenset(
    f"{name}Activation"
    for name in ("NewGELU", "GELU", "SiLU", "FastGELU", "QuickGELU", "ClippedGELU", "AccurateGELU", "Mish", "Linear")
) | {"GELUTanh", "ReLUSquaredActivation"}
"""Activations of transformers that work on each element by itself."""

_EAGER = frozenset(("129ae75c51935f73", "7e3246ffb0cd92ec", "d2eb787ff7a9b315", "354553d38c11ae7c"))
"""The codes of ``eager_attention_forward`` that compute each head by itself."""


class SlicedBlock(NamedTuple):
    """A block of a model, whose layers are named from the block on.

    Attributes:
        codes: The codes of the forward passes that this is about, by "path" of a module or "path:method"; "" is the block.
        columns: The layers that are sliced by columns.
        rows: The layer that is sliced by rows.
        between: The activations between them.
        opened: The modules whose results are slices.
        entered: The modules whose inputs are slices.
        heads: The path of the attribute with the number of heads; empty if it is no attention.
        parts: In how many parts the columns are: 3 for queries, keys and values in one layer.
    """

    codes: Mapping[str, str]
    columns: tuple[str, ...]
    rows: str
    between: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    entered: tuple[str, ...] = ()
    heads: str = ""
    parts: int = 1


BLOCKS = (
    # Queries, keys and values are cut by `split_size`, and into heads by a view whose number of heads is -1.
    SlicedBlock({"": "b3815a1ead7c7886"}, ("c_attn",), "c_proj", heads="num_heads", parts=3),  # GPT-2
    # Views with -1 heads, one call of the attention function, reshaped with -1.
    SlicedBlock({"": "a921c8a872957f03"}, ("q_proj", "k_proj", "v_proj"), "o_proj", heads="num_attention_heads"),  # ViT
    SlicedBlock(  # BERT
        {"": "5fac741babed40e0", "self": "4d9cb73ac04687c9", "output": "3799d79263d3217e"},
        ("self.query", "self.key", "self.value"),
        "output.dense",
        opened=("self",),
        entered=("output",),
        heads="self.num_attention_heads",
    ),
    SlicedBlock(  # BERT's layer: dense, activation, dense, on pieces of the sequence
        {
            "": "4a5c4668c709574a",
            ":feed_forward_chunk": "d935db5223a7e491",
            "intermediate": "ab3f9454469ba468",
            "output": "3799d79263d3217e",
        },
        ("intermediate.dense",),
        "output.dense",
        between=("intermediate.intermediate_act_fn",),
        opened=("intermediate",),
        entered=("output",),
    ),
)


def is_activation(module: Any) -> bool:
    """Return whether a module is an activation of transformers that works on each element by itself."""
    cls = type(module)
    return cls.__module__ == "transformers.activations" and cls.__name__ in _ACTIVATIONS


def blocks_of(module: nn.Module) -> Iterator[tuple[SlicedBlock, str]]:
    """Return the known blocks that a module is, each with why it cannot be sliced, or an empty text."""
    if "transformers" not in sys.modules:
        return
    for block in BLOCKS:
        if _code(module, "") == block.codes[""]:
            unknown = [path for path, code in block.codes.items() if _code(module, path) != code]
            why = f"what its {unknown[0].strip(':')!r} does is not known to hvdlite" if unknown else ""
            yield block, why or (_why_no_heads(module, block) if block.heads else "")


def plan_of(model: nn.Module) -> dict[str, str]:
    """Return the plan for tensor parallelism that a model of transformers comes with: styles by names, "*" for numbers."""
    plan = getattr(model, "_tp_plan", None) if "transformers" in sys.modules else None
    return dict(plan) if isinstance(plan, Mapping) else {}


def planned(name: str, module: nn.Module, plan: Mapping[str, str]) -> tuple[tuple[str, ...], str, str] | None:
    """Return what a model's plan says of an attention.

    Returns:
        The children by columns, the child by rows, and why they cannot be sliced or an empty text. None if the plan has no
        columns and rows for the children of this module.
    """
    general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    styles = {
        pattern.removeprefix(f"{general}."): style
        for pattern, style in plan.items()
        if pattern.startswith(f"{general}.")
    }
    columns = tuple(child for child, style in styles.items() if style == "colwise")
    rows = tuple(child for child, style in styles.items() if style == "rowwise")
    if not columns or len(rows) != 1 or not set(columns + rows) <= set(module._modules):
        return None
    others = sorted(set(styles) - {*columns, *rows})
    rest = sorted({each.split(".")[0] for each, _ in module.named_parameters()} - {*columns, *rows})
    head = getattr(module, "head_dim", None)
    why = ""
    if others or rest:
        why = f"its plan has another style for {', '.join(others or rest)} than columns and rows"
    elif not isinstance(head, int):
        why = "the width of its heads is not known (head_dim)"
    return columns, rows[0], why or _why_no_attention(module)


def _why_no_heads(module: nn.Module, block: SlicedBlock) -> str:
    owner: Any = module.get_submodule(block.heads.rpartition(".")[0])
    if getattr(owner, "is_cross_attention", False) or getattr(owner, "reorder_and_upcast_attn", False):
        return "attention to another sequence, and reordered attention, are not known to hvdlite"
    return _why_no_attention(owner)


def _why_no_attention(module: Any) -> str:
    """Return why the function that computes the attention is not known to work on each head by itself, or an empty text."""
    way = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if way not in ("eager", "sdpa"):
        return f"attention by {way!r} is not known to hvdlite: choose 'sdpa' or 'eager'"
    names = inspect.unwrap(type(module).forward).__globals__
    if way == "sdpa":
        function = names["ALL_ATTENTION_FUNCTIONS"]["sdpa"] if "ALL_ATTENTION_FUNCTIONS" in names else None
        if getattr(function, "__module__", "") != "transformers.integrations.sdpa_attention":
            return "its attention 'sdpa' is not that of transformers"
    elif "eager_attention_forward" not in names or code_of(names["eager_attention_forward"]) not in _EAGER:
        return "its attention 'eager' is not known to hvdlite: choose 'sdpa'"
    return ""


def _code(module: nn.Module, path: str) -> str:
    """Return the code of a forward pass, or of the method after a colon; an empty text if there is none."""
    path, _, method = path.partition(":")
    try:
        part = module.get_submodule(path)
    except AttributeError:
        return ""
    name = method or "forward"
    return "" if name in part.__dict__ else code_of(getattr(type(part), name, None))


@functools.cache
def code_of(function: Any) -> str:
    """Return 16 letters that stand for the code of a function, without its comments, docstring and annotations."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                del node.body[0]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]
