"""Who is let into a column: the handshake, and where a rank listens."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ppcore.runtime.transport import meeting
from ppcore.runtime.transport.meeting import Meeting, admit, dial

KEY, OTHER = b"k" * 32, b"o" * 32


def soon() -> float:
    return 5.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection: the dialling end (stage 2) and the admitting one (stage 0)."""
    dialling, admitting = socket.socketpair()
    yield dialling, admitting
    dialling.close()
    admitting.close()


class Admission(threading.Thread):
    """Stage 0 admits who comes."""

    def __init__(self, connected: socket.socket, key: bytes = KEY) -> None:
        super().__init__(daemon=True)
        self.connected, self.key = connected, key
        self.found: int | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.found = admit(self.connected, self.key, 0, soon)
        except (OSError, ValueError) as error:
            self.found = error
            self.connected.close()

    def result(self) -> int | Exception | None:
        self.join(20)
        return self.found


def test_two_ranks_that_know_the_secret_find_each_other(ends: tuple) -> None:
    admission = Admission(ends[1])
    dial(ends[0], KEY, 2, 0, soon)
    assert admission.result() == 2


def test_who_dials_without_the_secret_is_refused_by_both(ends: tuple) -> None:
    admission = Admission(ends[1])
    with pytest.raises(ValueError, match="does not know the secret"):
        dial(ends[0], OTHER, 2, 0, soon)
    ends[0].close()
    assert isinstance(admission.result(), OSError)


def test_a_wrong_proof_is_refused(ends: tuple) -> None:
    admission = Admission(ends[1])
    ends[0].sendall(meeting._HELLO.pack(meeting._MAGIC, 2, bytes(32)) + bytes(32))
    found = admission.result()
    assert isinstance(found, ValueError) and "does not know the secret" in str(found)


def test_an_answer_sent_back_is_no_proof(ends: tuple) -> None:
    # Without roles in what is signed, the admitting rank's own proof would open its door.
    admission = Admission(ends[1])
    ends[0].sendall(meeting._HELLO.pack(meeting._MAGIC, 2, bytes(32)))
    answer = b""
    while len(answer) < 64:
        answer += ends[0].recv(64 - len(answer))
    ends[0].sendall(answer[32:])
    assert isinstance(admission.result(), ValueError)


@pytest.mark.parametrize("stage", [0, 1], ids=["itself", "an earlier stage"])
def test_only_a_later_stage_dials(ends: tuple, stage: int) -> None:
    ends[0].sendall(meeting._HELLO.pack(meeting._MAGIC, stage, bytes(32)))
    with pytest.raises(ValueError, match="not a rank that dials here"):
        admit(ends[1], KEY, 1, soon)


def test_who_speaks_something_else_is_refused(ends: tuple) -> None:
    ends[0].sendall(b"GET / HTTP/1.1\r\nHost: somewhere over the rainbow\r\n\r\n")
    with pytest.raises(ValueError, match="not a rank"):
        admit(ends[1], KEY, 0, soon)


def test_who_hangs_up_is_forgotten(ends: tuple) -> None:
    ends[0].sendall(b"ppcore")
    ends[0].close()
    with pytest.raises(ConnectionError, match="hung up"):
        admit(ends[1], KEY, 0, soon)


# --- where a rank listens -------------------------------------------------------------------------


def test_on_one_host_ranks_meet_where_only_their_user_can_enter() -> None:
    here = Meeting(0, ["m", "m", "m"], KEY, None)
    try:
        addresses = here.open()
        assert list(addresses) == [True]  # no port is opened
        folder = Path(addresses[True]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.stat().st_uid == os.geteuid()
    finally:
        here.close()
    assert not folder.exists()


def test_between_hosts_the_port_is_on_the_named_interface_and_on_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    here = Meeting(0, ["m", "n"], KEY, "192.0.2.1")
    try:
        ((host, port),) = here.open().values()
        assert here.problem == ""
        assert (host, port > 0) == ("127.0.0.1", True)
    finally:
        here.close()


def test_no_port_is_opened_on_every_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    # What vLLM says where it finds no address.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    here = Meeting(0, ["m", "n"], KEY, "0.0.0.0")
    try:
        assert here.open() == {}
        assert here.problem.startswith("stage 0: cannot listen: ")
    finally:
        here.close()


def test_an_interface_that_does_not_exist_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    with pytest.raises(OSError):
        meeting.interface_address(None)


# --- a meeting ------------------------------------------------------------------------------------


def meet(stages: list[Meeting]) -> list[dict[int, socket.socket]]:
    """All stages meet, each on a thread; peer -> socket of each."""
    addresses = [stage.open() for stage in stages]
    found: list[dict[int, socket.socket]] = [{} for _ in stages]

    def run(number: int) -> None:
        found[number] = stages[number].meet(addresses)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for stage in stages:
        stage.close()
    return found


def test_every_pair_of_a_column_gets_a_socket_and_strangers_get_none() -> None:
    # Stages 0 and 1 share a host, 2 is elsewhere: both kinds of socket.
    machines = ["m", "m", "n"]
    stages = [Meeting(stage, machines, KEY, "127.0.0.1") for stage in range(3)]
    opened = stages[0].open

    def with_strangers() -> dict:
        addresses = opened()
        for near, family in ((True, socket.AF_UNIX), (False, socket.AF_INET)):
            for _ in range(3):
                stranger = socket.socket(family, socket.SOCK_STREAM)
                stranger.connect(addresses[near])
                strangers.append(stranger)
        strangers[0].sendall(bytes(200))
        return addresses

    strangers: list[socket.socket] = []
    stages[0].open = with_strangers  # type: ignore[method-assign]
    found = meet(stages)
    assert [stage.problem for stage in stages] == ["", "", ""]
    for one in range(3):
        for other in range(one):
            found[one][other].sendall(bytes([one, other]))
            assert found[other][one].recv(2) == bytes([one, other])
    for connected in [*strangers, *(s for sockets in found for s in sockets.values())]:
        connected.close()


def test_a_pair_that_cannot_connect_is_a_problem_on_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "DEADLINE_S", 0.5)
    stages = [Meeting(0, ["m", "m"], KEY, None), Meeting(1, ["m", "m"], OTHER, None)]
    assert meet(stages) == [{}, {}]
    assert "stage 1 did not connect" in stages[0].problem
    assert "cannot reach stage 0: it does not know the secret" in stages[1].problem
