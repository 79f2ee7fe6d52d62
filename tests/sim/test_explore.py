"""Exhaustive exploration: it proves, it refutes, and it says when it was cut."""

from __future__ import annotations

from typing import Any

import pytest

from ppsim import cases, fuzz, mutants
from ppsim.failures import Leak
from ppsim.strategies import RandomWalk, Replay, exhaustive
from ppsim.strategies.exhaustive import CONFIGURATIONS, Verdict
from ppsim.strategies.exhaustive.parts import RankPart, Space
from ppsim.world import run

SMALL = [
    "2x1-save",
    "2x1-force-earlier",
    "2x1-force-later",
    "2x1-force-later-busy",
    "2x2-force-later",
    "2x1-crash",
    "2x1-call",
    "2x4-row",
]


def explore(name: str, **options: Any) -> exhaustive.Exploration:
    return exhaustive.explore(name, CONFIGURATIONS[name], **options)


@pytest.mark.parametrize("name", SMALL)
def test_the_reduction_keeps_the_verdict_and_every_end(name: str) -> None:
    reduced, whole = explore(name), explore(name, reduce=False)
    assert reduced.verdict is whole.verdict is Verdict.PROVED, (reduced.reason, whole.reason)
    assert reduced.ends == whole.ends
    assert reduced.states < whole.states
    assert reduced.interleavings < whole.interleavings


#: Bugs that a small case shows: one of each way in which it can go wrong.
SHOWN = [
    ("2x1-save", "done-not-said"),
    ("2x1-force-later-busy", "waits-for-its-own-turns-later-stage"),
    ("2x1-force-later-busy", "never-woken"),
    ("2x1-force-later", "published-after-it-was-asked-for"),
    ("2x1-save", "everybody-ships"),
    ("2x1-crash", "the-dead-are-waited-for"),
    ("2x1-call", "result-under-the-next-name"),
    ("2x4-row", "an-answer-ahead-is-lost"),
]


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("name, bug", SHOWN)
def test_a_bug_is_refuted_with_a_schedule_that_replays(name: str, bug: str, reduce: bool) -> None:
    with mutants.planted(mutants.named(bug)):
        found = explore(name, reduce=reduce)
        assert found.verdict is Verdict.REFUTED, found.reason
        how = Replay(found.schedule)
        again = fuzz.execute(CONFIGURATIONS[name], how)
    assert found.failure is not None and again.failure is not None
    assert again.failure.name == found.failure.name
    assert how.divergence is None


def test_a_search_that_is_cut_proves_nothing() -> None:
    found = explore("3x4", seconds=0.1)
    assert found.verdict is Verdict.UNDETERMINED and "cut" in found.reason
    found = explore("3x4", states=100)
    assert found.verdict is Verdict.UNDETERMINED and "cut" in found.reason


def test_what_may_happen_only_after_all_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that raises on one rank alone is not known beforehand; the search begins again."""
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n"
        "  a = read L0.out\n  if a\n    raise 3\n  raise 4\n"
    )
    searches: list[Any] = []
    search = exhaustive.Search
    monkeypatch.setattr(
        exhaustive, "Search", lambda *a, **k: searches.append(search(*a, **k)) or searches[-1]
    )
    found = exhaustive.explore("raise", case)
    assert found.verdict is Verdict.PROVED, found.reason
    assert [one.grants.raises for one in searches] == [False, True]


def test_states_that_differ_have_different_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told apart by the core's tables, which the digest does not read in this way."""
    seen: dict[tuple[int, int], str] = {}
    settle = Space._settle

    def compared(self: Space, part: Any, came: Any) -> int:
        number = settle(self, part, came)
        if isinstance(part, RankPart):
            requests = part.me.core._requests
            told = repr(
                [
                    (
                        name,
                        sorted(
                            repr((key, [getattr(entry, name) for name in entry.__slots__]))
                            for key, entry in dict.items(state.buffer)
                        ),
                        dict(dict.items(state.waiting)),
                        sorted(dict.items(state.released), key=repr),
                        sorted(set.__iter__(state.done)),
                        (state.said_done, state.ended, state.rounds),
                    )
                    for name, state in dict.items(requests)
                ]
            )
            assert seen.setdefault((id(self), number), told) == told
        return number

    monkeypatch.setattr(Space, "_settle", compared)
    assert explore("3x1-save").verdict is Verdict.PROVED
    assert len(seen) > 100


def test_cases_that_cannot_be_explored_are_refused() -> None:
    head = "stages 2 columns {} layers 1 shared 0 batching 0\nrequest A tokens 1\n"
    for text in (head.format(2), head.format(1) + "fault die 0 0 3\n"):
        with pytest.raises(ValueError, match="explore"):
            exhaustive.explore("no", cases.parse(text))


def test_a_failure_of_the_parts_alone_is_an_error_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cries(self: Any, now: Any, stage: int, key: Any, peers: Any) -> None:
        raise Leak("bounded", "wolf")

    monkeypatch.setattr(exhaustive.Search, "_kept", cries)
    with pytest.raises(AssertionError, match="wolf"):
        explore("2x1-force-later")


def test_configurations_pass_a_walk_too() -> None:
    for case in CONFIGURATIONS.values():
        assert run(case, RandomWalk(1)).failure is None
