"""Blocks of one step on two real processes, against plain nnsight on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

PROMPT = [3, 17, 42, 8, 25]


def test_values_of_every_stage_are_saved_as_on_one_rank_and_nothing_moves(
    both: Any, cluster: Any
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            embed = model.model.embed.output.save()
            early = model.model.layers[0].output[0].clone().save()
            inner = model.model.layers[1].mlp.up.output.save()
            hidden, residual = model.model.layers[2].output
            pair = (hidden.clone(), residual[1:3].float()).save()
            late = model.model.layers[3].mlp.output.save()
            logits = model.logits.save()
            token = model.samples.save()
        return embed, early, inner, pair, late, logits, token

    both(run)
    assert cluster.moved("pulls_total") == [0, 0]
    assert cluster.moved("pulled_bytes_total") == [0, 0]


def test_a_tuple_read_before_a_fused_kernel_overwrites_it_is_pulled_as_it_was_read(
    both: Any,
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            hidden, residual = model.model.layers[0].output
            copies = (hidden.clone(), residual.clone())
            model.model.layers[3].mlp.output = copies[0] + copies[1]
            logits = model.logits.save()
        return logits

    both(run)


def test_a_write_of_a_later_value_from_an_earlier_one_pulls_it_once(
    both: Any, cluster: Any
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            early = model.model.layers[0].mlp.output.clone()
            model.model.layers[2].mlp.output = early * 2
            model.model.layers[3].mlp.output = early + 1
            logits = model.logits.save()
        return logits

    both(run)
    assert cluster.moved("pulled_bytes_total")[0] == 0
    assert len(PROMPT) * 16 * 8 <= cluster.moved("pulled_bytes_total")[1]
    assert cluster.moved("pulls_total")[1] <= 2


def test_a_remote_write_moves_nothing(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            model.model.layers[0].mlp.output = torch.zeros(5, 16, dtype=torch.float64)
            model.model.layers[3].mlp.output = torch.ones(5, 16, dtype=torch.float64)
            logits = model.logits.save()
        return logits

    both(run)
    assert cluster.moved("pulls_total") == [0, 0]


def test_edits_in_place_reach_the_forward_on_every_stage(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            model.model.layers[0].output[0][1:3] = 0
            model.model.layers[1].mlp.output[:] *= 3
            model.model.layers[2].output[0][-1] += 5
            model.logits[:, 7] = 100.0
            token = model.samples.save()
        return token

    both(run)


def test_an_edit_is_seen_by_a_later_read_of_the_visit_and_by_a_pull(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            h = model.model.layers[0].mlp.output
            before = h.clone().save()
            h[0] = 7.0
            again = model.model.layers[0].mlp.output.clone().save()
            model.model.layers[3].mlp.output = h * 2
            after = h.sum().save()
            logits = model.logits.save()
        return before, again, after, logits

    both(run)


def test_a_replacement_is_seen_by_a_later_read_of_the_visit(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            new = model.model.layers[1].mlp.output * 0 + 3
            model.model.layers[1].mlp.output = new
            seen = model.model.layers[1].mlp.output.clone().save()
            model.model.layers[2].mlp.output = seen + 1
            late = model.model.layers[2].mlp.output.clone().save()
        return seen, late

    both(run)


def test_a_row_of_a_value_brings_a_row(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            row = model.model.layers[0].mlp.output[-1]
            model.model.layers[3].mlp.output[0] = row
            logits = model.logits.save()
        return logits

    both(run)
    assert cluster.moved("pulls_total") == [0, 1]
    assert 16 * 8 <= cluster.moved("pulled_bytes_total")[1] < 2 * 16 * 8


def test_a_value_forced_many_times_crosses_once(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            h = model.model.layers[0].mlp.output.clone()
            found = [h.tolist(), h.tolist(), h[0].tolist(), float(h.max())]
            model.model.layers[2].mlp.output = h
            model.model.layers[3].mlp.output = h
            found.append(found[0] == found[1])
            kept = found.save()
        return kept

    both(run)
    assert cluster.moved("pulls_total")[1] == 1


def test_a_branch_on_an_earlier_value_goes_the_same_way_everywhere(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            if model.model.layers[0].mlp.output.sum() > model.model.layers[1].mlp.output.sum():
                model.model.layers[3].mlp.output[:] = 1
                way = [1].save()
            else:
                model.model.layers[3].mlp.output[:] = 2
                way = [2].save()
            logits = model.logits.save()
        return way, logits

    both(run)


def test_a_branch_on_a_later_value_parks_the_earlier_stage_until_it_is_there(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=3):
            kept = list().save()
            if float(model.logits.max()) > 0:
                kept.append(model.samples)
            kept.append(4)
        return kept

    both(run)


def test_a_skipped_layer_of_each_stage_is_skipped(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            x = model.model.layers[1].mlp.input
            model.model.layers[1].mlp.skip(x * 0.5)
            y = model.model.layers[3].mlp.input
            model.model.layers[3].mlp.skip(y * 0.25)
            logits = model.logits.save()
        return logits

    both(run)


def test_a_later_layer_is_skipped_with_an_earlier_value(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            early = model.model.layers[0].mlp.output.clone()
            model.model.layers[2].mlp.skip(early)
            seen = model.model.layers[2].mlp.output.clone().save()
            logits = model.logits.save()
        return seen, logits

    both(run)


def test_operations_inside_a_forward_are_read_and_written_on_every_stage(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            early = model.model.layers[0].mlp.source.self_up_0.output.clone().save()
            act = model.model.layers[3].mlp.source.torch_nn_functional_silu_0
            act.output = act.output * 2
            logits = model.logits.save()
        return early, logits

    both(run)


def test_an_out_of_order_read_is_the_same_error_as_on_one_rank(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            late = model.model.layers[3].mlp.output.save()
            early = model.model.layers[0].mlp.output.save()
        return late, early

    _, text, line = both(run)
    assert "OutOfOrderError: 'model.model.layers.0.mlp.output" in text
    assert line


def test_an_out_of_order_read_within_a_stage_is_the_same_error(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            late = model.model.layers[3].mlp.output.save()
            early = model.model.layers[2].mlp.output.save()
        return late, early

    _, text, _ = both(run)
    assert "OutOfOrderError: 'model.model.layers.2.mlp.output" in text


def test_the_runs_result_is_served_on_every_rank(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=3) as tracer:
            h = model.model.layers[0].mlp.output[0].clone().save()
            result = tracer.result.save()
        return h, result

    h, result = both(run)
    assert len(result.tokens) == 3


def test_a_cache_is_the_union_of_what_the_stages_saw_in_the_models_order(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=2) as tracer:
            cache = tracer.cache(modules=[model.model.layers[i].mlp.up for i in (0, 1, 2, 3)])
        entries = cache._cache.entries
        return {path: [entry.output for entry in found] for path, found in entries.items()}

    found = both(run)
    assert [path.split(".")[3] for path in found] == ["0", "1", "2", "3"]


def test_a_module_of_another_stage_is_called_ad_hoc(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            h = model.model.layers[1].mlp.output
            said = model.lm_head(model.model.norm(h)).argmax(-1).save()
            up = model.model.layers[0].mlp.up(model.model.layers[2].mlp.output).save()
        return said, up

    both(run)


def test_a_parameter_of_another_stage_is_read(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            h = model.model.layers[2].mlp.output
            model.model.layers[2].mlp.output = h + model.model.layers[0].mlp.down.bias
            norm = (
                (model.model.layers[0].norm.weight * model.model.layers[3].norm.weight).sum().save()
            )
            shape = model.model.layers[3].mlp.up.weight.shape
            kept = [tuple(shape), model.model.layers[3].attention.heads].save()
            logits = model.logits.save()
        return norm, kept, logits

    both(run)


def test_containers_merge_leaf_by_leaf(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            kept = {"early": [], "late": [], "both": {}}.save()
            for layer in (0, 1, 2, 3):
                value = model.model.layers[layer].mlp.output[0].clone()
                kept["early" if layer < 2 else "late"].append(value)
                kept["both"][layer] = (value, layer)
        return kept

    both(run)


def test_random_draws_in_a_block_are_the_same_on_every_rank(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            torch.manual_seed(5)
            noise = torch.randn(5, 16, dtype=torch.float64)
            model.model.layers[0].mlp.output = model.model.layers[0].mlp.output + noise
            more = torch.randn(5, 16, dtype=torch.float64)
            model.model.layers[3].mlp.output = model.model.layers[3].mlp.output + more
            logits = model.logits.save()
        return logits

    both(run)


def test_a_block_that_parks_within_a_torch_context_leaves_the_forwards_state(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            with torch.inference_mode(False), torch.enable_grad():
                model.model.layers[0].mlp.output
                inside = [torch.is_grad_enabled()]
                model.model.layers[2].mlp.output
                inside.append(torch.is_grad_enabled())
            kept = inside.save()
            logits = model.logits.save()
        return kept, logits

    both(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_value_of_another_dtype_crosses(both: Any, dtype: torch.dtype) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            early = model.model.layers[0].mlp.output.to(dtype)
            model.model.layers[3].mlp.output[:] = early.to(torch.float64)
            found = early.save()
            logits = model.logits.save()
        return found, logits

    both(run)


def test_two_reads_of_one_visit_are_two_objects_even_when_its_data_is_here(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=2):
            first = model.model.layers[3].mlp.up.output
            first.tolist()
            second = model.model.layers[3].mlp.up.output
            third = model.model.layers[3].mlp.up.output
            assert third is not second
            kept = third.save()
        return kept

    both(run)
