"""What compressors do to tensors, of whichever framework, before anything is exchanged."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import TensorInfo
from hvdlite.tensors.compression import Compression, FP16Compressor

WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", WIRE)
def test_what_is_not_compressed(name: str) -> None:
    compression = getattr(Compression, name)
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float16, torch.bfloat16):
        x = torch.ones(3).to(dtype)
        compressed, context = compression.compress(x)
        assert compressed is x
        assert compression.decompress(compressed, context) is x
    x = torch.ones(3, dtype=torch.float64)
    compressed, context = compression.compress(x)
    assert compressed.dtype is WIRE[name]
    assert compression.decompress(compressed, context).dtype is torch.float64
    x = torch.ones(3)
    assert Compression.none.compress(x) == (x, None)
    assert Compression.none.decompress(x, None) is x


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "complex64", "int32", "bool"])
def test_what_is_small_already_keeps_its_dtype(dtype: str) -> None:
    info = TensorInfo(dtype, (3,))
    assert Compression.fp16.encoded(info) == Compression.bf16.encoded(info) == info


def test_one_compression_for_all_frameworks() -> None:
    class Half(FP16Compressor):
        DTYPE = "float16"

    for compression in (Compression.fp16, Half, Half()):
        for x in (np.ones(2, np.float32), torch.ones(2), tf.ones(2)):
            compressed, context = compression.compress(x)
            assert type(compressed) is type(x)
            assert "float16" in str(compressed.dtype)
            assert compression.decompress(compressed, context).dtype == x.dtype
    symbolic = tf.function(lambda x: Compression.bf16.decompress(*Compression.bf16.compress(x)))
    assert symbolic(tf.constant([1.0, 1.0 + 2.0**-12])).numpy().tolist() == [1.0, 1.0]
    with pytest.raises(UnsupportedTensorError, match="NumPy has no bfloat16"):
        Compression.bf16.compress(np.ones(2))
