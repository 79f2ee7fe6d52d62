"""The checkpoint builders: reproducible, complete or absent, and decisive in their tokens."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ppcore.vllm import checkpoints  # noqa: E402
from ppcore.vllm.checkpoints import random, smollm, store, tokenizer  # noqa: E402

SMALL = dict(layers=4, hidden=64, heads=2, vocab=384)
TEXT = "The Eiffel Tower is located in the city of"


#: Three kinds of weights and names; the others differ from them in their configs.
FEW = ("llama", "qwen2", "gpt2")
#: Of mixtures of experts torch has no double precision to compare with.
EXPERTS = {"mixtral", "qwen2_moe", "olmoe", "deepseek_v2", "qwen3_next"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: checkpoints.random_model(name, root / name, **SMALL)
        for name in checkpoints.ARCHITECTURES
    }


def weights_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("architecture", sorted(checkpoints.ARCHITECTURES.keys() - EXPERTS))
def test_greedy_tokens_lead_by_far_more_than_rounding(
    built: dict[str, Path], architecture: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(built[architecture])
    words = transformers.AutoTokenizer.from_pretrained(built[architecture])
    prompt = words(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        text = model.generate(prompt, max_new_tokens=16, do_sample=False)
        logits = model(text).logits
        error = (model.double()(text).logits - logits).abs().max()
    best = logits.topk(2).values
    assert text.shape[1] == prompt.shape[1] + 16, "the end token came first"
    assert (best[..., 0] - best[..., 1]).min() > 20 * error


@pytest.mark.parametrize("architecture", FEW)
def test_every_layer_decides_tokens(built: dict[str, Path], architecture: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(built[architecture])
    words = transformers.AutoTokenizer.from_pretrained(built[architecture])
    prompt = words(TEXT, return_tensors="pt").input_ids
    body = model.transformer.h if architecture == "gpt2" else model.model.layers
    with torch.no_grad():
        whole = model(prompt).logits.argmax(-1)
        for layer in body:
            with_skip = layer.mlp.register_forward_hook(lambda _, __, out: torch.zeros_like(out))
            assert (model(prompt).logits.argmax(-1) != whole).any()
            with_skip.remove()


@pytest.mark.parametrize("architecture", FEW)
def test_the_tokenizer_encodes_any_text_and_decodes_any_id(
    built: dict[str, Path], architecture: str
) -> None:
    words = transformers.AutoTokenizer.from_pretrained(built[architecture])
    assert len(words) == SMALL["vocab"]
    for text in (TEXT, "naïve 東京 \n\t{}", ""):
        assert words.decode(words(text).input_ids) == text
    assert all(isinstance(words.decode([n]), str) for n in range(SMALL["vocab"]))
    assert len(words(TEXT).input_ids) < len(TEXT)


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", False), ("qwen2", True), ("gpt2", True)]
)
def test_embeddings_are_tied_as_usual(
    built: dict[str, Path], architecture: str, tied: bool
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(built[architecture])
    same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert same is tied
    assert json.loads((built[architecture] / "config.json").read_text())["tie_word_embeddings"] is (
        tied
    )


def test_the_same_parameters_give_the_same_weights_and_leave_the_generator_alone(
    built: dict[str, Path], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = checkpoints.random_llama(tmp_path / "again", **SMALL)
    other = checkpoints.random_llama(tmp_path / "other", **SMALL, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert weights_digest(again) == weights_digest(built["llama"])
    assert weights_digest(other) != weights_digest(built["llama"])


def test_the_cache_is_keyed_by_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPCORE_CACHE", str(tmp_path))
    said: list[str] = []
    first = checkpoints.random_llama(**SMALL, progress=said.append)
    second = checkpoints.random_llama(**SMALL, progress=said.append)
    third = checkpoints.random_llama(**SMALL, seed=1, progress=said.append)
    assert first == second != third
    assert len(said) == 2
    assert {first.parent, third.parent} == {tmp_path}


def test_a_folder_of_something_else_is_left_alone(built: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="other parameters"):
        checkpoints.random_llama(built["llama"], **SMALL, seed=1)
    with pytest.raises(FileExistsError):
        checkpoints.random_llama(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(random, "tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.random_llama(tmp_path / "model", **SMALL)
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.random_llama(tmp_path / "model", **SMALL).is_dir()


def test_of_two_builders_at_once_the_first_wins(tmp_path: Path) -> None:
    target = tmp_path / "model"
    both_inside = threading.Barrier(2, timeout=10)

    def build(name: str) -> None:
        with store.assembled(target) as folder:
            (folder / "by").write_text(name)
            both_inside.wait()

    threads = [threading.Thread(target=build, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert list(tmp_path.iterdir()) == [target]
    assert (target / "by").read_text() in {"a", "b"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(hidden=64, heads=4), "heads of 16"),
        (dict(hidden=100, heads=3), "heads of 33.3"),
        (dict(hidden=128, heads=3, kv_heads=2), "heads of 42.6"),
        (dict(hidden=96, heads=3, kv_heads=2), "not a multiple of kv_heads=2"),
        (dict(vocab=256), "outside 257 to"),
        (dict(layers=0), "at least 1"),
        (dict(architecture="gpt2", kv_heads=1), "as many"),
        (dict(architecture="t5"), "unknown architecture 't5'; known: 'llama'"),
    ],
)
def test_sizes_that_no_engine_runs_are_refused(
    tmp_path: Path, wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoints.random_model(path=tmp_path / "model", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_the_largest_vocabulary_has_no_doubles() -> None:
    merges = ["".join(pair) for pair in tokenizer.merges()]
    assert len(merges) == len(set(merges)) == tokenizer.merge_count()


def test_smollm2_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = smollm.importlib.util.find_spec
    monkeypatch.setattr(
        smollm.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "gguf" else real(name, *rest),
    )
    with pytest.raises(checkpoints.CheckpointError, match="package 'gguf'"):
        checkpoints.smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_reports_a_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An interpreter that is not there to be found, rather than a network that may be.
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho no such thing >&2\nexit 7\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda *_: object())
    with pytest.raises(checkpoints.CheckpointError, match="status 7:\nno such thing"):
        checkpoints.smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_finished_checkpoint_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert checkpoints.smollm2(tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
