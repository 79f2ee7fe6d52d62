"""A link's lock: what is done with it held, and what after it is let go."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from ppcore.core import Available, Core
from ppcore.errors import Unreachable
from ppcore.messages import Done, Key, Never, Probe, Pull, Reply, Worker, parse, spell
from ppcore.runtime import codec, expression
from ppcore.runtime.link import Link
from ppcore.schedule import Schedule

A, B = "model.a.output", "model.b.output"
WORKER = Worker("r")


class Wire:
    """A transport that keeps what is sent, and whether the link's lock was held then."""

    link: Link

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.held: list[bool] = []

    def start(self, on_frame: object, on_death: object) -> None:
        pass

    def send(self, peer: int, text: str, payload: bytes | bytearray = b"") -> None:
        self.sent.append((peer, text))
        self.held.append(owned(self.link))

    def close(self, timeout_s: float = 2.0) -> bool:
        return True


def owned(link: Link) -> bool:
    return link._changed._is_owned()  # type: ignore[attr-defined]


class Served(Core):
    """A core that keeps what it is told of answers."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.answers: list[tuple[int, Reply | Never]] = []

    def sent_reply(self, peer: int, message: Reply | Never) -> None:
        super().sent_reply(peer, message)
        self.answers.append((peer, message))


@pytest.fixture
def link() -> Link:
    """The first of three stages, with a worker that has read A."""
    wire = Wire()
    core = Served(0, Schedule.build([[A], [B], ["model.logits"]]), {})
    found = wire.link = Link(core, wire, torch.device("cpu"), describe=lambda call: "a tensor")
    found.open_round([WORKER.request])
    core.start(WORKER)
    decision = core.access(WORKER, A, 0)
    core.served(WORKER, decision.place)
    found.publish(decision.key, A, torch.ones(2))
    return found


def test_messages_leave_with_the_lock_held_in_the_order_of_the_decisions(link: Link) -> None:
    link.failed(WORKER, {"text": "boom"})
    link.end(WORKER.request)
    link.say_done(WORKER.request)
    wire = link.transport
    assert isinstance(wire, Wire)
    words = [(peer, text.split()[0]) for peer, text in wire.sent]
    assert words == [(1, "failed"), (2, "failed"), (1, "done"), (2, "done")]
    assert all(wire.held)


@pytest.mark.parametrize(
    "message",
    [Pull(7, Key(WORKER, 0), A, expression.of_leaf(())), Probe(7, "f()")],
    ids=["pull", "probe"],
)
def test_what_a_peer_asks_for_is_made_without_the_lock_and_sent_with_it(
    link: Link, message: Pull | Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work: list[bool] = []
    pieces = codec.pieces

    def watched(value: object) -> object:
        at_work.append(owned(link))
        return pieces(value)

    monkeypatch.setattr(codec, "pieces", watched)
    link._on_frame(1, spell(message), memoryview(b""))
    wire = link.transport
    assert isinstance(wire, Wire)
    assert wire.sent == [(1, spell(Reply(7)))]
    assert (at_work, wire.held) == ([False], [True])
    assert link.core.answers == [(1, Reply(7))]  # type: ignore[attr-defined]


def test_what_cannot_be_made_is_answered_never(link: Link) -> None:
    link._on_frame(2, spell(Pull(3, Key(WORKER, 0), A, "not an expression")), memoryview(b""))
    wire = link.transport
    assert isinstance(wire, Wire)
    [(peer, text)] = wire.sent
    answer = parse(text)
    assert peer == 2 and isinstance(answer, Never) and answer.number == 3
    assert answer.reason.startswith("failed: ")


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [
        ("failed: TypeError: missing 'x'", TypeError, "missing 'x'"),
        ("failed: Odd: message", Unreachable, "Odd: message"),
        ("failed: print: message", Unreachable, "print: message"),
        ("unreachable: its visit never came", Unreachable, "its visit never came"),
    ],
)
def test_what_failed_on_the_owner_is_raised_with_its_type(
    link: Link, reason: str, kind: type[Exception], text: str
) -> None:
    link._refused[7] = reason
    with pytest.raises(kind) as caught:
        link.values([7])
    assert (type(caught.value), str(caught.value)) == (kind, text)


def test_a_wait_against_the_rule_is_refused(link: Link) -> None:
    core = link.core
    decision = core.access(WORKER, B, 0)
    number, effects = core.pull(decision.key, B, "", 1, Available(0, 1))
    assert effects
    with pytest.raises(AssertionError, match="a wait against the rule"):
        link.wait([number])


def test_an_error_elsewhere_ends_a_worker_when_it_has_got_as_far(link: Link) -> None:
    link._on_frame(1, 'failed ["r","",5,"{\\"text\\":\\"boom\\"}"]', memoryview(b""))
    assert link.abandoned(WORKER) is None
    assert link.abandoned(WORKER, at_once=True) == {"text": "boom"}
    link.end(WORKER.request)
    assert link.abandoned(WORKER) == {"text": "boom"}
    assert link.abandoned(Worker("other"), at_once=True) is None


def test_a_rank_that_has_left_hears_nothing_more(link: Link) -> None:
    link.close()
    link._on_death(1, "it left")
    link._on_frame(2, spell(Done(WORKER.request)), memoryview(b""))
    assert link.core.dead == set()
    assert link.core._requests[WORKER.request].done == set()
