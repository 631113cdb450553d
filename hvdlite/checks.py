"""Checks that many functions make: of arguments, and of what is installed."""

from __future__ import annotations

import importlib.util
import numbers

from hvdlite.errors import ArgumentError, MissingPackageError


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
            f"{user} needs {package}, which is not installed here: pip install 'hvdlite[{extra}]'", name=package
        )
