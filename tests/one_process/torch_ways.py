"""How a torch training is distributed: the columns of the table. `Run` is one process, and each way changes some of it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import hvdlite_torch as hvd
from tests.one_process.rows import Inapplicable
from tests.one_process.torch_programs import PROGRAMS, STEPS, WIDTH, Batch, Program, batch_of, loss_of, train

Named = list[tuple[str, nn.Parameter]]


class Run:
    """One training. This class trains in one process, on the joined batches.

    Args:
        rows: What the program does.
        seed: Of the weights.
        is_other: Whether this is the second model of a program.

    Attributes:
        words: A regular expression: what an error that refuses this way must say.
        ranks: The number of ranks for which the way is made.
        tolerance: How far results may be from those of one process.
        alone: The training in one process with which the way is compared.
    """

    words = ""
    ranks = 1
    tolerance = 1e-9
    alone: type[Run]

    def __init__(self, rows: Sequence[Program], seed: int = 0, is_other: bool = False) -> None:
        self.rows, self.seed, self.is_other = rows, seed, is_other
        self.step_number = 0
        self.start()

    # The parts that ways change

    def start(self) -> None:
        """Make the model and its optimizer."""
        self.model: Any = self.make_model()
        self.optimizer: Any = self.wrap(self.pick("optimizer")(self.named()))

    def wrap(self, optimizer: torch.optim.Optimizer) -> Any:
        return optimizer

    def backward(self, batch: Batch, share: float) -> None:
        """Add the gradients of the mean loss of a batch."""
        batch_x = batch.x
        if self.penalty:
            batch_x = batch_x.clone().requires_grad_()
        output = self.model(batch_x)
        total, count = loss_of(output, batch.target)
        loss = total / count * batch.factor
        if self.penalty:
            (slope,) = torch.autograd.grad(output.square().sum(), batch_x, create_graph=True)
            loss = loss + self.penalty * slope.square().flatten(1).mean(1).mean()
        self.scaled(loss * share).backward()

    def synchronize(self) -> None:
        """Let the gradients be those of all ranks."""

    def synchronize_unless_sharded(self) -> None:
        self.synchronize()

    def step(self) -> None:
        self.clip_as_asked()
        self.optimizer.step()

    def clip_as_asked(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Clip by what distributed optimizers are given as ``max_grad_norm``."""
        if self.max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self.clip_norm(self.max_grad_norm)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            output: torch.Tensor = self.model(x)
        self.model.train()
        return output

    def resume_from_checkpoint(self) -> None:
        """Save, begin anew with other weights, and load."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the state of the whole model."""
        return self.whole(self.model.state_dict())

    def whole(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return values by names of parameters: those of the whole model."""
        return {name: value.detach().clone() for name, value in values.items()}

    def has_joined(self, step: int) -> bool:
        return False

    def finish(self) -> None: ...

    # What is the same everywhere

    def make_model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(*self.layers()).double()

    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.pick("layers")()
        return layers

    def pick(self, name: str) -> Callable[..., Any]:
        """Return the method of the row that has its own, or the common one."""
        own = [row for row in self.rows if getattr(type(row), name) is not getattr(Program, name)]
        return getattr((own or self.rows)[0], name)  # type: ignore[no-any-return]

    @property
    def max_grad_norm(self) -> float | None:
        return next((row.max_grad_norm for row in self.rows if row.max_grad_norm is not None), None)

    @property
    def penalty(self) -> float:
        return max(getattr(row, "penalty", 0.0) for row in self.rows)

    @property
    def passes(self) -> int:
        return max(row.passes for row in self.rows)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        for row in () if self.is_other else self.rows:
            loss = row.scaled(loss, self)
        return loss

    def named(self) -> Named:
        return list(self.model.named_parameters())

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named()]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(
            **({"set_to_none": False} if any(hasattr(r, "set_to_none") for r in self.rows) else {})
        )

    def clip_norm(self, norm: float) -> None:
        """Clip the gradients of the optimizer's parameters. Those that it does not have are each rank's own."""
        torch.nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], norm)

    def another(self) -> Run:
        return type(self)(self.rows, self.seed + 1, is_other=True)

    def batch(self, step: int, number: int) -> Batch:
        found = batch_of(step, number)
        for row in self.rows:
            found = row.batch(found, step)
        return found

    def backward_all(self, step: int) -> None:
        for number in range(self.passes):
            self.backward(self.batch(step, number), 1 / self.passes)

    def step_with_closure(self, step: int) -> None:
        def closure() -> float:
            self.zero_grad()
            self.backward_all(step)
            self.clip_as_asked()
            return 0.0

        self.optimizer.step(closure)


class _Chained(nn.Sequential):
    """Passes on the output of a recurrent layer without its state."""

    def forward(self, input: Any) -> Any:
        for layer in self:
            input = layer(input)
            input = input[0] if isinstance(input, tuple) else input
        return input


def _with_recurrent_layer(layers: list[nn.Module]) -> list[nn.Module]:
    return [*layers[:-1], nn.GRU(WIDTH, WIDTH, batch_first=True), layers[-1]]


class Recurrent(Run):
    """One process whose model has a recurrent layer."""

    def make_model(self) -> nn.Sequential:
        return _Chained(*super().make_model())

    def layers(self) -> list[nn.Module]:
        return _with_recurrent_layer(super().layers())


Run.alone = Run


class DataParallel(Run):
    """Each rank has a part of the rows."""

    ranks = 2
    options: dict[str, Any] = {}

    @property
    def process_set(self) -> Any:
        return hvd.global_process_set

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank among those with other rows, and how many these are."""
        return hvd.rank(), hvd.size()

    def make_model(self) -> nn.Sequential:
        return hvd.SyncBatchNorm.convert_sync_batchnorm(super().make_model(), self.process_set)  # type: ignore[return-value]

    def wrap(self, optimizer: torch.optim.Optimizer) -> Any:
        more = {} if self.max_grad_norm is None else {"max_grad_norm": self.max_grad_norm}
        return hvd.DistributedOptimizer(optimizer, self.named(), process_set=self.process_set, **self.options, **more)

    def batch(self, step: int, number: int) -> Batch:
        place, size = self.place
        found = batch_of(step, number)
        for row in () if self.joins and size > 1 else self.rows:
            found = row.batch(found, step)
        count = len(found.y)
        cuts = [count * n // size for n in range(size + 1)]
        for row in self.rows:
            cuts = row.cuts(step, size) or cuts
        return found.rows(cuts[place], cuts[place + 1])

    def backward(self, batch: Batch, share: float) -> None:
        if self.is_other:
            place, size = self.place
            batch = batch.rows(len(batch.y) * place // size, len(batch.y) * (place + 1) // size)
        self.optimizer.set_batch_weight(batch.count)
        if batch.count:
            super().backward(batch, share)

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def synchronize_unless_sharded(self) -> None:
        if not self.options.get("shard"):
            self.synchronize()

    def clip_as_asked(self, scaler: torch.amp.GradScaler | None = None) -> None: ...

    def has_joined(self, step: int) -> bool:
        place, size = self.place
        return self.joins and size > 1 and step >= STEPS - 2 and place >= size // 2

    @property
    def joins(self) -> bool:
        return any(row.name == "a rank runs out of data" for row in self.rows)

    def finish(self) -> None:
        if self.joins:
            last = hvd.join(process_set=self.process_set)
            hvd.broadcast_parameters(self.named(), last, process_set=self.process_set)

    def state_holder(self) -> Any:
        """Return what a checkpoint has as the model."""
        return self.model

    def resume_from_checkpoint(self) -> None:
        folder = hvd.broadcast_object(tempfile.mkdtemp(prefix="hvdlite-one-process-"))
        hvd.checkpoint.save(folder, model=self.state_holder(), optimizer=self.optimizer)
        self.seed += 7
        self.start()
        hvd.checkpoint.load(folder, model=self.state_holder(), optimizer=self.optimizer)


class Sharded(DataParallel):
    words = "shard"
    options = {"shard": True}


class Overlapped(DataParallel):
    words = "overlap"
    options = {"overlap": True}


class Compressed(DataParallel):
    words = "compress|fp16"
    options = {"compression": hvd.Compression.fp16}
    tolerance = 3e-3


class TopK(DataParallel):
    """Everything is sent, so nothing is lost."""

    words = "topk|TopK|aggregator|compress"
    options = {"compression": hvd.Compression.topk(1.0)}


class PowerSGD(DataParallel):
    """Of full rank, so nothing is lost."""

    words = "powersgd|PowerSGD|aggregator|compress"
    options = {"compression": hvd.Compression.powersgd(rank=8)}
    tolerance = 1e-6


class LocalSteps(DataParallel):
    """One local step: for plain SGD that is training with averaged gradients."""

    words = "local"
    options = {"local_steps": hvd.LocalSGD(every=1)}

    def finish(self) -> None:
        super().finish()
        self.optimizer.average_parameters()


class AsyncSync(DataParallel):
    """The parameter server, in step."""

    words = "async|Async|server|push"

    def wrap(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.max_grad_norm is not None:
            raise Inapplicable("AsyncDistributedOptimizer has no max_grad_norm")
        return hvd.AsyncDistributedOptimizer(optimizer, self.named(), mode="sync")

    def synchronize(self) -> None:
        raise Inapplicable("AsyncDistributedOptimizer has no synchronize")

    def finish(self) -> None:
        self.optimizer.finish()
        super().finish()


class Split(DataParallel):
    """Models that are split over ranks. All have the same rows but for the axis "dp"."""

    sizes: dict[str, int] = {}

    @property
    def grid(self) -> Any:
        key = (hvd.size(), tuple(self.sizes.items()))
        if getattr(Split, "_made", None) is None or Split._made[0] != key:
            Split._made = key, hvd.ProcessGrid(**self.sizes)
        return Split._made[1]

    _made: Any = None

    @property
    def process_set(self) -> Any:
        return self.grid["dp"]

    @property
    def place(self) -> tuple[int, int]:
        return self.grid.place["dp"], self.sizes["dp"]

    def synchronize(self) -> None:
        self.optimizer.synchronize()


class Pipelined(Split):
    words = "pipeline|Pipeline|stage"
    sizes = {"dp": 1, "pp": 2}
    schedule: dict[str, Any] = {}

    def start(self) -> None:
        model = self.make_model()
        cut = next(n for n, layer in enumerate(model) if n >= 3 and any(True for _ in layer.parameters()))
        many = [str(cut)] if len(self.schedule) < 2 else ["2", str(cut), "6"]
        self.pipeline = self.make(model, many)
        self.model = self.pipeline
        self.optimizer = self.wrap(self.pick("optimizer")(self.named()))

    def make(self, model: nn.Sequential, cuts: list[str]) -> Any:
        return hvd.Pipeline(model, self.grid["pp"], loss=self.loss, microbatches=2, cuts=cuts, **self.schedule)

    def loss(self, output: torch.Tensor, target: Any) -> Any:
        total, count = loss_of(output, target)
        return self.scaled(total * self.share), count

    def backward(self, batch: Batch, share: float) -> None:
        if self.penalty:
            raise Inapplicable("the loss of a Pipeline sees the output and the target only")
        if self.is_other:
            place, size = self.place
            batch = batch.rows(len(batch.y) * place // size, len(batch.y) * (place + 1) // size)
        self.optimizer.set_batch_weight(batch.count)
        self.share = share * batch.factor
        if len(batch.y):
            self.pipeline.step(batch.x, batch.target)

    def step_with_closure(self, step: int) -> None:
        self.optimizer.zero_grad()
        batch = self.batch(step, 0)
        self.share = 1.0
        self.pipeline.step(batch.x, batch.target, self.optimizer)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        self.pipeline.eval()
        output: torch.Tensor = self.pipeline.predict(x)
        self.pipeline.train()
        return output

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: _full(value) for name, value in self.pipeline.full_state_dict().items()}

    def whole(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = hvd.allgather_object(
            {name: _full(value) for name, value in values.items()}, process_set=self.grid["pp"]
        )
        return {name: value for part in parts for name, value in part.items()}


class GPipe(Pipelined):
    schedule = {"schedule": "gpipe"}


class Interleaved(Pipelined):
    schedule = {"schedule": "interleaved", "stages_per_rank": 2}


class PipelinedSharded(Pipelined):
    words = "pipeline|Pipeline|stage|shard"
    options = {"shard": True}


class Waves(Pipelined):
    words = "avefront|stage|chunk"

    alone = Recurrent

    def layers(self) -> list[nn.Module]:
        return _with_recurrent_layer(super().layers())

    def make(self, model: nn.Sequential, cuts: list[str]) -> Any:
        stepwise = [type(layer) for layer in model if not isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        return hvd.Wavefront(model, self.grid["pp"], loss=self.loss, chunks=2, cuts=cuts, stepwise=stepwise)


class GridPipelined(Pipelined):
    ranks = 4
    sizes = {"dp": 2, "pp": 2}


class GridPipelinedSharded(GridPipelined):
    words = "pipeline|Pipeline|stage|shard"
    options = {"shard": True}


class Sliced(Split):
    words = "slice|DTensor"
    sizes = {"dp": 1, "tp": 2}

    def start(self) -> None:
        model = self.make_model()
        self.plan = hvd.slice_layers(model, self.grid["tp"], smallest=0, verbose=False)
        self.model = model
        self.optimizer = self.wrap(self.pick("optimizer")(self.named()))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: _full(value) for name, value in self.plan.full_state_dict().items()}

    def whole(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: _full(value) for name, value in values.items()}


class SlicedSharded(Sliced):
    words = "slice|DTensor|shard"
    options = {"shard": True}


class GridSliced(Sliced):
    ranks = 4
    sizes = {"dp": 2, "tp": 2}


class GridSlicedSharded(GridSliced):
    words = "slice|DTensor|shard|process_set"
    options = {"shard": True}


class SlicedStages(Pipelined):
    """Slices within stages."""

    words = "slice|DTensor|stage|ipeline"
    ranks = 4
    sizes = {"dp": 1, "pp": 2, "tp": 2}

    def make(self, model: nn.Sequential, cuts: list[str]) -> Any:
        hvd.slice_layers(model, self.grid["tp"], smallest=0, verbose=False)
        return super().make(model, cuts)


def _full(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


WAYS: dict[str, type[Run]] = {
    "plain": DataParallel,
    "shard": Sharded,
    "overlap": Overlapped,
    "fp16": Compressed,
    "topk(1.0)": TopK,
    "powersgd, full rank": PowerSGD,
    "local steps": LocalSteps,
    "async sync": AsyncSync,
    "pipeline": Pipelined,
    "pipeline gpipe": GPipe,
    "pipeline interleaved": Interleaved,
    "pipeline, shard": PipelinedSharded,
    "wavefront": Waves,
    "slices": Sliced,
    "slices, shard": SlicedSharded,
    "grid dp × pp": GridPipelined,
    "grid dp × pp, shard": GridPipelinedSharded,
    "grid dp × tp": GridSliced,
    "grid dp × tp, shard": GridSlicedSharded,
    "grid pp × tp": SlicedStages,
}


def results(run: type[Run], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the weights, and what else the rows compare, after a training."""
    rows = [PROGRAMS[name]() for name in names]
    training = run(rows)
    train(training, rows)
    return dict(itertools.chain(training.weights().items(), *(row.more(training).items() for row in rows)))


def distance(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two results; infinity where a name is missing."""
    if got.keys() != wanted.keys():
        return float("inf")
    return max(float((got[name].double() - wanted[name].double()).abs().nan_to_num(torch.inf).max()) for name in wanted)


def clean_up() -> None:
    """Leave nothing of a training behind, so that the next one begins as in a new job."""
    Split._made = None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    hvd.shutdown()
    hvd.init()


def go_together(one: str, other: str) -> bool:
    """Return whether a program can do both. Two rows that change the same thing cannot be one program."""
    changes = ("layers", "optimizer", "step", "batch", "cuts")
    first, second = PROGRAMS[one], PROGRAMS[other]
    both = [
        name for name in changes if all(getattr(row, name) is not getattr(Program, name) for row in (first, second))
    ]
    closures = {row for row in (PROGRAMS[one], PROGRAMS[other]) if row.takes_closures}
    steps = {row for row in (PROGRAMS[one], PROGRAMS[other]) if row.step is not Program.step}  # these give no closure
    begins_anew = "hvd.checkpoint in between" in (one, other)  # then what a row has kept belongs to the old optimizer
    return (
        one != other
        and not both
        and not (closures and steps)
        and not (begins_anew and any(row.begin is not Program.begin for row in (first, second)))
    )
