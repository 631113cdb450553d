"""Every operation of the core on TensorFlow's tensors: the checks of test_operations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite as hvd
from hvdlite.errors import UnsupportedTensorError
from tests.spmd import test_operations as of_the_core


def make(values: Any, dtype: str) -> Any:
    return tf.cast(tf.constant(np.asarray(values)), dtype)


@pytest.mark.parametrize("dtype", of_the_core.NUMBERS)
@pytest.mark.parametrize("check", [of_the_core.check_all_operations, of_the_core.check_averages])
def test_operations_of_each_dtype(ranks: Any, check: Any, dtype: str) -> None:
    ranks(check, make, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_with_float32_accuracy(ranks: Any, dtype: str) -> None:
    ranks(of_the_core.check_halves, make, dtype)


@pytest.mark.parametrize(
    "check", [of_the_core.check_bool, of_the_core.check_inputs_stay, of_the_core.check_zero_length]
)
def test_operations(ranks: Any, check: Any) -> None:
    ranks(check, make)


def test_in_place(ranks: Any) -> None:
    def check() -> None:
        variable = tf.Variable([1.0 * hvd.rank()])
        hvd.allreduce([variable], hvd.Max, inplace=True)
        assert variable.numpy() == hvd.size() - 1
        with pytest.raises(UnsupportedTensorError, match=r"tf\.Variable"):
            hvd.allreduce(tf.ones(3), inplace=True)

    ranks(check)
