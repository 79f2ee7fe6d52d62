"""How programs are spelled for a real engine's Llama; `tests/layouts/test_programs.py` runs them there."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from fuzz import engines, executors, llama
from ppcore.vllm.child import EngineError
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


@pytest.mark.parametrize(
    "edit, fits", [("edit a 2", False), ("blend a a", False), ("save x a", True)]
)
def test_an_edit_after_the_result_is_left_out(edit: str, fits: bool) -> None:
    text = (
        "stages 2 columns 1 layers 1 shared 0\nrequest A tokens 1\n  a = read L0.in\n  edit a 3\n"
    )
    text += f"  r = read result\n  if a\n    {edit}\n"
    assert engines.fits(cases.parse(text)) is fits


@pytest.mark.parametrize(
    "lines, fits",
    [
        ("c = mix b a\n  save y c", True),
        ("c = derive b 1\n  append y c", True),
        ("write L1.out b", False),
        ("c = derive b 1\n  d = mix a c\n  if d\n    save y a", False),
        ("blend a b", False),
        ("c = call N b", False),
        ("edit a 2\n  save y b", True),
    ],
)
def test_with_columns_a_calls_result_is_only_kept(lines: str, fits: bool) -> None:
    text = "stages 2 columns 1 layers 1 shared 0\nrequest A tokens 1\n  a = read L0.in\n"
    case = cases.parse(f"{text}  b = call N a\n  {lines}\n")
    assert engines.fits(case, 2) is fits
    assert engines.fits(case)


class Pretended:
    """An engine's process that answers at once: with the number of stages, if it is odd."""

    odd, dies = False, False
    started = 0

    def __init__(self, checkpoint: Any, **settings: Any) -> None:
        self.stages = settings["pipeline_parallel_size"]

    def start(self) -> None:
        type(self).started += 1

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is llama.prepare:
            return None
        if self.dies and self.stages > 1:
            raise EngineError("the engine gave no answer")
        saved = {"saves": {"y": self.stages if self.odd else 1}, "error": None}
        return {job.name: (saved, [5]) for job in args[0]}, {}

    def warnings(self) -> list[str]:
        return []

    def stop(self) -> list[int]:
        return []


@pytest.mark.parametrize("odd, dies", [(False, False), (True, False), (False, True)])
def test_an_engine_that_differs_or_dies_is_named_and_started_again(
    monkeypatch: pytest.MonkeyPatch, odd: bool, dies: bool
) -> None:
    monkeypatch.setattr(engines, "EngineProcess", Pretended)
    monkeypatch.setattr(Pretended, "odd", odd)
    monkeypatch.setattr(Pretended, "dies", dies)
    monkeypatch.setattr(Pretended, "started", 0)
    with executors.started(["vllm"], ["pp2"]) as comparison:
        found = comparison.run(7, cases.parse(PROGRAM))
    assert list(comparison.executors) == ["vllm-pp1", "vllm-pp2"]
    assert comparison.tallies["vllm-pp2"].programs == 1
    assert comparison.tallies["vllm-pp2"].failures == (odd or dies)
    assert Pretended.started == (3 if dies else 2)
    if found is not None:
        assert (found.executor, found.seed) == ("vllm-pp2", 7)
        words = "gave no answer" if dies else "7.A y is 2, on one rank 1"
        assert words in found.text
    else:
        assert not odd and not dies
