"""`Sharding` lets an optimizer step only this rank's shard of the parameters, in host memory or on a GPU.

During a step the optimizer's groups hold this rank's pieces of the parameters, and its state is that of the pieces. The program
sees whole parameters, and saves and loads whole states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.header import digest
from hvdlite.ranks.together import variants_text
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.shard_state import CALL, StateShard, check_all_there
from hvdlite_torch.step.shardable import check_shardable
from hvdlite_torch.step.shards import ParameterShards


def refuse_synchronize(what: str) -> NoReturn:
    """Raise an error, because a rank with a sharded optimizer never has all combined gradients.

    Args:
        what: The call of the program.

    Raises:
        ArgumentError: Always.
    """
    raise ArgumentError(
        f"{what} has no meaning with shard=True: no rank ever has all combined gradients. To clip them, pass "
        "max_grad_norm to DistributedOptimizer."
    )


class Sharding:
    """This rank's shard of one optimizer: its pieces of the parameters, and the origin of their state.

    Args:
        context: The context of the optimizer, which is not distributed yet.

    Attributes:
        shards: The pieces, and their state.
        whole: Whether parameters are dealt out whole; if False, they may be cut in two.

    Raises:
        ArgumentError: The optimizer cannot be sharded.
    """

    def __init__(self, context: OptimizerContext) -> None:
        self._context = context
        self._in_step = context.in_step
        self.whole = check_shardable(context.optimizer, context.options)
        self.shards = ParameterShards(context.optimizer, context.process_set)
        self._loading = False
        self._start, self._loads = "", 0

    def begin(self, deal: Callable[[], None]) -> None:
        """Deal the shards out in the present world. Every rank calls this.

        Args:
            deal: Deals the shards out: `GradientSync.begin`.
        """
        whole = {} if self.shards.dealt else dict(self._context.optimizer.state)
        deal()
        if self.shards.adopted:
            self.have_same_state()
        else:
            made = f"as it was when it was made distributed ({_digest_of(whole):08x})"
            self._know_origin(made if whole else "empty at first")
            self.shards.loaded = whole or None

    def collect(self) -> None:
        """Give the optimizer the state of whole parameters, before shards are dealt out anew. Every rank calls this."""
        self.shards.collect(self._in_step.origin)

    def _know_origin(self, start: str) -> None:
        """Note the origin of this rank's state, in words. Nothing has been loaded since."""
        self._in_step.origin = self._start = start
        self._loads = 0
        self.shards.loaded = None

    def leave(self) -> None:
        """Note that the world has ended. Each rank keeps its shard of the state."""
        self.shards.leave()

    def after_step(self) -> None:
        """Drop the gradients of the pieces, after the optimizer has stepped them."""
        self.shards.drop_gradients()
        self.shards.loaded = None  # the headers have shown that all ranks have loaded equally often

    def have_same_state(self) -> None:
        """Note that all ranks have been given the same state."""
        self._know_origin("that of all ranks")

    # For `hvdlite_torch.step.wrapped.Sharded`, `hvdlite_torch.training.state` and `hvdlite_torch.checkpoint`

    def whole_state(self, root: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: in its body the optimizer has the state of whole parameters. Every rank calls this.

        Args:
            root: A rank, by its number in the process set. If it has loaded a state since the last step, its optimizer gets
                that state, and the optimizers of ranks that have loaded none keep their shards.

        Raises:
            ArgumentError: The ranks have loaded different states, or a part is missing. The error is raised on all ranks.
        """
        loaded = self._gather_origins()
        if root is not None and loaded[root][1]:
            return self.shards.loaded_state() if self.shards.loaded is not None else contextlib.nullcontext()
        self._check_origins(loaded)
        return self.shards.whole_state()

    def without_pieces(self) -> contextlib.AbstractContextManager[StateShard]:
        """Return a context manager: in its body the optimizer has the state of everything except this rank's pieces.

        Every rank calls this. The context is the state of this rank's pieces.

        Raises:
            ArgumentError: The ranks have loaded different states, or a part is missing. The error is raised on all ranks.
        """
        self._check_origins(self._gather_origins())
        return self.shards.without_pieces()

    def _gather_origins(self) -> list[tuple[str, bool]]:
        """Return for each rank the origin of its state, and whether it has loaded one since the last step."""
        mine = (self._in_step.origin, self.shards.loaded is not None)
        everybody = self._context.gather(mine, f"{CALL},")
        check_all_there(everybody, self._context.ranks)
        return everybody

    def _check_origins(self, loaded: Sequence[tuple[str, bool]]) -> None:
        """Raise ArgumentError on all ranks unless their states have the same origin."""
        if len({origin for origin, _ in loaded}) == 1:
            return
        raise ArgumentError(
            "the ranks have not loaded the same state into this sharded optimizer, so nobody has all of it:\n"
            f"{variants_text(self._context.ranks, [[origin] for origin, _ in loaded])}\n"
            "Call load_state_dict() on every rank; or on one, and then hvd.broadcast_optimizer_state(optimizer, that rank) on "
            "all."
        )

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context manager: in its body the optimizer loads a state of whole parameters. A nested call does nothing."""
        if self._loading:
            yield
            return
        self._loading = True
        try:
            with self.shards.loading():
                yield
        finally:
            self._loading = False
        self._loads += 1
        self._in_step.origin = f"{self._start}, loaded {self._loads} times since"


def _digest_of(state: dict[Any, dict[str, Any]]) -> int:
    """Return a digest of the structure of a state and of its numbers, such as step counts, without its tensors."""
    return digest(
        [
            sorted((str(name), float(value) if _is_number(value) else None) for name, value in its.items())
            for its in state.values()
        ]
    )


def _is_number(value: Any) -> bool:
    return value.dim() == 0 and value.is_cpu if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
