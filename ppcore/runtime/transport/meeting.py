"""How the ranks of a column come to have a socket to each other.

Three gathers over gloo frame it: who is on which host, and a share of the column's secret; where each
rank listens; and what went wrong where. In between the later stage of a pair dials the earlier.

*Who may connect.* On one host the ranks meet at a Unix socket in a directory that only their user can
enter. Between hosts they meet at a TCP port, on the interface that gloo uses and on no other. Either way
both ends prove that they know the secret (HMAC-SHA256 over both ends' fresh nonces, their stages and
their roles, compared in constant time) before anything else is read; who can't is dropped. The secret
never leaves gloo and is forgotten afterwards. What follows on the socket is neither encrypted nor signed,
as with gloo: who can alter the packets between the hosts is not kept out.

*No two verdicts.* Every rank takes part in each gather whatever has failed on it, and the sockets are used
only if no rank of the world has a complaint.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..ranks import boot_id, gather
from .base import start_thread

#: How long the ranks of a column may take to connect, in seconds.
DEADLINE_S = 10.0

#: Strangers who may be in the middle of a handshake at the same time.
_ADMISSIONS = 64

_MAGIC = b"ppcore direct 1\n"
_NONCE = 32
_PROOF = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"<{len(_MAGIC)}sI{_NONCE}s")

#: The ioctl that asks for an interface's IPv4 address (linux/sockios.h).
_SIOCGIFADDR = 0x8915


def negotiate(ranks: list[int], host: str | None) -> tuple[dict[int, socket.socket], list[str]]:
    """Connect this rank to every other stage of its column.

    Collective over the world.

    Args:
        ranks: the global ranks of this rank's column, in stage order.
        host: this host's address, see `connect`.

    Returns:
        Peer stage -> a connected, proven socket; and what went wrong anywhere in the world. If anything
        did, there are no sockets.
    """
    group = dist.new_group(backend="gloo")
    stage = ranks.index(dist.get_rank())

    try:
        everyone = gather((machine(), secrets.token_bytes(32)), group)
        machines = [everyone[rank][0] for rank in ranks]
        key = hashlib.sha256(b"".join(everyone[rank][1] for rank in ranks)).digest()
        meeting = Meeting(stage, machines, key, host)
        try:
            everywhere = gather(meeting.open(), group)
            sockets = meeting.meet([everywhere[rank] for rank in ranks])
        finally:
            meeting.close()
        problems = [problem for problem in gather(meeting.problem, group) if problem]
    finally:
        dist.destroy_process_group(group)
    if problems:
        for found in sockets.values():
            found.close()
        sockets = {}
    return sockets, problems


def machine() -> str:
    """What two processes have in common that see the same files under the same kernel."""
    try:
        return f"{boot_id()} {os.stat('/proc/self/ns/mnt').st_ino}"
    except OSError:
        return secrets.token_hex(16)  # alone on its machine: TCP to everyone


def interface_address(host: str | None) -> str:
    """This host's IPv4 address on the network that gloo uses.

    Raises:
        OSError: the interface or the name has none.
    """
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[20:24])
    found = socket.gethostbyname(host or socket.gethostname())
    if ipaddress.ip_address(found).is_unspecified:
        raise OSError(f"{found} is every interface and no address")
    return found


class Meeting:
    """One rank's part in a negotiation: its listeners and its sockets.

    Args:
        stage: this rank's stage.
        machines: what `machine` gave on every stage.
        key: the secret of the column.
        host: this host's address, see `connect`.
    """

    def __init__(self, stage: int, machines: list[str], key: bytes, host: str | None) -> None:
        self.stage = stage
        #: What went wrong, or nothing.
        self.problem = ""
        self._machines = machines
        self._key = key
        self._host = host
        self._folder: tempfile.TemporaryDirectory | None = None
        self._listeners: list[socket.socket] = []
        self._sockets: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._admissions = threading.BoundedSemaphore(_ADMISSIONS)
        self._end = 0.0

    def open(self) -> dict[bool, Any]:
        """Listen for the later stages; the addresses, by whether the caller is on this machine."""
        here = self._machines[self.stage]
        addresses: dict[bool, Any] = {}
        try:
            for near in {found == here for found in self._machines[self.stage + 1 :]}:
                addresses[near] = self._listen_near() if near else self._listen_far()
        except OSError as error:
            self._failed(f"cannot listen: {error}")
        return addresses

    def _listen_near(self) -> str:
        # A Unix socket's path has at most 107 bytes. The folder has mode 0700.
        short = len(os.fsencode(tempfile.gettempdir())) < 80
        self._folder = tempfile.TemporaryDirectory(prefix="ppcore-", dir=None if short else "/tmp")
        path = os.path.join(self._folder.name, "meet")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.bind(path)
        listener.listen(_ADMISSIONS)
        return path

    def _listen_far(self) -> tuple[str, int]:
        listener = socket.create_server((interface_address(self._host), 0), backlog=_ADMISSIONS)
        self._listeners.append(listener)
        return listener.getsockname()[:2]

    def meet(self, addresses: list[dict[bool, Any]]) -> dict[int, socket.socket]:
        """Dial the earlier stages and admit the later ones; peer stage -> socket.

        No order of waits has a cycle: stage 0 dials nobody, and who dials stage s waits only for s to
        have reached the stages before it.
        """
        self._end = time.monotonic() + DEADLINE_S
        for listener in self._listeners:
            start_thread(f"meet-{self.stage}", lambda found=listener: self._accept(found))
        for peer in range(self.stage):
            try:
                self._dial(peer, addresses[peer])
            except (OSError, ValueError) as error:
                self._failed(f"cannot reach stage {peer}: {error}")
        later = set(range(self.stage + 1, len(self._machines)))
        with self._changed:
            self._changed.wait_for(lambda: later <= self._sockets.keys(), self._left())
            for peer in sorted(later - self._sockets.keys()):
                self._failed(f"stage {peer} did not connect within {DEADLINE_S:.0f} s")
            self._end = 0.0  # whoever comes now is too late
            return dict(self._sockets)

    def close(self) -> None:
        """Stop listening; the sockets stay."""
        for listener in self._listeners:
            try:
                listener.shutdown(socket.SHUT_RDWR)  # ends a thread's `accept`
            except OSError:
                pass
            listener.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _failed(self, problem: str) -> None:
        self.problem = self.problem or f"stage {self.stage}: {problem}"

    def _left(self) -> float:
        """Seconds until the deadline; what a socket waits at most."""
        return max(0.001, self._end - time.monotonic())

    def _dial(self, peer: int, addresses: dict[bool, Any]) -> None:
        near = self._machines[peer] == self._machines[self.stage]
        if near not in addresses:
            raise OSError("it does not listen")
        if near:
            dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            dialled = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            dialled.settimeout(self._left())
            dialled.connect(addresses[near])
            dial(dialled, self._key, self.stage, peer, self._left)
        except BaseException:
            dialled.close()
            raise
        self._keep(peer, dialled)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                came, _ = listener.accept()
            except OSError:
                return  # closed
            if self._admissions.acquire(blocking=False):
                start_thread(f"admit-{self.stage}", lambda found=came: self._admit(found))
            else:
                came.close()

    def _admit(self, came: socket.socket) -> None:
        try:
            peer = admit(came, self._key, self.stage, self._left)
            self._keep(peer, came)
        except (OSError, ValueError):
            came.close()  # a stranger; the peer itself is missed at the deadline
        finally:
            self._admissions.release()

    def _keep(self, peer: int, connected: socket.socket) -> None:
        with self._changed:
            if peer in self._sockets or not 0 <= peer < len(self._machines) or not self._end:
                raise ValueError(f"nobody waits for stage {peer}")
            connected.settimeout(None)
            self._sockets[peer] = connected
            self._changed.notify_all()


# --- the handshake ------------------------------------------------------------------------------


def dial(
    connected: socket.socket, key: bytes, stage: int, peer: int, left: Callable[[], float]
) -> None:
    """Prove to ``peer`` that this is ``stage``, once it has proven that it is ``peer``.

    Raises:
        ValueError: it could not.
        OSError: it left, or took longer than ``left()`` seconds.
    """
    mine = secrets.token_bytes(_NONCE)
    connected.settimeout(left())
    connected.sendall(_HELLO.pack(_MAGIC, stage, mine))
    theirs = _read(connected, _NONCE, left)
    claimed = _read(connected, _PROOF, left)
    if not hmac.compare_digest(claimed, _proof(key, b"admits", stage, peer, mine, theirs)):
        raise ValueError("it does not know the secret")
    connected.sendall(_proof(key, b"dials", stage, peer, mine, theirs))


def admit(connected: socket.socket, key: bytes, stage: int, left: Callable[[], float]) -> int:
    """The stage of who dialled ``stage``, once both have proven themselves.

    Raises: as `dial`.
    """
    magic, peer, theirs = _HELLO.unpack(_read(connected, _HELLO.size, left))
    if magic != _MAGIC or peer <= stage:
        raise ValueError("not a rank that dials here")
    mine = secrets.token_bytes(_NONCE)
    connected.settimeout(left())
    connected.sendall(mine + _proof(key, b"admits", peer, stage, theirs, mine))
    claimed = _read(connected, _PROOF, left)
    if not hmac.compare_digest(claimed, _proof(key, b"dials", peer, stage, theirs, mine)):
        raise ValueError("it does not know the secret")
    return peer


def _proof(key: bytes, role: bytes, dialler: int, admitter: int, *nonces: bytes) -> bytes:
    """What only who knows the key can say; the role keeps an answer from being sent back as one."""
    said = _MAGIC + role + struct.pack("<II", dialler, admitter) + b"".join(nonces)
    return hmac.digest(key, said, "sha256")


def _read(connected: socket.socket, count: int, left: Callable[[], float]) -> bytes:
    """Exactly so many bytes."""
    found = b""
    while len(found) < count:
        connected.settimeout(left())
        more = connected.recv(count - len(found))
        if not more:
            raise ConnectionError("it hung up")
        found += more
    return found
