"""Training over several pretended hosts equals training in one process, on every road that gradients take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests.spmd.test_torch_training import (
    MODEL,
    OPTIMIZERS,
    assert_equal_everywhere,
    distance,
    every_way,
    flat,
    split,
    train,
)

HOSTS = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1, 1], [0, 1, 2], [0, 0, 1]]


@every_way
@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_equals_one_process(hosts: list[int], shared_memory: bool, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["adam"](single.parameters()), slice(None))

    def check() -> torch.Tensor:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), **options)
        train(model, optimizer, split(48, "uneven"))
        assert_equal_everywhere(flat(model))
        optimizer.load_state_dict(optimizer.state_dict())
        return flat(model)

    # Parts of a few elements between the hosts, so that there are several.
    config = Config(shared_memory=shared_memory, bucket_bytes=256)
    first, again = (on_ranks(len(hosts), check, hosts=hosts, config=config) for _ in range(2))
    assert distance(first[0], flat(single)) <= 1e-5
    assert torch.equal(first[0], again[0]), "the same bits in every run"
