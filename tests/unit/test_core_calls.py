"""Calls of modules: who has the arguments, who computes, and when the result can be had."""

from __future__ import annotations

import pytest

from ppcore.core import ALWAYS, GIVEN, Available, Calling
from ppcore.messages import Failed, Worker
from tests.unit.network import LOGITS, THREE, WORKER, B, Network


def named(net: Network, home: set[int], worker: Worker = WORKER) -> list[Calling]:
    """What each rank says of a call that its worker makes now."""
    return [core.call(worker, "model.b", frozenset(home), False, ()) for core in net.cores]


def test_a_call_runs_where_the_module_is_real_with_the_arguments_of_where_the_block_is() -> None:
    net = Network(THREE)
    net.begin()
    assert {(call.caller, call.home) for call in named(net, {2})} == {(0, 2)}
    net.read(1, B, "value")
    for stage in (0, 2):
        net.touch(stage, B)
    assert {(call.caller, call.home) for call in named(net, {0})} == {(1, 0)}


def test_a_module_real_on_several_stages_is_used_where_the_block_is_else_on_the_lowest() -> None:
    net = Network(THREE)
    net.begin()
    assert {(call.caller, call.home) for call in named(net, {1, 2})} == {(0, 1)}
    assert {(call.caller, call.home) for call in named(net, {0, 2})} == {(0, 0)}


def test_a_result_can_be_had_from_where_the_block_made_the_call() -> None:
    net = Network(THREE)
    net.begin()
    net.read(1, B, "value")
    for stage in (0, 2):
        net.touch(stage, B)
    calls = named(net, {2})
    assert [call.available for call in calls] == [Available(0, 1), ALWAYS, Available(0, 1)]
    # Where the module is real in the place itself, nothing is given away.
    assert [call.available for call in named(net, {1})] == [Available(0, 1)] * 3


def test_after_the_result_a_call_runs_on_its_home_by_itself() -> None:
    net = Network()
    net.begin()
    for stage, core in enumerate(net.cores):
        core.end("r")
        core.served(WORKER, net.touch(stage, "result").place)
    assert {(call.caller, call.home) for call in named(net, {1})} == {(1, 1)}
    for core, call in zip(net.cores, named(net, {1}), strict=True):
        assert core.may_block("r", call.available)


def test_the_home_of_a_call_computes_it_before_its_worker_gets_there() -> None:
    net = Network()
    net.open_round("r", stages=[0])
    net.cores[0].start(WORKER)
    key, _, home, when = net.cores[0].call(WORKER, "model.b", frozenset({1}), False, ())
    net.do(0, net.cores[0].give(key, "model.b", home, "", "x", ()))
    number, effects = net.cores[0].pull(key, "model.b", "", home, when)
    net.do(0, effects)
    assert net.cores[0].may_wait([number])
    net.settle()
    assert net.landed[0][number] == "model.b of x"


@pytest.mark.parametrize("before", [True, False])
def test_a_home_waits_for_the_receipt_of_the_arguments(before: bool) -> None:
    net = Network()
    net.begin()
    call, mine = named(net, {1})
    number, effects = net.cores[1].pull(mine.key, "model.b", "", mine.caller, mine.available)
    assert net.cores[1].may_wait([number])
    if before:
        net.do(1, effects)
        net.settle()
    assert net.landed[1] == {}
    net.do(0, net.cores[0].give(call.key, "model.b", call.home, "", "x", ()))
    if not before:
        net.do(1, effects)
    net.settle()
    assert net.landed[1] == {number: GIVEN}
    # The arguments crossed once, before the receipt.
    words = [text.split()[0] for source, _, text in net.said if source == 0]
    assert words == ["call", "reply"]
    # Stage 1 alone can ask for the receipt, and stage 0 for the result.
    assert (net.entries(0), net.entries(1)) == (1, 1)
    net.release(1, 0, call.key)
    net.release(0, 1, call.key)
    net.settle()
    assert (net.entries(0), net.entries(1)) == (0, 0)


def test_a_call_is_computed_of_another_ones_result_where_that_is() -> None:
    net = Network()
    net.begin()
    (one, _), (other, _) = named(net, {1}), named(net, {1})
    net.do(0, net.cores[0].give(one.key, "model.b", 1, "", "x", ()))
    net.do(0, net.cores[0].give(other.key, "model.b", 1, "", None, (one.key,)))
    number, effects = net.cores[0].pull(other.key, "model.b", "", 1, other.available)
    net.do(0, effects)
    # Given after the pull, a release leaves nothing behind that the call needs.
    net.release(0, 1, one.key)
    net.settle()
    assert net.landed[0][number] == "model.b of model.b of x"


def test_a_call_of_a_request_that_is_over_there_is_refused_to_who_asks() -> None:
    net = Network()
    net.begin()
    call, _ = named(net, {1})
    net.end(1)
    net.do(0, net.cores[0].give(call.key, "model.b", call.home, "", "x", ()))
    number, effects = net.cores[0].pull(call.key, "model.b", "", call.home, call.available)
    net.do(0, effects)
    net.settle()
    assert "unreachable" in net.refused[0][number]
    assert net.entries(1) == 0


def test_a_result_that_everyone_is_done_with_brings_no_request_back() -> None:
    net = Network()
    net.begin()
    call, _ = named(net, {1})
    assert net.cores[1].awaits(call.key)
    net.end(0, 1)
    net.settle()
    assert net.at_rest()
    assert not net.cores[1].awaits(call.key)
    assert net.cores[1].computed(call.key, "model.b", "late", 4) == []
    assert net.at_rest()


def test_a_call_of_a_dead_stage_is_an_error_that_names_it() -> None:
    net = Network()
    net.begin()
    call, _ = named(net, {1})
    net.kill(1)
    assert net.cores[0].give(call.key, "model.b", call.home, "", "x", ()) == []
    number, effects = net.cores[0].pull(call.key, "model.b", "", call.home, call.available)
    net.do(0, effects)
    assert "died: stage 1" in net.refused[0][number]


def test_a_collective_call_comes_after_the_visits_and_the_calls_before_it() -> None:
    core = Network().cores[1]
    core.open_round(["r"])
    core.start(WORKER)

    def due(worker: Worker, home: int, *after: Available) -> Available:
        return core.call(worker, "m", frozenset({home}), True, after).available

    assert due(WORKER, 0) == Available(0, 0)
    # Another worker of the request has made no call.
    other = Worker("r", "other")
    core.start(other)
    assert due(WORKER, 1) == Available(0, 1)
    # Where stage 0 has to wait for that one's result, it gets here in its next turn only.
    assert due(WORKER, 0) == Available(1, 0)
    assert due(other, 0) == Available(0, 0)
    core.access(other, LOGITS, 0)
    core.served(other, core.schedule.place(LOGITS, 0))
    assert due(other, 0, Available(0, 0)) == Available(1, 0)


def at_the_middle(net: Network) -> list[Calling]:
    """A call of a module of the first stage, made in a visit of the second of three."""
    net.begin()
    net.read(1, B, "value")
    for stage in (0, 2):
        net.touch(stage, B)
    return named(net, {0})


@pytest.mark.parametrize("before", [True, False])
def test_a_call_whose_caller_has_raised_is_waited_for_by_nobody(before: bool) -> None:
    net = Network(THREE)
    call = at_the_middle(net)[2]
    core = net.cores[1]
    core._worker(WORKER).next_access = call.key.access  # it has not come as far
    raised = core.fail(WORKER, "boom")
    if before:
        net.do(1, raised)
        net.settle()
    number, effects = net.cores[2].pull(call.key, "model.b", "", call.home, call.available)
    net.do(2, effects)
    if not before:
        net.do(1, raised)
        net.settle()
    assert "raised on stage 1 before it made the call" in net.refused[2][number]


@pytest.mark.parametrize("before", [True, False])
def test_a_call_whose_caller_may_be_told_first_is_waited_for_by_nobody(before: bool) -> None:
    # The home raises before the call; so does its caller's block end, wherever it is.
    net = Network(THREE)
    call = at_the_middle(net)[2]
    core = net.cores[0]
    core._worker(WORKER).next_access = call.key.access
    if before:
        net.do(0, core.fail(WORKER, "boom"))
        net.settle()
    number, effects = net.cores[2].pull(call.key, "model.b", "", call.home, call.available)
    net.do(2, effects)
    if not before:
        net.do(2, net.cores[2].take(0, Failed(WORKER, call.key.access, "boom")))
    assert "raised on stage 0 before it made the call" in net.refused[2][number]


def test_a_call_that_its_caller_made_before_it_raised_is_computed() -> None:
    net = Network(THREE)
    call = at_the_middle(net)[2]
    number, effects = net.cores[2].pull(call.key, "model.b", "", call.home, call.available)
    net.do(2, effects)
    net.do(1, net.cores[1].give(call.key, "model.b", call.home, "", "x", ()))
    net.do(1, net.cores[1].fail(WORKER, "boom"))
    net.settle()
    assert net.landed[2] == {number: "model.b of x"}


@pytest.mark.parametrize("before", [True, False])
def test_a_call_whose_caller_is_dead_is_waited_for_by_nobody(before: bool) -> None:
    net = Network(THREE)
    call = at_the_middle(net)[2]
    if before:
        net.kill(1)
    number, effects = net.cores[2].pull(call.key, "model.b", "", call.home, call.available)
    net.do(2, effects)
    if not before:
        net.kill(1)
    assert "died: stage 1" in net.refused[2][number]
