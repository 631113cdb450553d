"""``hvdlite doctor``: what is wrong here, and what to do; and how fast a model would train on more ranks.

What is observed is plain data, and pure functions make findings of it::

    observe, imports, install ──▶ facts ─┐
    probe (on each rank) ──▶ facts, links ┴─▶ rules ──▶ findings ──▶ report

- `finding`: one thing that was found, what was expected, and what to do. `facts`: what is observed, as data.
- `observe`: a process and its host. `imports`: whether packages can be imported. `install`: what is installed here.
- `probe`: what each rank does; `rank`: the program that does it. `links`: latency and bandwidth between ranks.
- `operations`: every operation once.
- `job`: starts the ranks, and ends them if they hang. `inside`: examines in ranks that somebody else has started.
- `heard`: what the ranks have said so far. `rules/`: from facts to findings.
- `predict`: the step on 1 … 1024 ranks. `report`, `plot`: everything as text, and the links as a picture.
- `command`: the whole.
"""

from __future__ import annotations

from hvdlite.tools.doctor.command import DoctorOptions, doctor
from hvdlite.tools.doctor.finding import Finding, Severity

__all__ = ["DoctorOptions", "Finding", "Severity", "doctor"]
