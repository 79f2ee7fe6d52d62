"""The command `ppcore`: a table of subcommands, each a module that is imported when it is asked for.

A module of the table offers `add_arguments(parser)` and `run(args) -> int`, the exit status, or, where it has
a parser of its own, `main(argv) -> int`. Its first import may be heavy (torch, vLLM); listing the table is not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["COMMANDS", "Command", "main"]


class Command(NamedTuple):
    """One subcommand."""

    module: str
    about: str


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "ppcore.vllm.demo", "run named traces on one stage and on several, and compare"
    ),
    "serve": Command(
        "ppcore.vllm.serve", "serve traces, edits and OpenAI's routes from one engine"
    ),
    "plan": Command(
        "ppcore.vllm.plan", "show what each stage of a model would hold, from its config alone"
    ),
    "timeline": Command(
        "ppcore.vllm.timeline", "summarise and draw what VLLM(..., timeline=FILE) recorded"
    ),
    "doctor": Command(
        "ppcore.vllm.doctor", "check packages, machine and transport, and say what to mend"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ppcore COMMAND ...`; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        return _overview(words)
    name, *rest = words
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    if hasattr(module, "main"):
        return int(module.main(rest))
    parser = argparse.ArgumentParser(prog=f"ppcore {name}", description=command.about)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(rest)))


def _overview(words: list[str]) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {command.about}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="ppcore",
        usage="ppcore [-h] [--version] COMMAND ...",
        description="nnsight traces, unchanged, on a vLLM engine with pipeline parallelism.",
        epilog=f"commands:\n{listing}\n\n`ppcore COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args(words)
    if args.version:
        from ppcore import __version__

        print(f"ppcore {__version__}")
        return 0
    if args.command:
        parser.error(f"no command is named {args.command!r}; there are: {', '.join(COMMANDS)}")
    parser.print_help()
    return 0
