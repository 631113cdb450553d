"""What type checkers are told is true: the program that they check runs. And tools see the same types while it runs."""

from __future__ import annotations

import inspect
import typing

import pytest

import hvdlite
import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests import typed_program


def test_the_program_runs() -> None:
    config = Config(advice=False)  # both ranks train on the same data
    assert on_ranks(2, typed_program.train, config=config) == [2, 2]
    assert on_ranks(2, typed_program.exchange) == [(4, 4)] * 2


@pytest.mark.parametrize("module", [hvdlite, hvd])
def test_signatures_say_what_comes_back(module: typing.Any) -> None:
    functions = {name: getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    for name, function in functions.items():
        hints = typing.get_type_hints(function)  # every name in them can be found
        assert "return" in hints, name
        assert "hvdlite.api.Call" not in str(hints["return"]), name
        assert str(inspect.signature(function).return_annotation) == function.__annotations__["return"]
        if name.endswith(("_async", "_async_")) and name != "sparse_allreduce_async":
            assert typing.get_origin(hints["return"]) is hvdlite.Handle, name
    assert typing.get_args(typing.get_type_hints(module.barrier_async)["return"]) == (type(None),)
