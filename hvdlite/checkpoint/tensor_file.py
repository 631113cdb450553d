"""The format safetensors: tensors by name in one file, which many programs read.

A file is the length of its header (8 bytes), the header (JSON, with the dtype, shape and place of each tensor), and the
elements. It is written here as a stream of chunks, and not by the package of the same name, whose callers do not see what it
writes: so no tensor is copied, each byte goes into the checksum as it is written, and an error of the disk comes out as it is.
The format is defined at https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.registry import adapter_for

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 64
_LONGEST_HEADER = 100_000_000  # as the format says


class Stored(NamedTuple):
    """The values of a tensor in host memory.

    Attributes:
        dtype: The name of its dtype, as in `TensorInfo`.
        array: Its values; those of bfloat16 as bits in uint16.
    """

    dtype: str
    array: Array


def info_of(tensor: Any) -> TensorInfo:
    """Return the dtype and shape of a tensor of any framework.

    Raises:
        UnsupportedTensorError: hvdlite cannot read it, or the format does not have its dtype.
    """
    info = adapter_for(tensor).info(tensor)
    if info.dtype not in _NAMES:
        raise UnsupportedTensorError(f"tensors of dtype {info.dtype} cannot be saved; cast them to another dtype.")
    return info


def length_of(tensors: Mapping[str, Any]) -> int:
    """Return the length in bytes of the file of these tensors."""
    header, order = _header_of(tensors)
    return len(header) + sum(_size(info_of(tensors[name])) for name in order)


def chunks_of(tensors: Mapping[str, Any]) -> Iterator[Any]:
    """Return the content of the file of these tensors, as buffers. Tensors on a GPU are copied one by one.

    Args:
        tensors: Tensors of any framework, by name.
    """
    header, order = _header_of(tensors)
    yield header
    for name in order:
        array = adapter_for(tensors[name]).to_array(tensors[name], wide=False)
        if array.size:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def content_of(tensors: Mapping[str, Any], memory: Array | None = None) -> Array:
    """Return the content of the file of these tensors, which is a copy: uint8, flat.

    Args:
        tensors: See `chunks_of`.
        memory: Memory for it, which is used if its length is right.
    """
    length, end = length_of(tensors), 0
    content = memory if memory is not None and len(memory) == length else np.empty(length, np.uint8)
    for chunk in chunks_of(tensors):
        begin, end = end, end + len(chunk)
        content[begin:end] = np.frombuffer(chunk, np.uint8)
    return content


def tensors_in(content: Array) -> dict[str, Stored]:
    """Return the tensors of a file, by name. They share its memory.

    Args:
        content: The file: uint8, flat.

    Raises:
        ValueError: This is not the format.
    """
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if not 8 <= start <= min(len(content), _LONGEST_HEADER):
        raise ValueError("the header is longer than the file")
    header = json.loads(content[8:start].tobytes())
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        info = TensorInfo(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
        if not (0 <= begin <= end <= len(content) - start and end - begin == _size(info)):
            raise ValueError(f"the tensor {name} is not where the header says")
        values = content[start + begin : start + end].view(_in_memory(info.dtype)).reshape(info.shape)
        found[name] = Stored(info.dtype, values)
    return found


def _header_of(tensors: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Return what comes before the elements, and the names in the order of the elements.

    Tensors with large elements come first, so that each lies at a multiple of the size of its elements.
    """
    infos = {name: info_of(tensor) for name, tensor in tensors.items()}
    order = sorted(infos, key=lambda name: (-_in_memory(infos[name].dtype).itemsize, name))
    entries: dict[str, Any] = {}
    end = 0
    for name in order:
        begin, end = end, end + _size(infos[name])
        entries[name] = {
            "dtype": _NAMES[infos[name].dtype],
            "shape": list(infos[name].shape),
            "data_offsets": [begin, end],
        }
    if any(type(tensor).__module__.partition(".")[0] == "torch" for tensor in tensors.values()):
        entries["__metadata__"] = {"format": "pt"}  # some programs look for it
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape) * _in_memory(info.dtype).itemsize


def _in_memory(dtype: str) -> np.dtype[Any]:
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)
