"""A catalogue of traces that every layout of stages has to answer alike.

Each entry is an ordinary function `trace(model, ctx) -> dict`: it runs one or more real nnsight traces on a
`VLLM` model and returns plain results (tensors, numbers, strings, lists, dicts), so that the answers of two
engines can be compared by `ppcore.vllm.compare`. The functions say nothing about stages, and that is the
point: they are what a user writes for one rank. `ppcore demo` runs them on one stage and on several, and so
do the engine tests.

They work on any Llama-like tree (`model.model.layers[i]`, `model.model.norm`, `model.lm_head`) and pick layers
by fraction of the depth, so that a split anywhere in the middle half has a touched layer on both sides.

Two keys of a result are read by name: `text`, a list of lines for a human reader, and `error`, what
`describe_error` made of an exception. Everything is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CATALOGUE", "Context", "Trace", "catalogue", "describe_error", "trace"]

PROMPT = "The Eiffel Tower is located in the city of"
OTHER = "The Colosseum is located in the city of"
QUESTIONS = (
    "The capital of France is",
    "The capital of Japan is the city of",
    "Water freezes at zero degrees",
    "The opposite of hot is",
)


@dataclass(frozen=True)
class Context:
    """What a trace may know of the model it runs on: prompts, depth, tokenizer. Nothing about stages."""

    n_layers: int
    tokenizer: Any = field(repr=False)
    prompt: str = PROMPT
    other: str = OTHER
    #: Two questions that differ in one word; its activation carries the answer.
    pair: tuple[str, str] = ("The capital of France is", "The capital of Japan is")
    questions: tuple[str, ...] = QUESTIONS

    @classmethod
    def of(cls, model: Any) -> Context:
        return cls(n_layers=len(model.model.layers), tokenizer=model.tokenizer)

    def layer(self, fraction: float) -> int:
        """The layer at this fraction of the depth: 0.0 is the first, 1.0 the last."""
        return min(int(self.n_layers * fraction), self.n_layers - 1)

    @property
    def early(self) -> int:
        return self.layer(0.25)

    @property
    def late(self) -> int:
        return self.layer(0.75)

    @property
    def quarters(self) -> tuple[int, ...]:
        return tuple(self.layer(f) for f in (0.0, 0.25, 0.5, 0.75, 1.0))

    def word(self, token: Any) -> str:
        """The text of one token id."""
        return self.tokenizer.decode([int(token)])


@dataclass(frozen=True)
class Trace:
    """One entry of the catalogue."""

    name: str
    about: str
    run: Callable[[Any, Context], dict[str, Any]]
    #: A trace that only saves and writes without needing data: no value may cross between stages.
    moves_nothing: bool = False
    #: Several requests, batched as they arrive: compared with a tolerance, see `ppcore.vllm.compare`.
    batched: bool = False


#: name -> trace, in the order in which they are shown.
CATALOGUE: dict[str, Trace] = {}


def trace(
    about: str, *, moves_nothing: bool = False, batched: bool = False
) -> Callable[[Callable], Callable]:
    """Enter the decorated function into the catalogue under its own name."""

    def enter(run: Callable) -> Callable:
        name = run.__name__
        if name in CATALOGUE:
            raise ValueError(f"two traces are named {name!r}")
        CATALOGUE[name] = Trace(name, about, run, moves_nothing, batched)
        return run

    return enter


def catalogue(names: str | None = None) -> list[Trace]:
    """The traces of a comma-separated list, or all of them.

    Raises:
        KeyError: a name that is not in the catalogue; the message lists what is.
    """
    if not names:
        return list(CATALOGUE.values())
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in CATALOGUE:
            raise KeyError(f"no trace is named {name!r}; there are: {', '.join(CATALOGUE)}")
        chosen.append(CATALOGUE[name])
    return chosen


_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in [^\n]*\n\s+(?P<code>[^\n]+)')


def describe_error(raised: BaseException | None) -> dict[str, str] | None:
    """What two engines have to agree on about an error: its kind, its message, and the user's line.

    nnsight re-raises an engine-side error as `RuntimeError: Kind: message`, followed by a traceback whose
    last frame in the block is the line at fault; paths and frame depths in it are not the user's.
    """
    if raised is None:
        return None
    text = str(raised)
    lines = [frame["code"].strip() for frame in _FRAME.finditer(text) if _is_block(frame["file"])]
    return {
        "raised": type(raised).__name__,
        "message": text.strip().splitlines()[0] if text.strip() else "",
        "line": lines[-1] if lines else "",
    }


def _is_block(file: str) -> bool:
    """Whether a traceback's file is the user's: the catalogue's own, a test's, or a block's pseudo-file."""
    return not any(part in file for part in ("/site-packages/", "/lib/python", "/ppcore/runtime/"))


# Importing a module enters its traces; the order here is the order of the table.
from ppcore.vllm.traces import reads, writes, interpret, loops, invokes, failures  # noqa: E402, F401, I001
