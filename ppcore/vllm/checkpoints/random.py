"""Checkpoints of random weights, of any architecture of `ARCHITECTURES`."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from .recipes import ARCHITECTURES, Recipe
from .store import Progress, assembled, cache_dir, no_progress_bars, silent
from .tokenizer import BYTES, EOS_ID, merge_count, tokenizer

# Rises when the same parameters would build something else: old cache entries are then not found.
_FORMAT = 3
# The parameters a random checkpoint was built from, kept inside it.
_RECIPE = "ppcore-recipe.json"
# The CPU attention kernels of vLLM know no smaller head.
_MIN_HEAD_SIZE = 32
# Standard deviation of the logits. At 4 the two best of some hundred tokens typically lie some
# tenths apart, against a rounding noise of about 1e-5, and sampling still has several to choose.
_LOGIT_STD = 4.0


def random_llama(path: str | os.PathLike[str] | None = None, **parameters: Any) -> Path:
    """`random_model("llama", path, ...)`."""
    return random_model("llama", path, **parameters)


def random_model(
    architecture: str = "llama",
    path: str | os.PathLike[str] | None = None,
    *,
    layers: int = 8,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int | None = None,
    vocab: int = 512,
    positions: int = 1024,
    tied: bool | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """A small float32 checkpoint with seeded random weights and a tokenizer; returns its folder.

    architecture
        A key of `ARCHITECTURES`: "llama", "qwen2", "gpt2" and others.
    path
        The folder to write. By default one in `cache_dir()` named after the parameters. A folder
        that holds a checkpoint of the same parameters is returned as it is.
    layers, hidden, heads, kv_heads, positions
        Sizes. `hidden / heads` is the head size: whole, and at least 32. `kv_heads` defaults to
        `heads`; gpt2, opt, gpt_neox and bloom have no other.
    vocab
        Size of the embedding and of the tokenizer, from 257: the 256 bytes, the end token, and
        merges of frequent letters. Any text is encoded, and every id decodes.
    tied
        Whether the output head is the embedding; by default as usual for the architecture
        (qwen2 and gpt2 tied, llama not).

    The same arguments give the same bytes of weights. The end token (id 0) has a zero row in the
    output head, so greedy decoding never ends before `max_tokens`.

    Raises `ValueError` for sizes that no engine could run, and `FileExistsError` when `path`
    holds something else.
    """
    if architecture not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"unknown architecture {architecture!r}; known: {known}")
    kind = ARCHITECTURES[architecture]
    recipe: Recipe = {
        "format": _FORMAT,
        "architecture": architecture,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "vocab": vocab,
        "positions": positions,
        "tied": kind.tied if tied is None else tied,
        "seed": seed,
    }
    _check_sizes(recipe)
    if path is None:
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
        target = cache_dir() / f"random-{architecture}-{layers}x{hidden}-{digest}"
    else:
        target = Path(path)
    if target.exists():
        if _recipe_of(target) != recipe:
            raise FileExistsError(f"{str(target)!r} exists and was built from other parameters")
        return target

    (progress or silent)(f"building a random {architecture} of {layers} layers in {target}")
    with assembled(target) as folder:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):  # from_config draws from the global generator
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(kind.config(recipe)).float()
        _fill(model, recipe)
        with no_progress_bars():
            model.save_pretrained(folder)
        tokenizer(vocab, positions).save_pretrained(folder)
        (folder / _RECIPE).write_text(json.dumps(recipe, indent=1) + "\n")
    return target


def _check_sizes(recipe: Recipe) -> None:
    hidden, heads, kv_heads = recipe["hidden"], recipe["heads"], recipe["kv_heads"]
    if min(recipe["layers"], heads, kv_heads, recipe["positions"]) < 1:
        raise ValueError("layers, heads, kv_heads and positions are at least 1")
    if hidden % heads or hidden // heads < _MIN_HEAD_SIZE:
        raise ValueError(
            f"hidden={hidden} over heads={heads} gives heads of {hidden / heads:g}; the CPU engine "
            f"needs a whole number, {_MIN_HEAD_SIZE} or more"
        )
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    if not ARCHITECTURES[recipe["architecture"]].own_kv_heads and kv_heads != heads:
        raise ValueError(f"{recipe['architecture']} has as many key-value heads as heads")
    if not BYTES + 1 <= recipe["vocab"] <= BYTES + 1 + merge_count():
        raise ValueError(
            f"vocab={recipe['vocab']} is outside {BYTES + 1} to {BYTES + 1 + merge_count()}"
        )


def _fill(model: Any, recipe: Recipe) -> None:
    """Draw every parameter anew, at scales under which all of them show in the logits.

    The usual initialisation (a deviation of 0.02 everywhere) makes tiny models whose layers add
    next to nothing to the residual stream: an intervention would not change a token, and a
    layer that ran twice or not at all would go unnoticed.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    generator = torch.Generator().manual_seed(recipe["seed"])
    head = model.get_output_embeddings()
    head_std = _LOGIT_STD / math.sqrt(recipe["hidden"])
    # A tied embedding is as small as the head, and what it put into the residual stream speaks for
    # the token that came in: stronger layers keep the model from repeating it for ever.
    embedding_std, gain = (head_std, 2.0) if recipe["tied"] else (1.0, 1.0)

    def draw(parameter: Any, std: float, mean: float = 0.0) -> None:
        parameter.normal_(mean, std, generator=generator)

    with torch.no_grad():
        for module in model.modules():  # registration order: as stable as the architecture
            if module is head:
                if recipe["tied"]:
                    continue  # the embedding, drawn under that name
                draw(module.weight, head_std)
            elif isinstance(module, torch.nn.Embedding):
                token = module is model.get_input_embeddings()
                draw(module.weight, embedding_std if token else embedding_std / 4)
            elif isinstance(module, torch.nn.Linear | Conv1D):
                fan_in = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
                draw(module.weight, gain / math.sqrt(fan_in))
                if getattr(module, "bias", None) is not None:
                    draw(module.bias, 0.1)
            elif "norm" in type(module).__name__.lower():
                draw(module.weight, 0.1, mean=1.0)
                if getattr(module, "bias", None) is not None:
                    draw(module.bias, 0.1)
            else:
                # Experts and short convolutions hold their weights themselves. Vectors (decay rates,
                # time steps) keep what the architecture gives them.
                for parameter in module.parameters(recurse=False):
                    if parameter.ndim > 1:
                        draw(parameter, gain / math.sqrt(parameter.shape[-1]))
        head.weight[EOS_ID].zero_()


def _recipe_of(folder: Path) -> Any:
    try:
        return json.loads((folder / _RECIPE).read_text())
    except (OSError, ValueError):
        return None
