"""`own_parameters`: a rank's other weights for a while."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, MismatchError
from tests.spmd.test_torch_training import (
    MODEL,
    OPTIMIZERS,
    X,
    assert_equal_everywhere,
    distance,
    every_way,
    flat,
    split,
    train,
)


@every_way
def test_other_weights_on_one_rank(ranks: Any, options: Any) -> None:
    """The others compute on with theirs, and training goes on as if nothing had been."""
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["adam"](single.parameters()), slice(None), steps=6)

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), **options)
        train(model, optimizer, split(48, "equal"), steps=3)
        expected = model(X).detach()
        hvd.barrier()
        if hvd.rank() == 0:
            with hvd.own_parameters(model):
                assert model(X).equal(expected)
                model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
                assert not model(X).any()
                hvd.barrier()
                hvd.barrier()
        else:
            hvd.barrier()  # rank 0 has overwritten its weights
            assert model(X).equal(expected)
            hvd.barrier()
        assert model(X).equal(expected)
        train(model, optimizer, split(48, "equal"), steps=3)
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


def test_after_a_body_that_fails_the_weights_are_back(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shard=True)
        with contextlib.suppress(ZeroDivisionError), hvd.own_parameters(iter(model.parameters())), torch.no_grad():
            model[0].weight.zero_()
            1 / 0  # noqa: B018
        assert distance(flat(model), flat(MODEL)) == 0

    ranks(check)


@every_way
def test_what_it_refuses(ranks: Any, options: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        with hvd.own_parameters(model):
            with pytest.raises(ArgumentError, match=r"step\(\) within hvd.own_parameters\(\): the step would be lost"):
                train(model, optimizer, split(48, "equal"), steps=1)
            with pytest.raises(ArgumentError, match="are this rank's own already"), hvd.own_parameters(model[0]):
                pass
        train(model, optimizer, split(48, "equal"), steps=1)
        assert_equal_everywhere(flat(model))

    ranks(check)


def change(model: torch.nn.Module, how: str) -> None:
    """What a program does to its parameters between two steps of a sharded optimizer."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if how == "rank 0 evaluates with other weights" and hvd.rank() == 0:
        model.load_state_dict({name: torch.zeros_like(value) for name, value in values.items()})
        model.load_state_dict(values)
    elif how == "rank 0 loads, and broadcasts":
        if hvd.rank() == 0:
            model.load_state_dict(values)
        hvd.broadcast_parameters(model.state_dict())
    elif how == "broadcasts":
        hvd.broadcast_parameters(model.state_dict())
    elif how == "all load":
        hvd.barrier()  # all have read
        model.load_state_dict(values)
    elif how == "within the statement" and hvd.rank() == 0:
        with hvd.own_parameters(model):
            model.load_state_dict({name: torch.zeros_like(value) for name, value in values.items()})


@pytest.mark.parametrize(
    "how",
    [
        "rank 0 evaluates with other weights",
        "rank 0 loads, and broadcasts",
        "broadcasts",
        "all load",
        "within the statement",
    ],
)
def test_a_change_of_one_rank_to_shared_parameters_is_told(ranks: Any, how: str) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["adam"](single.parameters()), slice(None), steps=6)

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), shard=True)
        for _ in range(2):
            train(model, optimizer, split(48, "equal"), steps=2)
            hvd.barrier()
            change(model, how)
        if "other weights" in how and hvd.size() > 1:
            raise AssertionError("the change was not noticed")
        train(model, optimizer, split(48, "equal"), steps=2)
        assert distance(flat(model), flat(single)) <= 1e-5

    def told() -> None:
        if "other weights" in how and hvd.size() > 1:
            with pytest.raises(MismatchError, match="rank 0: the program has changed parameters") as raised:
                check()
            assert "within `with hvd.own_parameters(model):`" in str(raised.value)
        else:
            check()

    ranks(told)
