"""`ppcore plan`: the rule, the reading of configurations, the counts, and what is said about them.

`test_plan_weights.py` compares the counts with Transformers, `test_plan_vllm.py` the rest with vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from ppcore import cli
from ppcore.errors import SetupError
from ppcore.vllm.plan import layer_counts, make, read
from ppcore.vllm.plan.config import Config
from ppcore.vllm.plan.layout import Plan
from ppcore.vllm.plan.picture import svg
from ppcore.vllm.plan.text import number, size, text

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

# By hand: q and o 64x64, k and v 32x64, three MLP matrices 64x128, two norms of 64.
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64
# By hand: 500 rows become 512, the next multiple of 64.
TABLE = 512 * 64


@pytest.fixture(autouse=True)
def no_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "model")


def written(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def config(**changes: Any) -> Config:
    fields = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    return Config(Path("config.json"), fields["architectures"][0], None, fields, fields)


def planned(stages: int = 1, columns: int = 1, **changes: Any) -> Plan:
    return make(config(**changes), model="m", stages=stages, columns=columns)


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["plan", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


# --- the rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 2, [4, 4]),
        (5, 2, [3, 2]),
        (7, 3, [2, 3, 2]),
        (8, 3, [3, 3, 2]),
        (3, 3, [1, 1, 1]),
        (30, 4, [7, 8, 8, 7]),
    ],
)
def test_layers_that_remain_go_to_the_middle_first(
    layers: int, stages: int, expected: list[int]
) -> None:
    assert layer_counts(layers, stages) == expected


def test_a_partition_replaces_the_rule() -> None:
    assert layer_counts(8, 3, "1,6,1") == [1, 6, 1]


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("3,five", "not a list of whole numbers"),
        ("", "not a list of whole numbers"),
        ("8", "names 1 stages, and there are 2"),
        ("3,4", "adds up to 7 layers, and the model has 8"),
        ("0,8", "leaves a stage without a layer"),
        ("-1,9", "leaves a stage without a layer"),
    ],
)
def test_a_bad_partition_is_refused(partition: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        layer_counts(8, 2, partition)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(SetupError, match="is more than the model's 3 layers; use at most 3"):
        layer_counts(3, 4)


# --- counts -----------------------------------------------------------------------------------


def test_each_stage_holds_its_layers_and_the_ends_hold_the_rest() -> None:
    plan = planned(stages=2)
    first, last = plan.stages
    assert (first.first_layer, first.end_layer) == (0, 3)
    assert (last.first_layer, last.end_layer) == (3, 5)
    assert first.holds == ("embedding", "layers")
    assert last.holds == ("layers", "norm", "head")
    assert first.parameters == {"embedding": TABLE, "layers": 3 * LAYER}
    assert last.parameters == {"norm": 64, "head": TABLE, "layers": 2 * LAYER}
    assert first.bytes == 2 * (TABLE + 3 * LAYER)
    assert plan.largest is first


def test_the_parameters_of_a_model_are_those_of_its_checkpoint() -> None:
    assert planned(stages=3).parameters == 2 * 500 * 64 + 5 * LAYER + 64
    assert planned(stages=3, tie_word_embeddings=True).parameters == 500 * 64 + 5 * LAYER + 64


def test_columns_divide_the_matrices_and_not_the_norms() -> None:
    (whole,), (half,) = planned().stages, planned(columns=2).stages
    norms = 5 * 2 * 64 + 64
    assert half.total - norms == (whole.total - norms) // 2


def test_more_columns_than_key_value_heads_share_copies() -> None:
    plan = planned(columns=4)
    # A quarter of the rest, but a half of k and v, which have two heads.
    layer = (2 * 64 * 64 + 3 * 64 * 128) // 4 + (2 * 32 * 64) // 2 + 2 * 64
    assert plan.stages[0].parameters == {
        "embedding": TABLE // 4,
        "layers": 5 * layer,
        "norm": 64,
        "head": TABLE // 4,
    }
    assert plan.copied == ("key and value",)
    assert any("columns share copies of key and value" in note for note in plan.notes)
    assert plan.problems == []


def test_a_tied_table_is_on_the_first_stage_and_the_last() -> None:
    plan = planned(stages=3, tie_word_embeddings=True)
    has = ["embedding" in (stage.parameters or {}) for stage in plan.stages]
    assert has == [True, False, True]
    assert any("tied to the embedding" in note for note in plan.notes)
    one = planned(stages=1, tie_word_embeddings=True)
    assert one.stages[0].total == TABLE + 5 * LAYER + 64
    assert not any("tied" in note for note in one.notes)


def test_what_is_built_and_not_used_is_counted_and_said() -> None:
    plan = planned(stages=3, architectures=["MixtralForCausalLM"], num_local_experts=4)
    assert plan.stages[1].unused == ("embedding", "norm", "head")
    parameters = plan.stages[1].parameters
    assert parameters is not None and parameters["head"] == TABLE
    assert any("builds the head on stage 0, 1 too" in note for note in plan.notes)


# --- what does not fit ------------------------------------------------------------------------


def test_columns_that_do_not_divide_are_a_problem_and_nothing_is_counted() -> None:
    plan = planned(columns=3)
    assert "tensor_parallel_size=3 does not divide the 4 attention heads" in plan.problems
    assert "tensor_parallel_size=3 does not fit the 2 key-value heads" in plan.problems
    assert "tensor_parallel_size=3 does not fit the 128 units of the mlp's width" in plan.problems
    assert any("512 (padded) rows of the vocabulary" in problem for problem in plan.problems)
    assert plan.stages[0].parameters is None
    assert plan.largest is None


def test_an_architecture_that_vllm_runs_whole_is_a_problem_on_stages_only() -> None:
    changes = {"architectures": ["Mamba2ForCausalLM"]}
    (problem,) = planned(stages=2, **changes).problems
    assert "does not implement SupportsPP" in problem
    assert planned(stages=1, **changes).problems == []


def test_an_architecture_that_vllm_dropped_names_the_last_version() -> None:
    (problem,) = planned(architectures=["MPTForCausalLM"]).problems
    assert "0.28.0" in problem


def test_an_unknown_architecture_still_has_its_layers_split() -> None:
    plan = planned(stages=2, architectures=["InventedForCausalLM"])
    assert [stage.layers for stage in plan.stages] == [3, 2]
    assert plan.parameters is None and plan.problems == []
    assert any("no class for InventedForCausalLM" in note for note in plan.notes)
    assert any("weights of InventedForCausalLM are not known" in note for note in plan.notes)
    assert "layers 0-2" in text(plan) and "bytes" not in text(plan)


# --- dtypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "counted", "remark"),
    [
        ("bfloat16", "bfloat16", None),
        ("float16", "float16", None),
        ("float32", "bfloat16", "--dtype float32"),
        (None, "bfloat16", "counted for bfloat16"),
    ],
)
def test_the_dtype_is_the_one_that_vllm_would_take(
    said: str | None, counted: str, remark: str | None
) -> None:
    plan = planned(dtype=said)
    assert plan.dtype == counted
    assert [remark in note for note in plan.notes if "dtype" in note] == ([True] if remark else [])


def test_an_asked_dtype_counts() -> None:
    plan = make(config(), model="m", dtype="float32")
    assert plan.stages[0].bytes == 4 * plan.stages[0].total


# --- finding and reading ----------------------------------------------------------------------


def test_a_folder_and_a_file_are_read_alike(folder: Path) -> None:
    assert read(str(folder)) == read(str(folder / "config.json"))


def test_a_name_is_looked_up_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--some-model"
    written(repository / "snapshots" / "aaa", num_hidden_layers=3)
    written(repository / "snapshots" / "bbb", num_hidden_layers=4)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("aaa\n")
    assert read("someone/some-model").size("layers") == 3
    os.utime(repository / "snapshots/bbb/config.json", (2**31, 2**31))
    (repository / "refs" / "main").unlink()
    assert read("someone/some-model").size("layers") == 4


def test_a_name_that_nobody_holds_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SetupError, match="`hf download someone/some-model config.json`"):
        read("someone/some-model")


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    for word in ("./nowhere", "/no/such/place", "a/b/c", "there.json"):
        with pytest.raises(SetupError, match="no such file or folder"):
            read(word)
    with pytest.raises(SetupError, match="folder without config.json"):
        read(str(tmp_path))
    for source, said in (
        ("weights", "is not JSON"),
        ("[1]", "not a model's configuration"),
        ('{"a": 1}', "not a model's configuration"),
        ('{"architectures": ["LlamaForCausalLM"]}', "has no 'num_hidden_layers' or 'n_layer'"),
        ('{"num_hidden_layers": "8"}', "num_hidden_layers is '8', not a positive number"),
    ):
        path = tmp_path / "config.json"
        path.write_text(source)
        with pytest.raises(SetupError, match=said):
            read(str(path)).size("layers")


def test_a_language_model_within_a_larger_one_is_found(tmp_path: Path) -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": inner | {"model_type": "llama"},
                "vision_config": {"num_hidden_layers": 24},
            }
        )
    )
    plan = make(read(str(path)), model="m", stages=2)
    assert plan.layers == 5
    assert plan.parameters == 2 * 500 * 64 + 5 * LAYER + 64
    assert any("only the language model (text_config)" in note for note in plan.notes)


# --- the command ------------------------------------------------------------------------------


def test_the_text_is_aligned_and_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = command(
        capsys, str(folder), "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"
    )
    assert (status, err) == (0, "")
    assert "LlamaForCausalLM, 5 layers, 249.0 k parameters, bfloat16" in out
    assert "2 stages x 2 columns = 4 ranks" in out
    lines = out.splitlines()
    (head,) = [line for line in lines if line.startswith("stage ")]
    rows = lines[lines.index(head) + 1 :][:2]
    assert rows[0].split()[:4] == ["0", "embedding,", "layers", "0-2"]
    assert rows[1].split()[:6] == ["1", "layers", "3-4,", "norm,", "head", "2"]
    assert rows[0].index("embedding") == rows[1].index("layers") == head.index("holds")
    assert "<- most" in rows[0] and "<- most" not in rows[1]
    assert "VLLM_PP_LAYER_PARTITION='3,2'" in out


def test_json_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, str(folder), "-pp", "2", "--json")
    said = json.loads(out)
    assert status == 0 and said["supported"] is True
    assert [stage["layers"] for stage in said["stages"]] == [[0, 3], [3, 5]]
    assert said["stages"][0]["bytes_per_rank"] == 2 * (TABLE + 3 * LAYER)
    assert said["largest_stage"] == 0


def test_a_layout_that_vllm_would_refuse_has_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = command(capsys, str(folder), "-tp", "3")
    assert status == 1
    assert "vLLM would refuse this" in out


@pytest.mark.parametrize("words", [["-pp", "9"], ["--svg", "/no/such/folder/plan.svg"]])
def test_what_cannot_be_laid_out_has_status_2(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = command(capsys, str(folder), *words)
    assert (status, out) == (2, "")
    assert err.startswith("ppcore plan: ") and "\n" not in err.strip()


def test_a_size_of_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(capsys, "x", "-pp", "0")
    assert "'0' is not a positive number" in capsys.readouterr().err


def test_the_partition_of_the_environment_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,4")
    _, out, _ = command(capsys, str(folder), "-pp", "2")
    assert "layer 0 " in out and "layers 1-4" in out
    assert "the layers follow VLLM_PP_LAYER_PARTITION='1,4'" in out


def test_the_picture_has_a_lane_a_stage_and_a_block_a_layer_in_each_column(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.svg"
    command(capsys, str(folder), "-pp", "2", "-tp", "2", "--svg", str(path))
    root = ElementTree.parse(path).getroot()
    blocks = [element.get("class") for element in root.iter() if element.get("class")]
    assert blocks.count("layers") == 5 * 2
    assert blocks.count("embedding") == blocks.count("norm") == blocks.count("head") == 2
    text = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(line.startswith("stage ") for line in text) == 2
    width = float(root.get("viewBox", "").split()[2])
    for element in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(element.get("x", 0)) + float(element.get("width", 0)) <= width


def test_the_picture_escapes_what_a_configuration_says() -> None:
    ElementTree.fromstring(svg(planned(architectures=["<&>ForCausalLM"])))


def test_it_runs_where_nothing_is_installed(folder: Path) -> None:
    """An isolated interpreter in which every heavy package is missing."""
    script = (
        "import sys\n"
        "for name in 'torch vllm transformers numpy nnsight greenlet'.split():\n"
        "    sys.modules[name] = None\n"
        "from ppcore.cli import main\n"
        f"sys.exit(main(['plan', {str(folder)!r}, '-pp', '2']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 stages" in done.stdout


def test_numbers_are_written_to_be_read() -> None:
    assert [number(n) for n in (999, 1000, 134_515_008, 7 * 10**9)] == [
        "999",
        "1.0 k",
        "134.5 M",
        "7.0 B",
    ]
    assert [size(n) for n in (12, 2048, 10**9)] == ["12 B", "2.0 kB", "1.0 GB"]
