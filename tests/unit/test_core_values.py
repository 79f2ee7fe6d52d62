"""Pulls, what is published and kept, and what never comes: stories over two or three cores."""

from __future__ import annotations

import pytest

from ppcore.core import ALWAYS, STATIC
from ppcore.messages import Key, Reply, Worker
from tests.unit.network import LOGITS, THREE, WORKER, A, B, Network


@pytest.fixture
def net() -> Network:
    found = Network()
    found.begin()
    return found


# --- pulls ------------------------------------------------------------------------------------


def test_a_pull_after_the_value_is_served_at_once(net: Network) -> None:
    net.read(0, A, "a")
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    assert net.landed[1] == {number: "a"}


def test_a_pull_before_the_value_waits_at_the_owner(net: Network) -> None:
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    assert (net.landed[1], net.cores[0].pending(), net.cores[1].pending()) == ({}, 1, 1)
    net.read(0, A, "a")
    net.settle()
    assert net.landed[1] == {number: "a"}
    assert (net.cores[0].pending(), net.cores[1].pending()) == (0, 0)


def test_the_expression_travels_with_the_pull(net: Network) -> None:
    net.read(0, A, "a")
    number = net.pull(1, net.touch(1, A), A, "last row")
    net.settle()
    assert net.landed[1] == {number: "last row of a"}


def test_a_value_forced_twice_is_asked_for_once(net: Network) -> None:
    decision = net.touch(1, A)
    numbers = {net.pull(1, decision, A) for _ in range(3)}
    assert len(numbers) == 1
    assert [text.split()[0] for _, _, text in net.said] == ["pull"]
    assert net.cores[1].counters.pulls == 1


def test_another_expression_of_the_same_value_is_another_pull(net: Network) -> None:
    decision = net.touch(1, A)
    assert net.pull(1, decision, A, "x") != net.pull(1, decision, A, "y")


def test_two_pulls_that_wait_for_one_value_are_both_answered(net: Network) -> None:
    decision = net.touch(1, A)
    first, second = net.pull(1, decision, A, "x"), net.pull(1, decision, A, "y")
    net.settle()
    net.read(0, A, "a")
    net.settle()
    assert net.landed[1] == {first: "x of a", second: "y of a"}


def test_a_pull_may_arrive_before_the_owner_has_heard_of_the_request() -> None:
    net = Network()
    net.open_round("r", stages=[1])
    net.cores[1].start(WORKER)
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    net.open_round("r", stages=[0])
    net.cores[0].start(WORKER)
    net.read(0, A, "a")
    net.settle()
    assert net.landed[1] == {number: "a"}


def test_a_value_reaches_every_stage_that_asks() -> None:
    net = Network(THREE)
    net.begin()
    net.read(1, B, "b")
    numbers = {stage: net.pull(stage, net.touch(stage, B), B) for stage in (0, 2)}
    net.settle()
    assert net.landed[0] == {numbers[0]: "b"}
    assert net.landed[2] == {numbers[2]: "b"}


def test_requests_keep_their_values_apart() -> None:
    net = Network()
    other = Worker("s")
    net.open_round("r", "s")
    for core in net.cores:
        core.start(WORKER)
        core.start(other)
    net.read(0, A, "of r")
    net.read(0, A, "of s", worker=other)
    numbers = [net.pull(1, net.touch(1, A, worker=worker), A) for worker in (WORKER, other)]
    net.settle()
    assert [net.landed[1][number] for number in numbers] == ["of r", "of s"]


def test_a_parameter_is_served_without_any_request(net: Network) -> None:
    key = Key(WORKER, STATIC)
    number, effects = net.cores[1].pull(key, "model.a.weight", "rows", 0, ALWAYS)
    net.do(1, effects)
    net.settle()
    assert net.landed[1] == {number: "rows of model.a.weight"}


def test_a_probe_is_answered_with_the_calls_structure(net: Network) -> None:
    number, effects = net.cores[0].probe(1, "f(x)")
    net.do(0, effects)
    net.settle()
    assert net.landed[0] == {number: "structure of f(x)"}
    assert net.cores[0].counters.pulls == 0


def test_a_reply_to_nothing_that_was_asked_is_ignored(net: Network) -> None:
    assert net.cores[0].take(1, Reply(99), "x") == []


def test_a_reply_that_comes_twice_lands_once(net: Network) -> None:
    number = net.pull(1, net.touch(1, A), A)
    assert len(net.cores[1].take(0, Reply(number), "a")) == 1
    assert net.cores[1].take(0, Reply(number), "b") == []


# --- what is kept, and until when -------------------------------------------------------------


def test_a_published_value_counts_its_bytes(net: Network) -> None:
    net.read(0, A, "aaaa")
    assert net.cores[0].buffered() == (1, 4)


def test_a_single_stage_publishes_nothing() -> None:
    net = Network([[A, B]])
    net.begin()
    assert not net.cores[0].asked_for(Key(WORKER, 0))
    net.read(0, A, "a")
    assert net.entries(0) == 0


def test_a_release_frees_the_value(net: Network) -> None:
    decision = net.read(0, A, "a")
    net.release(1, 0, decision.key)
    net.settle()
    assert net.cores[0].buffered() == (0, 0)


def test_a_value_lives_until_the_last_peer_has_released_it() -> None:
    net = Network(THREE)
    net.begin()
    key = net.read(0, A, "a").key
    net.release(1, 0, key)
    net.settle()
    assert net.entries(0) == 1
    net.release(2, 0, key)
    net.settle()
    assert net.entries(0) == 0


def test_a_pulled_value_stays_until_it_is_released(net: Network) -> None:
    decision = net.read(0, A, "a")
    net.pull(1, net.touch(1, A), A)
    net.settle()
    assert net.entries(0) == 1
    net.release(1, 0, decision.key)
    net.settle()
    assert net.entries(0) == 0


def test_a_value_released_by_everyone_before_it_is_read_is_never_kept(net: Network) -> None:
    key = net.touch(1, A).key
    net.release(1, 0, key)
    net.settle()
    assert not net.cores[0].asked_for(key)
    net.read(0, A, "a")
    assert net.entries(0) == 0


def test_a_waiting_pull_is_answered_though_its_peer_has_released_the_value(net: Network) -> None:
    # Met in the simulator: a wait outlasted its deadline, so the value was released unanswered.
    decision = net.touch(1, A)
    number = net.pull(1, decision, A)
    net.release(1, 0, decision.key)
    net.settle()
    assert net.cores[0].asked_for(decision.key)
    net.read(0, A, "a")
    net.settle()
    assert net.landed[1] == {number: "a"}
    assert net.entries(0) == 0
    assert net.cores[1].pending() == 0


def test_a_value_released_early_by_one_peer_is_kept_for_the_other() -> None:
    net = Network(THREE)
    net.begin()
    key = net.touch(1, A).key
    net.release(1, 0, key)
    net.settle()
    assert net.cores[0].asked_for(key)
    net.read(0, A, "a")
    number = net.pull(2, net.touch(2, A), A)
    net.settle()
    assert net.landed[2] == {number: "a"}


def test_many_released_values_are_one_message_an_owner() -> None:
    net = Network(THREE)
    net.begin()
    key_a, key_b = net.touch(2, A).key, net.touch(2, B).key
    again = net.touch(2, B).key
    net.do(2, net.cores[2].release([(1, again), (0, key_a), (1, key_b)]))
    assert [(target, text.split()[0]) for _, target, text in net.said] == [
        (0, "release"),
        (1, "release"),
    ]


def test_nothing_is_released_of_a_request_that_is_done(net: Network) -> None:
    key = net.touch(1, A).key
    net.end(1)
    net.release(1, 0, key)
    assert "release" not in net.under_way()


def test_a_loop_that_keeps_nothing_holds_one_value_however_long(net: Network) -> None:
    for turn in range(50):
        key = net.read(0, A, "a").key
        assert net.entries(0) == 1
        assert net.touch(1, A, occurrence=turn).key == key
        net.release(1, 0, key)
        net.settle()
        assert net.entries(0) == 0
        net.touch(0, LOGITS)
        net.read(1, LOGITS, "l")
        net.open_round("r")


# --- never ------------------------------------------------------------------------------------


def test_a_pull_of_a_line_that_the_owners_block_did_not_reach_is_refused(net: Network) -> None:
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    net.finish(0)
    net.settle()
    assert "the block ended there before it got that far" in net.refused[1][number]
    assert net.cores[0].pending() == net.cores[1].pending() == 0


def test_a_pull_that_comes_after_the_owners_block_ended_is_refused(net: Network) -> None:
    net.finish(0)
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    assert net.refused[1][number].startswith("unreachable: stage 0 cannot produce 'model.a.output'")


def test_a_visit_that_never_came_is_refused_when_the_block_ends(net: Network) -> None:
    net.touch(0, A)
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    net.finish(0)
    net.settle()
    assert "its visit never came" in net.refused[1][number]


def test_a_published_value_is_served_after_the_owners_block_ended(net: Network) -> None:
    net.read(0, A, "a")
    net.finish(0)
    number = net.pull(1, net.touch(1, A), A)
    net.settle()
    assert net.landed[1] == {number: "a"}


def test_a_pull_of_what_the_asker_itself_released_is_refused(net: Network) -> None:
    decision = net.touch(1, A)
    net.release(1, 0, decision.key)
    number = net.pull(1, decision, A)
    net.settle()
    assert number in net.refused[1]


def test_finishing_one_worker_leaves_the_pulls_of_another_waiting(net: Network) -> None:
    edit = Worker("r", "edit")
    for core in net.cores:
        core.start(edit)
    number = net.pull(1, net.touch(1, A, worker=edit), A)
    net.settle()
    net.finish(0)
    net.settle()
    assert net.refused[1] == {}
    net.read(0, A, "a", worker=edit)
    net.settle()
    assert net.landed[1] == {number: "a"}


def test_finishing_a_worker_that_is_unknown_does_nothing(net: Network) -> None:
    assert net.cores[0].finish(Worker("unknown")) == []
    assert net.cores[0].finish(Worker("r", "unknown")) == []


# --- divergence -------------------------------------------------------------------------------


def test_a_block_that_reads_elsewhere_diverged_and_both_locations_are_named(net: Network) -> None:
    net.read(0, A, "a")
    decision = net.touch(1, A)
    number = net.pull(1, decision, "model.z.output")
    net.settle()
    reason = net.refused[1][number]
    assert reason.startswith("diverged: ")
    assert "'model.z.output' on the rank that asked" in reason
    assert "'model.a.output' on stage 0" in reason


def test_divergence_shows_too_where_the_pull_came_first(net: Network) -> None:
    number = net.pull(1, net.touch(1, A), "model.z.output")
    net.settle()
    net.read(0, A, "a")
    net.settle()
    assert net.refused[1][number].startswith("diverged: ")


def test_divergence_shows_too_where_the_owner_touched_another_line_and_ended(net: Network) -> None:
    net.touch(0, LOGITS)
    number = net.pull(1, net.touch(1, A), A)
    net.finish(0)
    net.settle()
    assert net.refused[1][number].startswith("diverged: ")
    assert "'model.logits' on stage 0" in net.refused[1][number]
