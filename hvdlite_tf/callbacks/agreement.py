"""Training stops on all ranks or on none."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import MismatchError
from hvdlite_tf.callbacks.base import Callback


class AgreementCallback(Callback):
    """At the end of each epoch: if a callback of one rank wants to stop, all do. The last in the list of every rank.

    Args:
        process_set: The ranks that take part; all if None.
    """

    def __init__(self, process_set: ProcessSet | None) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree.

        Raises:
            MismatchError: The learning rates differ: a callback has changed that of some ranks. Raised on all of them.
        """
        optimizer = getattr(self.model, "optimizer", None)
        rate = None if optimizer is None else float(optimizer.learning_rate)
        told = hvdlite.allgather_object((bool(self.model.stop_training), rate), process_set=self._process_set)
        rates = [rate for _, rate in told]
        if len(set(rates)) > 1:
            raise MismatchError(
                f"after epoch {epoch + 1} the learning rates of the ranks differ: {', '.join(map(str, rates))}. A callback "
                "has changed it by what only its own rank knows."
            )
        if any(stop for stop, _ in told):
            self.model.stop_training = True
