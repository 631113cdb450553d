"""Elastic training with torch: `run`, the state of a training, and a sampler that knows which samples of an epoch were seen.

- `state`: `TorchState`. `handlers`: how it saves each kind of object. `sampler`: `ElasticSampler`.
"""

from __future__ import annotations

from hvdlite.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from hvdlite_torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from hvdlite_torch.elastic.sampler import ElasticSampler
from hvdlite_torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateDictHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
