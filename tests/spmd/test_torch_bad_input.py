"""What a distributed optimizer refuses: a clear error on every rank, soon, and no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, UnsupportedTensorError
from tests.spmd.test_torch_training import every_way

Make = Callable[[], torch.optim.Optimizer]


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def ones(*shape: int, **more: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, **more))


def frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape), requires_grad=False)


# What each rank can tell by itself

WITHOUT_RANK_0 = (
    r"(?s)every rank waits for an operation .* rank 0 waits for .* barrier\(\).* rank 1 waits for 'optimizer.plan \d+'"
)

REFUSED: dict[str, tuple[Make, dict[str, Any], type[HvdliteError], str]] = {
    "nothing to train": (lambda: sgd([frozen(3)]), {}, ArgumentError, "no parameters that require a gradient"),
    "an empty group": (lambda: sgd([{"params": []}]), {}, ArgumentError, "no parameters that require a gradient"),
    "nowhere": (lambda: sgd([ones(3, device="meta")]), {}, UnsupportedTensorError, "on meta.*to_empty"),
    "on several devices": (
        lambda: sgd([ones(3), ones(3, device="meta")]),
        {},
        UnsupportedTensorError,
        "on meta.*to_empty",
    ),
    "unknown names": (
        lambda: sgd([ones(3), ones(4)]),
        {"named_parameters": [("a", ones(3))]},
        ArgumentError,
        "named_parameters: 2 parameters of the optimizer are not among the 1 given",
    ),
    "a name twice": (
        lambda: sgd([ones(3)]),
        {"named_parameters": [("a", ones(3)), ("a", ones(3))]},
        ArgumentError,
        "occur more than once: a",
    ),
    "names alone": (lambda: sgd([ones(3)]), {"named_parameters": ["a"]}, ArgumentError, "expected pairs of name"),
    "no passes": (
        lambda: sgd([ones(3)]),
        {"backward_passes_per_step": 0},
        ArgumentError,
        "expected a whole number from 1 on",
    ),
    "unknown groups": (
        lambda: sgd([ones(3)]),
        {"groups": [[ones(1)]]},
        ArgumentError,
        "none of the optimizer's parameters",
    ),
}


@every_way
@pytest.mark.parametrize("what", REFUSED)
def test_a_wrap_that_is_refused(ranks: Any, what: str, options: Any) -> None:
    make, arguments, error, text = REFUSED[what]

    def check() -> None:
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(make(), **arguments, **options)
        # And on one rank alone: the others hear of it as soon as that rank goes on to anything else.
        if hvd.size() > 1:
            if hvd.rank() == 0:
                with pytest.raises(error, match=text):
                    hvd.DistributedOptimizer(make(), **arguments, **options)
                with pytest.raises(MismatchError, match=WITHOUT_RANK_0):
                    hvd.barrier()
            else:
                with pytest.raises(MismatchError, match=WITHOUT_RANK_0):
                    hvd.DistributedOptimizer(sgd([ones(3)]), **options)
        hvd.barrier()

    ranks(check)


@pytest.mark.ranks(2)
def test_a_sharded_state_on_one_rank(ranks: Callable[..., list[Any]]) -> None:
    """The report names what the program has called."""

    def check() -> None:
        optimizer = hvd.DistributedOptimizer(sgd([ones(8)]), shard=True)
        said = r"(?s)rank 0 waits for 'state_dict\(\) of a sharded optimizer, which every rank calls, \d+'.*barrier"
        with pytest.raises(MismatchError, match=said):
            optimizer.state_dict() if hvd.rank() == 0 else hvd.barrier()

    ranks(check)


@every_way
def test_an_optimizer_is_wrapped_once(ranks: Any, options: Any) -> None:
    def check() -> None:
        parameter = ones(3)
        optimizer = hvd.DistributedOptimizer(sgd([parameter]), **options)
        for more in ({}, {"shard": True}, {"op": hvd.Adasum}):
            with pytest.raises(ArgumentError, match="distributed already: wrap it once"):
                hvd.DistributedOptimizer(optimizer, **more)
        parameter.sum().backward()
        optimizer.step()  # which it has survived
        torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.9))

    ranks(check)


@every_way
def test_a_process_set_that_is_not_this_ranks(ranks: Any, options: Any) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match="not in effect"):
            hvd.DistributedOptimizer(sgd([ones(3)]), process_set=hvd.ProcessSet([0]), **options)
        if hvd.size() > 1:
            first = hvd.add_process_set([0])
            if hvd.rank() > 0:
                with pytest.raises(ArgumentError, match=f"rank {hvd.rank()} is not in"):
                    hvd.DistributedOptimizer(sgd([ones(3)]), process_set=first, **options)
            hvd.barrier()
            hvd.remove_process_set(first)

    ranks(check)


# What they can tell only together

Named = list[tuple[str, nn.Parameter]]

DIFFERENT: dict[str, tuple[Callable[[int], Named], str, str]] = {
    "shapes": (
        lambda rank: [("a", ones(3 + min(rank, 1)))],
        "parameter 0 'a' is float32 of shape (3,)",
        "parameter 0 'a' is float32 of shape (4,)",
    ),
    "numbers": (
        lambda rank: [(name, ones(2)) for name in "ab"[: 1 + rank]],
        "trained parameters: 1",
        "parameter 1 'b' is float32 of shape (2,)",
    ),
    "orders": (
        lambda rank: [("a", ones(2)), ("b", ones(2))][:: -1 if rank else 1],
        "parameter 0 'a' is float32 of shape (2,)",
        "parameter 0 'b' is float32 of shape (2,)",
    ),
    "dtypes": (
        lambda rank: [("a", ones(2)), ("b", ones(2, dtype=torch.float64 if rank else torch.float32))],
        "parameter 1 'b' is float32 of shape (2,)",
        "parameter 1 'b' is float64 of shape (2,)",
    ),
    "layers frozen": (
        lambda rank: [("a", ones(2)), ("b", ones(2) if rank else frozen(2)), ("c", ones(2))],
        "parameter 1 'c' is float32 of shape (2,)",
        "parameter 1 'b' is float32 of shape (2,)",
    ),
}


@every_way
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_different_parameters(ranks: Any, what: str, options: Any) -> None:
    make, of_rank_0, of_the_others = DIFFERENT[what]

    def check() -> None:
        if hvd.size() > 1:
            named = make(hvd.rank())
            optimizer = sgd([parameter for _, parameter in named])
            with pytest.raises(MismatchError) as caught:
                hvd.DistributedOptimizer(optimizer, named, **options)
            others = "rank 1" if hvd.size() == 2 else f"ranks 1-{hvd.size() - 1}"
            assert str(caught.value).endswith(f"given:\n  rank 0: {of_rank_0}\n  {others}: {of_the_others}")
            assert type(optimizer) is torch.optim.SGD  # as it was
        hvd.barrier()

    ranks(check)


ARGUMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "op": lambda rank: {"op": hvd.Sum if rank else hvd.Average},
    "shard": lambda rank: {"shard": bool(rank)},
    "max_grad_norm": lambda rank: {"max_grad_norm": 1.0 if rank else None},
    "max_grad_norm, sharded": lambda rank: {"max_grad_norm": 1.0 if rank else None, "shard": True},
    "overlap": lambda rank: {"overlap": bool(rank)},
    "compression": lambda rank: {"compression": hvd.Compression.fp16 if rank else hvd.Compression.none},
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_ranks_with_different_arguments(ranks: Any, what: str) -> None:
    def check() -> None:
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match=r"(?s)the ranks do not agree on .* rank 0: .* ranks? 1"):
                hvd.DistributedOptimizer(sgd([ones(3)]), **ARGUMENTS[what](hvd.rank()))
        hvd.barrier()

    ranks(check)


@every_way
def test_backward_more_often_than_declared(ranks: Any, options: Any) -> None:
    def check() -> None:
        parameter = ones(40)
        optimizer = hvd.DistributedOptimizer(sgd([parameter]), backward_passes_per_step=2, **options)
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                parameter.sum().backward()
            optimizer.step()
        for _ in range(2):
            parameter.sum().backward()
        with pytest.raises(ArgumentError, match="3 backward passes without a step"):
            parameter.sum().backward()
        hvd.barrier()

    ranks(check)


def sparse(sparse_dim: int, *shape: int) -> torch.Tensor:
    return torch.ones(shape).to_sparse(sparse_dim)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_sparse_gradients_of_different_layouts(ranks: Any, later: bool, overlap: bool) -> None:
    def check() -> None:
        parameter, other = ones(6, 4), ones(3)
        optimizer = hvd.DistributedOptimizer(sgd([parameter, other]), overlap=overlap)
        for _ in range(4 if later else 0):
            parameter.grad, other.grad = sparse(1, 6, 4), torch.ones(3)
            optimizer.step()
        parameter.grad, other.grad = sparse(1 if hvd.rank() else 2, 6, 4), torch.ones(3)
        if hvd.size() == 1:
            optimizer.step()
            return
        with pytest.raises(MismatchError, match=r"shape \(6, 4\) have \[1, 2\] sparse dimensions"):
            optimizer.step()
        hvd.barrier()

    ranks(check)


def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        parameter = ones(6, 4)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum)
        for step in range(1, 4):
            parameter.grad = torch.ones(6, 4) if rank else sparse(1, 6, 4)
            optimizer.step()
            torch.testing.assert_close(parameter.detach(), torch.full((6, 4), 1.0 - step * size))

    ranks(check)


@pytest.mark.ranks(at_least=2)
@every_way
def test_a_process_set_is_removed_while_an_optimizer_uses_it(ranks: Any, options: Any) -> None:
    def check() -> None:
        members = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.add_process_set([0])
        optimizer, parameter = None, ones(40)
        if members.included():
            optimizer = hvd.DistributedOptimizer(sgd([parameter]), process_set=members, **options)
            parameter.sum().backward()
            optimizer.step()
        hvd.remove_process_set(members)
        if optimizer is not None:
            parameter.sum().backward()
            with pytest.raises(ArgumentError, match="not in effect"):
                optimizer.step()
        hvd.barrier()

    ranks(check)


# Objects of another kind than what is asked for

MODEL = nn.Linear(2, 2)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (
        lambda: hvd.DistributedOptimizer(MODEL),
        r"optimizer of torch; got a Linear\. Write .*model\.parameters\(\)",
    ),
    "a class": (
        lambda: hvd.DistributedOptimizer(torch.optim.Adam),
        r"got Adam\. .*\(Adam\(model\.parameters\(\), …\)\)",
    ),
    "a schedule": (
        lambda: hvd.DistributedOptimizer(torch.optim.lr_scheduler.ConstantLR(sgd(MODEL.parameters()))),
        "got a ConstantLR. .*then make the schedule",
    ),
    "nothing": (lambda: hvd.DistributedOptimizer(None), "got a NoneType"),
    "an optimizer for parameters": (
        lambda: hvd.broadcast_parameters(sgd(MODEL.parameters())),
        "for an optimizer there is broadcast_optimizer_state",
    ),
    "a method": (lambda: hvd.broadcast_parameters(MODEL.state_dict), r"model\.state_dict\(\); got a method"),
    "a model for its state": (
        lambda: hvd.broadcast_optimizer_state(MODEL),
        "For a model there is broadcast_parameters",
    ),
    "parameters for its state": (lambda: hvd.broadcast_optimizer_state([1]), "takes an optimizer; got a list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_objects_of_another_kind(ranks: Any, case: str) -> None:
    call, words = WRONG[case]

    def check() -> None:
        with pytest.raises(ArgumentError, match=words):
            call()

    ranks(check)


def test_the_model_for_its_names(ranks: Any) -> None:
    def check() -> None:
        model = nn.Linear(2, 2)
        hvd.DistributedOptimizer(sgd(model.parameters()), model)
        with pytest.raises(ArgumentError, match="named_parameters: 2 parameters of the optimizer are not among the 2"):
            hvd.DistributedOptimizer(sgd(model.parameters()), nn.Linear(2, 2))

    ranks(check)
