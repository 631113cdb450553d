"""A table of Horovod's modules and names, of hvdlite's modules behind them, and of the differences.

This file holds data only; `hvdlite.compat.modules` and `hvdlite.compat.status` read it. The names are those of Horovod 0.28.1:
its public names, and those that other projects are known to import. The table does not say whether a name works:
`hvdlite.compat.status` finds that out by looking for the name in hvdlite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Module:
    """A module of Horovod.

    Attributes:
        sources: The modules of hvdlite that have its names. The first one that has a name provides it.
        names: The names that Horovod's module has, without its submodules.
        whole: The module also gets all other public names of `sources`.
        loads: The submodules that are imported together with the module.
    """

    sources: tuple[str, ...]
    names: tuple[str, ...] = ()
    whole: bool = False
    loads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """A note for the users of one thing of Horovod.

    Attributes:
        status: "changed": it works in another way in hvdlite, or has no effect. "more": it also does what Horovod's does not.
            "missing": the note holds only if hvdlite does not have it.
        text: How it differs, or what to do instead.
    """

    status: Literal["changed", "more", "missing"]
    text: str


def words(text: str) -> tuple[str, ...]:
    """Split a text into its words."""
    return tuple(text.split())


_BUILT = words("mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built")
_BASICS = words("""
    init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
    mpi_threads_supported mpi_enabled gloo_enabled
""")
_SETS = words("ProcessSet global_process_set add_process_set remove_process_set")
_OPS = words("Average Sum Adasum Min Max Product")
_COMMON = (*_BASICS, *_BUILT, *_SETS, *_OPS)

_TORCH_OPERATIONS = words("""
    allreduce allreduce_ allreduce_async allreduce_async_
    grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async
    allgather allgather_async grouped_allgather grouped_allgather_async
    broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async
    reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize
""")
_TORCH_FUNCTIONS = words("broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object")
_TORCH_STATE = words("""
    TorchState StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler get_handler_registry
    set_handler_registry
""")
_TF_OPERATIONS = words("""
    allreduce grouped_allreduce allgather grouped_allgather broadcast broadcast_ alltoall
    reducescatter grouped_reducescatter join size_op local_size_op rank_op local_rank_op process_set_included_op
""")
_TF_FUNCTIONS = words("""
    broadcast_variables broadcast_object broadcast_object_fn allgather_object broadcast_global_variables
""")
_TF_HELPERS = words("""
    is_homogeneous handle_average_backwards_compatibility check_num_rank_power_of_2 vars_to_refs refs_to_vars
""")
_TF_PRIVATE = words("_executing_eagerly _make_subgraph _cache")
_TF_INNER = words("_allreduce _LegacyOptimizer _DistributedOptimizer _make_allreduce_grads_fn")
_TF_AGGREGATION = words("LocalGradientAggregationHelper LocalGradientAggregationHelperEager")
_TF_WRAPPERS = words("""
    Compression DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape BroadcastGlobalVariablesHook
    SyncBatchNormalization
""")
_KERAS = words("""
    DistributedOptimizer PartialDistributedOptimizer broadcast_global_variables allreduce allgather broadcast reducescatter
    load_model Compression
""")
_KERAS_CALLBACKS = words("""
    BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
    BestModelCheckpoint
""")
_KERAS_ELASTIC = words("run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback")
_UTIL = words("""
    get_ext_suffix get_extension_full_path check_extension extension_available gpu_available env
    get_average_backwards_compatibility_fun num_rank_is_power_2 split_list check_installed_version is_iterable
    is_version_greater_equal_than mpi_built gloo_built nccl_built ddl_built ccl_built _cache
""")
_HERE = "hvdlite.compat"
_BEGIN = f"{_HERE}.common.basics"
HOROVOD_VERSION = __version__ = "0.28.1"
"""The release of Horovod whose API this is. Programs read it as ``horovod.__version__``."""

MODULES: dict[str, Module] = {
    "horovod": Module((f"{_HERE}.runner", f"{_HERE}.table"), ("run", "__version__")),
    "horovod.runner": Module((f"{_HERE}.runner",), ("run",)),
    "horovod.runner.common": Module(()),
    "horovod.runner.common.util": Module((), loads=("env",)),
    "horovod.runner.common.util.env": Module((f"{_HERE}.environment",), ("get_env_rank_and_size",)),
    "horovod.common": Module((), (), loads=("exceptions", "process_sets", "util")),
    "horovod.common.basics": Module((f"{_HERE}.common.basics",), ("HorovodBasics",)),
    "horovod.common.exceptions": Module(
        (f"{_HERE}.common.exceptions",),
        words("HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError get_version_mismatch_message"),
    ),
    "horovod.common.process_sets": Module(("hvdlite",), _SETS),
    "horovod.common.util": Module(
        (f"{_HERE}.common.util", "hvdlite.adapter.capabilities", "hvdlite.adapter.arguments"), _UTIL
    ),
    "horovod.common.elastic": Module((f"{_HERE}.common.elastic",), words("State ObjectState run_fn")),
    "horovod.torch": Module(
        (_BEGIN, "hvdlite_torch.horovod", "hvdlite_torch.horovod.operations", "hvdlite_torch"),
        (
            *_COMMON,
            *_TORCH_OPERATIONS,
            *_TORCH_FUNCTIONS,
            *words("Compression DistributedOptimizer SyncBatchNorm HorovodInternalError"),
        ),
        whole=True,
        loads=("compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"),
    ),
    "horovod.torch.mpi_ops": Module(
        (_BEGIN, "hvdlite_torch.horovod.operations", "hvdlite_torch.horovod.names", "hvdlite_torch"),
        (*_COMMON, *_TORCH_OPERATIONS, *words("HorovodInternalError handle_average_backwards_compatibility _basics")),
    ),
    "horovod.torch.compression": Module(
        ("hvdlite_torch", "hvdlite.tensors.compression"), words("Compression Compressor NoneCompressor FP16Compressor")
    ),
    "horovod.torch.functions": Module(("hvdlite_torch",), _TORCH_FUNCTIONS),
    "horovod.torch.optimizer": Module(
        ("hvdlite_torch.horovod", "hvdlite_torch.horovod.names"), words("DistributedOptimizer _DistributedOptimizer")
    ),
    "horovod.torch.sync_batch_norm": Module(("hvdlite_torch",), ("SyncBatchNorm",)),
    "horovod.torch.elastic": Module(
        ("hvdlite_torch.elastic", f"{_HERE}.common.elastic"),
        ("run", "State", "ObjectState", "ElasticSampler", *_TORCH_STATE),
        loads=("sampler", "state"),
    ),
    "horovod.torch.elastic.state": Module(("hvdlite_torch.elastic",), _TORCH_STATE),
    "horovod.torch.elastic.sampler": Module(("hvdlite_torch.elastic",), ("ElasticSampler",)),
    "horovod.tensorflow": Module(
        (_BEGIN, "hvdlite_tf.horovod", "hvdlite_tf.horovod.names", "hvdlite_tf", f"{_HERE}.common.util"),
        (
            *_COMMON,
            *_TF_OPERATIONS,
            *_TF_FUNCTIONS,
            *_TF_HELPERS,
            "LocalGradientAggregationHelper",
            *_TF_WRAPPERS,
            *_TF_PRIVATE,
            *_TF_INNER,
            "gpu_available",
        ),
        whole=True,
        loads=words("compression elastic functions gradient_aggregation mpi_ops sync_batch_norm util"),
    ),
    "horovod.tensorflow.mpi_ops": Module(
        (_BEGIN, "hvdlite_tf.horovod.operations", "hvdlite_tf.horovod.names", "hvdlite_tf", f"{_HERE}.common.util"),
        (*_COMMON, *_TF_OPERATIONS, *_TF_HELPERS[:3], *words("_allreduce _alltoall_grad _basics gpu_available")),
    ),
    "horovod.tensorflow.functions": Module(("hvdlite_tf",), _TF_FUNCTIONS),
    "horovod.tensorflow.compression": Module(
        ("hvdlite_tf", "hvdlite.tensors.compression"), words("Compression Compressor NoneCompressor FP16Compressor")
    ),
    "horovod.tensorflow.gradient_aggregation": Module(("hvdlite_tf",), _TF_AGGREGATION),
    "horovod.tensorflow.gradient_aggregation_eager": Module(("hvdlite_tf",), _TF_AGGREGATION),
    "horovod.tensorflow.sync_batch_norm": Module(("hvdlite_tf",), ("SyncBatchNormalization",)),
    "horovod.tensorflow.util": Module(("hvdlite_tf.horovod", "hvdlite_tf"), (*_TF_HELPERS[3:], *_TF_PRIVATE)),
    "horovod.tensorflow.elastic": Module(
        ("hvdlite_tf.elastic", f"{_HERE}.common.elastic"),
        words("run State ObjectState TensorFlowState TensorFlowKerasState"),
    ),
    **{
        name: module
        for package in ("horovod.tensorflow.keras", "horovod.keras")
        for name, module in {
            package: Module(
                (_BEGIN, "hvdlite_tf.horovod.keras", "hvdlite_tf.keras"),
                (*_COMMON, *_KERAS),
                whole=True,
                loads=("callbacks", "elastic"),
            ),
            f"{package}.callbacks": Module(
                ("hvdlite_tf.horovod.keras_callbacks", "hvdlite_tf.keras.callbacks"), _KERAS_CALLBACKS
            ),
            f"{package}.elastic": Module(("hvdlite_tf.keras.elastic",), _KERAS_ELASTIC),
        }.items()
    },
}

RESULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "horovod.torch.DistributedOptimizer": (
        "hvdlite_torch.optimizer.Distributed",
        words("synchronize skip_synchronize set_backward_passes_per_step"),
    ),
    **{
        f"horovod.{module}.DistributedOptimizer": (
            "hvdlite_tf.optimizers.keras.DistributedKerasOptimizer",
            ("register_local_var",),
        )
        for module in ("tensorflow", "tensorflow.keras", "keras")
    },
    **{
        f"horovod.tensorflow.{name}": (
            "hvdlite_tf.optimizers.tape.DistributedTape",
            words("register_local_source get_local_and_global_gradients"),
        )
        for name in words("DistributedGradientTape PartialDistributedGradientTape")
    },
}
"""For each function of Horovod, the class of hvdlite that it returns, and the names that Horovod adds to the result."""

NOTES: dict[str, Note] = {
    **{
        f"{module}.{name}": Note("more", text)
        for module, entry in MODULES.items()
        for name, text in (
            ("join", "more than in Horovod: works with every operation, and not only with allreduce"),
            ("Adasum", "more than in Horovod: any number of ranks, and process sets"),
            ("add_process_set", "more than in Horovod: at any time, without HOROVOD_DYNAMIC_PROCESS_SETS"),
            ("remove_process_set", "more than in Horovod: at any time, without HOROVOD_DYNAMIC_PROCESS_SETS"),
        )
        if name in entry.names
    },
    "horovod.common.elastic.run_fn": Note("changed", "reset is not called: hvdliterun starts the program again"),
    **{
        f"horovod.{module}.elastic.UpdateBatchStateCallback": Note(
            "changed", "state.batch is how many batches of the epoch were trained, also after a restart"
        )
        for module in ("keras", "tensorflow.keras")
    },
    "horovod.run": Note(
        "changed",
        "always over MPI: use_gloo, use_mpi and disable_cache change nothing; elastic: results of the last generation's ranks",
    ),
    "horovod.runner.run": Note("changed", "as horovod.run"),
    "horovod.runner": Note("missing", "parts of Horovod's launcher; start jobs with hvdliterun or hvdlite.run"),
    **{
        name: Note(
            "changed",
            "a name to annotate with, for isinstance and for subclasses: hvd.DistributedOptimizer makes the objects, and "
            "what is replaced in it raises",
        )
        for name in (
            "horovod.torch.optimizer._DistributedOptimizer",
            "horovod.tensorflow._DistributedOptimizer",
        )
    },
    "horovod.tensorflow.mpi_ops._alltoall_grad": Note("changed", "raises: differentiate hvd.alltoall"),
    "horovod.common.util.get_extension_full_path": Note(
        "changed", "raises: nothing is compiled, so there is no such file"
    ),
    "horovod.common.util.check_extension": Note(
        "changed", "nothing is compiled: passes where the framework is installed"
    ),
    "horovod.common.util.check_installed_version": Note("changed", "always passes: no framework's version is built in"),
    "horovod.keras.DistributedOptimizer": Note("changed", "num_groups and groups have no effect, and another place"),
    "horovod.keras.callbacks.BestModelCheckpoint": Note(
        "changed", "as in horovod.tensorflow.keras: give mode and save_freq by name"
    ),
    "horovod._keras": Note(
        "missing",
        "inner parts of Horovod: subclass hvd.callbacks.…, wrap with hvd.DistributedOptimizer",
    ),
    "horovod.tensorflow.data": Note("missing", "use tf.data.experimental.service, or hvd.shard(dataset) of hvdlite_tf"),
    "horovod.data": Note("missing", "use the framework's own loaders, such as torch.utils.data.DataLoader"),
    "horovod.mxnet": Note(
        "missing", "MXNet is not supported (its development has ended); arrays work with hvdlite itself"
    ),
    "horovod.spark": Note("missing", "Spark is not supported: use hvdlite.run"),
    "horovod.ray": Note("missing", "Ray is not supported: use hvdlite.run"),
}
"""The notes by full name. A note also holds for all names below its name. A note "missing" is not used for a name that hvdlite
has."""
