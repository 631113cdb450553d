"""What stands for a class inside of Horovod that programs name: in annotations, in `isinstance`, as a base."""

from __future__ import annotations

from typing import Any

from hvdlite.errors import NotYetError


class InnerClass(type):
    """The metaclass of what stands for such a class.

    Objects of the class `stands_for` are instances of it. Horovod's own methods are not there to be replaced: to set an
    attribute raises, because hvdlite would not look at it.

    Attributes:
        stands_for: Our class.
        advice: What to do in place of what raises.
    """

    stands_for: type
    advice: str

    def __instancecheck__(cls, instance: object) -> bool:
        if "stands_for" in vars(cls):
            return isinstance(instance, cls.stands_for)
        return super().__instancecheck__(instance)  # of a subclass that a program has made

    def __setattr__(cls, name: str, value: Any) -> None:
        if "stands_for" in vars(cls) and not name.startswith("__"):
            raise NotYetError(f"{cls.__name__}.{name} cannot be replaced: hvdlite does not use it. {cls.advice}")
        super().__setattr__(name, value)


def refuse(name: str, advice: str) -> NotYetError:
    """The error for a part of Horovod's inside that is called, and is not here.

    Args:
        name: With the module or class that it is in.
        advice: What to do.
    """
    return NotYetError(f"{name} is an inner part of Horovod, whose name alone is here. {advice}")
