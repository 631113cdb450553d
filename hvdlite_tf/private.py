"""The names of TensorFlow, Keras and tf_keras that are not theirs to promise, and that hvdlite_tf uses.

A new version of these packages may drop a name. `tests/tf/test_private_names.py` then fails and names it; it also fails for a
name that the code uses and this list does not have. What happens in a program with such a version stands in
the column `missing`.

This module imports nothing, so that it can be read where a package is not installed.
"""

from __future__ import annotations

from typing import NamedTuple


class Private(NamedTuple):
    """A private name.

    Attributes:
        where: What has the name: a module, or a kind of object for which the test makes an example.
        name: The name.
        missing: What hvdlite_tf does where the name is missing.
    """

    where: str
    name: str
    missing: str


_FAILS = "an AttributeError with the name, at the first use"
_UNCORRECTED = "the momentum is not corrected when a callback sets the rate"
_IMPORT = "an ImportError with the name, when hvdlite_tf is imported"


def _rows(where: str, names: str, missing: str = _FAILS) -> list[Private]:
    return [Private(where, name, missing) for name in names.split()]


PRIVATE = (
    *_rows(
        "tensorflow.python.eager.context", "Context", "an ImportError with the name, when Horovod's names are imported"
    ),
    *_rows("tensorflow.python.eager.execute", "quick_execute", _IMPORT),
    *_rows("tensorflow.python.ops.cond_v2", "_CondGradFuncGraph", _IMPORT),
    *_rows("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext", _IMPORT),
    *_rows(
        "tensorflow.python.ops.control_flow_util_v2",
        "CondBranchFuncGraph WhileBodyFuncGraph WhileCondFuncGraph",
        _IMPORT,
    ),
    *_rows("tensorflow.python.ops.resource_variable_ops", "ResourceVariable", _IMPORT),
    *_rows("tensorflow.python.ops.while_v2", "_WhileBodyGradFuncGraph", _IMPORT),
    *_rows("tensorflow.python.distribute.one_device_strategy", "OneDeviceExtended", _IMPORT),
    *_rows("tensorflow.python.data.ops.map_op", "_ParallelMapDataset", "an exchange in a parallel map is not refused"),
    *_rows(
        "tensorflow.python.data.ops.interleave_op",
        "_ParallelInterleaveDataset",
        "an exchange in a parallel interleave is not refused",
    ),
    *_rows("strategy", "_container_strategy _create_variable _device _update _update_non_slot"),
    *_rows("tf.Variable", "_handle _distribute_strategy"),
    *_rows("tf.data iterator", "_iterator_resource"),
    *_rows("tf.data dataset", "_inputs _functions _flat_structure"),
    *_rows("tf.data shuffle", "_input_dataset _buffer_size"),
    *_rows(
        "tf.data shuffle",
        "_seed _seed2 _reshuffle_each_iteration",
        "orders that differ are found by comparing elements only",
    ),
    *_rows(
        "tf.data classes",
        "_BatchDataset _MapDataset _OptionsDataset _ParallelMapDataset _PrefetchDataset _RepeatDataset _ShuffleDataset "
        "_SkipDataset _TakeDataset",
        "an error: put the transformation after hvd.shard",
    ),
    *_rows("tf.data repeat", "_count"),
    *_rows("tf.data batch", "_batch_size _drop_remainder"),
    *_rows("tf.data map", "_map_func"),
    *_rows("tf.data map function", "_func"),
    *_rows("tf.data parallel map", "_num_parallel_calls"),
    *_rows("tf.data parallel map", "_deterministic", "deterministic=False is found in options only"),
    *_rows(
        "keras.src.optimizers.base_optimizer", "BaseOptimizer", "an ImportError with the name, under Horovod's names"
    ),
    *_rows("keras.src.trainers.trainer", "Trainer", "an ImportError with the name, under Horovod's names"),
    *_rows(
        "keras.src.losses.loss", "apply_mask", "an ImportError with the name, in a loss with mean_with_sample_weight"
    ),
    *_rows("keras optimizer", "_trainable_variables _variables _iterations _learning_rate _var_key _use_weight_decay"),
    *_rows("keras optimizer", "_get_variable_index _check_variables_are_known _filter_empty_gradients _clip_gradients"),
    *_rows(
        "keras optimizer", "_model_variables_moving_average", "the moving averages of a sharded optimizer are not saved"
    ),
    *_rows("keras optimizer", "_accumulated_gradients", "no warning of batches that an epoch's end leaves out"),
    *_rows("keras optimizer", "_backend_update_step", "an optimizer that overrides it is tried out like others"),
    *_rows("keras optimizer", "_unpickle_model"),
    *_rows("keras loss scale optimizer", "inner_optimizer"),
    *_rows("keras multi optimizer", "_inner_optimizers", "the optimizers inside are not looked at"),
    *_rows("keras momentum", "momentums", _UNCORRECTED),
    *_rows("keras rmsprop", "_momentums", _UNCORRECTED),
    *_rows("keras variable", "_value"),
    *_rows("keras model", "_flatten_layers _loss_tracker"),
    *_rows(
        "keras model",
        "_compile_metrics _symbolic_build",
        "a rank without data has not built the metrics in an eager fit",
    ),
    *_rows("keras model", "_compile_loss", "on a rank without rows, the losses of several outputs do not count"),
    *_rows("keras loss", "_fn_kwargs fn", "a loss over rows is taken for one of rows"),
    *_rows("keras masked output", "_keras_mask", "masks of losses are not seen"),
    *_rows("keras batch normalization", "_moments", "SyncBatchNormalization refuses the layer"),
    *_rows("keras batch normalization", "_reduction_axes"),
    *_rows("tf_keras optimizer", "_variables _learning_rate _iterations _built"),
    *_rows(
        "tf_keras legacy optimizer",
        "_aggregate_gradients _create_all_weights",
        "it is taken for one that is not legacy",
    ),
    *_rows("tf_keras legacy optimizer", "_compute_gradients get_slot_names"),
    *_rows("tf_keras batch normalization", "_moments", "SyncBatchNormalization refuses the layer"),
    *_rows("tf_keras loss", "_get_reduction"),
    *_rows("tf_keras loss", "_fn_kwargs fn", "a loss over rows is taken for one of rows"),
)
"""All of them."""

FRAMES = {
    "callbacks.base.list_with": "tests/spmd/test_keras_callbacks.py: a callback in the wrong place is refused",
    "ops.ordered._parallel_dataset": "tests/spmd/test_tf_graph.py: an exchange in a parallel map is refused",
    "optimizers.keras.Distributed.__setattr__": "tests/spmd/test_keras_training.py: a LossScaleOptimizer around it",
    "strategy.dataset._looks_only": "tests/spmd/test_tf_strategy.py: each row of a generator is seen once",
}
"""The functions that look at the callers' frames, and the tests that fail if they do not find what they look for."""
