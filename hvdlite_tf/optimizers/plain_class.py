"""Classes for the optimizers of Keras 3 that look like the plain ones."""

from __future__ import annotations

from typing import Any


def named_like(plain: type, methods: type) -> Any:
    """Return a subclass of an optimizer's class with other methods.

    Keras serializes ``obj.__class__``, so saved files and pickles do not name hvdlite, and any process can load them.
    ``type(obj)`` and `isinstance` see the subclass.

    Args:
        plain: The optimizer's class.
        methods: A class with the methods. They come before those of `plain`.
    """
    return type(
        plain.__name__,
        (methods, plain),
        {
            "__module__": plain.__module__,
            "__doc__": plain.__doc__,
            "__class__": property(lambda self: plain),
        },
    )
