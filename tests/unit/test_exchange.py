from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ppcore.core import ALWAYS
from ppcore.errors import SetupError
from ppcore.messages import Key, Worker
from ppcore.runtime import exchange, stubs
from ppcore.runtime.exchange import StageReport
from ppcore.runtime.interleaver import (
    SEQUENCES,
    TOKENS,
    Opaque,
    PPInterleaver,
    Recording,
    Rows,
    Shape,
    Template,
)
from ppcore.runtime.lazy import Base
from tests.unit.fake import CPU, Owner
from tests.unit.test_stubs import Missing, Model

TOKEN_COUNT, SEQUENCE_COUNT = 13, 11


# --- modules ----------------------------------------------------------------------------------


def test_homes_are_the_stages_on_which_a_module_is_real() -> None:
    reports = [
        exchange.report_modules(stage, "model", (Missing,))
        for stage in (Model(0, 2), Model(2, 4, norm=True))
    ]
    whole = exchange.merge_modules(reports)
    assert whole.homes["model.layers"] == {0, 1}
    assert whole.homes["model.layers.1"] == {0}
    assert whole.homes["model.layers.2.qkv"] == {1}
    assert whole.homes["model.norm"] == {1}


def test_a_module_with_children_on_several_stages_spans_them() -> None:
    reports = [
        exchange.report_modules(stage, "model", (Missing,)) for stage in (Model(0, 2), Model(2, 4))
    ]
    assert exchange.merge_modules(reports).spanning == {"model", "model.layers"}


def test_a_module_that_is_whole_on_every_stage_does_not_span() -> None:
    reports = [
        exchange.report_modules(torch.nn.Sequential(torch.nn.ReLU()), "m", ()) for _ in range(2)
    ]
    assert exchange.merge_modules(reports).spanning == set()


def test_loading_fills_every_stage_with_stubs_for_the_others() -> None:
    stages = [Model(0, 2), Model(2, 4, norm=True)]
    reports = [exchange.report_modules(stage, "model", (Missing,)) for stage in stages]
    for stage in stages:
        exchange.load(stage, "model", (Missing,), {}, lambda value: reports)
    trees = [{path for path, _ in stubs.modules(stage, "model")} for stage in stages]
    assert trees[0] == trees[1]
    assert stubs.is_stub(stages[0].norm) and stubs.is_stub(stages[1].layers[0])


# --- visits and templates ---------------------------------------------------------------------


def recorded(*visits: tuple[str, Any]) -> Recording:
    recording = Recording(TOKEN_COUNT, SEQUENCE_COUNT)
    for location, value in visits:
        recording.visit(location, value)
    return recording


def test_every_rank_learns_the_whole_order_and_every_template() -> None:
    rows = torch.zeros(TOKEN_COUNT, 4)
    stages = [recorded(("m.a.output", rows)), recorded(("m.b.output", (rows, None)))]
    reports = [StageReport({}, r.visits, r.templates) for r in stages]
    whole = exchange.merge_modules([{}, {}])
    exchange.learn(whole, [stages[0]], lambda value: reports)
    assert whole.schedule is not None
    assert [whole.schedule.owner(name, 0) for name in ("m.a.output", "m.b.output")] == [0, 1]
    assert whole.templates["m.b.output"].structure == (Shape((TOKENS, 4), torch.float32), None)


def test_a_forward_that_visits_nothing_is_an_error_of_the_setup() -> None:
    with pytest.raises(SetupError, match="visited no module"):
        exchange.merge_visits(exchange.merge_modules([{}, {}]), [StageReport(), StageReport()])


def test_a_spanning_modules_output_looks_as_on_the_last_stage() -> None:
    whole = exchange.Whole({}, {}, frozenset({"m"}))
    early = Template(Shape((TOKENS, 1), torch.float32))
    late = Template(Shape((TOKENS, 2), torch.float32))
    reports = [
        StageReport({}, ["m.output"], {"m.output": early}),
        StageReport({}, ["m.output"], {"m.output": late}),
    ]
    exchange.merge_visits(whole, reports)
    assert whole.templates["m.output"] == late


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        ((13, 4), (TOKENS, 4)),
        ((13,), (TOKENS,)),
        ((1, 13, 4), (1, TOKENS, 4)),
        ((11, 50), (SEQUENCES, 50)),
        ((4, 13), (4, 13)),
        ((13, 13), (TOKENS, 13)),
        ((5,), (5,)),
        ((), ()),
    ],
    ids=str,
)
def test_the_extent_that_follows_the_step_is_found(shape: tuple, extents: tuple) -> None:
    template = Template.of(torch.zeros(shape), TOKEN_COUNT, SEQUENCE_COUNT)
    assert template.structure == Shape(extents, torch.float32)


def test_a_leaf_that_is_no_data_crosses_by_its_types_name() -> None:
    template = Template.of((torch.zeros(2), object(), 3, "x"), TOKEN_COUNT, None)
    assert template.structure[1:] == (Opaque("object"), 3, "x")


def lazies_of(value: Any, rows: Rows, *, own_row: bool = False) -> Any:
    template = Template.of(value, TOKEN_COUNT, SEQUENCE_COUNT, own_row=own_row)
    base = Base(Owner(), Key(Worker("r"), 0), "m.a.output", 0, ALWAYS)
    return template.lazies(base, rows, CPU)


def test_lazies_have_the_workers_rows_and_the_values_structure() -> None:
    value = (torch.zeros(13, 4), [torch.zeros(13, dtype=torch.int64), {"k": torch.zeros(3)}], None)
    found = lazies_of(value, Rows(tokens=5, sequences=2, total=9))
    assert found[0].shape == (5, 4)
    assert (found[1][0].shape, found[1][0].dtype) == ((5,), torch.int64)
    assert found[1][1]["k"].shape == (3,)
    assert found[2] is None


def test_the_inputs_of_a_module_keep_what_is_given_by_position_and_by_name() -> None:
    value = ((torch.zeros(13),), {"hidden_states": torch.zeros(13, 4), "scale": 2.0})
    args, kwargs = lazies_of(value, Rows(tokens=5, sequences=2, total=9))
    assert [lazy.shape for lazy in args] == [(5,)]
    assert list(kwargs) == ["hidden_states", "scale"]
    assert kwargs["hidden_states"].shape == (5, 4) and kwargs["scale"] == 2.0


def test_a_row_for_each_sequence_is_served_whole_or_as_the_workers_own() -> None:
    value, rows = torch.zeros(11, 50), Rows(tokens=5, sequences=3, total=9)
    assert lazies_of(value, rows).shape == (3, 50)
    assert lazies_of(value, rows, own_row=True).shape == (1, 50)


def test_in_a_step_of_single_tokens_rows_of_sequences_are_narrowed_like_tokens() -> None:
    assert lazies_of(torch.zeros(11, 50), Rows(tokens=1, sequences=4, total=4)).shape == (1, 50)


def test_a_base_is_released_without_the_collector() -> None:
    owner = Owner()
    template = Template.of((torch.zeros(13, 4), None), TOKEN_COUNT, SEQUENCE_COUNT)
    base = Base(owner, Key(Worker("r"), 0), "m.a.output", 0, ALWAYS)
    gc.disable()
    try:
        template.lazies(base, Rows(5, 2, 9), CPU)
        del base
        assert len(owner.released) == 1
    finally:
        gc.enable()


def test_a_recording_interleaver_notes_visits_and_passes_values_through() -> None:
    interleaver = PPInterleaver()
    interleaver.recording = recording = Recording(TOKEN_COUNT)
    value = torch.zeros(13, 2)
    assert interleaver.handle("m.a.output", value) is value
    assert interleaver.handle("m.a.output", value[:1]) is not value
    assert recording.visits == ["m.a.output", "m.a.output"]
    assert recording.templates["m.a.output"].structure == Shape((TOKENS, 2), torch.float32)
