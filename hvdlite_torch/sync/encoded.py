"""Gradients as they travel: compressed by the step, each once, for a compressor may remember what it has seen.

How large a compressed gradient is, must be known on all ranks before memory for it is made. A compressor says it
(``encoded``), or the first gradient shows it: the step that has one tells all ranks, which make the memory and go on with the
step. Until then the parameter is *unknown*, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.negotiation.mismatch import variants_text
from hvdlite.protocols import TensorInfo
from hvdlite_torch.step.codec import Codec
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.device import TORCH
from hvdlite_torch.tensors.gradient import as_dense, gradient_dtype, gradient_info


class EncodedGradient:
    """The compressed gradient of one parameter, on one rank.

    Args:
        codec: Compresses it.
        parameter: Whose.

    Attributes:
        codec: As given.
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
        """The shape and dtype of what travels, which are known."""
        assert self.info is not None
        return self.info.shape, TORCH[self.info.dtype]

    def encode(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as it travels. It is compressed once until `forget`, unless the codec may do so at any time.

        Raises:
            ArgumentError: It is not of the dtype and shape that are known.
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
        """The step is over: there will be another gradient."""
        self._encoded = None

    def decode(self, result: torch.Tensor) -> torch.Tensor:
        """The combined gradient, of the parameter's dtype.

        Raises:
            ArgumentError: This rank has never compressed a gradient of the parameter, and could not be told what another knows.
        """
        if self._missing_context:
            raise ArgumentError(
                f"this rank has no gradient of a parameter, and what the compressor {self.codec.name} needs to decompress "
                "those of other ranks cannot be pickled: let `compress` return a context that can be, or give the compressor a "
                "method `encoded(info)`, and let `decompress` take None for the context."
            )
        return self.codec.decode(result, self._context).to(self._dtype)

    def tell(self) -> _Found | None:
        """What other ranks need to know of what was compressed; None if nothing was."""
        if self._encoded is None:
            return None
        context = None
        with contextlib.suppress(Exception):  # whatever a program's own classes raise
            context = pickle.dumps(self._context)
        return _Found(ADAPTER.info(self._encoded), context)

    def learn(self, found: _Found) -> None:
        """Another rank, or this one, has compressed the first gradient."""
        self.info = found.info
        if self._encoded is None:
            self._missing_context = found.context is None
            self._context = None if found.context is None else pickle.loads(found.context)


class _Found(NamedTuple):
    """What is known of a compressed gradient.

    Attributes:
        info: Its dtype and shape.
        context: Pickled; None if it cannot be.
    """

    info: TensorInfo
    context: bytes | None

    @property
    def text(self) -> str:
        """The dtype and shape in words."""
        return f"{self.info.dtype} of shape {self.info.shape}"


class Encodings:
    """The compressed gradients of one optimizer, on one rank.

    Args:
        codec: Compresses them.
        ranks: The world ranks that take part, for messages.
        gather: Makes a list of the objects of all ranks, in the order of `ranks`; None for a rank that has joined.
        sparse_as_dense: What is sparse is not to stay so.
    """

    def __init__(
        self, codec: Codec, ranks: Sequence[int], gather: Callable[[Any], list[Any]], sparse_as_dense: bool
    ) -> None:
        self._codec = codec
        self._ranks = ranks
        self._gather = gather
        self._sparse_as_dense = sparse_as_dense
        self._of: dict[torch.Tensor, EncodedGradient] = {}
        self._sparse: set[torch.Tensor] = set()

    def of(self, parameter: torch.Tensor) -> EncodedGradient:
        """That of a parameter."""
        found = self._of.get(parameter)
        if found is None:
            found = self._of[parameter] = EncodedGradient(self._codec, parameter)
        return found

    def known(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of which it is known what travels."""
        return [parameter for parameter in parameters if self.of(parameter).info is not None]

    def infos(self, parameters: Sequence[torch.Tensor]) -> list[TensorInfo]:
        """What travels for the gradients of parameters of which it is known."""
        return [info for parameter in parameters if (info := self.of(parameter).info) is not None]

    def _unknown(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [parameter for parameter in parameters if self.of(parameter).info is None]

    def meet(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Compress first gradients. Returns whether there are some, so that all ranks have to `agree`."""
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
        """Let all ranks know what some have met. Every rank calls this.

        Returns:
            The parameters that have sparse gradients on some rank.

        Raises:
            MismatchError: The ranks have compressed gradients of one parameter to other dtypes or shapes.
            ArgumentError: A rank has joined, and cannot be told.
        """
        unknown = self._unknown(parameters)
        if not unknown:
            return []
        everybody = self._gather([p in self._sparse or self.of(p).tell() for p in unknown])
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
                    f"{variants_text(self._ranks, lines)}"
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
        """The step is over."""
        for each in self._of.values():
            each.forget()
