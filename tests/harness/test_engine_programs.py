"""How programs are spelled for a real engine's Llama; `tests/engine/test_programs.py` runs them there."""

from __future__ import annotations

import ast

import pytest

from fuzz import engines, llama
from ppsim import cases, generate

PROGRAM = """\
stages 2 columns 1 layers 2 shared 0 batching 0
request A tokens 1
  a = read L0.in
  write L1.out a
  b = call N a
  c = call E a
  p = param E.w
  skip L2 b
  if b
    write logits c
  save y b
"""


def test_layouts_are_spelled_as_columns_and_stages() -> None:
    assert [engines.numbers(text) for text in ("pp2", "tp2pp3")] == [(1, 2), (2, 3)]
    with pytest.raises(ValueError, match="'pp' is no layout"):
        engines.numbers("pp")


@pytest.mark.parametrize("count", range(1, llama.LAYERS + 1))
def test_a_programs_layers_are_layers_of_the_model_in_order(count: int) -> None:
    target = llama.LlamaTarget(count, one_row=True)
    numbers = [target._number(f"L{layer}") for layer in range(count)]
    assert numbers == sorted(set(numbers)) and set(numbers) <= set(range(llama.LAYERS))


def test_every_generated_program_is_python() -> None:
    made = [case for case in map(generate.case, range(200)) if engines.fits(case)]
    assert len(made) > 100
    for case in made:
        for job in engines.jobs(case, ""):
            for text in job.blocks.values():
                ast.parse(text)


def test_a_program_speaks_of_the_llamas_modules() -> None:
    (job,) = engines.jobs(cases.parse(PROGRAM), "7.")
    assert job.name == "7.A"
    text = job.blocks[""]
    for words in (
        "a = model.model.layers[1].mlp.input\n",
        "model.model.layers[3].mlp.output = (a[-1:]",
        "b = model.model.norm(a.float()",
        "c = model.model.embed_tokens((a.float().sum(-1) % 997).long())",
        "model.model.layers[5].mlp.skip(",
        "model.logits = c[-1:].float().repeat(1, 1024)[:, :1024].contiguous()",
    ):
        assert words in text, text


def test_what_one_stage_dies_of_and_what_a_llama_has_not_do_not_fit() -> None:
    whole = cases.parse("stages 2 columns 1 layers 1 shared 0\nrequest A tokens 1\n  cache k in\n")
    some = cases.parse(
        "stages 2 columns 1 layers 1 shared 0\nrequest A tokens 1\n  cache k in L0\n"
    )
    shared = cases.parse("stages 2 columns 1 layers 1 shared 1\nrequest A tokens 1\n  cache k\n")
    assert [engines.fits(case) for case in (whole, some, shared)] == [False, True, False]
