"""Failures, the end of a request, and what can be seen: stories over two or three cores."""

from __future__ import annotations

import itertools

import pytest

from ppcore.messages import Worker
from tests.unit.network import LOGITS, THREE, WORKER, A, B, Network

ORDERS = list(itertools.permutations(range(3)))


@pytest.fixture
def net() -> Network:
    found = Network()
    found.begin()
    return found


# --- failure ----------------------------------------------------------------------------------


def test_a_worker_that_raises_ends_on_every_rank_with_that_error() -> None:
    net = Network(THREE)
    net.begin()
    net.do(1, net.cores[1].fail(WORKER, "boom"))
    net.settle()
    assert net.abandoned == [{WORKER: "boom"}, {}, {WORKER: "boom"}]


def test_a_worker_that_raises_refuses_whoever_waits_for_it(net: Network) -> None:
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    net.do(0, net.cores[0].fail(WORKER, "boom"))
    net.settle()
    assert number in net.refused[1]


def test_the_death_of_a_peer_ends_every_wait_on_it_and_names_it() -> None:
    net = Network(THREE)
    net.begin()
    on_dead = net.pull(2, net.touch(2, A), A)
    on_living = net.pull(2, net.touch(2, B), B)
    probe, effects = net.cores[2].probe(0, "f()")
    net.do(2, effects)
    net.kill(0)
    assert set(net.refused[2]) == {on_dead, probe}
    assert all("stage 0 is gone (connection reset)" in why for why in net.refused[2].values())
    net.touch(1, A)
    net.read(1, B, "b")
    net.deliver(2, 1)
    net.deliver(1, 2)
    assert net.landed[2] == {on_living: "b"}


def test_whoever_asks_a_dead_peer_is_refused_at_once(net: Network) -> None:
    net.kill(0)
    number = net.pull(1, net.touch(1, A), A)
    assert net.refused[1][number].startswith("died: stage 0 is gone")
    assert net.under_way() == []


def test_nothing_is_kept_for_the_dead(net: Network) -> None:
    net.read(0, A, "a")
    net.kill(1)
    assert net.entries(0) == 0
    net.touch(0, LOGITS)
    net.open_round("r", stages=[0])
    net.read(0, A, "a")
    assert net.entries(0) == 0


def test_a_request_drains_without_the_dead() -> None:
    net = Network(THREE)
    net.begin()
    net.end(1, 2)
    net.kill(0)
    for source, target in ((1, 2), (2, 1)):
        net.deliver(source, target)
    assert net.dropped[1:] == [["r"], ["r"]]


def test_a_death_is_noticed_once(net: Network) -> None:
    net.pull(1, net.touch(1, A), A)
    assert len(net.cores[1].peer_died(0, "gone")) == 1
    assert net.cores[1].peer_died(0, "gone again") == []


# --- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end"])
def test_a_request_drains_in_whatever_order_the_ranks_are_done(order: tuple, late: bool) -> None:
    net = Network(THREE)
    net.begin()
    net.read(0, A, "a")
    net.pull(2, net.touch(2, A), A)
    for stage in order:
        net.end(stage)
        if not late:
            net.settle()
    net.settle()
    assert net.dropped == [["r"]] * 3
    assert net.at_rest()


def test_a_rank_that_is_done_keeps_what_its_peers_may_still_pull(net: Network) -> None:
    net.read(0, A, "a")
    net.end(0)
    net.settle()
    assert (net.entries(0), net.dropped[0]) == (1, [])
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    assert net.landed[1] == {number: "a"}
    net.end(1)
    net.settle()
    assert net.at_rest()


def test_a_peer_that_is_done_frees_what_was_kept_for_it(net: Network) -> None:
    net.read(0, A, "a")
    net.end(1)
    net.settle()
    assert net.entries(0) == 0


def test_done_is_said_once(net: Network) -> None:
    net.end(0)
    assert net.cores[0].say_done("r") == []
    assert net.under_way() == ["done"]


def test_a_rank_that_is_done_refuses_what_it_never_read(net: Network) -> None:
    net.end(0)
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    assert number in net.refused[1]


def test_a_pull_that_waits_when_its_owner_is_done_is_refused(net: Network) -> None:
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    net.end(0)
    net.settle()
    assert number in net.refused[1]


def test_one_request_drains_while_another_goes_on() -> None:
    net = Network()
    other = Worker("s")
    net.open_round("r", "s")
    for core in net.cores:
        core.start(WORKER)
        core.start(other)
    net.read(0, A, "of s", worker=other)
    net.end(0, 1)
    net.settle()
    assert [core.requests for core in net.cores] == [["s"], ["s"]]
    assert net.entries(0) == 1


# --- which leaves each stage ships ------------------------------------------------------------


def test_what_a_stage_holds_is_told_to_the_later_ones_only() -> None:
    net = Network(THREE)
    net.begin()
    net.do(1, net.cores[1].say_held("r", "mine"))
    assert [(source, target) for source, target, _ in net.said] == [(1, 2)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_stage_knows_what_is_held_once_every_earlier_one_has_said(first: int) -> None:
    net = Network(THREE)
    net.begin()
    net.do(first, net.cores[first].say_held("r", f"of {first}"))
    net.settle()
    assert net.cores[2].held("r") is None
    assert net.cores[2].unheard("r") == [1 - first]
    net.do(1 - first, net.cores[1 - first].say_held("r", f"of {1 - first}"))
    net.settle()
    assert net.cores[2].held("r") == {0: "of 0", 1: "of 1"}


def test_the_first_stage_waits_for_nobody(net: Network) -> None:
    assert net.cores[0].held("r") == {}


def test_a_dead_stage_is_not_waited_for(net: Network) -> None:
    assert net.cores[1].held("r") is None
    net.kill(0)
    assert net.cores[1].held("r") == {}


# --- what can be seen -------------------------------------------------------------------------


def test_waits_tell_who_waits_for_what_from_whom(net: Network) -> None:
    net.pull(1, net.touch(1, A), A, "last row")
    net.settle()
    (asking,) = net.cores[1].waits()
    assert (
        asking
        == "stage 1 (round 0) waits for 'model.a.output' (r#0, last row) from stage 0, due in turn 0"
    )
    (asked,) = net.cores[0].waits()
    assert asked.startswith("stage 1 waits for 'model.a.output' (r#0) from stage 0")
    net.read(0, A, "a")
    net.settle()
    assert net.cores[0].waits() == net.cores[1].waits() == []


def test_every_message_is_counted(net: Network) -> None:
    net.read(0, A, "a")
    net.pull(1, net.touch(1, A), A)
    net.end(0, 1)
    net.settle()
    sent = sum(core.counters.messages for core in net.cores)
    served = sum(text.startswith("reply") for _, _, text in net.said)
    assert sent + served == len(net.said)


def test_done_said_again_of_a_drained_request_does_not_bring_it_back(net: Network) -> None:
    for stage in (0, 1):
        net.cores[stage].end("r")
        net.do(stage, net.cores[stage].say_done("r"))
    net.settle()
    assert net.cores[0].requests == []
    assert net.cores[0].say_done("r") == []
    assert net.cores[0].requests == []


def test_a_pull_that_waits_when_its_rank_is_done_is_answered_all_the_same(net: Network) -> None:
    number = net.pull(1, net.touch(1, A), A)
    net.end(1)
    net.settle()
    assert number in net.refused[1]
    net.end(0)
    net.settle()
    assert net.at_rest()


def test_a_request_is_not_drained_while_an_answer_is_under_way(net: Network) -> None:
    net.read(0, A, "a")
    net.pull(1, net.touch(1, A), A)
    net.end(0, 1)
    net.deliver(0, 1)
    assert net.dropped[1] == ["r"] and not net.cores[1].drained()
    net.settle()
    assert net.cores[1].drained()
