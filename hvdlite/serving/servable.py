"""What a replica computes with: a function from a batch of inputs to as many outputs, and what it says of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array

Shape = tuple[int | None, ...]
Inputs = Mapping[str, tuple[Any, Sequence[int | None]]]
"""The arrays of an input by their names: the dtype of each, and its shape without the batch."""
_NUMBERS = "biufc"
"""The kinds of NumPy's dtypes that inputs may have: booleans and numbers."""


@dataclass(frozen=True)
class Spec:
    """What an input must be.

    Attributes:
        dtype: The NumPy name of the dtype to which inputs are converted; None if they are taken as they come.
        shape: The shape of one input, without the batch; None stands for any length there. None if any shape will do.
        mixes_shapes: Whether inputs of different shapes may be in one batch, because a function pads them.
        allow_nan: Whether NaN and infinities are allowed.
        inputs: What each of the arrays of an input must be, by their names, if an input is a dictionary of arrays.
    """

    dtype: str | None = None
    shape: Shape | None = None
    mixes_shapes: bool = False
    allow_nan: bool = False
    inputs: tuple[tuple[str, Spec], ...] = ()

    def __str__(self) -> str:
        """Return the spec in words."""
        if self.inputs:
            return ", ".join(f"{name!r}: {spec}" for name, spec in self.inputs)
        if self.dtype is None and self.shape is None:
            return "any value"
        shape = "any shape" if self.shape is None else f"shape {shape_text(self.shape)}"
        return f"an array of {self.dtype or 'numbers'}, {shape}"


def shape_text(shape: Shape) -> str:
    """Write a shape as Python does, with ``*`` for any length."""
    words = ["*" if size is None else str(size) for size in shape]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


class Servable:
    """A function with what it says of its inputs. ``hvd.servable`` makes one.

    Args:
        predict: Takes a batch, and returns as many outputs. A batch of inputs of one shape and dtype is an array, whose first
            axis is the batch; other batches are lists. With `inputs`, a batch is a dictionary of such arrays. It owns what it
            gets.
        dtype: The dtype to which inputs are converted; if it is not given, they are taken as they come.
        shape: The shape of one input, without the batch; None stands for any length there.
        pad: If it is given, batches mix inputs of different shapes: `pad` gets the list of the arrays, and `predict` gets what
            it returns.
        example: One input. `dtype` and `shape` are taken from it if they are not given, and a replica warms up with it. Without
            one it warms up with zeros, if the shape is known.
        allow_nan: Whether NaN and infinities in inputs are allowed.
        inputs: If an input has several arrays: their names, each with its dtype and shape. Then `pad` gets a list of
            dictionaries.

    Raises:
        ArgumentError: An argument is not of its type.
    """

    def __init__(
        self,
        predict: Callable[[Any], Any],
        *,
        dtype: Any = None,
        shape: Sequence[int | None] | None = None,
        pad: Callable[[list[Any]], Any] | None = None,
        example: Any = None,
        allow_nan: bool = False,
        inputs: Inputs | None = None,
    ) -> None:
        if not callable(predict):
            raise ArgumentError(f"servable({predict!r}): expected a function; got a {type(predict).__name__}.")
        if pad is not None and not callable(pad):
            raise ArgumentError(f"servable: pad={pad!r}: expected a function that takes a list of arrays.")
        if inputs is not None:
            if not (dtype is None and shape is None and example is None):
                raise ArgumentError(
                    "servable: inputs= and dtype=, shape= or example=: inputs= has a dtype and a shape for each."
                )
            named = _checked_inputs(inputs, bool(allow_nan))
            self.predict, self.pad = predict, pad
            self.spec = Spec(mixes_shapes=pad is not None, allow_nan=bool(allow_nan), inputs=named)
            examples = {name: _zeros(spec) for name, spec in named}
            self.example: Any = None if any(each is None for each in examples.values()) else examples
            return
        if example is not None:
            example = np.asarray(example)
            dtype = example.dtype if dtype is None else dtype
            shape = example.shape if shape is None and pad is None else shape
        self.predict, self.pad = predict, pad
        self.spec = Spec(_dtype_name(dtype), _checked_shape(shape), pad is not None, bool(allow_nan))
        self.example = self._example(example)

    def __call__(self, inputs: Sequence[Any] | Array) -> Any:
        """Compute a batch: return what `predict` returns for it."""
        if self.pad is not None:
            return self.predict(self.pad(list(inputs)))
        if self.spec.inputs:
            return self.predict({name: np.stack([each[name] for each in inputs]) for name, _ in self.spec.inputs})
        return self.predict(inputs)

    def share(self, descriptor: int) -> None:
        """Let what all replicas have alike lie in a file in memory, if `predict` has a method ``share`` that does so.

        Args:
            descriptor: The file, which is empty at first. Each replica has it open.
        """
        if callable(share := getattr(self.predict, "share", None)):
            share(descriptor)

    def _example(self, given: Array | None) -> Array | None:
        if given is not None:
            return given.astype(self.spec.dtype or given.dtype)
        return _zeros(self.spec)


@overload
def servable(
    predict: Callable[[Any], Any],
    *,
    dtype: Any = None,
    shape: Sequence[int | None] | None = None,
    pad: Callable[[list[Any]], Any] | None = None,
    example: Any = None,
    allow_nan: bool = False,
    inputs: Inputs | None = None,
) -> Servable: ...


@overload
def servable(
    predict: None = None,
    *,
    dtype: Any = None,
    shape: Sequence[int | None] | None = None,
    pad: Callable[[list[Any]], Any] | None = None,
    example: Any = None,
    allow_nan: bool = False,
    inputs: Inputs | None = None,
) -> Callable[[Callable[[Any], Any]], Servable]: ...


def servable(
    predict: Callable[[Any], Any] | None = None,
    *,
    dtype: Any = None,
    shape: Sequence[int | None] | None = None,
    pad: Callable[[list[Any]], Any] | None = None,
    example: Any = None,
    allow_nan: bool = False,
    inputs: Inputs | None = None,
) -> Servable | Callable[[Callable[[Any], Any]], Servable]:
    """Say what a function for ``hvdlite serve`` takes. The arguments are those of `Servable`.

    Args:
        predict: Takes a batch of inputs, and returns as many outputs. Without it, this is a decorator of such a function.
        dtype: The dtype to which inputs are converted.
        shape: The shape of one input, without the batch; None stands for any length there.
        pad: Makes one batch of a list of arrays of different shapes.
        example: One input, which may stand for `dtype` and `shape`.
        allow_nan: Whether NaN and infinities in inputs are allowed.
        inputs: If an input has several arrays: their names, each with its dtype and shape.

    Returns:
        The servable, which a module gives a name for ``hvdlite serve module:name``; or the decorator that makes one.

    Raises:
        ArgumentError: An argument is not of its type.

    Examples:
        >>> @hvdlite.servable(dtype="float32", shape=(3,))
        ... def total(batch):
        ...     return batch.sum(axis=1)
        >>> total(np.ones((2, 3), np.float32)).tolist()
        [3.0, 3.0]
    """

    def make(function: Callable[[Any], Any]) -> Servable:
        about: dict[str, Any] = {"dtype": dtype, "shape": shape, "example": example, "inputs": inputs}
        return Servable(function, pad=pad, allow_nan=allow_nan, **about)

    return make if predict is None else make(predict)


def by_input(outputs: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the outputs of a model by input: a batch of tuples, lists or dictionaries becomes one of them for each input.

    Args:
        outputs: A tensor whose first axis is the batch, or such tensors in tuples, lists and dictionaries.
        convert: Makes an array of a tensor.
    """
    if isinstance(outputs, Mapping):
        columns = [by_input(each, convert) for each in outputs.values()]
        return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(outputs, list | tuple):
        return list(zip(*[by_input(each, convert) for each in outputs], strict=True))
    return convert(outputs)


def _dtype_name(dtype: Any) -> str | None:
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise ArgumentError(f"servable: dtype={dtype!r}: expected the name of a dtype of NumPy.") from None
    if found.kind not in _NUMBERS:
        raise ArgumentError(f"servable: dtype={found.name}: expected booleans or numbers.")
    return str(found.name)


def _checked_inputs(inputs: Inputs, allow_nan: bool) -> tuple[tuple[str, Spec], ...]:
    if not isinstance(inputs, Mapping) or not inputs or not all(isinstance(name, str) for name in inputs):
        raise ArgumentError(
            f"servable: inputs={inputs!r}: expected a dictionary of names, each with its dtype and shape."
        )
    named = []
    for name, each in inputs.items():
        if not isinstance(each, tuple | list) or len(each) != 2:
            raise ArgumentError(f"servable: inputs has {name!r}: {each!r}: expected a pair of a dtype and a shape.")
        named.append((name, Spec(_dtype_name(each[0]), _checked_shape(each[1]), allow_nan=allow_nan)))
    return tuple(named)


def _zeros(spec: Spec) -> Array | None:
    """Return an input to warm up with, if its shape is known."""
    if spec.shape is None or None in spec.shape:
        return None
    return np.zeros([size for size in spec.shape if size is not None], spec.dtype or "float64")


def _checked_shape(shape: Sequence[int | None] | None) -> Shape | None:
    if shape is None:
        return None
    sizes = tuple(shape)
    if not all(size is None or (isinstance(size, int) and size >= 0) for size in sizes):
        raise ArgumentError(f"servable: shape={shape!r}: expected lengths of axes from 0 on, or None for any length.")
    return sizes
