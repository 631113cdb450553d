"""What must be the same on all ranks for their parameters to stay the same: learning rates, and the number of steps.

Each rank says a digest of it with its gradients (`hvdlite.gradients.header`). A rank that has resumed alone, or whose
scheduler has gone its own way, is so found in the same step, before anything is wrong. What differs is then told with each
rank's value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from hvdlite.errors import MismatchError
from hvdlite.gradients.header import digest
from hvdlite.negotiation.mismatch import variants_text


class InStep:
    """The state of one optimizer, on one rank, as far as it must be that of all.

    Args:
        optimizer: Whose.
        ranks: The world ranks that take part, for messages.
        gather: Makes a list of the objects of all ranks, in the order of `ranks`.
        owns_state: Each rank has the state of parameters of its own, so that it cannot be compared.

    Attributes:
        ranks: As given; others after a restart.
        steps: How many steps the optimizer has made since the ranks were last given the same state.
        origin: Where the state of this rank comes from since then, in words; of an optimizer that owns state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ranks: Sequence[int],
        gather: Callable[[Any], list[Any]],
        owns_state: bool = False,
    ) -> None:
        self.steps = 0
        self.origin = ""
        self._optimizer = optimizer
        self.ranks = ranks
        self._gather = gather
        self._owns_state = owns_state

    def digest(self, rates_only: bool = False, changed: bool | None = None) -> int:
        """Stands for all that is compared.

        Args:
            rates_only: Without the numbers of steps, and without `changed`.
            changed: Whether the program has changed parameters in place since the last step, where that is a change for all
                ranks of the host; else None.
        """
        rates = [_number(group.get("lr")) for group in self._optimizer.param_groups]
        if rates_only:
            return digest(rates, self.origin)
        return digest(rates, self.origin, self.steps, self._state_step(), changed)

    def _state_step(self) -> float | None:
        """The number of steps that the first state has seen, where the optimizer counts them; None if there is no state."""
        if self._owns_state:
            return 0.0
        state = self._optimizer.state
        return _number(next(iter(state.values())).get("step", 0.0)) if state else None

    def refuse(self, changed: bool | None = None) -> NoReturn:
        """Raise what differs. Every rank calls this.

        Args:
            changed: As for `digest`.

        Raises:
            MismatchError: The text has each rank's value.
        """
        lines = [
            f"the learning rate of group {number} is {_number(group.get('lr'))}"
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        step = self._state_step()
        lines.append("the optimizer has no state yet" if step is None else f"the optimizer's state is of step {step}")
        if self._owns_state:
            lines.append(f"its state is {self.origin}")
        lines.append(f"the optimizer has made {self.steps} steps since it was made distributed")
        if changed is not None:
            lines.append(f"the program has {'' if changed else 'not '}changed parameters in place since the last step")
        text = variants_text(self.ranks, self._gather(lines))
        raise MismatchError(
            "the optimizers of the ranks are not in the same state, so this step would let their parameters come apart:\n"
            f"{text}\n"
            "If a checkpoint was loaded on one rank: hvd.broadcast_optimizer_state(optimizer, root_rank=0) after it. If a "
            "scheduler follows a loss: give it the same number everywhere, such as hvd.allreduce(loss). If a rank leaves out a "
            "step: let all do."
            f"{_SHARED if changed is not None else ''}"
        )

    def refuse_weights(self, weight: float | None) -> NoReturn:
        """Raise that only some ranks have said a weight. Every rank calls this.

        Args:
            weight: What this rank has said.

        Raises:
            MismatchError: The text has each rank's value.
        """
        said = "no set_batch_weight() before this step" if weight is None else f"set_batch_weight({weight:g})"
        raise MismatchError(
            "set_batch_weight() was called on some ranks only, so that the others' samples would count for next to nothing:\n"
            f"{variants_text(self.ranks, self._gather([said]))}\n"
            "Call it on every rank before each step, with the number of samples of the batch, 0 included; or on none."
        )


_SHARED = (
    " If a rank loads other weights for itself, as to evaluate: within `with hvd.own_parameters(model):`, for with shard=True "
    "all ranks of a host have their parameters in one memory."
)


def _number(value: Any) -> float | None:
    """A number, or a tensor of one in host memory; None for what cannot be compared without waiting for a GPU."""
    if isinstance(value, torch.Tensor) and (not value.is_cpu or value.numel() != 1):
        return None
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else None
