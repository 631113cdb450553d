"""The GPU of this rank, and the collectives of each group on it: made when they are first needed, known to the watch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.config import Config
from hvdlite.errors import DeviceError
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gpu.nccl import load
from hvdlite.gpu.setup import FindDevice, Load, connect
from hvdlite.protocols import Device, Transport
from hvdlite.tensors.device_registry import find_device
from hvdlite.topology import Members

Register = Callable[[Members, DeviceCollectives], Callable[[], None]]
"""Enters collectives of a group in the watchdog. Returns a function that takes them out."""


class Devices:
    """What one rank knows of its GPUs.

    Args:
        config: This rank's settings.
        hosts: For each rank of the job, some number of its host.
        register: Enters collectives in the watch.

    Attributes:
        load: Loads NCCL. Tests put another library here.
        find: Finds the device of a kind where there is no tensor that lies on it.
    """

    def __init__(self, config: Config, hosts: Sequence[int], register: Register) -> None:
        self._config, self._hosts, self._register = config, hosts, register
        self.load: Load = partial(load, config.nccl_library)
        self.find: FindDevice = find_device
        self._chosen: dict[str, Device] = {}
        self._open: list[DeviceCollectives] = []
        self._shared: dict[tuple[int, str], DeviceCollectives] = {}

    def choose(self, device: Device) -> None:
        """This rank works on `device`, and on no other of its kind.

        Raises:
            DeviceError: It has worked on another before, or by way of another library.
        """
        chosen = self._chosen.setdefault(device.kind, device)
        if chosen.index != device.index:
            raise DeviceError(
                f"a tensor lies on {device.kind}:{device.index}, and this rank has exchanged tensors on "
                f"{chosen.kind}:{chosen.index} before: each rank uses one GPU. Move it there; more ranks use more GPUs."
            )
        if chosen.library != device.library:
            raise DeviceError(
                f"this rank has exchanged GPU tensors by way of {chosen.library} before, and this one would go by way of "
                f"{device.library}: use one of them, from_dlpack() makes tensors of one those of the other without a copy."
            )

    def here(self, kind: str) -> Device:
        """The device of a kind that this rank works on, or will.

        Raises:
            DeviceError: There is none.
        """
        return self._chosen.get(kind) or self.find(kind)

    def connect(
        self, host: HierarchicalCollectives, members: Members, kind: str, device: Device | None, owned: bool = True
    ) -> DeviceCollectives:
        """New collectives of a group. All its ranks call this, at the same point of their sequence.

        Args:
            host: The group's collectives on host memory.
            members: The group's ranks.
            kind, device: As for `hvdlite.gpu.setup.connect`.
            owned: `host` is closed with them.

        Raises:
            DeviceError, NcclError: As there; on all ranks alike.
        """
        hosts = [self._hosts[rank] for rank in members.ranks]
        device = device or self._chosen.get(kind)
        try:
            device, made = connect(host, hosts, kind, device, self._config, self.load, self.find)
        except BaseException:
            if owned:
                host.close()
            raise
        self._chosen.setdefault(kind, device)
        forget = self._register(members, made)

        def close() -> None:
            if made not in self._open:
                return  # `shutdown` has closed what was left
            forget()
            self._open.remove(made)
            if owned:
                host.close()

        made.close_with = close
        self._open.append(made)
        return made

    def shared(
        self, host: HierarchicalCollectives, members: Members, kind: str, device: Device | None
    ) -> DeviceCollectives:
        """The collectives of a group for named operations, which run one after the other. As `connect`."""
        found = self._shared.get((members.id, kind))
        if found is None:
            found = self._shared[members.id, kind] = self.connect(host, members, kind, device, owned=False)
        return found

    def forget(self, members: Members) -> None:
        """Close what `shared` made for a group. All its ranks do this."""
        for key in [key for key in self._shared if key[0] == members.id]:
            self._shared.pop(key).close()

    def close(self) -> None:
        """Close everything. All ranks of the job do this, in the same order."""
        self._shared.clear()
        for each in list(self._open):
            each.close()
        self._chosen.clear()


class GroupCollectives(HierarchicalCollectives):
    """The collectives of a group by which named operations run: in host memory, and on its GPUs.

    Args:
        transport, hosts, make_flat, shared_memory: As for `HierarchicalCollectives`.
        devices: This rank's.
        members: The group's ranks.
    """

    def __init__(
        self,
        transport: Transport,
        hosts: Sequence[int],
        make_flat: MakeCollectives,
        shared_memory: bool,
        devices: Devices,
        members: Members,
    ) -> None:
        super().__init__(transport, hosts, make_flat, shared_memory)
        self._devices, self._members = devices, members

    def choose(self, device: Device) -> None:
        """See `Devices.choose`."""
        self._devices.choose(device)

    def on_device(self, kind: str, device: Device | None) -> DeviceCollectives:
        """The same group on its GPUs. The first time all ranks make the call at once.

        Args:
            kind: `Device.kind`.
            device: This rank's; None if it has joined and has no tensors.

        Raises:
            DeviceError, NcclError: A rank cannot take part. Raised on all ranks.
        """
        return self._devices.shared(self, self._members, kind, device)

    def close(self) -> None:
        """Close what `on_device` made, and release everything. All ranks do this."""
        self._devices.forget(self._members)
        super().close()
