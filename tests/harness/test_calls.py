"""Modules called away from their place, on three real processes, against plain nnsight on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.compare import attempt

STAGES = 3

PROMPT = [3, 17, 42, 8, 25]
#: Layers of the first, the middle and the last stage.
EARLY, MIDDLE, LATE = 1, 2, 3


@pytest.mark.parametrize("layer", [EARLY, MIDDLE])
def test_an_edit_depends_on_what_the_last_stage_would_say(both: Any, layer: int) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=4) as tracer:
            said, edited = list().save(), list().save()
            for step in tracer.iter[:]:
                h = model.model.layers[layer].mlp.output
                token = model.lm_head(model.model.norm(h))[-1].argmax()
                said.append(token)
                if token % 2 == 0 or step == 0:
                    h[:] += 3.0
                    edited.append(step)
            logits = model.logits.save()
        return said, edited, logits

    assert len(both(run)[1]) >= 1


@pytest.mark.parametrize(
    "written, module", [((EARLY,), LATE), ((MIDDLE, LATE), EARLY)], ids=["later", "earlier"]
)
def test_what_a_module_of_another_stage_makes_of_a_value_replaces_it(
    both: Any, written: tuple[int, ...], module: int
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, max_tokens=2) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                for layer in written:
                    h = model.model.layers[layer].mlp.output
                    model.model.layers[layer].mlp.output = model.model.layers[module].mlp(h)
                kept.append(model.logits)
        return kept

    both(run)


def test_a_stage_between_acts_on_what_the_last_made_of_the_first(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            h = model.model.layers[EARLY].mlp.output
            lens = model.lm_head(model.model.norm(h))
            middle = model.model.layers[MIDDLE].mlp.output
            middle[:] += lens[:, :16]
            logits = model.logits.save()
        return logits

    both(run)


def test_a_lens_that_is_only_kept_crosses_once_a_layer(both: Any, cluster: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            kept = list().save()
            for layer in (EARLY, MIDDLE, LATE):
                h = model.model.layers[layer].mlp.output
                kept.append(model.lm_head(model.model.norm(h)))
        return kept

    both(run)
    first, middle, last = cluster.moved("pulled_bytes_total")
    rows = len(PROMPT) * 16 * 8
    # What the first two have is shipped from the last; what is left are the structures.
    assert first < 1000 and middle < 1000
    assert 2 * rows < last < 2 * rows + 1000


def test_what_a_called_module_raises_ends_the_request_at_that_line(
    reference: Any, staged: Any
) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT):
            h = model.model.layers[LATE].mlp.output
            kept = model.model.embed(h[:, 0].long() + 10**6).save()
        return kept

    one, many = (attempt(run, client)[1] for client in (reference, staged))
    assert one[:2] == many[:2] == ("RuntimeError", "IndexError: index out of range in self")


def test_calls_of_several_requests_at_once(both: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(max_tokens=3) as tracer:
            with tracer.invoke(PROMPT):
                h = model.model.layers[EARLY].mlp.output
                if model.lm_head(model.model.norm(h))[-1].argmax() >= 0:
                    h[-1] = 2.0
                first = model.logits.save()
            with tracer.invoke(PROMPT[:2]):
                h = model.model.layers[MIDDLE].mlp.output
                h[:] = model.model.layers[EARLY].mlp(h)
                second = model.logits.save()
        return first, second

    both(run)
