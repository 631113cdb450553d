"""How argparse reads the numbers of options."""

from __future__ import annotations

import argparse
import re


def positive_int(text: str) -> int:
    """Read a whole number from 1 on."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 on")
    return int(text)


def whole(text: str) -> int:
    """Read a whole number from 0 on."""
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 0 on")
    return int(text)


def not_negative(text: str) -> float:
    """Read a number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def positive(text: str) -> float:
    """Read a number above 0."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
