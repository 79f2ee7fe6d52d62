"""A picture of the traces' overheads: against reads, steps and requests, a line for each number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: What is counted along the axis -> how the names of its workloads begin; each ends with the count.
AXES = {"late layers looked at": "late used", "steps": "logits", "requests": "invokes"}


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Write the picture of ``cells`` (see `traces.run`) as what ``path`` ends in: SVG, PNG, PDF.

    A band reaches from the first to the third quartile.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(AXES), figsize=(11, 3.2), layout="constrained")
    for panel, (label, start) in zip(panels, AXES.items(), strict=True):
        for stages in sorted({cell["stages"] for cell in cells}):
            points = [
                (int(cell["name"].removeprefix(start)), cell)
                for cell in cells
                if cell["name"].startswith(start) and cell["stages"] == stages
            ]
            counts = [count for count, _ in points]
            (line,) = panel.plot(
                counts,
                [cell["overhead_ms"] for _, cell in points],
                marker="o",
                label=f"PP={stages}",
            )
            low, high = ([cell["quartiles_ms"][which] for _, cell in points] for which in range(2))
            panel.fill_between(counts, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        panel.set(xlabel=label, ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("overhead of the trace, ms")
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
