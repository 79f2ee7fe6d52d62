"""Records of simulated runs: accepted as they are, rejected when anything is wrong with them."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ppcore import record
from ppcore.core import Core
from ppcore.record import EVENTS, Header, Recorder, parse_event
from ppsim import conform, generate, mutants, world
from ppsim.cases import Case
from ppsim.conform.properties import PROPERTIES
from ppsim.conform.records import Finding, read
from ppsim.strategies import RandomWalk
from tests.sim.corrupted_waits import KINDS
from tests.sim.corruptions import Records, mixed


@contextmanager
def recording() -> Iterator[list[list[str]]]:
    """Simulated ranks record; their records, a column after the other."""
    records: list[list[str]] = []

    def core(stage: int, *args: object) -> Recorder:
        lines: list[str] = []
        records.append(lines)
        return Recorder(stage, *args, lines.append)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world, "Core", core)
        yield records


def recorded(case: Case, seed: int) -> Records:
    """The records of a case's ranks."""
    with recording() as records:
        done = world.run(case, RandomWalk(seed))
    assert done.failure is None
    for number, lines in enumerate(records):
        column = number // case.stages
        lines[0] = lines[0].replace('"column":0', f'"column":{column}')
        lines.append("close []")
    return records


def runs(count: int) -> Iterator[tuple[int, Records]]:
    """(seed, records) of generated cases."""
    for seed in range(count):
        case = generate.case(seed)
        # A rank that dies leaves no whole record; the columns of a stage do not fail apart.
        kinds = {"stall", "raise"} if case.columns == 1 else {"stall"}
        faults = tuple(fault for fault in case.faults if fault.kind in kinds)
        yield seed, recorded(replace(case, faults=faults), seed)


def verdict(records: Records, only: object = PROPERTIES) -> conform.Verdict:
    try:
        found = [read(lines, f"rank{number}") for number, lines in enumerate(records)]
    except Finding as finding:
        return conform.Verdict((finding,), len(records), 0, 0)
    return conform.check(found, only)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def some() -> list[Records]:
    """Records of runs of one column, each of which moved something."""
    found = [records for _, records in runs(80) if len(records) < 4]
    return [r for r in found if any(" pull [" in line for lines in r for line in lines)]


def test_every_generated_run_is_accepted() -> None:
    for seed, records in runs(100):
        found = verdict(records)
        assert found.accepted, f"seed {seed}: {found.findings[0]}"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_corruption_is_rejected(name: str, some: list[Records]) -> None:
    draw = random.Random(name)
    rejected = 0
    for attempt in range(400):
        records = copy.deepcopy(some[attempt % len(some)])
        changed = KINDS[name](records, draw)
        if changed is None:
            continue
        assert not verdict(changed).accepted, f"{name} at attempt {attempt}"
        rejected += 1
        if rejected == 12:
            return
    assert rejected >= 5, f"{name} has no place in these runs"


def test_a_file_of_another_run_is_rejected(some: list[Records]) -> None:
    draw = random.Random(0)
    pairs = [r for r in some if len(r) == 2]
    for one, other in zip(pairs, pairs[1:], strict=False):
        renamed = [[line.replace('"A"', '"Z"') for line in lines] for lines in other]
        assert not verdict(mixed(copy.deepcopy(one), renamed, draw)).accepted


#: A bug of the core, and the property that sees it in a record that this core would write again.
SEEN = {
    "another-workers-value": "names",
    "access-number-stands-still": "names",
    "pulled-again-each-time": "once",
    "numbers-start-again": "answers",
    "no-gate": "places",
    "behind-the-clock-is-served": "places",
    "waits-for-a-later-stage": "waits",
    "release-to-the-wrong-owner": "release",
    "dropped-at-any-done": "rest",
    "merge-prefers-the-lazy": "ships",
}


@pytest.mark.parametrize("name", SEEN)
def test_a_wrong_core_does_not_vouch_for_itself(name: str) -> None:
    # What `replay` would say is left out: in the field, too, it may be the same wrong core.
    others = [other for other in PROPERTIES if other != "replay"]
    with mutants.planted(mutants.named(name)):
        for seed in range(400):
            with recording() as records:
                case = generate.case(seed, faults=False)
                if case.columns > 1:
                    continue
                world.run(case, RandomWalk(seed))
            for lines in records:
                lines.append("close []")
            if SEEN[name] in {found.property for found in verdict(records, others).findings}:
                return
    pytest.fail(f"{name} is never seen by {SEEN[name]!r}")


def test_a_core_that_decides_otherwise_is_told_the_line() -> None:
    with mutants.planted(mutants.named("gate-one-turn-early")), recording() as records:
        for seed in range(60):
            world.run(generate.case(seed, faults=False), RandomWalk(seed))
    findings = [f for lines in records for f in verdict([lines], ["replay"]).findings]
    assert findings
    assert all("expected 'a" in found.text and found.line > 1 for found in findings)


def test_every_method_that_changes_a_core_is_an_event() -> None:
    asked = {
        "access", "again", "asked_for", "available", "awaits", "between", "buffered", "call", "clock",
        "drained", "ended", "held", "home", "knows", "may_block", "may_wait", "occurrence", "pending",
        "reached", "requests", "turn", "unheard", "waits", "wanted", "workers",
    }  # fmt: skip
    public = {name for name in vars(Core) if not name.startswith("_")}
    assert public == asked | EVENTS


def test_a_header_and_events_parse_back(some: list[Records]) -> None:
    for lines in some[0]:
        assert Header.parse(lines[0]).spell() == lines[0]
        for line in lines[1:]:
            if not line.startswith("  "):
                assert parse_event(line).word == line.split()[0]


@pytest.mark.parametrize(
    "text",
    ["", "access", "access []", 'access [["r",""],"a"]', "nothing [1]", "take 0", "take x done []"],
)
def test_what_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an event|not a message|invalid literal"):
        parse_event(text)


def test_the_example_in_the_docstring_is_a_record() -> None:
    text = inspect.getdoc(record) or ""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    found = read(lines, "example")
    assert len(found.steps) == 7 and found.closed
    assert list(PROPERTIES["replay"](conform.Run([found]))) == []
