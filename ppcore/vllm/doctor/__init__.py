"""`ppcore doctor`: what stands between this machine and an engine of several ranks.

Every check gives a `Finding` with what to do about it. Checks that need a package run where it is
there; without vLLM the command still runs, and says that no engine can.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from . import machine, packages
from .engine import engine
from .finding import Finding
from .pair import pair

__all__ = ["Finding", "add_arguments", "examine", "run", "text"]

#: Of the column of names.
_WIDTH = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=_positive, default=2, metavar="N", help="stages x columns (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.epilog = "Exit status: 0, or 1 where a problem would keep an engine from working."


def run(args: argparse.Namespace) -> int:
    findings = []
    for finding in examine(args.ranks):
        findings.append(finding)
        if not args.json:  # at once: the next check may take some seconds
            print(text(finding), flush=True)
    problems = sum(finding.status == "problem" for finding in findings)
    if args.json:
        said = {"healthy": not problems, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(said, indent=1))
    else:
        print(f"\n{problems} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0


def examine(ranks: int) -> Iterator[Finding]:
    """Every check, in the order in which its findings are best mended."""
    versions = packages.installed()
    yield packages.python()
    yield from packages.packages(versions)
    yield from packages.traps(versions)
    yield from machine.settings(os.environ)
    if all(name in versions for name in packages.TRIED):
        yield engine(ranks)
    cores = machine.cores()
    yield from machine.binding(ranks, cores, machine.numa_nodes(), os.environ)
    yield machine.memory(ranks, machine.memory_bytes())
    yield machine.shared_memory()
    if "torch" in versions:
        yield pair()


def text(finding: Finding) -> str:
    """A finding to read: one line, or two with what to do."""
    line = f"{finding.status:7}  {finding.name:{_WIDTH}}  {finding.says}"
    return line + (f"\n{'':7}  {'':{_WIDTH}}  -> {finding.cure}" if finding.cure else "")


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a positive number")
    return int(word)
