"""What a training commits, and goes on from after a failure: `State`, the base of all, and `ObjectState`, of Python's objects.

    the program's values ── save ──> saved() ── the keeper ──> memory of each host, which outlives its processes
           ▲                           │  ▲                                        │
           └───────── restore ─────────┘  └────── set_saved, after a restart ──────┘

A state of a framework overrides `save`, `restore`, `sync`, `saved` and `set_saved`, and nothing else.
"""

from __future__ import annotations

import copy
import enum
import functools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvdlite import api
from hvdlite.errors import ArgumentError, CommitError, HvdliteError
from hvdlite.launcher_link.generation import ADDED, REMOVED
from hvdlite.ranks.together import Failure, Together


class HostUpdateResult(enum.IntFlag):
    """What has become of the hosts of an elastic job: some have left, some have come, or both.

    Examples:
        >>> both = hvdlite.elastic.HostUpdateResult.added | hvdlite.elastic.HostUpdateResult.removed
        >>> both == hvdlite.elastic.HostUpdateResult.mixed
        True
    """

    no_update = 0
    removed = REMOVED
    added = ADDED
    mixed = REMOVED | ADDED


class HostsUpdatedInterrupt(HvdliteError):
    """Hosts of an elastic job have come or left. No error: ``hvdlite.elastic.run`` takes it, and goes on with the new hosts.

    Args:
        skip_sync: Hosts have left, and none has come.
        is_committed: The state has been committed at the call that raises this.
    """

    def __init__(self, skip_sync: bool = False, is_committed: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
        self.is_committed = is_committed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.skip_sync, self.is_committed)


class Keeper(Protocol):
    """Where the commits of an elastic job go. `hvdlite.elastic.run` gives a state its keeper."""

    def keep(self, saved: Callable[[], dict[str, Any]]) -> None:
        """Keep the state that `saved` returns, if this rank keeps that of its host.

        Raises:
            CommitError: It cannot be pickled, or there is no room for it.
        """

    def kept(self) -> None:
        """Note that all hosts have kept their states."""

    def updates(self) -> int:
        """Return what the launcher has said of the hosts since the start of this process, as a `HostUpdateResult`."""


class State:
    """What a training commits, and goes on from after a failure or with other hosts. Programs use a subclass of it.

    All ranks call `commit`, `check_host_updates` and `sync` together. All ranks must then hold the same state: of every host,
    the state of one rank is kept. A subclass whose ranks hold different values gathers them in `save`, which `commit` calls on
    all ranks.

    Args:
        bcast_object: A function that gives all ranks the object of rank 0; `hvdlite.broadcast_object` if None.
        get_rank: A function that returns this rank's number; `hvdlite.rank` if None.

    Examples:
        >>> class Count(hvdlite.elastic.State):
        ...     value = 0
        ...     def save(self): self.kept = self.value
        ...     def restore(self): self.value = self.kept
        ...     def sync(self): self.value = hvdlite.broadcast_object(self.value)
        >>> def interrupted():
        ...     count = Count()
        ...     count.value = 3
        ...     count.commit()
        ...     count.value = 4  # and here something fails
        ...     count.restore()
        ...     return count.value
        >>> on_ranks(2, interrupted)
        [3, 3]
    """

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or api.broadcast_object
        self._rank = get_rank or api.rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._keeper: Keeper | None = None
        self._updates = HostUpdateResult.no_update
        self._last_update: float | None = None
        self._lock = threading.Lock()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that are called, in this order, when the training goes on with another number of ranks.

        They run after the committed state has been restored on all ranks, and before the training function is called. A
        program adjusts its learning rate there.

        Args:
            callbacks: The functions. They get no arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and then the reset callbacks. `hvdlite.elastic.run` calls this."""
        self._updates = HostUpdateResult.no_update
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts have come or left: the next `commit` or `check_host_updates` interrupts the training on all ranks.

        Under ``hvdliterun`` this need not be called. Any thread may call it, on any rank.

        Args:
            timestamp: The time of the change, in seconds. A change that is not later than one before is ignored.
            update_res: The change, a `HostUpdateResult`.
        """
        with self._lock:
            if self._last_update is None or timestamp > self._last_update:
                self._last_update = timestamp
                self._updates |= HostUpdateResult(update_res)

    def commit(self) -> None:
        """Save the state, so that the training can go on from here; return when all hosts have it.

        Raises:
            CommitError: A host could not keep the state, because it cannot be pickled or there is no room. Every rank raises
                it. What was committed before is still there.
            HostsUpdatedInterrupt: See `check_host_updates`. The state has been committed.
        """
        self.save()
        problem = None
        if self._keeper is not None:
            try:
                self._keeper.keep(self.saved)
            except CommitError as error:
                problem = error
        self._agree(problem, was_committed=True)

    def check_host_updates(self) -> None:
        """Let the training go on with other hosts, if hosts have come or left since its start.

        Raises:
            HostsUpdatedInterrupt: Hosts have come or left. Every rank raises it, at the same call. `hvdlite.elastic.run` takes
                it: it commits the present state, and the training goes on from it.
        """
        self._agree(None, was_committed=False)

    def _agree(self, problem: CommitError | None, was_committed: bool) -> None:
        updates = self._updates | (self._keeper.updates() if self._keeper is not None else 0)
        told = np.array([bool(updates & REMOVED), bool(updates & ADDED), problem is not None], np.uint8)
        removed, added, failed = api.allreduce(told, op=api.Max, name="hvdlite.elastic.commit").tolist()
        if failed:
            gather = functools.partial(api.allgather_object, name="hvdlite.elastic.problem")
            Together(range(api.size()), gather).raise_if(
                None if problem is None else Failure.of(problem), _not_committed
            )
        if was_committed and self._keeper is not None:
            self._keeper.kept()
        if removed or added:
            raise HostsUpdatedInterrupt(skip_sync=not added, is_committed=was_committed)

    def save(self) -> None:
        """Save the state in this process, so that `restore` can bring it back."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make the saved state the present one."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        raise NotImplementedError

    def saved(self) -> dict[str, Any]:
        """Return what `save` has saved. The values can be pickled; arrays in it are not copied while they are written."""
        raise NotImplementedError

    def set_saved(self, saved: dict[str, Any]) -> None:
        """Replace what `save` has saved. `restore` then makes it the present state.

        Args:
            saved: What `saved` has returned, in this process or in one before it.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Do what a subclass needs before the reset callbacks. This class does nothing."""


class ObjectState(State):
    """The state of a training that consists of Python's objects, such as numbers and NumPy arrays. They are its attributes.

    Args:
        bcast_object: See `State`.
        get_rank: See `State`.
        kwargs: The attributes and their first values. Programs read and set them: ``state.epoch += 1``.

    Raises:
        ArgumentError: An attribute has the name of something else that a state has.

    Examples:
        >>> def interrupted():
        ...     state = hvdlite.elastic.ObjectState(epoch=0)
        ...     state.epoch = 3
        ...     state.commit()
        ...     state.epoch = 4  # and here something fails
        ...     state.restore()
        ...     return state.epoch
        >>> on_ranks(2, interrupted)
        [3, 3]
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        if taken := sorted(name for name in kwargs if hasattr(self, name)):
            raise ArgumentError(
                f"{type(self).__name__}({', '.join(f'{name}=…' for name in taken)}): a state has "
                f"{'such an attribute' if len(taken) == 1 else 'such attributes'} itself. Give another name."
            )
        self._names = tuple(kwargs)
        self._saved: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)

    if TYPE_CHECKING:  # for type checkers, which do not know the names of `kwargs`

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Copy the attributes (`copy.deepcopy`), so that `restore` can bring them back.

        Raises:
            CommitError: An attribute cannot be copied. The error names it.
        """
        self._saved = {name: _copied(name, getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Give the attributes the values that they had when `save` was called. Without that, they stay."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give all ranks the attributes of rank 0, and save them."""
        present = self._bcast_object({name: getattr(self, name) for name in self._names})
        for name, value in present.items():
            setattr(self, name, value)
        self.save()

    def saved(self) -> dict[str, Any]:
        """Return the attributes that `save` has copied, by name."""
        return self._saved

    def set_saved(self, saved: dict[str, Any]) -> None:
        """Replace what `save` has copied.

        Args:
            saved: Values of all attributes, by name.

        Raises:
            HvdliteError: The names are others than those of this state: the program has changed.
        """
        if set(saved) != set(self._names):
            raise HvdliteError(
                f"the committed state has the attributes {sorted(saved)}, and this program's state has {sorted(self._names)}."
            )
        self._saved = saved


def _copied(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise CommitError(
            f"the attribute {name!r} of the state, of type {type(value).__name__}, cannot be copied: "
            f"{type(error).__name__}: {error}. Keep in the state what can be copied and pickled, and make the rest anew."
        ) from error


def _not_committed(problems: dict[int, Failure]) -> CommitError:
    whole = "\n".join(f"rank {rank}: {each.text}" for rank, each in problems.items())
    return CommitError(f"the state has not been committed.\n{whole}")
