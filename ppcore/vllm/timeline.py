"""`ppcore timeline FILE`: what `VLLM(..., timeline=FILE)` recorded, in words and as a picture.

The file is a Chrome trace, which Perfetto and about:tracing show. It is whole after every trace: what
the ranks recorded comes with what they ship for a finished request, and the client appends it.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

_HEAD = '{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = "\n]}\n"

#: The rows of a rank that are not a worker's, by track.
_ROWS = {"forward": (0, "forward"), "listener": (1, "answers to peers"), "pulls": (2, "pulls")}


class Part(NamedTuple):
    """What one rank recorded since the last part. ``events`` are `ppcore.runtime.timeline.Event`s."""

    rank: int
    stage: int
    column: int
    events: list[Any]


# --- writing ----------------------------------------------------------------------------------


class TimelineFile:
    """A Chrome trace that grows and is valid JSON in between.

    Args:
        path: overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._known: set[tuple[int, int]] = set()
        self._empty = True
        self.path.write_text(_HEAD + _TAIL)

    def append(self, parts: Iterable[Part]) -> None:
        """Add what ranks recorded."""
        lines = [json.dumps(event) for part in parts for event in self._events(part)]
        if not lines:
            return
        with self.path.open("r+b") as file:
            file.seek(-len(_TAIL), os.SEEK_END)
            joint = "" if self._empty else ",\n"
            file.write((joint + ",\n".join(lines) + _TAIL).encode())
        self._empty = False

    def _events(self, part: Part) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for event in part.events:
            known = _ROWS.get(event.track)
            row, label = known or (8 + zlib.crc32(event.track.encode()) % 1_000_000, event.track)
            if (part.rank, -1) not in self._known:
                self._known.add((part.rank, -1))
                label_rank = f"stage {part.stage}, column {part.column}"
                found.append(_named("process_name", part.rank, 0, label_rank))
            if (part.rank, row) not in self._known:
                self._known.add((part.rank, row))
                found.append(_named("thread_name", part.rank, row, label))
            found += _chrome(event, part.rank, row)
        return found


def _named(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}


def _chrome(event: Any, rank: int, row: int) -> list[dict[str, Any]]:
    """Times in microseconds. A pull is an asynchronous span, with arrows to what serves it and back."""
    where = {"pid": rank, "tid": row}
    began, ended = event.began_ns / 1000, event.ended_ns / 1000
    if event.link is None:
        return [_span(event, began, ended, where)]
    name = "-".join(map(str, event.link))
    there = {"cat": "message", "name": "pull", "id": f"{name}>", **where}
    back = {"cat": "message", "name": "value", "id": f"{name}<", **where}
    if event.kind == "pull":
        span = {"cat": "pull", "name": event.name, "id": name, **where}
        return [
            {**span, "ph": "b", "ts": began},
            {**span, "ph": "e", "ts": ended},
            {**there, "ph": "s", "ts": began},
            {**back, "ph": "f", "bp": "e", "ts": ended},
        ]
    return [
        _span(event, began, ended, where),
        {**there, "ph": "f", "bp": "e", "ts": began},
        {**back, "ph": "s", "ts": ended},
    ]


def _span(event: Any, began: float, ended: float, where: Mapping[str, int]) -> dict[str, Any]:
    span = {"ph": "X", "cat": event.kind, "name": event.name}
    return {**span, "ts": began, "dur": ended - began, **where}


# --- reading ----------------------------------------------------------------------------------


class Span(NamedTuple):
    """Something with a beginning and an end, in microseconds."""

    kind: str
    name: str
    rank: int
    row: int
    began: float
    ended: float


class Recorded(NamedTuple):
    """A timeline that was read.

    Attributes:
        ranks: rank -> its name.
        rows: (rank, row) -> its name.
        arrows: (when, rank) sent -> (when, rank) taken, for pulls and their values.
    """

    ranks: dict[int, str]
    rows: dict[tuple[int, int], str]
    spans: list[Span]
    arrows: list[tuple[tuple[float, int], tuple[float, int]]]


def read(path: str | Path) -> Recorded:
    """The timeline in a file.

    Raises:
        ValueError: the file holds none.
    """
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a Chrome trace: {error}") from None
    found = Recorded({}, {}, [], [])
    open_pulls: dict[str, tuple[float, int]] = {}
    ends: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for event in events:
        rank, row, phase = event["pid"], event["tid"], event["ph"]
        match phase:
            case "M" if event["name"] == "process_name":
                found.ranks[rank] = event["args"]["name"]
            case "M":
                found.rows[rank, row] = event["args"]["name"]
            case "X":
                began = event["ts"]
                found.spans.append(
                    Span(event["cat"], event["name"], rank, row, began, began + event["dur"])
                )
            case "b":
                open_pulls[event["id"]] = (event["ts"], rank)
            case "e":
                began, _ = open_pulls.pop(event["id"])
                found.spans.append(Span("pull", event["name"], rank, row, began, event["ts"]))
            case "s" | "f":
                ends[event["id"]][phase] = (event["ts"], rank)
    found.arrows.extend((e["s"], e["f"]) for e in ends.values() if len(e) == 2)
    return found


def window(recorded: Recorded, start_ms: float, end_ms: float | None) -> Recorded:
    """What lies between two times, counted from the first event; spans are cut at them."""
    first = min((span.began for span in recorded.spans), default=0.0)
    low = first + start_ms * 1000
    high = float("inf") if end_ms is None else first + end_ms * 1000
    spans = [
        span._replace(began=max(span.began, low), ended=min(span.ended, high))
        for span in recorded.spans
        if span.ended >= low and span.began <= high
    ]
    arrows = [a for a in recorded.arrows if low <= a[0][0] <= high and low <= a[1][0] <= high]
    return recorded._replace(spans=spans, arrows=arrows)


def summary(recorded: Recorded) -> list[dict[str, Any]]:
    """For each rank: rounds, where the forward's time went, in milliseconds, and events that are missing."""
    found: list[dict[str, Any]] = []
    for rank, name in sorted(recorded.ranks.items()):
        spans: dict[str, list[float]] = defaultdict(list)
        for span in recorded.spans:
            if span.rank == rank:
                spans[span.kind].append((span.ended - span.began) / 1000)
        pulls = spans["pull"]
        lost = sum(int(s.name) for s in recorded.spans if (s.rank, s.kind) == (rank, "lost"))
        found.append(
            {
                "rank": name,
                "rounds": len(spans["round"]),
                "rounds_ms": round(sum(spans["round"]), 3),
                "handoffs": len(spans["handoff"]),
                "handoffs_ms": round(sum(spans["handoff"]), 3),
                "waits_ms": round(sum(spans["wait"]), 3),
                "pulls": len(pulls),
                "pull_median_ms": round(median(pulls), 3) if pulls else None,
                "served": len(spans["serve"]),
                "lost": lost,
            }
        )
    return found


# --- the picture ------------------------------------------------------------------------------

_WIDTH, _LEFT, _ROW, _GAP = 1180, 150, 18, 26
_COLOURS = {
    "round": "#dbe4f0", "handoff": "#3b6ea8", "wait": "#d9822b", "parked": "#e9e4d8",
    "runs": "#2e8b57", "pull": "#b8c7e0", "serve": "#8e5ea2", "lost": "#c0392b",
}  # fmt: skip
_MEANINGS = {
    "round": "a forward step", "handoff": "a worker is served", "wait": "the forward waits",
    "parked": "a worker is parked", "runs": "a block runs", "pull": "from request to value",
    "serve": "a peer's pull is answered", "lost": "events are missing",
}  # fmt: skip


def svg(recorded: Recorded) -> str:
    """A band for each rank, time to the right; arrows are pulls and their values."""
    spans = recorded.spans
    first = min((span.began for span in spans), default=0.0)
    last = max((span.ended for span in spans), default=1.0)
    scale = (_WIDTH - _LEFT - 20) / max(last - first, 1e-9)
    lanes: dict[tuple[int, int], float] = {}
    middles: dict[int, float] = {}
    out: list[str] = []
    y = 40.0
    for rank, name in sorted(recorded.ranks.items()):
        rows = sorted({span.row for span in spans if span.rank == rank})
        height = _ROW * max(len(rows), 1)
        out.append(
            f'<rect x="0" y="{y - 4:.0f}" width="{_WIDTH}" height="{height + 8}" fill="#f7f7f5"/>'
            f'<text x="8" y="{y - 9:.0f}" font-weight="bold">{escape(name)}</text>'
        )
        for row in rows:
            lanes[rank, row] = y
            label = recorded.rows.get((rank, row), "")
            out.append(f'<text x="8" y="{y + 12:.0f}">{escape(_short(label))}</text>')
            y += _ROW
        middles[rank] = lanes.get((rank, 0), y - height) + _ROW / 2
        y += _GAP
    # Long spans first, so that what happened within them lies on top.
    for span in sorted(spans, key=lambda s: s.began - s.ended):
        left = _LEFT + (span.began - first) * scale
        width = max((span.ended - span.began) * scale, 0.8)
        top = lanes[span.rank, span.row] + 2
        text = f"{span.kind}: {span.name} ({(span.ended - span.began) / 1000:.3f} ms)"
        out.append(
            f'<rect x="{left:.2f}" y="{top:.0f}" width="{width:.2f}" height="{_ROW - 4}" '
            f'fill="{_COLOURS.get(span.kind, "#999")}"><title>{escape(text)}</title></rect>'
        )
    for (sent, source), (taken, target) in recorded.arrows:
        x1, x2 = _LEFT + (sent - first) * scale, _LEFT + (taken - first) * scale
        out.append(
            f'<line x1="{x1:.2f}" y1="{middles[source]:.0f}" x2="{x2:.2f}" '
            f'y2="{middles[target]:.0f}" stroke="#c0392b" stroke-width="0.8" '
            'marker-end="url(#head)" opacity="0.7"/>'
        )
    x = _LEFT
    happened = {span.kind for span in spans}
    for kind, meaning in _MEANINGS.items():
        if kind == "lost" and kind not in happened:
            continue
        out.append(
            f'<rect x="{x}" y="{y:.0f}" width="10" height="10" fill="{_COLOURS[kind]}"/>'
            f'<text x="{x + 14}" y="{y + 9:.0f}">{meaning}</text>'
        )
        x += 24 + 6 * len(meaning)
    total = (last - first) / 1000
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 24:.0f}" '
        'font-family="sans-serif" font-size="11">'
        '<defs><marker id="head" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#c0392b"/></marker></defs>'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT}" y="16">{total:.2f} ms</text>' + "".join(out) + "</svg>\n"
    )


def _short(label: str) -> str:
    return label if len(label) <= 22 else label[:21] + "…"


# --- the command ------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `ppcore.cli`."""
    parser.add_argument("file", type=Path, help="what VLLM(..., timeline=FILE) wrote")
    parser.add_argument("--svg", type=Path, metavar="OUT", help="draw it")
    parser.add_argument("--from", dest="start", type=float, default=0.0, metavar="MS", help="from")
    parser.add_argument("--to", dest="end", type=float, metavar="MS", help="to")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a summary, and draw; returns the exit status."""
    try:
        recorded = window(read(args.file), args.start, args.end)
    except (OSError, ValueError) as error:
        print(f"ppcore timeline: {error}")
        return 2
    ranks = summary(recorded)
    print(json.dumps({"ranks": ranks}) if args.json else _text(ranks))
    if args.svg:
        args.svg.write_text(svg(recorded))
    return 0


def _text(ranks: Sequence[Mapping[str, Any]]) -> str:
    if not ranks:
        return "nothing recorded: no trace has ended yet, or the engine has a single stage"
    heads = list(ranks[0])
    table = [
        heads,
        *([("-" if rank[h] is None else str(rank[h])) for h in heads] for rank in ranks),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    lines += [
        f"{rank['rank']}: {rank['lost']} events are missing: too many came before a request ended"
        for rank in ranks
        if rank["lost"]
    ]
    return "\n".join(lines)
