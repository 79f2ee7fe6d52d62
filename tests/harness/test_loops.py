"""Blocks of many steps on two real processes, against plain nnsight on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

PROMPT = [3, 17, 42, 8, 25]


def test_an_open_loop_over_both_stages(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=5) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                early = model.model.layers[0].mlp.output.clone()
                late = model.model.layers[3].mlp.output.clone()
                kept.append((early, late, model.logits.argmax(-1)))
        return kept

    assert len(both(run)) == 5
    assert cluster.moved("pulls_total") == [0, 0]


@pytest.mark.parametrize("layer", [0, 3])
def test_a_loop_whose_body_touches_one_stage_only(both: Any, layer: int) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=4) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                kept.append(model.model.layers[layer].mlp.up.output)
        return kept

    assert len(both(run)) == 4


@pytest.mark.parametrize("form", ["0:3", "1:3", "2", "list", "beyond", "all", "step"])
def test_every_form_of_a_loop(both: Any, form: str) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=5) as tracer:
            kept, after = list().save(), list().save()
            steps = {
                "0:3": slice(0, 3),
                "1:3": slice(1, 3),
                "2": 2,
                "list": [0, 2, 3],
                "beyond": slice(0, 9),
                "all": slice(None),
                "step": slice(0, 5, 2),
            }[form]
            for step in tracer.iter[steps]:
                kept.append(model.model.layers[1].mlp.up.output[-1])
                kept.append(model.model.layers[2].mlp.up.output[-1])
            after.append(1)
        return kept, after

    both(run)


def test_lines_after_a_bounded_loop_run_in_the_next_step(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=5) as tracer:
            kept = list().save()
            for step in tracer.iter[0:2]:
                kept.append(model.model.layers[3].mlp.up.output)
            kept.append(model.model.layers[0].mlp.up.output)
            kept.append(model.logits)
        return kept

    both(run)


def test_two_loops_one_after_the_other(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=6) as tracer:
            kept = list().save()
            for step in tracer.iter[0:2]:
                kept.append(model.model.layers[0].mlp.up.output)
            for step in tracer.iter[3:5]:
                kept.append(model.model.layers[3].mlp.up.output)
        return kept

    assert len(both(run)) == 4


def test_steering_the_next_step_with_a_later_stages_value(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=5) as tracer:
            kept, late = list().save(), None
            for step in tracer.iter[:]:
                if late is not None:
                    model.model.layers[0].mlp.output = model.model.layers[0].mlp.output + late
                late = model.model.layers[3].mlp.output[-1:].clone()
                kept.append(model.logits)
        return kept

    assert len(both(run)) == 5
    assert cluster.moved("pulls_total")[0] == 4


def test_a_branch_on_the_sampled_token_changes_the_next_step_of_both_stages(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=6) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                if kept and int(kept[-1]) % 2:
                    model.model.layers[1].mlp.output[:] = 0.5
                    model.model.layers[3].mlp.output[:] = -0.5
                kept.append(model.samples[0, 0])
        return kept

    assert len(both(run)) == 6


def test_a_token_that_the_block_writes_is_the_one_that_is_generated(both: Any, staged: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=4) as tracer:
            for step in tracer.iter[1:3]:
                model.samples = torch.full((1, 1), 9, dtype=torch.int32)
        return None

    both(run)
    assert staged.last[0].tokens[1:3] == [9, 9]


def test_stopping_in_the_middle(both: Any, staged: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=6) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                kept.append(model.model.layers[3].mlp.up.output)
                if len(kept) == 3:
                    tracer.stop()
        return kept

    assert len(both(run)) == 3
    assert len(staged.last[0].tokens) == 3


def test_a_long_loop_that_keeps_nothing_holds_a_bounded_number_of_values(
    both: Any, cluster: Any
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=200) as tracer:
            steps = list().save()
            for step in tracer.iter[:]:
                for layer in range(4):
                    model.model.layers[layer].mlp.output
                    model.model.layers[layer].output
                steps.append(step)
        return steps

    assert len(both(run)) == 200
    # Each stage publishes 800 values. How many are there at once depends on how soon a release
    # arrives, which on busy cores can be tens of steps late.
    assert max(found["peak_entries"] for found in cluster.after) < 400
    assert cluster.moved("pulls_total") == [0, 0]


def test_a_parameter_of_another_stage_is_read_in_every_step(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=4) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                h = model.model.layers[2].mlp.output
                model.model.layers[2].mlp.output = h + model.model.layers[0].mlp.down.bias
                kept.append(model.logits)
        return kept

    both(run)


def test_an_ad_hoc_call_in_every_step(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=4) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                for layer in (0, 2):
                    h = model.model.layers[layer].mlp.output
                    kept.append(model.lm_head(model.model.norm(h))[-1].argmax())
        return kept

    assert len(both(run)) == 8


@pytest.mark.parametrize("context", ["no_grad", "device"])
def test_a_cut_loop_within_a_torch_context_warns_and_keeps(both: Any, context: str) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=3) as tracer:
            kept = list().save()
            with torch.device("cpu") if context == "device" else torch.no_grad():
                for step in tracer.iter[:]:
                    kept.append(model.model.layers[0].mlp.up.output)
                    kept.append(model.model.layers[3].mlp.up.output)
        return kept

    assert len(both(run)) == 6
