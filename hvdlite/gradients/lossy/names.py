"""`Compression`: the names of everything that makes gradients smaller."""

from __future__ import annotations

from hvdlite.gradients.lossy.powersgd import PowerSGD
from hvdlite.gradients.lossy.topk import TopK
from hvdlite.tensors import compression

LOSSY = PowerSGD, TopK
"""The aggregators of hvdlite. Their state is made of dicts, numbers and arrays."""


class Compression(compression.Compression):
    """The names of hvdlite's compressors.

    `none`, `fp16` and `bf16` compress single tensors, also of operations. ``powersgd(rank=4)`` and ``topk(0.01)`` combine the
    gradients of an optimizer in few bytes; make one for each optimizer, because it has a memory.

    Examples:
        >>> small, context = hvdlite.Compression.fp16.compress(np.array([0.1]))
        >>> small.dtype, hvdlite.Compression.fp16.decompress(small, context).round(6).tolist()
        (dtype('float16'), [0.099976])
    """

    powersgd = PowerSGD
    topk = TopK
