"""Are the records of a run's ranks, together, a run of the model?

A rank's record (see `ppcore.record`) is checked in two ways. Its events are done again by a real core,
which has to answer what is written there and ask for the effects that are written there: so a record is
rejected where it departs from the decisions that the simulator tests. And the records of all ranks
together have to have properties that are looked for in the text alone, without asking a core: a wrong
core would agree with itself.

==========  ====================================================================================
``whole``   every rank of every column is there once, of one model, and each record is closed
``replay``  a core, told the events, answers and asks for what is written
``fifo``    what one rank sent another is what that took: all of it, in order, and nothing else
``rounds``  the rounds are the same on all ranks
``names``   a worker's accesses are numbered 0, 1, 2 ..., and the n-th is the same on all ranks
``places``  a worker is answered in open turns only, never behind its clock, for an owner's value
``waits``   the forward waits only for a place strictly smaller than its own (round, stage)
``answers`` every pull has one answer, by its number, after it was taken, from whom it was sent to
``once``    a value crosses once
``calls``   a call's arguments are given once, by the stage whose visit the block is in, and computed
            once, under the call's name
``release`` what is released has a name and that owner, is released once and never pulled again
``ends``    a request ends before its done, and nothing of it comes after
``ships``   each leaf of a request's saves is shipped by exactly one stage
``rest``    nothing is left of any request on any rank
==========  ====================================================================================

A record of a rank that was killed is not closed; it is rejected as such, and what it has is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .properties import PROPERTIES
from .records import Finding, Record, Run, read

__all__ = ["Finding", "Record", "Run", "Verdict", "check", "check_files"]


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a run.

    Attributes:
        findings: where it is not a run of the model; none if it is.
        ranks, events, messages: how much was looked at.
    """

    findings: tuple[Finding, ...]
    ranks: int
    events: int
    messages: int

    @property
    def accepted(self) -> bool:
        return not self.findings


def check(records: Sequence[Record], only: Iterable[str] = PROPERTIES) -> Verdict:
    """Look for every property, or for those named, in the records of a run's ranks."""
    run = Run(records)
    findings = [finding for name in only for finding in PROPERTIES[name](run)]
    return Verdict(
        tuple(findings),
        len(records),
        sum(len(record.steps) for record in records),
        sum(len(sent) for record in records for sent in record.sent.values()),
    )


def check_files(paths: Iterable[Path]) -> Verdict:
    """Look for every property in the records that the files hold."""
    records: list[Record] = []
    findings: list[Finding] = []
    for path in paths:
        try:
            records.append(read(path.read_text().splitlines(), str(path)))
        except Finding as finding:
            findings.append(finding)
        except (OSError, UnicodeDecodeError) as error:
            findings.append(Finding("spelling", str(path), 0, f"cannot be read: {error}"))
    if findings:
        return Verdict(tuple(findings), len(records) + len(findings), 0, 0)
    return check(records)
