"""The fuzzer's command: what a failing run ends with, and what its files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppsim import cli, commands, fuzz, mutants
from ppsim.commands import rates
from ppsim.hunts import Rate
from ppsim.marks import Marks
from ppsim.strategies import Switches


def answer(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, object]]:
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_a_failing_run_ends_with_the_shrunk_case_its_token_and_what_replays_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.case"
    bug = ["--mutant", "done-not-said", "--json"]
    code = cli.main(["fuzz", "--executions", "200", "--save", str(path), *bug])
    out, found = answer(capsys)
    assert code == 6 and found["failures"] == 1  # something is left over
    token = str(found["token"])
    assert f"python -m ppsim replay {token} --mutant done-not-said" in out
    assert "stages 2" in out and "# schedule" in out and len(token) <= 64

    assert cli.main(["replay", token, *bug]) == 6
    _, by_token = answer(capsys)
    assert cli.main(["replay", str(path), *bug]) == 6
    out, by_file = answer(capsys)
    assert "diverged" not in out
    assert by_token == by_file and "rest" in str(by_file["failure"])
    assert cli.main(["replay", str(path), "--json"]) == 0, "the bug is gone, and so is the failure"
    out, _ = answer(capsys)
    assert "diverged at event" in out


def test_a_case_file_holds_its_schedule_twice(tmp_path: Path) -> None:
    with mutants.planted(mutants.named("done-not-said")):
        number = next(n for n, done in fuzz.executions(0, 500) if done.failure is not None)
        found = fuzz.finding(number)
        assert found is not None
        case, switches, schedule = fuzz.load(fuzz.describe(found))
        assert (case, switches, schedule) == (found.case, found.switches, found.schedule)
        again = fuzz.execute(case, Switches(switches))
    assert again.failure is not None and again.events == len(schedule)


def test_draw_and_export_take_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = "1o7KhEJcCAA"
    assert cli.main(["draw", token, "--out", str(tmp_path / "x.svg")]) == 0
    assert cli.main(["export", token, "--out", str(tmp_path / "x.json")]) == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


def test_a_run_names_the_lines_of_the_core_that_it_never_reached() -> None:
    with Marks() as marks:
        for _ in fuzz.executions(0, 40):
            pass
    missed = "\n".join(marks.missed())
    assert "peer_died" not in missed  # its call; the body is what may be missed
    assert "takes part in a round after its end" in missed  # an assertion that holds
    assert "state.clock = place" not in missed


def test_hashes_of_another_process_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["determinism", "--seeds", "12", "--jobs", "1", "--json"]) == 0
    _, found = answer(capsys)
    assert (found["seeds"], found["different"]) == (12, 0)


def test_mutants_are_counted_with_their_rates(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "done-not-said", "--only", "no-gate"]
    code = cli.main(["mutants", *only, "--jobs", "1", "--rates", "10", "--shrink", "--json"])
    out, found = answer(capsys)
    assert (code, found["killed"], found["total"], found["survivors"]) == (0, 2, 2, [])
    rows = found["rates"]
    assert isinstance(rows, list)
    assert [(row["mode"], row["strategy"]) for row in rows] == [
        ("core", how) for how in fuzz.STRATEGIES
    ]
    for row in rows:
        assert row["low"] < row["share"] < row["high"]
        assert (row["runs"], row["mutants"]) == (20, 2)
        assert row["share"] == pytest.approx(row["hits"] / 20)
    shrinking = found["shrinking"]
    assert isinstance(shrinking, dict) and shrinking["longest_token"] <= 64
    assert shrinking["median_ratio"] <= 1.5
    assert "without it too" not in out


def test_each_mutant_has_cases_of_its_own() -> None:
    drawn = [
        {*range(first, first + 50)}
        for first in (rates.cases_of(mutant.name, 7, 50) for mutant in mutants.CATALOGUE)
    ]
    assert min(map(min, drawn)) == 7
    assert len(set.union(*drawn)) == 50 * len(mutants.CATALOGUE)


def test_the_table_of_rates_is_put_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{rates.BEGIN}\nold\n{rates.END}\nbelow\n")
    words = ["mutants", "--only", "no-gate", "--jobs", "1", "--rates", "10", "--seed", "3"]
    assert cli.main([*words, "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text
    lines = [line for line in text.splitlines() if line.startswith("| core")]
    assert [line.split(" | ")[1:4] for line in lines] == [
        [f"`{how}`", "1", "10"] for how in fuzz.STRATEGIES
    ]
    assert "cases from seed 3 on" in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no part"):
        rates.fill(page, [], 0)


def test_the_pages_shares_and_intervals_are_those_of_its_hits() -> None:
    page = (Path(__file__).parents[2] / "docs/simulator.md").read_text()
    part = page[page.index(rates.BEGIN) : page.index(rates.END)]
    rows = [
        line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| core")
    ]
    assert [row[1] for row in rows] == [f"`{how}`" for how in fuzz.STRATEGIES]
    for _, _, _, runs, hits, share, interval, _ in rows:
        rate = Rate(int(hits), int(runs))
        low, high = rate.interval
        assert (share, interval) == (f"{rate.share:.1%}", f"{low:.1%} to {high:.1%}")


def test_an_interrupted_hunt_tells_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = commands.mutants._one

    def until(name: str, **options: Any) -> dict[str, Any]:
        if name != "no-gate":
            raise KeyboardInterrupt
        return one(name, **options)

    monkeypatch.setattr(commands.mutants, "_one", until)
    only = ["--only", "no-gate", "--only", "done-not-said"]
    assert cli.main(["mutants", *only, "--jobs", "1", "--rates", "2", "--json"]) == 8
    out, found = answer(capsys)
    assert (found["killed"], found["total"], found["interrupted"]) == (1, 1, True)
    assert "interrupted: 1 were not looked for" in out and found["rates"]


def test_a_survivor_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "round-not-counted", "--rates", "0"]
    only += ["--executions", "1", "--seconds", "0"]
    assert cli.main(["mutants", *only, "--json"]) == 7
    _, found = answer(capsys)
    assert found["survivors"] == ["round-not-counted"]
    assert cli.main(["mutants", "--only", "no such mutant"]) == 2
