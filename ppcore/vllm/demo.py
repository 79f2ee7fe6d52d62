"""`ppcore demo`: named traces on an engine of one stage and on one of several, side by side.

The two engines run one after the other, each in a process of its own. What they return is compared to the bit
where a trace is one request, and within a tolerance where it is several, which are batched as they arrive; see
`ppcore.vllm.compare` for what that does to a result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

__all__ = ["add_arguments", "run"]

#: Engines that die are replaced, so that one bad trace does not hide the rest; this many times.
MAX_RESTARTS = 3
TRACE_TIMEOUT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        metavar="PATH",
        help="a Llama-like checkpoint (default: SmolLM2-135M-Instruct, made once)",
    )
    which.add_argument(
        "--random", action="store_true", help="a small random model, made on the spot"
    )
    parser.add_argument("--traces", metavar="A,B", help="only these; see --list")
    parser.add_argument("--list", action="store_true", help="list the traces and exit")
    parser.add_argument(
        "--stages", type=int, default=2, metavar="N", help="pipeline stages (default: 2)"
    )
    parser.add_argument("--json", metavar="FILE", help="write every row to this file")


@dataclass
class Outcome:
    """What one engine made of one trace."""

    result: Any = None
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    pulls: int = 0
    pulled_bytes: int = 0
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Why there is no result.
    failure: str | None = None


@dataclass
class Row:
    """One line of the table."""

    trace: str
    about: str
    same: bool
    differences: list[str]
    largest_difference: float
    pulls: int
    pulled_bytes: int
    seconds_one: float
    seconds_staged: float
    text: list[str]


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every trace gave the same on both engines."""
    from ppcore.vllm.traces import catalogue

    try:
        traces = catalogue(args.traces)
    except KeyError as error:
        print(f"ppcore demo: {error.args[0]}", file=sys.stderr)
        return 2
    if args.list:
        width = max(len(trace.name) for trace in traces)
        for trace in traces:
            print(f"{trace.name:{width}}  {trace.about}")
        return 0
    if args.stages < 2:
        print(f"ppcore demo: --stages {args.stages} is not 2 or more", file=sys.stderr)
        return 2

    checkpoint = _checkpoint(args)
    names = [trace.name for trace in traces]
    print(f"model: {checkpoint}")
    print(f"traces: {len(names)}, on 1 stage and then on {args.stages}")
    reference = dict(_perform(checkpoint, 1, names))
    rows = []
    table = Table(names, args.stages)
    staged = _perform(checkpoint, args.stages, names, table.begin)
    for trace, (_, outcome) in zip(traces, staged, strict=True):
        row = _row(trace, reference[trace.name], outcome)
        rows.append(row)
        table.show(row)
    same = sum(row.same for row in rows)
    if any(row.same and row.largest_difference for row in rows):
        print("\n~ same within the tolerance for requests that share a batch (ppcore.vllm.compare)")
    if args.json:
        report = {
            "model": str(checkpoint),
            "stages": args.stages,
            "rows": [asdict(row) for row in rows],
        }
        Path(args.json).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(f"\nparity: {same}/{len(rows)} traces")
    return 0 if same == len(rows) else 1


def _checkpoint(args: argparse.Namespace) -> str:
    if args.model:
        return str(args.model)
    from ppcore.vllm import checkpoints

    if args.random:
        return str(checkpoints.random_llama())
    with Progress("preparing SmolLM2-135M-Instruct") as progress:
        return str(checkpoints.smollm2(progress=progress.say))


def engine_settings(checkpoint: str | Path, stages: int) -> dict[str, Any]:
    """Settings under which the engines of a comparison are built: alike but for the number of stages."""
    import torch

    settings: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 16,
        "pipeline_parallel_size": stages,
    }
    try:
        longest = json.loads(Path(checkpoint, "config.json").read_text()).get(
            "max_position_embeddings"
        )
    except (OSError, ValueError):
        longest = None
    if not torch.cuda.is_available():
        # Slower than half precision, but a wrong value stands out from rounding.
        settings["dtype"] = "float32"
    if longest:
        settings["max_model_len"] = min(settings["max_model_len"], int(longest))
    return settings


def _perform(
    checkpoint: str, stages: int, names: list[str], ready: Callable[[], None] | None = None
) -> Iterator[tuple[str, Outcome]]:
    """Every trace on one engine, in order; an engine that dies is replaced.

    Args:
        ready: called once, when the engine takes requests.
    """
    engine = None
    restarts = 0
    why = ""
    try:
        for n, name in enumerate(names):
            if engine is None and restarts <= MAX_RESTARTS:
                try:
                    engine = _start(checkpoint, stages)
                except RuntimeError as error:
                    restarts, why = MAX_RESTARTS + 1, str(error)
                if ready is not None:
                    ready()
                    ready = None
            if engine is None:
                yield name, Outcome(failure=why)
                continue
            outcome = _one(engine, name)
            if engine.broken:
                why = outcome.failure or ""
                engine.stop()
                engine, restarts = None, restarts + 1
            yield name, outcome
            if stages == 1 and n + 1 == len(names):
                print(f"1 stage: {len(names)} traces run")
    finally:
        if engine is not None:
            left = engine.stop()
            if left:
                print(
                    f"warning: {len(left)} processes outlived the engine and were killed",
                    file=sys.stderr,
                )


def _start(checkpoint: str, stages: int) -> Any:
    from ppcore.vllm.child import EngineProcess

    engine = EngineProcess(checkpoint, **engine_settings(checkpoint, stages))
    with Progress(f"starting the engine, {stages} stage{'s' * (stages > 1)}") as progress:
        try:
            engine.start()
            engine.wait_ready(tick=lambda _: progress.tick())
        except BaseException:
            engine.stop()
            raise
    return engine


def _one(engine: Any, name: str) -> Outcome:
    from ppcore.vllm.traces.perform import perform

    try:
        done = engine.call(perform, name, timeout_s=TRACE_TIMEOUT_S)
    except RuntimeError as error:
        return Outcome(failure=str(error), warnings=engine.warnings())
    return Outcome(
        done.result, engine.warnings(), done.seconds, done.pulls, done.pulled_bytes, done.left
    )


def _row(trace: Any, one: Outcome, staged: Outcome) -> Row:
    from ppcore.vllm.compare import compare

    differences = []
    largest = 0.0
    if one.failure is not None or staged.failure is not None:
        for outcome, label in ((one, "on 1 stage"), (staged, "on several stages")):
            if outcome.failure is not None:
                differences.append(f"failed {label}: {_last_line(outcome.failure)}")
    else:
        found = compare(one.result, staged.result, exact=not trace.batched)
        differences += found.differences
        largest = found.largest_difference
        if one.warnings != staged.warnings:
            differences.append(f"warnings: {one.warnings} against {staged.warnings}")
    if staged.left:
        differences.append(f"left behind: {staged.left}")
    if trace.moves_nothing and staged.pulls:
        differences.append(f"{staged.pulls} values crossed, of a trace that needs none")
    result = staged.result if isinstance(staged.result, dict) else {}
    text = list(result.get("text", ()))
    if isinstance(result.get("error"), dict):
        text.append(f"{result['error']['message']}  at: {result['error']['line']}")
    return Row(
        trace.name, trace.about, not differences, differences, largest, staged.pulls, staged.pulled_bytes,
        one.seconds, staged.seconds, text,
    )  # fmt: skip


def _last_line(text: str) -> str:
    """The line of a traceback or log tail that says the most."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    errors = [
        line for line in lines if not line.startswith(" ") and ("Error" in line or "error" in line)
    ]
    chosen = (errors or lines or [""])[0]
    where = [line for line in lines if line.startswith("full output:")]
    return " ".join([chosen.strip(), *where])


class Table:
    """The table, printed row by row as results come in."""

    def __init__(self, names: list[str], stages: int) -> None:
        self._width = max(max(map(len, names)), len("trace"))
        self._stages = stages

    def begin(self) -> None:
        print(
            f"\n{'trace':{self._width}}  {'result':9}  {'pulls':>5}  {'bytes':>9}  {'PP=1':>8}  "
            f"{f'PP={self._stages}':>8}",
            flush=True,
        )

    def show(self, row: Row) -> None:
        verdict = "DIFFERENT" if not row.same else "same ~" if row.largest_difference else "same"
        print(
            f"{row.trace:{self._width}}  {verdict:9}  {row.pulls:5}  {row.pulled_bytes:9,}  "
            f"{row.seconds_one * 1000:5.0f} ms  {row.seconds_staged * 1000:5.0f} ms"
        )
        for line in row.text:
            print(f"    {_printable(line)}")
        for line in row.differences:
            print(f"    ! {line}")
        sys.stdout.flush()


def _printable(text: str) -> str:
    """`text` without control characters: what a model says goes to a terminal here."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Progress:
    """What is being waited for, with the seconds: a spinner on a terminal, else a line now and then."""

    EVERY_S = 5.0
    _FRAMES = "|/-\\"

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stdout if stream is None else stream
        self._tty = self._stream.isatty()

    def __enter__(self) -> Progress:
        self._begun = time.monotonic()
        self._shown = 0.0
        self._frame = 0
        self._write(f"{self._what} ...", keep=not self._tty)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        seconds = time.monotonic() - self._begun
        self._write(
            f"{self._what}: {'failed' if kind else 'ready'} after {seconds:.0f} s", keep=True
        )

    def tick(self) -> None:
        """Called often; shows something only when it is time to."""
        seconds = time.monotonic() - self._begun
        if self._tty:
            self._frame += 1
            self._write(f"{self._FRAMES[self._frame % 4]} {self._what} {seconds:.0f} s", keep=False)
        elif seconds - self._shown >= self.EVERY_S:
            self._shown = seconds
            self._write(f"{self._what} ... {seconds:.0f} s", keep=True)

    def say(self, text: str) -> None:
        """A step of the work, told by whoever does it."""
        self._write(f"  {text}", keep=True)

    def _write(self, text: str, *, keep: bool) -> None:
        begin = "\r\x1b[K" if self._tty else ""
        self._stream.write(f"{begin}{text}" + ("\n" if keep else ""))
        self._stream.flush()
