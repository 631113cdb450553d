"""The GPU of this rank, and the device collectives of each group: made when first needed, and watched by the watchdog."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.gpu.nccl import load
from hvdlite.comm.gpu.setup import FindDevice, Load, connect
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.config import Config
from hvdlite.errors import DeviceError
from hvdlite.protocols import Device, Transport
from hvdlite.ranks.topology import Members
from hvdlite.tensors.device_registry import find_device

Register = Callable[[Members, DeviceCollectives], Callable[[], None]]
"""A function that enters collectives of a group in the watchdog. It returns a function that takes them out."""


class Devices:
    """The GPU of one rank, and the device collectives that its groups have made.

    Args:
        config: The settings of this rank.
        hosts: For each rank of the job, a number of its host.
        register: A function that enters collectives in the watchdog.

    Attributes:
        load: The function that loads NCCL. Tests replace it.
        find: The function that finds the device of a kind for a rank that has no tensor there.
    """

    def __init__(self, config: Config, hosts: Sequence[int], register: Register) -> None:
        self._config, self._hosts, self._register = config, hosts, register
        self.load: Load = partial(load, config.nccl_library)
        self.find: FindDevice = find_device
        self._chosen: dict[str, Device] = {}
        self._open: list[DeviceCollectives] = []
        self._shared: dict[tuple[int, str], DeviceCollectives] = {}

    @property
    def in_use(self) -> bool:
        """Whether this rank works on a device."""
        return bool(self._chosen)

    def choose(self, device: Device) -> None:
        """Choose `device` for this rank: from now on the rank works on no other device of this kind.

        Raises:
            DeviceError: The rank has worked on another device of this kind before, or through another library.
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
        """Return the device of a kind that this rank works on, or will work on.

        Raises:
            DeviceError: The rank has no device of this kind.
        """
        return self._chosen.get(kind) or self.find(kind)

    def connect(
        self, host: HierarchicalCollectives, members: Members, kind: str, device: Device | None, owned: bool = True
    ) -> DeviceCollectives:
        """Make device collectives of a group. All ranks of the group call this, at the same point of their sequence.

        Args:
            host: The collectives of the group on host memory.
            members: The ranks of the group.
            kind, device: See `hvdlite.comm.gpu.setup.connect`.
            owned: True if `host` is closed together with the new collectives.

        Raises:
            DeviceError, NcclError: See `hvdlite.comm.gpu.setup.connect`. All ranks raise the same.
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
        """Return the device collectives of a group for its named operations, which run one after the other.

        The first call makes them; see `connect` for arguments and errors.
        """
        found = self._shared.get((members.id, kind))
        if found is None:
            found = self._shared[members.id, kind] = self.connect(host, members, kind, device, owned=False)
        return found

    def forget(self, members: Members) -> None:
        """Close the collectives that `shared` made for a group. All ranks of the group call this."""
        for key in [key for key in self._shared if key[0] == members.id]:
            self._shared.pop(key).close()

    def close(self) -> None:
        """Close all device collectives. All ranks of the job call this."""
        self._shared.clear()
        for each in list(self._open):
            each.close()
        self._chosen.clear()


class GroupCollectives(HierarchicalCollectives):
    """The collectives for the named operations of a group: on host memory, and on its GPUs.

    Args:
        transport, hosts, make_flat, shared_memory: See `HierarchicalCollectives`.
        devices: The devices of this rank.
        members: The ranks of the group.
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
        """Return the device collectives of the same group. All ranks make the first call at the same point of their sequence.

        Args:
            kind: The kind of the devices, as in `Device.kind`.
            device: The device of this rank; None for a rank that has joined and has no tensors.

        Raises:
            DeviceError, NcclError: A rank cannot take part. All ranks raise the same.
        """
        return self._devices.shared(self, self._members, kind, device)

    def close(self) -> None:
        """Close the collectives that `on_device` made, and release everything. All ranks call this."""
        self._devices.forget(self._members)
        super().close()
