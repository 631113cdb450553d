"""`TensorFlowState`: what a training with variables of TensorFlow commits, and goes on from."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from hvdlite.elastic import ObjectState
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite_tf.variables import is_installed, missing, plain_variable


class TensorFlowState(ObjectState):
    """The state of a training with TensorFlow: variables, and Python's objects, such as numbers.

    Args:
        variables: The variables, in the same order on every rank. In a graph of TensorFlow 1 the default is all global ones.
        session: The session that has their values, in a graph of TensorFlow 1.
        kwargs: Values by name, which become attributes: ``state.epoch``.

    Attributes:
        variables, session: The arguments.

    Raises:
        ArgumentError: There are no variables; or an attribute has the name of something else that a state has.
        MissingPackageError: TensorFlow is not installed.

    Examples:
        >>> def interrupted():
        ...     variable = tf.Variable(1.0)
        ...     state = hvd.elastic.TensorFlowState([variable], epoch=3)
        ...     state.commit()
        ...     variable.assign(0.0)  # and here something fails
        ...     state.restore()
        ...     return variable.numpy().item(), state.epoch
        >>> on_ranks(2, interrupted)
        [(1.0, 3), (1.0, 3)]
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if not is_installed():
            raise missing(__name__, "TensorFlowState")
        tf = importlib.import_module("tensorflow")
        if variables is None and (session is None or tf.executing_eagerly()):
            raise ArgumentError("TensorFlowState needs variables=, such as model.variables and optimizer.variables.")
        given = tf.compat.v1.global_variables() if variables is None else variables
        self.variables = [plain_variable(variable) for variable in given]
        self.session = session
        super().__init__(**kwargs)
        self._values: list[Any] = []
        self._operations: Any = None

    def save(self) -> None:
        """Copy everything."""
        if self.session is not None:
            self._values = self.session.run(self.variables)
        else:
            self._values = [np.array(variable) for variable in self.variables]
        super().save()

    def restore(self) -> None:
        """Bring everything back to what it was when `save` was called. Without that, it stays."""
        if self.session is not None and self._values:
            _, places, assign = self._in_graph()
            self.session.run(assign, dict(zip(places, self._values, strict=True)))
        elif self._values:
            for variable, value in zip(self.variables, self._values, strict=True):
                variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it."""
        if self.session is not None:
            self.session.run(self._in_graph()[0])
        else:
            importlib.import_module("hvdlite_tf.training.state").broadcast_variables(self.variables, 0)
        super().sync()

    def saved(self) -> dict[str, Any]:
        """Return what `save` has saved."""
        return {"attributes": super().saved(), "variables": self._values}

    def set_saved(self, saved: dict[str, Any]) -> None:
        """Replace what `save` has saved.

        Args:
            saved: What `saved` has returned.

        Raises:
            HvdliteError: The names or the variables are others than those of this state: the program has changed.
        """
        super().set_saved(saved["attributes"])
        there, here = ([tuple(each.shape) for each in some] for some in (saved["variables"], self.variables))
        if there and there != here:
            raise HvdliteError(f"the committed state has variables of shapes {there}, and this program's has {here}.")
        self._values = saved["variables"]

    def _in_graph(self) -> tuple[Any, list[Any], list[Any]]:
        """Return the operation that broadcasts, placeholders, and the operations that assign these. They are made once."""
        if self._operations is None:
            tf = importlib.import_module("tensorflow")
            with self.session.graph.as_default():
                broadcast = importlib.import_module("hvdlite_tf.training.state").broadcast_variables(self.variables, 0)
                places = [tf.compat.v1.placeholder(each.dtype.base_dtype, each.shape) for each in self.variables]
                pairs = zip(self.variables, places, strict=True)
                assign = [tf.compat.v1.assign(variable, place).op for variable, place in pairs]
            self._operations = broadcast, places, assign
        made: tuple[Any, list[Any], list[Any]] = self._operations
        return made
