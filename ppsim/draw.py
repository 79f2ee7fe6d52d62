"""A run as a space-time diagram: a lane a rank, arrows for messages, the end of a failing run marked.

Time runs to the right, one unit an event, so that the picture of a run is as deterministic as the run.
"""

from __future__ import annotations

from html import escape

from .world import Note, World

_LANE, _LEFT, _TOP = 70, 90, 40
_COLOURS = {"pull": "#1f77b4", "pulls": "#1f77b4", "reply": "#2ca02c", "never": "#d62728", "release": "#8c8c8c",
            "held": "#9467bd", "failed": "#d62728", "done": "#555555"}  # fmt: skip


def svg(world: World) -> str:
    """The diagram of a recorded run."""
    lanes = {where: _TOP + _LANE * index for index, where in enumerate(world.ranks)}
    scale = max(4.0, min(12.0, 1400 / max(1, world.events)))
    width = int(_LEFT + scale * world.events + 60)
    height = _TOP + _LANE * len(lanes) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for (stage, column), y in lanes.items():
        parts.append(f'<text x="8" y="{y + 4}">rank ({stage}, {column})</text>')
        parts.append(f'<line x1="{_LEFT}" x2="{width - 40}" y1="{y}" y2="{y}" stroke="#bbb"/>')
    for event, name in enumerate(world.schedule, 1):
        if name.startswith("f"):
            where, _, side = name[1:].partition(".")
            y = lanes[int(where), int(side)]
            x = _LEFT + scale * event
            parts.append(
                f'<rect x="{x:.1f}" y="{y - 3}" width="{scale:.1f}" height="6" fill="#cde"/>'
            )
    for sent, taken in _pairs(world.notes):
        x1, y1 = _LEFT + scale * sent.event, lanes[sent.stage, sent.column]
        x2, y2 = _LEFT + scale * (taken or sent).event, lanes[sent.peer, sent.column]
        colour = _COLOURS.get(sent.text.partition(" ")[0], "#000")
        dash = "" if taken else ' stroke-dasharray="3 3"'
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" stroke="{colour}"{dash}>'
            f"<title>{escape(sent.text)}</title></line>"
            f'<circle cx="{x2:.1f}" cy="{y2}" r="2" fill="{colour}"/>'
        )
    for note in world.notes:
        if note.kind == "die":
            x, y = _LEFT + scale * note.event, lanes[note.stage, note.column]
            parts.append(f'<text x="{x:.1f}" y="{y - 6}" fill="#d62728">dies</text>')
    if world.failure is not None:
        x = _LEFT + scale * world.events
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height}" stroke="#d62728" stroke-width="2"/>'
            f'<text x="{_LEFT}" y="16" fill="#d62728">'
            f"{escape(str(world.failure).splitlines()[0])}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


def _pairs(notes: list[Note]) -> list[tuple[Note, Note | None]]:
    """Each message with its arrival; channels are first in, first out."""
    waiting: dict[tuple[int, int, int], list[int]] = {}
    pairs: list[tuple[Note, Note | None]] = []
    for note in notes:
        if note.kind == "send":
            waiting.setdefault((note.stage, note.peer, note.column), []).append(len(pairs))
            pairs.append((note, None))
        elif note.kind == "take":
            index = waiting[note.peer, note.stage, note.column].pop(0)
            pairs[index] = (pairs[index][0], note)
    return pairs
