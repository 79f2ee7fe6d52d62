from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppcore.errors import Diverged
from ppcore.saves import Part, Shipment, merge, merge_parts, spell_leaves, to_ship, union


def agree(holds: list[dict[str, list[bool]]]) -> list[dict[str, list[bool]]]:
    """What each stage ships, having heard every earlier one."""
    said: list[dict[str, str]] = []
    shipped = []
    for stage, held in enumerate(holds):
        ships = to_ship(held, union(said), last=stage == len(holds) - 1)
        said.append(spell_leaves(ships))
        shipped.append(ships)
    return shipped


def test_a_leaf_that_several_stages_hold_is_shipped_by_the_lowest() -> None:
    assert agree([{"h": [False]}, {"h": [True]}, {"h": [True]}]) == [
        {"h": [False]},
        {"h": [True]},
        {"h": [False]},
    ]


def test_a_leaf_that_nobody_holds_is_shipped_by_the_last() -> None:
    assert agree([{"h": [False]}, {"h": [False]}]) == [{"h": [False]}, {"h": [True]}]


def test_leaves_of_one_container_come_from_where_each_is() -> None:
    assert agree([{"c": [True, False, False]}, {"c": [False, True, False]}]) == [
        {"c": [True, False, False]},
        {"c": [False, True, True]},
    ]


def test_one_stage_ships_everything() -> None:
    assert agree([{"a": [True, True], "b": []}]) == [{"a": [True, True], "b": []}]


def test_a_name_that_an_earlier_stage_does_not_have_is_shipped_by_who_has_it() -> None:
    assert agree([{}, {"late": [True]}]) == [{}, {"late": [True]}]


def test_more_leaves_than_an_earlier_stage_has_are_shipped_too() -> None:
    assert agree([{"c": [True]}, {"c": [True, True]}]) == [{"c": [True]}, {"c": [False, True]}]


holdings = st.integers(1, 4).flatmap(
    lambda stages: st.dictionaries(
        st.sampled_from("abc"),
        st.integers(0, 5).flatmap(
            lambda leaves: st.lists(
                st.lists(st.booleans(), min_size=leaves, max_size=leaves),
                min_size=stages,
                max_size=stages,
            )
        ),
    ).map(lambda names: [{n: rows[stage] for n, rows in names.items()} for stage in range(stages)])
)


@given(holdings)
def test_each_leaf_is_shipped_once_and_by_the_lowest_holder(holds: list) -> None:
    shipped = agree(holds)
    for name, flags in holds[0].items():
        for position in range(len(flags)):
            senders = [stage for stage, ships in enumerate(shipped) if ships[name][position]]
            holders = [stage for stage, held in enumerate(holds) if held[name][position]]
            assert senders == [holders[0] if holders else len(holds) - 1]


def test_a_union_is_as_wide_as_the_widest_bitmap() -> None:
    assert union([{"c": "01"}, {"c": "1000"}, {"d": ""}]) == {"c": "1100", "d": ""}
    assert union([]) == {}


# --- merging ----------------------------------------------------------------------------------


def shipment(
    stage: int, leaves: dict, error: str | None = None, *, own: bool = False, **counts: int
):
    return Shipment(f"skeleton {stage}".encode(), counts, leaves, error, own)


def test_leaves_of_all_stages_fill_the_last_stages_skeleton() -> None:
    merged = merge(
        [shipment(0, {("h", 0): "zero"}, h=2), shipment(1, {("h", 1): "one"}, h=2)],
    )
    assert merged.skeleton == b"skeleton 1"
    assert merged.leaves == {("h", 0): "zero", ("h", 1): "one"}
    assert merged.error is None


def test_the_skeleton_of_the_stage_that_raised_is_chosen() -> None:
    merged = merge(
        [
            shipment(0, {("h", 0): "zero"}, "boom", own=True, h=1),
            shipment(1, {}, "boom", h=1, more=3),
        ],
    )
    assert (merged.skeleton, merged.error) == (b"skeleton 0", "boom")


def test_the_lowest_stage_that_raised_by_itself_is_believed() -> None:
    merged = merge(
        [
            shipment(0, {}, "told"),
            shipment(1, {}, "one", own=True),
            shipment(2, {}, "two", own=True),
        ]
    )
    assert (merged.skeleton, merged.error) == (b"skeleton 1", "one")


def test_an_error_told_by_another_stage_is_kept_where_no_stage_claims_it() -> None:
    assert merge([shipment(0, {}, "told"), shipment(1, {})]).error == "told"


def test_stages_that_saved_different_counts_diverged_and_the_name_is_told() -> None:
    with pytest.raises(Diverged, match=r"stage 0 saved \['c'\]"):
        merge([shipment(0, {}, a=1, c=2), shipment(1, {}, a=1, c=3)])


def test_a_name_that_one_stage_lacks_is_divergence() -> None:
    with pytest.raises(Diverged, match="'only'"):
        merge([shipment(0, {}, only=1), shipment(1, {})])


def test_a_middle_stage_that_differs_is_named() -> None:
    with pytest.raises(Diverged, match="stage 1"):
        merge([shipment(0, {}, a=1), shipment(1, {}, a=2), shipment(2, {}, a=1)])


def test_different_counts_are_no_divergence_once_the_request_failed() -> None:
    merged = merge([shipment(0, {}, "boom", own=True, a=1), shipment(1, {}, a=2)])
    assert merged.error == "boom"


def test_a_leaf_shipped_twice_is_taken_from_the_lower_stage() -> None:
    merged = merge([shipment(0, {("h", 0): "zero"}, h=1), shipment(1, {("h", 0): "one"}, h=1)])
    assert merged.leaves == {("h", 0): "zero"}


# --- recordings -------------------------------------------------------------------------------


def part(index: int, *values: object, turns: Sequence[int] = ()) -> Part:
    return Part(index, turns or range(len(values)), list(values))


def test_recordings_unite_in_the_order_of_the_whole_model() -> None:
    zero = [{"m.b.output": part(5, "b"), "m.a.output": part(1, "a")}]
    one = [{"m.d.output": part(9, "d"), "m.c.output": part(7, "c")}]
    (merged,) = merge_parts([zero, one])
    assert list(merged) == ["m.a.output", "m.b.output", "m.c.output", "m.d.output"]
    assert list(merged.values()) == [["a"], ["b"], ["c"], ["d"]]


def test_several_recordings_keep_apart() -> None:
    found = merge_parts([[{"x": part(0, 1)}, {}], [{}, {"y": part(1, 2)}]])
    assert found == [{"x": [1]}, {"y": [2]}]


def test_a_stage_with_fewer_recordings_costs_the_others_nothing() -> None:
    assert merge_parts([[], [{"x": part(0, 1)}]]) == [{"x": [1]}]
    assert merge_parts([]) == []


def test_a_location_that_several_stages_visit_has_each_turns_visits_together() -> None:
    zero = part(0, "a0", "b0", "a1", "b1", turns=[0, 0, 1, 1])
    one = part(4, "c0", "c1")
    assert merge_parts([[{"rotary.output": zero}], [{"rotary.output": one}]]) == [
        {"rotary.output": ["a0", "b0", "c0", "a1", "b1", "c1"]}
    ]


def test_a_visit_that_one_stage_skips_moves_no_other_into_its_turn() -> None:
    zero = part(0, "a0", "a1", "a2")
    one = part(4, "b1", "b2", turns=[1, 2])
    assert merge_parts([[{"rotary.output": zero}], [{"rotary.output": one}]]) == [
        {"rotary.output": ["a0", "a1", "b1", "a2", "b2"]}
    ]
