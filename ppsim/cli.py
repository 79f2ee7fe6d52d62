"""The ``ppsim`` command.

Exit codes: 0 all is well, 2 wrong usage, or what should be compiled is not, 3 the code under test
crashed, 4 something never happens (liveness), 5 the outcome is not a single rank's (sameness), 6
something is left over (leak), 7 a mutant survives, 8 an exploration or the mutants were cut, 9 a record
is no run of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

from .commands import (
    Answer,
    compile,
    conform,
    determinism,
    explore,
    fuzz,
    mutants,
    predict,
    rate,
    run,
)
from .compiled import Unbuilt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = _parser().parse_args(argv)
    try:
        result: Answer = options.run(options)
    except Unbuilt as error:
        print(error)
        result = 2, {}
    code, answer = result
    if options.json:
        print(json.dumps(answer))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ppsim", description="Simulate many ranks around the real core."
    )
    commands = parser.add_subparsers(required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], Answer], text: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="end with one line of JSON")
        return made

    modules = (run, fuzz, explore, mutants, determinism, conform, rate, compile, predict)
    for module in modules:
        module.add(command)
    return parser
