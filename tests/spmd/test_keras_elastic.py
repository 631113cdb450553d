"""The states of elastic training with Keras and TensorFlow: saved, brought back and shared exactly; and the callbacks."""

from __future__ import annotations

import pickle
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, CommitError
from hvdlite_tf import elastic
from tests.spmd.test_keras_checkpoint import OPTIONS, X, Y, make, train


def weights(model: Any) -> list[Any]:
    return [*model.get_weights(), *(np.asarray(variable) for variable in model.optimizer.variables)]


def assert_same(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.costly
@pytest.mark.parametrize("options", OPTIONS)
def test_save_restore_and_a_new_process(ranks: Any, options: str) -> None:
    """What rank 0 gets in a new process is what was committed, and the others get it by `sync`."""

    def check() -> None:
        model = make(keras, options)
        state = elastic.KerasState(model, epoch=0)
        assert state.optimizer is model.optimizer
        train(model, 2)
        if options == "diloco":
            model.optimizer.average_parameters()
        state.epoch = 2
        state.commit()
        committed = weights(model)
        saved = pickle.loads(pickle.dumps(state.saved()))
        train(model, 1)
        trained = model.get_weights()
        state.epoch = 9
        state.restore()
        assert_same(weights(model), committed)
        assert state.epoch == 2
        train(model, 1)
        assert_same(model.get_weights(), trained)
        anew = elastic.TensorFlowKerasState(make(keras, options), epoch=0)
        if hvd.rank() == 0:
            anew.set_saved(saved)
            anew.restore()
        anew.sync()
        assert anew.epoch == 2
        assert_same(weights(anew.model)[:4], committed[:4])
        train(anew.model, 1)
        assert_same(anew.model.get_weights(), trained)

    ranks(check)


@pytest.mark.costly
def test_callbacks(ranks: Any) -> None:
    """A commit has what the other callbacks of the batch have set, wherever it stands in the list."""

    def check() -> None:
        model = make(keras, "plain")
        state = elastic.KerasState(model, batch=0, epoch=0)
        seen: list[tuple[int, int]] = []
        plain = state.commit

        def commit() -> None:
            seen.append((state.epoch, state.batch))
            plain()

        state.commit = commit  # type: ignore[method-assign]
        callbacks = [
            elastic.CommitStateCallback(state, batches_per_commit=2),
            elastic.UpdateBatchStateCallback(state),
            elastic.UpdateEpochStateCallback(state),
        ]
        rows = slice(0, 12)  # three batches on every rank
        model.fit(X[rows], Y[rows], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        assert seen == [(0, 2), (1, 0), (1, 2), (2, 0)]
        model.fit(X[rows], Y[rows], batch_size=4, initial_epoch=2, epochs=3, verbose=0, callbacks=callbacks)
        assert state.epoch == 3
        seen.clear()
        state.batch = 2  # as after a restart
        model.fit(X[:4], Y[:4], batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
        assert seen == [(4, 0)]
        with pytest.raises(ArgumentError, match="batches_per_commit=0"):
            elastic.CommitStateCallback(state, 0)

    ranks(check)


@pytest.mark.costly
def test_an_optimizer_beside_the_model(ranks: Any) -> None:
    def check() -> None:
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(2)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * (1 + hvd.rank()), momentum=0.9))
        state = elastic.TensorFlowKerasState(model, optimizer)
        state.sync()
        assert float(optimizer.learning_rate) == np.float32(0.1)
        kept = [np.array(variable) for variable in [*model.weights, *optimizer.variables]]
        optimizer.apply([tf.ones_like(weight) for weight in model.trainable_weights])
        state.restore()
        assert_same([np.array(variable) for variable in [*model.weights, *optimizer.variables]], kept)
        with pytest.raises(CommitError, match="has no weights yet"):
            elastic.KerasState(keras.Sequential([keras.layers.Dense(1)])).save()

    ranks(check)


def test_variables(ranks: Any) -> None:
    def check() -> None:
        variables = [tf.Variable([float(hvd.rank()), 1.0]), tf.Variable(hvd.rank(), dtype=tf.int64)]
        state = elastic.TensorFlowState(variables, step=hvd.rank())
        state.sync()
        assert [each.numpy().tolist() for each in variables] == [[0.0, 1.0], 0] and state.step == 0
        variables[0].assign([5.0, 6.0])
        state.commit()
        saved = pickle.loads(pickle.dumps(state.saved()))
        variables[0].assign([0.0, 0.0])
        state.set_saved(saved)
        state.restore()
        assert variables[0].numpy().tolist() == [5.0, 6.0]
        with pytest.raises(ArgumentError, match="needs variables="):
            elastic.TensorFlowState(step=0)

    ranks(check)


def test_variables_of_a_session(ranks: Any) -> None:
    def check() -> None:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("v", initializer=[float(hvd.rank()), 2.0], use_resource=True)
            session.run(tf.compat.v1.global_variables_initializer())
            state = elastic.TensorFlowState(session=session, step=1)
            state.sync()
            assert session.run(variable).tolist() == [0.0, 2.0]
            session.run(tf.compat.v1.assign(variable, [3.0, 3.0]))
            state.restore()
            assert session.run(variable).tolist() == [0.0, 2.0]

    ranks(check)
