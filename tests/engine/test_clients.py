"""Prompts in every form that nnsight and vLLM take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppcore.vllm.compare import compare
from tests.engine import clients


def test_a_prompt_may_come_in_any_form(both: Callable[..., tuple[Any, Any]]) -> None:
    one, two = both(clients.prompt_forms)
    assert compare(one.result, two.result).differences == []
    text = two.result["text"]
    for form, found in two.result.items():
        assert compare(text, found).differences == [], form
