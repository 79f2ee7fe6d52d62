"""What becomes of an access, how a worker's clock moves, and when a rank may wait."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppcore.core import ALWAYS, END, STATIC, Available, Core, Verdict
from ppcore.messages import Key, Worker
from ppcore.schedule import BEFORE, Place, Schedule
from tests.unit.network import LOGITS, THREE, WORKER, A, B, C, Network

# --- verdicts ---------------------------------------------------------------------------------


def test_a_visit_of_this_stage_is_waited_for() -> None:
    net = Network()
    net.begin()
    assert net.touch(0, A).verdict is Verdict.LOCAL
    assert net.touch(1, B).verdict is Verdict.LOCAL


def test_an_earlier_stages_visit_of_the_open_turn_is_answered_at_once() -> None:
    net = Network()
    net.begin()
    decision = net.touch(1, A)
    assert (decision.verdict, decision.owner, decision.place) == (Verdict.ANSWER, 0, Place(0, 0))


def test_a_later_stages_visit_of_the_open_turn_is_answered_at_once() -> None:
    net = Network()
    net.begin()
    assert net.touch(0, LOGITS).verdict is Verdict.ANSWER


def test_a_remote_visit_of_a_later_turn_is_gated_until_that_turn_opens() -> None:
    net = Network()
    net.begin()
    decision = net.touch(0, B, occurrence=2)
    assert decision.verdict is Verdict.GATE
    net.open_round("r")
    assert net.cores[0].again(decision.key, B, 2).verdict is Verdict.GATE
    net.open_round("r")
    again = net.cores[0].again(decision.key, B, 2)
    assert (again.verdict, again.key) == (Verdict.ANSWER, decision.key)


def test_a_round_without_the_request_opens_no_turn_of_it() -> None:
    net = Network()
    net.begin()
    decision = net.touch(0, B, occurrence=1)
    net.open_round("another")
    assert net.cores[0].again(decision.key, B, 1).verdict is Verdict.GATE
    assert net.cores[0].turn("r") == 0


def test_a_local_visit_of_a_later_turn_waits_for_this_ranks_forward() -> None:
    net = Network()
    net.begin()
    assert net.touch(1, B, occurrence=3).verdict is Verdict.LOCAL


def test_a_remote_visit_behind_the_clock_can_never_be_served() -> None:
    net = Network()
    net.begin()
    net.read(1, B, "b")
    assert net.touch(1, A, occurrence=0).verdict is Verdict.NEVER


def test_a_local_visit_behind_the_clock_can_never_be_served() -> None:
    net = Network()
    net.begin()
    net.touch(0, B)
    assert net.touch(0, A, occurrence=0).verdict is Verdict.NEVER


def test_the_verdict_never_falls_on_every_rank_alike() -> None:
    net = Network(THREE)
    net.begin()
    for stage in range(3):
        if net.touch(stage, C).verdict is Verdict.LOCAL:
            net.cores[stage].served(WORKER, net.schedule.place(C, 0))
        assert net.touch(stage, B, occurrence=0).verdict is Verdict.NEVER


def test_a_refused_access_leaves_the_clock_where_it_was() -> None:
    net = Network()
    net.begin()
    net.touch(0, LOGITS)
    before = net.cores[0].clock(WORKER)
    net.touch(0, A, occurrence=0)
    assert net.cores[0].clock(WORKER) == before


def test_a_gated_access_leaves_the_clock_where_it_was() -> None:
    net = Network()
    net.begin()
    net.touch(0, B, occurrence=4)
    assert net.cores[0].clock(WORKER) == Place(0, BEFORE)


def test_the_runs_result_is_every_ranks_own_and_lies_behind_every_turn() -> None:
    net = Network()
    net.begin()
    for stage in (0, 1):
        decision = net.touch(stage, "result")
        assert (decision.verdict, decision.place.turn, decision.owner) == (
            Verdict.LOCAL,
            END,
            stage,
        )


def test_a_module_that_no_forward_visits_is_waited_for_where_it_is_real_only() -> None:
    net = Network(model__idle=(1,))
    net.begin()
    assert net.touch(0, "model.idle.output").verdict is Verdict.NEVER
    assert net.touch(1, "model.idle.output").verdict is Verdict.LOCAL


def test_a_path_unknown_to_every_stage_is_waited_for_in_vain_everywhere() -> None:
    net = Network()
    net.begin()
    assert {net.touch(stage, "model.x.output").verdict for stage in (0, 1)} == {Verdict.LOCAL}


# --- clocks, re-reads and loops ---------------------------------------------------------------


def test_a_worker_starts_before_the_open_turns_visits() -> None:
    net = Network()
    net.open_round("r")
    net.open_round("r")
    net.cores[0].start(WORKER)
    assert net.cores[0].clock(WORKER) == Place(1, BEFORE)


def test_a_worker_that_starts_late_asks_for_the_open_turns_occurrence() -> None:
    net = Network()
    net.open_round("r")
    net.open_round("r")
    net.cores[0].start(WORKER)
    assert net.cores[0].wanted(WORKER, B) == 1


def test_a_remote_read_moves_the_clock_to_its_place() -> None:
    net = Network()
    net.begin()
    decision = net.touch(0, B)
    assert net.cores[0].clock(WORKER) == decision.place


def test_a_second_read_of_one_visit_is_the_same_place_under_another_name() -> None:
    net = Network()
    net.begin()
    first, second = net.touch(0, B), net.touch(0, B)
    assert first.place == second.place
    assert (first.key.access, second.key.access) == (0, 1)
    assert second.verdict is Verdict.ANSWER


def test_a_second_local_read_of_one_visit_is_served_in_it() -> None:
    net = Network()
    net.begin()
    first = net.read(0, A, "a")
    second = net.touch(0, A)
    assert (second.verdict, second.place) == (Verdict.LOCAL, first.place)


def test_after_a_later_visit_of_the_turn_a_relaxed_read_means_the_next_turn() -> None:
    net = Network()
    net.begin()
    net.touch(0, B)
    decision = net.touch(0, A)
    assert (decision.verdict, decision.place.turn) == (Verdict.LOCAL, 1)


def test_a_loop_over_the_other_stage_reads_one_value_a_turn() -> None:
    net = Network()
    net.begin()
    places = [net.touch(0, B).place]
    for turn in (1, 2):
        net.touch(0, LOGITS)
        gated = net.touch(0, B)
        assert gated.verdict is Verdict.GATE
        net.open_round("r")
        places.append(net.cores[0].again(gated.key, B, turn).place)
    assert [place.turn for place in places] == [0, 1, 2]


def test_a_pinned_step_skips_the_turns_between() -> None:
    net = Network()
    net.begin()
    decision = net.touch(0, B, occurrence=3)
    for _ in range(3):
        net.open_round("r")
    assert net.cores[0].again(decision.key, B, 3).place == Place(3, 1)


def test_access_numbers_count_every_touch_and_call_in_program_order() -> None:
    net = Network()
    net.begin()
    core = net.cores[0]
    keys = [
        net.touch(0, A).key,
        core.call(WORKER, "model.b", frozenset({1}), False, ()).key,
        net.touch(0, B).key,
    ]
    assert [key.access for key in keys] == [0, 1, 2]


def test_two_ranks_name_the_same_line_alike_whoever_owns_it() -> None:
    net = Network(THREE)
    net.begin()
    names = []
    for stage in range(3):
        for location in (A, B, C, LOGITS):
            decision = net.touch(stage, location)
            if decision.verdict is Verdict.LOCAL:
                net.cores[stage].served(WORKER, decision.place)
            names.append((location, str(decision.key)))
    assert len(set(names)) == 4


def test_workers_of_one_request_have_clocks_and_numbers_of_their_own() -> None:
    net = Network()
    edit = Worker("r", "edit")
    net.begin(edit)
    for core in net.cores:
        core.start(WORKER)
    net.touch(0, LOGITS, worker=edit)
    decision = net.touch(0, B)
    assert (decision.verdict, decision.key) == (Verdict.ANSWER, Key(WORKER, 0))
    assert net.cores[0].workers("r") == [edit, WORKER]


def test_serving_behind_the_clock_is_our_own_bug() -> None:
    net = Network()
    net.begin()
    net.touch(0, LOGITS)
    with pytest.raises(AssertionError, match="behind its clock"):
        net.cores[0].served(WORKER, Place(0, 0))


def test_a_request_in_a_round_after_its_end_is_our_own_bug() -> None:
    net = Network()
    net.begin()
    net.cores[0].end("r")
    with pytest.raises(AssertionError, match="after its end"):
        net.cores[0].open_round(["r"])


def test_an_unknown_path_is_taken_to_be_real_everywhere() -> None:
    core = Network(THREE, model__a=(0,)).cores[2]
    assert core.home("model.a") == {0}
    assert core.home("model.unheard") == {0, 1, 2}


# --- the wait rule ----------------------------------------------------------------------------


def test_an_earlier_stage_of_the_open_turn_may_be_waited_for() -> None:
    net = Network(THREE)
    net.begin()
    assert net.cores[2].may_block("r", Available(0, 1))
    assert net.cores[1].may_block("r", Available(0, 0))


def test_a_later_stage_of_the_open_turn_may_not_be_waited_for_and_nor_may_this_one() -> None:
    net = Network(THREE)
    net.begin()
    assert not net.cores[1].may_block("r", Available(0, 2))
    assert not net.cores[1].may_block("r", Available(0, 1))


def test_a_later_stages_value_may_be_waited_for_in_the_next_round() -> None:
    net = Network(THREE)
    net.begin()
    net.open_round("other")
    assert net.cores[0].may_block("r", Available(0, 2))


def test_a_turn_that_is_not_open_may_not_be_waited_for() -> None:
    net = Network()
    net.begin()
    assert not net.cores[1].may_block("r", Available(1, 0))


def test_everything_may_be_waited_for_once_the_request_has_ended() -> None:
    net = Network()
    net.begin()
    net.cores[0].end("r")
    assert net.cores[0].may_block("r", Available(0, 1))
    assert net.cores[0].ended("r")


def test_a_parameter_may_be_waited_for_anywhere_even_by_a_request_unknown_here() -> None:
    core = Network().cores[0]
    assert core.may_block("unknown", ALWAYS)
    assert not core.may_block("unknown", Available(0, 1))


def test_a_pull_may_be_waited_for_when_its_value_may() -> None:
    net = Network()
    net.begin()
    late = net.pull(0, net.touch(0, B), B)
    early = net.pull(1, net.touch(1, A), A)
    assert not net.cores[0].may_wait([late])
    assert net.cores[1].may_wait([early])
    net.open_round("r")
    assert net.cores[0].may_wait([late])


def test_one_pull_that_may_not_be_waited_for_forbids_the_whole_wait() -> None:
    net = Network(THREE)
    net.begin()
    early = net.pull(1, net.touch(1, A), A)
    late = net.pull(1, net.touch(1, C), C)
    assert net.cores[1].may_wait([early])
    assert not net.cores[1].may_wait([early, late])


def test_what_may_be_waited_for_does_not_depend_on_whether_it_has_come() -> None:
    net = Network()
    net.begin()
    number = net.pull(0, net.touch(0, B), B)
    net.read(1, B, "b")
    net.settle()
    assert net.landed[0] == {number: "b"}
    assert not net.cores[0].may_wait([number])
    net.open_round("r")
    assert net.cores[0].may_wait([number])


def test_behind_its_forward_a_rank_may_wait_for_every_stage_of_the_round_and_for_no_other() -> None:
    net = Network()
    net.begin()
    number = net.pull(0, net.touch(0, B), B)
    assert not net.cores[0].may_wait([number])
    net.cores[0].leave_round()
    assert net.cores[0].may_wait([number])
    assert not net.cores[0].may_block("r", Available(1, 0))
    net.open_round("r")
    assert net.cores[0].may_wait([number])
    assert not net.cores[0].may_block("r", Available(1, 1)), "it is in its own place again"


def test_behind_its_forward_a_rank_answers_what_a_later_stage_visits() -> None:
    net = Network()
    net.begin()
    core = net.cores[0]
    net.read(0, A, "a")
    gated = core.access(WORKER, B, 0)
    assert gated.verdict is Verdict.GATE
    core.leave_round()
    assert core.again(gated.key, B, 0).verdict is Verdict.ANSWER
    assert core.access(WORKER, B, 1).verdict is Verdict.GATE, "the next turn is not open"


def test_what_a_later_stage_visits_is_left_for_behind_the_forward_where_the_rank_will_stay() -> (
    None
):
    net = Network()
    net.begin()
    core = net.cores[0]
    core.will_leave_round()
    gated = core.access(WORKER, B, 0)
    assert gated.verdict is Verdict.GATE, "nothing has been served in this turn"
    assert core.again(gated.key, B, 0).verdict is Verdict.GATE
    core.leave_round()
    assert core.again(gated.key, B, 0).verdict is Verdict.ANSWER
    net.open_round("r")
    assert core.access(WORKER, B, 1).verdict is Verdict.ANSWER, "it said so of one round"


def test_what_was_left_for_behind_the_forward_comes_in_the_next_turn_at_the_latest() -> None:
    net = Network()
    net.begin()
    core = net.cores[0]
    core.will_leave_round()
    gated = core.access(WORKER, B, 0)
    net.open_round("r")
    core.will_leave_round()
    assert core.again(gated.key, B, 0).verdict is Verdict.ANSWER
    still = core.access(WORKER, B, 1)
    assert still.verdict is Verdict.GATE
    core.end("r")
    assert core.again(still.key, B, 1).verdict is Verdict.ANSWER


def test_a_pull_from_the_dead_needs_no_permission() -> None:
    net = Network()
    net.begin()
    number = net.pull(0, net.touch(0, B), B)
    net.do(0, net.cores[0].peer_died(1, "gone"))
    assert net.cores[0].may_wait([number])


def test_a_probe_may_be_waited_for_anywhere() -> None:
    net = Network()
    number, effects = net.cores[0].probe(1, "{}")
    net.do(0, effects)
    assert net.cores[0].may_wait([number])


def test_a_value_made_of_earlier_ones_is_available_in_its_own_turn() -> None:
    core = Network(THREE).cores[0]
    assert core.available(2, 1, [Available(1, 0), Available(1, 1), Available(0, 2)]) == Available(
        1, 2
    )


def test_a_value_made_of_a_later_stages_one_is_available_a_turn_later() -> None:
    core = Network(THREE).cores[0]
    assert core.available(0, 1, [Available(1, 2)]) == Available(2, 0)


def test_a_value_made_of_a_later_turns_one_on_an_earlier_stage_is_available_then() -> None:
    core = Network(THREE).cores[0]
    assert core.available(2, 1, [Available(3, 0)]) == Available(3, 2)


def test_the_order_of_what_a_value_is_made_of_does_not_matter() -> None:
    core = Network(THREE).cores[0]
    parts = [Available(1, 2), Available(2, 0), Available(0, 1)]
    found = {core.available(1, 0, order) for order in itertools.permutations(parts)}
    assert len(found) == 1


places = st.tuples(st.integers(0, 5), st.integers(0, 2))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=2, max_size=3), st.data())
def test_waits_that_the_rule_allows_never_form_a_cycle(
    taking_part: list, data: st.DataObject
) -> None:
    """A rank that waits does so for a strictly smaller (round, stage) than the one it is at."""
    stages = len(taking_part)
    schedule = Schedule.build([[f"m.{stage}.output"] for stage in range(stages)])
    rounds = taking_part[0]
    for stage in range(stages):
        core = Core(stage, schedule, {})
        turn_rounds = []
        for number, takes_part in enumerate(rounds):
            core.open_round(["r"] if takes_part else [])
            if takes_part:
                turn_rounds.append(number)
            turn, owner = data.draw(places)
            if core.may_block("r", Available(turn, owner)):
                assert (turn_rounds[turn], owner) < (core.round, stage)


def test_a_static_key_is_no_access_of_any_worker() -> None:
    net = Network()
    net.begin()
    assert STATIC < 0 <= net.touch(0, A).key.access
