"""Saved values are known by identity for as long as they live, and no longer."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("nnsight")

from ppcore.runtime.saved import LiveSaves  # noqa: E402


def test_a_tensor_that_died_is_not_saved_any_more() -> None:
    saves = LiveSaves()
    value = torch.zeros(3)
    saves.add(id(value))
    assert id(value) in saves
    known = id(value)
    del value
    gc.collect()
    assert known not in saves


def test_a_list_stays_alive_while_it_is_saved() -> None:
    saves = LiveSaves()
    value = [object()]
    known = id(value)
    saves.add(known)
    del value
    others = [[n] for n in range(1000)]
    assert known in saves
    assert known not in {id(other) for other in others}


def test_a_discarded_value_may_be_saved_again() -> None:
    saves = LiveSaves()
    value = torch.zeros(1)
    saves.add(id(value))
    saves.discard(id(value))
    assert id(value) not in saves
    saves.add(id(value))
    assert id(value) in saves
    saves.clear()
    assert not saves
