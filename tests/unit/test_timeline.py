"""Timelines: the file that grows, reading it back, the summary and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ppcore.cli import main
from ppcore.runtime.timeline import LIMIT, Event, Timeline, clock_offset_ns
from ppcore.vllm.timeline import Part, TimelineFile, read, summary, svg, window

MS = 1_000_000  # nanoseconds


def parts(start_ms: int = 0) -> list[Part]:
    """Stage 1 pulls from stage 0, which serves it."""
    at = start_ms * MS
    early = [
        Event("handoff", "forward", "a.output", at + 1 * MS, at + 2 * MS),
        Event("serve", "listener", "r[0]", at + 4 * MS, at + 5 * MS, (1, 0, start_ms)),
        Event("round", "forward", "round 0", at, at + 6 * MS),
    ]
    late = [
        Event("pull", "pulls", "a.output", at + 3 * MS, at + 7 * MS, (1, 0, start_ms)),
        Event("wait", "forward", "a pull", at + 3 * MS, at + 7 * MS),
        Event("parked", "worker r", "reads b.output", at + 8 * MS, at + 9 * MS),
        Event("round", "forward", "round 0", at + 1 * MS, at + 10 * MS),
    ]
    return [Part(0, 0, 0, early), Part(1, 1, 0, late)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "timeline.json"
    written = TimelineFile(path)
    written.append(parts())
    written.append(parts(start_ms=20))
    return path


def test_the_file_is_json_from_the_start_and_after_every_part(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    written = TimelineFile(path)
    assert json.loads(path.read_text())["traceEvents"] == []
    counts = []
    for start in (0, 20, 40):
        written.append(parts(start))
        counts.append(len(json.loads(path.read_text())["traceEvents"]))
    assert counts[0] < counts[1] < counts[2]
    assert counts[2] - counts[1] == counts[1] - counts[0] < counts[0]  # names are told once


def test_what_is_read_is_what_was_recorded(file: Path) -> None:
    found = read(file)
    assert found.ranks == {0: "stage 0, column 0", 1: "stage 1, column 0"}
    assert set(found.rows.values()) == {"forward", "answers to peers", "pulls", "worker r"}
    pulls = [span for span in found.spans if span.kind == "pull"]
    assert [(span.began, span.ended) for span in pulls] == [(3000.0, 7000.0), (23000.0, 27000.0)]


def test_arrows_run_from_the_pull_to_its_answer_and_back(tmp_path: Path) -> None:
    written = TimelineFile(tmp_path / "one.json")
    written.append(parts())
    arrows = sorted(read(written.path).arrows)
    assert arrows == [((3000.0, 1), (4000.0, 0)), ((5000.0, 0), (7000.0, 1))]


def test_the_summary_counts_and_adds_up(file: Path) -> None:
    first, second = summary(read(file))
    assert (first["rounds"], first["rounds_ms"], first["served"]) == (2, 12.0, 2)
    assert (second["pulls"], second["pull_median_ms"], second["waits_ms"]) == (2, 4.0, 8.0)
    assert first["pull_median_ms"] is None


def test_a_window_cuts_spans(file: Path) -> None:
    cut = window(read(file), 0.0, 4.0)
    assert max(span.ended for span in cut.spans) == 4000.0
    assert {span.name for span in cut.spans if span.rank == 0} == {"round 0", "a.output", "r[0]"}


def test_the_picture_shows_every_span(file: Path) -> None:
    recorded = read(file)
    drawn = ElementTree.fromstring(svg(recorded))
    titles = [node for node in drawn.iter() if node.tag.endswith("title")]
    assert len(titles) == len(recorded.spans)
    assert len([node for node in drawn.iter() if node.tag.endswith("line")]) == 4


def test_the_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "t.svg"
    assert main(["timeline", str(file), "--json", "--svg", str(picture)]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 2
    assert picture.read_text().startswith("<svg")
    assert main(["timeline", str(file)]) == 0
    assert "stage 1, column 0" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", "nothing"])
def test_a_file_of_something_else_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    assert main(["timeline", str(path)]) == 2
    assert "not a Chrome trace" in capsys.readouterr().out


def test_an_empty_timeline_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TimelineFile(tmp_path / "empty.json")
    assert main(["timeline", str(tmp_path / "empty.json")]) == 0
    assert "nothing recorded" in capsys.readouterr().out


# --- recording --------------------------------------------------------------------------------


def test_events_are_taken_once_and_bounded_and_those_that_are_missing_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = Timeline(column=0)
    written = TimelineFile(tmp_path / "lost.json")
    for number in range(LIMIT + 3):
        timeline.add("round", "forward", str(number), number)
    events = timeline.take()
    assert len(events) == LIMIT + 1
    assert events[-1][:4] == ("lost", "forward", "3", LIMIT)
    assert timeline.take() == []
    written.append([Part(0, 0, 0, events[-2:])])
    timeline.add("round", "forward", "after", 0)
    written.append([Part(0, 0, 0, timeline.take())])
    assert summary(read(written.path))[0]["lost"] == 3
    assert "events are missing" in svg(read(written.path))
    assert main(["timeline", str(written.path)]) == 0
    assert "3 events are missing" in capsys.readouterr().out


def test_ranks_of_one_machine_share_its_clock() -> None:
    assert clock_offset_ns(lambda mine: [mine, mine]) == 0


def test_a_rank_elsewhere_adds_the_difference_of_the_wall_clocks() -> None:
    offset = clock_offset_ns(lambda mine: [("another machine", mine[1] - 5 * MS), mine])
    assert offset == 5 * MS
