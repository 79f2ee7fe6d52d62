"""What the engine and the network may do to a run, one at a time: what it changes, and what not."""

from __future__ import annotations

import re

import pytest

from ppsim import cases, mutants, world
from ppsim.strategies import RandomWalk
from ppsim.world import World

HEAD = "stages {0} columns {1} layers 1 shared 0 batching {2}\n"

PULLS = (
    "  for :\n    b = read L0.in\n    a = read L1.out\n    if a\n      append out a\n"
    "    c = mix a b\n"
)


def runs(text: str, schedules: int = 60) -> list[World]:
    """The case under the first random walks."""
    case = cases.parse(text)
    return [world.run(case, RandomWalk(seed)) for seed in range(schedules)]


def failures(done: list[World]) -> list[str]:
    return sorted({str(run.failure) for run in done if run.failure is not None})


def test_a_request_whose_client_goes_away_leaves_nothing_at_any_moment() -> None:
    other = "request B tokens 3\n  a = read L1.out\n  save x a\n"
    mid = 0
    for at in range(0, 60, 3):
        fault = f"fault abort A {at}\n"
        text = HEAD.format(3, 1, 5) + f"request A tokens 4\n{PULLS}{other}{fault}"
        done = runs(text, 12)
        assert failures(done) == []
        assert all("B" in run.engine.outcomes for run in done)
        mid += sum(0 < len(run.engine.progress["A"].rounds) < 4 for run in done)
    assert mid > 20


def test_a_plain_request_whose_client_goes_away_is_told_by_the_next_step() -> None:
    text = (
        HEAD.format(2, 1, 0)
        + "request A tokens 4\nblock A tap\n"
        + PULLS.replace("append out a", "b = derive a 1")
    )
    done = runs(text + "fault abort A 10\n")
    assert failures(done) == []
    assert any(run.engine.progress["A"].aborted for run in done)
    with mutants.planted(mutants.named("aborted-request-stays")):
        assert any("rest" in failure for failure in failures(runs(text + "fault abort A 10\n")))


def test_a_link_that_stalls_changes_nothing() -> None:
    text = HEAD.format(2, 1, 0) + f"request A tokens 3\n{PULLS}"
    calm, stalled = runs(text), runs(text + "fault stall 0 0 1 5 150\n")
    assert failures(calm) == failures(stalled) == []
    (expected,) = {str(run.engine.outcomes["A"]) for run in calm}
    assert {str(run.engine.outcomes["A"]) for run in stalled} == {expected}


def errors(done: list[World], request: str) -> set[str]:
    """How the request ended for its client, in a word."""
    found = set()
    for run in done:
        outcome = run.engine.outcomes[request]
        error = outcome.merged.error if outcome.merged is not None else outcome.problem
        found.add((error or "no error").partition(":")[0])
    return found


def test_a_message_past_its_deadline_ends_its_own_request_with_a_report() -> None:
    other = "request B tokens 3\n  a = read L1.out\n  save x a\n"
    text = HEAD.format(2, 1, 0) + f"request A tokens 3\n{PULLS}{other}fault late 0 0 1 2\n"
    done = runs(text, 200)
    assert failures(done) == []
    assert errors(done, "A") == {"no error", "DeadlineExceeded"}
    reports = [
        str(run.engine.outcomes["A"])
        for run in done
        if "DeadlineExceeded" in str(run.engine.outcomes["A"])
    ]
    assert all("stage 0 (round " in report for report in reports)
    pattern = re.compile(r"waits for 'L1.out' \(A#\d\) from stage 1, due in turn \d")
    assert any(pattern.search(report) for report in reports), reports
    # B may wait too, and then ends by it as well; otherwise it is untouched.
    assert "no error" in errors(done, "B")


def test_several_sequences_end_at_different_times_and_come_home_together() -> None:
    text = HEAD.format(2, 1, 77) + (
        "container rows 2\n"
        "request A tokens 4 eos 1 n 2\n  a = read L0.out\n  b = derive a 2\n  put rows 1 b\n"
        "  for 1:\n    c = read logits\n    append out c\n"
    )
    done = runs(text)
    assert failures(done) == []
    lengths = {len(progress.tokens) for progress in done[0].engine.progress.values()}
    merged = done[0].engine.outcomes["A"].merged
    assert len(lengths) == 2 and merged is not None
    assert {label for label, _ in merged.leaves} >= {"0//rows", "1//rows"}


def test_a_stop_string_is_heard_of_later_and_the_result_knows_nothing_of_that() -> None:
    text = HEAD.format(2, 1, 15) + (
        "request A tokens 6 stop 2 ignore_eos\n  r = read result\n  save r r\n"
    )
    done = runs(text)
    assert failures(done) == []
    progress = done[0].engine.progress["A"]
    assert len(progress.rounds) > 2 and len(progress.kept) == 2


def test_a_request_that_arrives_later_starts_in_a_later_round() -> None:
    text = HEAD.format(2, 1, 0) + f"request A tokens 4\n{PULLS}request B tokens 2 after 2\n{PULLS}"
    done = runs(text)
    assert failures(done) == []
    assert done[0].engine.progress["B"].rounds[0] >= 2


@pytest.mark.parametrize("columns", [(0,), (1,), (0, 1)])
def test_a_block_that_raises_on_one_stage_may_part_its_columns_and_does_nothing_worse(
    columns: tuple[int, ...],
) -> None:
    text = HEAD.format(2, 2, 0) + "request A tokens 3\n  for :\n    a = read L0.out\n    save x a\n"
    faults = "".join(f"fault raise 0 {column} A 1\n" for column in columns)
    done = runs(text + faults)
    assert failures(done) == []
    parted = [run for run in done if any(not t.done for t in run.tasks if t.name[0] == "f")]
    assert bool(parted) == (columns != (0, 1))  # together, they raise before the next gather


def test_columns_that_part_without_a_fault_are_a_failure() -> None:
    text = HEAD.format(2, 2, 0) + "request A tokens 2\n  a = read L0.out\n  raise 6\n"
    with mutants.planted(mutants.named("ended-elsewhere-too-soon")):
        found = failures(runs(text, 300))
    assert any(failure.startswith(("columns-agree", "ends")) for failure in found), found
