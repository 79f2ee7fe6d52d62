from __future__ import annotations

from ppcore.core import Verdict
from ppcore.seat import Move, Seat
from tests.unit.network import LOGITS, WORKER, A, B, Network


def seated(stage: int) -> tuple[Network, Seat]:
    net = Network()
    net.begin()
    return net, Seat(net.cores[stage], WORKER)


def test_a_worker_parked_on_a_local_visit_stays() -> None:
    _, seat = seated(0)
    assert seat.ask(A, 0, passed=False) is Verdict.LOCAL
    assert seat.held is None
    assert seat.go_on() is Move.STAY


def test_a_local_visit_that_the_forward_is_beyond_can_never_be_served() -> None:
    net, seat = seated(0)
    assert seat.ask(A, 0, passed=True) is Verdict.NEVER
    assert seat.held == (A, 0)
    net.open_round("r")
    assert seat.go_on() is Move.STAY


def test_a_gated_access_is_tried_again_when_its_turn_opens() -> None:
    net, seat = seated(0)
    assert seat.ask(B, 1, passed=False) is Verdict.GATE
    assert seat.go_on() is Move.STAY
    net.open_round("r")
    assert seat.go_on() is Move.RETRY
    assert seat.retry(passed=False) is Verdict.ANSWER
    assert seat.held is None


def test_a_gated_access_keeps_its_number_through_every_retry() -> None:
    net, seat = seated(0)
    seat.ask(B, 2, passed=False)
    assert seat.decision is not None
    key = seat.decision.key
    for _ in range(2):
        net.open_round("r")
        seat.go_on()
    assert seat.decision.key == key
    assert net.touch(0, LOGITS).key.access == key.access + 1


def test_what_an_ended_request_never_reached_stays_held() -> None:
    net, seat = seated(0)
    seat.ask(B, 1, passed=False)
    net.cores[0].end("r")
    assert seat.go_on() is Move.STAY
    assert seat.held == (B, 1)


def test_a_worker_that_needs_a_later_stages_value_stays_until_the_next_round() -> None:
    net, seat = seated(0)
    number = net.pull(0, net.touch(0, B), B)
    seat.need([number])
    assert seat.go_on() is Move.STAY
    net.open_round("r")
    assert seat.go_on() is Move.WAIT
    assert seat.take() == (number,)
    assert seat.pulls == ()


def test_a_worker_that_needs_a_later_stages_value_gets_it_when_the_request_ends() -> None:
    net, seat = seated(0)
    seat.need([net.pull(0, net.touch(0, B), B)])
    net.cores[0].end("r")
    assert seat.go_on() is Move.WAIT


def test_pulls_come_before_a_held_access() -> None:
    net, seat = seated(0)
    seat.ask(LOGITS, 1, passed=False)
    seat.need([net.pull(0, net.touch(0, B), B)])
    net.open_round("r")
    assert seat.go_on() is Move.WAIT
    seat.take()
    assert seat.go_on() is Move.RETRY
