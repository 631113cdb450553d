"""What programs do to parameters, groups and state between steps: as in one process, for every optimizer and way."""

from __future__ import annotations

import copy
import io
import pickle
import random
from typing import Any

import pytest
import torch

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from tests.spmd.test_torch_idioms import OPTIMIZERS, WAYS
from tests.support.replicas import Idiom, Job, distance, on_this_rank, truth

PROGRAMS: dict[str, Idiom] = {}
NOT_SHARDED = {
    "state of one parameter is deleted",
    "deepcopy",
    "pickle",
    "the program changes parameters",
    "parameters are given other memory",
}
"""State is that of shares, cannot be copied, and parameters of one host are one memory: docs/torch.md, docs/running.md."""
WITHOUT_STATE = {"state is deleted", "state of one parameter is deleted"}
"""torch's Adagrad makes its state in the constructor, and fails without."""


def program(name: str) -> Any:
    def add(function: Idiom) -> Idiom:
        PROGRAMS[name] = function
        return function

    return add


@program("a parameter is frozen")
def freeze(job: Job) -> None:
    if job.step == 2:
        job.model.second.requires_grad_(False)
        job.model.bias.requires_grad_(False)
    job.backward()


@program("a parameter is frozen, and thawed later")
def thaw(job: Job) -> None:
    job.model.second.requires_grad_(job.step not in (1, 2))
    job.model.scale.requires_grad_(job.step != 3)
    job.backward()


@program("halves are trained in turn")
def in_turn(job: Job) -> None:
    for number, parameter in enumerate(job.model.parameters()):
        parameter.requires_grad_(number % 2 == job.step % 2)
    job.backward()


@program("a group is added")
def add_group(job: Job) -> None:
    if job.step == 2:
        more = torch.nn.Parameter(torch.linspace(-1, 1, 300, dtype=torch.float64))
        job.kept["more"] = more
        job.parameters.append(more)
        job.optimizer.add_param_group({"params": [more], "lr": 0.03})
    job.optimizer.zero_grad()
    loss = job.loss()
    if job.step >= 2:
        loss = loss + (job.kept["more"] * (job.rank + 1)).square().mean()
    loss.backward()


@program("state is saved and loaded")
def save_and_load(job: Job) -> None:
    if job.step in (1, 3):
        file = io.BytesIO()
        torch.save(job.optimizer.state_dict(), file)
        file.seek(0)
        job.optimizer.load_state_dict(torch.load(file))
    job.backward()


@program("state of an earlier step is loaded")
def go_back(job: Job) -> None:
    if job.step == 1:
        job.kept["state"] = copy.deepcopy(job.optimizer.state_dict())
    if job.step == 3:
        job.optimizer.load_state_dict(job.kept["state"])
    job.backward()


@program("state is deleted")
def delete_state(job: Job) -> None:
    if job.step == 3:
        job.optimizer.state.clear()
    job.backward()


@program("state of one parameter is deleted")
def delete_some(job: Job) -> None:
    if job.step == 3:
        del job.optimizer.state[job.model.second]
    job.backward()


@program("another optimizer over the same parameters")
def make_another(job: Job) -> None:
    if job.step == 2:
        job.optimizer = job.wrap(job.make(job.parameters))
    job.backward()


@program("deepcopy")
def deepcopy(job: Job) -> None:
    if job.step == 2:
        job.model, plain = copy.deepcopy((job.model, job.optimizer))
        job.parameters, job.optimizer = list(job.model.parameters()), job.wrap(plain)
    job.backward()


@program("pickle")
def pickled(job: Job) -> None:
    if job.step == 2:
        job.model, plain = pickle.loads(pickle.dumps((job.model, job.optimizer)))
        job.parameters, job.optimizer = list(job.model.parameters()), job.wrap(plain)
    job.backward()


@program("a schedule of learning rates")
def schedule(job: Job) -> None:
    if job.step == 0:
        job.kept["schedule"] = torch.optim.lr_scheduler.StepLR(job.optimizer, 2, 0.3)
    job.backward()
    if job.step:
        job.kept["schedule"].step()


@program("options are changed")
def options_change(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] *= 0.7
        if "weight_decay" in group:
            group["weight_decay"] = 0.05 * job.step
        if "maximize" in group:
            group["maximize"] = job.step == 3
        if "momentum" in group:
            group["momentum"] = 0.5
    job.backward()


@program("other weights for an evaluation")
def evaluate_with_others(job: Job) -> None:
    average = job.kept.setdefault("average", [p.detach().clone() for p in job.parameters])
    with torch.no_grad():
        for mean, parameter in zip(average, job.parameters, strict=True):
            mean.lerp_(parameter, 0.3)
        with hvd.own_parameters(job.model):
            for mean, parameter in zip(average, job.parameters, strict=True):
                parameter.copy_(mean * (job.rank + 1))
            job.loss()
    job.backward()


@program("weights are loaded")
def load_weights(job: Job) -> None:
    if job.step == 0:
        job.kept["weights"] = copy.deepcopy(job.model.state_dict())
    if job.step == 3:
        job.model.load_state_dict(job.kept["weights"])
    job.backward()


@program("the program changes parameters")
def constrain(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.parameters:
            parameter.mul_(0.95).clamp_(-0.8, 0.8)
    job.backward()


@program("parameters are given other memory")
def other_memory(job: Job) -> None:
    for parameter in job.parameters:
        parameter.data = parameter.data.clone()
    job.backward()


@program("layers are tied")
def tie(job: Job) -> None:
    if job.step == 2:
        job.model.second = job.model.first
    job.backward()


@pytest.fixture(autouse=True)
def all_gradients_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 256)


def cases_of(way: str) -> list[tuple[str, str]]:
    """SGD does everything; for each program one of the others is drawn."""
    draw = random.Random("programs")
    cases = []
    for name in PROGRAMS:
        others = [other for other in OPTIMIZERS if other != "Adagrad" or name not in WITHOUT_STATE]
        drawn = draw.choice(others[1:])
        if way != "sharded" or name not in NOT_SHARDED:
            cases += [("SGD", name), (drawn, name)]
    return cases


@pytest.mark.parametrize("way", WAYS)
def test_what_programs_do_to_parameters_and_state_counts(ranks: Any, way: str) -> None:
    cases = cases_of(way)
    (size, *_) = ranks(hvd.size)
    print(f"{way}: {len(cases)} cases on {size} ranks, seed 'programs'")
    expected = {(optimizer, name): truth(PROGRAMS[name], OPTIMIZERS[optimizer], size) for optimizer, name in cases}

    def check() -> None:
        wrong = []
        for (optimizer, name), parameters in expected.items():
            got = on_this_rank(PROGRAMS[name], OPTIMIZERS[optimizer], **WAYS[way])
            off = distance(got, parameters)
            if not off <= 1e-9:
                wrong.append(f"{optimizer}, {name}: off by {off:.1g}")
        assert not wrong, "\n".join(wrong)

    ranks(check)
