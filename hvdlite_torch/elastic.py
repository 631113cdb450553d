"""Horovod's names for training that goes on when ranks come and go. hvdlite does not have that yet: using one raises.

Importing them works, so that a program which only may use them runs.
"""

from __future__ import annotations

from hvdlite.errors import not_yet

run = not_yet("hvdlite_torch.elastic.run")
TorchState = not_yet("hvdlite_torch.elastic.TorchState")
StateHandler = not_yet("hvdlite_torch.elastic.StateHandler")
ModelStateHandler = not_yet("hvdlite_torch.elastic.ModelStateHandler")
OptimizerStateHandler = not_yet("hvdlite_torch.elastic.OptimizerStateHandler")
SamplerStateHandler = not_yet("hvdlite_torch.elastic.SamplerStateHandler")
ElasticSampler = not_yet("hvdlite_torch.elastic.ElasticSampler")
get_handler_registry = not_yet("hvdlite_torch.elastic.get_handler_registry")
set_handler_registry = not_yet("hvdlite_torch.elastic.set_handler_registry")
