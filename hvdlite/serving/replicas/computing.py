"""One batch in a replica: its values become what `predict` takes, and what `predict` returns becomes plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array
from hvdlite.serving.servable import Servable

_PLAIN = (str, bytes, bool, int, float, type(None))


class OutputError(HvdliteError):
    """What `predict` returned is no list of answers. No single input is to blame."""


def compute(servable: Servable, inputs: Sequence[Any] | Array) -> list[Any] | Array:
    """Compute a batch.

    Returns:
        As many outputs as there are inputs: an array whose first axis is the batch, or a list of plain values.

    Raises:
        OutputError: The outputs are not as many as the inputs, or cannot be sent.
        Exception: What `predict` raises.
    """
    outputs = servable(inputs)
    try:
        count = len(outputs)
    except TypeError:
        raise OutputError(
            f"predict returned a {_name(outputs)}: expected an array or a list of {len(inputs)} outputs, one for each input."
        ) from None
    if count != len(inputs) or isinstance(outputs, str | bytes | dict):
        raise OutputError(
            f"predict returned a {_name(outputs)} of {count} for {len(inputs)} inputs: expected one output for each input."
        )
    if hasattr(outputs, "__array__"):
        return _array(outputs)
    return [_plain(output) for output in outputs]


def _plain(value: Any) -> Any:
    """Return a value in Python's and NumPy's own types, so that the server needs no other packages to read it."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):  # several outputs of a model; a list is one
        return tuple(_plain(each) for each in value)
    if hasattr(value, "__array__"):
        array = _array(value)
        return array.item() if array.dtype.kind == "U" and not array.ndim else array[()]  # a number keeps its dtype
    raise OutputError(
        f"predict returned a {_name(value)}, which cannot be sent: expected arrays, numbers, texts, and lists and dictionaries "
        "of them."
    )


def _array(value: Any) -> Array:
    try:
        array = np.asarray(value)
    except Exception as error:  # a tensor on a GPU, or one that autograd records
        raise OutputError(f"predict returned a {_name(value)}, which is no array for NumPy: {error}") from error
    if array.dtype.kind not in "biufcU":
        raise OutputError(f"predict returned an array of {array.dtype}: expected numbers, booleans or texts.")
    return array


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "numpy") else f"{kind.__module__}.{kind.__qualname__}"
