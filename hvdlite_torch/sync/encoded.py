"""`EncodedGradient`, `Encodings`: gradients that are compressed by the step before they travel.

A gradient is compressed once a step, because a compressor may remember what it has seen.

All ranks must know the size of a compressed gradient before they make memory for it. A compressor says the size (``encoded``),
or the first gradient shows it: a step with a first gradient tells all ranks the size, which then make the memory and continue
the step. Until then the parameter is *unknown* on all ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.gradients.codec import Codec
from hvdlite.protocols import TensorInfo
from hvdlite.ranks.together import Together, variants_text
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.device import TORCH
from hvdlite_torch.tensors.gradient import as_dense, gradient_dtype, gradient_info


class EncodedGradient:
    """The compressed gradient of one parameter, on one rank.

    Args:
        codec: Compresses the gradient.
        parameter: The parameter, whose dtype and shape gradients have.

    Attributes:
        codec: Compresses the gradient.
        info: The dtype and shape of what travels; None as long as they are unknown.
    """

    def __init__(self, codec: Codec, parameter: torch.Tensor) -> None:
        self.codec = codec
        self.info = codec.encoded(gradient_info(parameter))
        self._dtype = gradient_dtype(parameter)
        self._context: Any = None
        self._missing_context = False
        self._encoded: torch.Tensor | None = None

    @property
    def layout(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of what travels. `info` must be known."""
        assert self.info is not None
        return self.info.shape, TORCH[self.info.dtype]

    def encode(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient as it travels. It is compressed once until `forget`, unless the codec is repeatable.

        Args:
            gradient: A dense gradient.

        Raises:
            ArgumentError: The compressed gradient has another dtype or shape than `info`.
        """
        if self._encoded is not None:
            return self._encoded
        encoded, self._context = self.codec.encode(gradient)
        self._missing_context = False
        info = ADAPTER.info(encoded)
        if self.info is not None and info != self.info:
            raise ArgumentError(
                f"the compressor {self.codec.name} has made {info.dtype} of shape {info.shape} of a gradient, and is known to "
                f"make {self.info.dtype} of shape {self.info.shape} of it: a compressed gradient has the same dtype and shape "
                "in every step."
            )
        if not self.codec.repeatable:
            self._encoded = encoded
        return encoded

    def forget(self) -> None:
        """Forget the compressed gradient: the step is over."""
        self._encoded = None

    def decode(self, result: torch.Tensor) -> torch.Tensor:
        """Return the combined gradient, decompressed, in the parameter's gradient dtype.

        Raises:
            ArgumentError: This rank has never compressed such a gradient, and the context of another rank cannot be pickled.
        """
        if self._missing_context:
            raise ArgumentError(
                f"this rank has no gradient of a parameter, and what the compressor {self.codec.name} needs to decompress "
                "those of other ranks cannot be pickled: let `compress` return a context that can be, or give the compressor a "
                "method `encoded(info)`, and let `decompress` take None for the context."
            )
        return self.codec.decode(result, self._context).to(self._dtype)

    def tell(self) -> _Found | None:
        """Return what other ranks need to know of the compressed gradient; None if nothing was compressed."""
        if self._encoded is None:
            return None
        context = None
        with contextlib.suppress(Exception):  # whatever a program's own classes raise
            context = pickle.dumps(self._context)
        return _Found(ADAPTER.info(self._encoded), context)

    def learn(self, found: _Found) -> None:
        """Take over what some rank has found when it compressed the first gradient."""
        self.info = found.info
        if self._encoded is None:
            self._missing_context = found.context is None
            self._context = None if found.context is None else pickle.loads(found.context)


class _Found(NamedTuple):
    """What one rank tells the others of a first compressed gradient.

    Attributes:
        info: The dtype and shape of what travels.
        context: The context for `decompress`, pickled; None if it cannot be pickled.
    """

    info: TensorInfo
    context: bytes | None

    @property
    def text(self) -> str:
        """Return the dtype and shape in words."""
        return f"{self.info.dtype} of shape {self.info.shape}"


class Encodings:
    """The compressed gradients of one optimizer, on one rank.

    Args:
        codec: Compresses gradients.
        together: The ranks that take part.
        sparse_as_dense: Whether sparse gradients are made dense.
    """

    def __init__(self, codec: Codec, together: Together, sparse_as_dense: bool) -> None:
        self._codec = codec
        self._together = together
        self._sparse_as_dense = sparse_as_dense
        self._of: dict[torch.Tensor, EncodedGradient] = {}
        self._sparse: set[torch.Tensor] = set()

    def of(self, parameter: torch.Tensor) -> EncodedGradient:
        """Return the compressed gradient of a parameter."""
        found = self._of.get(parameter)
        if found is None:
            found = self._of[parameter] = EncodedGradient(self._codec, parameter)
        return found

    def known(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that are known."""
        return [parameter for parameter in parameters if self.of(parameter).info is not None]

    def infos(self, parameters: Sequence[torch.Tensor]) -> list[TensorInfo]:
        """Return the dtype and shape of what travels for each of the parameters that is known."""
        return [info for parameter in parameters if (info := self.of(parameter).info) is not None]

    def _unknown(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [parameter for parameter in parameters if self.of(parameter).info is None]

    def meet(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Compress the first gradients of unknown parameters. Return whether there are some; if so, all ranks call `agree`."""
        found = False
        for parameter in self._unknown(parameters):
            if parameter.grad is None:
                continue
            found = True
            dense = as_dense(parameter.grad, parameter.shape, gradient_dtype(parameter), self._sparse_as_dense)
            if dense is None:
                self._sparse.add(parameter)
            else:
                self.of(parameter).encode(dense)
        return found

    def agree(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let all ranks know what some ranks have found by `meet`. Every rank calls this.

        Returns:
            The parameters that have sparse gradients on some rank.

        Raises:
            MismatchError: Two ranks have compressed gradients of one parameter to different dtypes or shapes.
            ArgumentError: A rank has joined, and cannot be told the dtype and shape.
        """
        unknown = self._unknown(parameters)
        if not unknown:
            return []
        everybody = self._together.gather([p in self._sparse or self.of(p).tell() for p in unknown])
        sparse = []
        for number, parameter in enumerate(unknown):
            said = [None if each is None else each[number] for each in everybody]
            found = [each for each in said if isinstance(each, _Found)]
            if True in said:
                sparse.append(parameter)
            elif len({each.info for each in found}) > 1:
                lines = [[each.text if isinstance(each, _Found) else "no gradient"] for each in said]
                raise MismatchError(
                    f"the compressor {self._codec.name} does not make the same of a parameter's gradients on all ranks:\n"
                    f"{variants_text(self._together.ranks, lines)}"
                )
            elif found and None in everybody:
                raise ArgumentError(
                    f"a rank has joined, and does not know how large the compressor {self._codec.name} makes a parameter's "
                    "gradient, for this is the first one: give the compressor a method `encoded(info)` that says it."
                )
            elif found:
                self.of(parameter).learn(next((each for each in found if each.context is not None), found[0]))
        self._sparse.clear()
        return sparse

    def forget(self) -> None:
        """Forget all compressed gradients: the step is over."""
        for each in self._of.values():
            each.forget()
