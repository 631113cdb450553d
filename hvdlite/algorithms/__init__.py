"""Collective operations written on a `Transport`: one idea per file.

- Allreduce algorithms, with one signature (`ALGORITHMS`): `ring`, `tree`, `butterfly`, `rabenseifner`, `parameter_server`.
- `choose`: the rule that selects one of them. `cost`: the time that each takes, in the α-β-γ model.
- `adasum`: the Adasum reduction, which adapts the sum to the angle between the gradients.
- `reduce`, `reduce_scatter`, `allgather`, `broadcast`, `alltoall`, `barrier`, `gather_bytes`: the other collectives.
- `fold`: reduces any number of ranks to a power of two. `slices`: cuts a vector into one slice per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hvdlite.algorithms.butterfly import butterfly
from hvdlite.algorithms.parameter_server import parameter_server
from hvdlite.algorithms.rabenseifner import rabenseifner
from hvdlite.algorithms.ring import ring
from hvdlite.algorithms.tree import tree
from hvdlite.protocols import Array, Combine, Transport

Algorithm = Callable[[Transport, Array, Combine], None]
"""``algorithm(transport, data, combine)`` reduces the 1-D array `data` over the ranks, in place.

An algorithm works for any number of ranks and any length, and gives the same bits on every rank.
"""

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ring": ring,
        "tree": tree,
        "butterfly": butterfly,
        "rabenseifner": rabenseifner,
        "parameter_server": parameter_server,
    }
)
"""The allreduce algorithms by name."""
