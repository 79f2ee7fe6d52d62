"""A plan as an SVG picture: a lane a stage, a block a layer, a row a column."""

from __future__ import annotations

from html import escape

from .layout import Plan, Stage
from .text import holds, size

_WIDTH = 760
_LEFT, _RIGHT = 30, 730
_ROW = 26
_GAP = 44

_FILL = {"embedding": "#dbeafe", "layers": "#e2e8f0", "norm": "#fef3c7", "head": "#dcfce7"}


def svg(plan: Plan) -> str:
    """The picture's source."""
    rows = min(plan.columns, 4)
    lane = 40 + rows * _ROW
    height = 70 + len(plan.stages) * (lane + _GAP) - _GAP + 40
    title = f"{plan.architecture} on {len(plan.stages)} stages x {plan.columns} columns"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img" aria-labelledby="t">',
        f'<title id="t">{escape(title)}</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        '<defs><marker id="flow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#8a94a6"/></marker></defs>',
        f'<text x="{_LEFT}" y="30" font-size="16" font-weight="600" fill="#0f172a">'
        f"{escape(title)}</text>",
    ]
    # One width for every layer, so that an uneven split is seen.
    widest = max(stage.layers + 2 * (len(_cells(stage)) - stage.layers) for stage in plan.stages)
    unit = (_RIGHT - _LEFT - 20) / widest
    for n, stage in enumerate(plan.stages):
        top = 55 + n * (lane + _GAP)
        parts += _lane(plan, stage, top, lane, rows, unit)
        if n + 1 < len(plan.stages):
            parts.append(
                f'<path d="M{_WIDTH / 2:g} {top + lane + 4}V{top + lane + _GAP - 4}" '
                'stroke="#8a94a6" stroke-width="2" marker-end="url(#flow)"/>'
            )
    if rows < plan.columns:
        parts.append(
            f'<text x="{_LEFT}" y="{height - 12}" fill="#64748b">'
            f"{rows} of {plan.columns} columns drawn</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _cells(stage: Stage) -> list[tuple[str, str]]:
    """(part, label) of each block of a lane."""
    cells = []
    for part in stage.holds:
        if part == "layers":
            cells += [("layers", str(n)) for n in range(stage.first_layer, stage.end_layer)]
        else:
            cells.append((part, part))
    return cells


def _lane(plan: Plan, stage: Stage, top: int, height: int, rows: int, unit: float) -> list[str]:
    said = f"stage {stage.stage}: {holds(stage, plan.tied)}"
    weight = f"{size(stage.bytes)} a rank" if stage.parameters else ""
    parts = [
        f'<g><rect x="{_LEFT}" y="{top}" width="{_RIGHT - _LEFT}" height="{height}" rx="8" '
        'fill="#f8fafc" stroke="#94a3b8"/>',
        f'<text x="{_LEFT + 10}" y="{top + 20}" font-weight="600" fill="#334155">'
        f"{escape(said)}</text>",
        f'<text x="{_RIGHT - 10}" y="{top + 20}" text-anchor="end" fill="#64748b">{weight}</text>',
    ]
    for row in range(rows):
        x, y = float(_LEFT + 10), top + 30 + row * _ROW
        for part, label in _cells(stage):
            width = unit if part == "layers" else 2 * unit
            parts.append(
                f'<rect class="{part}" x="{x:.1f}" y="{y}" width="{max(width - 2, 1):.1f}" '
                f'height="{_ROW - 6}" rx="2" fill="{_FILL[part]}" stroke="#94a3b8">'
                f"<title>{part} {label if part == 'layers' else ''}</title></rect>"
            )
            room = unit * (1 if part == "layers" else 2)
            if room >= 7 * len(label) + 4:
                parts.append(
                    f'<text x="{x + width / 2 - 1:.1f}" y="{y + 14}" text-anchor="middle" '
                    f'font-size="11" fill="#0f172a">{label}</text>'
                )
            x += width
    return [*parts, "</g>"]
