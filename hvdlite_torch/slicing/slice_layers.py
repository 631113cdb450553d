"""`slice_layers` slices the layers of a model over ranks, by rules that need no run of the model, and prints its plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import hvdlite
from hvdlite.errors import ArgumentError, ranks_text
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.distributed import backend
from hvdlite_torch.slicing.attention import divide_heads, slice_heads
from hvdlite_torch.slicing.convolution import slice_channels
from hvdlite_torch.slicing.embedding import slice_embeddings
from hvdlite_torch.slicing.linear import slice_columns, slice_rows
from hvdlite_torch.slicing.rules import Found, find
from hvdlite_torch.slicing.whole import altered, watched
from hvdlite_torch.step.amp import teach_grad_scaler
from hvdlite_torch.tensors import split_norm
from hvdlite_torch.tensors.sliced import full_state_dict, load_full_state_dict

Style = Literal["columns", "rows"] | ParallelStyle | None
_WORDS: Mapping[str, type[ParallelStyle]] = {"columns": ColwiseParallel, "rows": RowwiseParallel}
_HOW = {
    "pair": "columns, then rows",
    "attention": "heads",
    "heads": "heads",
    "embedding": "rows",
    "convolution": "output channels, gathered",
}


class _Entry(NamedTuple):
    name: str
    what: str
    how: str
    sliced: bool


class SlicePlan:
    """What `slice_layers` has done with a model. ``print(plan)`` shows it.

    Args:
        model: The model, which is sliced.
        mesh: The ranks.
        entries: What was sliced, and what could not be.
        parameters: How many parameters are sliced, and how many there are.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, entries: Sequence[_Entry], parameters: tuple[int, int]
    ) -> None:
        self._model, self._mesh = model, mesh
        self._entries, self._parameters = list(entries), parameters

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the whole model, under the names that it had before. All ranks of the axis call this."""
        return full_state_dict(self._model)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the whole model, such as `full_state_dict` has returned. All ranks of the axis call this.

        Raises:
            ArgumentError: `state` lacks a tensor, or has another shape of it.
        """
        load_full_state_dict(self._model, state)

    def __str__(self) -> str:
        sliced, total = self._parameters
        ranks = ranks_text(self._mesh.mesh.flatten().tolist())
        lines = [f"slice_layers over {ranks}: {sliced:,} of {total:,} parameters are sliced, the others are replicated"]
        rows: dict[tuple[str, str], list[str]] = {}
        for entry in self._entries:
            rows.setdefault((entry.what, entry.how if entry.sliced else f"not sliced: {entry.how}"), []).append(
                entry.name
            )
        width = max((len(what) for what, _ in rows), default=0)
        lines += [f"  {what:{width}}  {how}  ({_shortly(names)})" for (what, how), names in rows.items()]
        return "\n".join(lines)


def slice_layers(
    model: nn.Module,
    over: ProcessSet | DeviceMesh,
    plan: Mapping[str, Style] | None = None,
    *,
    smallest: int = 2**14,
    verbose: bool = True,
) -> SlicePlan:
    """Slice the layers of a model over ranks (tensor parallelism), in place. All ranks of the axis call this.

    Each rank of `over` keeps its slices of the weights, as `DTensor`, and works on the same batch as the others. The model
    takes and returns plain tensors as before, and its results are the same. These layers are sliced:

    - two `nn.Linear` with only activations and dropout between them, in an `nn.Sequential`, in torch's transformer layers, or
      in a forward pass that can be read: the first by columns, the second by rows, one all-reduce for both (Megatron-LM,
      arXiv:1909.08053);
    - `nn.MultiheadAttention`, and attention of models of transformers (GPT-2, BERT, ViT, Llama, …): the heads are dealt out;
    - `nn.Embedding`: by rows, together with a head that has its weight;
    - convolutions: by output channels, which are gathered.

    Everything else is replicated. The ranks begin with the weights and with torch's random state of the first rank of the axis,
    so that dropout and new layers are the same on all of them; draw no random numbers on some of them only.

    Args:
        model: The model, with whole weights, such as loaded ones. Make optimizers afterwards.
        over: The ranks, neighbours on one host if possible: ``grid["tp"]``; or a mesh of one axis, such as
            ``grid.to_torch()["tp"]``, to let FSDP have another axis of the same mesh.
        plan: For names of layers, or patterns such as ``"blocks.*.fc1"``: "columns", "rows", a `ParallelStyle` of torch's, or
            None to leave the layer alone. These layers are not sliced by the rules above.
        smallest: Layers with fewer parameters are replicated.
        verbose: Whether the first rank of the job prints the plan.

    Returns:
        The plan.

    Raises:
        ArgumentError: A name in `plan` fits no layer, or a word in it is unknown, or the model is sliced already.

    Examples:
        >>> def sliced():  # over one rank, because torch.distributed is one for a process, and ranks are threads here
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        ...     plan = hvd.slice_layers(model, hvd.global_process_set, smallest=0, verbose=False)
        ...     torch.distributed.destroy_process_group()
        ...     return plan
        >>> print(*on_ranks(1, sliced))
        slice_layers over rank 0: 72 of 76 parameters are sliced, the others are replicated
          pair of linear layers 4-8-4  columns, then rows  (0, 2)
    """
    mesh = over if isinstance(over, DeviceMesh) else backend.mesh_of(over)
    if mesh.ndim != 1:
        raise ArgumentError(f'slice_layers takes a mesh of one axis; got one of {mesh.ndim}: choose one, mesh["tp"].')
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ArgumentError("slice_layers: parameters of this model are sliced already (DTensor). Pass a plain model.")
    ranks = sorted(mesh.mesh.flatten().tolist())
    chosen = _chosen(model, plan or {})
    _start_alike(model, ranks, mesh)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    entries = [_Entry(name, "your plan", _word(style), style is not None) for name, style in chosen.items()]
    given = {name: style for name, style in chosen.items() if style is not None}
    if given:
        for name, style in given.items():
            _check_given(name, model.get_submodule(name), style, ranks)
        parallelize_module(model, mesh, given)
    for found in list(find(model, len(ranks), smallest)):
        if any(_within(name, chosen) for name in found.names):
            continue
        if not found.why_not:
            _slice(model, found, mesh)
        names = ", ".join(found.names)
        entries.append(_Entry(names, found.what, found.why_not or _HOW[found.kind], not found.why_not))
    for name, parameter in model.named_parameters():
        if name in trained:  # torch's styles make new parameters
            parameter.requires_grad_(trained[name])
    sliced = sum(
        parameter.numel()
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and any(not isinstance(each, Replicate) for each in parameter.placements)
    )
    split_norm.teach()
    teach_grad_scaler()
    made = SlicePlan(model, mesh, entries, (sliced, total))
    if verbose and hvdlite.rank() == 0:
        print(made, flush=True)
    return made


def _chosen(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, ParallelStyle | None]:
    """Return the style of each layer that the program has named."""
    names = [name for name, _ in model.named_modules()]
    chosen: dict[str, ParallelStyle | None] = {}
    for pattern, style in plan.items():
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            raise ArgumentError(f"slice_layers: no layer is called {pattern!r}. There are {_shortly(names[1:], 8)}.")
        if isinstance(style, str) and style not in _WORDS:
            raise ArgumentError(
                f'slice_layers: {pattern!r}: {style!r}: expected "columns", "rows", a ParallelStyle of torch, or None.'
            )
        chosen.update({name: _WORDS[style]() if isinstance(style, str) else style for name in fitting})
    return chosen


def _check_given(name: str, layer: Any, style: ParallelStyle, ranks: Sequence[int]) -> None:
    """Raise an error if a layer cannot be sliced as the program says."""
    rows = isinstance(style, RowwiseParallel)
    if not rows and not isinstance(style, ColwiseParallel):
        return
    if isinstance(layer, nn.Linear):
        width, what = (layer.in_features, "input features") if rows else (layer.out_features, "output features")
        why_not = watched(layer, inputs=rows, results=not rows)
    elif isinstance(layer, nn.Embedding):
        width, what = (layer.num_embeddings, "rows") if rows else (layer.embedding_dim, "columns")
        why_not = watched(layer)
    else:
        raise ArgumentError(
            f"slice_layers: plan: {name!r} is a {type(layer).__name__}, and {_word(style)} is for nn.Linear and nn.Embedding."
        )
    if width % len(ranks):
        why_not = f"its {width} {what} are not divisible by {len(ranks)}"
    own_forward = type(layer).forward not in (nn.Linear.forward, nn.Embedding.forward)
    if why_not := why_not or altered(layer, ["weight"]) or ("it has a forward pass of its own" if own_forward else ""):
        raise ArgumentError(
            f"slice_layers: plan: {name!r}, a {type(layer).__name__}, cannot be sliced by {_word(style)} over "
            f"{ranks_text(ranks)}: {why_not}. Say None for it, to leave it whole."
        )


def _word(style: ParallelStyle | None) -> str:
    return "it is left alone" if style is None else type(style).__name__


def _within(name: str, chosen: Mapping[str, object]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in chosen)


def _start_alike(model: nn.Module, ranks: Sequence[int], mesh: DeviceMesh) -> None:
    """Give all ranks of the axis the weights and the random state of its first rank."""
    if len(ranks) == 1:
        return
    group = mesh.get_group()
    tensors = [*model.parameters(), *model.buffers(), state := torch.get_rng_state()]
    for tensor in tensors:
        torch.distributed.broadcast(tensor.detach(), ranks[0], group=group)
    torch.set_rng_state(state)


def _slice(model: nn.Module, found: Found, mesh: DeviceMesh) -> None:
    layers: list[Any] = [model.get_submodule(name) for name in found.names]
    if found.kind in ("pair", "heads"):
        for layer in layers[:-1]:
            slice_columns(layer, mesh, found.parts)
        slice_rows(layers[-1], mesh)
        owner: Any = model.get_submodule(found.owner or found.names[0].rpartition(".")[0])
        if isinstance(owner, nn.TransformerEncoderLayer):
            owner.activation_relu_or_gelu = 0  # or the layer reads the weights of its children itself, in eval mode
        if found.kind == "heads":
            divide_heads(owner, mesh)
    elif found.kind == "embedding":
        slice_embeddings(layers, mesh)
    else:
        (slice_heads if found.kind == "attention" else slice_channels)(layers[0], mesh)


def _shortly(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
