"""How an optimizer steps this rank's share only: what its step hooks do, wherever the parameters lie."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdlite_torch.amp import share_infinities
from hvdlite_torch.closures import closure_of, replace_closure
from hvdlite_torch.options import Options
from hvdlite_torch.shares import Shares, check_shardable, refuse_synchronize
from hvdlite_torch.stepping import SteppingExchange


class SharedSteps(SteppingExchange):
    """Puts this rank's pieces into the optimizer's groups while it steps. Goes before another `SteppingExchange`.

    Args:
        optimizer, options: As there.
    """

    _adapts = False

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        check_shardable(optimizer, options)
        self._shares = Shares(optimizer, options.process_set)
        self._standing_in: Sequence[bool] | None = None
        super().__init__(optimizer, options)

    @property
    @abc.abstractmethod
    def _total_weight(self) -> float:
        """The sum of the weights of all ranks in the last exchange that this rank stood in for."""

    @abc.abstractmethod
    def _give(self, there: Sequence[bool]) -> None:
        """Let the pieces have their combined gradients, or None if `there` says that no rank has one of the parameter."""

    @abc.abstractmethod
    def _publish(self) -> None:
        """The pieces have been stepped: let all ranks have them."""

    def synchronize(self) -> None:
        refuse_synchronize()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._shares.put_back()  # a step that failed may have left the pieces there
        self._fused.back()
        if self._standing_in is not None:
            self._give(self._standing_in)
            self._clip()
            self._standing_in = None
        else:
            closure = closure_of(args, kwargs)
            if closure is None:
                self._exchange()
                self._unscale()
                self._clip()
            else:
                # Evaluated first, for it uses the whole parameters, and maybe zero_grad().
                with torch.enable_grad():
                    loss = self._together(closure)()
                args, kwargs = replace_closure(args, kwargs, lambda: loss)
        self._shares.put_in()
        self._fused.switch()
        return args, kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._after_step(optimizer, args, kwargs)
        self._shares.put_back()
        self._shares.drop_gradients()
        self._publish()

    def _combined_gradients(self) -> list[torch.Tensor]:
        return self._shares.gradients() or super()._combined_gradients()  # of a rank alone nothing is dealt out

    def before_unscale(self) -> None:
        """Nothing: no rank ever has all combined gradients."""

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        share_infinities(infinities, self.process_set)

    @torch.no_grad()
    def stand_in(self) -> None:
        """As it says there; and step this rank's share, which nobody else does."""
        while (there := self._stand_in_once()) is not None:
            if any(there) or (there and self._total_weight <= 0):  # else the others make no step
                self._standing_in = there
                self.optimizer.step()

    # What `hvdlite_torch.distributed.Sharded` calls

    def whole_state(self) -> contextlib.AbstractContextManager[None]:
        """See `Shares.whole_state`."""
        return self._shares.whole_state()

    def forget_state(self) -> None:
        """See `Shares.forget_state`."""
        self._shares.forget_state()

    def take_share_of_state(self) -> None:
        """See `Shares.take_share_of_state`."""
        self._shares.take_share_of_state()
