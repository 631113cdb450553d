"""Horovod's names for elastic training, which hvdlite does not have yet: using one of these names raises NotYetError.

Importing them works, so that a program runs that does not use them.
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
