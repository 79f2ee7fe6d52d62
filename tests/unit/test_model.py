"""What `VLLM` says before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppcore.errors import SetupError

pytest.importorskip("vllm")
pytest.importorskip("nnsight")


def test_a_path_that_leads_to_no_checkpoint_is_refused_with_what_to_name(tmp_path: Path) -> None:
    from ppcore.vllm import VLLM

    with pytest.raises(SetupError, match="no such file or folder; name the folder of a checkpoint"):
        VLLM(str(tmp_path / "misspelt"), pipeline_parallel_size=2, dispatch=True)
    with pytest.raises(SetupError, match=r"a folder without config\.json"):
        VLLM(str(tmp_path), dispatch=True)


def test_a_checkpoint_may_be_named_by_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppcore.vllm import VLLM, model

    got: list[Any] = []
    monkeypatch.setattr(
        model.NNsightVLLM, "__init__", lambda self, *args, **kwargs: got.extend(args)
    )
    monkeypatch.setattr(VLLM, "_require_v1_model_runner", lambda self: None)
    (tmp_path / "config.json").write_text("{}")
    VLLM(tmp_path)
    assert got == [str(tmp_path)]
    with pytest.raises(SetupError, match="no such file or folder"):
        VLLM(tmp_path / "nowhere")
