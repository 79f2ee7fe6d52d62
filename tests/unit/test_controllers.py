"""nnsight's controllers leave the forward's way while nobody traces, and come back whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nnsight import NNsight, save

from ppcore.runtime.controllers import Controllers
from ppcore.runtime.requests import StagedRequests


class Own(torch.nn.Module):
    """A module that chooses its forward for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: x + 1


def wrapped() -> tuple[NNsight, torch.nn.Module]:
    root = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), Own())
    return NNsight(root), root


def in_place(root: torch.nn.Module) -> list[str]:
    return [name for name, module in root.named_modules() if "forward" in module.__dict__]


def test_out_every_class_runs_its_own_forward_and_in_again_a_trace_reads() -> None:
    model, root = wrapped()
    controllers = Controllers(root)
    all_of_them = in_place(root)
    assert all_of_them == ["", "0", "1", "2"]
    x = torch.ones(1, 3)
    expected = root(x)

    controllers.put(False)
    assert in_place(root) == ["2"], "its own forward is all that it has"
    assert torch.equal(root(x), expected)

    controllers.put(True)
    assert in_place(root) == all_of_them
    with model.trace(x):
        inner = save(model[1].output)
        last = save(model[2].output)
    assert torch.equal(last, expected) and torch.equal(inner + 1, expected)


def test_a_forward_that_somebody_put_there_since_stays() -> None:
    _, root = wrapped()
    controllers = Controllers(root)
    root[0].forward = torch.zeros_like  # type: ignore[assignment]
    controllers.put(False)
    assert root[0].forward is torch.zeros_like
    assert in_place(root) == ["0", "2"]


def test_an_engine_has_them_in_place_while_it_carries_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    from ppcore.vllm.requests import PPRequests

    monkeypatch.setattr(StagedRequests, "scope", lambda self, model, spans: None)
    _, root = wrapped()
    link: Any = None
    requests = PPRequests(link, object, Controllers(root), lambda: False)  # type: ignore[arg-type]
    requests.scope(None, [])
    assert in_place(root) == ["2"]
    requests.requests["r"] = SimpleNamespace(workers=lambda: ["a worker"])
    requests.scope(None, [])
    assert in_place(root) == ["", "0", "1", "2"]
    del requests.requests["r"]
    requests.scope(None, [])
    assert in_place(root) == ["2"]


def _new(**extra: Any) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra or None))


def test_a_step_is_vllms_alone_unless_a_request_or_the_engine_has_something_of_nnsights() -> None:
    pytest.importorskip("vllm")
    from ppcore.vllm.requests import PPRequests

    _, root = wrapped()
    link: Any = None
    requests = PPRequests(link, object, Controllers(root), lambda: False)  # type: ignore[arg-type]
    assert not requests.untraced([_new(), _new(nnsight_mediator=b"")])
    assert not requests.untraced([_new(nnsight_edits=["unknown"])]), "which is an error to tell"
    assert in_place(root) == ["", "0", "1", "2"]
    assert requests.untraced([_new(), _new(somebodys="own")])
    assert in_place(root) == ["2"], "the modules are vLLM's too"
    requests.templates["registered"] = object()
    assert not requests.untraced([_new()])
    requests.templates.clear()
    requests.requests["r"] = SimpleNamespace(workers=list)
    assert not requests.untraced([])
    del requests.requests["r"]
    assert requests.untraced([])
