"""What is asked for ahead: rows of reads, and the stories of the pulls that are made so."""

from __future__ import annotations

import pytest

from ppcore.series import FARTHEST, Series, after, stem
from tests.unit.network import LOGITS, WORKER, Network

LAYERS = [f"model.layers.{layer}.output" for layer in range(12)]


def begun(*visits: list[str]) -> Network:
    net = Network(visits or (LAYERS, [LOGITS]))
    net.begin()
    return net


def asked(net: Network) -> list[str]:
    """The messages of stage 1 that ask."""
    return [text for source, _, text in net.said if source == 1 and text.startswith("pull")]


def look(net: Network, location: str, expression: str = "") -> int:
    """Stage 1's block reads a location of stage 0 and looks at it; the pull's number."""
    return net.pull(1, net.touch(1, location), location, expression)


# --- series -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before, now, found",
    [
        ("layers.3.output", "layers.4.output", "layers.6.output"),
        ("layers.3.output", "layers.5.output", "layers.9.output"),
        ("layers.9.output", "layers.8.output", "layers.6.output"),
        ("layers.9.output", "layers.10.output", "layers.12.output"),
        ("layers.1.experts.7.output", "layers.1.experts.8.output", "layers.1.experts.10.output"),
        ("logits", "logits", "logits"),
        ("layers.1.output", "layers.0.output", None),
        ("layers.1.output", "layers.2.input", None),
        ("layers.1.experts.1.output", "layers.2.experts.2.output", None),
        ("layers.1.output", "logits", None),
        ("a.1", "b.1", None),
    ],
)
def test_two_locations_tell_the_next_but_one(before: str, now: str, found: str | None) -> None:
    assert after(before, now, 2) == found


def test_a_stem_is_what_locations_have_in_common() -> None:
    assert stem("model.layers.3.mlp.experts.11.output") == "model.layers.*.mlp.experts.*.output"


def test_what_is_asked_ahead_doubles_with_what_has_come_true() -> None:
    row = Series(0, "logits")
    counts = {n: len(found) for n in range(1, 64) if (found := row.goes_on(n, "logits"))}
    assert counts == {2: 1, 3: 2, 5: 4, 9: 8, 17: FARTHEST, 33: FARTHEST, 49: FARTHEST}


def test_another_stride_begins_anew() -> None:
    row = Series(0, "logits")
    assert [row.goes_on(n, "logits") for n in (2, 4)] == [[], [(6, "logits")]]
    assert [row.goes_on(n, "logits") for n in (7, 10)] == [[], []]
    assert row.goes_on(13, "logits") == [(16, "logits")]


def test_an_older_read_is_no_part_of_a_series() -> None:
    row = Series(0, "logits")
    row.goes_on(1, "logits")
    assert row.goes_on(0, "logits") == row.goes_on(1, "logits") == []
    assert row.goes_on(2, "logits") == [(3, "logits")]


# --- pulls ------------------------------------------------------------------------------------


def test_layers_in_a_row_take_fewer_messages_than_pulls() -> None:
    net = begun()
    numbers = []
    for layer, location in enumerate(LAYERS):
        numbers.append(look(net, location, "sum"))
        net.settle()
        net.read(0, location, f"h{layer}")
        net.settle()
    assert [net.landed[1][number] for number in numbers] == [f"sum of h{n}" for n in range(12)]
    assert net.cores[1].counters.pulls == 12
    # 0; 1; 2 and 3; 4 and 5; 6 to 9; the rest.
    assert len(asked(net)) == 6
    assert not net.cores[1]._ahead


def test_an_answer_that_is_here_lands_with_its_pull() -> None:
    net = begun()
    for layer, location in enumerate(LAYERS[:4]):
        net.read(0, location, f"h{layer}")
    for location in LAYERS[:3]:
        look(net, location)
    net.settle()
    before = dict(net.landed[1])
    assert len(before) == 3
    number = look(net, LAYERS[3])
    assert net.landed[1] == before | {number: "h3"}


def test_the_row_stops_where_another_stage_begins() -> None:
    net = begun(LAYERS[:4], [*LAYERS[4:], LOGITS])
    for location in LAYERS[:4]:
        look(net, location)
    assert [text.count("output") for text in asked(net)] == [1, 1, 2]


def test_a_wrong_guess_is_of_no_consequence() -> None:
    net = begun([*LAYERS[:5], "model.norm.output"], [LOGITS])
    for location in LAYERS[:3]:
        look(net, location)
    number = look(net, "model.norm.output")
    for layer, location in enumerate([*LAYERS[:3], "model.norm.output"]):
        net.read(0, location, f"h{layer}")
    net.settle()
    assert net.landed[1][number] == "h3"
    assert not net.refused[1]
    # The guess was refused, which is nobody's to hear.
    (answer,) = net.cores[1]._ahead.values()
    assert answer is not None and answer.token is None


def test_what_nobody_looks_at_is_forgotten() -> None:
    net = begun()
    for layer, location in enumerate(LAYERS[:5]):
        decision = net.touch(1, location)
        if layer < 3:
            net.pull(1, decision, location)
        net.read(0, location, f"h{layer}")
        net.settle()
        net.release(1, 0, decision.key)
        net.settle()
        assert layer < 3 or not any(net.cores[1]._ahead.values())
    assert net.cores[0].buffered() == (0, 0)


def test_a_refusal_ahead_is_told_to_who_pulls() -> None:
    net = begun()
    for location in LAYERS[:3]:
        look(net, location)
    net.settle()
    net.finish(0)
    net.settle()
    assert len(net.refused[1]) == 3
    number = look(net, LAYERS[3])
    assert "unreachable" in net.refused[1][number]


def test_a_death_is_told_to_who_pulls() -> None:
    net = begun()
    for location in LAYERS[:3]:
        look(net, location)
    net.do(1, net.cores[1].peer_died(0, "gone"))
    number = look(net, LAYERS[3])
    assert net.refused[1][number].startswith("died: stage 0")
    look(net, LAYERS[4])
    assert not net.cores[1]._ahead


def test_nothing_is_left_of_it_when_the_request_is_over() -> None:
    net = begun()
    for location in LAYERS[:3]:
        look(net, location)
    for stage in (0, 1):
        net.cores[stage].end(WORKER.request)
        net.do(stage, net.cores[stage].say_done(WORKER.request))
    net.settle()
    for core in net.cores:
        assert not core.requests and not core._ahead and core.pending() == 0 and core.drained()


def test_what_is_asked_ahead_is_no_wait() -> None:
    net = begun()
    for location in LAYERS[:3]:
        look(net, location)
    assert len(net.cores[1].waits()) == 3


def test_it_can_be_counted_on_only_from_the_turn_of_who_pulls() -> None:
    """Three turns of a later stage's value: the next turn's is under way, and cannot be waited for yet."""
    net = Network()
    net.begin()
    for turn in range(4):
        decision = net.touch(0, LOGITS, turn)
        if turn == 3:
            net.serve(1, net.touch(1, LOGITS, turn), LOGITS, f"l{turn}")
            net.settle()
        number = net.pull(0, decision, LOGITS)
        if turn < 3:
            net.settle()
            net.serve(1, net.touch(1, LOGITS, turn), LOGITS, f"l{turn}")
            net.settle()
            net.open_round(WORKER.request)
    assert net.landed[0][number] == "l3"
    assert not net.cores[0].may_wait([number])
    net.open_round(WORKER.request)
    assert net.cores[0].may_wait([number])
