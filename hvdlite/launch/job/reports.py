"""This file acts on the messages of the ranks and their guards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from hvdlite.errors import ranks_text
from hvdlite.launch.job import failures
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.output import Output
from hvdlite.launch.job.ranks import Rank, Ranks
from hvdlite.launch.job.survival.elastic import Elastic
from hvdlite.launch.job.survival.survivors import Survivors
from hvdlite.launch.job.survival.trainings import Trainings
from hvdlite.launch.worker.rank_environment import THREADS_VARIABLE
from hvdlite.launcher_link.link import SILENT_SECONDS
from hvdlite.launcher_link.server import ControlConnection
from hvdlite.launcher_link.session import Message


class Fail(Protocol):
    """A function that notes a failure, so that the job ends."""

    def __call__(
        self, text: str, code: int, rank: int | None = None, at: float | None = None, consequence: bool = False
    ) -> None:
        """Note a failure with these attributes of `failures.Failure`; by default `at` is the present time."""


class Reports:
    """A `Reports` acts on the messages of the ranks of one job.

    Args:
        ranks: The state of each rank; messages change it.
        output: Prints the output of the ranks.
        fail: Is called for each failure that a rank reports, or that its end shows.
        function: The pickled function of `hvdlite.run`, the answer to a message "fetch".
        verbose: Print how many threads each rank's compute libraries start.
        try_host: Tries a host, by its address, in another way, and says what came of it.

    Attributes:
        results: For each rank that has sent a result: whether its function returned, and the pickled value that the function
            returned or raised.
        trainings: What ranks that train with a parameter server have asked for.
        survivors: The ranks of an elastic job that go on when others fail.
        elastic: What the ranks of an elastic job have said.
        first_asked: The first rank whose guard got a signal to end the rank; None as long as no guard got one.
    """

    def __init__(
        self,
        ranks: Ranks,
        output: Output,
        fail: Fail,
        *,
        function: bytes,
        verbose: bool,
        try_host: Callable[[str], str],
    ) -> None:
        self.results: dict[int, tuple[bool, bytes]] = {}
        self.first_asked: Rank | None = None
        self.trainings = Trainings(ranks)
        self.elastic = Elastic(ranks)
        self.survivors = Survivors(ranks, self._note, self._explain)
        self._ranks = ranks
        self._output = output
        self._fail = fail
        self._function = function
        self._verbose = verbose
        self._try_host = try_host

    def take(self, connection: ControlConnection, message: Message) -> None:
        """Act on one message.

        Raises:
            ProtocolError: The message names a rank that the job does not have, or is the second hello of a rank.
        """
        match message.kind:
            case "hello":
                self._on_hello(connection, message)
            case "report":
                self._ranks.check(message.fields["rank"])
                connection.send("ok")
                self._fail(message.fields["text"], message.fields["code"], rank=message.fields["rank"])
            case "hung":
                number = message.fields["rank"]
                self._ranks.check_group(number, message.fields["size"])
                connection.send("ok")
                self._on_failure(self._ranks[number], message.fields["text"], 1, time.time(), consequence=False)
            case "where":
                self._ranks.check_group(message.fields["rank"], message.fields["size"])
                rank = self._ranks[message.fields["rank"]]
                if rank.stopped_at is not None:  # that it is stopped is reported apart
                    connection.send("stack", text=rank.stack or "")
                else:
                    rank.askers.append(connection)
                    rank.show()
            case "fetch":
                connection.send("function", self._function)
            case "result":
                self._ranks.check(message.fields["rank"])
                self.results[message.fields["rank"]] = (message.fields["ok"], message.payload)
                connection.send("ok")
            case "pulse":
                self._ranks.check_group(message.fields["rank"], self._ranks.present)
                self._ranks[message.fields["rank"]].pulses.add(message.fields, time.monotonic())
            case "training":
                self.trainings.hear(connection, message)
            case "saved":
                self.trainings.take_saved(message.fields["text"])
            case "elastic" | "committed" | "leaving":
                self.elastic.hear(connection, message)
            case "outlives" | "again" | "cannot" | "together" | "over":
                self.survivors.hear(connection, message)
            case "gone" if connection.rank is None:
                self.trainings.forget(connection)
                self.elastic.forget(connection)
                self.survivors.forget(connection)
            case _ if connection.rank is not None:
                self._on_rank(self._ranks[connection.rank], message)

    def _on_hello(self, connection: ControlConnection, message: Message) -> None:
        rank = self._ranks.add(connection, message.fields)
        threads = message.fields["threads"]
        if self._verbose and threads is not None:
            self._output.say(f"hvdliterun: {rank}: {THREADS_VARIABLE}={threads}, its share of the host's cores\n")

    def _on_rank(self, rank: Rank, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "output":
                rank.unacknowledged[fields["stream"]] += len(message.payload)
                self._output.feed(rank.number, fields["stream"], message.payload)
            case "mpi":
                rank.starts_mpi = True
                self._check_start_of_mpi()
            case "done":
                rank.finished, rank.used_mpi = True, fields["used"]
                self._check_start_of_mpi()
            case "failed" if rank.stack_until is None:
                rank.reported = True
                text = fields["text"] or f"{rank} ended with exit code {fields['code']}.\n"
                consequence = failures.is_consequence(fields["error"])
                self._on_failure(rank, text, fields["code"], time.time(), consequence)
            case "stopped" if rank.stack_until is None:
                rank.stopped_at, rank.stop_signal = time.monotonic(), fields["signal"]
            case "continued" if rank.stack_until is None:  # else it has run for a moment, to show its stack
                rank.stopped_at = None
            case "stack":
                rank.take_stack(fields["text"])
            case "asked":
                self.first_asked = self.first_asked or rank
                rank.asked = True
            case "exit":
                rank.exited = True
                rank.finished = fields["finished"]
                self._on_exit(rank, fields["status"], fields["trace"], fields["time"])
            case "gone":
                rank.gone = True
                rank.take_stack(rank.stack or "")
                if not rank.exited:
                    if fields["closed"]:
                        text = f"the guard process of {rank}, pid {rank.guard}, was killed, and the rank with it."
                    else:
                        text = self._silent_host(rank)
                    # If the MPI launcher has sent a signal to the guard, the launcher ends too and says why.
                    self._fail(text, 137, rank=rank.number, consequence=rank.asked)

    def _silent_host(self, rank: Rank) -> str:
        """Say what is known of a host that does not answer any more."""
        lost = [other for other in self._ranks if other.host == rank.host and not other.exited]
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - SILENT_SECONDS))
        return (
            f"host {rank.host} ({rank.connection.peer}) does not answer any more, since about {since}: it has no power, or the "
            f"network to it is cut. {ranks_text([other.number for other in lost])} "
            f"{'was' if len(lost) == 1 else 'were'} there. Tried: the connection of the guard of {rank}, for about "
            f"{SILENT_SECONDS} s; and {self._try_host(rank.connection.peer)}."
        )

    def _check_start_of_mpi(self) -> None:
        """Fail if a rank has ended without MPI, and others start MPI: they would wait for that rank, and for ever."""
        alone = next((rank for rank in self._ranks if rank.finished and rank.used_mpi is False), None)
        waiting = [rank.number for rank in self._ranks if rank.starts_mpi]
        if alone is not None and waiting:
            self._fail(
                f"rank {alone.number} has left the job without hvdlite.init(): its program ({alone.host}, pid {alone.pid}) "
                f"has come to its end, and {ranks_text(waiting)} cannot start MPI without it. All ranks call hvdlite.init(), "
                "or none does.",
                1,
                rank=alone.number,
            )

    def _on_exit(self, rank: Rank, status: int, trace: str, at: float) -> None:
        if rank.lost or rank.reported or rank.stack_until is not None or (status == 0 and rank.finished):
            return  # a stopped rank that shows its stack is a failure already, and `Ranks.stopped` says which
        if (
            rank.asked
        ):  # the MPI launcher or somebody else sent the guard a SIGTERM: the launcher ends too, see describe_end
            return
        text = failures.words(str(rank), status, rank.finished and status != 0)
        if trace.strip():
            text = f"{text}\n\n{trace}"
        code = failures.exit_code(status) or 1
        # MPI libraries too exit without a message if the connection to another rank broke.
        unexplained = status > 0 and not trace.strip()
        at = at if rank.local else time.time()
        self._on_failure(rank, text, code, at, unexplained)

    def _on_failure(self, rank: Rank, text: str, code: int, at: float, consequence: bool) -> None:
        failure = Failure(text, code, at, rank.number, rank.host, consequence)
        # What a rank has reported as a consequence of another one's end is none of its own doing.
        if not self.go_on_without(failure, may_go_on=not (consequence and rank.reported)):
            self._note(failure)

    def go_on_without(self, failure: Failure, may_go_on: bool = True) -> bool:
        """Go on without a rank that has failed, if the job can.

        Args:
            failure: The failure of the rank.
            may_go_on: Whether the others of an elastic job can.
        """
        if self.trainings.go_on_without(failure):
            return True
        may_go_on = may_go_on and not self.elastic.has_left
        return may_go_on and self.survivors.go_on_without(failure, time.monotonic())

    def _note(self, failure: Failure) -> None:
        self._fail(failure.text, failure.code, failure.rank, failure.at, failure.consequence)

    def _explain(self, why: str) -> None:
        if self._verbose:
            self._output.say(f"hvdliterun: the other ranks cannot go on in their processes: {why}.\n")
