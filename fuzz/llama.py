"""Programs on a real Llama in a real vLLM engine: how they are spelled, and what the engine runs.

A program's layers, however many, are spread over the `LAYERS` of the engine's model, so that every program
runs on every layout; which stage has a layer is the engine's to say. Every second one stands for a whole
decoder layer, which takes and returns hidden states and a residual, the others for the layer's MLP.

vLLM's layers overwrite what the layer before them returned: a value that is kept without a copy is another
one a few operations later, on one rank as on several, but not where a stage ends in between.
`make_comparable` has each layer work on copies, so that what a program reads is its own; nothing else of the
model differs. It also has nnsight forget what is saved when the value is gone (`ppcore.runtime.saved`): on one
stage a name may else come home that was given the id of a saved value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppcore.vllm.traces.perform import at_rest, status
from ppsim.real.exact import PRIME
from ppsim.real.translate import write_samples

#: Of the engine's model. Every number below `PRIME` is a token.
LAYERS, HIDDEN, VOCABULARY = 8, 64, 1024


class LlamaTarget:
    """The engine's Llama.

    Args:
        layers: how many the program speaks of.
        one_row: whether the request has one row in every step, as in `ppsim.real.translate.ExactTarget`.
    """

    def __init__(self, layers: int, one_row: bool) -> None:
        self.layers, self.one_row = layers, one_row

    def read(self, location: str) -> str:
        path, _, side = location.rpartition(".")
        match side or location:
            case "result":
                return "torch.tensor([[float(sum(tracer.result.outputs[0].token_ids))]])"
            case "logits" | "samples":
                return f"model.{location}"
            case "ghost":  # the engine never runs it: the logits processor takes its weight
                return "model.lm_head.output"
            case "in" if self._whole(path):
                return f"{self.module(path)}.inputs[0][1]"
            case "in":
                return f"{self.module(path)}.input"
            case "out" if self._whole(path):
                return f"{self.module(path)}.output[0]"
        return f"{self.module(path)}.output"

    def write(self, location: str, value: str) -> str:
        if location == "samples":
            return write_samples(value)
        if location == "logits":
            return f"model.logits = {_fit(value, VOCABULARY)}"
        path, _, side = location.rpartition(".")
        module, rows = self.module(path), self._rows(value, self.read(location))
        if not self._whole(path):
            return f"{self.read(location)} = {rows}"
        if side == "out":
            return f"{module}.output = ({rows}, {module}.output[1])"
        given, named = f"{module}.inputs[0]", f"{module}.inputs[1]"
        return f"{module}.inputs = (({given}[0], {rows}, {given}[2]), {named})"

    def skip(self, path: str, value: str) -> str:
        rows = self._rows(value, self.read(f"{path}.in"))
        return f"{self.module(path)}.skip({f'({rows}, {rows} + 1)' if self._whole(path) else rows})"

    def call(self, path: str, value: str) -> str:
        if path == "E":
            return f"{self.module(path)}(({value}.float().sum(-1) % {PRIME}).long())"
        return f"{self.module(path)}({_fit(value, HIDDEN)})"

    def weight(self, path: str) -> str:
        if path == "E":  # its own is split between columns
            return "model.model.layers[0].post_attention_layernorm.weight[None]"
        if path == "N":
            return f"{self.module(path)}.weight[None]"
        return f"model.model.layers[{self._number(path)}].input_layernorm.weight[None]"

    def module(self, path: str) -> str:
        if path in ("N", "E"):
            return {"N": "model.model.norm", "E": "model.model.embed_tokens"}[path]
        layer = f"model.model.layers[{self._number(path)}]"
        return layer if self._whole(path) else f"{layer}.mlp"

    def _number(self, path: str) -> int:
        """The model's layer for one of the program's, in the middle of its share."""
        return (2 * int(path[1:]) + 1) * LAYERS // (2 * self.layers)

    def _whole(self, path: str) -> bool:
        return self._number(path) % 2 == 0

    def _rows(self, value: str, instead_of: str) -> str:
        fitting = _fit(value, HIDDEN)
        if self.one_row:
            return f"({fitting} + torch.zeros(1, {HIDDEN}))"
        return f"({instead_of} * 0 + {fitting})"


def _fit(value: str, width: int) -> str:
    """A value of any width, repeated or cut to this one."""
    return f"{value}.float().repeat(1, {width})[:, :{width}].contiguous()"


def make_comparable(worker: Any) -> None:
    """Let a worker's layers, and the norm after them, take copies; see the module docstring."""
    from vllm.model_executor.models.utils import PPMissingLayer

    from ppcore.runtime.saved import watch_saves

    decoder = worker.model_runner.get_model().model
    watch_saves()
    for module in (*decoder.layers, decoder.norm):
        if not isinstance(module, PPMissingLayer):
            module.register_forward_pre_hook(_copies)


def _copies(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value if value is None else value.clone() for value in args)


@dataclass(frozen=True)
class Job:
    """A request: its prompt and settings, and the text of its blocks by name, as a case has them.

    Attributes:
        containers: name -> slots of a list that is bound and saved above the traced block.
    """

    name: str
    prompt: list[int]
    tokens: int
    ignore_eos: bool
    blocks: dict[str, str]
    containers: dict[str, int]


#: Of one request: what nnsight attaches to its output, its tokens.
Answer = tuple[dict[str, Any], list[int]]


def prepare(model: Any) -> None:
    """Make a dispatched model's engine fit for programs; runs in the engine's client."""
    model.vllm_entrypoint.collective_rpc(make_comparable)


def serve(model: Any, jobs: list[Job]) -> tuple[dict[str, Answer], dict[str, Any]]:
    """Run requests that arrive together; runs in the engine's client.

    Returns:
        The answers by name, and what the ranks still hold afterwards.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from ppsim.real.execute import payload

    engine, params, installed = model.vllm_entrypoint, [], []
    for job in jobs:
        named = {name: f"{job.name}.{name}" for name in job.blocks if name}
        for name, full in named.items():
            block = payload(job.blocks[name], model, {})
            engine.collective_rpc("nnsight_register", args=(full, block, full))
            installed.append(full)
        extra: dict[str, Any] = {"nnsight_edits": list(named.values())}
        if "" in job.blocks:
            extra["nnsight_mediator"] = payload(job.blocks[""], model, job.containers)
        params.append(
            SamplingParams(
                temperature=0.0, max_tokens=job.tokens, ignore_eos=job.ignore_eos, extra_args=extra
            )
        )
    together = len(jobs) > 1  # or the first would be a step ahead of the others
    if together:
        engine.sleep(level=0, mode="keep")
    prompts = [TokensPrompt(prompt_token_ids=job.prompt) for job in jobs]
    engine.enqueue(prompts, params, use_tqdm=False)
    if together:
        engine.wake_up(tags=["scheduling"])
    outputs = engine.wait_for_completion(use_tqdm=False)
    for full in installed:
        engine.collective_rpc("nnsight_clear_registered", args=(full,))
    answers = {job.name: _answer(output) for job, output in zip(jobs, outputs, strict=True)}
    return answers, at_rest(status(model))


def _answer(output: Any) -> Answer:
    mine = getattr(output, "nnsight_saves", {})
    every = getattr(output, "saves", {})
    entry = {
        "saves": mine,
        "registered": {name: every[name] for name in every if name not in mine},
        "error": getattr(output, "nnsight_error", None),
    }
    return entry, list(output.outputs[0].token_ids)
