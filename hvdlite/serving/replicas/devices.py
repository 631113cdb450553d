"""Which GPU each replica computes with."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hvdlite.errors import ArgumentError

AUTO, NONE = "auto", "none"


def devices_of(asked: str, replicas: int, environ: Mapping[str, str]) -> list[str]:
    """Return the device of each replica, as CUDA_VISIBLE_DEVICES names it. It is empty if devices are not shared out.

    Args:
        asked: ``auto``: each replica has one of the GPUs that the server sees, if it sees any. ``none``: each replica sees all
            of them. Or numbers with commas, among those that the server sees: the replicas have these in turn.
        replicas: The number of replicas.
        environ: The environment variables of the server.

    Raises:
        ArgumentError: They are not as many as the replicas, or they are not there.
    """
    if asked == NONE:
        return [""] * replicas
    visible = _visible(environ)
    if asked == AUTO:
        if not visible:
            return [""] * replicas
        if replicas > len(visible):
            raise ArgumentError(
                f"serve: {replicas} replicas, and {len(visible)} GPUs that each could have alone: give --devices "
                f"{','.join(str(number % len(visible)) for number in range(replicas))} for several replicas on a GPU, or "
                "--devices none if they use no GPU or choose it by HVDLITE_REPLICA."
            )
        return visible[:replicas]
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", asked):
        raise ArgumentError(f"serve: devices={asked!r}: expected auto, none, or numbers of GPUs such as 0,1.")
    numbers = [int(number) for number in asked.split(",")]
    if missing := [number for number in numbers if number >= len(visible)]:
        there = f"the numbers are 0 to {len(visible) - 1}" if visible else "there is none"
        raise ArgumentError(
            f"serve: devices={asked!r}: there is no GPU {missing[0]}; {there} (by CUDA_VISIBLE_DEVICES and the driver)."
        )
    if len(numbers) > replicas:
        raise ArgumentError(
            f"serve: devices={asked!r}: {len(numbers)} devices for {replicas} replicas, so some would have none to use them: "
            f"give --replicas {len(numbers)}, or fewer devices."
        )
    return [visible[numbers[replica % len(numbers)]] for replica in range(replicas)]


def _visible(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a program of this environment sees. Nothing of CUDA is loaded for it."""
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        names = [name.strip() for name in said.split(",")]
        hidden = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:hidden]
    return sorted((name[6:] for name in os.listdir("/dev") if re.fullmatch("nvidia[0-9]+", name)), key=int)
