"""A plan as text for a terminal, and as plain data for JSON."""

from __future__ import annotations

from typing import Any

from .layout import DTYPES, Plan, Stage


def number(count: int) -> str:
    """A count in thousands, millions or billions: "134.5 M"."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def size(count: int) -> str:
    """A number of bytes in decimal units: "269.0 MB"."""
    for unit_size, unit in ((10**12, " TB"), (10**9, " GB"), (10**6, " MB"), (10**3, " kB")):
        if count >= unit_size:
            return f"{count / unit_size:.1f}{unit}"
    return f"{count} B"


def holds(stage: Stage, tied: bool | None) -> str:
    """What a stage works with: "embedding, layers 0-3"."""
    words = []
    for part in stage.holds:
        if part == "layers":
            last = stage.end_layer - 1
            one = stage.layers == 1
            words.append(f"layer {last}" if one else f"layers {stage.first_layer}-{last}")
        elif part == "head" and tied:
            words.append("head (tied)")
        else:
            words.append(part)
    return ", ".join(words)


def text(plan: Plan) -> str:
    """A plan to read: lines without a newline at the end."""
    stages, columns = len(plan.stages), plan.columns
    known = plan.largest is not None
    counted = f"{number(plan.parameters)} parameters, {plan.dtype}" if plan.parameters else ""
    lines = [
        ", ".join(filter(None, [plan.architecture, _of(plan.layers, "layer"), counted])),
        f"{_of(stages, 'stage')} x {_of(columns, 'column')} = {_of(stages * columns, 'rank')}",
        "",
    ]
    rows = [["stage", "holds", "layers"]]
    rows[0] += ["parameters a rank", "bytes a rank"] if known else []
    for stage in plan.stages:
        row = [str(stage.stage), holds(stage, plan.tied), str(stage.layers)]
        if known:
            most = " <- most" if stages > 1 and stage is plan.largest else ""
            row += [number(stage.total), size(stage.bytes) + most]
        rows.append(row)
    lines += _table(rows)
    if known and columns > 1:
        lines += ["", f"inside a stage, {columns} columns"]
        for what, names in (
            ("divide", plan.divided),
            ("share copies of", plan.copied),
            ("each have whole", plan.whole),
        ):
            if names:
                lines.append(f"  {what:15}  {', '.join(names)}")
    for head, said in (("vLLM would refuse this", plan.problems), ("notes", plan.notes)):
        if said:
            lines += ["", head, *(f"  - {line}" for line in said)]
    return "\n".join(lines)


def data(plan: Plan) -> dict[str, Any]:
    """A plan as JSON has it."""
    return {
        "model": plan.model,
        "architecture": plan.architecture,
        "layers": plan.layers,
        "parameters": plan.parameters,
        "tied": plan.tied,
        "dtype": plan.dtype,
        "bytes_per_parameter": DTYPES[plan.dtype],
        "pipeline_parallel_size": len(plan.stages),
        "tensor_parallel_size": plan.columns,
        "partition": plan.partition,
        "stages": [
            {
                "stage": stage.stage,
                "layers": [stage.first_layer, stage.end_layer],
                "holds": list(stage.holds),
                "unused": list(stage.unused),
                "parameters_per_rank": stage.parameters and stage.total,
                "bytes_per_rank": stage.parameters and stage.bytes,
                "parts": stage.parameters,
            }
            for stage in plan.stages
        ],
        "largest_stage": plan.largest.stage if plan.largest else None,
        "tensor_parallel": {
            "divided": list(plan.divided),
            "copied": list(plan.copied),
            "whole": list(plan.whole),
        },
        "supported": not plan.problems,
        "problems": plan.problems,
        "notes": plan.notes,
    }


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _table(rows: list[list[str]]) -> list[str]:
    """Aligned columns: words to the left, numbers to the right, the last as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if n == 1 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row[:-1], widths[:-1], strict=True))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines
