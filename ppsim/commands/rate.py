"""``rate``: how fast the simulator is."""

from __future__ import annotations

import argparse
import time

from .. import cases, world
from ..cases import Case
from ..strategies import RandomWalk
from . import Answer, Command
from .run import told


def add(command: Command) -> None:
    """Name the command."""
    speed = command("rate", run, "how fast the simulator is")
    speed.add_argument("--stages", type=int, default=4)
    speed.add_argument("--rounds", type=int, default=4)
    speed.add_argument("--seconds", type=float, default=5.0)


def run(options: argparse.Namespace) -> Answer:
    """``ppsim rate``."""
    case = rate_case(options.stages, options.rounds)
    events = executions = 0
    began = time.process_time()
    while (took := time.process_time() - began) < options.seconds:
        done = world.run(case, RandomWalk(executions))
        if done.failure is not None:
            return told(done)
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
