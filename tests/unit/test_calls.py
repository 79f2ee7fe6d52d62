"""Ad-hoc calls and parameters, on two ranks that speak to each other within this thread."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nnsight.intervention.interleaver import Mediator

from ppcore.core import Available, Core
from ppcore.errors import BlockError, Missed
from ppcore.messages import Worker
from ppcore.runtime import codec, lazy, stubs
from ppcore.runtime.calls import Calls, involved, module_of
from ppcore.runtime.interleaver import PPInterleaver
from ppcore.runtime.lazy import is_lazy
from ppcore.runtime.link import Link
from ppcore.runtime.mediator import PPMediator
from ppcore.runtime.stubs import ModuleInfo
from ppcore.schedule import Schedule

WORKER = Worker("r")
SCHEDULE = Schedule.build([["m.a.output"], ["m.b.output"]])
HOMES = {"m.a": [0], "m.b": [1], "m.shared": [0, 1]}


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return (x * scale, {"first": x[0], "count": 3, "none": None})


class Uses(torch.nn.Module):
    def forward(self, other: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return other(x)


class Raises(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.any():
            raise IndexError("out of range")
        return x


class Beside(torch.nn.Module):
    """Says whether it runs on a thread that serves no worker."""

    rank: Rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = threading.get_ident() in self.rank.calls.interleaver.bystanders
        return x + int(beside)


class Direct:
    """A transport that delivers within `send`, or, held, when it is let go."""

    def __init__(self) -> None:
        self.peers: dict[int, Link] = {}
        self.sent: list[str] = []
        self.payloads: list[Any] = []
        self.held: list[tuple] | None = None

    def start(self, on_frame: object, on_death: object) -> None:
        pass

    def send(self, peer: int, text: str, payload: Sequence[Any] = ()) -> None:
        self.sent.append(text)
        if payload:
            self.payloads.append(codec.decode(b"".join(payload)))
        if self.held is None:
            self._deliver(peer, text, payload)
        else:
            self.held.append((peer, text, payload))

    def _deliver(self, peer: int, text: str, payload: Sequence[Any]) -> None:
        (mine,) = {0, 1} - {peer}
        self.peers[peer]._on_frame(mine, text, memoryview(bytearray().join(payload)))

    def let_go(self) -> None:
        held, self.held = self.held or [], None
        for frame in held:
            self._deliver(*frame)

    def close(self, timeout_s: float = 2.0) -> bool:
        return True


class Rank:
    """One of two stages: ``a`` is real on the first, the others on the second, ``shared`` on both."""

    def __init__(self, stage: int) -> None:
        torch.manual_seed(0)
        elsewhere = {
            "m.b": torch.nn.Linear(3, 5), "m.uses": Uses(), "m.pair": Two(), "m.raises": Raises(),
            "m.beside": Beside(),
        }  # fmt: skip
        here = {"m.a": torch.nn.Linear(3, 2)}
        real, stubbed = (here, elsewhere) if stage == 0 else (elsewhere, here)
        made = {path: stubs.make(path, ModuleInfo.of(m)) for path, m in stubbed.items()}
        self.modules: dict[str, Any] = {**real, **made, "m.shared": Two()}
        self.elsewhere = elsewhere
        self.core = Core(stage, SCHEDULE, {**HOMES, **{path: [1] for path in elsewhere}})
        interleaver = PPInterleaver()
        self.calls = Calls(interleaver, self.modules)
        self.wire = Direct()
        self.link = interleaver.link = Link(
            self.core,
            self.wire,
            torch.device("cpu"),
            parameter=self.calls.value_of,
            describe=self.calls.describe,
            compute=self.calls.compute,
            dropped=self.calls.dropped,
        )
        self.link.open_round(["r"])
        self.core.start(WORKER)
        self.mediator: Any = SimpleNamespace(worker_id=WORKER, parameters={})

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        module = self.modules[path]
        return self.calls.call(self.mediator, module, module, args, kwargs)


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    both = Rank(0), Rank(1)
    for rank in both:
        rank.wire.peers = {number: other.link for number, other in enumerate(both)}
    both[1].modules["m.beside"].rank = both[1]
    return both


@pytest.fixture
def rank(ranks: tuple[Rank, Rank]) -> Rank:
    """The first stage, where the block is: it has the arguments."""
    return ranks[0]


@pytest.fixture
def home(ranks: tuple[Rank, Rank]) -> Rank:
    """The second stage, where most modules are real."""
    return ranks[1]


X = torch.ones(4, 3)


def words(rank: Rank) -> list[str]:
    return [text.split()[0] for text in rank.wire.sent]


def test_a_module_of_this_stage_runs_here_and_its_result_is_pulled(rank: Rank, home: Rank) -> None:
    found = rank.call("m.a", X)
    assert torch.equal(found, rank.modules["m.a"](X))
    assert "call" not in words(rank)
    there = home.call("m.a", X)
    assert is_lazy(there)
    assert torch.equal(lazy.force(there), found)


def test_a_module_that_every_stage_has_runs_where_the_block_is(rank: Rank, home: Rank) -> None:
    assert torch.equal(rank.call("m.shared", X, scale=2.0)[0], X * 2)
    assert is_lazy(home.call("m.shared", X, scale=2.0)[0])


def test_a_result_of_another_stages_module_is_there_at_once(rank: Rank, home: Rank) -> None:
    x = torch.randn(4, 3)
    found = rank.call("m.b", x)
    assert is_lazy(found)
    assert torch.equal(lazy.force(found), home.modules["m.b"](x))


def test_the_home_takes_what_was_computed_and_asks_for_no_argument(rank: Rank, home: Rank) -> None:
    x = torch.randn(4, 3)
    rank.call("m.b", x)
    found = home.call("m.b", torch.zeros(4, 3))
    assert torch.equal(found, home.modules["m.b"](x))
    assert home.calls.results == {}


def test_the_arguments_are_those_of_the_call(rank: Rank, home: Rank) -> None:
    x = torch.randn(40_000, 3)  # so large that it is sent from where it lies
    wanted = home.modules["m.b"](x)
    rank.call("m.b", X)  # what it returns is known by now for this many rows, and for the many
    rank.calls._structure(1, "m.b", (x,), {})
    rank.wire.held = []
    found = rank.call("m.b", x)
    x.zero_()
    rank.wire.let_go()
    assert torch.equal(lazy.force(found), wanted)


def test_an_edit_of_the_result_on_its_home_is_not_seen_elsewhere(rank: Rank, home: Rank) -> None:
    found = rank.call("m.b", X)
    with torch.inference_mode():  # as a step runs
        home.call("m.b", X)[:] = 7
    assert torch.equal(lazy.force(found), home.modules["m.b"](X))


def test_a_call_of_a_calls_result_sends_neither_there_nor_back(rank: Rank, home: Rank) -> None:
    x = torch.randn(4, 3)
    scaled, _ = rank.call("m.pair", x, scale=3.0)
    found = rank.call("m.b", scaled[-1:])
    assert "pull" not in words(rank)
    assert [len(sent) for sent in rank.wire.payloads if isinstance(sent, list)] == [1, 0]
    assert torch.equal(lazy.force(found), home.modules["m.b"](x[-1:] * 3.0))


def test_a_calls_result_that_was_edited_is_sent_as_it_is_now(rank: Rank, home: Rank) -> None:
    scaled, _ = rank.call("m.pair", X)
    with torch.inference_mode():  # as a step runs
        scaled[0] = 5.0
        found = rank.call("m.b", scaled)
    wanted = X.clone()
    wanted[0] = 5.0
    assert torch.equal(lazy.force(found), home.modules["m.b"](wanted))


def test_a_call_of_what_has_failed_fails_alike(rank: Rank, home: Rank) -> None:
    found = rank.call("m.b", rank.call("m.raises", X))
    with pytest.raises(IndexError, match="out of range"):
        lazy.force(found)


def test_what_a_module_raises_is_raised_on_every_stage(rank: Rank, home: Rank) -> None:
    found = rank.call("m.raises", X)
    with pytest.raises(IndexError, match="out of range"):
        home.call("m.raises", X)
    with pytest.raises(IndexError, match="out of range"):
        lazy.force(found)


def test_a_call_is_computed_under_the_blocks_autocast(rank: Rank) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = rank.call("m.b", X)
    assert (found.dtype, lazy.force(found).dtype) == (torch.bfloat16, torch.bfloat16)
    plain = rank.call("m.b", X)
    assert (plain.dtype, lazy.force(plain).dtype) == (torch.float32, torch.float32)


def test_what_a_peer_waits_for_is_made_outside_of_the_blocks_autocast(
    rank: Rank, home: Rank
) -> None:
    def call(rank: Rank) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return rank.call("m.shared", X / 3)[0]

    there = call(home)
    product = there.T @ there
    lazy.prefetch(product)
    before = len(rank.wire.payloads)
    here = call(rank)
    assert len(rank.wire.payloads) == before + 1
    assert lazy.force(product).dtype == torch.float32
    assert torch.equal(lazy.force(product), here.T @ here)


def test_a_call_beside_the_forward_serves_no_worker(rank: Rank, home: Rank) -> None:
    assert torch.equal(lazy.force(rank.call("m.beside", X)), X + 1)
    assert home.calls.interleaver.bystanders == frozenset()


def test_two_calls_beside_the_forward_do_not_end_each_other(home: Rank) -> None:
    inner: list[int] = []

    class Meets(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=lambda: home.calls.describe(spelled))
            other.start()
            other.join()
            inner.append(len(home.calls.interleaver.bystanders))
            return x

    home.modules["m.meets"] = Meets()
    spelled = home.calls._spell_call("m.pair", (X,), {})
    home.calls.describe(home.calls._spell_call("m.meets", (X,), {}))
    assert inner == [1]


def test_a_result_goes_with_its_request(rank: Rank, home: Rank) -> None:
    rank.call("m.b", X)
    assert len(home.calls.results) == 1
    for stage in (rank, home):
        stage.link.end("r")
        stage.link.say_done("r")
    assert home.calls.results == {}


def test_a_collective_call_waits_for_its_homes_worker(rank: Rank, home: Rank) -> None:
    rank.calls.collective = home.calls.collective = True
    found = rank.call("m.b", X)
    assert "call" not in words(rank)
    assert found.node.base.available == Available(0, 1)
    assert torch.equal(home.call("m.b", X), home.modules["m.b"](X))
    with pytest.raises(Missed, match="produces only after it"):
        lazy.force(found)
    rank.link.open_round(["r"])
    assert torch.equal(lazy.force(found), home.modules["m.b"](X))


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
    assert words(rank).count("probe") == 2


def test_asking_for_a_structure_moves_no_data_of_the_block(rank: Rank) -> None:
    rank.call("m.b", torch.full((4, 3), 12345.0))
    assert words(rank)[0] == "probe"
    assert "12345" not in rank.wire.sent[0]


def test_calls_are_numbered_with_the_other_accesses(rank: Rank) -> None:
    assert rank.call("m.b", X).node.base.key.access == 0
    rank.call("m.a", X)
    assert rank.call("m.b", X).node.base.key.access == 2


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


def test_a_peer_describes_only_what_is_real_there(home: Rank) -> None:
    with pytest.raises(BlockError, match="'m.a' is not real here"):
        home.calls.describe(json.dumps({"module": "m.a", "args": [], "kwargs": {}}))
    with pytest.raises(KeyError):
        home.calls.describe(json.dumps({"module": "m.nowhere", "args": [], "kwargs": {}}))


def test_a_parameter_of_another_stage_is_one_lazy_however_often_it_is_read(rank: Rank) -> None:
    info = ModuleInfo.of(rank.elsewhere["m.b"])
    weight = rank.calls.parameter(rank.mediator, "m.b", "weight", info)
    assert is_lazy(weight)
    assert weight.shape == (5, 3)
    assert rank.calls.parameter(rank.mediator, "m.b", "weight", info) is weight
    assert rank.calls.parameter(rank.mediator, "m.b", "bias", info).shape == (5,)
    assert rank.core.call(WORKER, "m.a", frozenset({0}), False, ()).key.access == 0


def test_a_worker_whose_request_is_over_holds_no_parameter(rank: Rank) -> None:
    # Whatever holds the worker: only part of this was pulled, and that would stay too.
    info = ModuleInfo.of(rank.elsewhere["m.b"])
    plain = Mediator(compile("pass", "<block>", "exec"), {}, {})
    worker = PPMediator.adopt(plain, WORKER, rank.link)
    kept = weakref.ref(rank.calls.parameter(worker, "m.b", "weight", info))
    assert kept() is not None
    worker.let_go()
    assert kept() is None


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
