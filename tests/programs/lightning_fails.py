"""Ask hvdlite's strategy for what it refuses; train with a hook for communication; then rank 1 raises in a training step."""

import time

import lightning
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

import hvdlite_torch as hvd
import hvdlite_torch.lightning
from hvdlite.errors import ArgumentError

QUIET = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
calls: list[str] = []


# torch looks at the annotation of the bucket, but does not say that it exports this class.
def hook(state: list[str], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    state.append("hook")
    assert dist.group.WORLD is not None
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


class Model(lightning.LightningModule):  # type: ignore[misc]  # mypy does not see Lightning
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer, self.fails_at = torch.nn.Linear(3, 1), fails_at

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        if number == self.fails_at and hvd.rank() == 1:
            print(f"failing at {time.time()}", flush=True)
            raise ValueError("the reason of rank 1")
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


for name in ("timeout", "process_group_backend", "start_method", "parallel_devices"):
    with pytest.raises(ArgumentError, match=rf"strategy\({name}=\.\.\.\): leave it out"):
        hvdlite_torch.lightning.strategy(**{name: None})
with pytest.raises(ArgumentError, match="the Trainer has 5 devices .cpu. on a host with 2 ranks"):
    lightning.Trainer(strategy=hvdlite_torch.lightning.strategy(), devices=5, **QUIET)
with pytest.raises(ArgumentError, match=r"Trainer\(num_nodes=3\): the ranks are on 1"):
    lightning.Trainer(strategy=hvdlite_torch.lightning.strategy(), num_nodes=3, **QUIET)

data = DataLoader(TensorDataset(torch.randn(64, 3)), 4)
strategy = hvdlite_torch.lightning.strategy(ddp_comm_hook=hook, ddp_comm_state=calls)
trainer = lightning.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_steps=3, **QUIET)
model = Model()
trainer.fit(model, data)
hvd.assert_in_sync(model)
assert calls == ["hook"] * 3, calls
assert dist.get_backend() == "hvdlite"
seen = (
    trainer.global_rank,
    trainer.local_rank,
    trainer.node_rank,
    trainer.world_size,
    trainer.num_devices,
    trainer.num_nodes,
)
assert seen == (hvd.rank(), hvd.rank(), 0, 2, 2, 1), seen
average = trainer.strategy.reduce(torch.tensor(hvd.rank()), reduce_op="mean")
assert average.item() == 0.5, average
print("refused and trained", flush=True)

lightning.Trainer(strategy=hvdlite_torch.lightning.strategy(), max_epochs=1, **QUIET).fit(Model(fails_at=5), data)
