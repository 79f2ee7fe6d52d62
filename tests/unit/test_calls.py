"""Ad-hoc calls and parameters, on one rank of two whose peer answers here."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppcore.core import Available, Core
from ppcore.errors import BlockError
from ppcore.messages import Worker
from ppcore.runtime import stubs
from ppcore.runtime.calls import Calls, involved, module_of
from ppcore.runtime.interleaver import PPInterleaver
from ppcore.runtime.lazy import is_lazy
from ppcore.runtime.link import Link
from ppcore.runtime.stubs import ModuleInfo
from ppcore.schedule import Place, Schedule

WORKER = Worker("r")
SCHEDULE = Schedule.build([["m.a.output"], ["m.b.output"]])
HOMES = {"m.a": [0], "m.b": [1], "m.shared": [0, 1]}


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return (x * scale, {"first": x[0], "count": 3, "none": None})


class Uses(torch.nn.Module):
    def forward(self, other: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return other(x)


class Rank:
    """Stage 0, on which ``a`` is real; stage 1 has ``b``, and answers probes."""

    def __init__(self) -> None:
        self.modules = {"m.a": torch.nn.Linear(3, 2), "m.shared": Two()}
        self.elsewhere = {"m.b": torch.nn.Linear(3, 5), "m.uses": Uses(), "m.pair": Two()}
        made = {path: stubs.make(path, ModuleInfo.of(m)) for path, m in self.elsewhere.items()}
        homes = {**HOMES, "m.uses": [1], "m.pair": [1]}
        self.core = Core(0, SCHEDULE, homes)
        self.link = Link(self.core, None, torch.device("cpu"))
        self.probes: list[str] = []
        self.published: list[tuple] = []
        self.link.probe = self._probe  # type: ignore[method-assign]
        self.link.publish = lambda *found: self.published.append(found)  # type: ignore[method-assign]
        interleaver = PPInterleaver()
        interleaver.link = self.link
        self.calls = Calls(interleaver, {**self.modules, **made})
        peer = PPInterleaver()
        self.peer = Calls(peer, {**self.elsewhere, "m.a": stubs.make("m.a", ModuleInfo(":"))})
        self.core.open_round(["r"])
        self.core.start(WORKER)
        self.mediator: Any = SimpleNamespace(worker_id=WORKER)

    def _probe(self, owner: int, call: str) -> str:
        assert owner == 1
        self.probes.append(call)
        return self.peer.describe(call)

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        module = self.calls.paths[path]
        return self.calls.call(self.mediator, module, module, args, kwargs)


@pytest.fixture
def rank() -> Rank:
    return Rank()


X = torch.ones(4, 3)


def test_a_module_of_this_stage_runs_here_and_is_published(rank: Rank) -> None:
    found = rank.call("m.a", X)
    assert torch.equal(found, rank.modules["m.a"](X))
    ((key, path, value),) = rank.published
    assert (str(key), path) == ("r#0", "m.a")
    assert value is found


def test_a_module_that_every_stage_has_runs_here_and_is_not_published(rank: Rank) -> None:
    assert torch.equal(rank.call("m.shared", X, scale=2.0)[0], X * 2)
    assert rank.published == []


def test_a_module_of_another_stage_is_a_lazy_of_the_shape_it_returns(rank: Rank) -> None:
    found = rank.call("m.b", X)
    assert is_lazy(found)
    assert (found.shape, found.dtype) == ((4, 5), torch.float32)
    assert found.node.base.owner == 1


def test_a_nested_result_keeps_its_structure(rank: Rank) -> None:
    scaled, rest = rank.call("m.pair", X, scale=3.0)
    assert is_lazy(scaled) and is_lazy(rest["first"])
    assert (rest["first"].shape, rest["count"], rest["none"]) == ((3,), 3, None)


def test_a_structure_is_asked_for_once_for_each_shape_of_arguments(rank: Rank) -> None:
    for rows in (4, 4, 2, 4):
        rank.call("m.b", torch.ones(rows, 3))
    assert len(rank.probes) == 2


def test_asking_for_a_structure_moves_no_data_of_the_block(rank: Rank) -> None:
    rank.call("m.b", torch.full((4, 3), 12345.0))
    assert "12345" not in rank.probes[0]


def test_calls_are_numbered_with_the_other_accesses(rank: Rank) -> None:
    assert rank.call("m.b", X).node.base.key.access == 0
    rank.call("m.a", X)
    assert rank.call("m.b", X).node.base.key.access == 2


def test_a_call_is_available_when_what_the_worker_has_seen_can_be_at_its_owner(rank: Rank) -> None:
    assert rank.call("m.b", X).node.base.available == Available(0, 1)


def test_a_call_that_needs_a_later_value_is_available_a_turn_later(rank: Rank) -> None:
    late = rank.call("m.b", X)
    rank.core._worker(WORKER).clock = Place(0, 1)
    calls = rank.calls
    rank.core.homes = {**rank.core.homes, "m.pair": frozenset({1})}
    assert rank.call("m.pair", late).__class__ is tuple
    again = calls.call(rank.mediator, calls.paths["m.b"], None, (X,), {})
    assert again.node.base.available == Available(0, 1)


def test_modules_that_no_stage_has_together_are_refused(rank: Rank) -> None:
    with pytest.raises(BlockError, match=r"no stage holds all of \['m.uses', 'm.a'\]"):
        rank.call("m.uses", rank.calls.paths["m.a"], X)


def test_modules_passed_to_a_module_of_their_stage_are_found_there(rank: Rank) -> None:
    assert rank.call("m.uses", rank.calls.paths["m.b"], X).shape == (4, 5)


def test_a_module_of_no_path_is_refused(rank: Rank) -> None:
    stranger = torch.nn.Linear(1, 1)
    with pytest.raises(BlockError, match="not a module of the model"):
        rank.calls.call(rank.mediator, stranger, stranger, (X,), {})


def test_an_argument_that_cannot_be_described_is_refused(rank: Rank) -> None:
    with pytest.raises(BlockError, match="a object cannot be passed"):
        rank.call("m.b", object())


def test_a_peer_describes_only_what_is_real_there(rank: Rank) -> None:
    with pytest.raises(BlockError, match="'m.a' is not real here"):
        rank.peer.describe(json.dumps({"module": "m.a", "args": [], "kwargs": {}}))
    with pytest.raises(KeyError):
        rank.peer.describe(json.dumps({"module": "m.nowhere", "args": [], "kwargs": {}}))


def test_a_parameter_of_another_stage_is_one_lazy_however_often_it_is_read(rank: Rank) -> None:
    info = ModuleInfo.of(rank.elsewhere["m.b"])
    weight = rank.calls.parameter(rank.mediator, "m.b", "weight", info)
    assert is_lazy(weight)
    assert weight.shape == (5, 3)
    assert rank.calls.parameter(rank.mediator, "m.b", "weight", info) is weight
    assert rank.calls.parameter(rank.mediator, "m.b", "bias", info).shape == (5,)
    assert rank.core.call(WORKER, "m.a", frozenset({0}))[0].access == 0


def test_a_parameter_or_buffer_is_given_to_a_peer_without_its_gradients() -> None:
    norm = torch.nn.BatchNorm1d(3)
    calls = Calls(PPInterleaver(), {"m.norm": norm})
    assert torch.equal(calls.value_of("m.norm.weight"), norm.weight)
    assert not calls.value_of("m.norm.weight").requires_grad
    assert torch.equal(calls.value_of("m.norm.running_var"), norm.running_var)
    with pytest.raises(KeyError):
        calls.value_of("m.norm.nothing")


def test_modules_are_found_among_arguments() -> None:
    module = torch.nn.Identity()
    envoy = SimpleNamespace(_module=module)
    assert module_of(envoy) is module_of(module) is module
    assert module_of(3) is module_of(SimpleNamespace(_module=3)) is None
    assert involved((1, envoy), {"k": module}) == [envoy, module]
