"""Three cores under Hypothesis: see `fuzz.core_machine`."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fuzz.core_machine import CoreMachine
from ppcore.core import Core
from ppcore.effects import Effect
from ppcore.messages import Key

SETTINGS = settings(max_examples=60, stateful_step_count=40)


def test_the_core_keeps_its_promises() -> None:
    run_state_machine_as_test(CoreMachine, settings=SETTINGS)


def test_the_machine_sees_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    # Any pull that comes before its value shows it: the first examples do, every time the same ones.
    def forgetful(self: Core, key: Key, location: str, token: str, size: int) -> list[Effect]:
        self._requests[key.worker.request].waiting.pop(key, ())
        return []

    monkeypatch.setattr(Core, "publish", forgetful)
    first = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CoreMachine, settings=first)
