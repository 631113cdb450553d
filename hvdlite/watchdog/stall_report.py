"""The report of a wait that lasts too long: which ranks take part, which do not, and where those are."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdlite.errors import ranks_text

_OUTER_FRAMES, _INNER_FRAMES = 4, 12
"""How many calls of a deep stack are shown: the outer ones say where the program is, the inner ones where it is stuck."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MESSAGES = tuple(
    os.path.join(_PACKAGE, "comm", *names)
    for names in (("mpi", "transport.py"), ("mpi", "collectives.py"), ("local.py",))
)
_STARTERS = ("<frozen runpy>", f"{os.sep}runpy.py")


@dataclass(frozen=True)
class StallAnswer:
    """The answer of a rank to the question where it is.

    Attributes:
        waits: A description of each thing for which the rank waits, and for how many seconds it has waited.
        stack: The stack of the rank's main thread, as text.
        last: A description of the operation that the rank has completed last, and how many seconds ago that was; None if
            it has completed none.
        did_its_part: For a wait for a message: whether the rank has begun to send it, or to receive it; None if that is not
            known.
    """

    waits: tuple[tuple[str, float], ...]
    stack: str
    last: tuple[str, float] | None
    did_its_part: bool | None = None

    @property
    def is_missing(self) -> bool:
        """Whether the rank waits for nothing: others wait for it."""
        return not self.waits and not self.did_its_part

    def seconds(self, what: str) -> float | None:
        """Return for how many seconds the rank has waited for `what`; None if it does not wait for that."""
        return next((seconds for other, seconds in self.waits if other == what), None)


def reporter(what: str, answers: Mapping[int, StallAnswer], limit: float) -> int | None:
    """Return the rank that reports a wait for `what`: the lowest that has waited for about `limit` seconds.

    One rank must report, and every waiting rank asks. It is not always rank 0, for rank 0 may be missing.
    """
    tolerance = max(1.0, 0.1 * limit)  # without it two ranks that began at nearly the same time would both report
    waited = {rank: answer.seconds(what) for rank, answer in answers.items()}
    return min(
        (rank for rank, seconds in waited.items() if seconds is not None and seconds + tolerance > limit), default=None
    )


def report(
    rank: int,
    what: str,
    seconds: float,
    ranks: Sequence[int],
    answers: Mapping[int, StallAnswer],
    left: Mapping[int, float],
    stacks: Mapping[int, str],
) -> str:
    """Return the report of a wait.

    Args:
        rank: The rank that reports.
        what: A description of what the rank waits for.
        seconds: For how long the rank has waited.
        ranks: The ranks that must take part.
        answers: The answers of the ranks to the question where they are; `rank`'s own answer must be among them.
        left: The ranks that have left the job.
        stacks: The stacks of ranks that have not answered, as far as they are known.
    """
    lines = [f"hvdlite: rank {rank} has waited {seconds:.0f} s for {what}."]
    if stack := answers[rank].stack.rstrip("\n"):  # it is empty at the end of the program
        lines += ["  It is here:", stack]
    here = [other for other in ranks if other in answers and answers[other].seconds(what) is not None and other != rank]
    if here:
        lines.append(f"  {ranks_text(here)} {'waits' if len(here) == 1 else 'wait'} for it too.")
    for other in ranks:
        if other == rank or other in here:
            continue
        if other in left:
            lines.append(f"  rank {other} has left the job.")
        elif other not in answers:
            lines.append(f"  rank {other} does not answer: it is stopped, or busy in code that holds Python's lock.")
            lines += ["  " + line for line in stacks.get(other, "").splitlines()]
        else:
            lines += _absent(other, answers[other])
    return "\n".join(lines)


def _absent(rank: int, answer: StallAnswer) -> list[str]:
    if answer.did_its_part:
        return [
            f"  rank {rank} has done its part: the message was sent, and its receive was begun, but MPI has not carried it.",
            "  So the program lacks nothing. Is a network between the hosts closed, or is a rank stopped? It is here:",
            answer.stack.rstrip("\n"),
        ]
    if answer.waits:
        awaited, seconds = answer.waits[0]
        first = f"  rank {rank} waits for something else, {awaited}, for {seconds:.0f} s; it is here:"
    else:
        first = f"  rank {rank} is missing; it is here:"
    return [first, answer.stack.rstrip("\n"), f"    {last_words(answer.last)}"]


def last_words(last: tuple[str, float] | None) -> str:
    """Return `StallAnswer.last` as a sentence."""
    if last is None:
        return "It has not completed any operation."
    return f"Its last completed operation, {last[1]:.0f} s ago: {last[0]}"


def left_text(rank: int, what: str, farewell: str) -> str:
    """Return the error text for a wait for `what` that needs a rank which has left the job."""
    if what.startswith("gradient"):
        hint = (
            "Every rank must take the same number of steps. Different numbers of batches? Call hvd.join() at the end of an "
            "epoch; in torch, write `with hvd.uneven():` around it; with shard=True, give all the same number."
        )
    else:
        hint = (
            "Every rank must call it. Does it stand inside of an `if hvd.rank() == 0:`, or in a loop that is longer on this "
            "rank?"
        )
    return f"rank {rank} has left the job, and this rank still waits for {what}.\n  rank {rank}: {farewell}\n  {hint}"


def is_in_messages(thread: int) -> bool:
    """Return whether a thread is inside of a call that sends or receives a message. Nothing can interrupt such a call."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_filename in _MESSAGES


def stack_of_program(main_thread: int) -> str:
    """Return the stack of a program: of its main thread; at its end, of the threads for which Python waits before it exits."""
    frame = sys._current_frames().get(main_thread)
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("_shutdown", threading.__file__):
        frame = frame.f_back
    keepers = [each for each in threading.enumerate() if not each.daemon and each.ident not in (None, main_thread)]
    if frame is None or not keepers:
        return stack_of(main_thread)
    return "".join(
        f"    Its program has come to its end, and thread {each.name!r} keeps it:\n{stack_of(each.ident or 0)}"
        for each in keepers
    )


def stack_of(thread: int) -> str:
    """Return the stack of a thread, innermost call last, without hvdlite's frames and those that started the program."""
    found = list(traceback.extract_stack(sys._current_frames().get(thread)))
    own = max((place for place, entry in enumerate(found) if entry.filename.startswith(_PACKAGE)), default=len(found))
    if all(entry.filename == threading.__file__ for entry in found[own + 1 :]):  # hvdlite waits there for a lock
        del found[own + 1 :]
    frames = [
        entry for entry in found if not entry.filename.startswith(_PACKAGE) and not entry.filename.endswith(_STARTERS)
    ]
    if len(frames) <= _OUTER_FRAMES + _INNER_FRAMES:
        return _indented(frames)
    skipped = len(frames) - _OUTER_FRAMES - _INNER_FRAMES
    return f"{_indented(frames[:_OUTER_FRAMES])}      … {skipped} more calls …\n{_indented(frames[-_INNER_FRAMES:])}"


def _indented(frames: Sequence[traceback.FrameSummary]) -> str:
    entries = traceback.StackSummary.from_list(list(frames)).format()
    return "".join(f"    {line}\n" for entry in entries for line in entry.splitlines())
