"""The ``ppsim`` command.

Exit codes: 0 all is well, 2 wrong usage, 3 the code under test crashed, 4 something never happens
(liveness), 5 the outcome is not a single rank's (sameness), 6 something is left over (leak), 7 a
mutant survives, 8 an exploration was cut.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import cases, draw, export, fuzz, generate, mutants, terms, world
from .cases import Case
from .strategies import RandomWalk, Replay
from .strategies.exhaustive import CONFIGURATIONS, Verdict, explore
from .world import World

SURVIVORS, CUT = 7, 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = _parser().parse_args(argv)
    result: tuple[int, dict[str, Any]] = options.run(options)
    code, answer = result
    if options.json:
        print(json.dumps(answer))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ppsim", description="Simulate many ranks around the real core."
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[..., Any], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="end with one line of JSON")
        return made

    one = command("run", _run, "run one case under one schedule")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--case", type=Path, help="a file; without it the seed's case is run")
    one.add_argument("--mutant", help="plant this bug")
    many = command("fuzz", _fuzz, "run generated cases until one fails or the time is up")
    many.add_argument("--seed", type=int, default=0)
    many.add_argument("--executions", type=int)
    many.add_argument("--minutes", type=float)
    many.add_argument("--mutant", help="plant this bug")
    many.add_argument("--save", type=Path, help="where a shrunk failing case is written")
    all_of = command("explore", _explore, "run every schedule of small cases")
    all_of.add_argument("--only", help="one configuration, by name")
    all_of.add_argument("--seconds", type=float, default=60.0, help="the most for each")
    again = command("replay", _replay, "run a saved case under its saved schedule")
    again.add_argument("file", type=Path)
    again.add_argument("--mutant", help="plant this bug")
    picture = command("draw", _draw, "draw a saved case's run as a space-time diagram (SVG)")
    picture.add_argument("file", type=Path)
    picture.add_argument("--out", type=Path, default=Path("run.svg"))
    trace = command("export", _export, "write a saved case's run as a Chrome trace (JSON)")
    trace.add_argument("file", type=Path)
    trace.add_argument("--out", type=Path, default=Path("run.json"))
    bugs = command("mutants", _mutants, "plant every bug of the catalogue and look for it")
    bugs.add_argument("--executions", type=int, default=2000)
    bugs.add_argument("--seconds", type=float, default=10.0, help="the most for each")
    bugs.add_argument("--only", help="one mutant, by name")
    speed = command("rate", _rate, "how fast the simulator is")
    speed.add_argument("--stages", type=int, default=4)
    speed.add_argument("--rounds", type=int, default=4)
    speed.add_argument("--seconds", type=float, default=5.0)
    return parser


def _with(name: str | None, act: Callable[[], Any]) -> Any:
    if name is None:
        return act()
    with mutants.planted(mutants.named(name)):
        return act()


def _told(done: World) -> tuple[int, dict[str, Any]]:
    failure = done.failure
    print(f"{done.events} events, hash {done.hash & (1 << 64) - 1:016x}")
    if failure is not None:
        print(failure)
    return (failure.code if failure else 0), {
        "hash": f"{done.hash & (1 << 64) - 1:016x}",
        "events": done.events,
        "failure": str(failure) if failure else None,
    }


def _run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    case = cases.parse(options.case.read_text()) if options.case else generate.case(options.seed)
    print(cases.spell(case))
    how = RandomWalk(options.seed) if options.case else fuzz.strategy_of(options.seed)
    with terms.recording():
        done = _with(options.mutant, lambda: fuzz.execute(case, how, record=True))
    return _told(done)


def load(path: Path) -> tuple[Case, list[str]]:
    """A saved case and its schedule."""
    text = path.read_text()
    schedule: list[str] = []
    for line in text.splitlines():
        if line.startswith("# schedule"):
            schedule += line.partition(": ")[2].split()
    return cases.parse(text), schedule


def _again(options: argparse.Namespace) -> tuple[World, Replay]:
    case, schedule = load(options.file)
    how = Replay(schedule)
    with terms.recording():
        done = _with(getattr(options, "mutant", None), lambda: fuzz.execute(case, how, record=True))
    return done, how


def _replay(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    done, how = _again(options)
    if how.divergence is not None:
        event, name, can = how.divergence
        print(f"diverged at event {event}: {name} cannot move; {', '.join(can)} can")
    return _told(done)


def _draw(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    done, _ = _again(options)
    options.out.write_text(draw.svg(done))
    print(f"wrote {options.out}")
    return 0, {"file": str(options.out), "events": done.events}


def _export(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    done, _ = _again(options)
    options.out.write_text(export.chrome(done))
    print(f"wrote {options.out}")
    return 0, {"file": str(options.out), "events": done.events}


def _fuzz(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    seconds = options.minutes * 60 if options.minutes is not None else None
    count = options.executions or (None if seconds else 2000)
    began = time.monotonic()
    last = [began]

    def hunt() -> tuple[int, fuzz.Finding | None]:
        ran = 0
        for seed, done in fuzz.executions(options.seed, count, seconds):
            ran += 1
            if done.failure is not None:
                found = fuzz.finding(seed)
                if found is not None:
                    print(f"execution {seed} fails ({found.failure.name}); shrinking")
                    return ran, fuzz.shrink(found)
            _progress(last, f"{ran} executions, {ran / (time.monotonic() - began):.0f}/s")
        return ran, None

    ran, found = _with(options.mutant, hunt)
    took = time.monotonic() - began
    answer: dict[str, Any] = {"executions": ran, "failures": int(found is not None)}
    answer["seconds"] = round(took, 3)
    print(f"{ran} executions in {took:.1f} s, {answer['failures']} failing")
    if found is None:
        return 0, answer
    print(fuzz.describe(found))
    path = options.save or Path(f"ppsim-{found.failure.name}-{found.seed}.case")
    path.write_text("# " + found.failure.name + "\n" + _comments(fuzz.describe(found)))
    mutant = f" --mutant {options.mutant}" if options.mutant else ""
    print(f"replay it with: python -m ppsim replay {path}{mutant}")
    return found.failure.code, {**answer, "file": str(path), "failure": str(found.failure)}


def _comments(text: str) -> str:
    """A description whose first paragraph is a comment, so that the file parses as a case."""
    failure, _, rest = text.partition("\n\nstages")
    return "".join(f"# {line}\n" for line in failure.splitlines()) + "stages" + rest


def _explore(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    code = 0
    found: list[dict[str, Any]] = []
    for name, case in CONFIGURATIONS.items():
        if options.only in (None, name):
            result = explore(name, case, seconds=options.seconds)
            found.append(result.summary())
            print(
                f"{name}: {result.verdict.value} {result.states} states, {result.edges} edges, "
                f"diameter {result.diameter}, {result.interleavings} interleavings, "
                f"{result.seconds:.1f} s {result.reason}"
            )
            if result.verdict is Verdict.REFUTED and result.failure is not None:
                code = result.failure.code
            elif result.verdict is Verdict.UNDETERMINED and not code:
                code = CUT
    return code, {"configurations": found}


def _mutants(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    survivors: list[str] = []
    chosen = [m for m in mutants.CATALOGUE if options.only in (None, m.name)]
    hunts: list[dict[str, Any]] = []
    for mutant in chosen:
        found = mutants.hunt(mutant, executions=options.executions, seconds=options.seconds)
        word = f"killed by {found.property}" if found.killed else "SURVIVES"
        print(f"{mutant.layer:8} {mutant.name:40} {word} after {found.executions}", flush=True)
        hunts.append(
            {"mutant": mutant.name, "layer": mutant.layer, "killed": found.killed,
             "executions": found.executions, "property": found.property, "seed": found.seed}
        )  # fmt: skip
        if not found.killed:
            survivors.append(mutant.name)
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} killed")
    answer = {"killed": killed, "total": len(chosen), "survivors": survivors, "hunts": hunts}
    return (SURVIVORS if survivors else 0), answer


def _rate(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    case = rate_case(options.stages, options.rounds)
    events = executions = 0
    began = time.process_time()
    while (took := time.process_time() - began) < options.seconds:
        done = world.run(case, RandomWalk(executions))
        if done.failure is not None:
            return _told(done)
        events += done.events
        executions += 1
    per_second = events / took
    print(f"{per_second:,.0f} events/s, {executions / took:,.0f} executions/s (one core)")
    return 0, {
        "events_per_s": round(per_second), "executions_per_s": round(executions / took, 1),
        "stages": options.stages, "rounds": options.rounds,
    }  # fmt: skip


def rate_case(stages: int, rounds: int) -> Case:
    """What ``rate`` runs: a loop that reads on every stage, edits, forces and keeps."""
    last = stages - 1
    return cases.parse(
        f"stages {stages} columns 1 layers 1 shared 0 batching 0\n"
        f"request A tokens {rounds}\n"
        "  for :\n    a = read L0.out\n    edit a 3\n"
        f"    b = read L{last}.out\n    c = mix a b\n    append out c\n"
        "    if c\n      d = read logits\n"
        f"request B tokens {rounds}\n"
        f"  for :\n    a = read L{last}.in\n    b = derive a 2\n    save x b\n"
    )


def _progress(last: list[float], text: str) -> None:
    now = time.monotonic()
    if sys.stderr.isatty() and now - last[0] > 0.2:
        last[0] = now
        print(f"\r{text}", end="", file=sys.stderr)
