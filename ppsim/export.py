"""A run as a Chrome trace, for the viewers that read that format (Perfetto, about:tracing).

One microsecond is one event. A rank is a process; its forward and its listeners are threads.
"""

from __future__ import annotations

import json
from typing import Any

from .draw import _pairs
from .world import World


def chrome(world: World) -> str:
    """The trace of a recorded run, as JSON."""
    events: list[dict[str, Any]] = []
    for index, (stage, column) in enumerate(world.ranks):
        label = {"name": f"rank ({stage}, {column})"}
        events.append({"ph": "M", "name": "process_name", "pid": index, "args": label})
    numbers = {where: index for index, where in enumerate(world.ranks)}
    threads = {task.name: task.number for task in world.tasks}
    for at, name in enumerate(world.schedule):
        if name[0] in "fl" and "." in name:
            where, _, side = name[1:].partition("<")[0].partition(".")
            pid = numbers[int(where), int(side)]
            events.append(
                {"ph": "X", "name": name, "pid": pid, "tid": threads[name], "ts": at, "dur": 1}
            )
    for number, (sent, taken) in enumerate(_pairs(world.notes)):
        here = {"cat": "message", "id": number, "name": sent.text}
        pid, peer = numbers[sent.stage, sent.column], numbers[sent.peer, sent.column]
        mine = threads[f"f{sent.stage}.{sent.column}"]
        events.append({**here, "ph": "s", "pid": pid, "tid": mine, "ts": sent.event})
        if taken is not None:
            theirs = threads[f"l{taken.stage}.{taken.column}<{taken.peer}"]
            events.append(
                {**here, "ph": "f", "bp": "e", "pid": peer, "tid": theirs, "ts": taken.event}
            )
    return json.dumps({"traceEvents": events})
