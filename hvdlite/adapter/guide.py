"""The error for names that `hvdlite` does not have but an adapter has: ``from hvdlite import DistributedOptimizer``."""

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

_OTHERS_NAMES = {
    **{
        "world_size": "size",
        "get_world_size": "size",
        "num_ranks": "size",
        "get_rank": "rank",
        "get_local_rank": "local_rank",
    },
    **{
        "all_reduce": "allreduce",
        "all_gather": "allgather",
        "all_to_all": "alltoall",
        "reduce_scatter": "reducescatter",
    },
}
"""What torch.distributed and others call our functions."""


def advice_on(name: str) -> str:
    """Return the text of the error for a name that is not in `hvdlite`."""
    if name in _PACKAGES:
        return f"hvdlite has no {name!r}: write `import {_PACKAGES[name]} as hvd`."
    if name in _OTHERS_NAMES:
        return advice_for("hvdlite", name)
    return (
        f"hvdlite has no {name!r}. What belongs to a framework is in a package of its own: write `import hvdlite_torch as hvd` "
        "for PyTorch, `import hvdlite_tf as hvd` for TensorFlow and Keras."
    )


def advice_for(module: str, name: str) -> str:
    """Return the text of the error for a name that an adapter does not have."""
    ours = f": it is called {_OTHERS_NAMES[name]}()" if name in _OTHERS_NAMES else ""
    return f"module {module!r} has no attribute {name!r}{ours}"


class Guide:
    """The last finder of modules. If no other finder has found a module of `hvdlite`, it raises an error with advice."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return None for modules of other packages.

        Raises:
            ModuleNotFoundError: hvdlite has no such module. Python also calls this for a name that `hvdlite` does not have.
        """
        package, _, name = fullname.partition(".")
        if package != "hvdlite" or "." in name:
            return None
        # Without `name=`: ``from hvdlite import x`` would drop this error and raise one that says less.
        raise ModuleNotFoundError(advice_on(name))

    @staticmethod
    def invalidate_caches() -> None:
        """Do nothing: there are no caches."""


def install() -> None:
    """Add the guide to the finders of this process, after all others."""
    if Guide not in sys.meta_path:
        sys.meta_path.append(Guide)
