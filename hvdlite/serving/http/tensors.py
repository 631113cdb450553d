"""Tensors as the Open Inference Protocol has them: a datatype, a shape, and elements in JSON or as little-endian bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.protocols import Array
from hvdlite.serving.http.bodies import BodyError, UnwritableError

NUMBERS = {
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("U", "") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
"""The datatypes of numbers, and what NumPy calls them."""
BF16, BYTES = "BF16", "BYTES"
DATATYPES = (*NUMBERS, BF16, BYTES)
_NAMES = {name: datatype for datatype, name in NUMBERS.items()}
_LENGTH = struct.Struct("<I")
_WHOLE = 2**53
"""Up to this number, a float64 is one integer and no other."""


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Return the datatype of an array: BYTES if its elements are texts. None if there is none, as for complex numbers."""
    return BYTES if dtype.kind in "OU" else _NAMES.get(dtype.name)


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the dtype in which a tensor lies in memory. BF16 becomes float32, as NumPy does not have it; texts are objects."""
    return np.dtype({BF16: "float32", BYTES: "object"}.get(datatype) or NUMBERS[datatype])


def from_json(data: Any, datatype: str, shape: Sequence[int], name: str) -> Array:
    """Return the tensor whose elements JSON has, flat or nested.

    Args:
        data: The elements.
        datatype: One of `DATATYPES`.
        shape: The shape of the tensor.
        name: Its name, for errors.

    Raises:
        BodyError: They are not as many, or no such elements.
    """
    if not isinstance(data, list):
        raise BodyError(f"{name}: 'data' is a {type(data).__name__}: expected a list of elements.")
    array = _texts(data, name) if datatype == BYTES else _cast(data, datatype, name)
    return _shaped(array, shape, name, "elements")


def from_bytes(data: memoryview, datatype: str, shape: Sequence[int], name: str) -> Array:
    """Return the tensor whose elements are bytes. It lies in the memory of `data` where it can. See `from_json`.

    Raises:
        BodyError: They are not as many bytes as the shape needs, or no texts.
    """
    if datatype == BYTES:
        return _shaped(_split(data, name), shape, name, "texts")
    stored = np.dtype("<u2") if datatype == BF16 else dtype_of(datatype).newbyteorder("<")
    if len(data) % stored.itemsize:
        raise BodyError(f"{name}: its 'binary_data_size' is {len(data)}: expected a multiple of {stored.itemsize}.")
    array = np.frombuffer(data, stored)
    if datatype == BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif datatype == "BOOL" and (array.view(np.uint8) > 1).any():
        raise BodyError(f"{name}: its bytes are not all 0 or 1: expected these for BOOL.")
    return _shaped(array, shape, name, "elements")


def as_tensor(values: Sequence[Any], name: str) -> Array:
    """Return the outputs of several inputs as one tensor, whose first axis they are. Texts are objects in it.

    Raises:
        UnwritableError: They are no numbers or texts, or their shapes differ.
    """
    rows = [_row(value, name) for value in values]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise UnwritableError(
            f"the output {name!r} has different shapes for the inputs of this request, and is no tensor: "
            f"{', '.join(map(str, sorted(shapes)))}. Send these inputs in requests of their own."
        )
    array = np.stack(rows)
    datatype = datatype_of(array.dtype)
    if datatype is None:
        raise UnwritableError(
            f"the output {name!r} has the dtype {array.dtype}, and the protocol has no datatype for it: ask /v1/predict."
        )
    return array


def to_json(array: Array, name: str) -> Any:
    """Return the elements of a tensor for JSON, flat.

    Raises:
        UnwritableError: JSON has no words for them.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UnwritableError(
            f"the output {name!r} has NaN or infinity, which JSON does not have: ask for binary data."
        )
    try:
        return [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
    except UnicodeDecodeError:
        raise UnwritableError(
            f"the output {name!r} has bytes that are no text in UTF-8: ask for binary data."
        ) from None


def to_bytes(array: Array) -> bytes:
    """Return the elements of a tensor as bytes."""
    if array.dtype.kind != "O":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    texts = [each if isinstance(each, bytes) else each.encode() for each in array.ravel().tolist()]
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


def _shaped(array: Array, shape: Sequence[int], name: str, what: str) -> Array:
    size = int(np.prod(shape, dtype=object))
    if array.size != size:
        raise BodyError(f"{name}: it has {array.size} {what}, and the shape {list(shape)}: expected {size}.")
    try:
        return array.reshape(shape)
    except (ValueError, OverflowError) as error:  # too many axes; no elements, and a length past 64 bits
        raise BodyError(f"{name}: it has the shape {list(shape)[:8]}…, which no array has: {error}.") from None


def _cast(data: list[Any], datatype: str, name: str) -> Array:
    dtype = dtype_of(datatype)
    try:
        found = np.asarray(data)
    except (ValueError, OverflowError):
        raise BodyError(f"{name}: its rows have different lengths: expected {datatype}, flat or nested.") from None
    if found.size and (found.dtype.kind not in "biuf" or not np.isfinite(found).all()):
        raise BodyError(f"{name}: it has elements that are no numbers: expected {datatype}.")
    if found.dtype.kind == "f" and dtype.kind in "iu":
        exact = np.array(data, dtype=object)
        if all(type(each) is int for each in exact.ravel().tolist()):  # NumPy has no integers for both -1 and 2**63
            found = exact
    fits = not found.size or datatype != "BOOL" or found.dtype.kind == "b"
    if dtype.kind in "iu" and found.size:
        limits, least, most = (
            np.iinfo(dtype),
            int(found.min()),
            int(found.max()),
        )  # in Python's integers, which do not overflow
        fits = limits.min <= least and most <= limits.max
        if found.dtype.kind == "f":
            fits = fits and max(-least, most) <= _WHOLE and bool((found == np.floor(found)).all())
    with np.errstate(all="ignore"):
        array = found.astype(dtype)
    if not fits or (dtype.kind == "f" and not np.isfinite(array).all()):
        raise BodyError(f"{name}: it has elements of {found.dtype} that {datatype} cannot hold.")
    return array


def _texts(data: list[Any], name: str) -> Array:
    array = np.array(data, dtype=object)
    if not all(isinstance(each, str) for each in array.ravel().tolist()):
        raise BodyError(f"{name}: it has elements that are no texts: expected BYTES.")
    return array


def _split(data: memoryview, name: str) -> Array:
    """Return the texts in bytes, each of which has its length before it."""
    texts, place = [], 0
    while place < len(data):
        if place + _LENGTH.size > len(data):
            raise BodyError(f"{name}: the bytes end in the middle of the length of a text.")
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        if place + length > len(data):
            raise BodyError(f"{name}: a text of {length} bytes is said to come, and {len(data) - place} are left.")
        try:
            texts.append(str(data[place : place + length], "utf-8"))
        except UnicodeDecodeError:
            raise BodyError(
                f"{name}: element {len(texts)} is no text in UTF-8. Send bytes to /v1/predict, as msgpack."
            ) from None
        place += length
    return np.array(texts, dtype=object)


def _row(value: Any, name: str) -> Array:
    try:
        array = np.asarray(value)
        if array.dtype.kind in "US":  # NumPy's own texts lose zeros at their ends
            array = np.asarray(value, dtype=object)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biufc" and not all(isinstance(each, str | bytes) for each in array.ravel().tolist()):
        raise UnwritableError(
            f"the output {name!r} is a {type(value).__name__} that is no tensor of numbers or texts: ask /v1/predict."
        )
    return array
