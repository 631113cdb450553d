"""The contract between the service and its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hvdlite.protocols import Array
from hvdlite.serving.replicas.replica import Ready


class Owner(Protocol):
    """Who is told what happens to the replicas, in the thread of the event loop. Each process has a number of its own."""

    def ready(self, replica: int, ready: Ready) -> None:
        """A replica can compute."""

    def computed(self, replica: int, outputs: Sequence[Any] | Array) -> None:
        """A replica has computed its batch."""

    def raised(self, replica: int, text: str, blame: bool) -> None:
        """`predict` failed on a replica's batch."""

    def lost(self, replica: int, blame: bool = False) -> None:
        """A replica that was ready is gone; `blame` says whether what it computed is the cause."""

    def not_ready(self, text: str) -> None:
        """A replica cannot start. If none was ever ready, there is no use in trying again."""

    def broken(self, text: str) -> None:
        """The replicas are not kept running any more, because of a mistake in hvdlite."""


class Replicas(Protocol):
    """What the server wants of its replicas. `Fleet` has processes; tests have others."""

    def start(self, owner: Owner) -> None:
        """Start them, and return at once. The owner is told when they are ready."""

    def send(self, replica: int, inputs: Sequence[Any]) -> None:
        """Let a replica compute a batch. The owner is told of the outputs."""

    async def stop(self) -> None:
        """End them all, and wait until they have ended."""
