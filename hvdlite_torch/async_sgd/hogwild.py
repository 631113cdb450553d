"""`HogwildTraining`: plain SGD on parameters that lie in memory which all ranks share, without locks and without servers.

Each rank reads the parameters while others change them, and adds ``-lr * gradient`` to them by the optimizer's own step. So a
forward pass may see some elements before another rank's step and some after it (a torn read), and when two ranks add to one
element at the same moment, one of the two additions may be lost. F. Niu, B. Recht, C. Ré, S. Wright, "Hogwild!: a lock-free
approach to parallelizing stochastic gradient descent" (NIPS 2011, arXiv:1106.5730) shows that this converges if a step changes
few elements, which other steps seldom change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hvdlite.api import rank, world
from hvdlite.async_sgd.deal import deal
from hvdlite.async_sgd.messages import Purpose
from hvdlite.async_sgd.training.gradients import check_finite
from hvdlite.async_sgd.training.options import AsyncOptions
from hvdlite.async_sgd.training.training import AsyncTraining
from hvdlite.comm.ordered.calls import CollectiveCall
from hvdlite.errors import ArgumentError
from hvdlite.protocols import WaitKind
from hvdlite_torch.async_sgd.checks import check_no_momentum
from hvdlite_torch.async_sgd.replica import TorchReplica
from hvdlite_torch.async_sgd.training import evaluate
from hvdlite_torch.async_sgd.views import views
from hvdlite_torch.step.pending import BatchWeight

_LINE = 8
"""The number of int64 in a cache line. The number of steps of each rank has a cache line of its own."""


class HogwildTraining(AsyncTraining[torch.Tensor]):
    """What one rank does in the training of one optimizer. All ranks make it, with equal parameters.

    The parameters are those in shared memory from a step on until all ranks meet. Then they become a copy, which only this rank
    sees, until its next step: so all ranks have the same parameters after a meeting, as with servers.

    Args:
        optimizer: The program's optimizer, of the class SGD.
        names: Names of some or all parameters, by ``id(parameter)``.
        options: The arguments.

    Attributes:
        weight: The number of samples in the next step.

    Raises:
        ArgumentError: The ranks are on several hosts, or cannot share memory. All ranks raise it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], options: AsyncOptions) -> None:
        hosts = {world().hosts[each] for each in world().ranks(options.process_set)}
        if len(hosts) > 1:
            raise ArgumentError(
                f"hogwild=True needs all ranks on one host, where they share memory; these are on {len(hosts)} hosts. Leave "
                "out hogwild=True: then servers hold the parameters."
            )
        # The server has one number that nobody pushes to: only its meetings are used.
        unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        super().__init__(TorchReplica(unused, {}), options)
        self._optimizer, self._torch = optimizer, TorchReplica(optimizer, names)
        self._parameters = self._torch.trained
        (layout,) = deal(self._torch.sizes, [0])
        size = self._group.size
        shares, memory = self._group.run(
            CollectiveCall(
                "allocate(hogwild)",
                lambda ours: (ours.hosts == 1, ours.host.allocate_together(layout.nbytes + 8 * _LINE * size)),
            )
        )
        if not shares:
            super().finish()
            raise ArgumentError(
                "hogwild=True needs ranks that share memory, and these do not (HVDLITE_SHARED_MEMORY=0, or containers of their "
                "own). Leave it out: then servers hold the parameters."
            )
        self._shared = views(memory, layout, self._parameters)
        self._steps = memory[layout.nbytes :].view(np.int64).reshape(size, _LINE)[:, 0]
        self._seen = 0
        self._is_own = True
        if self._group.rank == 0:
            self._write(self._parameters)
        self._group.meet()
        optimizer.state.clear()
        self.weight = BatchWeight()

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Add ``-lr * gradient`` to the shared parameters.

        Args:
            closure: Evaluates the loss and its gradients once; None if the gradients are there.

        Returns:
            What the closure has returned, or None.

        Raises:
            ArgumentError: The training is over, or a gradient has NaN or infinite elements, or the optimizer has a momentum.
        """
        self.check_trains("step()")
        check_no_momentum(self._optimizer)  # a schedule may have changed it
        result = evaluate(closure)
        weight = self.weight.take(False)
        gradients = self._torch.gradients()
        if self.options.refuses_nan:
            check_finite(self._torch, gradients, rank())
        if self._is_own:
            for p, shared in zip(self._parameters, self._shared, strict=True):
                p.data = shared
            self._is_own = False
        if weight > 0:
            plain = getattr(
                torch.optim.SGD.step, "__wrapped__", torch.optim.SGD.step
            )  # without the hooks, which have run
            plain(self._optimizer)  # type: ignore[arg-type]
        mine = self._group.rank
        self._steps[mine] += 1
        others = int(self._steps.sum()) - int(self._steps[mine])
        self.worker.missed += others - self._seen
        self.worker.pushes, self._seen = self.worker.pushes + 1, others
        return result

    def synchronize(self) -> None:
        """Meet all ranks, and get the same parameters as they. All ranks call this."""
        super().synchronize()
        self._own()
        self._group.meet()  # nobody makes a step before all have their copies

    def finish(self) -> None:
        """Meet all ranks in the end, and get the final parameters."""
        if not self.is_over:
            super().finish()
            self._own()

    def numbered_state(self) -> dict[int, Any]:
        """Return the optimizer's state, which is empty. All ranks call this, and get the same parameters."""
        if not self.is_over:
            self._meet(Purpose.STATE, WaitKind.PEER)
            self._own()
            self._group.meet()
        return {}

    def load_numbered(self, state: Mapping[int, Any]) -> None:
        """Give all ranks the parameters of the first rank. All ranks call this.

        Args:
            state: The state of parameters by their numbers in the optimizer. Plain SGD does not use it.
        """
        self.check_open("load_state_dict()")
        values = [p.detach().clone() for p in self._parameters]
        self._meet(Purpose.LOAD, WaitKind.PEER)
        if self._group.rank == 0:
            self._write(values)
        self._group.meet()
        self._own()
        self._group.meet()

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for shared, value in zip(self._shared, values, strict=True):
            shared.copy_(value)

    def _own(self) -> None:
        """Give this rank parameters of its own, until its next step. Nobody changes the shared ones meanwhile."""
        for p, shared in zip(self._parameters, self._shared, strict=True):
            p.data = shared.clone()
        self._is_own = True
