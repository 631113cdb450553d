"""An elastic training in which rank 1 always fails before anything is committed."""

from __future__ import annotations

import hvdlite as hvd
from hvdlite import elastic


@elastic.run
def train(state: elastic.ObjectState) -> None:
    if hvd.rank() == 1:
        raise ValueError("as always")
    state.commit()


train(elastic.ObjectState(step=0))
