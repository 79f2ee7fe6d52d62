"""Strategies: each keeps its promise on a small run, and schedules are values that replay."""

from __future__ import annotations

import pytest

from ppsim import cases, fuzz, generate, world
from ppsim.cases import Case
from ppsim.strategies import PCT, POS, DelayBounding, RandomWalk, Recorder, Replay, Switch, Switches

CASE = cases.parse(
    "stages 2 columns 1 layers 1 shared 0 batching 0\n"
    "request A tokens 2\n  a = read L0.out\n  b = read L1.out\n  if b\n    save x a\n"
)


def recorded(case: Case, how: world.Strategy) -> tuple[world.World, Recorder]:
    recorder = Recorder(how)
    return world.run(case, recorder, record=True), recorder


@pytest.mark.parametrize("name", fuzz.STRATEGIES)
def test_a_strategy_is_a_function_of_its_seed_and_passes_a_sound_case(name: str) -> None:
    def go(seed: int) -> world.World:
        return world.run(CASE, fuzz.strategy(name, seed, 100), record=True)

    assert go(8).failure is None
    assert go(8).schedule == go(8).schedule
    # Odds that twelve seeds of a random strategy give one schedule: far below one in a million.
    different = len({tuple(go(8 * seed).schedule) for seed in range(12)})
    assert different == 1 if name == "base" else different > 1


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(KeyError):
        fuzz.strategy("dice", 0)


def test_the_base_schedule_switches_only_where_a_task_cannot_go_on() -> None:
    _, recorder = recorded(CASE, Switches())
    assert recorder.switches == []
    movers = [event.partition("+")[0].partition("-")[0] for event in recorder.schedule]
    for event, mover, following in zip(recorder.schedule, movers, [*movers[1:], None], strict=True):
        parks = event.endswith("-")
        # A task that ended leaves the runnable set too, and that is spelled like parking.
        assert following is None or (following == mover) == (not parks), event


def test_pct_without_change_points_runs_by_fixed_priorities() -> None:
    run = world.run(CASE, PCT(5, depth=1, events=100), record=True)
    first: list[str] = []
    for name in run.schedule:
        if name not in first:
            first.append(name)
    # The task of the highest priority is never interrupted: it moves whenever it can.
    assert run.failure is None and len(first) > 2


def test_pct_and_delays_draw_their_events_from_the_measured_length() -> None:
    short, long = PCT(3, depth=4, events=10), PCT(3, depth=4, events=10_000)
    assert max(short._changes) < 10 < max(long._changes)
    few, many = DelayBounding(3, delays=5, events=10), DelayBounding(3, delays=5, events=10_000)
    assert max(few._delays) < 10 < max(many._delays)


def test_every_fourth_execution_measures_its_case_by_the_third() -> None:
    for number in (3, 7, 11, 15):
        first = fuzz.execution(number - 1)
        how = fuzz.strategy_of(number)
        assert fuzz.case_of(number) == first.case
        assert isinstance(how, PCT | DelayBounding)
        places = how._changes if isinstance(how, PCT) else how._delays
        assert all(place < max(2, first.events) for place in places)
    cases_run = [fuzz.case_of(number) for number in range(40, 48)]
    assert len(set(map(cases.spell, cases_run))) == 6
    # Alone or in a row, an execution is the same.
    alone = [fuzz.execution(number).hash for number in range(40, 48)]
    assert [done.hash for _, done in fuzz.executions(40, 8)] == alone
    assert [done.hash for _, done in fuzz.executions(43, 5)] == alone[3:]


def test_pos_keeps_the_order_of_what_does_not_race() -> None:
    class Task:
        def __init__(self, number: int, name: str) -> None:
            self.number, self.name = number, name

    class Two:
        events = 0
        tasks = [Task(0, "f0.0"), Task(1, "l0.0<1"), Task(2, "f1.0")]
        runnable = tasks

    for seed in range(50):
        how = POS(seed)
        how.choose(Two)  # type: ignore[arg-type]
        before = dict(how._priorities)
        moved = how.choose(Two)  # type: ignore[arg-type]
        name = Two.tasks[moved].name
        if name == "f1.0":  # races with nothing else here
            kept = {n: p for n, p in how._priorities.items() if n in before}
            assert all(before[n] == p for n, p in kept.items())
        else:
            assert {0, 1}.isdisjoint(how._priorities)


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(0, 60, 7))
def test_a_replay_is_the_run_by_events_and_by_switches(number: int) -> None:
    case = fuzz.case_of(number)
    run, recorder = recorded(case, fuzz.strategy_of(number))
    copy = cases.parse(cases.spell(case))
    how = Replay(recorder.schedule)
    again = world.run(copy, how, record=True)
    assert how.divergence is None
    assert (again.hash, again.events, again.notes) == (run.hash, run.events, run.notes)
    switched = world.run(copy, Switches(recorder.switches))
    assert (switched.hash, switched.events) == (run.hash, run.events)


def test_a_divergence_names_the_first_event_that_differs() -> None:
    case = generate.case(5)
    run, recorder = recorded(case, RandomWalk(3))
    schedule = [*recorder.schedule[:4], "f9.9", *recorder.schedule[4:]]
    how = Replay(schedule)
    world.run(case, how)
    assert how.divergence is not None
    assert (how.divergence.event, how.divergence.recorded) == (4, "f9.9")
    assert run.schedule[4] in how.divergence.found


def test_a_replay_compares_who_can_move() -> None:
    _, recorder = recorded(CASE, RandomWalk(3))
    at = next(n for n, event in enumerate(recorder.schedule) if "+" in event and n > 5)
    schedule = list(recorder.schedule)
    schedule[at] = schedule[at].partition("+")[0]  # recorded by a version that woke nobody here
    how = Replay(schedule)
    world.run(CASE, how)
    assert how.divergence is not None and how.divergence.event == at
    assert recorder.schedule[at] in str(how.divergence)


def test_a_schedule_of_bare_names_replays_too() -> None:
    run, _ = recorded(CASE, RandomWalk(3))
    how = Replay(run.schedule)
    assert world.run(CASE, how).hash == run.hash and how.divergence is None


def test_a_switch_parses_back_and_one_that_does_not_come_about_does_nothing() -> None:
    switch = Switch("l1.0<0", 12, "f0.0")
    assert Switch.parse(str(switch)) == switch
    for text in ("f0.0@x>f1.0", "f0.0>f1.0", "f0.0@1", "@1>f0.0"):
        with pytest.raises(ValueError, match="not a switch"):
            Switch.parse(text)
    plain = world.run(CASE, Switches())
    assert world.run(CASE, Switches([Switch("f0.0", 10_000, "f1.0")])).hash == plain.hash
    assert world.run(CASE, Switches([Switch("f0.0", 3, "f1.0")])).hash != plain.hash
