"""From facts to findings. These are pure functions: nothing is looked at here.

- `installation`: what is installed, what MPI says in the ranks, and operations. `hosts`: hosts, and ranks together.
- `links`: links that are slow. `words`: facts in groups, and in words.
"""

from __future__ import annotations

from hvdlite.tools.doctor.rules.hosts import hosts, ranks
from hvdlite.tools.doctor.rules.installation import installation, mpi, operations
from hvdlite.tools.doctor.rules.links import between_hosts, links, usual
from hvdlite.tools.doctor.rules.words import size

__all__ = ["between_hosts", "hosts", "installation", "links", "mpi", "operations", "ranks", "size", "usual"]
