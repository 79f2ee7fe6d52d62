"""A model's `config.json`, found by a path or in a local cache of the hub, and read by field.

Architectures name the same thing differently (`num_hidden_layers`, `n_layer`), and a model that
takes images keeps its language model's fields under `text_config`. A `Config` hides both.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import SetupError

#: A field's name here -> its names in the wild, the first that is there counts.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("num_experts", "num_local_experts"),
    "positions": ("max_position_embeddings", "n_positions"),
}

#: Where a model with several parts keeps its language model.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Config:
    """The fields of a language model, and where they came from."""

    path: Path
    architecture: str
    #: The field under which the language model was found; None where it is the whole model.
    part: str | None
    fields: dict[str, Any]
    #: Fields of the whole model.
    whole: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the language model; `default` where it is absent or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """One of `NAMES`, a positive number.

        Raises:
            SetupError: it is absent and has no default, or is no positive number.
        """
        for key in NAMES[name]:
            value = self.fields.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SetupError(f"{str(self.path)!r}: {key} is {value!r}, not a positive number")
            return value
        if default is not None:
            return default
        raise SetupError(f"{str(self.path)!r} has no {' or '.join(map(repr, NAMES[name]))}")


def read(model: str) -> Config:
    """The configuration of a folder, a file, or a name in the local cache of the hub.

    Raises:
        SetupError: there is none, or it is not a model's configuration.
    """
    path = find(model)
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SetupError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(whole, dict) or not any(
        key in whole for key in ("architectures", "model_type", *NAMES["layers"])
    ):
        raise SetupError(
            f"{str(path)!r} is not a model's configuration: it names no architecture and no layers"
        )
    part = next((key for key in TEXT_CONFIGS if isinstance(whole.get(key), dict)), None)
    names = whole.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "unknown"
    return Config(path, str(architecture), part, whole[part] if part else whole, whole)


def find(model: str) -> Path:
    """The path of a model's `config.json`.

    Raises:
        SetupError: there is none; the text says how to get one.
    """
    found = local(model) or _cached(model)
    if found is None:
        raise SetupError(
            f"{model!r} is no file or folder here, and the local cache of the hub ({hub_cache()}) "
            f"does not hold it; `hf download {model} config.json` brings the few kilobytes that are "
            "needed"
        )
    return found


def local(model: str) -> Path | None:
    """The file that a path to a model leads to; None for what may be a name of the hub, or a URL.

    Raises:
        SetupError: it is a path, and leads to no checkpoint.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        config = path / "config.json"
        if config.is_file():
            return config
        raise SetupError(f"{model!r} is a folder without config.json: name a checkpoint's folder")
    looks_like_a_path = model.startswith((".", "/", "~")) or model.endswith(".json")
    if "://" not in model and (looks_like_a_path or model.count("/") > 1):
        raise SetupError(
            f"{model!r}: no such file or folder; name the folder of a checkpoint, with its "
            "config.json, or a model of the hub"
        )
    return None


def hub_cache() -> Path:
    """Where `huggingface_hub` keeps what it downloads."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"


def _cached(name: str) -> Path | None:
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    if main.is_file():
        config = repository / "snapshots" / main.read_text().strip() / "config.json"
        if config.is_file():
            return config
    # Downloaded by another branch's name or a commit: the latest of them.
    found = sorted(
        repository.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime
    )
    return found[-1] if found else None
