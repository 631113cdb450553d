"""Programs with TensorFlow and Keras. mypy sees neither, so it takes their objects for any; pyright sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import assert_type

import hvdlite_tf as hvd


def model_of(units: int = 1) -> Any:
    """A model, which is compiled."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(units)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    return model


def fit(folder: Path) -> list[float]:
    """`fit` with all callbacks."""
    model = model_of()
    callbacks = [
        hvd.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.UnevenDataCallback(),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, steps_per_epoch=2),
        hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5**epoch),
        hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=folder / "best.keras"),
    ]
    hvd.callbacks.Distributed(0, checkpoint=folder / "last.keras")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    history = model.fit(x, y, batch_size=2, epochs=1, callbacks=callbacks, verbose=0)
    found: list[float] = history.history["loss"]
    return found


def tapes() -> None:
    """Training loops."""
    weight = tf.Variable(tf.constant(1.0))
    with tf.GradientTape() as tape:
        loss = weight * weight
    tape = hvd.DistributedGradientTape(tape)
    tape.gradient(loss, [weight])
    with tf.GradientTape() as other:
        loss = weight * weight
    hvd.PartialDistributedGradientTape(other).gradient(loss, [weight])
    combine = hvd.DistributedGradient()
    gradients: dict[str, npt.NDArray[np.float64]] = {"w": np.ones(1)}
    assert_type(combine(gradients), dict[str, npt.NDArray[np.float64]])
    hvd.broadcast_variables([weight], root_rank=0)
    hvd.broadcast_([weight], root_rank=0)
    keras.Sequential([keras.layers.Input((2,)), hvd.SyncBatchNormalization()])


def few_exchanges() -> hvd.LocalSGD:
    """Few exchanges, and a parameter server."""
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), local_steps=hvd.DiLoCo(every=4))
    model = model_of()
    optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1), model, mode="ssp", staleness=2)
    served: hvd.AsyncDistributed = optimizer
    served.set_batch_weight(2)
    served.finish()
    local = hvd.LocalSGD(every=2)
    assert_type(local.every, int)
    return local


def late_servers() -> None:
    """Ranks that only serve until the program ends."""
    hvd.serve_parameters()


def exchange() -> list[int]:
    """Operations, and handles of them."""
    x = tf.ones((hvd.size(), 1))
    several = [x]
    hvd.allreduce(x, op=hvd.Sum)
    hvd.allgather(x)
    hvd.broadcast(x, root_rank=0)
    hvd.alltoall(x)
    hvd.reducescatter(x)
    array: npt.NDArray[np.float64] = np.ones(hvd.size())
    assert_type(hvd.allreduce_async(array).wait(), npt.NDArray[np.float64])
    assert_type(hvd.allgather_async(array), hvd.Handle[npt.NDArray[np.float64]])
    assert_type(hvd.broadcast_async(array, 0), hvd.Handle[npt.NDArray[np.float64]])
    hvd.alltoall_async(x).wait()
    hvd.reducescatter_async(x).wait()
    hvd.grouped_allreduce(several)
    hvd.grouped_allgather(several)
    hvd.grouped_reducescatter(several)
    assert_type(hvd.allgather_object(1), list[int])
    assert_type(hvd.broadcast_object({"epoch": 1}), dict[str, int])
    send: Callable[[Any], Any] = hvd.broadcast_object_fn(root_rank=0)
    send("a")
    hvd.barrier()
    hvd.join()
    return hvd.allgather_object(hvd.rank())


def in_graphs() -> int:
    """What graphs ask for when they run."""
    asked = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()]
    return len(asked)


def horovods_own() -> list[bool]:
    """Names of Horovod's that programs seldom need."""
    variables = [tf.Variable(tf.constant(1.0))]
    hvd.refs_to_vars(hvd.vars_to_refs(variables))
    assert_type(hvd.handle_average_backwards_compatibility(None, None), hvd.ReduceOp)
    assert_type(hvd.check_num_rank_power_of_2(4), bool)
    hvd.LocalGradientAggregationHelper(2, lambda gradients, variables: gradients, False, False, 0, "")
    hvd.LocalGradientAggregationHelperEager(2, lambda gradients, variables: gradients, False, True)
    assert_type(hvd.nccl_built(), int)
    assert_type(hvd.mpi_enabled(), bool)
    return [
        *(hvd.mpi_built(), hvd.gloo_built(), hvd.gloo_enabled(), hvd.cuda_built()),
        *(hvd.rocm_built(), hvd.ccl_built(), hvd.ddl_built()),
    ]


def in_sessions() -> None:
    """Programs of TensorFlow 1."""
    with tf.Graph().as_default():
        hvd.broadcast_global_variables(0)
        hvd.BroadcastGlobalVariablesHook(0)


def strategy() -> Any:
    """A strategy of TensorFlow."""
    mine = hvd.Strategy()
    with mine.scope():
        model = model_of()
    data = hvd.shard(tf.data.Dataset.range(8), by="examples", shuffle=8, seed=0)
    return model, data


def in_stages() -> Any:
    """A model that lies on several ranks."""
    stages = [keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)]) for _ in range(hvd.size())]
    model = hvd.Pipeline(stages, microbatches=2)
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    assert_type(model.report(), str)
    return model


def saved(folder: Path) -> int:
    """A checkpoint, and the start from it."""
    model = model_of()
    assert_type(hvd.checkpoint.save(folder, model=model, epoch=2), Path)
    assert_type(hvd.checkpoint.save(folder, model=model, epoch=2, wait=False), Path)
    hvd.checkpoint.wait()
    loaded = hvd.checkpoint.load(folder, model=model)
    assert_type(loaded, hvd.checkpoint.Loaded | None)
    epoch: int = loaded["epoch"] if loaded else 0
    return epoch


def served() -> None:
    """A model behind HTTP."""
    hvd.serve(hvd.servable(model_of(), example=np.ones(2)), port=8000)


@hvd.elastic.run
def elastic_train(state: hvd.elastic.KerasState, epochs: int) -> int:
    """A training that goes on when ranks come and go."""
    while state.epoch < epochs:
        state.epoch += 1
        state.commit()
    epoch: int = state.epoch
    return epoch


def elastic() -> int:
    """States and callbacks."""
    model = model_of()
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    hvd.elastic.TensorFlowKerasState(model, epoch=0)
    hvd.elastic.TensorFlowState([tf.Variable(tf.constant(1.0))])
    plain: hvd.elastic.State = hvd.elastic.ObjectState(epoch=0)
    plain.commit()
    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    try:
        return elastic_train(state, epochs=len(callbacks))
    except hvd.elastic.HostsUpdatedInterrupt:
        return 0
