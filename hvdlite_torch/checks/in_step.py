"""A check that the ranks' optimizers are in the same state, so that their parameters stay equal: learning rates, step counts.

Each rank sends a digest of this state with its gradients (`hvdlite.gradients.header`). So a rank that resumed alone, or whose
scheduler differs, is found in the same step, before its parameters differ. The error then shows each rank's values.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import hvdlite
from hvdlite.api import world
from hvdlite.errors import MismatchError
from hvdlite.gradients.header import digest
from hvdlite.ranks.together import Together, variants_text
from hvdlite_torch.checks.advice import say


class InStep:
    """The part of an optimizer's state, on one rank, that must be equal on all ranks.

    Args:
        optimizer: The optimizer.
        owns_state: Whether each rank has the state of parameters of its own, which cannot be compared (a sharded optimizer).

    Attributes:
        together: The ranks that take part; they change with a restart.
        steps: The number of steps since the ranks were last given the same state.
        origin: A text that says where this rank's state comes from, if `owns_state`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owns_state: bool = False) -> None:
        self.together: Together
        self.steps = 0
        self.origin = ""
        self._optimizer = optimizer
        self._owns_state = owns_state
        self._compares = True
        self._has_looked = False
        """Whether `allow_differences` has nothing more to do."""

    def digest(self, rates_only: bool = False, changed: bool | None = None) -> int:
        """Return the digest of all values that are compared.

        Args:
            rates_only: Whether the step counts and `changed` are left out.
            changed: Whether the program has changed parameters in place since the last step, if the ranks of a host share their
                parameters' memory; otherwise None.
        """
        if not self._compares:
            return 0
        rates = [_number(group.get("lr")) for group in self._optimizer.param_groups]
        if rates_only:
            return digest(rates, self.origin)
        settings = None if self.steps else self._settings()  # they change seldom, and there may be many groups
        return digest(rates, self.origin, self.steps, self._state_step(), changed, settings)

    def _settings(self) -> list[str]:
        """Return the settings of all groups that change a step, but the learning rates: momentum, betas, weight_decay, …"""
        return [
            f"{name} of group {number} is {plain}"
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name not in _NOT_COMPARED and (plain := _plain(value)) is not None
        ]

    def _state_step(self) -> float | None:
        """Return the step count of the first parameter's state (0 if the optimizer does not count); None without any state."""
        if self._owns_state:
            return 0.0
        state = self._optimizer.state
        return _number(next(iter(state.values())).get("step", 0.0)) if state else None

    def refuse(self, changed: bool | None = None) -> NoReturn:
        """Raise an error that shows which values differ. Every rank calls this.

        Args:
            changed: See `digest`.

        Raises:
            MismatchError: Always; the text has each rank's values.
        """
        lines = self._lines()
        if changed is not None:
            lines.append(f"the program has {'' if changed else 'not '}changed parameters in place since the last step")
        raise MismatchError(
            "the optimizers of the ranks are not in the same state, so this step would let their parameters come apart:\n"
            f"{self.together.variants(lines)}\n"
            "If a checkpoint was loaded on one rank: hvd.broadcast_optimizer_state(optimizer, root_rank=0) after it. If a "
            "scheduler follows a loss: give it the same number everywhere, such as hvd.allreduce(loss). If a rank leaves out a "
            "step: let all do."
            f"{_SHARED if changed is not None else ''}"
        )

    def have_same_state(self) -> None:
        """Note that all ranks have been given the same state. Every rank calls this."""
        self.steps = 0
        self._compares = self._has_looked = True

    def allow_differences(self) -> None:
        """Warn before the first step, instead of raising, if the ranks are not in the same state. Every rank calls this.

        Programs for Horovod make a step to fill the state, and only then give all ranks the state of one rank. If the ranks
        differ, their steps are not compared until they have been given the same state. Only the first call looks, and no call
        after that.
        """
        if self._has_looked:
            return
        self._has_looked = True
        told = zip(self.together.ranks, self.together.gather(self._lines()), strict=True)
        ranks, everybody = zip(*((rank, lines) for rank, lines in told if lines), strict=True)
        self._compares = all(lines == everybody[0] for lines in everybody)
        if not self._compares and hvdlite.rank() == 0 and world().config.advice:
            say(
                "the optimizers of the ranks are not in the same state, so their parameters come apart until "
                f"hvd.broadcast_optimizer_state(optimizer, root_rank=0) is called:\n{variants_text(ranks, everybody)}\n"
            )

    def _lines(self) -> list[str]:
        lines = [
            f"the learning rate of group {number} is {_number(group.get('lr'))}"
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        lines += self._settings()
        step = self._state_step()
        lines.append("the optimizer has no state yet" if step is None else f"the optimizer's state is of step {step}")
        if self._owns_state:
            lines.append(f"its state is {self.origin}")
        lines.append(f"the optimizer has made {self.steps} steps since it was made distributed")
        return lines

    def refuse_weights(self, weight: float | None) -> NoReturn:
        """Raise an error because only some ranks have set a batch weight. Every rank calls this.

        Args:
            weight: The weight that this rank has set, or None.

        Raises:
            MismatchError: Always; the text has each rank's value.
        """
        said = "no set_batch_weight() before this step" if weight is None else f"set_batch_weight({weight:g})"
        raise MismatchError(
            "set_batch_weight() was called on some ranks only, so that the others' samples would count for next to nothing:\n"
            f"{self.together.variants([said])}\n"
            "Call it on every rank before each step, with the number of samples of the batch, 0 included; or on none."
        )


_SHARED = (
    " If a rank loads other weights for itself, as to evaluate: within `with hvd.own_parameters(model):`, for with shard=True "
    "all ranks of a host have their parameters in one memory."
)


_NOT_COMPARED = {"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""What has a line of its own, or says how a step is computed and not what it computes."""


def _plain(value: Any) -> Any:
    """Return a setting that can be compared: a truth value, a number, or several of these; None for anything else."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool) else _number(value)


def _number(value: Any) -> float | None:
    """Return a number, or the number in a tensor of one element in host memory, as a float; None for anything else.

    A tensor on a GPU gives None, because reading it would wait for the GPU.
    """
    if isinstance(value, torch.Tensor) and (not value.is_cpu or value.numel() != 1):
        return None
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else None
