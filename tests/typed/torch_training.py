"""Programs that train with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import assert_type

import hvdlite_torch as hvd


class Other(torch.optim.Optimizer):
    """A user's optimizer."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """A step."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.5 * parameter.grad

    def own(self) -> int:
        """What torch's has not."""
        return 2


def train() -> int:
    """The README's loop, and what else an optimizer can do."""
    model = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), shard=True)
    for x, y in [(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.set_batch_weight(len(x))
        optimizer.step()
    adam: torch.optim.Adam = optimizer
    assert isinstance(adam, torch.optim.Adam)
    distributed: hvd.Distributed = optimizer
    assert isinstance(distributed, hvd.Distributed)

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=hvd.Compression.fp16)
    with sgd.no_sync():
        F.cross_entropy(model(x), y).backward()
    sgd.synchronize()
    with sgd.skip_synchronize():
        sgd.step()
    torch.optim.lr_scheduler.ConstantLR(sgd)

    other = hvd.DistributedOptimizer(Other(list(model.parameters())))
    assert_type(other, Other)
    assert isinstance(other, hvd.Distributed)
    other.set_batch_weight(2)
    return other.own()


def asynchronous() -> tuple[float, float]:
    """Ranks at their own pace."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.AsyncDistributedOptimizer(optimizer, model, mode="ssp", staleness=2)
    sgd: torch.optim.SGD = optimizer
    served: hvd.AsyncDistributed = optimizer
    sgd.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.set_batch_weight(3)
    optimizer.step()
    served.synchronize()
    assert_type(optimizer.is_server, bool)
    assert_type(optimizer.workers, tuple[int, ...])
    optimizer.finish()

    adam = torch.optim.Adam(model.parameters())
    with hvd.AsyncDistributedOptimizer(adam, mode="async", delay_compensation=hvd.DCASGD()) as adam:
        adam.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        adam.step()

    other = hvd.AsyncDistributedOptimizer(Other(list(model.parameters())), mode="sync")
    assert_type(other, Other)
    assert isinstance(other, hvd.AsyncDistributed)
    other.finish()
    return other.own(), float(model.weight.detach().sum())


def late_servers() -> None:
    """Ranks that only serve until the program ends."""
    hvd.serve_parameters()


class Mean(hvd.Aggregator):
    """A user's way to combine gradients."""

    def aggregate(self, bucket: hvd.FlatBucket, weights: hvd.Weights, collectives: Any) -> None:
        """The weighted mean."""
        for array in bucket.arrays:
            array *= weights.own / weights.total
            collectives.allreduce(array, hvd.Sum)


def local_steps() -> int:
    """Few exchanges, and an own aggregator."""
    model = nn.Linear(2, 1)
    every: hvd.LocalSGD = hvd.LocalSGD(every=2)
    assert_type(every.every, int)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), local_steps=every)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.average_parameters()
    hvd.DistributedOptimizer(torch.optim.AdamW(nn.Linear(2, 1).parameters()), local_steps=hvd.DiLoCo(every=4))
    own = hvd.DistributedOptimizer(torch.optim.RMSprop(model.parameters()), aggregator=Mean())
    own.set_backward_passes_per_step(2)
    hvd.assert_in_sync(model)
    return every.every


@hvd.rank_zero_only
def first_says(text: str) -> int:
    """What one rank does."""
    return len(text)


def around_training() -> int | None:
    """What programs do before and after they train."""
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    hvd.SyncBatchNorm(2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.scale_lr(optimizer)
    assert_type(hvd.scale_lr(0.1, "sqrt"), float)
    assert_type(hvd.scale_lr(1), float)
    optimizer = hvd.DistributedOptimizer(optimizer)
    assert_type(hvd.warmup(optimizer, steps=10), torch.optim.lr_scheduler.LRScheduler)
    with hvd.uneven():
        for _ in range(1 + hvd.rank()):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    with hvd.own_parameters(model):
        pass
    assert_type(first_says("done"), int | None)
    return first_says("done")


def in_parts(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A model that lies on several ranks."""
    grid = hvd.ProcessGrid(pp=2, tp=-1)
    plan = hvd.slice_layers(model, grid["tp"])
    assert_type(plan.full_state_dict(), dict[str, torch.Tensor])
    pipeline = hvd.Pipeline(model, grid["pp"], loss=F.mse_loss, microbatches=4)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    assert_type(pipeline.step(x, y, optimizer), torch.Tensor)
    assert_type(pipeline.report(), str)
    wavefront = hvd.Wavefront(model, loss=F.mse_loss, chunks=4)
    return wavefront.step(x, y, torch.optim.SGD(wavefront.parameters(), lr=0.1))


def saved(folder: Path) -> int:
    """A checkpoint, and the start from it."""
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    assert_type(hvd.checkpoint.save(folder, model=model, optimizer=optimizer, epoch=2), Path)
    assert_type(hvd.checkpoint.save(folder, model=model, optimizer=optimizer, epoch=2, wait=False), Path)
    hvd.checkpoint.wait()
    loaded = hvd.checkpoint.load(folder, model=model, optimizer=optimizer)
    assert_type(loaded, hvd.checkpoint.Loaded | None)
    epoch: int = loaded["epoch"] if loaded else 0
    return epoch


def served() -> None:
    """A model behind HTTP."""
    model = hvd.servable(nn.Linear(2, 1), example=torch.ones(2))
    hvd.serve(model, port=8000)


@hvd.elastic.run
def elastic_train(state: hvd.elastic.TorchState, epochs: int) -> int:
    """A training that goes on when ranks come and go."""
    while state.epoch < epochs:
        state.sampler.set_epoch(state.epoch)
        state.epoch += 1
        state.commit()
    epoch: int = state.epoch
    return epoch


class Averaged(hvd.elastic.StateHandler):
    """A user's handler."""


def elastic() -> int:
    """States and their handlers."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = hvd.elastic.ElasticSampler([1, 2, 3, 4], shuffle=True)
    handlers: list[hvd.elastic.StateHandler] = [
        hvd.elastic.ModelStateHandler(model),
        hvd.elastic.OptimizerStateHandler(optimizer),
        hvd.elastic.SamplerStateHandler(sampler),
        hvd.elastic.StateDictHandler(torch.optim.lr_scheduler.ConstantLR(optimizer)),
    ]
    registry = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([*registry, (dict, Averaged)])
    hvd.elastic.set_handler_registry(registry)
    plain = hvd.elastic.ObjectState(epoch=0)
    base: hvd.elastic.State = plain
    base.commit()
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    try:
        return elastic_train(state, epochs=3) + len(handlers)
    except hvd.elastic.HostsUpdatedInterrupt:
        return 0
