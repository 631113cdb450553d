"""``hvdlite env`` prints what is installed, and the settings that hold, for a report of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from hvdlite.config import Config, variable_of
from hvdlite.launch.check_build import check_build

_SECRETS = {"control", "generation"}


def describe_environment(environ: Mapping[str, str]) -> str:
    """Return what is installed, and the settings that these variables give, as text. Secrets of a job are not in it.

    Raises:
        ArgumentError: A variable has a value that is not allowed.
    """
    config, lines = Config.from_env(environ), []
    for field in fields(Config):
        value, whence = getattr(config, field.name), variable_of(field.name, environ)
        shown = "(set)" if field.name in _SECRETS and value else value
        lines.append(f"  HVDLITE_{field.name.upper()}: {shown}{f' (from {whence})' if whence else ''}")
    return "\n".join([check_build(), "", "Settings:", *lines])
