"""What hvdlite says to the people who run a job: records of Python's `logging`, by loggers named ``hvdlite.*``.

A program that configures `logging` gets these records in its own handlers, with the number of the rank as ``record.rank``. In
other programs Python prints warnings to stderr, as ever. ``HVDLITE_LOG_LEVEL`` says from which level on records are made.
"""

from __future__ import annotations

import logging

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""The values of ``HVDLITE_LOG_LEVEL``, which are Horovod's words, and the levels of `logging`."""


def tell(area: str, text: str, rank: int | None = None, level: int = logging.WARNING) -> None:
    """Make one record.

    Args:
        area: What the record is about, such as "stalls": the logger is ``hvdlite.stalls``.
        text: The message.
        rank: The rank that says it; None if it is not known yet.
        level: The level, one of those of `logging`.
    """
    logging.getLogger(f"hvdlite.{area}").log(level, "%s", text, extra={"rank": rank})


def set_level(name: str) -> None:
    """Make records from this level on, and print them to stderr in programs that do not configure `logging`.

    Args:
        name: One of `LEVELS`; an empty text leaves everything to the program and to Python.
    """
    if not name:
        return
    logger = logging.getLogger("hvdlite")
    logger.setLevel(LEVELS[name.lower()])
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # it takes no parameter in Python 3.10
    """Prints records to stderr if no handler of the program gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s, rank %(rank)s, %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)
