"""Three real processes: values that pass over a stage, and reads in every direction."""

from __future__ import annotations

from typing import Any

STAGES = 3

PROMPT = [3, 17, 42, 8, 25]


def test_every_stage_is_saved_from_and_nothing_moves(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=3) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                kept.append([model.model.layers[i].mlp.up.output for i in (0, 1, 2, 3)])
                kept.append(model.logits)
        return kept

    both(run)
    assert cluster.moved("pulls_total") == [0, 0, 0]


def test_a_value_passes_over_a_stage(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            first = model.model.layers[0].mlp.output.clone()
            model.model.layers[3].mlp.output = first * 2
            logits = model.logits.save()
        return logits

    both(run)
    assert cluster.moved("pulls_total") == [0, 0, 1]


def test_each_stage_takes_from_every_earlier_one(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            total = model.model.layers[0].mlp.output.clone()
            for layer in (1, 2, 3):
                total = total + model.model.layers[layer].mlp.output
                model.model.layers[layer].mlp.output = total
            logits = model.logits.save()
        return logits

    both(run)


def test_the_middle_stage_is_steered_by_the_last_of_the_step_before(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=4) as tracer:
            kept, last = list().save(), None
            for step in tracer.iter[:]:
                if last is not None:
                    model.model.layers[2].mlp.output = last * 2
                last = model.model.layers[3].mlp.output[-1:].clone()
                kept.append(model.logits)
        return kept

    both(run)


def test_a_branch_on_the_last_stage_turns_every_stage(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=5) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                if kept and int(kept[-1]) % 2:
                    for layer in (0, 1, 2, 3):
                        model.model.layers[layer].mlp.output[:] = layer / 4
                kept.append(model.samples[0, 0])
        return kept

    both(run)


def test_an_error_on_the_middle_stage_is_every_ranks(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=3):
            first = model.model.layers[0].mlp.up.output.save()
            h = model.model.layers[2].mlp.output
            h[99] = 0
            last = model.logits.save()
        return first, last

    both(run)


def test_a_shared_module_is_each_stages_own(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            kept = [model.model.layers[i].attention.qkv.output.clone() for i in (0, 1, 2, 3)].save()
            logits = model.logits.save()
        return kept, logits

    both(run)
