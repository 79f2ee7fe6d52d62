from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppcore.schedule import BEFORE, Place, Schedule, Slot

NAMES = ["m.a.output", "m.b.output", "m.rope.input", "m.rope.output"]


@pytest.fixture
def plain() -> Schedule:
    return Schedule.build([["m.a.input", "m.a.output"], ["m.b.input", "m.b.output"]])


def test_stages_are_concatenated_in_order(plain: Schedule) -> None:
    assert [plain.place(name, 0).index for name in ("m.a.input", "m.a.output", "m.b.input")] == [
        0,
        1,
        2,
    ]
    assert plain.first == (0, 2, 4)


def test_an_index_implies_its_stage(plain: Schedule) -> None:
    assert [plain.stage_of(index) for index in range(4)] == [0, 0, 1, 1]


def test_before_the_first_visit_is_stage_0(plain: Schedule) -> None:
    assert plain.stage_of(BEFORE) == 0


def test_a_stage_without_visits_owns_no_index() -> None:
    schedule = Schedule.build([["m.a.output"], [], ["m.b.output"]])
    assert [schedule.stage_of(index) for index in range(2)] == [0, 2]
    assert schedule.stages == 3


def test_the_ith_occurrence_of_a_location_visited_once_is_turn_i(plain: Schedule) -> None:
    assert plain.place("m.b.input", 5) == Place(5, 2)


def test_a_location_visited_twice_a_turn_alternates_between_its_slots() -> None:
    schedule = Schedule.build([["m.rope.output", "m.a.output", "m.rope.output"]])
    assert [schedule.place("m.rope.output", i) for i in range(4)] == [
        Place(0, 0),
        Place(0, 2),
        Place(1, 0),
        Place(1, 2),
    ]


def test_a_shared_module_is_owned_by_the_stage_of_each_occurrence() -> None:
    schedule = Schedule.build([["m.rope.output"], ["m.rope.output", "m.rope.output"]])
    assert [schedule.owner("m.rope.output", i) for i in range(6)] == [0, 1, 1, 0, 1, 1]
    assert schedule.owners("m.rope.output") == (0, 1)
    assert schedule.local_count("m.rope.output", 1) == 2


def test_an_unknown_location_has_no_place_and_no_owner(plain: Schedule) -> None:
    assert "m.nowhere.output" not in plain
    assert plain.owners("m.nowhere.output") == ()
    with pytest.raises(KeyError):
        plain.place("m.nowhere.output", 0)
    with pytest.raises(KeyError):
        plain.owner("m.nowhere.output", 0)
    assert plain.before("m.nowhere.output", Place(3, 0)) == 0


def test_a_location_strictly_before_a_place_is_counted(plain: Schedule) -> None:
    assert plain.before("m.b.input", Place(0, BEFORE)) == 0
    assert plain.before("m.b.input", Place(0, 2)) == 0
    assert plain.before("m.b.input", Place(0, 3)) == 1
    assert plain.before("m.b.input", Place(4, 3)) == 5


def test_a_spanning_modules_input_is_the_first_stages_and_its_output_the_lasts() -> None:
    visits = [["m.input", "m.a.output", "m.output"], ["m.input", "m.b.output", "m.output"]]
    schedule = Schedule.build(visits, split=["m"])
    assert schedule.owners("m.input") == (0,)
    assert schedule.owners("m.output") == (1,)
    assert len(schedule.slots["m.input"]) == len(schedule.slots["m.output"]) == 1


def test_a_module_that_does_not_span_keeps_its_visits_on_every_stage() -> None:
    visits = [["m.input", "m.output"], ["m.input", "m.output"]]
    assert Schedule.build(visits).slots["m.input"] == (Slot(0, 0), Slot(1, 2))


def test_a_source_location_is_as_often_visited_as_its_module() -> None:
    schedule = Schedule.build([["m.a.skip", "m.a.output"], ["m.b.skip", "m.b.output"]])
    location = "m.b.source.add_0.output"
    assert location in schedule
    assert schedule.owner(location, 3) == 1
    assert schedule.place(location, 3) == Place(3, 2)
    assert "m.c.source.add_0.output" not in schedule


def test_what_a_stage_counts_itself_becomes_the_models_occurrence() -> None:
    schedule = Schedule.build([["m.rope.output"], ["m.rope.output", "m.rope.output"]])
    assert schedule.local_occurrence("m.rope.output", 0, turn=2, visited=0) == 6
    assert schedule.local_occurrence("m.rope.output", 1, turn=2, visited=1) == 8


def test_places_compare_by_turn_first() -> None:
    assert Place(0, 9) < Place(1, BEFORE) < Place(1, 0)


visits = st.lists(st.lists(st.sampled_from(NAMES), max_size=6), min_size=1, max_size=4)


@given(visits, st.integers(0, 40))
def test_before_counts_exactly_the_occurrences_placed_earlier(stages: list, at: int) -> None:
    schedule = Schedule.build(stages)
    for location in schedule.slots:
        place = schedule.place(location, at)
        assert schedule.before(location, place) == at
        assert schedule.before(location, Place(place.turn, place.index + 1)) == at + 1


@given(visits, st.integers(0, 3))
def test_local_occurrences_of_all_stages_number_a_turn_without_gaps(
    stages: list, turn: int
) -> None:
    schedule = Schedule.build(stages)
    for location, slots in schedule.slots.items():
        numbered = [
            schedule.local_occurrence(location, stage, turn, visited)
            for stage in range(schedule.stages)
            for visited in range(schedule.local_count(location, stage))
        ]
        assert numbered == list(range(turn * len(slots), (turn + 1) * len(slots)))
        assert [schedule.owner(location, i) for i in numbered] == [slot.stage for slot in slots]


def test_what_every_stage_runs_outside_the_layers_is_one_visit_of_the_first() -> None:
    stage = ["m.input", "m.rotary.input", "m.rotary.table.output", "m.rotary.output"]
    act = ["m.layers.0.act.output"]
    visits = [[*stage, *act, *act], [*stage, *act]]
    schedule = Schedule.build(visits, split=["m", "m.layers"])
    assert [slot.stage for slot in schedule.slots["m.rotary.output"]] == [0]
    assert [slot.stage for slot in schedule.slots["m.rotary.table.output"]] == [0]
    assert schedule.place("m.rotary.output", 1).turn == 1
    # A module inside a layer that layers share is as often visited as on one rank.
    assert [slot.stage for slot in schedule.slots["m.layers.0.act.output"]] == [0, 0, 1]
    assert schedule.repeated == {"m.rotary", "m.rotary.table"}


def test_a_skip_goes_beyond_what_is_inside() -> None:
    inside = ["a.input", "a.skip", "a.mlp.input", "a.mlp.output", "a.output", "b.input", "b.skip"]
    schedule = Schedule.build([inside, ["c.skip", "c.output"]])
    skipped = schedule.beyond("a.skip", schedule.place("a.skip", 1))
    assert skipped == schedule.place("a.output", 1)
    alone = schedule.place("b.skip", 0)
    assert schedule.beyond("b.skip", alone) == alone
