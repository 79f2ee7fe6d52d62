"""`ppcore plan` against the vLLM that is installed: its rule, its registry, its models.

vLLM builds the modules of one rank from the process groups that it finds. With stand-ins for those
groups, a model of any rank is built in this process, without an engine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ppcore.vllm.plan import layer_counts, make, read
from ppcore.vllm.plan.architectures import DROPPED, SPLIT, TRANSFORMERS, WHOLE
from tests.unit.test_plan_weights import ARCHITECTURES, checkpoint_config

pytest.importorskip("vllm")


# --- the rule ---------------------------------------------------------------------------------


def theirs(layers: int, stages: int) -> list[int]:
    from vllm.distributed.utils import get_pp_indices

    bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    return [end - start for start, end in bounds]


def test_the_rule_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for stages in range(1, 17):
        for layers in range(stages, 100):
            assert layer_counts(layers, stages) == theirs(layers, stages), (layers, stages)


@pytest.mark.parametrize("partition", ["1,6,1", "2, 3 ,3", "4,4", "1,2,3", "a,b,c"])
def test_a_partition_is_read_as_vllm_reads_it(
    partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    try:
        expected = theirs(8, 3)
    except ValueError:
        with pytest.raises(Exception, match="VLLM_PP_LAYER_PARTITION"):
            layer_counts(8, 3, partition)
    else:
        assert layer_counts(8, 3, partition) == expected


# --- the registry -----------------------------------------------------------------------------

# In a process of its own: it imports every model that vLLM has.
REGISTRY = """
import json
import vllm.platforms
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_pp

tables = (
    registry._TEXT_GENERATION_MODELS,
    registry._MULTIMODAL_MODELS,
    registry._TRANSFORMERS_SUPPORTED_MODELS,
)
found = {}
for name in {name for table in tables for name in table}:
    try:
        found[name] = bool(supports_pp(registry.ModelRegistry.models[name].load_model_cls()))
    except ImportError:  # it needs a package that is not here
        found[name] = None
print("FOUND", json.dumps([
    found, sorted(registry._TRANSFORMERS_SUPPORTED_MODELS), registry._PREVIOUSLY_SUPPORTED_MODELS
]))
"""


def test_the_tables_are_those_of_vllms_registry() -> None:
    done = subprocess.run([sys.executable, "-c", REGISTRY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found, through_transformers, dropped = json.loads(line.removeprefix("FOUND "))
    assert not SPLIT & WHOLE
    assert found.keys() == SPLIT | WHOLE
    assert sorted(TRANSFORMERS) == through_transformers
    assert dropped == DROPPED
    importable = {name: split for name, split in found.items() if split is not None}
    assert len(importable) > 150  # those that take images need packages that the CPU goes without
    assert {name for name, split in importable.items() if split != (name in SPLIT)} == set()


# --- parameters of each rank ------------------------------------------------------------------


@dataclass
class Group:
    """What vLLM's models ask of a process group."""

    rank_in_group: int
    world_size: int
    first_rank: int = 0

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def device_group(self) -> Group:
        return self

    def size(self) -> int:
        return self.world_size

    def rank(self) -> int:
        return self.rank_in_group


@contextlib.contextmanager
def rank(stage: int, stages: int, columns: int) -> Iterator[None]:
    from vllm.distributed import parallel_state

    groups = {name: Group(0, 1) for name in ("_DP", "_EP", "_DCP", "_PCP")}
    groups |= {"_PP": Group(stage, stages), "_TP": Group(0, columns)}
    with contextlib.ExitStack() as stack:
        for name, group in groups.items():
            stack.enter_context(mock.patch.object(parallel_state, name, group))
        yield


def parameters(folder: Path, stages: int, columns: int) -> list[int]:
    """What vLLM allocates on column 0 of each stage."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.transformers.base import Base

    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 64}
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, **settings)
    engine = config.create_engine_config()
    counts = []
    for stage in range(stages):
        with (
            rank(stage, stages, columns),
            set_current_vllm_config(engine),
            # it would change the class in Transformers' own module, for the rest of the process
            mock.patch.object(Base, "_decorate_for_torch_compile"),
        ):
            model = initialize_model(vllm_config=engine)
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
    return counts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_rank_has_the_parameters_that_vllm_allocates(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checkpoint_config(architecture).save_pretrained(tmp_path)
    for stages, columns in ((3, 1), (2, 2), (3, 4)):
        plan = make(read(str(tmp_path)), model="m", stages=stages, columns=columns)
        if plan.problems:
            assert columns > 1
            continue
        ours = [stage.total for stage in plan.stages]
        assert ours == parameters(tmp_path, stages, columns), (stages, columns)
