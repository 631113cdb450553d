"""Stand-ins for internal classes of Horovod that programs name in annotations, in `isinstance`, or as a base class."""

from __future__ import annotations

from typing import Any

from hvdlite.errors import NotYetError


class InnerClass(type):
    """The metaclass of a stand-in for an internal class of Horovod.

    Objects of the class `stands_for` are instances of the stand-in. A program cannot replace Horovod's own methods: setting an
    attribute raises NotYetError, because hvdlite would not use the attribute.

    Attributes:
        stands_for: The class of hvdlite.
        advice: What a program can do instead, for the text of errors.
    """

    stands_for: type
    advice: str

    def __instancecheck__(cls, instance: object) -> bool:
        if "stands_for" in vars(cls):
            return isinstance(instance, cls.stands_for)
        return super().__instancecheck__(instance)  # `cls` is a subclass that a program has made

    def __setattr__(cls, name: str, value: Any) -> None:
        if "stands_for" in vars(cls) and not name.startswith("__"):
            raise NotYetError(f"{cls.__name__}.{name} cannot be replaced: hvdlite does not use it. {cls.advice}")
        super().__setattr__(name, value)


def refuse(name: str, advice: str) -> NotYetError:
    """Return the error for a call of an internal part of Horovod that hvdlite does not have.

    Args:
        name: The name of the part, with its module or class.
        advice: What a program can do instead.
    """
    return NotYetError(f"{name} is an inner part of Horovod, whose name alone is here. {advice}")
