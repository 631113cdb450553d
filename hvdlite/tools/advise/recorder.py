"""`Recorder` measures some steps of a training program, on each rank, and ends the program. Rank 0 writes the `Profile`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdlite.operations import Agreement, AllgatherObject
from hvdlite.protocols import TensorInfo
from hvdlite.runtime.group import Group
from hvdlite.tools.advise.calibrate import Measured, measure, slowest
from hvdlite.tools.advise.profile import MeasuredStep, Profile
from hvdlite.tools.advise.strategies import TrainingStrategy, parse_strategy


@dataclass(frozen=True)
class MeasuringRequest:
    """What the command asks the ranks to measure; the setting `advise` holds it as text.

    Attributes:
        path: The file for the profile.
        warm_up: How many steps go by before the measured ones.
        steps: How many steps are measured.
        strategies: The names of the strategies that are compared.
    """

    path: str
    warm_up: int
    steps: int
    strategies: tuple[str, ...]

    @property
    def steps_file(self) -> Path:
        """The file that says how many steps the program has made, if it ends before enough of them."""
        return Path(self.path).with_suffix(".steps")

    @property
    def tried(self) -> list[TrainingStrategy]:
        """The strategies whose computation is tried out."""
        return [parse_strategy(name) for name in self.strategies]

    def pack(self) -> str:
        """Return the request as text."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> MeasuringRequest:
        """Return the request that `pack` has packed."""
        said = json.loads(text)
        return cls(**{**said, "strategies": tuple(said["strategies"])})


class Recorder:
    """Measures the steps of one optimizer on one rank. All ranks make one at the same point.

    The framework's adapter calls the methods at the moments that they name, in this order in each step::

        ready, ready, … ─▶ exchange_begins, exchange_ends ─▶ update_begins, update_ends ─▶ step_ends

    There may be any number of exchanges, also after the update.

    Args:
        group: The ranks.
        request: What to measure.
        layout: Dtype and shape of each gradient.
        strategy: What the program does, in words.
        whole_update: Whether the update of each rank is that of all parameters.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        group: Group,
        request: MeasuringRequest,
        layout: Sequence[TensorInfo],
        strategy: str,
        whole_update: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._group, self._request, self._layout = group, request, tuple(layout)
        self._strategy, self._whole_update = strategy, whole_update
        self._began = self._exchange_began = self._update_began = 0.0
        self._exchange = self._update = 0.0
        self._seen: dict[int, float] = {}
        self._ready: list[dict[int, float]] = []
        self._steps: list[MeasuredStep] = []
        self._count = 0
        if group.rank == 0:
            self.note()
            atexit.register(self.note)

    def ready(self, index: int) -> None:
        """Note that the backward pass has gradient `index`."""
        self._seen[index] = self._clock()

    def exchange_begins(self) -> None:
        """Note that the ranks begin to combine gradients, or parameters."""
        now = self._clock()
        if self._seen:
            self._ready.append({index: now - at for index, at in self._seen.items()})
            self._seen = {}
        self._exchange_began = now

    def exchange_ends(self) -> None:
        """Note that they have combined them. A closure evaluates the gradients inside of the step, so an update begins now."""
        now = self._clock()
        self._exchange += now - self._exchange_began
        self._update_began = now

    def update_begins(self) -> None:
        """Note that the optimizer's own step begins."""
        self._update_began = self._clock()

    def update_ends(self) -> None:
        """Note that the optimizer's own step ends."""
        self._update = self._clock() - self._update_began

    def step_ends(self) -> None:
        """Note that a step is over.

        Raises:
            SystemExit: Enough steps were measured. All ranks raise it, after rank 0 has written the profile.
        """
        compute = self._clock() - self._began - self._exchange - self._update
        self._steps.append(MeasuredStep(compute, self._exchange, self._update))
        self._exchange = self._update = 0.0
        self._count += 1
        if self._count <= self._request.warm_up:
            self._steps.clear()
            self._ready.clear()
        elif len(self._steps) == self._request.steps:
            self._finish()
        self._began = self._clock()

    def note(self) -> None:
        """Write how many steps there were, on rank 0. This runs at the end of the process, which may come too early."""
        with contextlib.suppress(OSError):  # the command is gone
            self._request.steps_file.write_text(str(self._count))

    def _finish(self) -> None:
        group, request = self._group, self._request
        measured: Measured = group.engine.run(
            Agreement(
                "hvdlite advise", [("steps", len(self._steps))], functools.partial(measure, self._layout, request.tried)
            )
        )
        everybody = group.engine.run(AllgatherObject((self._steps, self._mean_ready(), measured)))
        if group.rank == 0:
            all_measured = [each for _, _, each in everybody]
            Profile(
                strategy=self._strategy,
                layout=self._layout,
                steps=tuple(tuple(steps) for steps, _, _ in everybody),
                ready=tuple(min(times) for times in zip(*(ready for _, ready, _ in everybody), strict=True)),
                whole_update=self._whole_update,
                **slowest(all_measured)._asdict(),
            ).write(Path(request.path))
            print(
                f"hvdlite advise: {len(self._steps)} steps were measured. The program ends here.",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(0)

    def _mean_ready(self) -> list[float]:
        """Return for each gradient how long before the exchange it was there; 0 for one that was never there."""
        return [
            statistics.fmean([step[index] for step in self._ready if index in step] or [0.0])
            for index in range(len(self._layout))
        ]
