"""A block that never comes back is ended at its line; what is done for it is not."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("nnsight")

from ppcore.errors import BlockTimeout
from ppcore.runtime import lazy, watchdog
from ppcore.runtime.watchdog import Watchdog

ENDLESS = "x = 1\nwhile True:\n    x += 1\n"


@pytest.fixture
def short() -> Iterator[Watchdog]:
    made = Watchdog(0.1)
    yield made
    made.close()


def run(text: str, file: str, **names: Any) -> dict[str, Any]:
    scope: dict[str, Any] = dict(names)
    exec(compile(text, file, "exec"), scope)
    return scope


def test_an_endless_loop_is_ended_at_its_line(short: Watchdog) -> None:
    short.begin()
    with pytest.raises(BlockTimeout, match=r"more than 0.1 s without touching the model") as raised:
        run(ENDLESS, "<edit-1>")
    short.end()
    (line,) = [f.lineno for f in traceback.extract_tb(raised.tb) if f.filename == "<edit-1>"]
    assert line in (2, 3)
    assert type(raised.value).__name__ == "BlockTimeout"


def test_a_block_that_swallows_the_error_is_ended_again(short: Watchdog) -> None:
    times: list[int] = []
    text = "while len(times) < 3:\n    try:\n        while True: str()\n"
    text += "    except Exception:\n        times.append(1)\n"
    short.begin()
    while len(times) < 3:
        try:
            run(text, "<edit-2>", times=times)
        except BlockTimeout:  # it came while the block handled the one before
            times.append(2)
    short.end()
    assert len(times) == 3


def test_what_did_not_get_there_is_taken_back(
    short: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(watchdog, "_raise_in", lambda thread, error: told.append(error))
    short.begin()
    run("while not told: pass", "<edit-3>", told=told)
    short.end()
    assert told[0] is not None and told[-1] is None


def test_a_wait_for_another_rank_does_not_count(
    short: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(watchdog, "_raise_in", lambda thread, error: told.append(error))
    short.begin()
    with short.waiting():
        assert short._ends is None
    assert short._ends is not None
    short.end()
    with short.waiting():  # not by a block
        pass
    assert short._ends is None


@pytest.mark.parametrize(
    "files, inside",
    [
        (("<edit-1>",), True),
        (("<edit-1>", "somebody/else.py"), True),
        (("<edit-1>", lazy.__file__), False),
        (("<edit-1>", lazy.__file__, "somebody/else.py"), False),
        (("somebody/else.py",), False),
    ],
    ids=["block", "what it calls", "a lazy", "what a lazy calls", "the forward"],
)
def test_only_the_blocks_own_code_is_interrupted(files: tuple[str, ...], inside: bool) -> None:
    def call(rest: tuple[str, ...]) -> Any:
        if not rest:
            # The frames of this test between those of the files are nobody's.
            return watchdog._in_block(sys._getframe())
        return run("found = call(rest)", rest[0], call=call, rest=rest[1:])["found"]

    assert call(files) is inside
