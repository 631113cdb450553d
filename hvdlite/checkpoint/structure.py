"""Values as JSON, and back: numbers, texts, lists, dictionaries; and tensors, of which the JSON says in which file they are.

A tree is what JSON can hold. Kinds of values that JSON does not have are objects with one key that begins with "$". Nothing is
pickled, unless the program allows it: to unpickle a file is to trust whoever wrote it.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdlite.checkpoint.tensor_file import Stored, info_of
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import TensorInfo
from hvdlite.tensors.frameworks import ADAPTERS, framework_adapter
from hvdlite.tensors.numpy_adapter import dtype_of

Tree = Any


class TensorPiece(NamedTuple):
    """A value for `Writer`: some elements of a tensor whose other elements other ranks have.

    Attributes:
        tensor: The elements.
        start: The place of the first one in the flat whole tensor.
        shape: The shape of the whole tensor.
    """

    tensor: Any
    start: int
    shape: tuple[int, ...]


class Own(NamedTuple):
    """A value for `Writer`: what this rank alone has. `Reader` makes a list of all ranks' values of it."""

    value: Any


class Writer:
    """Makes trees of values, and collects their tensors.

    Args:
        file: The name of the file in which the tensors will be.
        allow_pickle: Whether values of other classes are pickled.

    Attributes:
        file: The name of the file.
        tensors: The tensors, by their names in the file.
    """

    def __init__(self, file: str, allow_pickle: bool) -> None:
        self.file = file
        self.tensors: dict[str, Any] = {}
        self._allow_pickle = allow_pickle

    def tree_of(self, value: Any, name: str, keys: tuple[Any, ...] = ()) -> Tree:
        """Return the tree of a value.

        Args:
            value: The value.
            name: The name that the program gave, for errors.
            keys: The way from there to this value.

        Raises:
            ArgumentError: A value is of a class that the tree cannot hold. The text says where it is.
        """

        def inner(value: Any, *key: Any) -> Tree:
            return self.tree_of(value, name, (*keys, *key))

        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind is float:
            return {"$float": repr(value)}
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(each, key) for key, each in value.items()}
        if kind in (dict, OrderedDict, Counter):
            found = {f"${kind.__name__.lower()}": [[inner(key, key), inner(each, key)] for key, each in value.items()]}
            if about := getattr(value, "__dict__", {}):  # torch's state dicts have the versions of modules there
                found["$attributes"] = inner(about, "__dict__")
            return found
        if kind in (list, tuple, set, frozenset):
            ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            each = [inner(element, number) for number, element in enumerate(ordered)]
            return each if kind is list else {f"${kind.__name__}": each}
        if kind is complex:
            return {"$complex": [inner(value.real), inner(value.imag)]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Own):
            return {"$own": [inner(value.value)]}
        if isinstance(value, TensorPiece):
            tensor = self._add(value.tensor, keys)
            stop = value.start + math.prod(info_of(value.tensor).shape)
            place = [tensor.pop("$tensor"), tensor.pop("file"), value.start, stop]
            return {"$pieces": [place], "shape": list(value.shape), **tensor}
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            try:
                return self._add(value, keys)
            except UnsupportedTensorError as error:
                if not self._allow_pickle:
                    raise ArgumentError(f"{_place(name, keys)}: {error}") from error
        return self._pickled(value, name, keys)

    def _add(self, tensor: Any, keys: tuple[Any, ...]) -> dict[str, Any]:
        """Take a tensor, and return its tree."""
        about: dict[str, Any] = {}
        if (framework := _framework_of(tensor)) is not None:
            about["of"] = framework
        if isinstance(tensor, np.generic):
            about["scalar"] = True
        if isinstance(tensor, np.ndarray | np.generic) and tensor.dtype == np.complex128:  # the format does not have it
            about["complex128"] = True
            tensor = np.asarray(tensor).reshape(*tensor.shape, 1).view(np.float64)
        info_of(tensor)
        name = plain = ".".join(map(str, keys)) or "value"
        number = 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{plain}#{number}"
        self.tensors[name] = tensor
        return {"$tensor": name, "file": self.file, **about}

    def _pickled(self, value: Any, name: str, keys: tuple[Any, ...]) -> Tree:
        what = f"{_place(name, keys)} is a {type(value).__module__}.{type(value).__qualname__}"
        if not self._allow_pickle:
            raise ArgumentError(
                f"{what}, which a checkpoint does not hold: it has numbers, texts, tensors, lists and dictionaries of them; "
                "and objects that have state_dict() and load_state_dict(), by names of their own. Leave it out; or pass "
                "allow_pickle=True here and to load(), which then runs what the file says."
            )
        try:
            return {"$pickle": base64.b64encode(pickle.dumps(value)).decode()}
        except Exception as error:
            raise ArgumentError(f"{what}, which cannot be pickled: {error}") from error


class Reader:
    """Makes values of trees.

    Args:
        files: For each file, its tensors by name.
        allow_pickle: Whether pickled values are unpickled.
        copies: Whether tensors get memory of their own. If not, they share that of the files.
    """

    def __init__(self, files: Mapping[str, Mapping[str, Stored]], allow_pickle: bool, copies: bool = True) -> None:
        self._files = files
        self._copies = copies
        self._allow_pickle = allow_pickle

    def value_of(self, tree: Tree) -> Any:
        """Return the value of a tree.

        Raises:
            ArgumentError: It has pickled values, and these are not allowed.
        """
        if isinstance(tree, list):
            return [self.value_of(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        kind = next(iter(tree), "")
        if not kind.startswith("$"):
            return {key: self.value_of(each) for key, each in tree.items()}
        return self._KINDS[kind](self, tree)

    def _mapping(self, make: Callable[[Any], Any], tree: dict[str, Any], kind: str) -> Any:
        found = make((self.value_of(key), self.value_of(value)) for key, value in tree[kind])
        if "$attributes" in tree:
            vars(found).update(self.value_of(tree["$attributes"]))
        return found

    def _tensor(self, tree: dict[str, Any]) -> Any:
        stored = self._files[tree["file"]][tree["$tensor"]]
        return _tensor_of(stored._replace(array=stored.array.copy()) if self._copies else stored, tree)

    def _joined(self, tree: dict[str, Any]) -> Any:
        """Return a tensor, put together from pieces."""
        whole: Stored | None = None
        for name, file, start, stop in tree["$pieces"]:
            piece = self._files[file][name]
            if whole is None:
                whole = Stored(piece.dtype, np.empty(math.prod(tree["shape"]), piece.array.dtype))
            whole.array[start:stop] = piece.array.reshape(-1)
        assert whole is not None
        return _tensor_of(Stored(whole.dtype, whole.array.reshape(tree["shape"])), tree)

    def _unpickled(self, tree: dict[str, Any]) -> Any:
        if not self._allow_pickle:
            raise ArgumentError(
                "this checkpoint has pickled objects, which can run anything when they are loaded. If you trust whoever wrote "
                "it, pass allow_pickle=True."
            )
        return pickle.loads(base64.b64decode(tree["$pickle"]))

    _KINDS: Mapping[str, Callable[[Reader, dict[str, Any]], Any]] = {
        "$float": lambda self, tree: float(tree["$float"]),
        "$complex": lambda self, tree: complex(*map(self.value_of, tree["$complex"])),
        "$bytes": lambda self, tree: base64.b64decode(tree["$bytes"]),
        "$tuple": lambda self, tree: tuple(map(self.value_of, tree["$tuple"])),
        "$set": lambda self, tree: set(map(self.value_of, tree["$set"])),
        "$frozenset": lambda self, tree: frozenset(map(self.value_of, tree["$frozenset"])),
        "$dict": lambda self, tree: self._mapping(dict, tree, "$dict"),
        "$ordereddict": lambda self, tree: self._mapping(OrderedDict, tree, "$ordereddict"),
        "$counter": lambda self, tree: self._mapping(lambda pairs: Counter(dict(pairs)), tree, "$counter"),
        "$own": lambda self, tree: list(map(self.value_of, tree["$own"])),
        "$tensor": _tensor,
        "$pieces": _joined,
        "$pickle": _unpickled,
    }


def files_of(tree: Tree) -> set[str]:
    """Return the names of the files in which the tensors of a tree are."""
    if isinstance(tree, list):
        return set().union(*map(files_of, tree)) if tree else set()
    if not isinstance(tree, dict):
        return set()
    if "$tensor" in tree:
        return {tree["file"]}
    if "$pieces" in tree:
        return {file for _, file, *_ in tree["$pieces"]}
    return files_of(list(tree.values()))


def _tensor_of(stored: Stored, about: Mapping[str, Any]) -> Any:
    """Return a tensor of the framework from which it came. It shares the memory, if the framework can do that.

    Raises:
        ArgumentError: It is NumPy's bfloat16, which needs a package that is not installed.
    """
    array = stored.array
    if "of" in about:
        return framework_adapter(about["of"]).from_array(array, stored.dtype, None)
    if stored.dtype == "bfloat16":
        if (dtype := dtype_of(TensorInfo(stored.dtype, array.shape))) == np.uint16:
            raise ArgumentError(
                "this checkpoint has arrays of bfloat16 for NumPy, which need ml_dtypes: pip install it."
            )
        array = array.view(dtype)
    if about.get("complex128"):
        array = array.view(np.complex128).reshape(array.shape[:-1])
    return array[()] if about.get("scalar") else array


def _framework_of(tensor: Any) -> str | None:
    """Return the framework whose adapter makes such a tensor; None for NumPy's, and for those that come back as NumPy's."""
    if isinstance(tensor, np.ndarray | np.generic):
        return None
    names = (cls.__module__.partition(".")[0] for cls in type(tensor).__mro__)
    return next((name for name in names if name in ADAPTERS), None)


def _place(name: str, keys: tuple[Any, ...]) -> str:
    return name + "".join(f"[{key!r}]" for key in keys)
