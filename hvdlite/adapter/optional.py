"""Checks for packages that only an extra of hvdlite installs."""

from __future__ import annotations

import importlib.util

from hvdlite.errors import MissingPackageError


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
