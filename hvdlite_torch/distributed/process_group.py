"""`HvdliteProcessGroup`: the collectives and messages of one group of torch.distributed, under the names that torch calls.

torch has two names for some methods: that of today (2.13) and that of before. Both are given, for torch's C++ code and its
Python code look for different ones. The names in texts are those of the functions that programs call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.protocols import ANY, Array
from hvdlite_torch.distributed.group_and_backend import OLDER_NAMES, GroupAndBackend, Tensors, also_bare, on_any_device
from hvdlite_torch.distributed.operands import Operand, TorchReduction, check_equal, describe, name_of
from hvdlite_torch.distributed.work import MessageWork


class HvdliteProcessGroup(GroupAndBackend):
    """One rank's end of a process group. `torch.distributed.ProcessGroup` has the methods; roots are ranks of the group."""

    # Reductions

    @on_any_device
    @also_bare(1, "reduceOp")
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_all("all_reduce", tensors, opts)

    @on_any_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_all("all_reduce_coalesced", tensors, opts)

    def _reduce_all(self, name: str, tensors: Tensors, opts: Any) -> dist.Work:
        operands = self._outputs(tensors)
        hows = [TorchReduction(_op(opts), tensor.dtype, self._size) for tensor in tensors]

        def run(collectives: HierarchicalCollectives) -> None:
            for operand, how in zip(operands, hows, strict=True):
                how.allreduce(collectives, operand.values)
                operand.write_back()

        return self._begin(f"{name}({_texts(tensors)}, {hows[0].name})", run, tensors, opts)

    @on_any_device
    @also_bare(1, "rootRank", "reduceOp")
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        root = opts.rootRank
        (operand,) = self._operands(tensors, self._rank == root)
        how = TorchReduction(_op(opts), tensors[0].dtype, self._size)

        def run(collectives: HierarchicalCollectives) -> None:
            values = operand.values if self._rank == root else operand.values.copy()
            how.allreduce(collectives, values)
            if self._rank == root:
                operand.write_back()

        return self._begin(f"reduce({_texts(tensors)}, {how.name}, group_dst={root})", run, tensors, opts)

    @on_any_device
    @also_bare(2, "reduceOp")
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        (out,) = self._outputs(outputs)
        (sources,) = (self._operands(tensors) for tensors in inputs)
        how = TorchReduction(_op(opts), outputs[0].dtype, self._size)
        counts = _sizes(sources)
        check_equal("the output of reduce_scatter", out.values.size, counts[self._rank])

        def run(collectives: HierarchicalCollectives) -> None:
            how.reduce_scatter(collectives, _joined(sources), out.values, counts)
            out.write_back()

        return self._begin(f"reduce_scatter({_texts(inputs[0])}, {how.name})", run, outputs, opts)

    @on_any_device
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_tensors("reduce_scatter_tensor", [output], [input], opts)

    @on_any_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_tensors("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_tensors(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        outs, sources = self._outputs(outputs), self._operands(inputs)
        hows = [TorchReduction(_op(opts), tensor.dtype, self._size) for tensor in outputs]
        for out, source in zip(outs, sources, strict=True):
            check_equal(f"the input of {name}", source.values.size, out.values.size * self._size)

        def run(collectives: HierarchicalCollectives) -> None:
            for out, source, how in zip(outs, sources, hows, strict=True):
                how.reduce_scatter(collectives, source.values, out.values, [out.values.size] * self._size)
                out.write_back()

        return self._begin(f"{name}({_texts(inputs)}, {hows[0].name})", run, outputs, opts)

    # Moves

    @on_any_device
    @also_bare(1, "rootRank")
    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        root = opts.rootRank
        (operand,) = self._operands(tensors, self._rank != root)

        def run(collectives: HierarchicalCollectives) -> None:
            collectives.broadcast(operand.values, root)
            if self._rank != root:
                operand.write_back()

        return self._begin(f"broadcast({_texts(tensors)}, group_src={root})", run, tensors, opts)

    @on_any_device
    @also_bare(2)
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._gather_all("all_gather", outputs, inputs, opts)

    @on_any_device
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._gather_all("all_gather_coalesced", list(zip(*outputs, strict=True)), inputs, opts)

    def _gather_all(self, name: str, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        outs, sources = [self._outputs(tensors) for tensors in outputs], self._operands(inputs)
        for out, source in zip(outs, sources, strict=True):
            check_equal("the list of outputs", len(out), self._size)
            check_equal(f"the input of {name}", source.values.size, out[self._rank].values.size)

        def run(collectives: HierarchicalCollectives) -> None:
            for out, source in zip(outs, sources, strict=True):
                everything = np.empty(sum(_sizes(out)), source.values.dtype)
                collectives.allgather(source.values, everything, _sizes(out))
                _deal(everything, out)

        return self._begin(f"{name}({', '.join(map(_texts, outputs))})", run, list(chain(*outputs)), opts)

    @on_any_device
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._gather_into_tensors("all_gather_into_tensor", [output], [input], opts)

    @on_any_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._gather_into_tensors("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _gather_into_tensors(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        outs, sources = self._outputs(outputs), self._operands(inputs)
        for out, source in zip(outs, sources, strict=True):
            check_equal(f"the output of {name}", out.values.size, source.values.size * self._size)

        def run(collectives: HierarchicalCollectives) -> None:
            for out, source in zip(outs, sources, strict=True):
                collectives.allgather(source.values, out.values, [source.values.size] * self._size)
                out.write_back()

        return self._begin(f"{name}({_texts(inputs)})", run, outputs, opts)

    @on_any_device
    @also_bare(2, "rootRank")
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        (source,) = self._operands(inputs)
        root, count = opts.rootRank, source.values.size
        outs = self._outputs(outputs[0]) if self._rank == root else []
        if self._rank == root:
            _check_list("gather", outs, self._size, count)

        def run(collectives: HierarchicalCollectives) -> None:
            out = np.empty(len(outs) * count, source.values.dtype)
            collectives.alltoall(source.values, _only(root, count, self._size), out, [len(outs) and count] * self._size)
            _deal(out, outs)

        text = f"gather({_texts(inputs)}, group_dst={root})"
        return self._begin(text, run, outputs[0] if self._rank == root else [], opts)

    @on_any_device
    @also_bare(2, "rootRank")
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        (out,) = self._outputs(outputs)
        root, count = opts.rootRank, out.values.size
        sources = self._operands(inputs[0]) if self._rank == root else []
        if self._rank == root:
            _check_list("scatter", sources, self._size, count)

        def run(collectives: HierarchicalCollectives) -> None:
            values = _joined(sources) if sources else out.values[:0]
            collectives.alltoall(
                values, [len(sources) and count] * self._size, out.values, _only(root, count, self._size)
            )
            out.write_back()

        return self._begin(f"scatter({_texts(outputs)}, group_src={root})", run, outputs, opts)

    @on_any_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        outs, sources = self._outputs(outputs), self._operands(inputs)
        check_equal("the list of outputs", len(outs), self._size)
        check_equal("the list of inputs", len(sources), self._size)

        def run(collectives: HierarchicalCollectives) -> None:
            out = np.empty(sum(_sizes(outs)), sources[0].values.dtype)
            collectives.alltoall(_joined(sources), _sizes(sources), out, _sizes(outs))
            _deal(out, outs)

        return self._begin(f"all_to_all({name_of(inputs[0].dtype)})", run, outputs, opts)

    @on_any_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        (out,), (source,) = self._outputs([output]), self._operands([input])
        sends = _splits(input, source, input_split_sizes, self._size)
        receives = _splits(output, out, output_split_sizes, self._size)

        def run(collectives: HierarchicalCollectives) -> None:
            collectives.alltoall(source.values, sends, out.values, receives)
            out.write_back()

        return self._begin(f"all_to_all_single({name_of(input.dtype)})", run, [output], opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        # The ranks meet before every call, to compare what they call.
        return self._begin("barrier()", lambda collectives: None, [], opts)

    # Messages

    @on_any_device
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        (operand,) = self._operands(tensors)
        request = self.communicator.isend(operand.values.view(np.uint8), dst, tag)
        return self._note(MessageWork(request, operand, receives=False))

    @on_any_device
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        (operand,) = self._outputs(tensors)
        request = self.communicator.irecv(operand.values.view(np.uint8), src, tag)
        return self._note(MessageWork(request, operand, receives=True))

    @on_any_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, ANY, tag)


for _name, _older in OLDER_NAMES.items():
    setattr(HvdliteProcessGroup, _older, getattr(HvdliteProcessGroup, _name))


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _texts(tensors: Tensors) -> str:
    return describe(tensors[0]) if len(tensors) == 1 else ", ".join(map(describe, tensors))


def _sizes(operands: Sequence[Operand]) -> list[int]:
    return [operand.values.size for operand in operands]


def _joined(operands: Sequence[Operand]) -> Array:
    """Return the values of all operands as one array."""
    joined: Array = np.concatenate([operand.values for operand in operands])
    return joined


def _deal(everything: Array, outs: Sequence[Operand]) -> None:
    """Copy consecutive pieces of an array to the outputs."""
    start = 0
    for out in outs:
        out.values[:] = everything[start : start + out.values.size]
        out.write_back()
        start += out.values.size


def _only(root: int, count: int, size: int) -> list[int]:
    return [count if rank == root else 0 for rank in range(size)]


def _check_list(name: str, operands: Sequence[Operand], size: int, count: int) -> None:
    check_equal(f"the list of {name}", len(operands), size)
    for operand in operands:
        check_equal(f"a tensor in the list of {name}", operand.values.size, count)


def _splits(tensor: torch.Tensor, operand: Operand, splits: Sequence[int], size: int) -> list[int]:
    """Return how many elements go to each rank, from the rows in `splits`; equally many if it is empty."""
    if not splits:
        check_equal("the first dimension, cut in equal parts,", tensor.numel() // size * size, tensor.numel())
        return [tensor.numel() // size] * size
    rows = tensor.shape[0]
    check_equal("the list of split sizes", len(splits), size)
    check_equal("the first dimension", rows, sum(splits))
    row = operand.values.size // rows if rows else 0
    return [count * row for count in splits]
