"""What programs do to gradients between `backward` and `step`: as in one process, for every optimizer and way to exchange."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from tests.support.replicas import Idiom, Job, distance, on_this_rank, truth

WAYS: dict[str, dict[str, Any]] = {"plain": {}, "sharded": {"shard": True}, "overlapped": {"overlap": True}}

OPTIMIZERS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=0.5),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.05),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
}

IDIOMS: dict[str, Idiom] = {}
MEANINGLESS_SHARDED = {
    "the last step's gradients are kept",  # after a sharded step p.grad means nothing
    "parameters go to float32 and back",  # which raises: parameters may not be given other memory
    "parameters are frozen, and keep gradients of zeros",  # nobody steps them any more
}


def idiom(name: str) -> Any:
    def add(function: Idiom) -> Idiom:
        IDIOMS[name] = function
        return function

    return add


@idiom("nothing")
def nothing(job: Job) -> None:
    job.backward()


@idiom("parameters that are added to each other")
def added(job: Job) -> None:
    job.optimizer.zero_grad()
    job.loss(added=True).backward()


@idiom("gradients of zeros")
def zeros(job: Job) -> None:
    job.optimizer.zero_grad(set_to_none=False)
    job.loss().backward()


@idiom("old zero_grad")
def old_zero_grad(job: Job) -> None:
    for gradient in job.gradients:
        gradient.detach_()
        gradient.zero_()
    job.loss().backward()


@idiom("two passes")
def two_passes(job: Job) -> None:
    job.backward()
    job.loss(1).backward()


@idiom("data.clamp_")
def clamp(job: Job) -> None:
    job.backward()
    for gradient in job.gradients:
        gradient.data.clamp_(-0.01, 0.01)


@idiom("data.mul_ on zeros")
def mul(job: Job) -> None:
    zeros(job)
    for gradient in job.gradients:
        gradient.data.mul_(0.5 + job.rank)


@idiom("data is assigned")
def assign_data(job: Job) -> None:
    job.backward()
    for gradient in job.gradients:
        gradient.data = gradient.data / 3


@idiom("data is assigned, gradients of zeros")
def assign_data_to_zeros(job: Job) -> None:
    zeros(job)
    for gradient in job.gradients:
        gradient.data = gradient.data / 3


@idiom("data is transposed in place")
def transpose(job: Job) -> None:
    job.backward()
    for p in job.parameters:
        if p.dim() == 2 and p.shape[0] == p.shape[1]:
            p.grad.data = p.grad.data.t()  # type: ignore[union-attr]


@idiom("grad is assigned")
def assign(job: Job) -> None:
    job.backward()
    for p in job.parameters:
        p.grad = p.grad.sign() * job.rank  # type: ignore[union-attr]


@idiom("grad is assigned with other strides")
def strides(job: Job) -> None:
    job.backward()
    for p in job.parameters:
        p.grad = p.grad.t().contiguous().t() if p.dim() == 2 else p.grad.expand(2, -1).t()[:, 0]  # type: ignore[union-attr]


@idiom("grad is expanded")
def expanded(job: Job) -> None:
    job.backward()
    for p in job.parameters[1:]:
        p.grad = torch.full((1,) * p.dim(), 0.01 * job.rank, dtype=p.dtype).expand_as(p)


@idiom("NumPy")
def numpy(job: Job) -> None:
    job.backward()
    for gradient in job.gradients:
        array = gradient.numpy()
        array *= 0.25


@idiom("an old clip function")
def old_clip(job: Job) -> None:
    job.backward()
    norm = sum(float(gradient.data.norm(2)) ** 2 for gradient in job.gradients) ** 0.5
    for gradient in job.gradients:
        gradient.data.mul_(min(1.0, 0.1 / norm))


@idiom("a list of gradients")
def listed(job: Job) -> None:
    job.backward()
    gradients = job.gradients
    torch._foreach_mul_(gradients, 0.5)
    job.kept["gradients"] = gradients


@idiom("swapped gradients")
def swapped(job: Job) -> None:
    job.backward()
    a, b = job.model.first, job.model.second
    a.grad, b.grad = b.grad, a.grad
    a, b = job.model.bias, job.model.twin_bias
    a.grad, b.grad = b.grad, a.grad


@idiom("one gradient for two")
def one_for_two(job: Job) -> None:
    job.backward()
    if job.step % 2:
        job.model.first.grad = job.model.second.grad


@idiom("some have none")
def some(job: Job) -> None:
    job.backward()
    for number, p in enumerate(job.parameters):
        if (number + job.step) % 3 == job.rank:
            p.grad = None


@idiom("a flat buffer")
def flat_buffer(job: Job) -> None:
    if "buffer" not in job.kept:
        job.kept["buffer"] = torch.zeros(sum(p.numel() for p in job.parameters), dtype=job.parameters[0].dtype)
        parts = job.kept["buffer"].split([p.numel() for p in job.parameters])
        for p, part in zip(job.parameters, parts, strict=True):
            p.grad = part.view_as(p)
    job.kept["buffer"].zero_()
    job.loss().backward()
    job.kept["buffer"].mul_(0.3)


@idiom("a flat NumPy buffer by data")
def flat_numpy(job: Job) -> None:
    if "buffer" not in job.kept:
        job.kept["buffer"] = torch.zeros(sum(p.numel() for p in job.parameters), dtype=job.parameters[0].dtype).numpy()
        job.backward()
        at = 0
        for p in job.parameters:
            p.grad.data = torch.from_numpy(job.kept["buffer"][at : at + p.numel()]).view_as(p)  # type: ignore[union-attr]
            at += p.numel()
    job.kept["buffer"][:] = 0
    job.loss().backward()
    job.kept["buffer"] *= 0.3


@idiom("gradients of two losses")
def two_losses(job: Job) -> None:
    job.backward()
    first = job.gradients
    job.optimizer.zero_grad()
    job.loss(1).backward()
    second = job.gradients
    dot = sum(float((a * b).sum()) for a, b in zip(first, second, strict=True))
    for p, a, b in zip(job.parameters, first, second, strict=True):
        p.grad = a + (2 if dot < 0 else 1) * b


@idiom("gradients of two losses by views")
def two_losses_by_views(job: Job) -> None:
    job.backward()
    first = [gradient.view(-1).numpy() for gradient in job.gradients]
    job.optimizer.zero_grad()
    job.loss(1).backward()
    for gradient, before in zip(job.gradients, first, strict=True):
        gradient.view(-1).numpy()[:] += 2 * before


@idiom("the last step's gradients are kept")
def kept(job: Job) -> None:
    before = job.gradients
    job.backward()
    for gradient, old in zip(job.gradients, before, strict=bool(before)) if before else ():
        gradient.add_(old, alpha=0.5)


@idiom("hooks that write data")
def data_hooks(job: Job) -> None:
    def add_the_rank(p: torch.Tensor) -> None:
        p.grad.data.add_(0.01 * job.rank)  # type: ignore[union-attr]

    if job.step == 0:
        for p in job.parameters:
            p.register_hook(lambda gradient: gradient.data.mul_(0.5) if gradient.dim() == 2 else None)
            p.register_post_accumulate_grad_hook(add_the_rank)
    job.backward()


@idiom("hooks that return a constant")
def constants(job: Job) -> None:
    if job.step == 0:
        for p in job.parameters:
            constant = torch.full((2, *p.shape), 0.1 * job.rank, dtype=p.dtype)
            p.register_hook(lambda gradient, constant=constant: constant[0])
    job.backward()


@idiom("gradients with a graph")
def graph(job: Job) -> None:
    job.optimizer.zero_grad()
    gradients = torch.autograd.grad(job.loss(), job.parameters, create_graph=True)
    for p, gradient in zip(job.parameters, gradients, strict=True):
        p.grad = gradient * 2


@idiom("parameters go to float32 and back")
def moved(job: Job) -> None:
    zeros(job)
    if job.step % 2:
        job.model.float()
        job.model.double()


@idiom("parameters are frozen, and keep gradients of zeros")
def frozen(job: Job) -> None:
    if job.step == 3:
        job.model.second.requires_grad_(False)
        job.model.bias.requires_grad_(False)
    zeros(job)


@idiom("gradients in shared memory")
def shared_memory(job: Job) -> None:
    job.backward()
    if job.step == 2:
        for gradient in job.gradients:
            gradient.share_memory_()


@pytest.fixture(autouse=True)
def large_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of the model are large, the vectors are small."""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 300)


Expected = dict[tuple[str, str], list[torch.Tensor]]
"""By optimizer and idiom."""


def check_all(expected: Expected, **options: Any) -> None:
    """Compare this rank's parameters with what they should be."""
    wrong = []
    for (optimizer, name), parameters in expected.items():
        found = distance(on_this_rank(IDIOMS[name], OPTIMIZERS[optimizer], **options), parameters)
        if not found <= 1e-9:
            wrong.append(f"{optimizer}, {name}: {found:.1e}")
    assert not wrong, "\n".join(wrong)


def cases_of(way: str, plain: bool) -> list[tuple[str, str]]:
    """SGD does everything; or for each idiom one of the others is drawn."""
    names = [name for name in IDIOMS if way != "sharded" or name not in MEANINGLESS_SHARDED]
    draw = random.Random("idioms")
    others = list(OPTIMIZERS)[1:]
    drawn = [(draw.choice(others), name) for name in names]
    return [("SGD", name) for name in names] if plain else drawn


@pytest.mark.parametrize("plain", [True, False], ids=["SGD", "others"])
@pytest.mark.parametrize("way", WAYS)
def test_what_programs_do_to_gradients_counts(ranks: Any, way: str, plain: bool) -> None:
    cases = cases_of(way, plain)
    (size, *_) = ranks(hvd.size)
    print(f"{way}: {len(cases)} cases on {size} ranks, seed 'idioms'")
    expected = {(optimizer, name): truth(IDIOMS[name], OPTIMIZERS[optimizer], size) for optimizer, name in cases}
    ranks(lambda: check_all(expected, **WAYS[way]))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.9 or later has grad_dtype")
@pytest.mark.parametrize("way", ["plain", "overlapped"])
def test_gradients_of_another_dtype_than_their_parameter(ranks: Any, way: str) -> None:
    """Sums are of the gradients' dtype: 2^-9 is lost in a bfloat16 of 1."""

    def check() -> None:
        parameters = [torch.nn.Parameter(torch.zeros(200, dtype=torch.bfloat16)) for _ in range(3)]
        for parameter in parameters:
            parameter.grad_dtype = torch.float32
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0, foreach=False), op=hvd.Sum, **WAYS[way]
        )
        for _ in range(4):
            optimizer.zero_grad()
            for parameter in parameters:
                parameter.grad = torch.full((200,), 1.0 if hvd.rank() == 0 else 2.0**-9)
            optimizer.synchronize()
            for parameter in parameters:
                assert parameter.grad.dtype is torch.float32  # type: ignore[union-attr]
                assert parameter.grad.tolist() == [1 + 2.0**-9 * (hvd.size() - 1)] * 200  # type: ignore[union-attr]

    ranks(check)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.9 or later has grad_dtype")
def test_gradients_of_another_dtype_are_not_sharded(ranks: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(200, dtype=torch.bfloat16))
        parameter.grad_dtype = torch.float32
        with pytest.raises(ArgumentError, match="grad_dtype=torch.float32 cannot be sharded"):
            hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), shard=True)

    ranks(check)
