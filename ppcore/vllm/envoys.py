"""Envoys for vLLM's modules: whole tensors under tensor parallelism, any stage under pipelines."""

from __future__ import annotations

from typing import Any

import torch
from nnsight.modeling.vllm.envoys import ParallelEnvoy, parallel_envoys
from nnsight.modeling.vllm.fragments import VLLMFragments

from ..runtime.envoy import PPEnvoy, StagedCall
from ..runtime.stubs import is_stub
from ..runtime.subtree import Shipped


class StagedParallelEnvoy(Shipped, StagedCall, ParallelEnvoy):
    """nnsight's envoy of a tensor-parallel layer, which may be on another stage."""


def staged_envoys() -> dict:
    """The ``envoys`` map of a model that may be split into stages."""
    return {**{kind: StagedParallelEnvoy for kind in parallel_envoys()}, torch.nn.Module: PPEnvoy}


class StagedFragments(VLLMFragments):
    """nnsight's fragments, for the modules that are real on this stage."""

    def instrument(self, envoy: Any) -> None:
        if not is_stub(envoy._module):
            super().instrument(envoy)
