"""What torch programs do, as hooks around one loop, which is the same in one process and on ranks: the rows of the table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from tests.one_process.rows import Row, row_adder

if TYPE_CHECKING:
    from tests.one_process.torch_ways import Run

DTYPE = torch.float64
STEPS, ROWS, TIME, FEATURES, WIDTH, OUT = 6, 12, 3, 6, 8, 4
WORDS = 11


@dataclass(frozen=True)
class Batch:
    """Rows of one step.

    Attributes:
        x, y: The inputs and the targets, of shape (rows, time, features).
        weights: A weight for each row, or None.
        factor: What the loss is multiplied by: infinity lets the gradients overflow.
    """

    x: torch.Tensor
    y: torch.Tensor
    weights: torch.Tensor | None = None
    factor: float = 1.0

    @property
    def count(self) -> float:
        """What the loss is divided by."""
        return float(len(self.y) if self.weights is None else self.weights.sum())

    def rows(self, first: int, end: int) -> Batch:
        """Return some of the rows. Only the last row overflows."""
        weights = None if self.weights is None else self.weights[first:end]
        return Batch(self.x[first:end], self.y[first:end], weights, self.factor if end == len(self.y) else 1.0)

    @property
    def target(self) -> torch.Tensor:
        """The target as one tensor, for a loss that is given output and target only: its last column has the weights."""
        weights = torch.ones(len(self.y), dtype=DTYPE) if self.weights is None else self.weights
        return torch.cat([self.y, weights[:, None, None].expand(-1, self.y.shape[1], 1)], -1)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses, and the count by which the mean is taken."""
    y, weights = target[..., :-1], target[..., -1]
    return ((output - y).square().mean(-1) * weights).sum(), weights.sum()


def plain_model() -> list[nn.Module]:
    return [
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, OUT),
    ]


class Program(Row):
    """One thing that a program does. Hooks that it does not need do nothing.

    Attributes:
        passes: The backward passes of a step.
        max_grad_norm: The largest norm of all gradients together, which the program asks the optimizer for; or None.
        takes_closures: Whether the program gives the optimizer a closure.
    """

    passes = 1
    max_grad_norm: float | None = None
    takes_closures = False

    def layers(self) -> list[nn.Module]:
        """Return the layers of the model."""
        return plain_model()

    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.3, momentum=0.9)

    def batch(self, batch: Batch, step: int) -> Batch:
        """Return the batch, changed."""
        return batch

    def cuts(self, step: int, ranks: int) -> list[int] | None:
        """Return where the rows of each rank begin, and the end; None for equal parts."""
        return None

    def begin(self, run: Run) -> None: ...

    def before_pass(self, run: Run, step: int) -> None: ...

    def after_backward(self, run: Run, step: int) -> None: ...

    def step(self, run: Run, step: int) -> bool:
        """Make the step, and return True; or leave it to others."""
        return False

    def after_step(self, run: Run, step: int) -> None: ...

    def scaled(self, loss: torch.Tensor, run: Run) -> torch.Tensor:
        return loss

    def more(self, run: Run) -> dict[str, torch.Tensor]:
        """Return further results to compare, by name."""
        return {}


PROGRAMS: dict[str, type[Program]] = {}
program = row_adder(PROGRAMS)


@functools.cache
def batch_of(step: int, number: int, words: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(100 * number + step)
    x = torch.randn(ROWS, TIME, FEATURES, generator=draw, dtype=DTYPE)
    if words:
        x = torch.randint(WORDS, (ROWS, TIME), generator=draw)
    return Batch(x, torch.randn(ROWS, TIME, OUT, generator=draw, dtype=DTYPE) + 0.5)


@program("nothing special", "")
class Nothing(Program): ...


@program("accumulates two passes", "pass|accumul")
class Accumulates(Program):
    passes = 2


@program("max_grad_norm", "max_grad_norm|norm")
class MaxNorm(Program):
    max_grad_norm = 0.05


@program("clip_grad_norm_", "clip|synchronize")
class ClipsByNorm(Program):
    def after_backward(self, run: Run, step: int) -> None:
        run.synchronize()
        run.clip_norm(0.05)


@program("clip_grad_value_", "clip|synchronize")
class ClipsByValue(Program):
    def after_backward(self, run: Run, step: int) -> None:
        run.synchronize()
        torch.nn.utils.clip_grad_value_(run.parameters(), 0.01)


@program("GradScaler, one overflow", "scale|Scaler")
class Scales(Program):
    def begin(self, run: Run) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def batch(self, batch: Batch, step: int) -> Batch:
        return Batch(batch.x, batch.y, batch.weights, float("inf") if step == 2 else 1.0)

    def scaled(self, loss: torch.Tensor, run: Run) -> torch.Tensor:
        return self.scaler.scale(loss)

    def step(self, run: Run, step: int) -> bool:
        if self.scaler._scale is None:  # torch makes the scale with the first loss, which only the last stage has
            self.scaler.scale(torch.zeros(()))
        run.clip_as_asked(self.scaler)
        self.scaler.step(run.optimizer)
        self.scaler.update()
        return True

    def more(self, run: Run) -> dict[str, torch.Tensor]:
        return {"scale": torch.tensor(self.scaler.get_scale(), dtype=DTYPE)}


@program("GradScaler and clipping", "scale|Scaler|clip|synchronize")
class ScalesAndClips(Scales):
    def step(self, run: Run, step: int) -> bool:
        if self.scaler._scale is None:
            self.scaler.scale(torch.zeros(()))
        self.scaler.unscale_(run.optimizer)
        run.clip_norm(0.05)
        self.scaler.step(run.optimizer)
        self.scaler.update()
        return True


@program("freezes and thaws a layer", "requires_grad|frozen|freez")
class Freezes(Program):
    def before_pass(self, run: Run, step: int) -> None:
        for name, parameter in run.named():
            if name.startswith("0."):
                parameter.requires_grad_(step not in (2, 3))


@program("ties weights", "share|tied|tie")
class Ties(Program):
    def layers(self) -> list[nn.Module]:
        layers = plain_model()
        layers[4].weight = layers[2].weight
        return layers


@program("uses a layer twice", "share|twice|tied")
class Shares(Program):
    def layers(self) -> list[nn.Module]:
        layers = plain_model()
        layers[4] = layers[2]
        return layers


@program("masks rows", "loss|weight|mask")
class Masks(Program):
    def batch(self, batch: Batch, step: int) -> Batch:
        weights = torch.ones(ROWS, dtype=DTYPE)
        weights[: 2 + step] = 0.0
        return Batch(batch.x, batch.y, weights, batch.factor)


@program("weighs rows", "loss|weight")
class Weighs(Program):
    def batch(self, batch: Batch, step: int) -> Batch:
        return Batch(batch.x, batch.y, torch.linspace(0.1, 2.0 + step, ROWS, dtype=DTYPE), batch.factor)


@program("uneven rows", "rows|samples|weight")
class Uneven(Program):
    def cuts(self, step: int, ranks: int) -> list[int] | None:
        first = (3, 0, 7, 11, 12, 5)[step]
        rest = [first + (ROWS - first) * number // (ranks - 1) for number in range(ranks)] if ranks > 1 else [ROWS]
        return [0, *rest]


@program("a rank runs out of data", "join|run out")
class Joins(Program):
    """The last rank has no batch in the last two steps."""

    def batch(self, batch: Batch, step: int) -> Batch:
        return batch.rows(0, ROWS // 2) if step >= STEPS - 2 else batch


@program("evaluates in between", "eval")
class Evaluates(Program):
    def begin(self, run: Run) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def after_step(self, run: Run, step: int) -> None:
        if step in (1, 4):
            self.seen[f"output {step}"] = run.predict(batch_of(9, 9).x)

    def more(self, run: Run) -> dict[str, torch.Tensor]:
        return self.seen


@program("hvd.checkpoint in between", "checkpoint|save")
class Checkpoints(Program):
    def after_step(self, run: Run, step: int) -> None:
        if step == 2:
            run.resume_from_checkpoint()


@program("state_dict of the optimizer", "state")
class StateDict(Program):
    def after_step(self, run: Run, step: int) -> None:
        if step in (1, 3):
            run.optimizer.load_state_dict(run.optimizer.state_dict())


@program("two models in turn", "optimizer")
class TwoModels(Program):
    """Two networks of equal layout, whose steps alternate."""

    def begin(self, run: Run) -> None:
        self.other = None if run.is_other else run.another()

    def after_step(self, run: Run, step: int) -> None:
        if self.other is not None:
            self.other.optimizer.zero_grad()
            self.other.backward(batch_of(step, 5), 1.0)
            self.other.optimizer.step()

    def more(self, run: Run) -> dict[str, torch.Tensor]:
        return {} if self.other is None else {f"other.{name}": value for name, value in self.other.weights().items()}


@program("keeps an average of weights", "average|parameters")
class Averages(Program):
    def begin(self, run: Run) -> None:
        self.mean = {name: parameter.detach().clone() for name, parameter in run.named()}

    def after_step(self, run: Run, step: int) -> None:
        with torch.no_grad():
            for name, parameter in run.named():
                self.mean[name].lerp_(parameter.detach(), 0.4)

    def more(self, run: Run) -> dict[str, torch.Tensor]:
        return {f"mean of {name}": value for name, value in run.whole(self.mean).items()}


@program("schedules the learning rate", "lr|rate")
class Schedules(Program):
    def begin(self, run: Run) -> None:
        self.schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.3)

    def after_step(self, run: Run, step: int) -> None:
        self.schedule.step()


@program("Adam", "Adam")
class Adam(Program):
    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam([parameter for _, parameter in named], lr=0.02)


@program("AdamW in two groups", "AdamW|group")
class Groups(Program):
    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [parameter for name, parameter in named if name.endswith("weight")]
        others = [parameter for name, parameter in named if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=0.02)


@program("adds a group", "group")
class AddsGroup(Program):
    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return super().optimizer([item for item in named if not item[0].startswith(("0.", "6."))])

    def before_pass(self, run: Run, step: int) -> None:
        if step == 3:
            more = [parameter for name, parameter in run.named() if name.startswith(("0.", "6."))]
            run.optimizer.add_param_group({"params": more, "lr": 0.1})
            for parameter in more:
                parameter.grad = None


@program("Adafactor", "Adafactor")
class Adafactor(Program):
    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([parameter for _, parameter in named], lr=0.1)


@program("LBFGS", "LBFGS|closure")
class LBFGS(Program):
    takes_closures = True

    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([parameter for _, parameter in named], lr=0.3, max_iter=3)


@program("steps with a closure", "closure")
class Closure(Program):
    takes_closures = True


@program("sparse embedding", "sparse")
class Sparse(Program):
    def layers(self) -> list[nn.Module]:
        return [nn.Embedding(WORDS, WIDTH, sparse=True), *plain_model()[1:]]

    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.3)

    def batch(self, batch: Batch, step: int) -> Batch:
        return Batch(batch_of(step, 0, words=True).x, batch.y, batch.weights, batch.factor)


@program("batch norm", "BatchNorm|statistics|batch")
class Normalizes(Program):
    def layers(self) -> list[nn.Module]:
        return [*plain_model()[:3], nn.BatchNorm1d(TIME), *plain_model()[3:]]


@program("weight norm", "weight_norm|parametri")
class WeightNorm(Program):
    def layers(self) -> list[nn.Module]:
        layers = plain_model()
        layers[2] = nn.utils.parametrizations.weight_norm(layers[2])
        return layers


@program("penalizes gradients", "loss|input|gradient")
class Penalizes(Program):
    """The second derivative: the loss has the gradient of the output with respect to the input in it."""

    penalty = 0.3


@program("checkpoints activations", "checkpoint")
class Recomputes(Program):
    def layers(self) -> list[nn.Module]:
        layers = plain_model()
        layers[2] = Recomputed(layers[2])
        return layers


class Recomputed(nn.Module):
    """A layer whose activations are computed once more in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


@program("leaves out a step", "step")
class LeavesOut(Program):
    def step(self, run: Run, step: int) -> bool:
        if step == 2:
            run.synchronize_unless_sharded()
            return True
        return False


@program("zeros gradients in place", "zero")
class ZerosInPlace(Program):
    set_to_none = False


@program("doubles gradients by hooks", "hook")
class Hooks(Program):
    def begin(self, run: Run) -> None:
        for name, parameter in run.named():
            if name.startswith("2."):
                parameter.register_hook(lambda gradient: 2 * gradient)


def train(run: Run, rows: Sequence[Program]) -> None:
    """Run the program: this loop is the same in one process and on ranks."""
    for row in rows:
        row.begin(run)
    for step in range(STEPS):
        if run.has_joined(step):
            break
        for row in rows:
            row.before_pass(run, step)
        run.step_number = step
        if any(row.takes_closures for row in rows):
            run.step_with_closure(step)
        else:
            run.zero_grad()
            run.backward_all(step)
            for row in rows:
                row.after_backward(run, step)
            if not any([row.step(run, step) for row in rows]):
                run.step()
        for row in rows:
            row.after_step(run, step)
    run.finish()
