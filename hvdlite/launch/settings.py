"""``hvdlite env`` prints what is installed, and the settings that hold, for a report of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from hvdlite.config import Config
from hvdlite.launch.check_build import check_build

_SECRETS = {"control", "generation"}


def describe_environment(environ: Mapping[str, str]) -> str:
    """Return what is installed, and the settings that these variables give, as text. Secrets of a job are not in it.

    Raises:
        ArgumentError: A variable has a value that is not allowed.
    """
    config, lines = Config.from_env(environ), []
    for field in fields(Config):
        name, value = field.name.upper(), getattr(config, field.name)
        shown = "(set)" if field.name in _SECRETS and value else value
        whence = [each for each in (f"HVDLITE_{name}", f"HOROVOD_{name}") if each in environ]
        lines.append(f"  HVDLITE_{name}: {shown}{f' (from {whence[0]})' if whence else ''}")
    return "\n".join([check_build(), "", "Settings:", *lines])
