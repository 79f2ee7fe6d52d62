"""The requests of one rank, step by step in this process, with its steps and ends as an engine has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ppcore.runtime.collect import entry
from ppcore.runtime.link import Link
from ppsim.real.stage import New, Output, Part, Stage, Whole
from tests.harness import model as tiny
from tests.harness.cluster import Client, Outcome

PROMPT, OTHER = [3, 17, 42, 8, 25], [9, 1, 30]


class Caught:
    """A backend that runs nothing: the block of a trace, as a request carries it."""

    payload = b""

    def serve(self, jobs: list) -> dict[str, Outcome]:
        self.payload = jobs[0].payload
        return {job.id: Outcome({}, None, [], [[]]) for job in jobs}


def block(run: Callable[[Any], Any]) -> bytes:
    caught = Caught()
    run(Client(caught))
    return caught.payload


@pytest.fixture
def rank() -> Stage:
    """The only stage of a pipeline: every worker is driven as on one of several."""
    built = Stage(tiny.build(), 0, 1, lambda value: [value])
    built.connect(Link(built.core(), None, torch.device("cpu")))
    return built


def parts(tokens: list[int], **prompts: list[int]) -> list[Part]:
    """What requests put into a step, after so many tokens."""
    return [
        Part(name, tokens[row : row + 1] or ids, len(ids) if tokens else 0)
        for row, (name, ids) in enumerate(prompts.items())
    ]


def two_steps(rank: Any, payload: bytes, **prompts: list[int]) -> None:
    tokens = rank.step(parts([], **prompts), [New(name, payload) for name in prompts])
    rank.step(parts(tokens, **prompts))


def brought(one: Any, name: str) -> tuple[dict[str, Any], Any]:
    """What a request brings home at its end, and what it warns of."""
    shipped, warned = one.collect(name, Output([]))
    return shipped if isinstance(shipped, dict) else entry([shipped]), warned


def reads(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=2) as tracer:
        kept = list().save()
        for step in tracer.iter[:]:
            kept.append(float(model.model.layers[1].mlp.output.sum()))
            kept.append(int(model.samples[0]))


def left(rank: Stage) -> dict[str, int]:
    found = rank.status()
    names = "requests", "workers", "buffer_entries", "pending_pulls"
    return {name: found[name] for name in names if found[name]}


def test_every_sequence_of_a_request_brings_its_own_saves(rank: Stage) -> None:
    # vLLM names the sequences of one request of ``n=2`` by their number.
    payload = block(reads)
    two_steps(rank, payload, **{"1_r": OTHER, "0_r": PROMPT})
    shipments = rank.requests.collect({"r"}, {"r"}, {"r": Output([])})
    assert list(shipments) == ["r"]
    made = entry([shipments["r"]])
    assert list(made["sequences"]) == [0, 1] and made["error"] is None
    for number, prompt in enumerate((PROMPT, OTHER)):
        alone = f"alone{number}"
        two_steps(rank, payload, **{alone: prompt})
        expected = brought(rank, alone)[0]["saves"]
        assert len(expected["kept"]) == 4
        assert made["sequences"][number]["saves"]["kept"] == pytest.approx(expected["kept"])
    assert made["saves"] == made["sequences"][0]["saves"]
    assert left(rank) == {}


def test_a_request_that_is_ended_from_outside_brings_what_its_block_had(rank: Stage) -> None:
    # As at a stop string, which the client looks for.
    found = []
    for one in (Whole(tiny.build()), rank):
        two_steps(one, block(reads), r=PROMPT)
        made, warned = brought(one, "r")
        found.append((made["saves"], made["error"], warned))
    assert found[1] == found[0]
    assert len(found[0][0]["kept"]) == 4 and len(found[0][2]) == 1
    assert left(rank) == {}


def replaces_a_row(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=2):
        h = model.model.layers[1].mlp.output
        model.model.layers[1].mlp.output = h[:1, :5]


def test_a_replacement_of_the_wrong_shape_ends_its_own_request_as_on_one_rank(rank: Stage) -> None:
    wrong, right = block(replaces_a_row), block(reads)
    errors = []
    for one in (Whole(tiny.build()), rank):
        one.step(parts([], r=PROMPT, s=OTHER), [New("r", wrong), New("s", right)])
        assert one.erred("r") and not one.erred("s")
        made, _ = brought(one, "r")
        errors.append((made["error"]["type_name"], made["error"]["message"]))
    assert errors[1] == errors[0]


def draws_seven(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=9) as tracer:
        for step in tracer.iter[:]:
            with torch.no_grad():
                model.samples = torch.full_like(model.samples, 7)
                model.model.layers[0].mlp.output.sum()


def test_a_registered_block_that_is_cleared_while_it_runs_ends_there(rank: Stage) -> None:
    def state() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    whole = Whole(tiny.build())
    (first,) = whole.step(parts([], r=PROMPT), [New("r", None)])
    (second,) = whole.step(parts([7], r=PROMPT))
    assert 7 not in (first, second)

    before = state()
    rank.register({"sevens": block(draws_seven)})
    assert rank.step(parts([], r=PROMPT), [New("r", None, ["sevens"])]) == [7]
    (copy,) = rank.requests.requests["r"].copies.values()
    assert copy.alive
    rank.unregister(["sevens"])
    assert not copy.alive and not copy.lcls
    assert state() == before
    assert rank.step(parts([7], r=PROMPT)) == [second]
    rank.collect("r", Output([]))
    assert left(rank) == {}


def draws(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=2):
        noise = torch.rand(3).tolist().save()  # noqa: F841
        model.model.layers[1].mlp.output.sum()


def test_a_requests_draws_are_its_own_whatever_else_is_in_the_batch(rank: Stage) -> None:
    def noise(**prompts: list[int]) -> dict[str, list[float]]:
        two_steps(rank, block(draws), **prompts)
        return {name: brought(rank, name)[0]["saves"]["noise"] for name in prompts}

    alone = noise(r=PROMPT)
    together = noise(s=OTHER, r=PROMPT)
    assert together["r"] == alone["r"] and together["s"] != alone["r"]


def test_a_request_that_is_over_holds_nothing(rank: Stage) -> None:
    two_steps(rank, block(reads), r=PROMPT)
    worker = rank.requests.requests["r"].mediator
    assert worker.lcls
    rank.collect("r", Output([]))
    assert not worker.lcls and not worker.caches and worker.pending is None
    assert left(rank) == {}
