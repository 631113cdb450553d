"""Bodies of requests and answers: JSON, NumPy's ``.npy``, and msgpack. What is wrong with one is said in words."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import orjson

from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array
from hvdlite.serving.servable import Spec, shape_text

JSON, NPY, MSGPACK = "application/json", "application/x-npy", "application/msgpack"
_NPY_HEADERS: dict[tuple[int, int], Callable[[io.BytesIO], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class BodyError(HvdliteError):
    """A body is not what the server expects. The text says what was found and what was expected."""


class UnwritableError(HvdliteError):
    """An output cannot be written in the format that was asked for."""


def read(kind: str, body: bytes | bytearray, spec: Spec) -> Any:
    """Return the input that a body has.

    Args:
        kind: The format, one of `READERS`.
        body: The whole body. An array may lie in its memory.
        spec: What the input must be.

    Raises:
        BodyError: The body has no such input.
    """
    return conform(READERS[kind](body, spec), spec)


def write(kind: str, output: Any) -> bytes:
    """Return the body for an output.

    Args:
        kind: The format, one of `WRITERS`.
        output: An array, or a value of Python's own types with arrays in it.

    Raises:
        UnwritableError: The format has no words for it.
    """
    return WRITERS[kind](output)


def _read_json(body: bytes | bytearray, spec: Spec) -> Any:
    return _input_of(load_json(body, spec, 'Expected an object {"input": …}.'))


def load_json(body: bytes | bytearray, spec: Spec, expected: str) -> Any:
    """Return what a text of JSON says.

    Args:
        body: The text.
        spec: What inputs in it must be.
        expected: What was expected, for the error.

    Raises:
        BodyError: It is no JSON.
    """
    # orjson makes a float of an integer of more than 64 bits. It must stay what it is, unless the model has a dtype.
    if spec.dtype is not None or spec.inputs or _LONG not in body.translate(_ANY_DIGIT):
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(body)
    # The standard library has a tenth of that speed, but reads UTF-16 and UTF-32 too, and says better what is wrong.
    try:
        return _DECODER.decode(body.decode(json.detect_encoding(body)))
    except (ValueError, RecursionError) as error:
        raise BodyError(f"the body is no JSON: {error}. {expected}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has {name}, which JSON does not have (send NaN as {NPY})")


_LONG, _ANY_DIGIT = b"0" * 20, bytes.maketrans(b"123456789", b"000000000")
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_npy(body: bytes | bytearray, _spec: Spec) -> Array:
    """Return an array that lies in the body: a header that promises more than there is takes no memory."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"its version is {version}")
        shape, is_fortran, dtype = _NPY_HEADERS[version](file)
        if dtype.kind not in "biufc":
            raise ValueError(f"its dtype is {dtype}, and not one of booleans or numbers")
        begin, size = file.tell(), _size(shape, dtype)
        if len(body) - begin != size:
            raise ValueError(
                f"its array of {dtype}, shape {shape}, has {size} bytes, and {len(body) - begin} have come"
            )
        array: Array = np.ndarray(shape, dtype, body, begin, order="F" if is_fortran else "C")
        return array
    except Exception as error:  # headers are parsed as Python, which fails in many ways
        raise BodyError(f"the body is no array in NumPy's format .npy: {error}.") from None


def _read_msgpack(body: bytes | bytearray, _spec: Spec) -> Any:
    try:
        whole = msgpack.unpackb(body, object_hook=_array_of)
    except BodyError:
        raise
    except Exception as error:  # msgpack has several, and ValueError
        raise BodyError(f'the body is no msgpack: {error}. Expected a map {{"input": …}}.') from None
    return _input_of(whole)


def _array_of(found: dict[Any, Any]) -> Any:
    if found.keys() != {"dtype", "shape", "data"}:
        return found
    try:
        dtype = np.dtype(found["dtype"])
        if dtype.kind not in "biufc":
            raise TypeError(f"dtype {dtype}")
        shape, data = tuple(found["shape"]), found["data"]
        if len(data) != _size(shape, dtype):
            raise ValueError(f"{len(data)} bytes, and shape {shape} of {dtype} has {_size(shape, dtype)}")
        return np.ndarray(shape, dtype, data)
    except (TypeError, ValueError, OverflowError) as error:
        raise BodyError(f"an array in the body has wrong dtype, shape or data: {error}.") from None


def _size(shape: tuple[Any, ...], dtype: np.dtype[Any]) -> int:
    """Return how many bytes an array has.

    Raises:
        ValueError: The shape is none.
    """
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"the shape is {shape}: expected lengths of axes from 0 on")
    return int(math.prod(shape)) * dtype.itemsize


def _input_of(whole: Any) -> Any:
    if isinstance(whole, dict) and "input" in whole:
        return whole["input"]
    found = f"a {type(whole).__name__}"
    if isinstance(whole, dict):
        found = f"an object with {', '.join(map(repr, list(whole)[:5])) or 'nothing in it'}"
    raise BodyError(f'the body is {found}: expected an object {{"input": …}}.')


def conform(value: Any, spec: Spec) -> Any:
    """Return an input as its spec wants it. Numbers become arrays; other values stay what they are if any value will do.

    Raises:
        BodyError: The value is not what the spec wants.
    """
    if spec.inputs:
        return _conform_each(value, spec)
    array = _as_array(value, spec)
    if array is None:
        return value
    if spec.shape is not None and not (
        array.ndim == len(spec.shape)
        and all(size is None or size == found for size, found in zip(spec.shape, array.shape, strict=True))
    ):
        raise BodyError(f"the input has the shape {shape_text(array.shape)}: expected {spec}.")
    if spec.dtype is not None and array.dtype != np.dtype(spec.dtype):
        array = _cast(array, np.dtype(spec.dtype), spec, has_dtype=isinstance(value, np.ndarray))
    check_finite(array, spec)
    return array


def check_finite(array: Array, spec: Spec) -> None:
    """Raise if an input has NaN or infinity, unless its spec allows them.

    Raises:
        BodyError: It has, and says where.
    """
    if not spec.allow_nan and array.dtype.kind in "fc" and not np.isfinite(array).all():
        where = np.argwhere(~np.isfinite(array))
        raise BodyError(
            f"the input has {len(where)} values that are NaN or infinite, the first at {where[0].tolist()}: expected finite "
            "numbers."
        )


def _conform_each(value: Any, spec: Spec) -> dict[str, Any]:
    names = [name for name, _ in spec.inputs]
    if not isinstance(value, dict) or sorted(map(str, value)) != sorted(names):
        found = (
            f"has {', '.join(map(repr, value)) or 'nothing'}"
            if isinstance(value, dict)
            else f"is a {type(value).__name__}"
        )
        raise BodyError(f"the input {found}: expected an object with {', '.join(map(repr, names))}.")
    conforming = {}
    for name, each in spec.inputs:
        try:
            conforming[name] = conform(value[name], each)
        except BodyError as error:
            raise BodyError(f"{name!r}: {error}") from None
    return conforming


def _as_array(value: Any, spec: Spec) -> Array | None:
    if isinstance(value, np.ndarray):
        return value
    expects_array = spec.dtype is not None or spec.shape is not None or spec.mixes_shapes
    if not expects_array and not isinstance(value, bool | int | float | list):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # rows of different lengths
        array = None
    if array is not None and array.dtype.kind in "biuf":
        return array
    if not expects_array:
        return None
    found = "rows of different lengths" if array is None else "values that are no numbers"
    raise BodyError(f"the input is a {type(value).__name__} of {found}: expected {spec}.")


def _cast(array: Array, dtype: np.dtype[Any], spec: Spec, has_dtype: bool) -> Array:
    """Return an array in the dtype of the model, if it can hold the values.

    A number of JSON is a decimal without a dtype, and is rounded to the model's floating-point numbers, as are those of a wider
    floating-point dtype. All else is the same value in both dtypes, or refused.
    """
    found, is_same = array.dtype, np.ones(array.shape, bool)
    if found.kind == "c" and dtype.kind != "c":
        is_same, array = array.imag == 0, array.real
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if dtype.kind in "iu" and array.dtype.kind == "f":  # outside of its limits, a cast gives any number
            limits = np.iinfo(dtype)
            is_same = is_same & (array >= float(limits.min)) & (array < float(limits.max) + 1)
        if dtype.kind in "iub":
            is_same = is_same & (cast == array)
        elif array.dtype.kind in "iu" and has_dtype:
            is_same = is_same & (cast.real.astype(array.dtype) == array)
        else:
            is_same = is_same & (np.isfinite(cast) | ~np.isfinite(array))
    if is_same.all():
        return cast
    where = np.argwhere(~is_same)
    raise BodyError(
        f"the input has numbers of {found} that {dtype} cannot hold ({len(where)}, the first at {where[0].tolist()}): expected "
        f"{spec}."
    )


def _write_json(output: Any) -> bytes:
    try:
        return write_json({"output": output})
    except UnwritableError as error:
        raise UnwritableError(f"{error} Ask for another format by Accept: {NPY}.") from None


def write_json(whole: Any) -> bytes:
    """Return a value as JSON.

    Raises:
        UnwritableError: JSON has no words for it.
    """
    with contextlib.suppress(TypeError):  # what it has no words for, such as integers of more than 64 bits
        data = orjson.dumps(whole, _listed)
        if b"null" not in data:  # it writes NaN and infinity as null
            return data
    try:
        return _ENCODER.encode(whole).encode()
    except (TypeError, ValueError) as error:
        raise UnwritableError(f"JSON has no words for the output ({error}).") from None


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


_ENCODER = json.JSONEncoder(default=_listed, allow_nan=False, separators=(",", ":"))


def _write_npy(output: Any) -> bytes:
    array = np.asarray(output) if isinstance(output, bool | int | float | complex) else output
    if not isinstance(array, np.ndarray | np.generic):
        raise UnwritableError(
            f"the output is a {type(output).__name__} and no array: ask for Accept: {JSON} or {MSGPACK}."
        )
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def _write_msgpack(output: Any) -> bytes:
    return bytes(msgpack.packb({"output": output}, default=_packed))


def _packed(value: Any) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind not in "c":
        return value.item()
    if value.dtype.kind == "U":
        return value.tolist()
    return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}


READERS: dict[str, Callable[[bytes | bytearray, Spec], Any]] = {
    JSON: _read_json,
    NPY: _read_npy,
    MSGPACK: _read_msgpack,
}
WRITERS: dict[str, Callable[[Any], bytes]] = {JSON: _write_json, NPY: _write_npy, MSGPACK: _write_msgpack}
