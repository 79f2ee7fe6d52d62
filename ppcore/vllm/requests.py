"""The requests of one rank of a pipelined engine."""

from __future__ import annotations

from nnsight.modeling.vllm.model_runners.GPUModelRunner import Requests

from ..runtime.requests import StagedRequests


class PPRequests(StagedRequests, Requests):
    """nnsight's [`Requests`], whose workers run on every stage."""
