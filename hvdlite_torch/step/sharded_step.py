"""How an optimizer steps this rank's share only: what its step hooks do, wherever the parameters lie."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.header import digest
from hvdlite.negotiation.mismatch import variants_text
from hvdlite_torch.step.amp import share_infinities
from hvdlite_torch.step.closures import closure_of, replace_closure
from hvdlite_torch.step.driver import SteppingExchange
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.own_parameters import refuse_steps
from hvdlite_torch.step.shardable import check_shardable
from hvdlite_torch.step.shards import ParameterShards, refuse_synchronize


class SharedSteps(SteppingExchange):
    """Puts this rank's pieces into the optimizer's groups while it steps. Goes before another `SteppingExchange`.

    Args:
        optimizer, options: As there.
    """

    _adapts = False

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._whole = check_shardable(optimizer, options)
        self._shares = ParameterShards(optimizer, options.process_set)
        self._standing_in: Sequence[bool] | None = None
        self._loading = False
        self._start, self._loads = "", 0
        super().__init__(optimizer, options)

    def _begin(self) -> None:
        whole = {} if self._shares.dealt else dict(self.optimizer.state)
        super()._begin()  # type: ignore[safe-super]  # of the other base, which makes memory
        if self._shares.adopted:
            self._know_origin("that of all ranks")
        else:
            made = f"as it was when it was made distributed ({_digest_of(whole):08x})"
            self._know_origin(made if whole else "empty at first")
            self._shares.loaded = whole or None

    def _know_origin(self, start: str) -> None:
        """Where this rank's state comes from; nothing has been loaded since."""
        self._in_step.origin = self._start = start
        self._loads = 0
        self._shares.loaded = None

    def leave(self) -> None:
        super().leave()
        self._shares.leave()
        self._standing_in = None

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
        refuse_synchronize("synchronize()")

    def _has_local_gradients(self) -> bool:
        return True  # of whole parameters it is never the combined one

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        refuse_synchronize("skip_synchronize()")
        yield

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._shares.put_back()  # a step that failed may have left the pieces there
        self._fused.back()
        refuse_steps(optimizer)
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
        self._shares.loaded = None  # the exchange has seen that all have loaded as often
        self._publish()

    def have_same_state(self) -> None:
        super().have_same_state()
        self._know_origin("that of all ranks")

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

    # What `hvdlite_torch.step.wrapped.Sharded` and `hvdlite_torch.training.state` call

    def whole_state(self, root: int | None = None) -> contextlib.AbstractContextManager[None]:
        """For a with statement: the optimizer has the state of whole parameters. Every rank calls this.

        Args:
            root: A rank of the process set, by its number there. If it has loaded a state since the last step, its optimizer
                has that; and only those of ranks that have loaded one have a whole state.

        Raises:
            ArgumentError: The ranks have not loaded the same, or some lack their part. Raised on all of them.
        """
        loaded: list[tuple[str, bool]] = self._gather((self._in_step.origin, self._shares.loaded is not None))
        if root is not None and loaded[root][1]:
            return self._shares.loaded_state() if self._shares.loaded is not None else contextlib.nullcontext()
        if len({origin for origin, _ in loaded}) == 1:
            return self._shares.whole_state()
        ranks = self._world.ranks(self.process_set)
        raise ArgumentError(
            "the ranks have not loaded the same state into this sharded optimizer, so nobody has all of it:\n"
            f"{variants_text(ranks, [[origin] for origin, _ in loaded])}\n"
            "Call load_state_dict() on every rank; or on one, and then hvd.broadcast_optimizer_state(optimizer, that rank) on "
            "all."
        )

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Within the body of a with statement the optimizer loads a state, of whole parameters. Those within do nothing."""
        if self._loading:
            yield
            return
        self._loading = True
        try:
            with self._shares.loading():
                yield
        finally:
            self._loading = False
        self._loads += 1
        self._in_step.origin = f"{self._start}, loaded {self._loads} times since"


def _digest_of(state: dict[Any, dict[str, Any]]) -> int:
    """Stands for what there is in a state, and for its numbers, such as counts of steps; not for what is in its tensors."""
    return digest(
        [
            sorted((str(name), float(value) if _is_number(value) else None) for name, value in its.items())
            for its in state.values()
        ]
    )


def _is_number(value: Any) -> bool:
    return value.dim() == 0 and value.is_cpu if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
