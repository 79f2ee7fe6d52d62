"""Records of real ranks over gloo: runs of the model, and rejected when anything is wrong with them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppcore.errors import SetupError
from ppcore.record import Recorder
from ppcore.runtime.recording import VARIABLE, make_core
from ppcore.schedule import Schedule
from ppsim.cli import main as ppsim
from ppsim.conform import check, check_files
from ppsim.conform.records import Finding, read
from tests.harness.record import column, runs
from tests.sim.corrupted_waits import KINDS
from tests.sim.corruptions import Records, mixed

RUNS = 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[Path]]]:
    """The files of real runs, each of which moved something."""
    with column(2) as cluster:
        yield list(runs(cluster, RUNS, tmp_path_factory.mktemp("records")))


@pytest.fixture(scope="module")
def records(made: list[list[Path]]) -> list[Records]:
    return [[path.read_text().splitlines() for path in paths] for paths in made]


def accepted(changed: Records) -> bool:
    try:
        found = [read(lines, f"rank{number}") for number, lines in enumerate(changed)]
    except Finding:
        return False
    return check(found).accepted


def test_real_runs_are_accepted_by_the_command(
    made: list[list[Path]], capsys: pytest.CaptureFixture
) -> None:
    folders = [str(paths[0].parent) for paths in made]
    assert ppsim(["conform", "--json", *folders]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["runs"], answer["accepted"], answer["ranks"]) == (RUNS, RUNS, 2 * RUNS)
    # Nothing is proved by runs in which nothing happened.
    assert answer["messages"] > 5 * RUNS


def test_a_rank_leaves_rounds_of_which_it_said_so_and_the_last_stage_none(
    records: list[Records],
) -> None:
    left = 0
    for first, last in records:
        said = False
        for line in first:
            if line.startswith("open_round "):
                said = False
            said = said or line == "will_leave_round []"
            if line == "leave_round []":
                assert said
                left += 1
        assert not any("leave_round" in line for line in last)
    assert left


def test_a_rejection_names_file_line_and_what_was_expected(
    made: list[list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    one, two = made[0]
    lines = two.read_text().splitlines()
    line = next(n for n, text in enumerate(lines) if text.startswith("take "))
    wrong = tmp_path / "wrong.log"
    wrong.write_text("\n".join([*lines[:line], *lines[line + 1 :]]) + "\n")
    assert ppsim(["conform", str(one), str(wrong)]) == 9
    out = capsys.readouterr().out
    assert f"{wrong}:" in out and "fifo: " in out and "0 of 1 runs accepted" in out


def test_a_record_that_is_cut_says_so(made: list[list[Path]], tmp_path: Path) -> None:
    one, two = made[0]
    short = tmp_path / "short.log"
    short.write_text("".join(two.read_text().splitlines(keepends=True)[:-1]))
    texts = [str(finding) for finding in check_files([one, short]).findings]
    assert any("ends without close" in text for text in texts)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_corruption_is_rejected(name: str, records: list[Records]) -> None:
    draw = random.Random(name)
    tried = 0
    for attempt in range(RUNS):
        changed = KINDS[name](copy.deepcopy(records[attempt % RUNS]), draw)
        if changed is not None:
            assert not accepted(changed), f"{name} at attempt {attempt}"
            tried += 1
    seldom = {"error-text", "sent-messages-swapped", "taken-messages-swapped"}
    if name not in seldom | {"wait-against-the-rule"}:
        assert tried, f"{name} has no place in these runs"


def test_a_file_of_another_run_is_rejected(records: list[Records]) -> None:
    draw = random.Random(0)
    for one, other in zip(records, records[1:], strict=False):
        assert not accepted(mixed(copy.deepcopy(one), other, draw))


def test_ranks_record_where_the_environment_says_and_never_over_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule.build([["a.output"], ["b.output"]])
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not isinstance(make_core(1, schedule, {}), Recorder)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    core = make_core(1, schedule, {"a": [0]}, 3)
    core.open_round(["r"])
    lines = (tmp_path / "new" / "stage1-column3.log").read_text().splitlines()
    assert lines[1:] == ['open_round [["r"]]']
    with pytest.raises(SetupError, match="stage1-column3"):
        make_core(1, schedule, {}, 3)
