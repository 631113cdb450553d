"""What the ranks of one generation of an elastic job are told at their start, and what the launcher tells them of the hosts.

This file imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

REMOVED = 1
ADDED = 2


class CommitId(NamedTuple):
    """Which commit: a later one is greater.

    Attributes:
        generation: The generation of the job that has made it, from 1 on; 0 stands for no commit.
        number: Its number in the job.
    """

    generation: int = 0
    number: int = 0


@dataclass(frozen=True)
class Generation:
    """One generation of an elastic job. Its text is the setting ``HVDLITE_GENERATION``.

    Attributes:
        number: Its number, from 1 on.
        key: Authenticates what the job has committed; in hexadecimal digits.
        directory: Where each host keeps what is committed.
        committed: The last commit that the launcher knows of, for each call of ``elastic.run`` that has committed.
        outlives: Whether its processes can go on, in the next generation, when others of them fail.
    """

    number: int
    key: str = field(repr=False)
    directory: str
    committed: tuple[CommitId, ...] = ()
    outlives: bool = False

    def __str__(self) -> str:
        commits = ",".join(f"{each.generation}.{each.number}" for each in self.committed)
        return f"{self.number}:{int(self.outlives)}:{commits}:{self.key}:{self.directory}"

    @classmethod
    def parse(cls, text: str) -> Generation:
        """Read what `str` of a generation gives.

        Raises:
            ValueError: The text has another form. The error does not repeat the text, because it may hold a secret.
        """
        try:
            number, outlives, commits, key, directory = text.split(":", 4)
            committed = tuple(CommitId(*map(int, each.split(".", 1))) for each in commits.split(",") if commits)
            return cls(int(number), key, directory, committed, bool(int(outlives)))
        except (ValueError, TypeError):
            raise ValueError("HVDLITE_GENERATION: only hvdliterun sets it, so unset it elsewhere") from None
