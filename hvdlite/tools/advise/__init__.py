"""Which strategy should a program train with? Measured on the program itself, predicted for each strategy.

On the ranks, while the program runs with the setting `advise`:

- `recorder`: takes the times of some steps, and ends the program.
- `calibrate`: measures memory, meetings and the link. `trial`: runs what compresses gradients on random ones, on one rank.
- `profile`: what was measured, and its file.

In the command:

- `command`: runs the program, and makes the advice. `report`, `plot`: the advice as text, and as a picture.
- `strategies`: their names, and what they change. `model`: what each of them costs; `servers`: what a parameter server costs.
- `cluster`: what copies and messages cost; `link`: what is between two hosts; `exchanges`: what an operation sends.
"""

from __future__ import annotations

from hvdlite.tools.advise.command import Advice, advise
from hvdlite.tools.advise.link import NetworkLink, parse_link
from hvdlite.tools.advise.model import CostModel, Estimate
from hvdlite.tools.advise.strategies import TrainingStrategy, parse_strategy

__all__ = [
    "Advice",
    "CostModel",
    "Estimate",
    "NetworkLink",
    "TrainingStrategy",
    "advise",
    "parse_link",
    "parse_strategy",
]
