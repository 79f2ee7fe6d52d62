"""Ways in which records can be wrong about where a rank stands, and what it waits for; see `corruptions`."""

from __future__ import annotations

import json
import random

from ppcore.core import END
from tests.sim.corrupted_calls import KINDS
from tests.sim.corruptions import Records, _spots, kind

__all__ = ["KINDS"]


@kind
def leaves_its_round_within_the_forward(records: Records, draw: random.Random) -> Records | None:
    """A rank says that its forward is over, and then the forward makes a visit."""
    spots = [
        (rank, line)
        for rank, line in _spots(records, "served ")
        if json.loads(records[rank][line][7:])[1][0] != END
    ]
    if not spots:
        return None
    rank, line = draw.choice(spots)
    records[rank].insert(line, "leave_round []")
    return records


@kind
def wait_against_the_rule(records: Records, draw: random.Random) -> Records | None:
    """A rank waits for a later stage's value of the turn that is open."""
    spots: list[tuple[int, int, str]] = []
    for rank, line in _spots(records, r"pull .* = \d+$"):
        lines = records[rank]
        owner, [turn, stage] = json.loads(lines[line][5:].rpartition(" = ")[0])[3:]
        request = json.loads(lines[line][5:].rpartition(" = ")[0])[0][0][0]
        quoted = json.dumps(request)
        turns = sum(text.startswith("open_round") and quoted in text for text in lines[:line])
        rounds = [text for text in lines[:line] if text.startswith(("open_round", "leave_round"))]
        ended = f"end [{quoted}]" in lines[:line] or rounds[-1].startswith("leave_round")
        number = lines[line].rpartition(" = ")[2]
        if owner != rank < stage and turn == turns - 1 and not ended and line + 1 < len(lines):
            sent = lines[line + 1].startswith("  send")
            if sent:
                spots.append((rank, line + 2, number))
    if not spots:
        return None
    rank, line, number = draw.choice(spots)
    records[rank].insert(line, f"wait [[{number}]]")
    return records
