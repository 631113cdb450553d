"""What to say where `hvdlite` is asked for what is in a framework's package: ``from hvdlite import DistributedOptimizer``."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

_PACKAGES = {
    "torch": "hvdlite_torch",
    "pytorch": "hvdlite_torch",
    "tensorflow": "hvdlite_tf",
    "tf": "hvdlite_tf",
    "keras": "hvdlite_tf",
}


def advice_on(name: str) -> str:
    """What to say of a name that is not in `hvdlite`."""
    if name in _PACKAGES:
        return f"hvdlite has no {name!r}: write `import {_PACKAGES[name]} as hvd`."
    return (
        f"hvdlite has no {name!r}. What belongs to a framework is in a package of its own: write `import hvdlite_torch as hvd` "
        "for PyTorch, `import hvdlite_tf as hvd` for TensorFlow and Keras."
    )


class Guide:
    """A finder that is asked after all others, for modules that nobody has found, and explains those of `hvdlite`."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """None for modules of others.

        Raises:
            ModuleNotFoundError: hvdlite has no such module; also where a name is imported that it does not have.
        """
        package, _, name = fullname.partition(".")
        if package != "hvdlite" or "." in name:
            return None
        # Without `name=`: ``from hvdlite import x`` would drop this error and raise one that says less.
        raise ModuleNotFoundError(advice_on(name))

    @staticmethod
    def invalidate_caches() -> None:
        """There are none."""


def install() -> None:
    """Ask the guide in this process, after all other finders."""
    if Guide not in sys.meta_path:
        sys.meta_path.append(Guide)
