"""`AsyncTraining`: one rank's part in a training with a parameter server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import hvdlite
from hvdlite.api import world
from hvdlite.async_sgd.deal import deal
from hvdlite.async_sgd.messages import Purpose
from hvdlite.async_sgd.server import Mode, Server
from hvdlite.async_sgd.service import Service
from hvdlite.async_sgd.worker import Worker
from hvdlite.errors import ArgumentError, CommunicationError
from hvdlite.protocols import WaitKind
from hvdlite_torch.async_sgd import settings, unfinished
from hvdlite_torch.async_sgd.gradients import LocalGradients
from hvdlite_torch.async_sgd.options import Options
from hvdlite_torch.async_sgd.part import TorchPart
from hvdlite_torch.async_sgd.views import nbytes_of, views
from hvdlite_torch.step.batch_weight import BatchWeight

_HINTS = {
    Mode.SYNC: "it waits for the gradients of all ranks that still train; a rank whose loop is over calls optimizer.finish()",
    Mode.SSP: "this rank is `staleness` steps ahead of the slowest; a rank whose loop is over calls optimizer.finish()",
    Mode.ASYNC: "it applies each push at once",
}
_HINT = "the parameter server to take this rank's gradients and answer ({})"


class AsyncTraining:
    """What one rank does in the training of one optimizer. All ranks of the process set make it, with equal parameters.

    Args:
        optimizer: The program's optimizer. Its state goes to the servers.
        names: Names of some or all parameters, by ``id(parameter)``.
        options: The arguments.

    Attributes:
        options: The arguments.
        is_server: Whether this rank only serves.
        weight: The number of samples in the next step.
        worker: The connection to the servers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], options: Options) -> None:
        self.options, self._optimizer, self._world = options, optimizer, world()
        ranks = self._world.ranks(options.process_set)
        self._group = self._world.communicators.new(ranks, "a parameter server")
        channel, rank = self._group.channel, self._group.rank
        self.is_server = rank not in options.workers
        self._all = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [p for p in self._all if p.requires_grad]
        self._names = [
            names.get(id(p), f"parameter {n} of shape {tuple(p.shape)}") for n, p in enumerate(self._parameters)
        ]
        self._layouts = deal([nbytes_of(p) for p in self._parameters], options.servers)
        self._part: TorchPart | None = None
        self._service: Service | None = None
        for layout in self._layouts:
            if layout.server == rank:
                part = self._part = TorchPart(optimizer, self._parameters, layout)
                others = set(range(len(ranks))).difference(options.workers)
                server = Server(part, options.workers, others, options.mode, options.staleness, ranks)
                keeps = options.mode is Mode.SYNC
                self._service = Service(
                    channel, server, part, layout.nbytes, len(layout.tensors), options.workers, keeps
                )
        optimizer.state.clear()
        self.worker = Worker(channel, self._layouts, ranks)
        self._gradients = LocalGradients(
            self._parameters, self._names, self._layouts, self.worker.gradients, ranks[rank]
        )
        self.weight = BatchWeight()
        self._is_over = False
        self._failure = ""
        if self._service is not None:
            self._service.start()
        self._finish = self.finish  # the same object each time
        unfinished.note(self._world, self._finish)

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Add the gradients to the next push; push and pull if it is time to.

        Args:
            closure: Evaluates the loss and its gradients once; None if the gradients are there.

        Returns:
            What the closure has returned, or None.

        Raises:
            ArgumentError: This rank only serves, or the training is over, or a gradient has NaN or infinite elements.
            UnsupportedTensorError: A gradient is sparse.
            HvdliteError: A server has failed, or a rank has left the job.
        """
        self._check_open("step()")
        if self.is_server:
            raise ArgumentError(
                f"step(): rank {hvdlite.rank()} only serves parameters (servers={len(self.options.servers)}): call "
                "optimizer.serve() instead of the training loop, if optimizer.is_server."
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if sum(p.grad is not None for p in self._all) > sum(p.grad is not None for p in self._parameters):
            raise ArgumentError(
                "a parameter has a gradient that did not require one when AsyncDistributedOptimizer was called: no server has "
                "it. Wrap the optimizer when the parameters that are trained are known."
            )
        self._gradients.add(self.weight.take(False))
        if self._gradients.steps >= self.options.push_every:
            self._push()
        return result

    def synchronize(self) -> None:
        """Meet all ranks, and get the same parameters as they. All ranks call this."""
        self._check_open("synchronize()")
        self._meet(Purpose.PULL, WaitKind.PEER)

    def finish(self) -> None:
        """Meet all ranks in the end, and get the final parameters. Until then, a rank that only serves answers the workers."""
        if self._is_over:
            return
        if self.is_server:
            while (purpose := self._meet(Purpose.SERVE, WaitKind.SERVICE)) is not Purpose.FINISH:
                if purpose is Purpose.STATE:
                    self._gather_state()
                elif purpose is Purpose.LOAD:
                    self._load(self._share_state(None))
        else:
            self._meet(Purpose.FINISH, WaitKind.SERVICE)  # others may train much longer
        self._is_over = True
        unfinished.forget(self._world, self._finish)
        if self._service is not None:
            self._service.join()
        self._group.close()

    def state(self) -> dict[int, Any]:
        """Return the optimizer's state of all parameters, by their numbers in the optimizer. All ranks call this."""
        if self._is_over:
            return self._gather_state()
        self._meet(Purpose.STATE, WaitKind.PEER)
        return self._gather_state()

    def load(self, state: Mapping[int, Any]) -> None:
        """Give the servers this state, and the parameters, of the first rank. All ranks call this.

        Args:
            state: The state of parameters by their numbers in the optimizer.
        """
        self._check_open("load_state_dict()")
        values = [p.detach().clone() for p in self._parameters]
        self._meet(Purpose.LOAD, WaitKind.PEER)
        with torch.no_grad():
            for p, value in zip(self._parameters, values, strict=True):
                p.copy_(value)
        self._load(self._share_state(state))

    def _push(self) -> None:
        mine = self._gradients
        hint = _HINT.format(_HINTS[self.options.mode])
        packed = settings.pack(self._optimizer.param_groups)
        with self._in_step():
            self.worker.push(mine.present, packed, mine.weight, hint)
        mine.clear()
        self._take_values()

    def _meet(self, purpose: Purpose, kind: WaitKind) -> Purpose:
        if self._gradients.steps:  # fewer than `push_every`
            self._push()
        with self._in_step():
            met = self.worker.meet(purpose, kind)
        self._take_values()
        return met

    def _take_values(self) -> None:
        with torch.no_grad():
            for layout, data in zip(self._layouts, self.worker.values, strict=True):
                for number, view in zip(layout.tensors, views(data, layout, self._parameters), strict=True):
                    self._parameters[number].copy_(view)

    def _gather_state(self) -> dict[int, Any]:
        own = {} if self._part is None else self._part.state()
        number_of = {id(p): number for number, p in enumerate(self._all)}
        parts = hvdlite.allgather_object(own, process_set=self.options.process_set)
        return {number_of[id(self._parameters[n])]: state for part in parts for n, state in part.items()}

    def _share_state(self, state: Mapping[int, Any] | None) -> Any:
        values = [p.detach().cpu() for p in self._parameters]
        return hvdlite.broadcast_object((state, values), 0, process_set=self.options.process_set)

    def _load(self, shared: tuple[Mapping[int, Any], Sequence[torch.Tensor]]) -> None:
        state, values = shared
        with torch.no_grad():
            for p, value in zip(self._parameters, values, strict=True):
                p.copy_(value)
        if self._part is not None:
            self._part.load({p: state[number] for number, p in enumerate(self._all) if number in state})
        hvdlite.barrier(process_set=self.options.process_set)  # nobody pushes before all parts are ready

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Tell the others if this rank leaves the body in the middle: its next message would not be what they wait for."""
        if self._failure:
            raise CommunicationError(f"this training with a parameter server has failed before: {self._failure}")
        try:
            yield
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            unfinished.forget(self._world, self._finish)
            self._group.channel.break_off("a training with a parameter server", error)
            raise

    def _check_open(self, call: str) -> None:
        if self._is_over:
            raise ArgumentError(
                f"{call}: finish() was called, so the servers are gone. To go on, wrap a new optimizer of the same parameters."
            )
