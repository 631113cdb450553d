"""Chooses how long a batch waits, from what the server sees while it serves.

- `service_time`: the time that a replica takes for a batch, by its size, fitted to the batches it has served.
- `arrivals`: when requests came lately, how far back that tells about now, and more arrivals of the same kind.
- `clients`: whether requests come from clients that wait for their answers, and from how many.
- `queue`, `mixture`, `closed_queue`: simulations of the batching queue for many waits at once.
- `predictions`: what they predict.
- `crowd`: whether everybody who sends is here already, so that no wait can pay.
- `objective`: which of the waits is best, and a text that says why.
- `model`: `Model`, which puts these together; `process`: a process for it.
- `auto`: `AutoWait`, which the server asks, and the thread in which it waits for the model.
"""

from hvdlite.serving.chooser.auto import AutoWait as AutoWait
from hvdlite.serving.chooser.auto import choosing as choosing
from hvdlite.serving.chooser.model import Model as Model
from hvdlite.serving.chooser.process import ModelProcess as ModelProcess
