"""Tries out what combines gradients, on one rank: its own code runs on random gradients, and shows what it would send."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from hvdlite.algorithms.slices import split
from hvdlite.comm.between_hosts import reduce_between_hosts, scatter_sum
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.aggregator import Aggregator, FlatBucket, Weights
from hvdlite.gradients.layout import lay_out
from hvdlite.gradients.lossy.powersgd import PowerSGD
from hvdlite.gradients.lossy.topk import TopK
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.tensors.reduction import reduction
from hvdlite.tools.advise.exchanges import EqualRanks
from hvdlite.tools.advise.profile import Compressed

AGGREGATORS: dict[str, Callable[[float], Aggregator]] = {
    "powersgd": lambda rank: PowerSGD(int(rank)),
    "topk": lambda ratio: TopK(ratio),
}
"""What makes an aggregator of the number in its strategy's name."""

_REPEATS, _SECONDS = 7, 1.0
"""A trial runs so often, or for so long if that is shorter."""


def try_aggregator(kind: str, number: float, infos: Sequence[TensorInfo], ranks: int) -> Compressed:
    """Combine random gradients by an aggregator.

    Args:
        kind: A key of `AGGREGATORS`.
        number: Its setting.
        infos: Dtype and shape of each gradient.
        ranks: The number of ranks.
    """
    made, chance = AGGREGATORS[kind](number), np.random.default_rng(0)
    arrays, tensors = [], {}
    for block in lay_out(infos, 1):
        flat = np.empty(block.length, reduction(block.dtype, ReduceOp.SUM).wide_dtype)
        arrays.append(flat)
        for index, (start, stop) in block.spans.items():
            tensors[index] = flat[start:stop].reshape(infos[index].shape)

    def prepare() -> None:
        for flat in arrays:
            flat[:] = chance.standard_normal(flat.size)

    def run(cross: EqualRanks) -> None:
        made.aggregate(FlatBucket(arrays, tensors), Weights(1.0, ranks), cast("HierarchicalCollectives", cross))

    return _tried(prepare, run, ranks)


def _divide_by(hosts: int) -> Callable[[Array], None]:
    def divide(total: Array) -> None:
        total /= hosts

    return divide


def try_halves(infos: Sequence[TensorInfo], hosts: int) -> Compressed:
    """Sum gradients that travel as float16 between hosts of one rank each, from their dtype and back to it."""
    (block,) = lay_out([TensorInfo("float16", info.shape) for info in infos], 1)
    size = block.length
    gradients, how = np.zeros(size, np.float32), reduction("float16", ReduceOp.SUM)
    half, wide = np.empty(size, how.storage), np.empty(size, how.wide_dtype)

    def run(cross: EqualRanks) -> None:
        how.narrow(gradients, half)
        how.combine((half,), wide)
        reduce_between_hosts(cross, how, wide, half, _divide_by(hosts))
        how.combine((half,), gradients)

    return _tried(lambda: None, run, hosts)


def try_whole(infos: Sequence[TensorInfo], hosts: int) -> Compressed:
    """Sum whole gradients between hosts of one rank each."""

    def combine(cross: EqualRanks, dtype: str, size: int) -> None:
        how = reduction(dtype, ReduceOp.SUM)
        wide, result = np.zeros(size, how.wide_dtype), np.empty(size, how.storage)
        reduce_between_hosts(cross, how, wide, result, _divide_by(hosts))

    return _by_dtype(combine, infos, hosts)


def try_sharded(infos: Sequence[TensorInfo], hosts: int) -> Compressed:
    """Give each of some hosts of one rank each its shard of the summed gradients, and all of them the new parameters."""

    def combine(cross: EqualRanks, dtype: str, size: int) -> None:
        how, counts = reduction(dtype, ReduceOp.SUM), split(size, hosts)
        own, parameters = np.empty(counts[0], how.storage), np.empty(size, how.storage)
        wide = np.zeros(size, how.wide_dtype)
        scatter_sum(cross, how, wide, own, counts, _divide_by(hosts))
        cross.allgather(own, parameters, counts)

    return _by_dtype(combine, infos, hosts)


def _by_dtype(combine: Callable[[EqualRanks, str, int], None], infos: Sequence[TensorInfo], hosts: int) -> Compressed:
    blocks = lay_out(infos, 1)

    def run(cross: EqualRanks) -> None:
        for block in blocks:
            combine(cross, block.dtype, block.length)

    return _tried(lambda: None, run, hosts)


def _tried(prepare: Callable[[], object], run: Callable[[EqualRanks], object], ranks: int) -> Compressed:
    """Run often enough to say how long one run takes. The first run is left out: memory is new then."""
    times: list[float] = []
    began = time.perf_counter()
    while True:
        cross = EqualRanks(ranks)
        prepare()
        begin = time.perf_counter()
        run(cross)
        times.append(time.perf_counter() - begin)
        if len(times) > _REPEATS or (len(times) > 1 and time.perf_counter() - began > _SECONDS):
            return Compressed(statistics.median(times[1:]), tuple(cross.exchanges))
