"""The measured part of `docs/performance.md`, from the file that ``--json`` wrote.

The page contains what this makes of `docs/bench.json`, to the letter, and a test compares the two: a
figure on the page is one that was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppsim import pages

#: Between these the page is made.
BEGIN, END = "<!-- measured: python -m bench --page FILE -->", "<!-- /measured -->"


def markdown(result: dict[str, Any]) -> str:
    """The tables of all that was measured."""
    parts = [make(result[name]) for name, make in _PARTS.items() if name in result]
    return "\n\n".join(["\n".join(_bounds(result)), *("\n".join(part) for part in parts)])


def filled(page: str, result: dict[str, Any]) -> str:
    """The page with its measured part made anew.

    Raises:
        ValueError: the page has no such part.
    """
    return pages.replaced(page, BEGIN, END, f"\n\n{markdown(result)}\n\n")


def fill(path: Path, result: dict[str, Any]) -> None:
    """`filled`, in place."""
    path.write_text(filled(path.read_text(encoding="utf-8"), result), encoding="utf-8")


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _size(size: int) -> str:
    """Bytes in the largest unit that they are a whole number of."""
    for unit, name in ((1024**2, "MiB"), (1024, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _bounds(result: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, float, float | None]] = []
    if "core" in result:
        core = result["core"]
        rows.append(("an access of the core, the slowest, us", core["worst"], core["at_most"]))
        if core.get("compiled"):
            worst = max(cell["us"] for cell in core["compiled"])
            rows.append(("the same, compiled, as in the simulator", worst, core["at_most"]))
    if "untraced" in result:
        rows.append(
            ("untraced requests, to vLLM's own worker", result["untraced"]["ratio"], _UNTRACED)
        )
    for found in result.get("pulls", {}).get("ratios", ()):
        what = (
            f"a pull of {_size(found['bytes'])}, {found['way']} to bare {_bare(found['against'])}"
        )
        rows.append((what, found["ratio"], found["at_most"]))
    deaths = result.get("deaths", {})
    for cell in deaths.get("cells", ()):
        rows.append((f"a peer's death, {cell['way']}, ms", cell["longest_ms"], deaths["at_most"]))
    for found in result.get("traces", {}).get("bounds", ()):
        rows.append((f"`{found['name']}`: {found['what']}", found["found"], found["at_most"]))
    steps = result.get("steps", {})
    for name, what in (("growth", "time a step"), ("memory", "memory")) if steps else ():
        rows.append(
            (f"{steps['steps']} steps, {what}: end to begin", steps[name], steps["at_most"])
        )
    return pages.table(
        ["bound", "found", "at most", ""],
        [
            (
                what,
                _figure(found),
                "" if most is None else _figure(most),
                "" if most is None else "met" if found <= most else "**not met**",
            )
            for what, found, most in rows
        ],
    )


#: The most that an untraced request may cost, in terms of vLLM's own worker.
_UNTRACED = 1.02


def _bare(way: str) -> str:
    return way.removeprefix("bare ")


def _said(part: dict[str, Any], what: str) -> str:
    """When it was measured, and on what."""
    load = f", load average before {part['load']:.1f}" if "load" in part else ""
    cores = f"a machine of {part['cores']} cores, no GPU" if "cores" in part else "a machine"
    return f"{what}: {part.get('date', 'undated')}, {cores}{load}."


def _core(part: dict[str, Any]) -> list[str]:
    stages = sorted({cell["stages"] for cell in part["cells"]})
    rows = []
    for name, cells in (("as it stands", part["cells"]), ("compiled", part.get("compiled"))):
        if cells:
            worst = (max(c["us"] for c in cells if c["stages"] == number) for number in stages)
            rows.append([name, *(f"{found:.2f}" for found in worst)])
    return [
        _said(part, "The core, microseconds an access, the slowest stage"),
        "",
        *pages.table(["stages", *map(str, stages)], rows),
    ]


def _accesses(part: dict[str, Any]) -> list[str]:
    rows = [[c["kind"], f"{c['us']:.0f}", f"{c['plain_us']:.0f}"] for c in part["cells"]]
    return [
        _said(part, "An access in the runtime, microseconds of processor time"),
        "",
        *pages.table(["access", "on a stage", "plain nnsight, one stage"], rows),
    ]


def _untraced(part: dict[str, Any]) -> list[str]:
    low, high = part["quartiles"]
    return [
        f"{_said(part, 'Untraced requests')} {part['stages']} stages, {part['tokens']} tokens, "
        f"{part['pairs']} pairs: {part['ratio']:.3f} times vLLM's own worker (quartiles {low:.3f} to "
        f"{high:.3f})."
    ]


def _pulls(part: dict[str, Any]) -> list[str]:
    cells = {(cell["way"], cell["bytes"]): cell for cell in part["cells"]}
    ways = list(dict.fromkeys(way for way, _ in cells))
    sizes = list(dict.fromkeys(size for _, size in cells))
    rows = [
        [
            _size(size),
            *(
                f"{_figure(cell['median_us'])} ({_figure(cell['p90_us'])})"
                for cell in (cells[way, size] for way in ways)
            ),
        ]
        for size in sizes
    ]
    return [
        _said(part, "A pull and bare exchanges, microseconds, median (90th percentile)"),
        "",
        *pages.table(["payload", *ways], rows),
    ]


def _traces(part: dict[str, Any]) -> list[str]:
    cells = {(cell["name"], cell["stages"]): cell for cell in part["cells"]}
    rows = []
    for name in dict.fromkeys(name for name, _ in cells):
        one, two = cells[name, 1], cells[name, 2]
        rows.append(
            [
                f"`{name}`",
                *(
                    f"{_figure(cell['overhead_ms'])} ({_figure(cell['quartiles_ms'][0])} to "
                    f"{_figure(cell['quartiles_ms'][1])})"
                    for cell in (one, two)
                ),
                f"{two['overhead_ms'] / one['overhead_ms']:.2f}",
                str(two["values"]),
                str(two["bytes"]),
            ]
        )
    return [
        _said(part, "Overhead of traces, milliseconds, median (quartiles)"),
        "",
        *pages.table(["trace", "one stage", "two stages", "ratio", "values", "bytes"], rows),
    ]


def _deaths(part: dict[str, Any]) -> list[str]:
    rows = [[c["way"], _figure(c["median_ms"]), _figure(c["longest_ms"])] for c in part["cells"]]
    return [
        _said(part, "From a rank's SIGKILL until its peer knows, milliseconds"),
        "",
        *pages.table(["transport", "median", "longest"], rows),
    ]


def _steps(part: dict[str, Any]) -> list[str]:
    rows = [
        [
            str(cell["stages"]),
            _figure(cell["first"]),
            _figure(cell["last"]),
            f"{cell['growth']:.3f}",
            " to ".join(f"{size:.0f}" for size in cell["resident"]),
        ]
        for cell in part["cells"]
    ]
    what = f"The logits of {part['steps']} steps, looked at: milliseconds a step, MiB of all ranks"
    heads = ["stages", "first steps", "last steps", "growth", "memory, short trace to long"]
    return [_said(part, what), "", *pages.table(heads, rows)]


def _timeline(part: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"`{cell['name']}`",
            _figure(cell["without"]),
            _figure(cell["with"]),
            f"{cell['ratio']:.3f} ({cell['quartiles'][0]:.3f} to {cell['quartiles'][1]:.3f})",
        ]
        for cell in part["cells"]
    ]
    return [
        _said(part, "Traces with and without `timeline=`, two stages, milliseconds, median"),
        "",
        *pages.table(["trace", "without", "with", "ratio (quartiles)"], rows),
    ]


_PARTS = {
    "core": _core,
    "accesses": _accesses,
    "untraced": _untraced,
    "pulls": _pulls,
    "deaths": _deaths,
    "traces": _traces,
    "steps": _steps,
    "timeline": _timeline,
}
