"""The state of a sharded optimizer. Each rank has the state of its pieces; all ranks together can merge these states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import ArgumentError, ranks_text
from hvdlite.gradients.layout import Piece
from hvdlite.ranks.together import absent_ranks
from hvdlite_torch.tensors.sliced import State, copy_of, is_elementwise, local_of

CALL = "state_dict() of a sharded optimizer, which every rank calls"
"""What reports of a wait call the exchange of states: a rank may wait in it while the others train on."""


class StateShard(NamedTuple):
    """One rank's shard of an optimizer's state.

    Attributes:
        dealt: The rank's number and the number of ranks when shards were dealt out; None if none have been.
        origin: The origin of the state, in words.
        steps: Whether the rank steps a piece of some parameter.
        pieces: For each piece that has a state: the number of its parameter among all parameters of the optimizer; its first
            element; the element after its last; and its state by name. A True beside a value says that the value belongs on
            the parameter's device.
    """

    dealt: tuple[int, int] | None
    origin: str
    steps: bool
    pieces: list[tuple[int, int, int, dict[str, tuple[Any, bool]]]]


def gather(
    optimizer: torch.optim.Optimizer,
    pieces: Mapping[Piece, torch.Tensor],
    parameters: Sequence[torch.Tensor],
    dealt: tuple[int, int] | None,
    origin: str,
    process_set: ProcessSet,
) -> list[StateShard]:
    """Return the state shards of all ranks. Every rank of the process set calls this.

    See `own_shard` for the other arguments.

    Args:
        process_set: The ranks that share the parameters.

    Raises:
        ArgumentError: A rank has joined. It keeps its shard, which nobody else has.
    """
    mine = own_shard(optimizer, pieces, parameters, dealt, origin)
    everybody = hvdlite.allgather_object(mine, name=CALL, process_set=process_set)
    check_all_there(everybody, process_set.members)
    return everybody


def check_all_there(everybody: Sequence[Any], ranks: Sequence[int]) -> None:
    """Raise ArgumentError if a rank has joined: it has said nothing, and nobody else has its shard."""
    if joined := absent_ranks(ranks, everybody):
        raise ArgumentError(
            f"The whole state of a sharded optimizer cannot be had, because {ranks_text(joined)} has joined, which has its "
            "part: call state_dict(), and freeze or thaw parameters, before any rank calls join(), or after it has returned."
        )


def own_shard(
    optimizer: torch.optim.Optimizer,
    pieces: Mapping[Piece, torch.Tensor],
    parameters: Sequence[torch.Tensor],
    dealt: tuple[int, int] | None,
    origin: str,
) -> StateShard:
    """Return this rank's state shard.

    Args:
        optimizer: The optimizer. Its groups hold whole parameters, and its state is the state of `pieces`.
        pieces: This rank's pieces, each with the parameter that the optimizer steps.
        parameters: The parameters. ``piece.tensor`` is an index in this sequence.
        dealt: See `StateShard`.
        origin: See `StateShard`.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(all_of(optimizer))}
    return StateShard(
        dealt,
        origin,
        bool(pieces),
        [
            (
                numbers[id(parameters[piece.tensor])],
                piece.start,
                piece.stop,
                {name: _to_send(value, parameter) for name, value in optimizer.state[parameter].items()},
            )
            for piece, parameter in pieces.items()
            if parameter in optimizer.state and id(parameters[piece.tensor]) in numbers
        ],
    )


def merge(
    optimizer: torch.optim.Optimizer,
    own: State,
    everybody: Sequence[StateShard],
    in_host_memory: bool,
    ranks: Sequence[int],
) -> State:
    """Return the state of whole parameters.

    Args:
        optimizer: The optimizer of the parameters.
        own: The state that this rank has besides the state of its pieces.
        everybody: The state shards of all ranks.
        in_host_memory: Whether the state is put into host memory, and not on the device of the parameters.
        ranks: The world ranks that share the parameters, for messages.

    Raises:
        ArgumentError: Some ranks lack their part of the state. The error is raised on all ranks.
    """
    parameters = all_of(optimizer)
    _check_complete(parameters, everybody, ranks)
    whole = dict(own)
    for number, start, stop, values in (piece for shard in everybody for piece in shard.pieces):
        parameter = parameters[number]
        target = whole.setdefault(parameter, {})
        piece = Piece(number, start, stop)
        shape = cut(parameter.data, piece).shape
        for name, (value, follows) in values.items():
            follows = follows and not in_host_memory
            device = parameter.device if follows else None
            if isinstance(value, torch.Tensor) and value.shape == shape and shape:
                if name not in target:
                    target[name] = torch.empty(parameter.shape, dtype=value.dtype, device=device)
                cut(target[name], piece).copy_(value)
            else:
                target[name] = value.to(device) if follows else value
    return whole


def why_lost(everybody: Sequence[StateShard]) -> str:
    """Return the reason why the shards of an earlier world do not make a whole state, in words; an empty text if they do."""
    there = [shard for shard in everybody if shard.dealt is not None]
    sizes = {shard.dealt[1] for shard in there if shard.dealt is not None}
    numbers = {shard.dealt[0] for shard in there if shard.dealt is not None}
    states = [values for shard in there for *_, values in shard.pieces]
    stateless = any(shard.steps for shard in there) and not any(
        value is not None for values in states for value, _ in values.values()
    )
    if sizes and (len(sizes) > 1 or numbers != set(range(*sizes))) and not stateless:
        return (
            f"a part of this sharded optimizer's state is gone: of the {max(sizes)} ranks that had shares of it before "
            f"shutdown() and init(), only {ranks_text(sorted(numbers))} of that time are in the job now. Load a checkpoint, by "
            "load_state_dict() on every rank, or on one and hvd.broadcast_optimizer_state(optimizer, that rank) on all; or "
            "make the optimizer anew."
        )
    if len({shard.origin for shard in there}) > 1:
        return (
            "the ranks had not loaded the same state into this sharded optimizer before shutdown() and init(), so there is "
            "none of all ranks. Load one, by load_state_dict() on every rank, or on one and "
            "hvd.broadcast_optimizer_state(optimizer, that rank) on all."
        )
    return ""


def all_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of its groups; of sliced ones, this rank's slices."""
    return [local_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece of a parameter, or of a tensor of its shape, as a view. It is flat, unless it is the whole tensor."""
    if piece.stop - piece.start == tensor.numel():
        return tensor
    return tensor.view(-1)[piece.start : piece.stop]


def shard_of(whole: State, parameters: Sequence[torch.Tensor], pieces: Mapping[Piece, torch.Tensor]) -> State:
    """Return the state of pieces, cut from the state of whole parameters, and of everything except `parameters`.

    Args:
        whole: The state of whole parameters.
        parameters: The parameters that have been dealt out.
        pieces: This rank's pieces, each with the parameter that the optimizer steps.
    """
    dealt_out = set(parameters)
    kept = {key: state for key, state in whole.items() if key not in dealt_out}
    for piece, parameter in pieces.items():
        of = parameters[piece.tensor]
        if of in whole:
            kept[parameter] = {
                name: cut(value.contiguous(), piece).clone() if is_elementwise(value, of) else copy_of(value)
                for name, value in whole[of].items()
            }
    return kept


def _check_complete(parameters: Sequence[torch.Tensor], everybody: Sequence[StateShard], ranks: Sequence[int]) -> None:
    """Raise an error if pieces of some parameter's state are missing, or have different names.

    Raises:
        ArgumentError: The text says which ranks have some state.
    """
    found: dict[int, dict[tuple[str, ...], int]] = {}
    for number, start, stop, values in (piece for shard in everybody for piece in shard.pieces):
        kinds = found.setdefault(number, {})
        kind = tuple(sorted(values))
        kinds[kind] = kinds.get(kind, 0) + stop - start
    for number, kinds in found.items():
        parameter = parameters[number]
        if len(kinds) > 1 or sum(kinds.values()) != parameter.numel():
            have = [
                rank for rank, shard in zip(ranks, everybody, strict=True) if number in [p[0] for p in shard.pieces]
            ]
            raise ArgumentError(
                f"of the optimizer's state of a parameter of shape {tuple(parameter.shape)}, parts are missing: only "
                f"{ranks_text(have)} of {len(everybody)} ranks have some. State of a "
                "sharded optimizer was set or deleted on some ranks only: do that on all of them."
            )


def _to_send(value: Any, parameter: torch.Tensor) -> tuple[Any, bool]:
    """Return a value of the state in host memory, and whether it belongs on the parameter's device."""
    if not isinstance(value, torch.Tensor):
        return value, False
    return value.cpu(), value.device == parameter.device
