"""`MeasuredSync`: a `GradientSync` that tells a `Recorder` when it does what."""

from __future__ import annotations

from typing import Any

from hvdlite.gradients.sync import GradientSync, Results
from hvdlite.tools.advise.recorder import Recorder


class MeasuredSync:
    """Does what another `hvdlite.gradients.sync.GradientSync` does, and measures it.

    Args:
        sync: The other one. What only that one has, this object has too.
        recorder: Takes the times.

    Attributes:
        recorder: Takes the times.
    """

    def __init__(self, sync: GradientSync, recorder: Recorder) -> None:
        self._sync, self.recorder = sync, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync, name)

    @property
    def results(self) -> Results:
        return self._sync.results

    @property
    def missed(self) -> bool:
        return self._sync.missed

    def begin(self) -> None:
        self._sync.begin()

    def make_hooks(self) -> None:
        self._sync.make_hooks()

    def ready(self, index: int, parameter: Any) -> None:
        self._sync.ready(index, parameter)

    def combine(self) -> None:
        self.recorder.exchange_begins()
        self._sync.combine()
        self.recorder.exchange_ends()

    def leave_out(self) -> None:
        self._sync.leave_out()

    def changed_unseen(self, how: str) -> None:
        self._sync.changed_unseen(how)

    def before_step(self) -> None:
        self._sync.before_step()
        self.recorder.update_begins()

    def after_step(self) -> None:
        self.recorder.update_ends()
        self.recorder.exchange_begins()
        self._sync.after_step()
        self.recorder.exchange_ends()
        self.recorder.step_ends()

    def stand_in(self) -> list[bool] | None:
        return self._sync.stand_in()

    def have_same_state(self) -> None:
        self._sync.have_same_state()

    def leave(self) -> None:
        self._sync.leave()
