"""Packages that are not installed with hvdlite itself, and which extra brings them."""

from __future__ import annotations

import importlib.util

from hvdlite.errors import MissingPackageError


def require(package: str, extra: str, user: str) -> None:
    """Let a package pass that is installed. It is not imported.

    Args:
        package: Its name.
        extra: The extra of hvdlite that brings it.
        user: Who needs it.

    Raises:
        MissingPackageError: It is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"{user} needs {package}, which is not installed here: pip install 'hvdlite[{extra}]'", name=package
        )
