"""`SocketEndpoint`: where the ranks of other hosts connect to this rank, and from where it connects to them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from hvdlite.launcher_link.link import Address, connect
from hvdlite.launcher_link.server import ControlConnection, ControlServer
from hvdlite.launcher_link.session import Message
from hvdlite.ranks.network import nearest_first, own_addresses

_DIAL_SECONDS = 3.0
"""How long one address is tried. A firewall that answers nothing takes so long."""
_LOOK_SECONDS = 1.0
"""How often strangers that say nothing are looked for."""
_IDLE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 60_000}
"""After so many seconds (the last: milliseconds) without a word of the other host's kernel, a connection has ended. MPI's
launchers, which know sooner, come first."""


@dataclass(frozen=True)
class Card:
    """What a rank tells the others of its endpoint.

    Attributes:
        name: A name that no other endpoint has.
        addresses: Its host's addresses, with the sizes of their networks.
        port: The port at which it listens.
        problem: Why nobody can connect to it; empty if all is well.
    """

    name: str
    addresses: list[str]
    port: int
    problem: str = ""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: str) -> Card:
        return cls(**json.loads(data))


class SocketEndpoint:
    """One rank's end of its connections to the ranks of other hosts.

    A thread of it accepts connections. It sleeps in the kernel, and closes connections from outside of the job.

    Args:
        secret: What the ranks of this job alone know.
        ports: The ports at which it may listen; 0 is any free one.
        only: See `own_addresses`.
        addresses: The addresses of this host, as `own_addresses` gives them; None to look for them.

    Attributes:
        card: What other ranks must know.
    """

    def __init__(
        self,
        secret: str,
        ports: Iterable[int] = (0,),
        only: Sequence[str] = (),
        addresses: Sequence[str] | None = None,
    ) -> None:
        self._secret = secret
        self._arrived: dict[tuple[str, int], socket.socket] = {}
        self._news = threading.Condition()
        self._reached: dict[str, str] = {}  # by the name of an endpoint, the address at which this rank has found it
        self._server: ControlServer | None = None
        self._woken, self._wake = os.pipe()
        self._closed = False
        name = secrets.token_hex(8)
        try:
            found = own_addresses(only) if addresses is None else list(addresses)
            self._server = ControlServer("", ports, secret)
        except OSError as error:
            self.card = Card(name, [], 0, str(error))
            return
        self.card = Card(name, found, self._server.address.port)
        self._server.watch(self._woken)
        threading.Thread(target=self._accept, args=(self._server,), name="hvdlite-accept", daemon=True).start()

    @property
    def strangers(self) -> int:
        """How many connections from outside of the job were closed."""
        return 0 if self._server is None else self._server.dropped

    def give_up(self, problem: str) -> None:
        """Note why nobody can connect: no group tries it any more."""
        self.card = Card(self.card.name, self.card.addresses, self.card.port, self.card.problem or problem)

    def dial(self, card: Card, group: str, rank: int) -> socket.socket:
        """Connect to another endpoint, and prove both ends to each other.

        Args:
            card: That of the other endpoint.
            group: The group for which the connection is.
            rank: This rank in the group.

        Raises:
            OSError: It cannot be reached. The text says what was tried.
        """
        tried = []
        reached = self._reached.get(card.name)
        for host in [reached] if reached else nearest_first(card.addresses, self.card.addresses):
            try:
                stream = self._dial(Address(host, card.port, self._secret), card.name, group, rank)
            except OSError as error:
                tried.append(f"{host} port {card.port}: {error.strerror or error}")
                continue
            self._reached[card.name] = host
            return stream
        raise OSError("; ".join(tried))

    def _dial(self, address: Address, name: str, group: str, rank: int) -> socket.socket:
        channel = connect(address, _DIAL_SECONDS)
        try:
            channel.limit(_DIAL_SECONDS)
            channel.send("pair", to=name, group=group, rank=rank)
            while not channel.receive():  # an "ok": a rank that this was not for closes the connection
                pass
        except BaseException:
            channel.close()
            raise
        return _for_data(channel.detach())

    def wait_for(self, group: str, rank: int, until: float, check: Callable[[], object]) -> socket.socket:
        """Return the connection of a rank of a group that dials this one.

        Args:
            group, rank: Which.
            until: The time of `time.monotonic` until which to wait.
            check: Called now and then: it raises if the wait can never end.

        Raises:
            TimeoutError: Nobody has come.
        """
        with self._news:
            while (group, rank) not in self._arrived:
                check()
                if time.monotonic() > until:
                    raise TimeoutError("it has not connected")
                self._news.wait(0.1)
            return self._arrived.pop((group, rank))

    def close(self) -> None:
        """Accept no more connections."""
        if not self._closed:
            self._closed = True
            os.write(self._wake, b"x")
            if self._server is None:
                self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._woken)
        os.close(self._wake)

    def _accept(self, server: ControlServer) -> None:
        while not self._closed:
            messages, _ = server.poll(_LOOK_SECONDS)
            for connection, message in messages:
                if message.kind != "gone":
                    self._take(server, connection, message)
        server.close()
        self._close_pipe()

    def _take(self, server: ControlServer, connection: ControlConnection, message: Message) -> None:
        fields = message.fields
        if message.kind != "pair" or fields["to"] != self.card.name:
            connection.refuse()
            return
        connection.send("ok")
        stream = server.release(connection)
        if connection.session.outgoing:  # a few bytes, that a new connection always takes
            stream.close()
            return
        with self._news, contextlib.suppress(OSError):
            self._arrived[fields["group"], fields["rank"]] = _for_data(stream)
            self._news.notify_all()


def _for_data(stream: socket.socket) -> socket.socket:
    """Prepare an authenticated connection for data: its calls wait without a limit, and sleep in the kernel."""
    stream.settimeout(None)
    for name, value in _IDLE.items():
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return stream
