"""Ways in which records can be wrong about the calls of modules; see `corruptions`."""

from __future__ import annotations

import json

from tests.sim.corruptions import KINDS, _answer, _drop, _edit, _repeat

_CALL = r"call (.*) = (\[.*\])"


def _other_stage(at: int) -> object:
    def change(answer: list) -> None:
        answer[at] = 1 if answer[at] == 0 else answer[at] - 1

    return change


def _another_call(text: str) -> str:
    """Another call's result."""
    word, _, rest = text.partition(" ")
    spelled = json.loads(rest)
    spelled[0][1] += 1
    return f"{word} {json.dumps(spelled, separators=(',', ':'))}"


KINDS |= {
    "computed-dropped": _drop("computed "),
    "computed-repeated": _repeat("computed "),
    "computed-key": _edit("computed ", _another_call),
    "given-dropped": _drop("give "),
    "given-repeated": _repeat("give "),
    "given-key": _edit("give ", _another_call),
    "caller": _edit(_CALL, _answer(_other_stage(1))),  # type: ignore[arg-type]
    "home": _edit(_CALL, _answer(_other_stage(2))),  # type: ignore[arg-type]
}
