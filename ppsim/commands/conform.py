"""``conform``: are records of real ranks a run of the model?"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..conform import Verdict, check_files
from . import Answer, Command

NO_RUN = 9


def add(command: Command) -> None:
    """Name the command."""
    made = command("conform", run, "check records of a run's ranks against the model")
    made.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="the records of all ranks of one run; a folder stands for a run of its own",
    )


def run(options: argparse.Namespace) -> Answer:
    """``ppsim conform``."""
    folders = [path for path in options.paths if path.is_dir()]
    files = [path for path in options.paths if not path.is_dir()]
    runs = [sorted(folder.glob("*.log")) for folder in folders] + ([files] if files else [])
    verdicts: list[Verdict] = [check_files(paths) for paths in runs]
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    for finding in findings:
        print(finding)
    rejected = sum(not verdict.accepted for verdict in verdicts)
    answer = {
        "runs": len(runs),
        "accepted": len(runs) - rejected,
        "rejected": rejected,
        "ranks": sum(verdict.ranks for verdict in verdicts),
        "events": sum(verdict.events for verdict in verdicts),
        "messages": sum(verdict.messages for verdict in verdicts),
    }
    print("{accepted} of {runs} runs accepted: {ranks} ranks, {events} events, {messages} messages"
          .format(**answer))  # fmt: skip
    shown = [
        {"file": f.file, "line": f.line, "property": f.property, "text": f.text} for f in findings
    ]
    return (NO_RUN if rejected else 0), {**answer, "findings": shown}
