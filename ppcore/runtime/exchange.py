"""What the stages of a column tell each other once, at load.

Each stage knows its own modules and, from a dummy forward, its own visits. Put together on every
rank they give the schedule, the homes of the modules, and the structure of every location. This is
the only place where ranks pickle for each other, before any request is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import SetupError
from ..schedule import Schedule
from .interleaver import Recording, Template
from .stubs import ModuleInfo, fill, real_modules


@dataclass
class StageReport:
    """What one stage has to say.

    Attributes:
        modules: path -> description of what is real on it.
        visits: the locations that its forward visits, in order.
        templates: location -> the structure of its value there.
    """

    modules: dict[str, ModuleInfo] = field(default_factory=dict)
    visits: list[str] = field(default_factory=list)
    templates: dict[str, Template] = field(default_factory=dict)


def report_modules(
    root: torch.nn.Module, prefix: str, missing: tuple[type, ...]
) -> dict[str, ModuleInfo]:
    """Path -> description of the modules that are real on this rank."""
    found = real_modules(root, prefix, missing)
    return {path: ModuleInfo.of(module) for path, module in found.items()}


@dataclass
class Whole:
    """The whole model, as every rank knows it after the exchange.

    Attributes:
        homes: module path -> the stages on which it is real.
        known: module path -> its description, from the lowest of those.
        spanning: modules whose forward spans stages.
    """

    homes: dict[str, frozenset[int]]
    known: dict[str, ModuleInfo]
    spanning: frozenset[str]
    schedule: Schedule | None = None
    templates: dict[str, Template] = field(default_factory=dict)


def merge_modules(reports: Sequence[dict[str, ModuleInfo]]) -> Whole:
    """Put the stages' modules together."""
    homes: dict[str, set[int]] = {}
    known: dict[str, ModuleInfo] = {}
    for stage, modules in enumerate(reports):
        for path, info in modules.items():
            homes.setdefault(path, set()).add(stage)
            known.setdefault(path, info)
    every = set(range(len(reports)))
    spanning: set[str] = set()
    for path, stages in homes.items():
        if stages != every:
            parent = path.rpartition(".")[0]
            while parent:
                if homes.get(parent) == every:
                    spanning.add(parent)
                parent = parent.rpartition(".")[0]
    return Whole(
        {path: frozenset(stages) for path, stages in homes.items()}, known, frozenset(spanning)
    )


def merge_visits(whole: Whole, reports: Sequence[StageReport]) -> None:
    """Add the schedule and the templates.

    Raises:
        SetupError: no stage's forward showed a visit.
    """
    whole.schedule = Schedule.build([report.visits for report in reports], whole.spanning)
    if not whole.schedule.slots:
        raise SetupError("the dummy forward at load visited no module on any stage")
    for location, slots in whole.schedule.slots.items():
        whole.templates[location] = reports[slots[0].stage].templates[location]


def load(
    root: torch.nn.Module,
    prefix: str,
    missing: tuple[type, ...],
    aliases: dict[str, str],
    gather: Callable[[Any], list],
) -> Whole:
    """The first half: exchange modules and put the stubs in place (before the envoy tree is built).

    ``gather`` is an all-gather of objects over the column, in stage order.
    """
    whole = merge_modules(gather(report_modules(root, prefix, missing)))
    fill(root, prefix, whole.known, aliases, missing)
    return whole


def learn(whole: Whole, recordings: Sequence[Recording], gather: Callable[[Any], list]) -> None:
    """The second half: exchange what the dummy forward showed."""
    report = StageReport()
    for recording in recordings:
        report.visits += recording.visits
        for location, template in recording.templates.items():
            report.templates.setdefault(location, template)
    merge_visits(whole, gather(report))
