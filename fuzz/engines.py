"""Real vLLM engines as executors: one warm engine a layout, compared with the engine of one stage.

The model is a small random Llama in float32. Values are equal to the bit where both engines ran the same
batches, which they do here: the requests of a case are scheduled together, so every step has every request
that is not over. The reference is the engine of one stage and as many columns: nnsight's own runner, and sums
over columns are added up in another order than on one.

Layouts are spelled ``pp2``, ``tp2pp2``. A program that gives no answer within `DEADLINE_S`, and an engine that
does not outlive one, are differences; the engine is started again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ppcore.vllm.child import EngineError, EngineProcess
from ppsim.cases import Case
from ppsim.programs import (
    Blend,
    Block,
    Cache,
    Call,
    Derive,
    Edit,
    If,
    Mix,
    Read,
    Skip,
    Statement,
    Write,
    walk,
)
from ppsim.real import translate
from ppsim.real.outcome import Outcome, difference, outcome_of

from . import llama

#: What starting an engine, and one program on it, may take. Both are far above what is seen.
START_S, DEADLINE_S = 240.0, 60.0


def jobs(case: Case, prefix: str) -> list[llama.Job]:
    """The requests of a case, as an engine's client sends them."""
    layers, labels = case.stages * case.layers, [label for label, _ in case.containers]
    found = []
    for request in case.requests:
        target = llama.LlamaTarget(layers, translate.one_row(case, request))
        blocks = {
            name: translate.block(body, target, [] if name else labels)
            for name, body in request.blocks
        }
        prompt = translate.prompt(case, request)
        found.append(
            llama.Job(
                f"{prefix}{request.name}", prompt, request.tokens, request.ignore_eos,
                blocks, dict(case.containers),
            )
        )  # fmt: skip
    return found


class Engine:
    """One layout.

    Args:
        layout: how it is spelled.
        reference: the engine that it is compared with; None for one that is compared with.

    Raises:
        ValueError: the text spells no layout.
    """

    def __init__(self, layout: str, reference: Engine | None = None) -> None:
        self.layout, self.reference = layout, reference
        self.columns, self.stages = numbers(layout)
        self.last: dict[str, Outcome] = {}
        self._process: EngineProcess | None = None
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        """Start the engine; returns at once."""
        from ppcore.vllm.checkpoints import random_llama

        checkpoint = random_llama(layers=llama.LAYERS, hidden=llama.HIDDEN, vocab=llama.VOCABULARY)
        self._process = EngineProcess(
            checkpoint,
            warm=True,
            env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},  # `llama.prepare` sends a function
            pipeline_parallel_size=self.stages,
            tensor_parallel_size=self.columns,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 25,
        )
        self._stack.callback(self._process.stop)
        self._process.start()
        self._ready = False

    def wait_ready(self) -> None:
        """Wait until it takes programs.

        Raises:
            EngineError: it did not come up.
        """
        assert self._process is not None
        if not self._ready:
            self._process.wait_ready(START_S)
            self._process.call(llama.prepare)
            self._process.warnings()
            self._ready = True

    def fits(self, case: Case) -> bool:
        """Whether it can run this case."""
        return fits(case, self.columns)

    def differs(self, case: Case, expected: Any, seed: int) -> str | None:
        """Run a case; where it is not what the reference, which ran it before, gave."""
        try:
            self.last = self.outcomes(jobs(case, f"{seed}."))
        except EngineError as error:
            self._stack.close()
            self.start()
            return str(error)
        if self.reference is not None:
            for name, outcome in self.reference.last.items():
                wrong = difference(self.last[name], outcome)
                if wrong is not None:
                    return f"{name} {wrong}"
        return None

    def outcomes(self, requests: list[llama.Job]) -> dict[str, Outcome]:
        """What comes home of requests that arrive together, by name.

        Raises:
            EngineError: the engine did not outlive them, or holds something of them afterwards.
        """
        self.wait_ready()
        process = self._process
        assert process is not None
        answers, left = process.call(llama.serve, requests, timeout_s=DEADLINE_S)
        if left:
            raise EngineError(f"left on the engine {self.layout}: {left}")
        warned = tuple(process.warnings())
        return {
            name: outcome_of(entry, tokens, [warned]) for name, (entry, tokens) in answers.items()
        }

    def close(self) -> None:
        """Stop the engine."""
        self._stack.close()


def fits(case: Case, columns: int = 1) -> bool:
    """Whether a case means something on an engine.

    A Llama has no module that every stage visits once. And an engine of one stage dies of two things: of a
    cache of the inputs of all modules, since the logits processor is called with a module, which cannot be
    pickled; and of an edit in place after the result, which its collect makes outside of inference mode.
    With several columns a call's result comes with the next turn where it is computed on a later stage:
    what acts on one there is refused, or a turn late (see `docs/simulator.md`).
    """
    bodies = [body for request in case.requests for _, body in request.blocks]
    dies = any(_keeps_all_inputs(body) or _edits_after_the_result(body) for body in bodies)
    late = columns > 1 and any(_acts_on_a_call(body) for body in bodies)
    return not case.shared and not dies and not late


def _keeps_all_inputs(body: Block) -> bool:
    return any(isinstance(s, Cache) and s.inputs and not s.paths for s in walk(body))


def _edits_after_the_result(body: Block) -> bool:
    rest = walk(body)
    found = any(isinstance(s, Read) and s.location == "result" for s in rest)
    return found and any(isinstance(s, Edit | Blend) for s in rest)


def _acts_on_a_call(body: Block) -> bool:
    """Whether a block does more with the result of a call than derive from it and keep it."""
    results: set[str] = set()
    while True:
        found = {
            statement.name
            for statement in walk(body)
            if isinstance(statement, Call)
            or (isinstance(statement, Derive | Mix) and _sources(statement) & results)
        }
        if found <= results:
            break
        results |= found
    return any(_acted_on(s) & results for s in walk(body))


def _sources(statement: Statement) -> set[str]:
    """What a value is derived from."""
    match statement:
        case Derive(_, source, _):
            return {source}
        case Mix(_, first, second):
            return {first, second}
    return set()


def _acted_on(statement: Statement) -> set[str]:
    """What a statement takes to the model, or needs to go on."""
    match statement:
        case Write(_, name) | Skip(_, name) | Edit(name, _) | If(name, _) | Call(_, _, name):
            return {name}
        case Blend(name, other):
            return {name, other}
    return set()


def numbers(layout: str) -> tuple[int, int]:
    """Columns and stages of a layout.

    Raises:
        ValueError: the text spells none.
    """
    found = re.fullmatch(r"(?:tp([1-9]))?pp([1-9])", layout)
    if found is None:
        raise ValueError(f"{layout!r} is no layout: they are spelled pp2, tp2pp2")
    return int(found[1] or 1), int(found[2])


def started(layouts: Sequence[str], stack: ExitStack) -> dict[str, Engine]:
    """Engines of these layouts, each after the one of one stage that it is compared with.

    Args:
        stack: what they are closed with.
    """
    engines: dict[str, Engine] = {}

    def start(layout: str, reference: Engine | None) -> Engine:
        engine = engines[layout] = Engine(layout, reference)
        stack.callback(engine.close)
        engine.wait_ready()  # one after the other: they would take the cores from each other
        return engine

    for layout in layouts:
        columns, _ = numbers(layout)
        single = "pp1" if columns == 1 else f"tp{columns}pp1"
        reference = engines.get(single) or start(single, None)
        if layout not in engines:
            start(layout, reference)
    return engines
