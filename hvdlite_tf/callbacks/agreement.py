"""A callback that stops training on all ranks if a callback stops it on one."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.identity import check_rates
from hvdlite.errors import MismatchError
from hvdlite_tf.callbacks.base import Callback, ranks_of
from hvdlite_tf.gradients.optimizer_parts import rates_of


class AgreementCallback(Callback):
    """Stops all ranks at the end of an epoch if a callback of one rank wants to stop. It is the last in every rank's list.

    Args:
        process_set: The ranks that take part; None means all ranks.
    """

    def __init__(self, process_set: ProcessSet | None) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare the ranks, and stop on this rank if any rank wants to stop.

        Raises:
            MismatchError: The ranks' learning rates differ, because a callback changed them on some ranks only; or the numbers
                of their epochs differ. All ranks raise it.
        """
        rates = rates_of(getattr(self.model, "optimizer", None))
        own = bool(self.model.stop_training), rates, (epoch, (self.params or {}).get("epochs"))
        told = dict(
            zip(ranks_of(self._process_set), hvdlite.allgather_object(own, process_set=self._process_set), strict=True)
        )
        if len({epochs for _, _, epochs in told.values()}) > 1:
            where = ", ".join(f"{now + 1} of {end} on rank {rank}" for rank, (_, _, (now, end)) in told.items())
            raise MismatchError(
                f"the ranks are in different epochs, or would train for different numbers of them: {where}. Call fit() with "
                "the same epochs and initial_epoch on all ranks; what one rank restores from a file it has to tell the rest."
            )
        check_rates(f"after epoch {epoch + 1}", {rank: rates for rank, (_, rates, _) in told.items()})
        if any(stop for stop, _, _ in told.values()):
            self.model.stop_training = True
