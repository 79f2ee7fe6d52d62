"""`ppcore plan`: where a model gets partitioned, before anything is started.

A model's `config.json` says enough: vLLM gives each pipeline stage a run of layers by a fixed rule
(`ppcore.vllm.plan.split`), the embedding belongs to the first stage, the final norm and the head to
the last, and tensor parallelism divides each stage's matrices among its columns
(`ppcore.vllm.plan.weights`). Whether vLLM can split an architecture at all is a property of its class
there (`ppcore.vllm.plan.architectures`). Nothing here imports torch or vLLM, or reads weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ...errors import SetupError
from .config import read
from .layout import DTYPES, Plan, make
from .picture import svg
from .split import PARTITION, layer_counts
from .text import data, text

__all__ = ["Plan", "add_arguments", "layer_counts", "make", "read", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a checkpoint's folder, its config.json, or a name in the local cache of the hub",
    )
    parser.add_argument(
        "--pipeline-parallel-size", "-pp", type=_positive, default=1, metavar="P", help="stages"
    )
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=_positive, default=1, metavar="T", help="columns"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="what weights are held in (default: as vLLM's 'auto')"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--svg", metavar="FILE", help="draw the plan into this file")
    parser.epilog = (
        f"{PARTITION} in the environment counts, as it does for vLLM. Exit status: 0, or 1 where vLLM "
        "would refuse the layout, or 2 where no layout can be made."
    )


def run(args: argparse.Namespace) -> int:
    try:
        plan = make(
            read(args.model),
            model=args.model,
            stages=args.pipeline_parallel_size,
            columns=args.tensor_parallel_size,
            dtype=args.dtype,
            partition=os.environ.get(PARTITION),
        )
        if args.svg:
            _write(Path(args.svg), svg(plan))
    except SetupError as error:
        print(f"ppcore plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(data(plan), indent=1) if args.json else text(plan))
    return 1 if plan.problems else 0


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a positive number")
    return int(word)


def _write(path: Path, source: str) -> None:
    try:
        path.write_text(source, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{str(path)!r} cannot be written: {error.strerror}") from None
