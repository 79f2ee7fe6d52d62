"""Several requests in the rounds of two real processes: each keeps to itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

PROMPTS = [[3, 17, 42, 8, 25], [5, 6], [11, 30, 2]]


def test_invokes_of_one_trace_see_their_own_rows(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(max_tokens=3) as tracer:
            with tracer.invoke(PROMPTS[0]):
                a = model.model.layers[0].mlp.up.output.save()
                a2 = model.logits.save()
            with tracer.invoke(PROMPTS[1]):
                b = model.model.layers[3].mlp.up.output.save()
            with tracer.invoke(PROMPTS[2]):
                model.model.layers[0].mlp.output = model.model.layers[0].mlp.output * 2
                c = model.model.layers[3].mlp.up.output.save()
        return a, a2, b, c

    both(run)


def test_requests_of_different_lengths_end_one_by_one(both: Any, staged: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace() as tracer:
            with tracer.invoke(PROMPTS[0], max_tokens=2):
                first = list().save()
                for step in tracer.iter[:]:
                    first.append(model.model.layers[0].mlp.up.output)
            with tracer.invoke(PROMPTS[1], max_tokens=6):
                second = list().save()
                for step in tracer.iter[:]:
                    model.model.layers[3].mlp.output = model.model.layers[1].mlp.output.clone()
                    second.append(model.logits)
        return first, second

    first, second = both(run)
    assert (len(first), len(second)) == (2, 6)


def test_requests_that_arrive_in_different_rounds_count_their_own_turns(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(max_tokens=4) as tracer:
            with tracer.invoke(PROMPTS[0]):
                first = list().save()
                for step in tracer.iter[1:3]:
                    first.append(model.model.layers[3].mlp.up.output)
            with tracer.invoke(PROMPTS[1], start=2):
                second = list().save()
                for step in tracer.iter[1:3]:
                    second.append(model.model.layers[0].mlp.up.output)
                    model.model.layers[2].mlp.output = second[-1][:, :16].clone()
        return first, second

    both(run)


def test_a_request_that_nobody_traces_runs_beside_one_that_is_traced(
    both: Any, staged: Any, reference: Any
) -> None:
    from tests.harness.stage import Job

    for client in (staged, reference):
        client.__dict__["beside"] = client.backend.serve([Job("plain", None, PROMPTS[1], 3)])
    assert staged.beside["plain"].tokens == reference.beside["plain"].tokens
    assert staged.beside["plain"].saves == {}


def test_one_requests_later_value_does_not_hold_up_another(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(max_tokens=3) as tracer:
            with tracer.invoke(PROMPTS[0]):
                waits = list().save()
                for step in tracer.iter[:]:
                    waits.append(float(model.logits.max()))
            with tracer.invoke(PROMPTS[1]):
                goes = list().save()
                for step in tracer.iter[:]:
                    goes.append(model.model.layers[0].mlp.up.output)
                    model.model.layers[1].mlp.output[:] = 0.25
                    goes.append(model.logits)
        return waits, goes

    both(run)


@pytest.mark.parametrize("layer", [0, 3])
def test_an_error_on_one_rank_ends_its_request_and_not_the_other(
    staged: Any, reference: Any, layer: int
) -> None:
    from tests.harness.compare import assert_same, attempt

    def run(model: Any) -> Any:
        with model.trace(max_tokens=3) as tracer:
            with tracer.invoke(PROMPTS[0]):
                early = model.model.layers[1].mlp.up.output.save()
                model.model.layers[layer].mlp.output = torch.zeros(1, 2)
            with tracer.invoke(PROMPTS[1]):
                kept = list().save()
                for step in tracer.iter[:]:
                    kept.append(model.model.layers[3].mlp.up.output)
        return early, kept

    assert attempt(run, staged)[1] == attempt(run, reference)[1]
    mine, other = staged.last
    assert mine.error["type_name"] == reference.last[0].error["type_name"]
    assert other.error is None
    assert_same(other.saves, reference.last[1].saves)
    assert other.tokens == reference.last[1].tokens


def test_an_error_of_plain_python_is_raised_everywhere_with_its_line(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPTS[0], max_tokens=3) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                kept.append(model.model.layers[3].mlp.up.output)
                if len(kept) == 2:
                    raise ValueError("on purpose")
        return kept

    _, text, line = both(run)
    assert text == "ValueError: on purpose"
    assert line


@pytest.mark.parametrize("layer", [0, 3], ids=["before a later stage", "on the last stage"])
def test_an_endless_loop_ends_its_request_at_its_line(staged: Any, layer: int) -> None:
    model = staged

    def endless() -> None:
        with model.trace(PROMPTS[0], max_tokens=2):
            rows = model.model.layers[layer].mlp.output.shape[0]
            while True:
                rows += 1

    def fine() -> Any:
        with model.trace(PROMPTS[0], max_tokens=2):
            kept = model.model.layers[layer].mlp.output.save()
        return kept

    with pytest.raises(
        RuntimeError, match="BlockTimeout: the block ran for more than 2 s"
    ) as found:
        endless()
    assert re.search(r"rows \+= 1|while True:", str(found.value))
    assert fine().shape


@pytest.mark.parametrize("layer", [0, 3])
def test_a_replacement_of_another_dtype_is_refused(staged: Any, layer: int) -> None:
    model = staged
    with (
        pytest.raises(RuntimeError, match=r"BlockError: .*its replacement torch.float16: convert"),
        model.trace(PROMPTS[0]),
    ):
        h = model.model.layers[layer].mlp.output
        model.model.layers[layer].mlp.output = h.half()
    with model.trace(PROMPTS[0]):
        model.logits = model.logits.half().to(model.logits.dtype)
        kept = model.logits.save()
    assert kept.shape


def test_a_block_that_branches_on_the_rank_is_told_that_it_diverged(staged: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPTS[0]):
            import torch.distributed as dist

            if dist.get_rank() == 0:
                h = model.model.layers[0].attention.output
            else:
                h = model.model.layers[0].mlp.output
                model.model.layers[2].mlp.output = h + 1
            x = model.logits.save()
        return x

    with pytest.raises(RuntimeError, match="Diverged: access .*layers.0.mlp.output.*attention"):
        run(staged)


def test_a_block_that_saves_other_things_on_another_rank_is_told_that_it_diverged(
    staged: Any,
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPTS[0]):
            import torch.distributed as dist

            h = model.model.layers[0].mlp.up.output
            kept = [h] * (1 + dist.get_rank())
            kept.save()
        return kept

    with pytest.raises(RuntimeError, match=r"Diverged: stage 0 saved \['kept'\]"):
        run(staged)


def test_after_a_failed_request_the_next_is_served_as_ever(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPTS[2]):
            model.model.layers[3].mlp.output = model.model.layers[0].mlp.output.clone()
            logits = model.logits.save()
        return logits

    both(run)


def test_sixteen_invokes_at_once(both: Any, staged: Any) -> None:
    def run(model: Any) -> None:
        with model.trace(max_tokens=3) as tracer:
            for number in range(16):
                with tracer.invoke([number, number + 1]):
                    for step in tracer.iter[:]:
                        h = model.model.layers[0].mlp.output.clone()
                        model.model.layers[3].mlp.output = h + number

    both(run)
    assert len({tuple(outcome.tokens) for outcome in staged.last}) > 1


def test_a_cache_that_comes_too_late_is_an_error_on_every_rank_by_itself(
    both: Any, staged: Any
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPTS[0]) as tracer:
            kept = model.model.layers[0].mlp.output.save()
            tracer.cache()
        return kept

    both(run)
    assert [shipment.own_error for shipment in staged.last[0].shipments] == [True, True]
