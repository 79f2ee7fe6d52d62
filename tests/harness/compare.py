"""What it means that two runs are the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch


def assert_same(found: Any, expected: Any, where: str = "result") -> None:
    """Equal, whatever it is made of; floats up to the order of a sum, which depends on alignment."""
    assert type(found) is type(expected), f"{where}: {type(found)} and {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, where
        near = 1e-9 if expected.dtype == torch.float64 else 1e-5
        close = torch.allclose(found, expected, rtol=near, atol=near, equal_nan=True)
        assert close, f"{where}: {found} and {expected}"
    elif isinstance(expected, dict):
        assert list(found) == list(expected), f"{where}: {list(found)} and {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where}: {len(found)} and {len(expected)} items"
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9), where
    else:
        assert found == expected, f"{where}: {found!r} and {expected!r}"


def attempt(run: Callable[..., Any], client: Any, *args: Any) -> tuple[Any, Any]:
    """What a run returned, or the kind of its error and the block's line."""
    try:
        return run(client, *args), None
    except Exception as error:
        text = str(error)
        lines = re.findall(r"line (\d+)", text)
        first = (text.splitlines() or [""])[0]
        return None, (type(error).__name__, first, lines[-1] if lines else "")


def same_runs(run: Callable[..., Any], reference: Any, staged: Any, *args: Any) -> Any:
    """Run on both: same results or error, tokens, warnings on every stage."""
    expected, raised = attempt(run, reference, *args)
    found, raised_there = attempt(run, staged, *args)
    assert raised_there == raised, (raised_there, raised)
    assert_same(found, expected)
    for one, other in zip(staged.last, reference.last, strict=True):
        assert one.tokens == other.tokens
        assert {tuple(warned) for warned in one.warnings} == {tuple(other.warnings[0])}
    return raised if raised is not None else found
